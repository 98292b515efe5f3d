//! The log: lines into the bundle's `log` fifo, which containerd copies into its own log.
//!
//! Nobody may be reading: containerd restarts, or has stopped. The fifo is therefore opened for reading and writing
//! (never EPIPE, never a blocking open) and non-blocking: a full pipe loses lines and never stalls the pod. Standard
//! error stays silent always. Lines have logrus's form, as containerd's own.

use std::{
    fmt::Write as _,
    fs::{File, OpenOptions},
    io::Write as _,
    os::unix::fs::OpenOptionsExt,
    path::Path,
    time::{SystemTime, UNIX_EPOCH},
};

use config::LogLevel;
use log::{LevelFilter, Log, Metadata, Record};
use rustix::fs::OFlags;

struct FifoLog {
    fifo: File,
    id: String,
}

/// Sends everything that this process logs to `fifo`. Without a fifo the process logs nothing.
pub fn install(fifo: &Path, id: &str) {
    let nonblocking = i32::try_from(OFlags::NONBLOCK.bits()).unwrap_or_default();
    let opened = OpenOptions::new().read(true).write(true).custom_flags(nonblocking).open(fifo);
    if let Ok(fifo) = opened
        && log::set_boxed_logger(Box::new(FifoLog { fifo, id: id.to_owned() })).is_ok()
    {
        log::set_max_level(LevelFilter::Info);
    }
}

/// Sets how much is logged.
pub fn set_level(level: LogLevel) {
    log::set_max_level(match level {
        LogLevel::Error => LevelFilter::Error,
        LogLevel::Warn => LevelFilter::Warn,
        LogLevel::Info => LevelFilter::Info,
        LogLevel::Debug => LevelFilter::Debug,
        LogLevel::Trace => LevelFilter::Trace,
    });
}

impl Log for FifoLog {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.level() <= log::max_level()
    }

    fn log(&self, record: &Record<'_>) {
        // One write per line: lines of several threads do not mix, and a line is in the pipe as a whole or not at all.
        let line = line(SystemTime::now(), &self.id, record);
        let _ = (&self.fifo).write(line.as_bytes());
    }

    fn flush(&self) {}
}

fn line(now: SystemTime, id: &str, record: &Record<'_>) -> String {
    let level = match record.level() {
        log::Level::Warn => "warning".to_owned(),
        other => other.as_str().to_ascii_lowercase(),
    };
    let message = record.args().to_string();
    let mut line = format!("time=\"{}\" level={level} msg=", rfc3339(now));
    // `{:?}` escapes quotes and newlines as logrus does. Writing to a String cannot fail.
    let _ = writeln!(line, "{message:?} shim=nacre id={id}");
    line
}

/// Seconds since the epoch as civil time (Howard Hinnant's days-to-civil).
fn rfc3339(now: SystemTime) -> String {
    let seconds = now.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let (days, rest) = (seconds / 86_400 + 719_468, seconds % 86_400);
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    let (hour, minute, second) = (rest / 3_600, rest / 60 % 60, rest % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn civil_time_is_right_at_the_edges() {
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (1_735_689_599, "2024-12-31T23:59:59Z"),
            (1_796_083_200, "2026-12-01T00:00:00Z"),
        ] {
            assert_eq!(rfc3339(UNIX_EPOCH + Duration::from_secs(seconds)), text);
        }
    }

    #[test]
    fn message_stays_on_one_line() {
        let record = Record::builder().args(format_args!("a \"b\"\nc")).level(log::Level::Warn).build();
        let text = line(UNIX_EPOCH, "c1", &record);
        assert_eq!(text, "time=\"1970-01-01T00:00:00Z\" level=warning msg=\"a \\\"b\\\"\\nc\" shim=nacre id=c1\n");
    }
}
