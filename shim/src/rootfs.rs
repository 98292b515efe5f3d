//! The root file system on the host: mounted in a mount namespace of the shim's own.
//!
//! [`isolate`] runs once, before the first thread. From then on nothing that is mounted here exists for anybody else,
//! and the kernel unmounts all of it when the last process of the namespace (shim, VMM, holders) is gone, however they
//! ended. Mounts that the host makes later still arrive where the host's own are shared, as systemd makes them: the
//! namespace is a slave of the host's. On a host whose root is private, a volume must be mounted before its pod starts.
//!
//! [`mount_all`] performs containerd's list of mounts on one target, in order; the last one is what the container sees.
//! Failure path: the first mount that fails undoes those before it. [`Mounted::unmount`] ends it in order; dropping it does
//! so, too.

use std::{
    env,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
};

use containerd_shim_protos::types::mount::Mount;
use nix::{
    errno::Errno,
    mount::{MntFlags, MsFlags, mount, umount2},
    sched::{CloneFlags, unshare},
};

/// mount(2) takes at most a page of options, with its terminator.
const OPTIONS_MAX: usize = 4095;

/// Why a root file system could not be mounted.
#[derive(Debug, thiserror::Error)]
pub enum RootfsError {
    /// No mount namespace of our own.
    #[error("cannot make a private mount namespace: {0}; the shim needs CAP_SYS_ADMIN")]
    Isolate(Errno),
    /// The kernel refused a mount.
    #[error("cannot mount {kind} {source_name} on {}: {errno}", target.display())]
    Mount {
        /// Its type.
        kind: String,
        /// Its source.
        source_name: String,
        /// Where.
        target: PathBuf,
        /// The reason.
        errno: Errno,
    },
    /// An option that we would have to ignore.
    #[error("mount option {option} of {kind} {source_name} is not supported")]
    Option {
        /// Type of the mount.
        kind: String,
        /// Its source.
        source_name: String,
        /// The option.
        option: String,
    },
    /// The options do not fit into a page even when their common prefix is cut.
    #[error("options of the {kind} mount take {length} bytes, {OPTIONS_MAX} at most fit; flatten the image's layers")]
    TooLong {
        /// Type of the mount.
        kind: String,
        /// Their length.
        length: usize,
    },
    /// A file could not be mounted through a loop device.
    #[error("cannot mount {file} through a loop device on {}: {reason}", target.display())]
    Loop {
        /// The file.
        file: String,
        /// Where.
        target: PathBuf,
        /// The reason.
        reason: String,
    },
}

/// Gives the process, which must still be single-threaded, a mount namespace of its own that follows the host's.
pub fn isolate() -> Result<(), RootfsError> {
    unshare(CloneFlags::CLONE_NEWNS).map_err(RootfsError::Isolate)?;
    let slave = MsFlags::MS_SLAVE | MsFlags::MS_REC;
    mount(None::<&str>, "/", None::<&str>, slave, None::<&str>).map_err(RootfsError::Isolate)
}

/// What [`mount_all`] mounted.
#[derive(Debug, Default)]
pub struct Mounted {
    targets: Vec<PathBuf>,
}

impl Mounted {
    /// Unmounts in reverse order. What is still busy is detached, so that nothing new can reach it.
    pub fn unmount(&mut self) {
        while let Some(target) = self.targets.pop() {
            if umount2(&target, MntFlags::UMOUNT_NOFOLLOW).is_err() {
                let _ = umount2(&target, MntFlags::UMOUNT_NOFOLLOW | MntFlags::MNT_DETACH);
            }
        }
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        self.unmount();
    }
}

/// Performs containerd's mounts on `target`.
pub fn mount_all(mounts: &[Mount], target: &Path) -> Result<Mounted, RootfsError> {
    let mut mounted = Mounted::default();
    for mount in mounts {
        // Newer daemons may address a place below the root. It comes from containerd, which is trusted.
        let below = mount.target.trim_start_matches('/');
        let place = if below.is_empty() { target.to_owned() } else { target.join(below) };
        mount_one(mount, &place)?;
        mounted.targets.push(place);
    }
    Ok(mounted)
}

/// The options of one mount, taken apart.
#[derive(Debug, PartialEq, Eq)]
struct Options {
    flags: MsFlags,
    propagation: MsFlags,
    data: Vec<String>,
    looped: bool,
}

impl Options {
    fn parse(mount: &Mount) -> Result<Self, RootfsError> {
        let mut options =
            Self { flags: MsFlags::empty(), propagation: MsFlags::empty(), data: Vec::new(), looped: false };
        if mount.type_ == "bind" {
            options.flags.insert(MsFlags::MS_BIND);
        }
        for option in &mount.options {
            if let Some((set, flags)) = flag(option) {
                options.flags.set(flags, set);
            } else if let Some(propagation) = propagation(option) {
                options.propagation = propagation;
            } else if option == "loop" {
                options.looped = true;
            } else if option.starts_with("uidmap=") || option.starts_with("gidmap=") || option.starts_with("X-") {
                return Err(RootfsError::Option {
                    kind: mount.type_.clone(),
                    source_name: mount.source.clone(),
                    option: option.clone(),
                });
            } else {
                options.data.push(option.clone());
            }
        }
        Ok(options)
    }
}

fn flag(option: &str) -> Option<(bool, MsFlags)> {
    Some(match option {
        "defaults" => (true, MsFlags::empty()),
        "ro" => (true, MsFlags::MS_RDONLY),
        "rw" => (false, MsFlags::MS_RDONLY),
        "bind" => (true, MsFlags::MS_BIND),
        "rbind" => (true, MsFlags::MS_BIND | MsFlags::MS_REC),
        "nosuid" => (true, MsFlags::MS_NOSUID),
        "suid" => (false, MsFlags::MS_NOSUID),
        "nodev" => (true, MsFlags::MS_NODEV),
        "dev" => (false, MsFlags::MS_NODEV),
        "noexec" => (true, MsFlags::MS_NOEXEC),
        "exec" => (false, MsFlags::MS_NOEXEC),
        "sync" => (true, MsFlags::MS_SYNCHRONOUS),
        "async" => (false, MsFlags::MS_SYNCHRONOUS),
        "dirsync" => (true, MsFlags::MS_DIRSYNC),
        "noatime" => (true, MsFlags::MS_NOATIME),
        "atime" => (false, MsFlags::MS_NOATIME),
        "nodiratime" => (true, MsFlags::MS_NODIRATIME),
        "diratime" => (false, MsFlags::MS_NODIRATIME),
        "relatime" => (true, MsFlags::MS_RELATIME),
        "norelatime" => (false, MsFlags::MS_RELATIME),
        "strictatime" => (true, MsFlags::MS_STRICTATIME),
        "nostrictatime" => (false, MsFlags::MS_STRICTATIME),
        "mand" => (true, MsFlags::MS_MANDLOCK),
        "nomand" => (false, MsFlags::MS_MANDLOCK),
        _ => return None,
    })
}

fn propagation(option: &str) -> Option<MsFlags> {
    let (recursive, kind) = match option.strip_prefix('r') {
        Some(kind) => (MsFlags::MS_REC, kind),
        None => (MsFlags::empty(), option),
    };
    let kind = match kind {
        "private" => MsFlags::MS_PRIVATE,
        "shared" => MsFlags::MS_SHARED,
        "slave" => MsFlags::MS_SLAVE,
        "unbindable" => MsFlags::MS_UNBINDABLE,
        _ => return None,
    };
    Some(recursive | kind)
}

fn mount_one(request: &Mount, target: &Path) -> Result<(), RootfsError> {
    let options = Options::parse(request)?;
    let failed = |errno| RootfsError::Mount {
        kind: request.type_.clone(),
        source_name: request.source.clone(),
        target: target.to_owned(),
        errno,
    };
    if options.looped {
        return mount_looped(request, target);
    }
    let (directory, data) = fit(&request.type_, options.data)?;
    mount_from(directory.as_deref(), &request.source, target, &request.type_, options.flags, &data).map_err(failed)?;
    let read_only_bind = MsFlags::MS_BIND | MsFlags::MS_RDONLY;
    let again = if options.flags.contains(read_only_bind) {
        // The kernel ignores "ro" when it makes a bind mount; it takes it as a change of one.
        let remount = options.flags | MsFlags::MS_REMOUNT;
        mount(None::<&str>, target, None::<&str>, remount, None::<&str>)
    } else {
        Ok(())
    };
    let spread = again.and_then(|()| {
        if options.propagation.is_empty() {
            return Ok(());
        }
        mount(None::<&str>, target, None::<&str>, options.propagation, None::<&str>)
    });
    spread.map_err(|errno| {
        let _ = umount2(target, MntFlags::MNT_DETACH);
        failed(errno)
    })
}

/// Makes overlay options fit into a page: layers are named relative to their common directory, which the mounting
/// thread then works in.
fn fit(kind: &str, data: Vec<String>) -> Result<(Option<PathBuf>, String), RootfsError> {
    let whole = data.join(",");
    if whole.len() <= OPTIONS_MAX {
        return Ok((None, whole));
    }
    let too_long = |length| RootfsError::TooLong { kind: kind.to_owned(), length };
    let lower = data.iter().find_map(|option| option.strip_prefix("lowerdir=")).ok_or_else(|| too_long(whole.len()))?;
    let directory = common_directory(lower).ok_or_else(|| too_long(whole.len()))?;
    let prefix = format!("{directory}/");
    let short: Vec<&str> = lower.split(':').map(|layer| layer.strip_prefix(&prefix).unwrap_or(layer)).collect();
    let short = format!("lowerdir={}", short.join(":"));
    let shorter: Vec<&str> = data
        .iter()
        .map(|option| if option.starts_with("lowerdir=") { short.as_str() } else { option.as_str() })
        .collect();
    let shorter = shorter.join(",");
    if shorter.len() > OPTIONS_MAX { Err(too_long(shorter.len())) } else { Ok((Some(directory.into()), shorter)) }
}

fn common_directory(lower: &str) -> Option<String> {
    let mut layers = lower.split(':');
    let mut common = Path::new(layers.next()?).parent()?;
    for layer in layers {
        while !Path::new(layer).starts_with(common) {
            common = common.parent()?;
        }
    }
    common.to_str().filter(|directory| *directory != "/").map(str::to_owned)
}

fn mount_from(
    directory: Option<&Path>,
    source: &str,
    target: &Path,
    kind: &str,
    flags: MsFlags,
    data: &str,
) -> nix::Result<()> {
    let data = Some(data).filter(|data| !data.is_empty());
    let Some(directory) = directory else { return mount(Some(source), target, Some(kind), flags, data) };
    // A thread of its own, whose working directory ends with it.
    thread::scope(|scope| {
        let mounting = scope.spawn(|| {
            unshare(CloneFlags::CLONE_FS)?;
            env::set_current_dir(directory)
                .map_err(|error| Errno::from_raw(error.raw_os_error().unwrap_or_default()))?;
            mount(Some(source), target, Some(kind), flags, data)
        });
        mounting.join().unwrap_or(Err(Errno::EIO))
    })
}

/// Loop devices are set up by ioctls, which need unsafe code; every host has a program that does just this. It is our
/// child, so it mounts in our namespace.
fn mount_looped(request: &Mount, target: &Path) -> Result<(), RootfsError> {
    let failed = |reason| RootfsError::Loop { file: request.source.clone(), target: target.to_owned(), reason };
    let mut command = Command::new("mount");
    command.arg("-t").arg(&request.type_).arg("-o").arg(request.options.join(","));
    let output = command.arg("--").arg(&request.source).arg(target).stdin(Stdio::null()).output();
    match output {
        Ok(output) if output.status.success() => Ok(()),
        Ok(output) => Err(failed(String::from_utf8_lossy(&output.stderr).trim().to_owned())),
        Err(error) => Err(failed(format!("cannot run mount: {error}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(kind: &str, options: &[&str]) -> Mount {
        Mount {
            type_: kind.into(),
            source: "/src".into(),
            options: options.iter().map(|&option| option.to_owned()).collect(),
            ..Mount::default()
        }
    }

    #[test]
    fn flags_and_data_are_told_apart() {
        let options = Options::parse(&request("overlay", &["ro", "nosuid", "index=off", "lowerdir=/a:/b", "rw"]));
        let options = options.expect("legal");
        assert_eq!(options.flags, MsFlags::MS_NOSUID);
        assert_eq!(options.data, ["index=off", "lowerdir=/a:/b"]);
        assert!(!options.looped);
    }

    #[test]
    fn recursion_of_propagation_is_not_mistaken_for_a_flag() {
        let options = Options::parse(&request("bind", &["rbind", "rprivate"])).expect("legal");
        assert_eq!(options.flags, MsFlags::MS_BIND | MsFlags::MS_REC);
        assert_eq!(options.propagation, MsFlags::MS_PRIVATE | MsFlags::MS_REC);
        assert!(options.data.is_empty());
    }

    #[test]
    fn option_that_would_be_ignored_is_refused_by_name() {
        let error = Options::parse(&request("overlay", &["uidmap=0:100000:65536"])).expect_err("refused");
        assert!(error.to_string().contains("uidmap=0:100000:65536"));
    }

    #[test]
    fn many_layers_are_named_relative_to_their_directory() {
        let layers: Vec<String> = (0..120).map(|n| format!("/var/lib/containerd/snapshots/{n}/fs")).collect();
        let data = vec!["index=off".to_owned(), format!("lowerdir={}", layers.join(":"))];
        let (directory, short) = fit("overlay", data).expect("fits");
        assert_eq!(directory.as_deref(), Some(Path::new("/var/lib/containerd/snapshots")));
        assert!(short.starts_with("index=off,lowerdir=0/fs:1/fs:") && short.len() < OPTIONS_MAX);
        let far_apart: Vec<String> = (0..120).map(|n| format!("/{n}{}", "x".repeat(60))).collect();
        assert!(matches!(
            fit("overlay", vec![format!("lowerdir={}", far_apart.join(":"))]),
            Err(RootfsError::TooLong { .. })
        ));
    }
}
