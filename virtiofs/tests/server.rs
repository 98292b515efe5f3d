//! The whole way: requests as bytes in guest memory, through fuse-backend-rs's server, as the device sends them.

use std::fs;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;

use fuse_backend_rs::abi::fuse_abi::{
    AttrOut, CreateIn, EntryOut, GetattrIn, InHeader, InitIn, InitOut, Opcode, OpenIn, OpenOut, OutHeader, ReadIn,
    ReleaseIn, WriteIn, WriteOut,
};
use fuse_backend_rs::api::server::Server;
use fuse_backend_rs::transport::{Reader, VirtioFsWriter};
use proptest::prelude::*;
use virtio_queue::desc::{RawDescriptor, split::Descriptor};
use virtio_queue::mock::MockSplitQueue;
use virtiofs::{Limits, ShareTree};
use vm_memory::{Address, ByteValued, Bytes, GuestAddress, GuestMemoryMmap};

/// Where requests and replies lie in guest memory.
const REQUEST: u64 = 0x10_0000;
const REPLY: u64 = 0x40_0000;
const MEMORY: usize = 0x80_0000;

/// The descriptor flag of a buffer that the device writes.
const WRITABLE: u16 = 2;

struct Device {
    memory: GuestMemoryMmap,
    server: Server<Arc<ShareTree>>,
    tree: Arc<ShareTree>,
}

impl Device {
    fn serving(path: &Path) -> Device {
        virtiofs::clear_umask();
        let tree = Arc::new(ShareTree::new(Limits::default()));
        let root: OwnedFd = fs::File::open(path).expect("the shared path exists").into();
        tree.attach("share", root, false).expect("attach");
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), MEMORY)]).expect("memory");
        Device { memory, server: Server::new(Arc::clone(&tree)), tree }
    }

    /// Puts a request into a queue and gives the reply, without its header; `Err` is the guest's error number.
    fn ask(&self, opcode: u32, node: u64, body: &[u8], room: usize) -> Result<Vec<u8>, i32> {
        let header = InHeader {
            len: (size_of::<InHeader>() + body.len()) as u32,
            opcode,
            unique: 7,
            nodeid: node,
            ..InHeader::default()
        };
        let written = self.send(header, body, room + size_of::<OutHeader>()).expect("the request is well-formed");
        let out: OutHeader = self.memory.read_obj(GuestAddress(REPLY)).expect("a reply");
        assert_eq!((out.unique, out.len as usize), (7, written));
        let mut reply = vec![0; written - size_of::<OutHeader>()];
        self.memory.read_slice(&mut reply, GuestAddress(REPLY + size_of::<OutHeader>() as u64)).expect("in memory");
        if out.error == 0 { Ok(reply) } else { Err(-out.error) }
    }

    fn send(&self, header: InHeader, body: &[u8], room: usize) -> Option<usize> {
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
        self.server.handle_message(reader, writer.into(), None, None).ok()
    }

    fn init(&self) -> InitOut {
        let body = InitIn { major: 7, minor: 38, max_readahead: 1 << 17, flags: !(1 << 30) };
        get(&self.ask(Opcode::Init as u32, 0, body.as_slice(), 64).expect("INIT"))
    }

    fn lookup(&self, parent: u64, name: &str) -> Result<EntryOut, i32> {
        self.ask(Opcode::Lookup as u32, parent, &with_nul(name), 256).map(|reply| get(&reply))
    }
}

fn get<T: ByteValued + Default>(reply: &[u8]) -> T {
    let mut value = T::default();
    value.as_mut_slice().copy_from_slice(&reply[..size_of::<T>()]);
    value
}

fn with_nul(name: &str) -> Vec<u8> {
    [name.as_bytes(), b"\0"].concat()
}

#[test]
fn a_guest_mounts_writes_and_reads() {
    let dir = tempfile::tempdir().expect("tempdir");
    let device = Device::serving(dir.path());
    let init = device.init();
    assert_eq!((init.max_write, init.max_pages), (1 << 20, 256));

    let share = device.lookup(1, "share").expect("LOOKUP");
    let args = CreateIn { flags: libc::O_RDWR as u32, mode: libc::S_IFREG | 0o666, umask: 0o022, fuse_flags: 0 };
    let body = [args.as_slice(), &with_nul("hello")].concat();
    let reply = device.ask(Opcode::Create as u32, share.nodeid, &body, 512).expect("CREATE");
    let entry: EntryOut = get(&reply);
    let open: OpenOut = get(&reply[size_of::<EntryOut>()..]);
    assert_eq!(entry.attr.mode, libc::S_IFREG | 0o644);

    let data: Vec<u8> = (0..100_000u32).map(|at| at as u8).collect();
    let args = WriteIn { fh: open.fh, offset: 3, size: data.len() as u32, ..WriteIn::default() };
    let body = [args.as_slice(), &data].concat();
    let wrote: WriteOut = get(&device.ask(Opcode::Write as u32, entry.nodeid, &body, 64).expect("WRITE"));
    assert_eq!(wrote.size as usize, data.len());

    let args = ReadIn { fh: open.fh, offset: 3, size: 1 << 20, ..ReadIn::default() };
    let read = device.ask(Opcode::Read as u32, entry.nodeid, args.as_slice(), 1 << 20).expect("READ");
    assert_eq!(read, data);
    let reply = device.ask(Opcode::Getattr as u32, entry.nodeid, GetattrIn::default().as_slice(), 128);
    let attr: AttrOut = get(&reply.expect("GETATTR"));
    assert_eq!(attr.attr.size, 100_003);

    let args = ReleaseIn { fh: open.fh, ..ReleaseIn::default() };
    device.ask(Opcode::Release as u32, entry.nodeid, args.as_slice(), 0).expect("RELEASE");
    assert_eq!(fs::metadata(dir.path().join("hello")).expect("on the host").len(), 100_003);
    assert_eq!(device.tree.in_use(), (2, 0));
}

#[test]
fn a_listing_with_attributes_fills_the_guests_buffer_and_goes_on() {
    let dir = tempfile::tempdir().expect("tempdir");
    for at in 0..40 {
        fs::write(dir.path().join(format!("file-{at:02}")), "").expect("write");
    }
    let device = Device::serving(dir.path());
    device.init();
    let share = device.lookup(1, "share").expect("LOOKUP").nodeid;
    let open = device.ask(Opcode::Opendir as u32, share, OpenIn::default().as_slice(), 64).expect("OPENDIR");
    let fh = get::<OpenOut>(&open).fh;
    let (mut offset, mut names, mut requests) = (0, Vec::new(), 0);
    loop {
        let args = ReadIn { fh, offset, size: 4096, ..ReadIn::default() };
        let reply = device.ask(Opcode::Readdirplus as u32, share, args.as_slice(), 4096).expect("READDIRPLUS");
        if reply.is_empty() {
            break;
        }
        requests += 1;
        let mut rest = &reply[..];
        while !rest.is_empty() {
            let dirent = &rest[128..];
            offset = get(&dirent[8..16]);
            let length: u32 = get(&dirent[16..20]);
            names.push(String::from_utf8_lossy(&dirent[24..24 + length as usize]).into_owned());
            rest = &dirent[(24 + length as usize + 7) & !7..];
        }
    }
    assert_eq!(names.len(), 42);
    assert!(requests > 1);
    assert_eq!(device.tree.in_use(), (41, 1));
}

#[test]
fn requests_without_room_for_a_reply_do_no_harm() {
    let dir = tempfile::tempdir().expect("tempdir");
    let device = Device::serving(dir.path());
    device.init();
    let header = InHeader { len: 41 + 6, opcode: Opcode::Lookup as u32, nodeid: 1, ..InHeader::default() };
    assert_eq!(device.send(header, b"share\0", 0), None);
    assert_eq!(device.send(header, b"share\0", 15), None);
    assert!(device.lookup(1, "share").is_ok());
}

fn body() -> impl Strategy<Value = Vec<u8>> {
    let number = prop_oneof![
        4 => 0..6u64,
        1 => Just(u64::MAX),
        1 => Just(i64::MAX as u64),
        1 => any::<u64>(),
    ];
    let words = proptest::collection::vec(number, 0..12);
    let name = prop_oneof!["", "[a-c]", "share", r"\.\.", "a/b", "user\\.x"];
    (words, name, proptest::collection::vec(any::<u8>(), 0..30), 0..3usize).prop_map(|(words, name, noise, how)| {
        let fixed: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        match how {
            0 => with_nul(&name),
            1 => [fixed, with_nul(&name), with_nul("c")].concat(),
            _ => [fixed, noise].concat(),
        }
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    /// Opcodes, numbers and bodies as they come: nothing panics, and the device still works afterwards.
    #[test]
    fn no_sequence_of_bytes_stops_the_server(
        requests in proptest::collection::vec((0..60u32, 0..6u64, body(), -60..60i32, 0..6000usize), 1..60)
    ) {
        let dir = tempfile::tempdir().expect("tempdir");
        fs::write(dir.path().join("a"), "content").expect("write");
        fs::create_dir(dir.path().join("b")).expect("mkdir");
        let device = Device::serving(dir.path());
        device.init();
        let share = device.lookup(1, "share").expect("LOOKUP").nodeid;
        let _ = device.lookup(share, "a");
        for (opcode, node, body, lie, room) in requests {
            let honest = (size_of::<InHeader>() + body.len()) as i32;
            let len = honest.saturating_add(if lie.abs() > 50 { lie } else { 0 }).max(0) as u32;
            let header = InHeader { len, opcode, nodeid: node, ..InHeader::default() };
            device.send(header, &body, room);
        }
        device.init();
        prop_assert_eq!(device.tree.in_use(), (0, 0));
        prop_assert!(device.lookup(1, "share").is_ok());
    }
}
