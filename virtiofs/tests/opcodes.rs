//! Every request that Linux 6.12 can send, one by one: the table in `virtiofs/src/server.rs`, held.

mod device;

use std::fs;
use std::os::unix::fs::MetadataExt;

use device::{Device, get, with_nul};
use fuse_backend_rs::abi::fuse_abi::{
    CopyFileRangeIn, CreateIn, EntryOut, FallocateIn, ForgetIn, FsyncIn, GetattrIn, GetxattrIn, LinkIn, LseekIn,
    MkdirIn, MknodIn, OpenIn, OpenOut, ReadIn, ReleaseIn, Rename2In, RenameIn, SetattrIn, SetxattrIn, WriteIn,
    WriteOut,
};
use tempfile::{TempDir, tempdir};
use vm_memory::ByteValued;

/// The highest number in `enum fuse_opcode` of Linux 6.12, and those that were never given out.
const HIGHEST: u32 = 52;
const NEVER_GIVEN_OUT: [u32; 2] = [7, 19];

const TMPFILE: u32 = 51;
const SYNCFS: u32 = 50;
const COPY_FILE_RANGE: u32 = 47;

/// What the table says of an opcode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Answer {
    Served,
    Silent,
    Refused(i32),
}
use Answer::{Refused, Served, Silent};

const UNKNOWN: Answer = Refused(libc::ENOSYS);

/// A share with a file and a directory, both looked up and opened.
struct Stage {
    device: Device,
    dir: TempDir,
    top: u64,
    file: u64,
    fh: u64,
    dir_fh: u64,
}

impl Stage {
    fn set() -> Stage {
        let dir = tempdir().expect("tempdir");
        fs::write(dir.path().join("file"), "content").expect("write");
        fs::write(dir.path().join("victim"), "").expect("write");
        fs::create_dir(dir.path().join("empty")).expect("mkdir");
        std::os::unix::fs::symlink("target", dir.path().join("symlink")).expect("symlink");
        let device = Device::serving(dir.path());
        device.init();
        let top = device.lookup(1, "share").expect("LOOKUP").nodeid;
        let file = device.lookup(top, "file").expect("LOOKUP").nodeid;
        let open = OpenIn { flags: libc::O_RDWR as u32, ..OpenIn::default() };
        let fh = get::<OpenOut>(&device.ask(14, file, open.as_slice(), 64).expect("OPEN")).fh;
        let dir_fh = get::<OpenOut>(&device.ask(27, top, OpenIn::default().as_slice(), 64).expect("OPENDIR")).fh;
        Stage { device, dir, top, file, fh, dir_fh }
    }

    fn nameless(&self, flags: i32) -> (EntryOut, u64) {
        let args = CreateIn { flags: (libc::O_RDWR | flags) as u32, mode: 0o4640, ..CreateIn::default() };
        let body = [args.as_slice(), &with_nul("/")].concat();
        let reply = self.device.ask(TMPFILE, self.top, &body, 512).expect("TMPFILE");
        (get(&reply), get::<OpenOut>(&reply[size_of::<EntryOut>()..]).fh)
    }

    fn link(&self, node: u64, name: &str) -> Result<EntryOut, i32> {
        let body = [LinkIn { oldnodeid: node }.as_slice(), &with_nul(name)].concat();
        self.device.ask(13, self.top, &body, 256).map(|reply| get(&reply))
    }
}

fn bytes(args: &impl ByteValued, names: &[&str]) -> Vec<u8> {
    names.iter().fold(args.as_slice().to_vec(), |sum, name| [sum, with_nul(name)].concat())
}

/// Each opcode with a request that makes sense, and the answer.
fn requests(stage: &Stage) -> Vec<(u32, u64, Vec<u8>, Answer)> {
    let &Stage { ref device, top, file, fh, dir_fh, .. } = stage;
    let symlink = device.lookup(top, "symlink").expect("LOOKUP").nodeid;
    let words = |count: usize| vec![0; count * 8];
    let create = CreateIn { flags: libc::O_RDWR as u32, mode: 0o600, ..CreateIn::default() };
    let read = |fh, size| ReadIn { fh, size, ..ReadIn::default() };
    let copy = CopyFileRangeIn { fh_in: fh, nodeid_out: file, fh_out: fh, offset_out: 7, len: 7, ..Default::default() };
    vec![
        (1, top, with_nul("file"), Served),
        (2, file, bytes(&ForgetIn { nlookup: 0 }, &[]), Silent),
        (3, file, bytes(&GetattrIn::default(), &[]), Served),
        (4, file, bytes(&SetattrIn { valid: 1, mode: 0o600, ..SetattrIn::default() }, &[]), Served),
        (5, symlink, Vec::new(), Served),
        (6, top, [with_nul("made-6"), with_nul("target")].concat(), Served),
        (8, top, bytes(&MknodIn { mode: libc::S_IFIFO | 0o600, ..MknodIn::default() }, &["made-8"]), Served),
        (9, top, bytes(&MkdirIn { mode: 0o700, umask: 0 }, &["made-9"]), Served),
        (10, top, with_nul("victim"), Served),
        (11, top, with_nul("empty"), Served),
        (12, top, bytes(&RenameIn { newdir: top }, &["made-6", "moved-6"]), Served),
        (13, top, bytes(&LinkIn { oldnodeid: file }, &["made-13"]), Served),
        (14, file, bytes(&OpenIn::default(), &[]), Served),
        (15, file, bytes(&read(fh, 64), &[]), Served),
        (16, file, [WriteIn { fh, size: 3, ..WriteIn::default() }.as_slice(), b"abc"].concat(), Served),
        (17, top, Vec::new(), Served),
        (20, file, bytes(&FsyncIn { fh, ..FsyncIn::default() }, &[]), Served),
        (21, file, [bytes(&SetxattrIn { size: 1, flags: 0 }, &["user.x"]), b"1".to_vec()].concat(), Served),
        (22, file, bytes(&GetxattrIn { size: 64, padding: 0 }, &["user.x"]), Served),
        (23, file, bytes(&GetxattrIn { size: 64, padding: 0 }, &[]), Served),
        (24, file, with_nul("user.x"), Served),
        (25, file, words(3), UNKNOWN),
        (27, top, bytes(&OpenIn::default(), &[]), Served),
        (28, top, bytes(&read(dir_fh, 512), &[]), Served),
        (30, top, bytes(&FsyncIn { fh: dir_fh, ..FsyncIn::default() }, &[]), Served),
        (31, file, words(6), UNKNOWN),
        (32, file, words(6), UNKNOWN),
        (33, file, words(6), UNKNOWN),
        (34, file, words(1), UNKNOWN),
        (35, top, bytes(&create, &["made-35"]), Served),
        (36, 0, words(1), Silent),
        (37, file, words(2), UNKNOWN),
        (39, file, words(4), Refused(libc::ENOTTY)),
        (40, file, words(3), UNKNOWN),
        (41, file, words(5), UNKNOWN),
        (42, 0, words(1), Silent),
        (43, file, bytes(&FallocateIn { fh, length: 9, ..FallocateIn::default() }, &[]), Served),
        (44, top, bytes(&read(dir_fh, 512), &[]), Served),
        (45, top, bytes(&Rename2In { newdir: top, flags: 1, padding: 0 }, &["moved-6", "again-6"]), Served),
        (46, file, bytes(&LseekIn { fh, whence: libc::SEEK_DATA as u32, ..LseekIn::default() }, &[]), Served),
        (COPY_FILE_RANGE, file, bytes(&copy, &[]), Served),
        (48, file, words(5), Refused(libc::EINVAL)),
        (49, file, words(3), Refused(libc::EINVAL)),
        (SYNCFS, 1, words(1), Served),
        (TMPFILE, top, bytes(&create, &["/"]), Served),
        (52, file, words(4), UNKNOWN),
        (18, file, bytes(&ReleaseIn { fh, ..ReleaseIn::default() }, &[]), Served),
        (29, top, bytes(&ReleaseIn { fh: dir_fh, ..ReleaseIn::default() }, &[]), Served),
        (38, 0, Vec::new(), Silent),
    ]
}

#[test]
fn every_request_of_linux_is_answered_as_the_table_says() {
    let stage = Stage::set();
    let requests = requests(&stage);
    let mut asked: Vec<u32> = requests.iter().map(|request| request.0).chain(NEVER_GIVEN_OUT).collect();
    asked.push(26); // INIT: what `Device::init` sends
    asked.sort_unstable();
    assert_eq!(asked, (1..=HIGHEST).collect::<Vec<_>>(), "the list is whole");
    for (opcode, node, body, expected) in requests {
        let answer = match stage.device.ask_for_any(opcode, node, &body, 4096) {
            None => Silent,
            Some(Ok(_)) => Served,
            Some(Err(errno)) => Refused(errno),
        };
        assert_eq!(answer, expected, "opcode {opcode}");
    }
}

#[test]
fn requests_of_kernels_to_come_are_unknown() {
    let stage = Stage::set();
    for opcode in NEVER_GIVEN_OUT.into_iter().chain([0]).chain(HIGHEST + 1..300).chain([4096, u32::MAX]) {
        let answer = stage.device.ask_for_any(opcode, stage.file, &[0; 64], 256);
        assert_eq!(answer, Some(Err(libc::ENOSYS)), "opcode {opcode}");
    }
}

#[test]
fn a_nameless_file_is_its_handles_until_it_gets_a_name() {
    let stage = Stage::set();
    let (entry, fh) = stage.nameless(0);
    assert_eq!((entry.attr.nlink, entry.attr.mode), (0, libc::S_IFREG | 0o4640));
    let body = [WriteIn { fh, size: 5, ..WriteIn::default() }.as_slice(), b"hello"].concat();
    stage.device.ask(16, entry.nodeid, &body, 64).expect("WRITE");
    assert!(!stage.dir.path().join("-").exists());

    assert_eq!(stage.link(entry.nodeid, "named").expect("LINK").nodeid, entry.nodeid);
    let release = ReleaseIn { fh, ..ReleaseIn::default() };
    stage.device.ask(18, entry.nodeid, release.as_slice(), 0).expect("RELEASE");
    assert_eq!(fs::read(stage.dir.path().join("named")).expect("on the host"), b"hello");
    assert_eq!(stage.device.lookup(stage.top, "named").expect("LOOKUP").nodeid, entry.nodeid);
    stage.device.ask(3, entry.nodeid, GetattrIn::default().as_slice(), 128).expect("GETATTR by its place");
}

#[test]
fn a_nameless_file_that_is_closed_is_gone() {
    let stage = Stage::set();
    let (nodes, handles) = stage.device.tree.in_use();
    let (entry, fh) = stage.nameless(0);
    let release = ReleaseIn { fh, ..ReleaseIn::default() };
    stage.device.ask(18, entry.nodeid, release.as_slice(), 0).expect("RELEASE");
    assert_eq!(stage.link(entry.nodeid, "late").map(|_| ()), Err(libc::ESTALE));
    stage.device.ask_for_any(2, entry.nodeid, ForgetIn { nlookup: 1 }.as_slice(), 0);
    assert_eq!(stage.device.tree.in_use(), (nodes, handles));
}

#[test]
fn a_nameless_file_that_must_stay_so_gets_no_name() {
    let stage = Stage::set();
    let (entry, _) = stage.nameless(libc::O_EXCL);
    assert_eq!(stage.link(entry.nodeid, "never").map(|_| ()), Err(libc::ENOENT));
}

#[test]
fn a_nameless_file_belongs_to_its_maker() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let stage = Stage::set();
    let args = CreateIn { flags: libc::O_RDWR as u32, mode: 0o4755, ..CreateIn::default() };
    let body = [args.as_slice(), &with_nul("/")].concat();
    let reply = stage.device.ask_as((1000, 1001), TMPFILE, stage.top, &body, 512).expect("TMPFILE");
    let entry: EntryOut = get(&reply);
    stage.link(entry.nodeid, "named").expect("LINK");
    let found = fs::metadata(stage.dir.path().join("named")).expect("on the host");
    assert_eq!((found.uid(), found.gid(), found.mode() & 0o7777), (1000, 1001, 0o4755));
}

#[test]
fn copies_are_made_on_the_host_and_bounded() {
    let stage = Stage::set();
    let mut copy = CopyFileRangeIn {
        fh_in: stage.fh,
        nodeid_out: stage.file,
        fh_out: stage.fh,
        offset_out: 100,
        ..Default::default()
    };
    copy.len = 4;
    copy.offset_in = 3;
    let reply = stage.device.ask(COPY_FILE_RANGE, stage.file, copy.as_slice(), 64).expect("COPY_FILE_RANGE");
    assert_eq!(get::<WriteOut>(&reply).size, 4);
    assert_eq!(fs::read(stage.dir.path().join("file")).expect("on the host")[100..], *b"tent");

    fs::File::create(stage.dir.path().join("big")).expect("create").set_len(64 << 20).expect("grow");
    let big = stage.device.lookup(stage.top, "big").expect("LOOKUP").nodeid;
    let open = stage.device.ask(14, big, OpenIn::default().as_slice(), 64).expect("OPEN");
    let all = CopyFileRangeIn { fh_in: get::<OpenOut>(&open).fh, len: u64::MAX, offset_in: 0, offset_out: 0, ..copy };
    let reply = stage.device.ask(COPY_FILE_RANGE, big, all.as_slice(), 64).expect("COPY_FILE_RANGE");
    assert_eq!(get::<WriteOut>(&reply).size, 8 << 20);

    let bad = CopyFileRangeIn { offset_in: u64::MAX, ..copy };
    assert_eq!(stage.device.ask(COPY_FILE_RANGE, stage.file, bad.as_slice(), 64), Err(libc::EINVAL));
    let bad = CopyFileRangeIn { fh_out: 4711, ..copy };
    assert_eq!(stage.device.ask(COPY_FILE_RANGE, stage.file, bad.as_slice(), 64), Err(libc::EBADF));
}
