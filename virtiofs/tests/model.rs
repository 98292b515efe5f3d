//! Any sequence of operations through the server gives what the same system calls give on a plain directory.
//!
//! Both sides start empty. After each operation the results are compared, the error numbers included; files that are
//! held while their names change are compared as well. The cache has two descriptors, so that nearly everything is
//! reached by place.

mod guest;

use std::ffi::CString;
use std::os::fd::OwnedFd;
use std::path::Path;

use fuse_backend_rs::api::filesystem::SetattrValid;
use guest::{Guest, Result, a_descriptor_of, c};
use proptest::prelude::*;
use rustix::fs::{AtFlags, FileType, Mode, OFlags, RawDir, RenameFlags, StatxFlags};
use virtiofs::{CachePolicy, Limits, ShareOptions};

/// A name in the top directory, or one below another name.
#[derive(Clone, Debug)]
struct At {
    above: Vec<u8>,
    name: u8,
}

#[derive(Clone, Debug)]
enum Op {
    Create(At, u16),
    Write(At, u16, Vec<u8>),
    Read(At, u16),
    Truncate(At, u16),
    Chmod(At, u16),
    Mkdir(At),
    Mkfifo(At),
    Symlink(At),
    Readlink(At),
    Link(At, At),
    Unlink(At),
    Rmdir(At),
    Rename(At, At, u8),
    List(At),
    Getattr(At),
    Hold(At),
    Held(u8),
}

fn at() -> impl Strategy<Value = At> {
    (proptest::collection::vec(0..3u8, 0..3), 0..3u8).prop_map(|(above, name)| At { above, name })
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        3 => (at(), 0..0o1000u16).prop_map(|(at, mode)| Op::Create(at, mode)),
        2 => (at(), 0..5000u16, proptest::collection::vec(any::<u8>(), 0..40)).prop_map(|(a, o, d)| Op::Write(a, o, d)),
        2 => (at(), 0..5000u16).prop_map(|(at, offset)| Op::Read(at, offset)),
        1 => (at(), 0..9000u16).prop_map(|(at, size)| Op::Truncate(at, size)),
        1 => (at(), 0..0o10000u16).prop_map(|(at, mode)| Op::Chmod(at, mode)),
        4 => at().prop_map(Op::Mkdir),
        1 => at().prop_map(Op::Mkfifo),
        1 => at().prop_map(Op::Symlink),
        1 => at().prop_map(Op::Readlink),
        2 => (at(), at()).prop_map(|(from, to)| Op::Link(from, to)),
        2 => at().prop_map(Op::Unlink),
        1 => at().prop_map(Op::Rmdir),
        4 => (at(), at(), 0..3u8).prop_map(|(from, to, flags)| Op::Rename(from, to, flags)),
        1 => at().prop_map(Op::List),
        2 => at().prop_map(Op::Getattr),
        2 => at().prop_map(Op::Hold),
        2 => any::<u8>().prop_map(Op::Held),
    ]
}

/// What is compared.
#[derive(Debug, PartialEq, Eq)]
enum Outcome {
    Done,
    Data(Vec<u8>),
    Names(Vec<String>),
    /// Mode, links, size; not the size of directories, which is the file system's affair.
    Attributes(u32, u64, i64),
}

fn attributes(mode: u32, links: u64, size: i64) -> Outcome {
    let is_directory = mode & libc::S_IFMT == libc::S_IFDIR;
    Outcome::Attributes(mode, links, if is_directory { 0 } else { size })
}

fn letter(name: u8) -> String {
    char::from(b'a' + name).to_string()
}

/// The guest's side.
struct Served {
    guest: Guest,
    top: u64,
    held: Vec<u64>,
}

impl Served {
    fn parent(&self, at: &At) -> Result<u64> {
        at.above.iter().try_fold(self.top, |node, name| {
            let entry = self.guest.lookup(node, &letter(*name))?;
            // The guest's kernel checks this before it asks us.
            let is_directory = entry.attr.st_mode & libc::S_IFMT == libc::S_IFDIR;
            if is_directory { Ok(entry.inode) } else { Err(libc::ENOTDIR) }
        })
    }

    fn node(&self, at: &At) -> Result<u64> {
        Ok(self.guest.lookup(self.parent(at)?, &letter(at.name))?.inode)
    }

    fn attributes(&self, node: u64) -> Result<Outcome> {
        let attr = self.guest.getattr(node)?;
        Ok(attributes(attr.st_mode, attr.st_nlink, attr.st_size))
    }

    fn with_file<T>(&self, at: &At, act: impl FnOnce(u64, u64) -> Result<T>) -> Result<T> {
        let node = self.node(at)?;
        let handle = self.guest.open(node, libc::O_RDWR)?;
        let done = act(node, handle);
        self.guest.release(node, handle)?;
        done
    }

    fn run(&mut self, op: &Op) -> Result<Outcome> {
        let guest = self.guest.clone();
        match op {
            Op::Create(at, mode) => {
                let flags = libc::O_RDWR | libc::O_EXCL;
                let (node, handle) = guest.create_with(self.parent(at)?, &letter(at.name), (*mode).into(), flags)?;
                guest.release(node, handle)?;
            }
            Op::Write(at, offset, data) => {
                self.with_file(at, |node, handle| guest.write(node, handle, data, (*offset).into()))?;
            }
            Op::Read(at, offset) => {
                return self
                    .with_file(at, |node, handle| guest.read(node, handle, 64, (*offset).into()))
                    .map(Outcome::Data);
            }
            Op::Truncate(at, size) => {
                guest.setattr(self.node(at)?, SetattrValid::SIZE, |attr| attr.st_size = (*size).into())?;
            }
            Op::Chmod(at, mode) => {
                guest.setattr(self.node(at)?, SetattrValid::MODE, |attr| attr.st_mode = (*mode).into())?;
            }
            Op::Mkdir(at) => drop(guest.mkdir(self.parent(at)?, &letter(at.name), 0o755)?),
            Op::Mkfifo(at) => drop(guest.mknod(self.parent(at)?, &letter(at.name), libc::S_IFIFO | 0o644, 0)?),
            Op::Symlink(at) => drop(guest.symlink("target", self.parent(at)?, &letter(at.name))?),
            Op::Readlink(at) => return Ok(Outcome::Data(guest.readlink(self.node(at)?)?.into_bytes())),
            Op::Link(from, to) => {
                let (node, parent) = (self.node(from)?, self.parent(to)?);
                guest.link(node, parent, &letter(to.name))?;
            }
            Op::Unlink(at) => guest.unlink(self.parent(at)?, &letter(at.name))?,
            Op::Rmdir(at) => guest.rmdir(self.parent(at)?, &letter(at.name))?,
            Op::Rename(from, to, flags) => {
                let (old, new) = (self.parent(from)?, self.parent(to)?);
                guest.rename((old, &letter(from.name)), (new, &letter(to.name)), rename_flags(*flags).bits())?;
            }
            Op::List(at) => return guest.names(self.node(at)?).map(Outcome::Names),
            Op::Getattr(at) => return self.attributes(self.node(at)?),
            Op::Hold(at) => self.held.push(self.node(at)?),
            Op::Held(which) => {
                let Some(node) = pick(&self.held, *which) else { return Ok(Outcome::Done) };
                return self.attributes(*node);
            }
        }
        Ok(Outcome::Done)
    }
}

fn pick<T>(held: &[T], which: u8) -> Option<&T> {
    held.get(usize::from(which) % held.len().max(1))
}

fn rename_flags(flags: u8) -> RenameFlags {
    match flags {
        0 => RenameFlags::empty(),
        1 => RenameFlags::NOREPLACE,
        _ => RenameFlags::EXCHANGE,
    }
}

/// The plain side: the same as system calls.
struct Plain {
    top: OwnedFd,
    held: Vec<OwnedFd>,
}

type Sys<T> = rustix::io::Result<T>;

impl Plain {
    fn parent(&self, at: &At) -> Sys<OwnedFd> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::DIRECTORY;
        let top = rustix::fs::openat(&self.top, c".", flags, Mode::empty())?;
        at.above.iter().try_fold(top, |dir, name| rustix::fs::openat(&dir, c(&letter(*name)), flags, Mode::empty()))
    }

    fn find(&self, at: &At) -> Sys<OwnedFd> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW;
        rustix::fs::openat(self.parent(at)?, name(at), flags, Mode::empty())
    }

    fn open(&self, at: &At) -> Sys<OwnedFd> {
        let found = rustix::fs::fstat(self.find(at)?)?;
        if FileType::from_raw_mode(found.st_mode) == FileType::Fifo {
            // The guest's kernel opens fifos itself; the server never does.
            return Err(rustix::io::Errno::NXIO);
        }
        rustix::fs::openat(self.parent(at)?, name(at), OFlags::RDWR | OFlags::NOFOLLOW, Mode::empty())
    }

    fn attributes(&self, fd: &OwnedFd) -> Sys<Outcome> {
        let found = rustix::fs::statx(fd, c"", AtFlags::EMPTY_PATH, StatxFlags::BASIC_STATS)?;
        Ok(attributes(found.stx_mode.into(), found.stx_nlink.into(), found.stx_size as i64))
    }

    fn run(&mut self, op: &Op) -> Sys<Outcome> {
        match op {
            Op::Create(at, mode) => {
                let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW;
                rustix::fs::openat(self.parent(at)?, name(at), flags, Mode::from_raw_mode((*mode).into()))?;
            }
            Op::Write(at, offset, data) => drop(rustix::io::pwrite(self.open(at)?, data, (*offset).into())?),
            Op::Read(at, offset) => {
                let mut data = vec![0; 64];
                let count = rustix::io::pread(self.open(at)?, data.as_mut_slice(), (*offset).into())?;
                data.truncate(count);
                return Ok(Outcome::Data(data));
            }
            Op::Truncate(at, size) => rustix::fs::ftruncate(self.open(at)?, (*size).into())?,
            Op::Chmod(at, mode) => {
                let found = self.find(at)?;
                let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&found));
                rustix::fs::chmod(path, Mode::from_raw_mode((*mode).into()))?;
            }
            Op::Mkdir(at) => rustix::fs::mkdirat(self.parent(at)?, name(at), Mode::from_raw_mode(0o755))?,
            Op::Mkfifo(at) => rustix::fs::mkfifoat(self.parent(at)?, name(at), Mode::from_raw_mode(0o644))?,
            Op::Symlink(at) => rustix::fs::symlinkat(c"target", self.parent(at)?, name(at))?,
            Op::Readlink(at) => {
                // By name: on a descriptor the kernel says ENOENT instead of EINVAL for what is no link.
                self.find(at)?;
                let target = rustix::fs::readlinkat(self.parent(at)?, name(at), Vec::new())?;
                return Ok(Outcome::Data(target.into_bytes()));
            }
            Op::Link(from, to) => {
                self.find(from)?;
                let (old, new) = (self.parent(from)?, self.parent(to)?);
                rustix::fs::linkat(old, name(from), new, name(to), AtFlags::empty())?;
            }
            Op::Unlink(at) => rustix::fs::unlinkat(self.parent(at)?, name(at), AtFlags::empty())?,
            Op::Rmdir(at) => rustix::fs::unlinkat(self.parent(at)?, name(at), AtFlags::REMOVEDIR)?,
            Op::Rename(from, to, flags) => {
                let (old, new) = (self.parent(from)?, self.parent(to)?);
                rustix::fs::renameat_with(old, name(from), new, name(to), rename_flags(*flags))?;
            }
            Op::List(at) => return self.names(at).map(Outcome::Names),
            Op::Getattr(at) => return self.attributes(&self.find(at)?),
            Op::Hold(at) => self.held.push(self.find(at)?),
            Op::Held(which) => {
                let Some(fd) = pick(&self.held, *which) else { return Ok(Outcome::Done) };
                return self.attributes(fd);
            }
        }
        Ok(Outcome::Done)
    }

    fn names(&self, at: &At) -> Sys<Vec<String>> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY;
        let dir = rustix::fs::openat(self.find(at)?, c".", flags, Mode::empty())?;
        let mut buffer = Vec::with_capacity(8192);
        let mut entries = RawDir::new(dir, buffer.spare_capacity_mut());
        let mut names = Vec::new();
        while let Some(entry) = entries.next() {
            names.push(entry?.file_name().to_string_lossy().into_owned());
        }
        names.retain(|name| name != "." && name != "..");
        names.sort();
        Ok(names)
    }
}

fn name(at: &At) -> CString {
    c(&letter(at.name))
}

fn both_sides(served: &Path, plain: &Path, cache: CachePolicy) -> (Served, Plain) {
    let limits = Limits { cached_fds: 2, ..Limits::default() };
    let (guest, top) = Guest::with_share(served, limits, ShareOptions { read_only: false, cache });
    (Served { guest, top, held: Vec::new() }, Plain { top: a_descriptor_of(plain), held: Vec::new() })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_server_does_what_a_plain_directory_does(ops in proptest::collection::vec(op(), 1..80), private: bool) {
        let dir = tempfile::tempdir().expect("tempdir");
        let (here, there) = (dir.path().join("served"), dir.path().join("plain"));
        std::fs::create_dir(&here).expect("mkdir");
        std::fs::create_dir(&there).expect("mkdir");
        let cache = if private { CachePolicy::private() } else { CachePolicy::shared() };
        let (mut served, mut plain) = both_sides(&here, &there, cache);
        for op in &ops {
            let (ours, theirs) = (served.run(op), plain.run(op).map_err(|errno| errno.raw_os_error()));
            prop_assert_eq!(ours, theirs, "{:?}", op);
        }
        served.guest.forget_everything();
        prop_assert_eq!(served.guest.fs.in_use(), (0, 0), "something is still held");
    }
}
