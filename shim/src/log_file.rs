//! The log file of one pod: what is left to read when the pod, its VM or its shim is gone.
//!
//! ```text
//!   create ──► lines (one write each, never flushed) ──┬─ ended well, nothing noteworthy ──► removed
//!                │ half of the limit reached           ├─ ended well, a warning or worse  ──► kept, the oldest pruned
//!                └──► renamed to .log.1, begun anew    └─ killed: `delete` prunes          ──► kept
//! ```
//!
//! * A pod's log takes at most `shim.log_max_kib`: two files of half of it each. A single line is cut to fit.
//! * `shim.log_keep` logs of pods that are gone stay, the newest. A live shim holds a lock on its file, which ends with it
//!   however it ends; so pruning, by whatever shim, never takes a live pod's log.
//! * Nothing of this may cost a start: there is one open, and nothing is looked for or removed before the pod ends.
//! * Failure path: a file that cannot be written is given up. The log fifo still has every line.

use std::{
    fs::{self, DirBuilder, File, OpenOptions},
    io::{self, Write},
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::Mutex,
    time::SystemTime,
};

use rustix::fs::{FlockOperation, flock};

use crate::locked;

/// What the names of log files end with, and of their older halves.
const SUFFIX: &str = ".log";
const OLDER: &str = ".log.1";

/// One pod's log.
#[derive(Debug)]
pub struct LogFile {
    path: PathBuf,
    half: u64,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// `None` once it was given up.
    file: Option<File>,
    written: u64,
    noteworthy: bool,
}

impl LogFile {
    /// Makes `DIRECTORY/NAME.log`, and the directory if it is missing.
    pub fn create(directory: &Path, name: &str, max_kib: u32) -> io::Result<Self> {
        // Ids are plain names by containerd's rules; a path must not come from anyone.
        let path = directory.join(format!("{}{SUFFIX}", name.replace('/', "_")));
        let file = match open(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                // A guest's console is nobody else's to read.
                DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
                open(&path)?
            }
            other => other?,
        };
        let state = State { file: Some(file), written: 0, noteworthy: false };
        Ok(Self { path, half: u64::from(max_kib) * 1024 / 2, state: Mutex::new(state) })
    }

    /// Appends one line; `noteworthy` ones keep the file from being removed.
    pub fn append(&self, line: &str, noteworthy: bool) {
        let mut state = locked(&self.state);
        state.noteworthy |= noteworthy;
        let end = line.floor_char_boundary(usize::try_from(self.half).unwrap_or(usize::MAX));
        let line = &line.as_bytes()[..end];
        if state.written + line.len() as u64 > self.half {
            state.file = fs::rename(&self.path, older(&self.path)).and_then(|()| open(&self.path)).ok();
            state.written = 0;
        }
        if let Some(file) = &mut state.file {
            match file.write_all(line) {
                Ok(()) => state.written += line.len() as u64,
                Err(_) => state.file = None,
            }
        }
    }

    /// The pod is gone, and its shim is about to be: removes the log unless somebody will want it.
    pub fn finish(&self, keep_anyway: bool, keep: u32) {
        let noteworthy = locked(&self.state).noteworthy;
        if keep == 0 || (!noteworthy && !keep_anyway) {
            remove(&self.path);
        } else if let Some(directory) = self.path.parent() {
            // Ours is one of those to keep, and still locked: pruning does not see it.
            prune(directory, keep - 1);
        }
    }
}

/// Removes all logs of pods that are gone but the newest `keep`. A log that is in the way of nobody may stay: every
/// failure is the next prune's to mend.
pub fn prune(directory: &Path, keep: u32) {
    let mut logs: Vec<(SystemTime, PathBuf)> = fs::read_dir(directory)
        .into_iter()
        .flatten()
        .flatten()
        .filter(|entry| entry.file_name().to_string_lossy().ends_with(SUFFIX))
        .filter_map(|entry| Some((entry.metadata().ok()?.modified().ok()?, entry.path())))
        .collect();
    logs.sort();
    let gone: Vec<PathBuf> = logs.into_iter().map(|(_, path)| path).filter(|path| is_abandoned(path)).collect();
    let surplus = gone.len().saturating_sub(keep as usize);
    gone.iter().take(surplus).for_each(|path| remove(path));
}

fn open(path: &Path) -> io::Result<File> {
    let file = OpenOptions::new().create(true).append(true).mode(0o600).open(path)?;
    flock(&file, FlockOperation::NonBlockingLockExclusive)?;
    Ok(file)
}

/// No live shim holds its lock.
fn is_abandoned(path: &Path) -> bool {
    File::open(path).is_ok_and(|file| flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok())
}

fn remove(path: &Path) {
    let _ = fs::remove_file(path);
    let _ = fs::remove_file(older(path));
}

fn older(path: &Path) -> PathBuf {
    path.with_extension(&OLDER[1..])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(directory: &Path) -> Vec<String> {
        let entries = fs::read_dir(directory).expect("readable").flatten();
        let mut names: Vec<_> = entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }

    #[test]
    fn log_of_a_pod_that_ended_well_goes_with_it() {
        let parent = tempfile::tempdir().expect("temporary directory");
        let directory = parent.path().join("made/on/demand");
        let log = LogFile::create(&directory, "default_a/b", 16).expect("create");
        log.append("fine\n", false);
        assert_eq!(fs::read_to_string(directory.join("default_a_b.log")).expect("readable"), "fine\n");
        log.finish(false, 10);
        assert!(names(&directory).is_empty());
    }

    #[test]
    fn log_with_a_warning_stays_and_so_does_every_log_that_was_asked_for() {
        let directory = tempfile::tempdir().expect("temporary directory");
        let warned = LogFile::create(directory.path(), "a", 16).expect("create");
        warned.append("oh\n", true);
        warned.append("fine\n", false);
        warned.finish(false, 10);
        let debug = LogFile::create(directory.path(), "b", 16).expect("create");
        debug.finish(true, 10);
        assert_eq!(names(directory.path()), ["a.log", "b.log"]);
    }

    #[test]
    fn log_never_takes_more_than_its_limit_and_ends_with_the_last_line() {
        let directory = tempfile::tempdir().expect("temporary directory");
        let log = LogFile::create(directory.path(), "a", 16).expect("create");
        for number in 0..10_000 {
            log.append(&format!("line {number}\n"), false);
        }
        log.append(&format!("{}é\n", "x".repeat(8191)), false);
        log.append("last\n", false);
        let sizes = ["a.log", "a.log.1"].map(|name| fs::metadata(directory.path().join(name)).expect("there").len());
        assert!(sizes.iter().sum::<u64>() <= 16 * 1024, "{sizes:?}");
        assert_eq!(fs::read_to_string(directory.path().join("a.log")).expect("readable"), "last\n");
        log.finish(false, 10);
        assert!(names(directory.path()).is_empty());
    }

    #[test]
    fn pruning_keeps_the_newest_and_never_takes_a_live_pods_log() {
        let directory = tempfile::tempdir().expect("temporary directory");
        let live = LogFile::create(directory.path(), "live", 16).expect("create");
        for (age, name) in [(5, "oldest"), (4, "older"), (3, "old")] {
            let log = LogFile::create(directory.path(), name, 16).expect("create");
            let modified = SystemTime::now() - std::time::Duration::from_secs(age);
            locked(&log.state).file.as_ref().expect("open").set_modified(modified).expect("time");
        }
        fs::write(directory.path().join("oldest.log.1"), "").expect("write");
        let ours = LogFile::create(directory.path(), "ours", 16).expect("create");
        ours.append("oh\n", true);
        ours.finish(false, 2);
        assert_eq!(names(directory.path()), ["live.log", "old.log", "ours.log"]);
        drop(live);
        prune(directory.path(), 0);
        assert_eq!(names(directory.path()), ["ours.log"]);
    }
}
