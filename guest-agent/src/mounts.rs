//! The mounts of a container, planned from the spec; [`crate::root`] makes them.
//!
//! A mount of the spec is one of two things in a guest: a share in the place of a bind mount's source, or a new instance
//! of a file system type that the guest's kernel serves. Everything else is refused by name. Options are taken apart
//! here: flags of the mount, propagation, and what is left for the file system; so nothing can be misspelt later.

use std::{
    ffi::CString,
    fmt,
    path::{Component, Path, PathBuf},
};

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
    /// Whether a tmpfs starts with what it hides.
    pub copy_up: bool,
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
    /// A path of the guest's own: what a bind of the host's /proc, /sys or /dev becomes.
    Own {
        /// Absolute, in the agent's root.
        path: PathBuf,
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
    ("iversion", libc::MS_I_VERSION, 0),
    ("noiversion", 0, libc::MS_I_VERSION),
    ("lazytime", libc::MS_LAZYTIME, 0),
    ("nolazytime", 0, libc::MS_LAZYTIME),
    ("silent", libc::MS_SILENT, 0),
    ("loud", 0, libc::MS_SILENT),
];

/// MS_NOSYMFOLLOW; libc does not have it.
const NOSYMFOLLOW: u64 = 256;

/// Plans one mount of the spec; `share` is its content when the request names one.
pub fn plan(written: &oci_spec::runtime::Mount, share: Option<String>) -> Result<Mount, PlanError> {
    let destination = Path::new("/").join(written.destination());
    let options = written.options().as_deref().unwrap_or_default();
    let is = |name: &str| options.iter().any(|option| option == name);
    if written.uid_mappings().is_some() || written.gid_mappings().is_some() || is("idmap") || is("ridmap") {
        return Err(PlanError::IdMapped(destination));
    }
    let kind = written.typ().as_deref().unwrap_or("bind");
    let source = written.source().clone().unwrap_or_else(|| kind.into());
    let what = match share {
        Some(name) => What::Share { name, recursive: !is("bind") || is("rbind") },
        None if (kind == "bind" || is("bind") || is("rbind")) && is_guests_own(&source) => {
            What::Own { path: source, recursive: !is("bind") || is("rbind") }
        }
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
    let mut mount = Mount {
        destination,
        what,
        flags: 0,
        flags_recursive: false,
        data: CString::default(),
        propagation: None,
        copy_up: is("tmpcopyup"),
    };
    let data = mount.apply_options(options);
    mount.data = text(data, &mount.destination)?;
    Ok(mount)
}

/// Whether a path of the host means the guest's own kernel, and holds no way out of the directory it names.
fn is_guests_own(path: &Path) -> bool {
    let plain = path.components().all(|part| !matches!(part, Component::ParentDir));
    plain && ["/proc", "/sys", "/dev"].iter().any(|own| path.starts_with(own))
}

fn text(text: String, destination: &Path) -> Result<CString, PlanError> {
    CString::new(text).map_err(|_| PlanError::Nul(destination.to_owned()))
}

impl Mount {
    /// Takes the agent's sysfs for a new one. A sysfs shows a network namespace, and only who rules over that may mount one:
    /// root of a user namespace does not rule over the pod's.
    pub fn use_own_sysfs(&mut self) {
        if matches!(self.what, What::FileSystem { kind: "sysfs", .. }) {
            self.what = What::Own { path: "/sys".into(), recursive: false };
        }
    }

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
const RECURSIVE: [&str; 18] = [
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
    "nostrictatime",
    "nosymfollow",
    "symfollow",
];

/// Said by other fields, the default, not known to kernels any more, or of no use to a guest.
const MEANINGLESS: [&str; 9] =
    ["bind", "rbind", "private", "rprivate", "tmpcopyup", "nosuiddev", "remount", "mand", "nomand"];

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
}

/// MOUNT_ATTR_* for MS_*: the attributes that a mount has apart from its file system.
pub fn attributes(flags: u64) -> u64 {
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
