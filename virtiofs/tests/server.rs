//! The whole way: requests as bytes in guest memory, through the server, as the device sends them.

mod device;

use std::fs;

use device::{Device, get, with_nul};
use fuse_backend_rs::abi::fuse_abi::{
    AttrOut, CreateIn, EntryOut, GetattrIn, InHeader, Opcode, OpenIn, OpenOut, ReadIn, ReleaseIn, WriteIn, WriteOut,
};
use proptest::prelude::*;
use vm_memory::ByteValued;

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
