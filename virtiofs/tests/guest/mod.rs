//! A guest for tests: what a guest's kernel does with a FUSE file system, reduced to what a test wants to say.
#![allow(dead_code, reason = "each test binary uses a part of it")]

use std::collections::HashMap;
use std::ffi::CString;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, Mutex};

use fuse_backend_rs::abi::fuse_abi::{CreateIn, stat64};
use fuse_backend_rs::api::filesystem::{
    Context, Entry, FileSystem, FsOptions, SetattrValid, ZeroCopyReader, ZeroCopyWriter,
};
use fuse_backend_rs::file_buf::FileVolatileSlice;
use fuse_backend_rs::file_traits::FileReadWriteVolatile;
use virtiofs::{Limits, ShareOptions, ShareTree};
use vm_memory::VolatileSlice;

pub const ROOT: u64 = 1;

pub type Errno = i32;
pub type Result<T> = std::result::Result<T, Errno>;

/// A mounted device.
#[derive(Clone)]
pub struct Guest {
    pub fs: Arc<ShareTree>,
    pub ctx: Context,
    /// How often each node was looked up, as a guest's kernel counts it.
    lookups: Arc<Mutex<HashMap<u64, u64>>>,
}

/// One line of a listing.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Listed {
    pub name: String,
    pub kind: u32,
    pub node: u64,
    pub offset: u64,
}

impl Guest {
    /// A device with one share, and the share's node.
    pub fn with_share(path: &Path, limits: Limits, options: ShareOptions) -> (Guest, u64) {
        virtiofs::clear_umask();
        let guest = Guest { fs: Arc::new(ShareTree::new(limits)), ctx: Context::new(), lookups: Arc::default() };
        guest.fs.init(FsOptions::all()).expect("init");
        guest.fs.attach_with("share", a_descriptor_of(path), options).expect("attach");
        let node = guest.lookup(ROOT, "share").expect("the share is in the root directory").inode;
        (guest, node)
    }

    pub fn writable(path: &Path) -> (Guest, u64) {
        Guest::with_share(path, Limits::default(), ShareOptions::default())
    }

    pub fn caller(&self, uid: u32, gid: u32) -> Guest {
        Guest { ctx: Context { uid, gid, pid: 1 }, ..self.clone() }
    }

    pub fn lookup(&self, parent: u64, name: &str) -> Result<Entry> {
        match errno(self.fs.lookup(&self.ctx, parent, &c(name)))? {
            entry if entry.inode == 0 => Err(libc::ENOENT),
            entry => Ok(self.counted(entry)),
        }
    }

    /// Looks up one name after the other.
    pub fn walk(&self, from: u64, path: &str) -> Result<u64> {
        path.split('/').filter(|name| !name.is_empty()).try_fold(from, |at, name| Ok(self.lookup(at, name)?.inode))
    }

    pub fn getattr(&self, node: u64) -> Result<stat64> {
        errno(self.fs.getattr(&self.ctx, node, None)).map(|(attr, _)| attr)
    }

    pub fn setattr(&self, node: u64, valid: SetattrValid, change: impl FnOnce(&mut stat64)) -> Result<stat64> {
        let mut attr = Entry::default().attr;
        change(&mut attr);
        errno(self.fs.setattr(&self.ctx, node, attr, None, valid)).map(|(attr, _)| attr)
    }

    pub fn create(&self, parent: u64, name: &str, mode: u32) -> Result<(u64, u64)> {
        self.create_with(parent, name, mode, libc::O_RDWR)
    }

    pub fn create_with(&self, parent: u64, name: &str, mode: u32, flags: i32) -> Result<(u64, u64)> {
        let args =
            CreateIn { flags: (flags | libc::O_CREAT) as u32, mode: mode | libc::S_IFREG, umask: 0, fuse_flags: 0 };
        let (entry, handle, _, _) = errno(self.fs.create(&self.ctx, parent, &c(name), args))?;
        Ok((self.counted(entry).inode, handle.expect("files have handles")))
    }

    pub fn mkdir(&self, parent: u64, name: &str, mode: u32) -> Result<u64> {
        errno(self.fs.mkdir(&self.ctx, parent, &c(name), mode, 0)).map(|entry| self.counted(entry).inode)
    }

    pub fn mknod(&self, parent: u64, name: &str, mode: u32, rdev: u32) -> Result<u64> {
        errno(self.fs.mknod(&self.ctx, parent, &c(name), mode, rdev, 0)).map(|entry| self.counted(entry).inode)
    }

    pub fn symlink(&self, target: &str, parent: u64, name: &str) -> Result<u64> {
        errno(self.fs.symlink(&self.ctx, &c(target), parent, &c(name))).map(|entry| self.counted(entry).inode)
    }

    pub fn readlink(&self, node: u64) -> Result<String> {
        let target = errno(self.fs.readlink(&self.ctx, node))?;
        Ok(String::from_utf8(target).expect("tests use UTF-8"))
    }

    pub fn link(&self, node: u64, parent: u64, name: &str) -> Result<u64> {
        errno(self.fs.link(&self.ctx, node, parent, &c(name))).map(|entry| self.counted(entry).inode)
    }

    pub fn unlink(&self, parent: u64, name: &str) -> Result<()> {
        errno(self.fs.unlink(&self.ctx, parent, &c(name)))
    }

    pub fn rmdir(&self, parent: u64, name: &str) -> Result<()> {
        errno(self.fs.rmdir(&self.ctx, parent, &c(name)))
    }

    pub fn rename(&self, from: (u64, &str), to: (u64, &str), flags: u32) -> Result<()> {
        errno(self.fs.rename(&self.ctx, from.0, &c(from.1), to.0, &c(to.1), flags))
    }

    pub fn open(&self, node: u64, flags: i32) -> Result<u64> {
        errno(self.fs.open(&self.ctx, node, flags as u32, 0)).map(|(handle, _, _)| handle.expect("files have handles"))
    }

    pub fn release(&self, node: u64, handle: u64) -> Result<()> {
        errno(self.fs.release(&self.ctx, node, 0, handle, false, false, None))
    }

    pub fn read(&self, node: u64, handle: u64, size: u32, offset: u64) -> Result<Vec<u8>> {
        let mut sink = Sink { taken: Vec::new(), room: size as usize };
        errno(self.fs.read(&self.ctx, node, handle, &mut sink, size, offset, None, 0))?;
        Ok(sink.taken)
    }

    pub fn write(&self, node: u64, handle: u64, data: &[u8], offset: u64) -> Result<usize> {
        self.write_with(node, handle, data, offset, 0)
    }

    pub fn write_with(&self, node: u64, handle: u64, data: &[u8], offset: u64, fuse_flags: u32) -> Result<usize> {
        let mut source = Source(data.to_vec());
        let delayed = fuse_flags & 1 != 0;
        let size = data.len() as u32;
        errno(self.fs.write(&self.ctx, node, handle, &mut source, size, offset, None, delayed, 0, fuse_flags))
    }

    /// Everything in a directory, in as many requests of `room` bytes as it takes.
    pub fn list(&self, node: u64, room: u32, plus: bool) -> Result<Vec<Listed>> {
        let handle = errno(self.fs.opendir(&self.ctx, node, 0))?.0.unwrap_or(0);
        let mut all: Vec<Listed> = Vec::new();
        loop {
            let offset = all.last().map_or(0, |last| last.offset);
            let some = self.list_some(node, handle, room, offset, plus)?;
            if some.is_empty() {
                break;
            }
            all.extend(some);
        }
        errno(self.fs.releasedir(&self.ctx, node, 0, handle))?;
        Ok(all)
    }

    pub fn list_some(&self, node: u64, handle: u64, room: u32, offset: u64, plus: bool) -> Result<Vec<Listed>> {
        let mut some = Vec::new();
        let mut used = 0;
        let mut add = |name: &[u8], kind, offset, node| {
            let size = ((24 + name.len() + 7) & !7) + if plus { 128 } else { 0 };
            if used + size > room as usize {
                return Ok(0);
            }
            used += size;
            some.push(Listed { name: String::from_utf8_lossy(name).into_owned(), kind, node, offset });
            Ok(size)
        };
        let listed = if plus {
            let mut tell =
                |d: fuse_backend_rs::api::filesystem::DirEntry, e: Entry| add(d.name, d.type_, d.offset, e.inode);
            self.fs.readdirplus(&self.ctx, node, handle, room, offset, &mut tell)
        } else {
            let mut tell = |d: fuse_backend_rs::api::filesystem::DirEntry| add(d.name, d.type_, d.offset, 0);
            self.fs.readdir(&self.ctx, node, handle, room, offset, &mut tell)
        };
        errno(listed)?;
        for listed in some.iter().filter(|listed| listed.node != 0) {
            self.count(listed.node);
        }
        Ok(some)
    }

    pub fn names(&self, node: u64) -> Result<Vec<String>> {
        let mut names: Vec<String> = self.list(node, 4096, false)?.into_iter().map(|listed| listed.name).collect();
        names.retain(|name| name != "." && name != "..");
        names.sort();
        Ok(names)
    }

    pub fn forget(&self, node: u64, count: u64) {
        self.fs.forget(&self.ctx, node, count);
    }

    /// What a guest's kernel does when it needs the memory: takes back exactly what it counted.
    pub fn forget_everything(&self) {
        let counts = std::mem::take(&mut *self.lookups.lock().expect("no test panics with it"));
        self.fs.batch_forget(&self.ctx, counts.into_iter().collect());
    }

    fn counted(&self, entry: Entry) -> Entry {
        self.count(entry.inode);
        entry
    }

    fn count(&self, node: u64) {
        *self.lookups.lock().expect("no test panics with it").entry(node).or_default() += 1;
    }
}

/// The number in an error, as the guest would see it.
pub fn errno<T>(result: io::Result<T>) -> Result<T> {
    result.map_err(|error| error.raw_os_error().expect("errors carry the kernel's number"))
}

pub fn c(name: &str) -> CString {
    CString::new(name).expect("no NUL in a test's name")
}

pub fn a_descriptor_of(path: &Path) -> OwnedFd {
    use rustix::fs::{Mode, OFlags, open};
    open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).expect("the shared path exists")
}

pub fn we_are_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// What this process has open whose path starts with `prefix`.
pub fn open_below(prefix: &Path) -> usize {
    let fds = std::fs::read_dir("/proc/self/fd").expect("/proc");
    fds.filter_map(|fd| std::fs::read_link(fd.ok()?.path()).ok()).filter(|target| target.starts_with(prefix)).count()
}

struct Sink {
    taken: Vec<u8>,
    room: usize,
}

impl Write for Sink {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        self.taken.extend_from_slice(data);
        Ok(data.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl ZeroCopyWriter for Sink {
    fn write_from(&mut self, file: &mut dyn FileReadWriteVolatile, count: usize, offset: u64) -> io::Result<usize> {
        let mut buffer = vec![0; count];
        // Two buffers, as a request that crosses a page has.
        let (first, second) = buffer.split_at_mut(count / 2);
        let slices = [slice(first), slice(second)];
        let done = file.read_vectored_at_volatile(&slices, offset)?;
        self.taken.extend_from_slice(&buffer[..done]);
        Ok(done)
    }

    fn available_bytes(&self) -> usize {
        self.room - self.taken.len()
    }
}

struct Source(Vec<u8>);

impl Read for Source {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        let count = to.len().min(self.0.len());
        to[..count].copy_from_slice(&self.0[..count]);
        self.0.drain(..count);
        Ok(count)
    }
}

impl ZeroCopyReader for Source {
    fn read_to(&mut self, file: &mut dyn FileReadWriteVolatile, count: usize, offset: u64) -> io::Result<usize> {
        let count = count.min(self.0.len());
        let done = file.write_vectored_at_volatile(&[slice(&mut self.0[..count])], offset)?;
        self.0.drain(..done);
        Ok(done)
    }
}

fn slice(buffer: &mut [u8]) -> FileVolatileSlice<'_> {
    FileVolatileSlice::from_volatile_slice(&VolatileSlice::from(buffer))
}

/// The content of a host file.
pub fn content(path: &Path) -> Vec<u8> {
    let mut content = Vec::new();
    File::open(path).and_then(|mut file| file.read_to_end(&mut content)).expect("readable on the host");
    content
}
