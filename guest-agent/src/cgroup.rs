//! The container's cgroup: one directory below `nacre`, with the limits of the spec.
//!
//! ```text
//!   /run/nacre/cgroup            the agent stays here, in the root
//!   └── nacre                    all controllers enabled for its children
//!       └── <container id>       the child is cloned right into it
//! ```
//!
//! The host's path (`slice:prefix:id` or `/kubepods/…`) means nothing in a guest and is not used.
//!
//! Failure: a limit that the kernel refuses fails the creation with the file's name; a limit of a controller that the
//! guest's kernel lacks does too, since running without it would be a silent loss.

use std::{
    fs,
    io::{self, ErrorKind},
    os::fd::OwnedFd,
    path::{Path, PathBuf},
};

use oci_spec::runtime::LinuxResources;
use rustix::fs::{Mode, OFlags, open};
use tokio::io::Interest;

use crate::sys;

/// A limit that cannot be translated.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// A key of `unified` that is no file name.
    #[error("{0:?} in linux.resources.unified is not the name of a cgroup file")]
    Unified(String),
}

/// A directory of the cgroup tree. Removed by [`Cgroup::remove`], not by drop: removing must be awaited.
#[derive(Debug)]
pub struct Cgroup {
    path: PathBuf,
}

/// Files and values for `resources`. CPU lists, memory nodes and disks are the host's and are left out, as is swap,
/// which the guest does not have.
pub fn values(resources: &LinuxResources) -> Result<Vec<(String, String)>, PlanError> {
    let mut list: Vec<(String, String)> = Vec::new();
    let limit = |value: i64| if value <= 0 { "max".to_owned() } else { value.to_string() };
    let mut add = |file: &str, value: String| list.push((file.to_owned(), value));
    if let Some(memory) = resources.memory() {
        if let Some(bytes) = memory.limit().filter(|bytes| *bytes != 0) {
            add("memory.max", limit(bytes));
        }
        if let Some(bytes) = memory.reservation().filter(|bytes| *bytes > 0) {
            add("memory.low", bytes.to_string());
        }
    }
    if let Some(cpu) = resources.cpu() {
        if let Some(shares) = cpu.shares().filter(|shares| *shares != 0) {
            add("cpu.weight", cpu_weight(shares).to_string());
        }
        let period = cpu.period().filter(|period| *period != 0).unwrap_or(100_000);
        if let Some(quota) = cpu.quota().filter(|quota| *quota != 0) {
            add("cpu.max", format!("{} {period}", limit(quota)));
        }
        if let Some(burst) = cpu.burst() {
            add("cpu.max.burst", burst.to_string());
        }
        // After the weight, which an idle group does not take.
        if let Some(idle) = cpu.idle() {
            add("cpu.idle", idle.to_string());
        }
    }
    if let Some(pids) = resources.pids() {
        add("pids.max", limit(pids.limit()));
    }
    for page in resources.hugepage_limits().iter().flatten() {
        add(&format!("hugetlb.{}.max", page.page_size()), page.limit().to_string());
    }
    let mut unified: Vec<_> = resources.unified().iter().flatten().collect();
    unified.sort();
    for (file, value) in unified {
        if file.contains('/') || !file.contains('.') {
            return Err(PlanError::Unified(file.clone()));
        }
        let of_the_host = ["cpuset.", "io.", "memory.swap.", "rdma."].iter().any(|prefix| file.starts_with(prefix));
        if !of_the_host {
            list.push((file.clone(), value.clone()));
        }
    }
    Ok(list)
}

/// 2..262144 shares to 1..10000, as every runtime does it.
fn cpu_weight(shares: u64) -> u64 {
    1 + (shares.clamp(2, 262_144) - 2) * 9_999 / 262_142
}

impl Cgroup {
    /// Makes the container's cgroup below the mount `root`. Exists already: an error, ids are unique.
    pub fn create(root: &Path, id: &str) -> io::Result<Self> {
        let parent = root.join("nacre");
        let path = parent.join(id);
        match fs::create_dir(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                enable_controllers(root)?;
                fs::create_dir(&parent)?;
                enable_controllers(&parent)?;
                fs::create_dir(&path)?;
            }
            result => result?,
        }
        Ok(Self { path })
    }

    /// Writes the limits; the error names the file.
    pub fn apply(&self, values: &[(String, String)]) -> Result<(), (String, io::Error)> {
        for (file, value) in values {
            let write = fs::OpenOptions::new().write(true).open(self.path.join(file));
            write
                .and_then(|mut open| io::Write::write_all(&mut open, value.as_bytes()))
                .map_err(|e| (file.clone(), e))?;
        }
        Ok(())
    }

    /// A descriptor to clone a process into the cgroup.
    pub fn open(&self) -> io::Result<OwnedFd> {
        Ok(open(&self.path, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?)
    }

    /// Its processes.
    pub fn pids(&self) -> io::Result<Vec<u32>> {
        let text = fs::read_to_string(self.path.join("cgroup.procs"))?;
        Ok(text.lines().filter_map(|line| line.parse().ok()).collect())
    }

    /// SIGKILL to all of its processes, those that are being forked included.
    pub fn kill(&self) -> io::Result<()> {
        fs::write(self.path.join("cgroup.kill"), "1")
    }

    /// Stops all of its processes, those that are being forked included, or lets them go on; returns when they do.
    pub async fn freeze(&self, frozen: bool) -> io::Result<()> {
        let wanted = u8::from(frozen);
        fs::write(self.path.join("cgroup.freeze"), wanted.to_string())?;
        self.until(&format!("frozen {wanted}")).await
    }

    /// Waits until no process is left in it, then removes it. Gone already: fine.
    pub async fn remove(&self) -> io::Result<()> {
        match fs::remove_dir(&self.path) {
            Err(error) if error.kind() == ErrorKind::ResourceBusy => {
                self.until("populated 0").await?;
                fs::remove_dir(&self.path)
            }
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            result => result,
        }
    }

    /// The kernel reports changes of cgroup.events as exceptional readiness, once per reading.
    async fn until(&self, line: &str) -> io::Result<()> {
        let path = self.path.join("cgroup.events");
        let events = sys::watch_priority(fs::File::open(&path)?)?;
        while !fs::read_to_string(&path)?.contains(line) {
            events.ready(Interest::PRIORITY).await?.clear_ready();
        }
        Ok(())
    }
}

/// Lets the children of `directory` have every controller that it has.
fn enable_controllers(directory: &Path) -> io::Result<()> {
    let available = fs::read_to_string(directory.join("cgroup.controllers"))?;
    let wanted: Vec<String> = available.split_whitespace().map(|name| format!("+{name}")).collect();
    if wanted.is_empty() { Ok(()) } else { fs::write(directory.join("cgroup.subtree_control"), wanted.join(" ")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(json: &str) -> Vec<(String, String)> {
        values(&serde_json::from_str(json).expect("resources")).expect("translates")
    }

    #[test]
    fn limits_of_the_guest_are_translated() {
        let list = of(
            r#"{"memory":{"limit":1048576,"reservation":4096},"cpu":{"shares":1024,"quota":50000,"period":100000,"burst":1000,"idle":1},"pids":{"limit":0}}"#,
        );
        let want = [
            ("memory.max", "1048576"),
            ("memory.low", "4096"),
            ("cpu.weight", "39"),
            ("cpu.max", "50000 100000"),
            ("cpu.max.burst", "1000"),
            ("cpu.idle", "1"),
            ("pids.max", "max"),
        ];
        assert_eq!(list, want.map(|(file, value)| (file.to_owned(), value.to_owned())));
    }

    #[test]
    fn numbers_of_the_host_are_left_out() {
        assert!(
            of(r#"{"cpu":{"cpus":"0-3","mems":"0"},"blockIO":{"weight":500},"memory":{"swap":1048576}}"#).is_empty()
        );
        assert!(of(r#"{"unified":{"cpuset.cpus":"0","io.max":"8:0 rbps=1"}}"#).is_empty());
    }

    #[test]
    fn a_unified_key_cannot_leave_the_cgroup() {
        let resources = serde_json::from_str(r#"{"unified":{"../cgroup.procs":"1"}}"#).expect("resources");
        assert!(matches!(values(&resources), Err(PlanError::Unified(_))));
    }
}
