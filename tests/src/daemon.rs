//! The lab's containerd: ended and started again, as a service manager or a fault would.

use std::time::Duration;

use crate::{Victim, shell, until};

/// Ends containerd at once and waits until it is gone; its containers stay.
#[track_caller]
pub fn kill_containerd() {
    Victim::Containerd.kill();
    until("containerd to be gone", Duration::from_secs(30), || Victim::Containerd.pids().is_empty().then_some(()));
}

/// Starts containerd and waits until it serves.
#[track_caller]
pub fn start_containerd() {
    let script = "/usr/lib/lab/await-ready /run/lab/containerd.notify /var/log/containerd.log containerd";
    let _ = shell(script).expect_code(0);
}

/// Name of the lab's containerd, as `lab run --containerd` takes it.
#[must_use]
pub fn containerd_name() -> String {
    std::env::var("LAB_CONTAINERD").unwrap_or_else(|_| "sid".into())
}
