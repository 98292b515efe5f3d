//! The processes that faults are done to: found by program, signalled by pid.

use std::{
    fs,
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, kill_process};

use crate::until;

/// A program of which faults are expected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Victim {
    /// The machine's process.
    Vmm,
    /// The server; not the short-lived `start` and `delete`.
    Shim,
    /// The daemon.
    Containerd,
}

impl Victim {
    fn is(self, program: &str, arguments: &str) -> bool {
        match self {
            Self::Vmm => program == "nacre-vmm",
            Self::Shim => program == "containerd-shim-nacre-v2" && arguments.contains("-socket"),
            Self::Containerd => program == "containerd",
        }
    }

    /// Those that live now.
    #[must_use]
    pub fn pids(self) -> Vec<Pid> {
        let mut pids = Vec::new();
        for entry in fs::read_dir("/proc").expect("/proc is mounted").flatten() {
            let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()).and_then(Pid::from_raw)
            else {
                continue;
            };
            // A process may end while we look at it.
            let Ok(program) = fs::read_link(entry.path().join("exe")) else { continue };
            let arguments = fs::read(entry.path().join("cmdline")).unwrap_or_default();
            let name = program.file_name().unwrap_or_default().to_string_lossy();
            if self.is(&name, &String::from_utf8_lossy(&arguments)) {
                pids.push(pid);
            }
        }
        pids
    }

    /// Waits for the one that is about to start.
    #[track_caller]
    pub fn appears(self) -> Pid {
        until(&format!("{self:?} to start"), Duration::from_secs(60), || self.pids().first().copied())
    }

    /// SIGKILL.
    #[track_caller]
    pub fn kill(self) {
        self.signal(Signal::KILL);
    }

    /// SIGSTOP: it is there and does nothing.
    #[track_caller]
    pub fn stop(self) {
        self.signal(Signal::STOP);
    }

    /// SIGCONT.
    #[track_caller]
    pub fn go_on(self) {
        self.signal(Signal::CONT);
    }

    #[track_caller]
    fn signal(self, signal: Signal) {
        let pids = self.pids();
        assert!(!pids.is_empty(), "no {self:?} runs");
        for pid in pids {
            kill_process(pid, signal).expect("the process lives");
        }
    }

    /// Descriptors that the one process of its kind has open.
    #[track_caller]
    #[must_use]
    pub fn descriptors(self) -> Vec<String> {
        let pids = self.pids();
        let [pid] = pids[..] else { panic!("one {self:?} was expected: {pids:?}") };
        let open = fs::read_dir(format!("/proc/{}/fd", pid.as_raw_nonzero())).expect("the process lives");
        open.flatten()
            .filter_map(|entry| fs::read_link(entry.path()).ok())
            .map(|link| link.display().to_string())
            .collect()
    }
}

/// Runs `work`, and fails the test if it took longer than `seconds`.
#[track_caller]
pub fn within<T>(seconds: u64, work: impl FnOnce() -> T) -> T {
    let started = Instant::now();
    let result = work();
    let took = started.elapsed();
    assert!(took < Duration::from_secs(seconds), "took {took:?}, and may take {seconds} s");
    result
}
