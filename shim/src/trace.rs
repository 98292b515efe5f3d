//! Marks of how far a container has come, for the benchmark.
//!
//! If `NACRE_TRACE` names a file, each [`mark`] appends one line
//! `{"phase":"…","id":"…","ns":CLOCK_MONOTONIC}` with a single write, so that several processes may share the file.
//! Without the variable a mark costs one load. A trace that cannot be written is silently given up: it must never
//! change what is measured.

use std::{
    env,
    fs::{File, OpenOptions},
    io::Write,
    sync::OnceLock,
};

use rustix::time::{ClockId, clock_gettime};

/// The variable that names the file.
pub const VARIABLE: &str = "NACRE_TRACE";

static SINK: OnceLock<Option<File>> = OnceLock::new();

/// Records that `id` has reached `phase` now.
pub fn mark(phase: &str, id: &str) {
    if let Some(sink) = sink() {
        let now = clock_gettime(ClockId::Monotonic);
        let seconds = u64::try_from(now.tv_sec).unwrap_or_default();
        let nanoseconds = u64::try_from(now.tv_nsec).unwrap_or_default();
        write(sink, phase, id, seconds * 1_000_000_000 + nanoseconds);
    }
}

/// Records that `id` reached `phase` at a time that somebody else has taken.
pub fn mark_at(phase: &str, id: &str, ns: u64) {
    if let Some(sink) = sink() {
        write(sink, phase, id, ns);
    }
}

fn sink() -> Option<&'static File> {
    SINK.get_or_init(|| OpenOptions::new().create(true).append(true).open(env::var_os(VARIABLE)?).ok()).as_ref()
}

fn write(mut sink: &File, phase: &str, id: &str, ns: u64) {
    let _ = sink.write_all(format!("{{\"phase\":\"{phase}\",\"id\":\"{id}\",\"ns\":{ns}}}\n").as_bytes());
}
