//! The host's own kernel as the guest: requests from `/dev/fuse` go through guest memory to the server, as they would
//! from a virtio queue, and back. So a share can be mounted and used without a VM.

use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;

use fuse_backend_rs::transport::{Reader, VirtioFsWriter};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use virtio_queue::desc::{RawDescriptor, split::Descriptor};
use virtio_queue::mock::MockSplitQueue;
use virtiofs::{Server, ShareTree};
use vm_memory::{Address, Bytes, GuestAddress, GuestMemoryMmap};

const REQUEST: u64 = 0x10_0000;
const REPLY: u64 = 0x40_0000;
const MEMORY: usize = 0x80_0000;

/// The largest message: 1 MiB of data and the headers.
const MESSAGE: usize = (1 << 20) + 4096;

/// The descriptor flag of a buffer that the device writes.
const WRITABLE: u16 = 2;

/// A share tree mounted on this host; unmounted when dropped.
pub struct Mounted {
    pub at: PathBuf,
    server: Option<JoinHandle<()>>,
}

impl Mounted {
    /// Mounts; `Err` if this process may not.
    pub fn new(tree: Arc<ShareTree>, at: &Path) -> std::io::Result<Mounted> {
        let device = File::options().read(true).write(true).open("/dev/fuse")?;
        let options = format!(
            "fd={},rootmode=40000,user_id=0,group_id=0,default_permissions,allow_other,max_read=1048576",
            device.as_raw_fd()
        );
        let options = std::ffi::CString::new(options).expect("no NUL");
        mount("shares", at, "fuse", MountFlags::empty(), options.as_c_str())?;
        let server = std::thread::spawn(move || serve(device, &Server::new(tree)));
        Ok(Mounted { at: at.to_owned(), server: Some(server) })
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = unmount(&self.at, UnmountFlags::DETACH);
        if let Some(server) = self.server.take() {
            let _ = server.join();
        }
    }
}

fn serve(mut device: File, server: &Server) {
    let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), MEMORY)]).expect("memory");
    let mut message = vec![0; MESSAGE];
    loop {
        let sent = match device.read(&mut message) {
            Ok(sent) => sent,
            Err(error) if error.kind() == ErrorKind::Interrupted || error.raw_os_error() == Some(libc::ENOENT) => {
                continue;
            }
            // ENODEV: it was unmounted.
            Err(_) => return,
        };
        let written = handle(&memory, server, &message[..sent]);
        memory.read_slice(&mut message[..written], GuestAddress(REPLY)).expect("in memory");
        if written > 0 {
            // ENOENT: the caller was interrupted and is gone.
            let _ = device.write(&message[..written]);
        }
    }
}

fn handle(memory: &GuestMemoryMmap, server: &Server, request: &[u8]) -> usize {
    memory.write_slice(request, GuestAddress(REQUEST)).expect("in memory");
    let chain = [(REQUEST, request.len(), 0), (REPLY, MESSAGE, WRITABLE)]
        .map(|(at, size, flags)| RawDescriptor::from(Descriptor::new(at, size as u32, flags, 0)));
    let queue = MockSplitQueue::new(memory, 16);
    // Each request is the first of its queue.
    memory.write_obj(0u16, queue.avail_addr().unchecked_add(2)).expect("in memory");
    let chain = queue.build_desc_chain(&chain).expect("a chain");
    let reader = Reader::from_descriptor_chain(memory, chain.clone()).expect("readable");
    let writer = VirtioFsWriter::new(memory, chain).expect("writable");
    server.handle_message(reader, writer.into()).expect("this kernel sends well-formed requests")
}
