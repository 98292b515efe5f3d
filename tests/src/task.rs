//! A container that outlives its `ctr`.

use std::time::Duration;

use crate::{Outcome, RUNTIME, ctr, images, shell, until};

/// How long a task may take to be seen in a state.
const SETTLED_WITHIN: Duration = Duration::from_secs(60);

/// A detached container. It is not removed by itself: a test that fails shows what it left.
#[derive(Debug)]
pub struct Task {
    id: String,
}

impl Task {
    /// Runs `script` in busybox; returns when it runs.
    #[track_caller]
    #[must_use]
    pub fn start(id: &str, script: &str) -> Self {
        Self::start_with(id, &[], script)
    }

    /// The same, as a container of a pod, told by CRI's annotation.
    #[track_caller]
    #[must_use]
    pub fn start_in(pod: &str, id: &str, script: &str) -> Self {
        Self::start_with(id, &["--annotation", &format!("io.kubernetes.cri.sandbox-id={pod}")], script)
    }

    /// The same, with flags of `ctr run`.
    #[track_caller]
    #[must_use]
    pub fn start_with(id: &str, flags: &[&str], script: &str) -> Self {
        let mut words = vec!["run", "-d", "--runtime", RUNTIME];
        words.extend(flags);
        words.extend([images::BUSYBOX, id, "sh", "-c", script]);
        let _ = ctr(&words).expect_code(0);
        Self { id: id.into() }
    }

    /// A container that exists and whose task was made by somebody else.
    #[must_use]
    pub fn known(id: &str) -> Self {
        Self { id: id.into() }
    }

    /// Its id.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.id
    }

    /// What `ctr task ls` says of it: RUNNING, STOPPED, or nothing.
    #[must_use]
    pub fn status(&self) -> String {
        let list = ctr(&["task", "ls"]).stdout;
        let of_this = list.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
        of_this
            .filter(|words| words.first() == Some(&self.id.as_str()))
            .find_map(|words| words.last().map(|word| (*word).to_owned()))
            .unwrap_or_default()
    }

    /// A file in its root, by way of the process that stands for it on the host.
    #[must_use]
    pub fn in_root(&self, name: &str) -> String {
        let pid = shell(&format!("ctr task ls | awk '$1 == \"{}\" {{ print $2 }}'", self.id)).stdout;
        format!("/proc/{}/root/{name}", pid.trim())
    }

    /// Waits until it is seen in a state.
    #[track_caller]
    pub fn expect_status(&self, status: &str) {
        let what = format!("task {} to be {status}", self.id);
        until(&what, SETTLED_WITHIN, || (self.status() == status).then_some(()));
    }

    /// A verb of `ctr task` on it.
    #[must_use]
    pub fn verb(&self, words: &[&str]) -> Outcome {
        let mut all = vec!["task"];
        all.extend(words);
        all.push(&self.id);
        ctr(&all)
    }

    /// Ends it, if it has not ended; removes task and container.
    #[track_caller]
    pub fn remove(self) {
        if self.status() != "STOPPED" {
            let _ = self.verb(&["kill", "-s", "SIGKILL"]).expect_code(0);
            self.expect_status("STOPPED");
        }
        self.remove_stopped();
    }

    /// Removes the task of a process that has ended, and the container. `ctr` passes the exit code on.
    #[track_caller]
    pub fn remove_stopped(self) {
        let removed = self.verb(&["rm"]);
        assert!(!removed.stderr.contains("level=error") && self.status().is_empty(), "{removed:?}");
        let _ = ctr(&["container", "rm", &self.id]).expect_code(0);
    }
}
