//! The one home of `unsafe` in this crate: `mount_setattr`, which no safe wrapper offers.
#![expect(unsafe_code)]

use std::{
    io,
    os::fd::{AsRawFd, BorrowedFd},
};

use crate::Access;

/// Restricts a detached mount: no devices, no set-user-id programs, no programs at all (guests run theirs by their own
/// kernel), and no writes if it is read-only.
pub fn restrict(mount: BorrowedFd<'_>, access: Access) -> io::Result<()> {
    let mut set = libc::MOUNT_ATTR_NODEV | libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NOEXEC;
    if access.read_only {
        set |= libc::MOUNT_ATTR_RDONLY;
    }
    let attributes = libc::mount_attr { attr_set: set, attr_clr: 0, propagation: 0, userns_fd: 0 };
    let flags = libc::AT_EMPTY_PATH | if access.recursive { libc::AT_RECURSIVE } else { 0 };
    // SAFETY:
    // * The path is an empty C string with static life.
    // * `attributes` is a whole `struct mount_attr` of the size that is passed, and outlives the call, which only reads.
    // * The descriptor is open: it is borrowed.
    let failed = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            mount.as_raw_fd(),
            c"".as_ptr(),
            flags,
            &raw const attributes,
            size_of::<libc::mount_attr>(),
        )
    } != 0;
    if failed { Err(io::Error::last_os_error()) } else { Ok(()) }
}
