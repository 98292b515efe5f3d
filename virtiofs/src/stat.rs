//! What the host says about a file, and how it is told to the guest.
//!
//! Everything goes through statx: one call gives what identifies a file (device, inode, type) and all that FUSE wants
//! of it. The birth time would be a third mark of identity against reused inode numbers, but an overlay takes it from
//! whichever layer holds the file, so it changes at copy-up; it is not used.

use std::ffi::CStr;
use std::os::fd::AsFd;

use fuse_backend_rs::abi::fuse_abi::{Attr, stat64};
use rustix::fs::{AtFlags, Statx, StatxFlags, makedev, statx};
use rustix::io::Errno;

use crate::tree::{FileKey, ShareId, Version};

/// A file's attributes as the host gave them.
pub(crate) struct Stat(Statx);

/// The attributes of an open file, or of one held by an `O_PATH` descriptor.
pub(crate) fn of_descriptor(fd: impl AsFd) -> Result<Stat, Errno> {
    statx(fd, c"", AtFlags::EMPTY_PATH, StatxFlags::BASIC_STATS).map(Stat)
}

/// The attributes of one name in a directory, of a symbolic link itself and not of what it points to.
pub(crate) fn of_name(directory: impl AsFd, name: &CStr) -> Result<Stat, Errno> {
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT;
    statx(directory, name, flags, StatxFlags::BASIC_STATS).map(Stat)
}

impl Stat {
    pub fn dev(&self) -> u64 {
        makedev(self.0.stx_dev_major, self.0.stx_dev_minor)
    }

    pub fn ino(&self) -> u64 {
        self.0.stx_ino
    }

    pub fn uid(&self) -> u32 {
        self.0.stx_uid
    }

    pub fn gid(&self) -> u32 {
        self.0.stx_gid
    }

    /// The permission bits, with setuid, setgid and sticky.
    pub fn permissions(&self) -> u32 {
        u32::from(self.0.stx_mode) & 0o7777
    }

    /// The `S_IFMT` bits.
    pub fn kind(&self) -> u32 {
        u32::from(self.0.stx_mode) & libc::S_IFMT
    }

    pub fn key(&self, share: ShareId) -> FileKey {
        FileKey { share, dev: self.dev(), ino: self.ino() }
    }

    pub fn version(&self) -> Version {
        let modified = &self.0.stx_mtime;
        Version { seconds: modified.tv_sec, nanoseconds: modified.tv_nsec, size: self.0.stx_size }
    }

    /// For FUSE, under the inode number that the guest is to see.
    pub fn to_guest(&self, ino: u64) -> stat64 {
        let s = &self.0;
        stat64::from(Attr {
            ino,
            size: s.stx_size,
            blocks: s.stx_blocks,
            // Times before 1970 are negative; FUSE carries the same 64 bits.
            atime: s.stx_atime.tv_sec as u64,
            mtime: s.stx_mtime.tv_sec as u64,
            ctime: s.stx_ctime.tv_sec as u64,
            atimensec: s.stx_atime.tv_nsec,
            mtimensec: s.stx_mtime.tv_nsec,
            ctimensec: s.stx_ctime.tv_nsec,
            mode: u32::from(s.stx_mode),
            nlink: s.stx_nlink,
            uid: s.stx_uid,
            gid: s.stx_gid,
            // FUSE has 32 bits: the kernel's encoding, whose low half is makedev's.
            rdev: makedev(s.stx_rdev_major, s.stx_rdev_minor) as u32,
            blksize: s.stx_blksize,
            flags: 0,
        })
    }
}
