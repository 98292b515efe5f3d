//! Open files: OPEN, READ, WRITE, COPY_FILE_RANGE, FSYNC, SYNCFS, FALLOCATE, LSEEK, RELEASE.
//!
//! A read or a write is one table lookup and one `preadv` or `pwritev` straight between the file and guest memory.
//!
//! Pages of a mapping are written back through whichever handle the guest's kernel finds. If that one was opened
//! O_APPEND the host would ignore the offset and the file would grow; such writes therefore go through a second
//! descriptor without O_APPEND.

use std::collections::HashSet;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use fuse_backend_rs::abi::fuse_abi::{FOPEN_IN_KILL_SUIDGID, WRITE_KILL_PRIV};
use fuse_backend_rs::api::filesystem::{OpenOptions, ZeroCopyReader, ZeroCopyWriter};
use rustix::fs::{FallocateFlags, OFlags, SeekFrom};
use rustix::io::Errno;

use crate::ShareTree;
use crate::handles::Handle;
use crate::share::Share;
use crate::stat;
use crate::sys::Positioned;
use crate::tree::{NodeId, ROOT};

/// Who wrote: a program, at an offset that its kernel took from the file's state, or the page cache, to a place that
/// it knows.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum WrittenBy {
    Caller,
    PageCache,
}

/// A WRITE request without its data.
pub(super) struct Write {
    pub size: u32,
    pub offset: u64,
    pub from: WrittenBy,
    pub fuse_flags: u32,
}

/// What one COPY_FILE_RANGE copies at most. Programs ask again for the rest; in between others are served.
const COPIED_AT_ONCE: u64 = 8 << 20;

impl ShareTree {
    pub(super) fn open_file(&self, node: NodeId, flags: u32, fuse_flags: u32) -> Result<(u64, OpenOptions), Errno> {
        if node == ROOT {
            return Err(Errno::ISDIR);
        }
        let share = self.share_of(node)?;
        let wanted = usable_flags(flags);
        if wanted.intersects(OFlags::WRONLY | OFlags::RDWR | OFlags::TRUNC) {
            share.check_writable()?;
        }
        self.handles.check_room()?;
        let held = self.reach(&share, node)?;
        let file = self.reopen_regular(node, &held, wanted)?;
        if wanted.contains(OFlags::TRUNC) && fuse_flags & FOPEN_IN_KILL_SUIDGID != 0 {
            self.drop_set_ids(&file)?;
        }
        let unchanged = share.options.cache.exclusive || self.is_as_opened_before(node, &file)?;
        let number = self.keep_open(&share, node, file, flags)?;
        Ok((number, open_options(&share, unchanged)))
    }

    /// True if the file's data look as they did when the guest last opened it: its cached pages are still good.
    fn is_as_opened_before(&self, node: NodeId, file: &OwnedFd) -> Result<bool, Errno> {
        let version = stat::of_descriptor(file)?.version();
        Ok(self.tree().opened(node, version))
    }

    pub(super) fn read_file(
        &self,
        node: NodeId,
        number: u64,
        to: &mut dyn ZeroCopyWriter,
        size: u32,
        offset: u64,
    ) -> io::Result<usize> {
        let handle = self.handle(node, number)?;
        // A guest may ask for more than it gave room for.
        let count = to.available_bytes().min(size as usize);
        to.write_from(&mut Positioned::new(&handle.file), count, offset)
    }

    pub(super) fn write_file(
        &self,
        node: NodeId,
        number: u64,
        from: &mut dyn ZeroCopyReader,
        write: Write,
    ) -> io::Result<usize> {
        let handle = self.handle(node, number)?;
        let file: &OwnedFd = match write.from {
            WrittenBy::PageCache if handle.append => self.without_append(&handle)?,
            _ => &handle.file,
        };
        let count = from.read_to(&mut Positioned::new(file), write.size as usize, write.offset)?;
        if write.fuse_flags & WRITE_KILL_PRIV != 0 {
            self.drop_set_ids(file)?;
        }
        Ok(count)
    }

    fn without_append<'a>(&self, handle: &'a Handle) -> Result<&'a OwnedFd, Errno> {
        if let Some(file) = handle.at_offset.get() {
            return Ok(file);
        }
        let file = self.reopen(&handle.file, OFlags::WRONLY)?;
        Ok(handle.at_offset.get_or_init(|| file))
    }

    /// Copies between two open files, each given by node, handle and offset. EXDEV where the host cannot, upon which
    /// the guest's kernel reads and writes.
    pub(crate) fn copy_range(
        &self,
        from: (NodeId, u64, u64),
        to: (NodeId, u64, u64),
        length: u64,
    ) -> Result<u32, Errno> {
        let (source, target) = (self.handle(from.0, from.1)?, self.handle(to.0, to.1)?);
        let (mut read_at, mut write_at) = (from.2, to.2);
        // A negative offset must not reach the kernel.
        i64::try_from(read_at.max(write_at)).map_err(|_| Errno::INVAL)?;
        let length = length.min(COPIED_AT_ONCE) as usize;
        let (source, target) = (&source.file, &target.file);
        let copied = rustix::fs::copy_file_range(source, Some(&mut read_at), target, Some(&mut write_at), length)?;
        Ok(copied as u32)
    }

    /// What was written to any share is on the host's disks when this returns. The first failure is told, the rest is
    /// synced nevertheless.
    pub(crate) fn sync_shares(&self) -> Result<(), Errno> {
        let (mut last, mut done, mut outcome) = (0, HashSet::new(), Ok(()));
        loop {
            let Some(share) = self.shares().after(last) else { return outcome };
            last = share.id;
            let has_content = matches!(share.kind, libc::S_IFDIR | libc::S_IFREG);
            if share.options.read_only || !has_content || !done.insert(share.key.dev) {
                continue;
            }
            // What was attached may be a path only, and that cannot be synced.
            let synced = self.reopen(&share.root, OFlags::RDONLY).and_then(rustix::fs::syncfs);
            outcome = outcome.and(synced);
        }
    }

    pub(super) fn sync(&self, node: NodeId, number: u64, data_only: bool) -> Result<(), Errno> {
        if node == ROOT {
            return Ok(());
        }
        let handle = self.handle(node, number)?;
        if data_only { rustix::fs::fdatasync(&handle.file) } else { rustix::fs::fsync(&handle.file) }
    }

    pub(super) fn allocate(&self, node: NodeId, number: u64, mode: u32, offset: u64, length: u64) -> Result<(), Errno> {
        let handle = self.handle(node, number)?;
        let mode = FallocateFlags::from_bits(mode).ok_or(Errno::OPNOTSUPP)?;
        rustix::fs::fallocate(&handle.file, mode, offset, length)
    }

    /// Only SEEK_DATA and SEEK_HOLE come here; the guest's kernel keeps positions itself.
    pub(super) fn seek(&self, node: NodeId, number: u64, offset: u64, whence: u32) -> Result<u64, Errno> {
        let handle = self.handle(node, number)?;
        let to = match i32::try_from(whence) {
            Ok(libc::SEEK_DATA) => SeekFrom::Data(offset),
            Ok(libc::SEEK_HOLE) => SeekFrom::Hole(offset),
            _ => return Err(Errno::INVAL),
        };
        rustix::fs::seek(&handle.file, to)
    }

    pub(super) fn close(&self, node: NodeId, number: u64) -> Result<(), Errno> {
        if node == ROOT {
            return Ok(());
        }
        let handle = self.handles.remove(number, node).ok_or_else(|| self.why_no_handle(node))?;
        self.descriptors.closed(node, number);
        drop(handle);
        Ok(())
    }

    pub(super) fn handle(&self, node: NodeId, number: u64) -> Result<Arc<Handle>, Errno> {
        self.handles.get(number, node).ok_or_else(|| self.why_no_handle(node))
    }

    /// ESTALE where a handle went with its share, EBADF where there never was one.
    fn why_no_handle(&self, node: NodeId) -> Errno {
        match self.share_of(node) {
            Ok(_) => Errno::BADF,
            Err(errno) => errno,
        }
    }
}

/// What of a guest's open flags is for the host: how to access, append, truncate, and how soon it must be on disk.
/// O_DIRECT is not: it bypasses the guest's page cache, for which the request itself is enough, and would impose the
/// host's alignment rules on guest buffers.
pub(super) fn usable_flags(flags: u32) -> OFlags {
    let kept = OFlags::RWMODE | OFlags::APPEND | OFlags::TRUNC | OFlags::SYNC | OFlags::DSYNC;
    OFlags::from_bits_retain(flags) & kept
}

/// What the guest may do with its page cache.
pub(super) fn open_options(share: &Share, unchanged: bool) -> OpenOptions {
    if unchanged || share.options.cache.exclusive { OpenOptions::KEEP_CACHE } else { OpenOptions::empty() }
}
