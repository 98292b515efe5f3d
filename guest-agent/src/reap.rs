//! The one caller of wait: every status is taken once, by whom it belongs to.
//!
//! As process 1 the agent inherits every orphan of the guest, so it must wait for children that it never started.
//! [`Reaper::run`] waits for any child at each SIGCHLD. A pid that was claimed with [`Reaper::watch`] has its status
//! published there; all others are orphans, and their status is dropped.
//!
//! No race: `watch` is called in the same uninterrupted step of the single thread as the clone, so `run` cannot take
//! a status before its claim. A pid cannot be reused before it was waited for, and the claim is removed by then.

use std::{
    collections::HashMap,
    io,
    sync::{Arc, Mutex, PoisonError},
    time::{SystemTime, UNIX_EPOCH},
};

use rustix::process::{Pid, WaitOptions, WaitStatus, wait};
use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    sync::watch,
};

/// How and when a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exit {
    /// 0 to 255; 128 + signal number when a signal ended it.
    pub status: u32,
    /// Nanoseconds since the epoch.
    pub at_ns: i64,
}

/// Becomes `Some` once, when the process has ended.
pub type ExitWatch = watch::Receiver<Option<Exit>>;

type Claims = Mutex<HashMap<u32, watch::Sender<Option<Exit>>>>;

/// Hands the status of each ended child to whoever claimed it.
#[derive(Clone, Default)]
pub struct Reaper {
    claims: Arc<Claims>,
}

impl Reaper {
    /// Claims the status of `pid`, a child cloned by the caller since it last awaited anything.
    pub fn watch(&self, pid: u32) -> ExitWatch {
        let (sender, receiver) = watch::channel(None);
        self.claims.lock().unwrap_or_else(PoisonError::into_inner).insert(pid, sender);
        receiver
    }

    /// Starts to listen for SIGCHLD; `run` does the rest. Separate, so that the signal is caught before the first child.
    pub fn listen() -> io::Result<Signal> {
        signal(SignalKind::child())
    }

    /// Waits for children for ever.
    pub async fn run(self, mut children: Signal) {
        // One signal may stand for several children.
        while children.recv().await.is_some() {
            while let Ok(Some((pid, status))) = wait(WaitOptions::NOHANG) {
                self.publish(pid, status);
            }
        }
    }

    fn publish(&self, pid: Pid, status: WaitStatus) {
        let pid = pid.as_raw_nonzero().get() as u32;
        let claim = self.claims.lock().unwrap_or_else(PoisonError::into_inner).remove(&pid);
        if let Some(claim) = claim {
            claim.send_replace(Some(Exit { status: status_of(status), at_ns: now_ns() }));
        }
    }
}

/// Waits until the process of `watch` has ended.
pub async fn ended(watch: &mut ExitWatch) -> Exit {
    match watch.wait_for(Option::is_some).await.map(|exit| *exit) {
        Ok(Some(exit)) => exit,
        // The sender goes only after it has sent; kept total so that no caller can hang or crash on it.
        _ => Exit { status: 255, at_ns: now_ns() },
    }
}

fn status_of(status: WaitStatus) -> u32 {
    match (status.exit_status(), status.terminating_signal()) {
        (Some(code), _) => code as u32 & 0xff,
        (None, Some(signal)) => 128 + signal as u32,
        (None, None) => 255,
    }
}

/// The guest's clock, as the protocol wants it.
pub fn now_ns() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |age| i64::try_from(age.as_nanos()).unwrap_or(i64::MAX))
}
