//! A container's cgroup on the host: where what it costs the host is charged, and where cAdvisor and `docker stats` look.
//!
//! The guest enforces a container's limits; the host only needs to know whose memory and time a machine uses. So the
//! cgroup that the spec names (`linux.cgroupsPath`) gets the container's holder, and that of a pod's first container the
//! VMM as well: the limits of the pod's own cgroup, above it, then hold for the machine.
//!
//! ```text
//!   enter: make the directory and those above, each with our mark ─► controllers on, all the way down ─► move the
//!          processes in
//!   leave: remove what has our mark, from the leaf up, as far as nobody uses it; a leaf that still has a process (the
//!          VMM) is tried again at the pod's end
//! ```
//!
//! A directory above belongs to whoever comes last: pods share it, and the first to come may be the first to go. So the
//! mark is on the directory (an extended attribute), and who leaves removes what others made. Directories that were
//! there before (the kubelet's) have no mark and stay.
//!
//! Failure paths: a host without cgroup v2, or a path that cannot be made, costs the accounting and a warning, never the
//! container. The leaf is recorded in the bundle, so that `delete` removes it after a crash.

use std::{
    fs,
    io::{self, ErrorKind},
    path::{Component, Path, PathBuf},
};

use rustix::fs::{XattrFlags, getxattr, setxattr};

use crate::bundle::Bundle;

/// Where cgroup v2 is mounted, alone, by systemd and everyone.
const MOUNT: &str = "/sys/fs/cgroup";

/// The record in the bundle: the leaf.
const RECORD: &str = "cgroup";

/// The mark of a directory that a shim made.
const MARK: &str = "user.nacre";

/// How often another pod may remove a parent that we are about to use.
const TRIES: usize = 3;

/// The cgroup of one container.
#[derive(Debug, PartialEq, Eq)]
pub struct Cgroup {
    leaf: PathBuf,
}

impl Cgroup {
    /// Moves processes into the cgroup that `path` (of the spec) names, making it first. `bundle` remembers.
    #[must_use]
    pub fn enter(path: &str, bundle: &Bundle, pids: &[u32]) -> Option<Self> {
        let mount = Path::new(MOUNT);
        let leaf = mount.join(leaf(path)?);
        if !mount.join("cgroup.controllers").exists() {
            return None;
        }
        let outcome = make(mount, &leaf).and_then(|()| {
            fs::write(bundle.path(RECORD), leaf.display().to_string())?;
            pids.iter().try_for_each(|pid| fs::write(leaf.join("cgroup.procs"), pid.to_string()))
        });
        if let Err(error) = outcome {
            log::warn!("cgroup {}: {error}; the container is not accounted there", leaf.display());
        }
        Some(Self { leaf })
    }

    /// What an earlier process recorded in the bundle.
    #[must_use]
    pub fn recorded(bundle: &Bundle) -> Option<Self> {
        let leaf = PathBuf::from(fs::read_to_string(bundle.path(RECORD)).ok()?);
        let below = leaf.starts_with(MOUNT) && leaf.components().all(|part| part != Component::ParentDir);
        below.then_some(Self { leaf })
    }

    /// Removes what shims made; gives itself back if a process is still in the leaf.
    #[must_use]
    pub fn leave(self) -> Option<Self> {
        for directory in self.leaf.ancestors().take_while(|directory| is_ours(directory)) {
            match fs::remove_dir(directory) {
                Ok(()) => {}
                Err(error) if error.kind() == ErrorKind::ResourceBusy && directory == self.leaf => return Some(self),
                // Others use it by now, or were faster.
                Err(_) => break,
            }
        }
        None
    }
}

fn is_ours(directory: &Path) -> bool {
    // A value is a byte; whatever else somebody put there is not ours.
    getxattr(directory, MARK, &mut [0; 1][..]) == Ok(1)
}

/// Makes `leaf` and what is missing between it and `mount`.
fn make(mount: &Path, leaf: &Path) -> io::Result<()> {
    let mut last = Ok(());
    for _ in 0..TRIES {
        last = make_once(mount, leaf);
        if !matches!(&last, Err(error) if error.kind() == ErrorKind::NotFound) {
            break;
        }
    }
    last
}

fn make_once(mount: &Path, leaf: &Path) -> io::Result<()> {
    let missing: Vec<&Path> = leaf.ancestors().take_while(|one| *one != mount && !one.exists()).collect();
    for directory in missing.into_iter().rev() {
        if let Some(parent) = directory.parent() {
            enable_controllers(parent);
        }
        match fs::create_dir(directory) {
            Ok(()) => setxattr(directory, MARK, b"1", XattrFlags::empty())?,
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Lets the children of `directory` be accounted. A controller that cannot be switched on here is one that nobody above
/// wants, or one for which the host's processes are in the way; the others are.
fn enable_controllers(directory: &Path) {
    let known = fs::read_to_string(directory.join("cgroup.controllers")).unwrap_or_default();
    let enabled = fs::read_to_string(directory.join("cgroup.subtree_control")).unwrap_or_default();
    let missing = |name: &&str| !enabled.split_ascii_whitespace().any(|one| one == *name);
    for name in known.split_ascii_whitespace().filter(missing) {
        let _ = fs::write(directory.join("cgroup.subtree_control"), format!("+{name}"));
    }
}

/// The directory below the mount: `/a/b` as it is, systemd's `a-b.slice:prefix:name` as systemd would lay it out. `None`
/// for an empty path and for one that would lead elsewhere.
fn leaf(path: &str) -> Option<PathBuf> {
    let leaf = match path.split(':').collect::<Vec<_>>().as_slice() {
        [slice, prefix, name] => {
            let scope = if prefix.is_empty() { format!("{name}.scope") } else { format!("{prefix}-{name}.scope") };
            slices(slice).join(scope)
        }
        _ => PathBuf::from(path.trim_start_matches('/')),
    };
    let plain = leaf.components().all(|part| matches!(part, Component::Normal(_)));
    (plain && !leaf.as_os_str().is_empty()).then_some(leaf)
}

/// `a-b-c.slice` is `a.slice/a-b.slice/a-b-c.slice` (systemd.slice(5)); an empty name is the system's.
fn slices(slice: &str) -> PathBuf {
    let name = slice.strip_suffix(".slice").unwrap_or(slice);
    let name = if name.is_empty() { "system" } else { name };
    let ends = name.match_indices('-').map(|(at, _)| at).chain([name.len()]);
    ends.map(|end| format!("{}.slice", &name[..end])).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_of_both_drivers_become_directories() {
        for (path, expected) in [
            ("/default/c1", Some("default/c1")),
            ("kubepods/burstable/podx/c1", Some("kubepods/burstable/podx/c1")),
            ("system.slice:docker:c1", Some("system.slice/docker-c1.scope")),
            (":cri:c1", Some("system.slice/cri-c1.scope")),
            (
                "kubepods-burstable-podx.slice:cri-containerd:c1",
                Some("kubepods.slice/kubepods-burstable.slice/kubepods-burstable-podx.slice/cri-containerd-c1.scope"),
            ),
            ("", None),
            ("/", None),
            ("/a/../../etc", None),
            ("a.slice:x:../../etc", None),
        ] {
            assert_eq!(leaf(path).as_deref(), expected.map(Path::new), "{path}");
        }
    }

    #[test]
    fn whoever_leaves_last_removes_what_shims_made_and_what_was_there_stays() {
        let host = tempfile::tempdir().expect("directory");
        fs::create_dir(host.path().join("kubelets")).expect("directory");
        let cgroups = ["c1", "c2"].map(|name| Cgroup { leaf: host.path().join("kubelets/pod").join(name) });
        for cgroup in &cgroups {
            make(host.path(), &cgroup.leaf).expect("made");
        }
        let [first, last] = cgroups;
        assert_eq!(first.leave(), None);
        assert!(last.leaf.exists() && host.path().join("kubelets/pod").exists());
        assert_eq!(last.leave(), None);
        assert!(host.path().join("kubelets").exists() && !host.path().join("kubelets/pod").exists());
    }

    #[test]
    fn cgroup_that_is_not_ours_stays() {
        let host = tempfile::tempdir().expect("directory");
        let leaf = host.path().join("c1");
        fs::create_dir(&leaf).expect("directory");
        make(host.path(), &leaf).expect("there already");
        assert_eq!(Cgroup { leaf: leaf.clone() }.leave(), None);
        assert!(leaf.exists());
    }

    #[test]
    fn record_cannot_lead_out_of_the_cgroups() {
        let directory = tempfile::tempdir().expect("directory");
        let bundle = Bundle::new(directory.path());
        for (record, expected) in [
            ("/sys/fs/cgroup/default/c1", Some("/sys/fs/cgroup/default/c1")),
            ("/etc", None),
            ("/sys/fs/cgroup/../../etc", None),
        ] {
            fs::write(bundle.path(RECORD), record).expect("write");
            let leaf = Cgroup::recorded(&bundle).map(|cgroup| cgroup.leaf);
            assert_eq!(leaf, expected.map(PathBuf::from), "{record}");
        }
        assert_eq!(Cgroup::recorded(&Bundle::new("/nonexistent")), None);
    }
}
