//! Processes, as the shim records them and as `/proc` shows them.

use std::{fs, path::Path};

/// A record, `PID STARTTIME`: a pid alone may long belong to somebody else.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Recorded {
    pid: u32,
    start_time: u64,
}

/// A process that is there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Process {
    /// Its pid.
    pub pid: u32,
    /// Seconds since its start.
    pub age_s: u64,
    /// Its proportional share of the host's memory, if we may know it.
    pub pss_kib: Option<u64>,
}

impl Recorded {
    /// Reads a record of the shim's; `None` if there is none, or none of this form.
    pub fn read(file: &Path) -> Option<Self> {
        let text = fs::read_to_string(file).ok()?;
        let (pid, start_time) = text.trim().split_once(' ')?;
        Some(Self { pid: pid.parse().ok()?, start_time: start_time.parse().ok()? })
    }

    /// The process, if it still is the one that was recorded.
    pub fn find(self, proc: &Path) -> Option<Process> {
        let folder = proc.join(self.pid.to_string());
        if start_time(&folder)? != self.start_time {
            return None;
        }
        let ticks = rustix::param::clock_ticks_per_second().max(1);
        let uptime = fs::read_to_string(proc.join("uptime")).ok();
        let uptime = uptime.and_then(|text| text.split('.').next()?.parse::<u64>().ok()).unwrap_or_default();
        let age_s = uptime.saturating_sub(self.start_time / ticks);
        Some(Process { pid: self.pid, age_s, pss_kib: pss_kib(&folder) })
    }
}

/// Field 22 of `stat`. The name in field 2 may hold spaces and parentheses: count from the last one. A zombie is gone.
fn start_time(folder: &Path) -> Option<u64> {
    let stat = fs::read_to_string(folder.join("stat")).ok()?;
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace();
    if matches!(fields.next()?, "Z" | "X") {
        return None;
    }
    fields.nth(18)?.parse().ok()
}

fn pss_kib(folder: &Path) -> Option<u64> {
    let rollup = fs::read_to_string(folder.join("smaps_rollup")).ok()?;
    let line = rollup.lines().find_map(|line| line.strip_prefix("Pss:"))?;
    line.trim().strip_suffix("kB")?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A `/proc` in which pid 7 started after 200 ticks and has 1500 KiB.
    fn proc(state: &str) -> tempfile::TempDir {
        let proc = tempfile::tempdir().expect("temporary directory");
        let folder = proc.path().join("7");
        fs::create_dir(&folder).expect("create");
        let rest = "1 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 200 999";
        fs::write(folder.join("stat"), format!("7 (a) b) {state} {rest}")).expect("write");
        fs::write(folder.join("smaps_rollup"), "0-f ---p [rollup]\nRss: 2000 kB\nPss:      1500 kB\nPss_Dirty: 1 kB\n")
            .expect("write");
        fs::write(proc.path().join("uptime"), "100.50 3.0\n").expect("write");
        proc
    }

    #[test]
    fn process_is_found_with_its_age_and_memory() {
        let proc = proc("S");
        let found = Recorded { pid: 7, start_time: 200 }.find(proc.path()).expect("there");
        let age_s = 100 - 200 / rustix::param::clock_ticks_per_second();
        assert_eq!(found, Process { pid: 7, age_s, pss_kib: Some(1500) });
    }

    #[test]
    fn later_process_of_the_same_pid_and_a_zombie_are_not_it() {
        assert_eq!(Recorded { pid: 7, start_time: 199 }.find(proc("S").path()), None);
        assert_eq!(Recorded { pid: 8, start_time: 200 }.find(proc("S").path()), None);
        assert_eq!(Recorded { pid: 7, start_time: 200 }.find(proc("Z").path()), None);
    }

    #[test]
    fn our_own_process_is_read_from_the_real_proc() {
        let folder = Path::new("/proc/self");
        assert!(start_time(folder).is_some_and(|ticks| ticks > 0));
        assert!(pss_kib(folder).is_some_and(|kib| kib > 0));
    }
}
