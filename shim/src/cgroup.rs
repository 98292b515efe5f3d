//! A container's cgroup on the host: where what it costs the host is charged, and where cAdvisor and `docker stats` look.
//!
//! The guest enforces a container's limits; the host only needs to know whose memory and time a machine uses. So the
//! cgroup that the spec names (`linux.cgroupsPath`) gets the container's holder, and that of a pod's first container the
//! VMM as well: the limits of the pod's own cgroup, above it, then hold for the machine.
//!
//! ```text
//!   enter: make the directory and those above ─► controllers on, all the way down ─► move the processes in
//!   leave: remove what was made, from the leaf up; what still has a process (the VMM) is tried again at the pod's end
//! ```
//!
//! Failure paths: a host without cgroup v2, or a path that cannot be made, costs the accounting and a warning, never the
//! container. What was made is recorded in the bundle, so that `delete` removes it after a crash. Directories that were
//! there before (the kubelet's) stay.

use std::{
    fs,
    io::{self, ErrorKind},
    path::{Component, Path, PathBuf},
};

use crate::bundle::Bundle;

/// Where cgroup v2 is mounted, alone, by systemd and everyone.
const MOUNT: &str = "/sys/fs/cgroup";

/// The record in the bundle: the directories that were made, one a line, the leaf first.
const RECORD: &str = "cgroup";

/// How often another pod may remove a parent that we are about to use.
const TRIES: usize = 3;

/// Directories that were made for one container.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Cgroup {
    made: Vec<PathBuf>,
}

impl Cgroup {
    /// Moves processes into the cgroup that `path` (of the spec) names, making it first. `bundle` remembers.
    #[must_use]
    pub fn enter(path: &str, bundle: &Bundle, pids: &[u32]) -> Self {
        let mount = Path::new(MOUNT);
        let Some(leaf) = leaf(path).map(|leaf| mount.join(leaf)) else { return Self::default() };
        if !mount.join("cgroup.controllers").exists() {
            return Self::default();
        }
        let mut cgroup = Self::default();
        let outcome = cgroup.make(mount, &leaf).and_then(|()| {
            cgroup.record(bundle)?;
            pids.iter().try_for_each(|pid| fs::write(leaf.join("cgroup.procs"), pid.to_string()))
        });
        if let Err(error) = outcome {
            log::warn!("cgroup {}: {error}; the container is not accounted there", leaf.display());
        }
        cgroup
    }

    /// What an earlier process recorded in the bundle.
    #[must_use]
    pub fn recorded(bundle: &Bundle) -> Self {
        let text = fs::read_to_string(bundle.path(RECORD)).unwrap_or_default();
        let below =
            |path: &&Path| path.starts_with(MOUNT) && path.components().all(|part| part != Component::ParentDir);
        Self { made: text.lines().map(Path::new).filter(below).map(Path::to_owned).collect() }
    }

    /// Removes what was made; gives itself back if a process is still in the leaf.
    pub fn leave(self) -> Option<Self> {
        let busy = |error: &io::Error| error.kind() == ErrorKind::ResourceBusy;
        match self.made.first().map(fs::remove_dir) {
            None => return None,
            Some(Err(error)) if busy(&error) => return Some(self),
            Some(Err(error)) if error.kind() != ErrorKind::NotFound => log::warn!("cgroup: cannot remove it: {error}"),
            Some(_) => {}
        }
        // Others may use these by now.
        self.made.iter().skip(1).take_while(|parent| fs::remove_dir(parent).is_ok()).for_each(drop);
        None
    }

    fn make(&mut self, mount: &Path, leaf: &Path) -> io::Result<()> {
        let mut last = Ok(());
        for _ in 0..TRIES {
            last = self.make_once(mount, leaf);
            if !matches!(&last, Err(error) if error.kind() == ErrorKind::NotFound) {
                break;
            }
        }
        last
    }

    fn make_once(&mut self, mount: &Path, leaf: &Path) -> io::Result<()> {
        let missing: Vec<&Path> = leaf.ancestors().take_while(|one| *one != mount && !one.exists()).collect();
        for directory in missing.into_iter().rev() {
            if let Some(parent) = directory.parent() {
                enable_controllers(parent);
            }
            match fs::create_dir(directory) {
                Ok(()) => self.made.insert(0, directory.to_owned()),
                Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn record(&self, bundle: &Bundle) -> io::Result<()> {
        let lines: String = self.made.iter().map(|path| format!("{}\n", path.display())).collect();
        fs::write(bundle.path(RECORD), lines)
    }
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
    fn what_was_made_is_removed_and_what_was_there_stays() {
        let host = tempfile::tempdir().expect("directory");
        fs::create_dir(host.path().join("kubelets")).expect("directory");
        let mut cgroup = Cgroup::default();
        let leaf = host.path().join("kubelets/pod/c1");
        cgroup.make(host.path(), &leaf).expect("made");
        assert_eq!(cgroup.made, [leaf.clone(), host.path().join("kubelets/pod")]);
        assert_eq!(cgroup.leave(), None);
        assert!(host.path().join("kubelets").exists() && !host.path().join("kubelets/pod").exists());
    }

    #[test]
    fn record_cannot_lead_out_of_the_cgroups() {
        let directory = tempfile::tempdir().expect("directory");
        let bundle = Bundle::new(directory.path());
        fs::write(bundle.path(RECORD), "/sys/fs/cgroup/default/c1\n/etc\n/sys/fs/cgroup/../../etc\n").expect("write");
        assert_eq!(Cgroup::recorded(&bundle).made, [PathBuf::from("/sys/fs/cgroup/default/c1")]);
        assert_eq!(Cgroup::recorded(&Bundle::new("/nonexistent")), Cgroup::default());
    }
}
