//! A device without a queue of its own: requests as bytes in guest memory, through the server, as a driver sends them.

#![allow(dead_code, reason = "each test file uses its part")]

use std::fs;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;

use fuse_backend_rs::abi::fuse_abi::{EntryOut, InHeader, InitIn, InitOut, Opcode, OutHeader};
use fuse_backend_rs::transport::{Reader, VirtioFsWriter};
use virtio_queue::desc::{RawDescriptor, split::Descriptor};
use virtio_queue::mock::MockSplitQueue;
use virtiofs::{Limits, Server, ShareTree};
use vm_memory::{Address, ByteValued, Bytes, GuestAddress, GuestMemoryMmap};

/// Where requests and replies lie in guest memory.
const REQUEST: u64 = 0x10_0000;
const REPLY: u64 = 0x40_0000;
const MEMORY: usize = 0x80_0000;

/// The descriptor flag of a buffer that the device writes.
const WRITABLE: u16 = 2;

/// A share tree behind a server.
pub struct Device {
    memory: GuestMemoryMmap,
    server: Server,
    pub tree: Arc<ShareTree>,
}

impl Device {
    pub fn serving(path: &Path) -> Device {
        virtiofs::clear_umask();
        let tree = Arc::new(ShareTree::new(Limits::default()));
        let root: OwnedFd = fs::File::open(path).expect("the shared path exists").into();
        tree.attach("share", root, false).expect("attach");
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), MEMORY)]).expect("memory");
        Device { memory, server: Server::new(Arc::clone(&tree)), tree }
    }

    /// Puts a request into a queue and gives the reply, without its header; `Err` is the guest's error number.
    pub fn ask(&self, opcode: u32, node: u64, body: &[u8], room: usize) -> Result<Vec<u8>, i32> {
        self.ask_as((0, 0), opcode, node, body, room)
    }

    /// The same as a user and group.
    pub fn ask_as(&self, who: (u32, u32), opcode: u32, node: u64, body: &[u8], room: usize) -> Result<Vec<u8>, i32> {
        self.put(who, opcode, node, body, room).expect("a reply")
    }

    /// The same for requests that may have no reply.
    pub fn ask_for_any(&self, opcode: u32, node: u64, body: &[u8], room: usize) -> Option<Result<Vec<u8>, i32>> {
        self.put((0, 0), opcode, node, body, room)
    }

    fn put(
        &self,
        (uid, gid): (u32, u32),
        opcode: u32,
        nodeid: u64,
        body: &[u8],
        room: usize,
    ) -> Option<Result<Vec<u8>, i32>> {
        let len = (size_of::<InHeader>() + body.len()) as u32;
        let header = InHeader { len, opcode, unique: 7, nodeid, uid, gid, ..InHeader::default() };
        let written = self.send(header, body, room + size_of::<OutHeader>()).expect("the request is well-formed");
        if written == 0 {
            return None;
        }
        let out: OutHeader = self.memory.read_obj(GuestAddress(REPLY)).expect("a reply");
        assert_eq!((out.unique, out.len as usize), (7, written));
        let mut reply = vec![0; written - size_of::<OutHeader>()];
        self.memory.read_slice(&mut reply, GuestAddress(REPLY + size_of::<OutHeader>() as u64)).expect("in memory");
        Some(if out.error == 0 { Ok(reply) } else { Err(-out.error) })
    }

    pub fn send(&self, header: InHeader, body: &[u8], room: usize) -> Option<usize> {
        let memory = &self.memory;
        memory.write_obj(header, GuestAddress(REQUEST)).expect("in memory");
        let body_at = REQUEST + size_of::<InHeader>() as u64;
        memory.write_slice(body, GuestAddress(body_at)).expect("in memory");
        let sent = size_of::<InHeader>() + body.len();
        let chain: Vec<RawDescriptor> = [(REQUEST, sent, 0), (REPLY, room, WRITABLE)]
            .into_iter()
            .filter(|(_, size, _)| *size > 0)
            .map(|(at, size, flags)| RawDescriptor::from(Descriptor::new(at, size as u32, flags, 0)))
            .collect();
        let queue = MockSplitQueue::new(memory, 16);
        // Each request is the first of its queue.
        memory.write_obj(0u16, queue.avail_addr().unchecked_add(2)).expect("in memory");
        let chain = queue.build_desc_chain(&chain).expect("a chain");
        let reader = Reader::from_descriptor_chain(memory, chain.clone()).ok()?;
        let writer = VirtioFsWriter::new(memory, chain).ok()?;
        self.server.handle_message(reader, writer.into()).ok()
    }

    pub fn init(&self) -> InitOut {
        let body = InitIn { major: 7, minor: 38, max_readahead: 1 << 17, flags: !(1 << 30) };
        get(&self.ask(Opcode::Init as u32, 0, body.as_slice(), 64).expect("INIT"))
    }

    pub fn lookup(&self, parent: u64, name: &str) -> Result<EntryOut, i32> {
        self.ask(Opcode::Lookup as u32, parent, &with_nul(name), 256).map(|reply| get(&reply))
    }
}

pub fn get<T: ByteValued + Default>(reply: &[u8]) -> T {
    let mut value = T::default();
    value.as_mut_slice().copy_from_slice(&reply[..size_of::<T>()]);
    value
}

pub fn with_nul(name: &str) -> Vec<u8> {
    [name.as_bytes(), b"\0"].concat()
}
