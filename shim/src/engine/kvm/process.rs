//! The VMM's process: killed, reaped, and its log followed.
//!
//! Invariant: it is reaped once, by the task that watches over it. Killing it is legal at any time before and after.

use std::{
    os::{fd::OwnedFd, unix::process::ExitStatusExt},
    process::Child,
    sync::{Arc, Mutex},
};

use log::Level;
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, BufReader},
    net::unix::pipe,
    sync::watch,
};

use crate::{guest::cleaned, locked};

/// Longest line of the VMM's log.
const LOG_LINE_MAX: u64 = 4096;

/// The VMM's process.
#[derive(Debug)]
pub(super) struct Process {
    pub(super) child: Mutex<Option<Child>>,
    pub(super) gone: watch::Sender<bool>,
    /// Why it was killed, if we killed it.
    pub(super) verdict: Mutex<Option<String>>,
    pub(super) last_words: Mutex<String>,
}

impl Process {
    pub(super) fn new(child: Option<Child>) -> Self {
        Self {
            gone: watch::Sender::new(child.is_none()),
            child: Mutex::new(child),
            verdict: Mutex::new(None),
            last_words: Mutex::new(String::new()),
        }
    }

    /// Kills it; the first reason given is the one that counts.
    pub(super) fn kill(&self, why: &str) {
        locked(&self.verdict).get_or_insert_with(|| why.to_owned());
        if let Some(child) = locked(&self.child).as_mut() {
            // Fails only if it has ended already.
            let _ = child.kill();
        }
    }

    /// Kills it if it still runs, reaps it, and says how it ended.
    pub(super) fn reap(&self) -> String {
        let Some(mut child) = locked(&self.child).take() else { return "it was never started".to_owned() };
        let status = match child.try_wait() {
            Ok(Some(status)) => Ok(status),
            _ => {
                let _ = child.kill();
                child.wait()
            }
        };
        match status {
            Ok(status) if status.signal().is_some() => {
                format!("killed by signal {}", status.signal().unwrap_or_default())
            }
            Ok(status) => format!("exit code {}", status.code().unwrap_or_default()),
            Err(error) => format!("cannot be waited for: {error}"),
        }
    }
}

/// Copies the VMM's standard error into the log, line by line.
pub(super) async fn follow_log(process: Arc<Process>, log: OwnedFd) {
    let Ok(log) = pipe::Receiver::from_owned_fd(log) else { return };
    let mut log = BufReader::new(log);
    let mut line = Vec::new();
    loop {
        line.clear();
        match (&mut log).take(LOG_LINE_MAX).read_until(b'\n', &mut line).await {
            Ok(0) | Err(_) => return,
            Ok(_) => {
                let text = cleaned(String::from_utf8_lossy(&line).trim_end());
                log::log!(severity(&text), "vmm: {text}");
                if !text.is_empty() {
                    *locked(&process.last_words) = text;
                }
            }
        }
    }
}

/// The level that a line of the VMM's names; what names none is an accident of the process, and worth a warning.
fn severity(line: &str) -> Level {
    let name = line.strip_prefix("nacre-vmm: ").and_then(|rest| rest.split_once(':'));
    name.and_then(|(level, _)| level.parse().ok()).unwrap_or(Level::Warn)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_the_vmm_keep_their_level() {
        assert_eq!(severity("nacre-vmm: ERROR: virtio-fs: gone"), Level::Error);
        assert_eq!(severity("nacre-vmm: INFO: the guest powered off"), Level::Info);
        assert_eq!(severity("thread 'vcpu0' panicked at src/x.rs:1"), Level::Warn);
    }
}
