//! The mounts of a container: how they are planned from the spec, and how the container's init makes them.
//!
//! Order in the child, which is alone in a new mount namespace (a copy of the agent's):
//!
//! ```text
//!   open_shares ──▶ enter_root ──▶ make each, in order ──▶ devices ──▶ protect ──▶ leave_old_root
//!   (clone the       (bind, pivot;   (tmpfs, proc, …,                   (read-only,
//!    share's tree)    the old root    moved-in clones)                   masked)
//!                     lies under)
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
    ffi::CString,
    fmt, fs,
    io::{self, ErrorKind},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
};

use rustix::{
    fs::{CWD, FileType, Mode, OFlags, makedev, mknodat, open, symlink},
    io::Errno,
    mount::{
        MountFlags, MountPropagationFlags, MoveMountFlags, OpenTreeFlags, UnmountFlags, mount, mount_bind,
        mount_bind_recursive, mount_change, move_mount, open_tree, unmount,
    },
    process::{chdir, fchdir, pivot_root},
};

use crate::sys;

/// One mount, checked.
#[derive(Debug, PartialEq, Eq)]
pub struct Mount {
    /// Absolute path in the container.
    pub destination: PathBuf,
    /// What appears there.
    pub what: What,
    /// MS_* flags.
    pub flags: u64,
    /// Whether the flags go to every mount below too.
    pub flags_recursive: bool,
    /// File system specific options.
    pub data: CString,
    /// When not private.
    pub propagation: Option<Propagation>,
}

/// The content of a mount.
#[derive(Debug, PartialEq, Eq)]
pub enum What {
    /// A share, with all that is mounted in it or without.
    Share {
        /// Its name.
        name: String,
        /// `rbind` and not `bind`.
        recursive: bool,
    },
    /// A new instance of a file system type.
    FileSystem {
        /// Shown in mountinfo.
        source: CString,
        /// One of [`FILE_SYSTEMS`].
        kind: &'static str,
    },
}

/// How mounts spread between namespaces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Propagation {
    /// MS_SHARED, MS_SLAVE, MS_UNBINDABLE.
    pub flag: u64,
    /// For all mounts below too.
    pub recursive: bool,
}

/// Why a mount of the spec cannot be made in a guest.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// A bind mount without a share.
    #[error("mount of {source:?} on {destination:?}: the source is a path of the host and no share was given for it")]
    #[expect(missing_docs, reason = "named by the message")]
    NoShare { r#source: SourceText, destination: PathBuf },
    /// A type that the guest does not serve.
    #[error("mount of type {kind:?} on {destination:?}: containers of a guest can have {FILE_SYSTEMS:?} and shares")]
    #[expect(missing_docs, reason = "named by the message")]
    Kind { kind: String, destination: PathBuf },
    /// Ids of a mount mapped by the runtime.
    #[error("mount on {0:?} has id mappings of its own, which shares do not offer: remove idmap from its options")]
    IdMapped(PathBuf),
    /// A string with a NUL.
    #[error("an option of the mount on {0:?} contains a NUL byte")]
    Nul(PathBuf),
}

/// A mount's source as the spec writes it; a type of its own so that `thiserror` does not take it for an error.
pub struct SourceText(PathBuf);

impl fmt::Debug for SourceText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// File system types that a container may mount. `cgroup` is what specs made on cgroup v1 hosts say.
pub const FILE_SYSTEMS: [&str; 8] = ["proc", "sysfs", "tmpfs", "devpts", "mqueue", "cgroup", "cgroup2", "hugetlbfs"];

/// Option, flags it sets, flags it clears.
const OPTIONS: &[(&str, u64, u64)] = &[
    ("defaults", 0, 0),
    ("ro", libc::MS_RDONLY, 0),
    ("rw", 0, libc::MS_RDONLY),
    ("nosuid", libc::MS_NOSUID, 0),
    ("suid", 0, libc::MS_NOSUID),
    ("nodev", libc::MS_NODEV, 0),
    ("dev", 0, libc::MS_NODEV),
    ("noexec", libc::MS_NOEXEC, 0),
    ("exec", 0, libc::MS_NOEXEC),
    ("sync", libc::MS_SYNCHRONOUS, 0),
    ("async", 0, libc::MS_SYNCHRONOUS),
    ("dirsync", libc::MS_DIRSYNC, 0),
    ("noatime", libc::MS_NOATIME, 0),
    ("atime", 0, libc::MS_NOATIME),
    ("nodiratime", libc::MS_NODIRATIME, 0),
    ("diratime", 0, libc::MS_NODIRATIME),
    ("relatime", libc::MS_RELATIME, 0),
    ("norelatime", 0, libc::MS_RELATIME),
    ("strictatime", libc::MS_STRICTATIME, 0),
    ("nostrictatime", 0, libc::MS_STRICTATIME),
    ("nosymfollow", NOSYMFOLLOW, 0),
    ("symfollow", 0, NOSYMFOLLOW),
];

/// MS_NOSYMFOLLOW; libc does not have it.
const NOSYMFOLLOW: u64 = 256;

/// Plans one mount of the spec; `share` is its content when the request names one.
pub fn plan(written: &oci_spec::runtime::Mount, share: Option<String>) -> Result<Mount, PlanError> {
    let destination = Path::new("/").join(written.destination());
    if written.uid_mappings().is_some() || written.gid_mappings().is_some() {
        return Err(PlanError::IdMapped(destination));
    }
    let options = written.options().as_deref().unwrap_or_default();
    let is = |name: &str| options.iter().any(|option| option == name);
    let kind = written.typ().as_deref().unwrap_or("bind");
    let source = written.source().clone().unwrap_or_else(|| kind.into());
    let what = match share {
        Some(name) => What::Share { name, recursive: !is("bind") || is("rbind") },
        None if kind == "bind" || is("bind") || is("rbind") => {
            return Err(PlanError::NoShare { r#source: SourceText(source), destination });
        }
        None => What::FileSystem {
            source: text(source.display().to_string(), &destination)?,
            kind: FILE_SYSTEMS
                .into_iter()
                .find(|known| *known == kind)
                .ok_or_else(|| PlanError::Kind { kind: kind.into(), destination: destination.clone() })?,
        },
    };
    let mut mount =
        Mount { destination, what, flags: 0, flags_recursive: false, data: CString::default(), propagation: None };
    let data = mount.apply_options(options);
    mount.data = text(data, &mount.destination)?;
    Ok(mount)
}

fn text(text: String, destination: &Path) -> Result<CString, PlanError> {
    CString::new(text).map_err(|_| PlanError::Nul(destination.to_owned()))
}

impl Mount {
    /// Takes flags and propagation out of `options` and returns what is left for the file system.
    fn apply_options(&mut self, options: &[String]) -> String {
        let mut data = Vec::new();
        for option in options {
            let plain = option.strip_prefix('r').filter(|plain| RECURSIVE.contains(plain)).unwrap_or(option);
            if let Some((_, set, clear)) = OPTIONS.iter().find(|(name, ..)| *name == plain) {
                self.flags = self.flags & !clear | set;
                self.flags_recursive |= plain != option;
            } else if let Some(propagation) = Propagation::named(option) {
                self.propagation = Some(propagation);
            } else if !MEANINGLESS.contains(&option.as_str()) {
                data.push(option.as_str());
            }
        }
        data.join(",")
    }
}

/// Options that have a recursive form (`rro`).
const RECURSIVE: [&str; 16] = [
    "ro",
    "rw",
    "nosuid",
    "suid",
    "nodev",
    "dev",
    "noexec",
    "exec",
    "noatime",
    "atime",
    "nodiratime",
    "diratime",
    "relatime",
    "norelatime",
    "strictatime",
    "nosymfollow",
];

/// Said by `what`, the default, or of no use to a guest.
const MEANINGLESS: [&str; 6] = ["bind", "rbind", "private", "rprivate", "tmpcopyup", "nosuiddev"];

impl Propagation {
    /// `None` for private, which everything is anyway, and for words that are no propagation.
    pub fn named(name: &str) -> Option<Self> {
        let (flag, recursive) = match name {
            "shared" => (libc::MS_SHARED, false),
            "rshared" => (libc::MS_SHARED, true),
            "slave" => (libc::MS_SLAVE, false),
            "rslave" => (libc::MS_SLAVE, true),
            "unbindable" => (libc::MS_UNBINDABLE, false),
            "runbindable" => (libc::MS_UNBINDABLE, true),
            _ => return None,
        };
        Some(Self { flag, recursive })
    }

    /// Applies it to the mount at `path`.
    pub fn apply(self, path: &Path) -> rustix::io::Result<()> {
        let recursive = if self.recursive { libc::MS_REC } else { 0 };
        mount_change(path, MountPropagationFlags::from_bits_retain((self.flag | recursive) as _))
    }
}

/// MOUNT_ATTR_* for MS_*: the attributes that a mount has apart from its file system.
fn attributes(flags: u64) -> u64 {
    let pairs = [
        (libc::MS_RDONLY, libc::MOUNT_ATTR_RDONLY),
        (libc::MS_NOSUID, libc::MOUNT_ATTR_NOSUID),
        (libc::MS_NODEV, libc::MOUNT_ATTR_NODEV),
        (libc::MS_NOEXEC, libc::MOUNT_ATTR_NOEXEC),
        (libc::MS_NOATIME, libc::MOUNT_ATTR_NOATIME),
        (libc::MS_NODIRATIME, libc::MOUNT_ATTR_NODIRATIME),
        (libc::MS_STRICTATIME, libc::MOUNT_ATTR_STRICTATIME),
        (NOSYMFOLLOW, libc::MOUNT_ATTR_NOSYMFOLLOW),
    ];
    pairs.iter().filter(|(flag, _)| flags & flag != 0).fold(0, |all, (_, attribute)| all | attribute)
}

/// A detached copy of a share's mount with the mount's attributes, or `None` for a mount that is no share.
pub fn open_share(mount: &Mount, shares: &Path) -> io::Result<Option<OwnedFd>> {
    let What::Share { name, recursive } = &mount.what else { return Ok(None) };
    let mut flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    if *recursive {
        flags |= OpenTreeFlags::AT_RECURSIVE;
    }
    let tree = open_tree(CWD, shares.join(name), flags)?;
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
    match attach(mount, tree) {
        Err(Errno::NOENT) => {
            make_mount_point(&mount.destination, tree)?;
            attach(mount, tree)?;
        }
        result => result?,
    }
    if let Some(propagation) = mount.propagation {
        propagation.apply(&mount.destination)?;
    }
    Ok(())
}

fn attach(what: &Mount, tree: Option<&OwnedFd>) -> rustix::io::Result<()> {
    match (&what.what, tree) {
        (What::FileSystem { source, kind }, _) => {
            let kind = if *kind == "cgroup" { "cgroup2" } else { kind };
            let data = (!what.data.is_empty()).then_some(what.data.as_c_str());
            mount(source.as_c_str(), &what.destination, kind, MountFlags::from_bits_retain(what.flags as _), data)
        }
        (What::Share { .. }, Some(tree)) => {
            let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_SYMLINKS;
            move_mount(tree, "", CWD, &what.destination, flags)
        }
        (What::Share { .. }, None) => Err(Errno::BADF),
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

/// Device nodes that every container has: name, major, minor.
pub const DEVICES: [(&str, u32, u32); 6] =
    [("null", 1, 3), ("zero", 1, 5), ("full", 1, 7), ("random", 1, 8), ("urandom", 1, 9), ("tty", 5, 0)];

/// Links that every container has in /dev.
const DEVICE_LINKS: [(&str, &str); 5] = [
    ("/proc/self/fd", "/dev/fd"),
    ("/proc/self/fd/0", "/dev/stdin"),
    ("/proc/self/fd/1", "/dev/stdout"),
    ("/proc/self/fd/2", "/dev/stderr"),
    ("pts/ptmx", "/dev/ptmx"),
];

/// Fills /dev, unless a share is mounted there, which is then used as it is.
pub fn make_devices(mounts: &[Mount], old_root: &OwnedFd) -> io::Result<()> {
    let on_dev = mounts.iter().rev().find(|mount| mount.destination == Path::new("/dev"));
    if on_dev.is_some_and(|mount| matches!(mount.what, What::Share { .. })) {
        return Ok(());
    }
    for (name, major, minor) in DEVICES {
        let path = format!("/dev/{name}");
        match mknodat(CWD, &path, FileType::CharacterDevice, Mode::from_raw_mode(0o666), makedev(major, minor)) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(Errno::PERM | Errno::ACCESS) => bind_device(&path, name, old_root)?,
            Err(error) => return Err(error.into()),
        }
    }
    for (target, link) in DEVICE_LINKS {
        match symlink(target, link) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Where nodes cannot be made (a user namespace, a shared root), the agent's own is bound.
fn bind_device(path: &str, name: &str, old_root: &OwnedFd) -> io::Result<()> {
    let tree =
        open_tree(old_root, format!("dev/{name}"), OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC)?;
    fs::OpenOptions::new().create(true).append(true).open(path)?;
    Ok(move_mount(&tree, "", CWD, path, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)?)
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
    let null = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&null));
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
