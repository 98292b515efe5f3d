//! The bundle directory: what containerd and we leave in it for each other.
//!
//! | file | written by | read by |
//! |--|--|--|
//! | `config.json` | containerd | `start` (grouping), Create |
//! | `log` | containerd (a fifo) | the server writes into it |
//! | `address` | `start` | containerd 1.6 and 1.7 after a restart; `delete` |
//! | `shim.pid` | `start`, and Create for further containers of the group | `delete` |
//! | `vmm.pid`, `holder.pid` | the server | `delete` |
//! | `cgroup` | the server | `delete` |
//!
//! Process records are `PID STARTTIME`: a pid alone may long belong to somebody else. A server that ends well leaves
//! `ended` as its record: half a record, or none, means that the bundle is being taken away. Invariant: [`Process::kill`] never
//! signals a process that was not recorded. Failure path: a missing or unreadable record means "nothing to do", because
//! `delete` runs on half-made and half-removed bundles alike.

use std::{
    fs, io,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    time::Duration,
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal},
};

/// Annotations that say which containers share a VM, the most specific first.
pub const GROUP_ANNOTATIONS: [&str; 2] = ["io.containerd.runc.v2.group", "io.kubernetes.cri.sandbox-id"];

/// The address of the server.
pub const ADDRESS: &str = "address";
/// The OCI runtime spec.
pub const CONFIG: &str = "config.json";
/// containerd's log fifo.
pub const LOG: &str = "log";
/// Record of the server.
pub const SHIM_PID: &str = "shim.pid";
/// What [`SHIM_PID`] says of a server that has ended as it should.
const ENDED: &str = "ended";
/// Record of the VMM.
pub const VMM_PID: &str = "vmm.pid";
/// Record of the container's holder.
pub const HOLDER_PID: &str = "holder.pid";
/// Where the root file system is mounted.
pub const ROOTFS: &str = "rootfs";

/// A bundle directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bundle(PathBuf);

impl Bundle {
    /// Names a directory, which need not exist.
    pub fn new(directory: impl Into<PathBuf>) -> Self {
        Self(directory.into())
    }

    /// The directory.
    #[must_use]
    pub fn directory(&self) -> &Path {
        &self.0
    }

    /// A file in it.
    #[must_use]
    pub fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// The name of the group that the container belongs to, if its annotations name one.
    pub fn group(&self) -> io::Result<Option<String>> {
        let text = fs::read_to_string(self.path(CONFIG))?;
        // Most containers have no group, and `start` is executed for each: do not parse what cannot matter.
        if !GROUP_ANNOTATIONS.iter().any(|key| text.contains(key)) {
            return Ok(None);
        }
        let spec: serde_json::Value = serde_json::from_str(&text)?;
        let value = |key: &&str| spec.get("annotations")?.get(*key)?.as_str().filter(|value| !value.is_empty());
        Ok(GROUP_ANNOTATIONS.iter().find_map(value).map(str::to_owned))
    }

    /// Says where the server listens.
    pub fn write_address(&self, address: &str) -> io::Result<()> {
        fs::write(self.path(ADDRESS), address)
    }

    /// Where the server listens, if `start` has come that far.
    #[must_use]
    pub fn address(&self) -> Option<String> {
        fs::read_to_string(self.path(ADDRESS)).ok().filter(|address| !address.is_empty())
    }

    /// Whether another bundle of the namespace is served at `address`, too.
    #[must_use]
    pub fn shares(&self, address: &str) -> bool {
        let Some(siblings) = self.0.parent().and_then(|namespace| fs::read_dir(namespace).ok()) else { return false };
        siblings
            .flatten()
            .map(|entry| Self::new(entry.path()))
            .any(|other| other.0.file_name() != self.0.file_name() && other.address().as_deref() == Some(address))
    }

    /// Remembers a running process under `name`.
    pub fn record(&self, name: &str, pid: u32) -> io::Result<()> {
        let process = Process::running(pid)?;
        fs::write(self.path(name), format!("{} {}", process.pid, process.start_time))
    }

    /// The process remembered under `name`.
    #[must_use]
    pub fn recorded(&self, name: &str) -> Option<Process> {
        Process::parse(&fs::read_to_string(self.path(name)).ok()?)
    }

    /// Says that the server has ended and left nothing. A bundle that is gone needs no such word.
    pub fn record_end(&self) {
        let _ = fs::write(self.path(SHIM_PID), ENDED);
    }

    /// Whether the server has ended and left nothing.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        fs::read_to_string(self.path(SHIM_PID)).is_ok_and(|text| text == ENDED)
    }

    /// Forgets `name`.
    pub fn forget(&self, name: &str) {
        let _ = fs::remove_file(self.path(name));
    }
}

/// A process that cannot be mistaken for a later one of the same pid.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Process {
    /// Its pid.
    pub pid: u32,
    start_time: u64,
}

impl Process {
    /// The process that has `pid` now.
    pub fn running(pid: u32) -> io::Result<Self> {
        Ok(Self { pid, start_time: start_time(pid)? })
    }

    fn parse(text: &str) -> Option<Self> {
        let (pid, start_time) = text.trim().split_once(' ')?;
        Some(Self { pid: pid.parse().ok()?, start_time: start_time.parse().ok()? })
    }

    /// A descriptor of the very process that was recorded, if it is there.
    fn pinned(self) -> Option<OwnedFd> {
        let pid = i32::try_from(self.pid).ok().and_then(Pid::from_raw)?;
        // The descriptor comes first: the check is then about the very process that it pins.
        let pidfd = pidfd_open(pid, PidfdFlags::empty()).ok()?;
        (start_time(self.pid).ok() == Some(self.start_time)).then_some(pidfd)
    }

    /// Whether it is still the one that was recorded, and has not ended.
    #[must_use]
    pub fn is_alive(self) -> bool {
        self.pinned().is_some_and(|pidfd| {
            let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
            matches!(poll(&mut [PollFd::new(&pidfd, PollFlags::IN)], Some(&at_once)), Ok(0))
        })
    }

    /// Kills it if it is still the one that was recorded, and waits up to `patience` until it is gone.
    pub fn kill(self, patience: Duration) {
        let Some(pidfd) = self.pinned() else { return };
        if pidfd_send_signal(&pidfd, Signal::KILL).is_ok() {
            let timeout = Timespec::try_from(patience).ok();
            let _ = poll(&mut [PollFd::new(&pidfd, PollFlags::IN)], timeout.as_ref());
        }
    }
}

/// Field 22 of `/proc/PID/stat`. The name in field 2 may hold spaces and parentheses: count from the last one.
fn start_time(pid: u32) -> io::Result<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let after_name = stat.rsplit_once(')').map(|(_, rest)| rest);
    let field = after_name.and_then(|rest| rest.split_ascii_whitespace().nth(19));
    field.and_then(|text| text.parse().ok()).ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    fn bundle_with(config: &str) -> (tempfile::TempDir, Bundle) {
        let parent = tempfile::tempdir().expect("temporary directory");
        let bundle = Bundle::new(parent.path().join("c1"));
        fs::create_dir(bundle.directory()).expect("create the bundle");
        fs::write(bundle.path(CONFIG), config).expect("write the config");
        (parent, bundle)
    }

    #[test]
    fn group_is_the_first_annotation_that_is_set() {
        for (config, group) in [
            (r#"{"annotations":{}}"#, None),
            (r#"{"annotations":{"io.kubernetes.cri.sandbox-id":"pod"}}"#, Some("pod")),
            (r#"{"annotations":{"io.kubernetes.cri.sandbox-id":"pod","io.containerd.runc.v2.group":"g"}}"#, Some("g")),
            (r#"{"process":{"args":["io.kubernetes.cri.sandbox-id"]}}"#, None),
            (r#"{"annotations":{"io.containerd.runc.v2.group":""}}"#, None),
        ] {
            let (_parent, bundle) = bundle_with(config);
            assert_eq!(bundle.group().expect("readable").as_deref(), group, "{config}");
        }
    }

    #[test]
    fn bundles_with_one_address_share_a_server() {
        let (parent, bundle) = bundle_with("{}");
        bundle.write_address("unix:///s").expect("write");
        assert!(!bundle.shares("unix:///s"));
        let other = Bundle::new(parent.path().join("c2"));
        fs::create_dir(other.directory()).expect("create the other bundle");
        other.write_address("unix:///s").expect("write");
        assert!(bundle.shares("unix:///s") && other.shares("unix:///s"));
        assert!(!bundle.shares("unix:///t"));
    }

    #[test]
    fn recorded_process_is_killed_and_a_later_one_of_its_pid_is_not() {
        let (_parent, bundle) = bundle_with("{}");
        let mut child = Command::new("sleep").arg("60").stdout(Stdio::null()).spawn().expect("spawn");
        bundle.record(SHIM_PID, child.id()).expect("record");
        let recorded = bundle.recorded(SHIM_PID).expect("recorded");
        Process { start_time: recorded.start_time + 1, ..recorded }.kill(Duration::ZERO);
        assert_eq!(child.try_wait().expect("wait"), None);
        assert!(recorded.is_alive());
        recorded.kill(Duration::from_secs(5));
        assert!(!recorded.is_alive(), "a zombie does nothing any more");
        assert!(child.wait().expect("wait").code().is_none());
        assert!(!recorded.is_alive());
    }

    #[test]
    fn damaged_record_is_no_record() {
        let (_parent, bundle) = bundle_with("{}");
        for text in ["", "12", "a b", "1 2 3"] {
            fs::write(bundle.path(SHIM_PID), text).expect("write");
            assert_eq!(bundle.recorded(SHIM_PID), None, "{text:?}");
        }
    }
}
