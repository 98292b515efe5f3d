//! Attributes: GETATTR, SETATTR, READLINK, STATFS.
//!
//! SETATTR does its parts in the order in which they do not undo each other: owner (which clears setuid), size (which
//! sets the modification time), mode, times. What has no call for an `O_PATH` descriptor goes through
//! `/proc/self/fd`, where the link leads to that very file whatever its names mean by now.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use fuse_backend_rs::abi::fuse_abi::{stat64, statvfs64};
use fuse_backend_rs::api::filesystem::SetattrValid;
use rustix::fs::{AtFlags, Mode, OFlags, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT};
use rustix::io::Errno;
use rustix::path::DecInt;

use super::create::{group, user};
use crate::ShareTree;
use crate::descriptors::Held;
use crate::handles::Handle;
use crate::share::Share;
use crate::stat::{self, Stat};
use crate::tree::{NodeId, ROOT};

impl ShareTree {
    pub(super) fn attributes(&self, node: NodeId, handle: Option<u64>) -> Result<(stat64, Duration), Errno> {
        if node == ROOT {
            return Ok(self.root_attributes());
        }
        let share = self.share_of(node)?;
        let found = match handle.and_then(|number| self.handles.get(number, node)) {
            Some(handle) => stat::of_descriptor(&handle.file)?,
            None => self.stat(&share, node)?,
        };
        Ok(self.described(&share, &found))
    }

    pub(super) fn set_attributes(
        &self,
        node: NodeId,
        attr: &stat64,
        handle: Option<u64>,
        valid: SetattrValid,
    ) -> Result<(stat64, Duration), Errno> {
        if node == ROOT {
            return Err(Errno::ROFS);
        }
        let share = self.share_of(node)?;
        share.check_writable()?;
        let handle = handle.and_then(|number| self.handles.get(number, node));
        let held = match &handle {
            Some(handle) => Arc::clone(&handle.file),
            None => self.reach(&share, node)?,
        };
        if valid.intersects(SetattrValid::UID | SetattrValid::GID) {
            let uid = valid.contains(SetattrValid::UID).then(|| user(attr.st_uid)).transpose()?;
            let gid = valid.contains(SetattrValid::GID).then(|| group(attr.st_gid)).transpose()?;
            rustix::fs::chownat(&held, c"", uid, gid, AtFlags::EMPTY_PATH)?;
        }
        if valid.contains(SetattrValid::SIZE) {
            self.set_size(node, &held, handle.as_deref(), attr.st_size)?;
            if valid.contains(SetattrValid::KILL_SUIDGID) {
                self.drop_set_ids(&held)?;
            }
        }
        if valid.contains(SetattrValid::MODE) {
            self.set_mode(&held, attr.st_mode)?;
        }
        if let Some(times) = times(attr, valid) {
            rustix::fs::utimensat(&held, c"", &times, AtFlags::EMPTY_PATH)?;
        }
        Ok(self.described(&share, &stat::of_descriptor(&held)?))
    }

    pub(super) fn set_mode(&self, held: &OwnedFd, mode: u32) -> Result<(), Errno> {
        let mode = Mode::from_raw_mode(mode & 0o7777);
        rustix::fs::chmodat(self.proc_fds()?, DecInt::from_fd(held), mode, AtFlags::empty())
    }

    /// Clears setuid, and setgid where the group may execute (elsewhere it marks mandatory locking): what the kernel
    /// does at a write by anyone but root, and this process is root. `security.capability` the kernel removes itself.
    pub(super) fn drop_set_ids(&self, file: &OwnedFd) -> Result<(), Errno> {
        let mode = stat::of_descriptor(file)?.permissions();
        let dropped = libc::S_ISUID | if mode & libc::S_IXGRP != 0 { libc::S_ISGID } else { 0 };
        if mode & dropped == 0 { Ok(()) } else { self.set_mode(file, mode & !dropped) }
    }

    fn set_size(&self, node: NodeId, held: &Held, handle: Option<&Handle>, size: i64) -> Result<(), Errno> {
        let size = u64::try_from(size).map_err(|_| Errno::INVAL)?;
        let opened;
        let file: &OwnedFd = match handle.filter(|handle| handle.writable) {
            Some(handle) => &handle.file,
            None => {
                opened = self.reopen_regular(node, held, OFlags::WRONLY)?;
                &opened
            }
        };
        rustix::fs::ftruncate(file, size)
    }

    /// Opens a node for reading or writing if it is a regular file. Anything else has no content that is the host's
    /// business: opening a fifo would wait, opening a device would be the host's device and not the guest's.
    ///
    /// The tree says which it is: `held` was compared with it when it was opened, and a file's type never changes.
    pub(super) fn reopen_regular(&self, node: NodeId, held: &OwnedFd, flags: OFlags) -> Result<OwnedFd, Errno> {
        let kind = self.tree().get(node).ok_or(Errno::STALE)?.kind;
        match kind {
            libc::S_IFREG => self.reopen(held, flags),
            libc::S_IFDIR => Err(Errno::ISDIR),
            libc::S_IFLNK => Err(Errno::LOOP),
            _ => Err(Errno::NXIO),
        }
    }

    pub(super) fn link_target(&self, node: NodeId) -> Result<Vec<u8>, Errno> {
        if node == ROOT {
            return Err(Errno::INVAL);
        }
        let share = self.share_of(node)?;
        let held = self.reach(&share, node)?;
        let target = rustix::fs::readlinkat(&held, c"", Vec::new()).map(std::ffi::CString::into_bytes);
        // What the kernel says of a descriptor that is no link, where of a name it would say EINVAL.
        target.map_err(|errno| if errno == Errno::NOENT { Errno::INVAL } else { errno })
    }

    pub(super) fn sizes(&self, node: NodeId) -> io::Result<statvfs64> {
        if node == ROOT {
            // The root is on no disk. Whoever asks here asks for the first share's.
            let first = self.shares().after(0).ok_or(Errno::NOSYS)?;
            return crate::sys::statvfs(&first.root);
        }
        let share = self.share_of(node)?;
        crate::sys::statvfs(&*self.reach(&share, node)?)
    }

    fn described(&self, share: &Share, found: &Stat) -> (stat64, Duration) {
        (found.to_guest(self.guest_ino(found.dev(), found.ino())), share.options.cache.attributes)
    }
}

fn times(attr: &stat64, valid: SetattrValid) -> Option<Timestamps> {
    let pick = |given: SetattrValid, now: SetattrValid, seconds: i64, nanoseconds: i64| {
        let (tv_sec, tv_nsec) = if valid.contains(now) {
            (0, UTIME_NOW)
        } else if valid.contains(given) {
            (seconds, nanoseconds)
        } else {
            (0, UTIME_OMIT)
        };
        Timespec { tv_sec, tv_nsec }
    };
    let last_access = pick(SetattrValid::ATIME, SetattrValid::ATIME_NOW, attr.st_atime, attr.st_atime_nsec);
    let last_modification = pick(SetattrValid::MTIME, SetattrValid::MTIME_NOW, attr.st_mtime, attr.st_mtime_nsec);
    let any = last_access.tv_nsec != UTIME_OMIT || last_modification.tv_nsec != UTIME_OMIT;
    any.then_some(Timestamps { last_access, last_modification })
}
