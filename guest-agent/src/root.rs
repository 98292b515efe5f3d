//! The container's root, built by its init: enter the share, mount, make devices, protect.
//!
//! Order in the child, which is alone in a new mount namespace (a copy of the agent's):
//!
//! ```text
//!   open_share ──▶ enter_root ──▶ make each, in order ──▶ devices::make ──▶ leave_old_root ──▶ make_readonly, mask
//!   (clone the      (bind, pivot;   (tmpfs, proc, …,
//!    share's tree)   the old root    moved-in clones)
//!                    lies under)
//! ```
//!
//! Entering the root first is what makes the rest safe: from then on every path of the spec is looked up inside the
//! image, so a symbolic link in the image cannot lead a mount anywhere else. What must come from outside (shares) was
//! opened before, as a detached copy, and is only attached. The old root stays reachable by its descriptor until the
//! end: device nodes are bound from it where mknod is denied (user namespaces), and the kernel lets a user namespace
//! mount a new proc only while it can see another one.
//!
//! All mounts vanish with the container's last process; the agent's own namespace never sees them.

use std::{
    ffi::{CStr, CString},
    fs,
    io::{self, ErrorKind},
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    path::Path,
};

use rustix::{
    fs::{CWD, FileType, Mode, OFlags, makedev, open},
    io::Errno,
    mount::{
        MountFlags, MountPropagationFlags, MoveMountFlags, OpenTreeFlags, UnmountFlags, mount, mount_bind,
        mount_bind_recursive, mount_change, move_mount, open_tree, unmount,
    },
    process::{chdir, fchdir, pivot_root},
};

use crate::{
    copy_up,
    mounts::{Mount, Propagation, What, attributes},
    sys,
};

/// Sets the propagation of the mount at `path`.
pub fn propagate(propagation: Propagation, path: &Path) -> rustix::io::Result<()> {
    let recursive = if propagation.recursive { libc::MS_REC } else { 0 };
    mount_change(path, MountPropagationFlags::from_bits_retain((propagation.flag | recursive) as _))
}

/// A detached copy of what a mount shows (a share, or a path of the guest's own) with the mount's attributes, or `None`
/// for a new file system.
pub fn open_share(mount: &Mount, shares: &Path) -> io::Result<Option<OwnedFd>> {
    let (path, recursive) = match &mount.what {
        What::Share { name, recursive } => (shares.join(name), recursive),
        What::Own { path, recursive } => (path.clone(), recursive),
        What::FileSystem { .. } => return Ok(None),
    };
    let mut flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    if *recursive {
        flags |= OpenTreeFlags::AT_RECURSIVE;
    }
    let tree = open_tree(CWD, path, flags)?;
    let attributes = attributes(mount.flags);
    if attributes != 0 {
        sys::set_mount_attributes(tree.as_fd(), attributes, 0, mount.flags_recursive)?;
    }
    Ok(Some(tree))
}

/// Makes the directory `root` the root of this process and returns a descriptor of the old one.
pub fn enter_root(root: &Path) -> rustix::io::Result<OwnedFd> {
    mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?;
    let old = open("/", OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    // pivot_root wants a mount point.
    mount_bind_recursive(root, root)?;
    chdir(root)?;
    // Both arguments the same: the old root is stacked below the new one, no directory is needed for it.
    pivot_root(".", ".")?;
    chdir("/")?;
    Ok(old)
}

/// Detaches the old root. After this nothing of the agent's tree can be reached.
pub fn leave_old_root(old: &OwnedFd) -> rustix::io::Result<()> {
    fchdir(old)?;
    unmount(".", UnmountFlags::DETACH)?;
    chdir("/")
}

/// Makes one mount; `tree` is what [`open_share`] returned for it. The mount point is made if it is missing.
pub fn make(mount: &Mount, tree: Option<&OwnedFd>) -> io::Result<()> {
    let hidden = Hidden::behind(mount)?;
    match attach(mount, tree, hidden.as_ref()) {
        Err(Errno::NOENT) => {
            make_mount_point(&mount.destination, tree)?;
            attach(mount, tree, None)?;
        }
        result => result?,
    }
    if let Some(hidden) = hidden.filter(|_| mount.copy_up) {
        copy_up::fill(&hidden.directory, &mount.destination)?;
    }
    if let Some(propagation) = mount.propagation {
        propagate(propagation, &mount.destination)?;
    }
    Ok(())
}

/// The directory of the image that a tmpfs is about to hide.
struct Hidden {
    directory: OwnedFd,
    mode: u32,
}

impl Hidden {
    /// `None` where nobody asks for it, and where there is nothing yet.
    fn behind(mount: &Mount) -> io::Result<Option<Self>> {
        let is_tmpfs = matches!(mount.what, What::FileSystem { kind: "tmpfs", .. });
        let has_mode = mount.data.to_bytes().split(|byte| *byte == b',').any(|option| option.starts_with(b"mode="));
        if !is_tmpfs || has_mode && !mount.copy_up {
            return Ok(None);
        }
        match open(&mount.destination, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()) {
            Ok(directory) => {
                let mode = rustix::fs::fstat(&directory)?.st_mode & 0o7777;
                Ok(Some(Self { directory, mode }))
            }
            // The mount itself will tell.
            Err(_) => Ok(None),
        }
    }

    /// As under runc: the tmpfs has the directory's mode, unless the spec gives one.
    fn data(&self, written: &CStr) -> CString {
        let data = [format!("mode={:o}", self.mode).as_bytes(), b",", written.to_bytes()].concat();
        CString::new(data).unwrap_or_else(|_| written.to_owned())
    }
}

fn attach(what: &Mount, tree: Option<&OwnedFd>, hidden: Option<&Hidden>) -> rustix::io::Result<()> {
    match (&what.what, tree) {
        (What::FileSystem { source, kind }, _) => {
            let kind = if *kind == "cgroup" { "cgroup2" } else { kind };
            let data = hidden.map_or_else(|| what.data.clone(), |hidden| hidden.data(&what.data));
            let data = (!data.is_empty()).then_some(data.as_c_str());
            mount(source.as_c_str(), &what.destination, kind, MountFlags::from_bits_retain(what.flags as _), data)
        }
        (What::Share { .. } | What::Own { .. }, Some(tree)) => {
            let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_SYMLINKS;
            move_mount(tree, "", CWD, &what.destination, flags)
        }
        (What::Share { .. } | What::Own { .. }, None) => Err(Errno::BADF),
    }
}

/// A directory, or an empty file if a file will be mounted there.
fn make_mount_point(path: &Path, tree: Option<&OwnedFd>) -> io::Result<()> {
    let is_file = match tree {
        Some(tree) => !FileType::from_raw_mode(rustix::fs::fstat(tree)?.st_mode).is_dir(),
        None => false,
    };
    if !is_file {
        return fs::create_dir_all(path);
    }
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent)?;
    }
    fs::OpenOptions::new().create(true).append(true).open(path).map(drop)
}

/// Makes the mount at `path` read-only, leaving its other attributes; with `bind`, makes it a mount first. A path
/// that does not exist needs no protection.
pub fn make_readonly(path: &str, bind: bool) -> io::Result<()> {
    if bind {
        match mount_bind_recursive(path, path) {
            Err(Errno::NOENT | Errno::NOTDIR) => return Ok(()),
            result => result?,
        }
    }
    let fd = open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
    sys::set_mount_attributes(fd.as_fd(), libc::MOUNT_ATTR_RDONLY, 0, false)
}

/// Hides `path`: a file becomes /dev/null, a directory an empty one. A path that does not exist needs no hiding.
pub fn mask(path: &str, null: BorrowedFd<'_>) -> io::Result<()> {
    let null = format!("/proc/self/fd/{}", null.as_raw_fd());
    match mount_bind(null, path) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        // /dev/null cannot be mounted on a directory; a path below a file is no path.
        Err(Errno::NOTDIR) => match mount("tmpfs", path, "tmpfs", MountFlags::RDONLY, None) {
            Ok(()) | Err(Errno::NOENT | Errno::NOTDIR) => Ok(()),
            Err(error) => Err(error.into()),
        },
        Err(error) => Err(error.into()),
    }
}

/// The container's /dev/null, checked to be the null device: masking with anything else would expose it.
pub fn open_null() -> io::Result<OwnedFd> {
    let null = open("/dev/null", OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
    let stat = rustix::fs::fstat(&null)?;
    let is_null = FileType::from_raw_mode(stat.st_mode).is_char_device() && stat.st_rdev == makedev(1, 3);
    if is_null { Ok(null) } else { Err(io::Error::new(ErrorKind::InvalidData, "/dev/null is not the null device")) }
}
