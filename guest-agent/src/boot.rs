//! The steps of the boot list in `main.rs`, each a few system calls.
//!
//! State at entry: the kernel has unpacked the initramfs into its rootfs, opened /dev/console as descriptors 0 to 2 and
//! executed us as process 1. Nothing is mounted.
//!
//! The rootfs of an initramfs has no parent mount, and pivot_root(2) refuses to leave such a root; containers are
//! entered with pivot_root. So the agent builds a tmpfs, mounts what it needs in it and moves it over the rootfs: the
//! tmpfs is then an ordinary mount whose parent is the rootfs.
//!
//! sysfs is mounted although the agent never looks at it. It is one file system per network namespace, with one
//! read-only flag: if the first container of a pod were its first user, "ro" would hold for all later ones. And the
//! kernel lets a user namespace mount proc and sysfs only where they can be seen already.
//!
//! Not mounted: devtmpfs, devpts and mqueue (containers mount their own; the device nodes that a container may need are
//! made one by one).
//!
//! Failure: every error names its step; process 1 prints it and exits, which is a kernel panic that the VMM reports.

use std::{fmt, io, path::Path};

use agent_proto::SHARES_TAG;
use rustix::{
    fs::{CWD, FileType, Mode, makedev, mkdir, mknodat},
    mount::{MountFlags, mount, mount_move},
    process::{Resource, Rlimit, chdir, chroot, setrlimit, umask},
};

use crate::{devices::DEVICES, net};

/// Where shares appear.
pub const SHARES: &str = "/run/nacre/shares";
/// Where the cgroup tree is.
pub const CGROUP: &str = "/run/nacre/cgroup";

/// Directory of the initramfs on which the real root is built.
const NEW_ROOT: &str = "/root";

/// A step of the boot that failed.
#[derive(Debug)]
pub struct Error {
    step: &'static str,
    error: io::Error,
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "boot: cannot {}: {}", self.step, self.error)
    }
}

impl std::error::Error for Error {}

/// Names the step of an error.
pub fn step<E: Into<io::Error>>(step: &'static str) -> impl FnOnce(E) -> Error {
    move |error| Error { step, error: error.into() }
}

/// An empty tmpfs with the few directories and device nodes of the agent's root; the current directory is in it.
pub fn new_root() -> io::Result<()> {
    // Else the device nodes, which user namespaces get bound, would be writable for root only.
    umask(Mode::empty());
    mount("tmpfs", NEW_ROOT, "tmpfs", MountFlags::empty(), c"mode=755")?;
    chdir(NEW_ROOT)?;
    for directory in ["dev", "proc", "sys", "run", "run/nacre", "run/nacre/shares", "run/nacre/cgroup"] {
        mkdir(directory, Mode::from_raw_mode(0o755))?;
    }
    for (name, major, minor) in DEVICES.into_iter().chain([("port", 1, 4)]) {
        let mode = Mode::from_raw_mode(if name == "port" { 0o600 } else { 0o666 });
        mknodat(CWD, format!("dev/{name}"), FileType::CharacterDevice, mode, makedev(major, minor))?;
    }
    Ok(())
}

/// proc in the new root: id maps and OOM scores are written there.
pub fn mount_proc() -> io::Result<()> {
    Ok(mount("proc", "proc", "proc", MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC, None)?)
}

/// sysfs in the new root.
pub fn mount_sys() -> io::Result<()> {
    Ok(mount("sysfs", "sys", "sysfs", MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC, None)?)
}

/// The cgroup tree in the new root. Controllers are enabled with the first container.
pub fn mount_cgroup() -> io::Result<()> {
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    Ok(mount("cgroup2", relative(CGROUP), "cgroup2", flags, None)?)
}

/// The shares in the new root.
pub fn mount_shares() -> io::Result<()> {
    Ok(mount(SHARES_TAG, relative(SHARES), "virtiofs", MountFlags::empty(), None)?)
}

fn relative(path: &str) -> &Path {
    Path::new(path.trim_start_matches('/'))
}

/// Moves the new root over the rootfs of the initramfs.
pub fn enter_new_root() -> io::Result<()> {
    mount_move(".", "/")?;
    chroot(".")?;
    Ok(())
}

/// Brings `lo` up: containers without a network namespace of their own use the agent's.
pub fn loopback() -> io::Result<()> {
    net::loopback_up()
}

/// Containers without a limit in their spec inherit ours; the kernel's 4096 is less than any host gives.
pub fn raise_file_limit() -> io::Result<()> {
    const FILES: u64 = 1024 * 1024;
    Ok(setrlimit(Resource::Nofile, Rlimit { current: Some(FILES), maximum: Some(FILES) })?)
}
