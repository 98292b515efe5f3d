//! What is there that a run may leave behind: processes (the namespaces' holders among them), mounts, sockets, bundles,
//! cgroups, loop devices.

use std::{
    collections::BTreeSet,
    fs,
    path::Path,
    thread,
    time::{Duration, Instant},
};

/// Everything that belongs to Nacre or to a task of containerd, by name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Census {
    things: BTreeSet<String>,
}

/// Bundles of running tasks, and the sockets of their shims.
const FOLDERS: [&str; 3] = ["/run/containerd/io.containerd.runtime.v2.task/default", "/run/containerd/s", "/run/nacre"];

/// containerd removes a bundle and reaps a shim a moment after `ctr` has returned.
const SETTLED_WITHIN: Duration = Duration::from_secs(10);

impl Census {
    /// Counts now.
    #[must_use]
    pub fn take() -> Self {
        let mut things = BTreeSet::new();
        processes(&mut things);
        mounts(&mut things);
        cgroups(Path::new("/sys/fs/cgroup"), &mut things);
        loop_devices(&mut things);
        for folder in FOLDERS {
            for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
                things.insert(format!("entry {}", entry.path().display()));
            }
        }
        Self { things }
    }

    /// Fails the test unless everything that has appeared since is gone, or goes within a bounded time.
    #[track_caller]
    pub fn expect_nothing_new(&self) {
        let deadline = Instant::now() + SETTLED_WITHIN;
        loop {
            let now = Self::take();
            let left: Vec<_> = now.things.difference(&self.things).collect();
            if left.is_empty() {
                return;
            }
            assert!(Instant::now() < deadline, "left behind: {left:#?}");
            thread::sleep(Duration::from_millis(50));
        }
    }
}

fn processes(things: &mut BTreeSet<String>) {
    for entry in fs::read_dir("/proc").expect("/proc is mounted").flatten() {
        let pid = entry.file_name().to_string_lossy().into_owned();
        if !pid.bytes().all(|byte| byte.is_ascii_digit()) {
            continue;
        }
        // A process may end while we look at it.
        let Ok(program) = fs::read_link(entry.path().join("exe")) else { continue };
        let program = program.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if program.contains("nacre") && !program.starts_with("cases") {
            things.insert(format!("process {program} {pid}"));
        }
    }
}

fn cgroups(folder: &Path, things: &mut BTreeSet<String>) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        // A cgroup may end while we look at it.
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            things.insert(format!("cgroup {}", entry.path().display()));
            cgroups(&entry.path(), things);
        }
    }
}

fn loop_devices(things: &mut BTreeSet<String>) {
    for entry in fs::read_dir("/sys/block").into_iter().flatten().flatten() {
        if let Ok(file) = fs::read_to_string(entry.path().join("loop/backing_file")) {
            things.insert(format!("loop device {} of {}", entry.file_name().display(), file.trim()));
        }
    }
}

fn mounts(things: &mut BTreeSet<String>) {
    let table = fs::read_to_string("/proc/self/mountinfo").expect("the mount table is readable");
    for line in table.lines() {
        let Some(target) = line.split(' ').nth(4) else { continue };
        if FOLDERS.iter().any(|folder| Path::new(target).starts_with(folder)) {
            things.insert(format!("mount {target}"));
        }
    }
}
