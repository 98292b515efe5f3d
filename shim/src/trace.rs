//! Marks of how far a container has come, for the benchmark.
//!
//! If `NACRE_TRACE` names a file, each [`mark`] appends one line
//! `{"phase":"…","id":"…","ns":CLOCK_MONOTONIC}` with a single write, so that several processes may share the file. The
//! VMM's own mark has `"cpu_ns"`, too: what it has run on processors by then.
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
        let ns = seconds * 1_000_000_000 + nanoseconds;
        write(sink, phase, id, &format!("\"ns\":{ns}"));
    }
}

/// Records when the VMM of `id` first entered its guest, and what it had cost by then; both times are its own.
pub fn mark_entry(id: &str, ns: u64, cpu_ns: u64) {
    if let Some(sink) = sink() {
        write(sink, "entered", id, &format!("\"ns\":{ns},\"cpu_ns\":{cpu_ns}"));
    }
}

fn sink() -> Option<&'static File> {
    SINK.get_or_init(|| OpenOptions::new().create(true).append(true).open(env::var_os(VARIABLE)?).ok()).as_ref()
}

fn write(mut sink: &File, phase: &str, id: &str, times: &str) {
    let _ = sink.write_all(format!("{{\"phase\":\"{phase}\",\"id\":\"{id}\",{times}}}\n").as_bytes());
}
