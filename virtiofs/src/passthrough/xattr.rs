//! Extended attributes: carried as they are, in every namespace that the kernel lets this process touch.
//!
//! They are reached as `/proc/self/fd/N`, which leads to exactly the file that the descriptor holds, symbolic links
//! and device nodes included, and opens nothing.
//!
//! Sizes that a guest asks for are capped at what the kernel itself allows, 64 KiB: more could never be filled.

use std::ffi::CStr;
use std::io::Write;

use fuse_backend_rs::api::filesystem::{GetxattrReply, ListxattrReply};
use rustix::fs::XattrFlags;
use rustix::io::Errno;

use crate::ShareTree;
use crate::descriptors::Held;
use crate::tree::{NodeId, ROOT};

/// XATTR_SIZE_MAX and XATTR_LIST_MAX of the kernel.
const LARGEST: usize = 64 << 10;

/// A descriptor together with the path that leads to its file.
struct Target {
    /// Holds the file open for as long as the path is used.
    _held: Held,
    path: [u8; Self::LENGTH],
}

impl Target {
    /// `/proc/self/fd/` and ten digits fit, with the NUL.
    const LENGTH: usize = 32;

    fn new(held: Held) -> Target {
        use std::os::fd::AsRawFd;
        let mut path = [0; Self::LENGTH];
        // Cannot fail: the longest path has 24 bytes.
        let _ = write!(&mut path[..Self::LENGTH - 1], "/proc/self/fd/{}", held.as_raw_fd());
        Target { _held: held, path }
    }

    fn path(&self) -> &CStr {
        CStr::from_bytes_until_nul(&self.path).unwrap_or(c"")
    }
}

impl ShareTree {
    pub(super) fn set_xattr(&self, node: NodeId, name: &CStr, value: &[u8], flags: u32) -> Result<(), Errno> {
        let flags = XattrFlags::from_bits(flags).ok_or(Errno::INVAL)?;
        let target = self.xattr_target(node, Access::Write)?;
        rustix::fs::setxattr(target.path(), name, value, flags)
    }

    pub(super) fn remove_xattr(&self, node: NodeId, name: &CStr) -> Result<(), Errno> {
        let target = self.xattr_target(node, Access::Write)?;
        rustix::fs::removexattr(target.path(), name)
    }

    pub(super) fn get_xattr(&self, node: NodeId, name: &CStr, room: u32) -> Result<GetxattrReply, Errno> {
        let target = self.xattr_target(node, Access::Read)?;
        if room == 0 {
            let size = rustix::fs::getxattr_query(target.path(), name)?;
            return Ok(GetxattrReply::Count(size as u32));
        }
        let mut value = vec![0; LARGEST.min(room as usize)];
        let size = rustix::fs::getxattr(target.path(), name, value.as_mut_slice())?;
        value.truncate(size);
        Ok(GetxattrReply::Value(value))
    }

    pub(super) fn list_xattrs(&self, node: NodeId, room: u32) -> Result<ListxattrReply, Errno> {
        let target = self.xattr_target(node, Access::Read)?;
        if room == 0 {
            let size = rustix::fs::listxattr_query(target.path())?;
            return Ok(ListxattrReply::Count(size as u32));
        }
        let mut names = vec![0u8; LARGEST.min(room as usize)];
        let size = rustix::fs::listxattr(target.path(), names.as_mut_slice())?;
        names.truncate(size);
        Ok(ListxattrReply::Names(names))
    }

    fn xattr_target(&self, node: NodeId, access: Access) -> Result<Target, Errno> {
        if node == ROOT {
            return Err(if access == Access::Write { Errno::ROFS } else { Errno::NODATA });
        }
        let share = self.share_of(node)?;
        if access == Access::Write {
            share.check_writable()?;
        }
        Ok(Target::new(self.reach(&share, node)?))
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Access {
    Read,
    Write,
}
