//! The log: lines into the bundle's `log` fifo, which containerd copies into its own log, and into the pod's log file.
//!
//! Nobody may be reading: containerd restarts, or has stopped. The fifo is therefore opened for reading and writing
//! (never EPIPE, never a blocking open) and non-blocking: a full pipe loses lines and never stalls the pod. Standard
//! error stays silent always. Lines have logrus's form, as containerd's own.
//!
//! The file ([`LogFile`]) is there as soon as the settings say where; what was said before is in the fifo only.

use std::{
    fmt::Write as _,
    fs::{File, OpenOptions},
    io::Write as _,
    os::unix::fs::OpenOptionsExt,
    path::Path,
    sync::OnceLock,
    time::{SystemTime, UNIX_EPOCH},
};

use config::{LogLevel, Shim};
use log::{Level, LevelFilter, Log, Metadata, Record};
use rustix::fs::OFlags;

use crate::log_file::LogFile;

/// The logger of this process.
#[derive(Debug, Default)]
struct Logger {
    fifo: OnceLock<File>,
    file: OnceLock<LogFile>,
    id: OnceLock<String>,
}

static LOGGER: Logger = Logger { fifo: OnceLock::new(), file: OnceLock::new(), id: OnceLock::new() };

/// Sends everything that this process logs to `fifo`. Without a fifo it goes to the log file alone.
pub fn install(fifo: &Path, id: &str) {
    let nonblocking = i32::try_from(OFlags::NONBLOCK.bits()).unwrap_or_default();
    if let Ok(fifo) = OpenOptions::new().read(true).write(true).custom_flags(nonblocking).open(fifo) {
        let _ = LOGGER.fifo.set(fifo);
    }
    let _ = LOGGER.id.set(id.to_owned());
    // The one logger of the process, set once.
    if log::set_logger(&LOGGER).is_ok() {
        log::set_max_level(LevelFilter::Info);
    }
}

/// Begins the pod's log file, and logs as much as the settings say.
pub fn configure(settings: &Shim, namespace: &str, id: &str) {
    set_level(settings.log_level);
    let Some(directory) = &settings.log_dir else { return };
    // Ids come again: a later pod's log must not be mixed with an earlier one's.
    let began: String = rfc3339(SystemTime::now()).chars().filter(char::is_ascii_alphanumeric).collect();
    match LogFile::create(directory, &format!("{namespace}_{id}_{began}"), settings.log_max_kib) {
        Ok(file) => drop(LOGGER.file.set(file)),
        Err(error) => log::warn!("no log file in {} (shim.log_dir): {error}", directory.display()),
    }
}

/// The pod is gone: decides about its log file.
pub fn finish(settings: &Shim) {
    if let Some(file) = LOGGER.file.get() {
        file.finish(settings.log_level >= LogLevel::Debug, settings.log_keep);
    }
}

/// Sets how much is logged.
fn set_level(level: LogLevel) {
    log::set_max_level(match level {
        LogLevel::Error => LevelFilter::Error,
        LogLevel::Warn => LevelFilter::Warn,
        LogLevel::Info => LevelFilter::Info,
        LogLevel::Debug => LevelFilter::Debug,
        LogLevel::Trace => LevelFilter::Trace,
    });
}

impl Log for Logger {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.level() <= log::max_level()
    }

    fn log(&self, record: &Record<'_>) {
        if !self.enabled(record.metadata()) {
            return;
        }
        let id = self.id.get().map_or("", String::as_str);
        let line = line(SystemTime::now(), id, record);
        // One write per line: lines of several threads do not mix, and a line is in the pipe as a whole or not at all.
        if let Some(mut fifo) = self.fifo.get() {
            let _ = fifo.write(line.as_bytes());
        }
        if let Some(file) = self.file.get() {
            file.append(&line, record.level() <= Level::Warn);
        }
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
