//! Log lines on standard error, and never more than a guest may cause.
//!
//! Every line that a guest can provoke passes here, so here is the limit: [`MAX_LINES`] in the life of the process.
//! A machine that has said that much has said what is wrong with it.

use std::sync::atomic::{AtomicU32, Ordering};

use log::{LevelFilter, Log, Metadata, Record};

/// Lines after which the log falls silent.
const MAX_LINES: u32 = 2000;

struct Stderr {
    lines: AtomicU32,
}

static LOGGER: Stderr = Stderr { lines: AtomicU32::new(0) };

/// Starts logging at the level of `NACRE_VMM_LOG`.
pub fn init() {
    let level = std::env::var("NACRE_VMM_LOG").ok().and_then(|name| name.parse().ok()).unwrap_or(LevelFilter::Warn);
    // The one logger of the process, set once.
    if log::set_logger(&LOGGER).is_ok() {
        log::set_max_level(level);
    }
}

impl Log for Stderr {
    fn enabled(&self, _metadata: &Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &Record<'_>) {
        match self.lines.fetch_add(1, Ordering::Relaxed) {
            count if count < MAX_LINES => eprintln!("nacre-vmm: {}: {}", record.level(), record.args()),
            MAX_LINES => eprintln!("nacre-vmm: {MAX_LINES} lines written; the log ends here"),
            // Never wraps into zero: a process does not log 2^32 times, and wrapping would only log again.
            _ => {}
        }
    }

    fn flush(&self) {}
}
