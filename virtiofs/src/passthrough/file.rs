//! Open files: OPEN, READ, WRITE, FSYNC, FALLOCATE, LSEEK, RELEASE.
//!
//! A read or a write is one table lookup and one `preadv` or `pwritev` straight between the file and guest memory.
//!
//! Pages of a mapping are written back through whichever handle the guest's kernel finds. If that one was opened
//! O_APPEND the host would ignore the offset and the file would grow; such writes therefore go through a second
//! descriptor without O_APPEND.

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
