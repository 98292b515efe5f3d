//! Whose fault it was that a boot ended without an exit code: the lab's, or nobody's.
//!
//! The emulator can hang: rarely, both CPUs of a plain boot lock up (design.md §6). Such a boot says nothing about what was
//! tested, so it is told apart here, by the lab kernel's console log and by how QEMU ended, and repeated by the caller. Once
//! an exit code has come, none of this is asked.

use std::fmt;

/// A fault of the lab.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fault {
    /// The lab's kernel found a CPU that did not schedule, or an RCU stall.
    LockUp(String),
    /// The lab's kernel panicked for another reason.
    Panic(String),
    /// QEMU ended, with what it said.
    Died(String),
    /// Nothing was heard for too long.
    Silent(String),
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::LockUp(line) => write!(f, "a CPU of the lab locked up ({line})"),
            Self::Panic(line) => write!(f, "the lab's kernel panicked ({line})"),
            Self::Died(why) => write!(f, "QEMU ended too early ({why})"),
            Self::Silent(what) => write!(f, "the lab fell silent ({what})"),
        }
    }
}

/// How a boot ended without an exit code.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ending {
    /// QEMU is gone; its last words and status.
    Gone(String),
    /// The deadline of the boot passed.
    NotUp,
    /// The command's time is over, and the lab was heard lately.
    CommandTooLong,
    /// The lab was not heard for too long while the command ran.
    NoBeat,
}

/// `None` means that the lab is well and the command took too long.
pub fn judge(console: &str, ending: &Ending) -> Option<Fault> {
    if let Some(line) =
        find(console, &["soft lockup", "hard LOCKUP", "rcu_preempt detected stalls", "self-detected stall"])
    {
        return Some(Fault::LockUp(line));
    }
    if let Some(line) = find(console, &["Kernel panic - not syncing"]) {
        return Some(Fault::Panic(line));
    }
    match ending {
        Ending::Gone(why) => Some(Fault::Died(why.clone())),
        Ending::NotUp => Some(Fault::Silent(format!("not up in time; last line: {}", last(console)))),
        Ending::NoBeat => Some(Fault::Silent(format!("no sign of life; last line: {}", last(console)))),
        Ending::CommandTooLong => None,
    }
}

/// The first line that has one of the marks, without its time stamp.
fn find(console: &str, marks: &[&str]) -> Option<String> {
    let line = console.lines().find(|l| marks.iter().any(|m| l.contains(m)))?;
    Some(line.split_once("] ").map_or(line, |(_, rest)| rest).trim().to_string())
}

/// The last words on the console.
fn last(console: &str) -> &str {
    console.lines().rev().map(str::trim).find(|l| !l.is_empty()).unwrap_or("none")
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOCKUP: &str = "[    3.1] lab-init: up\n\
        [   44.000000] watchdog: BUG: soft lockup - CPU#1 stuck for 22s! [containerd:312]\n\
        [   44.000100] Kernel panic - not syncing: softlockup: hung tasks\n";

    #[test]
    fn a_lockup_is_the_labs_fault_however_it_ended() {
        for ending in [Ending::Gone("exit status: 0".into()), Ending::NotUp, Ending::CommandTooLong, Ending::NoBeat] {
            match judge(LOCKUP, &ending) {
                Some(Fault::LockUp(line)) => assert!(line.starts_with("watchdog: BUG: soft lockup - CPU#1"), "{line}"),
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn another_panic_is_named() {
        let log = "[  1.0] Kernel panic - not syncing: VFS: Unable to mount root fs\n";
        let fault = judge(log, &Ending::Gone(String::new()));
        assert_eq!(fault, Some(Fault::Panic("Kernel panic - not syncing: VFS: Unable to mount root fs".into())));
    }

    #[test]
    fn a_slow_command_in_a_healthy_lab_is_the_commands_fault() {
        assert_eq!(judge("[  3.1] lab-init: up\n", &Ending::CommandTooLong), None);
    }

    #[test]
    fn death_and_silence_are_the_labs_fault() {
        assert!(matches!(judge("", &Ending::Gone("signal: 9".into())), Some(Fault::Died(w)) if w == "signal: 9"));
        assert!(matches!(judge("x\n\n", &Ending::NotUp), Some(Fault::Silent(w)) if w.ends_with("last line: x")));
        assert!(matches!(judge("", &Ending::NoBeat), Some(Fault::Silent(_))));
    }
}
