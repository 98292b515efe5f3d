//! What an operator may choose, and what it means.
//!
//! ```text
//!   /etc/nacre/config.toml ──► raw (as written; unknown keys refused by name) ──► spec (checked, defaults filled in)
//! ```
//!
//! * The file is optional: without it every key has its default. `NACRE_CONFIG` names another file, which then must
//!   exist: a typing error in a path must not silently mean "defaults".
//! * Failure paths: a file that cannot be read, text that is not TOML, a key that does not exist, a value out of
//!   range. Each error names the file, the line, the key and the legal range, because its reader sees it as the answer
//!   to `ctr run`, far from this file.
//! * Invariant: a [`Spec`] is legal as a whole; nobody downstream checks a range again.
#![forbid(unsafe_code)]

mod raw;
mod spec;

use std::{
    env, fs, io,
    path::{Path, PathBuf},
};

pub use spec::{LogLevel, Machine, Paths, Shim, Spec};

/// Where the file is looked for when `NACRE_CONFIG` does not say otherwise.
pub const DEFAULT_FILE: &str = "/etc/nacre/config.toml";

/// The environment variable that names another file.
pub const FILE_VARIABLE: &str = "NACRE_CONFIG";

/// Why a configuration cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file exists, or was asked for by name, and cannot be read.
    #[error("cannot read the configuration {}: {source}", file.display())]
    Unreadable {
        /// The file.
        file: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// Not TOML, a key that does not exist, or a value of the wrong type.
    #[error("{}:{line}: {message} (at `{text}`)", file.display())]
    Malformed {
        /// The file.
        file: PathBuf,
        /// Line, from 1.
        line: usize,
        /// The line as written.
        text: String,
        /// What is wrong with it.
        message: String,
    },
    /// A value that has the right type and an illegal value.
    #[error("{}:{line}: {key} = {value} is not legal; it must be {legal}", file.display())]
    Illegal {
        /// The file.
        file: PathBuf,
        /// Line, from 1.
        line: usize,
        /// Section and key.
        key: &'static str,
        /// What was written.
        value: String,
        /// What may be written.
        legal: &'static str,
    },
}

/// Loads the configuration that the environment asks for.
pub fn load() -> Result<Spec, ConfigError> {
    match env::var_os(FILE_VARIABLE) {
        Some(file) => read(Path::new(&file)),
        None => match read(Path::new(DEFAULT_FILE)) {
            Err(ConfigError::Unreadable { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                Ok(Spec::default())
            }
            other => other,
        },
    }
}

/// Loads one file, which must exist.
pub fn read(file: &Path) -> Result<Spec, ConfigError> {
    let text = fs::read_to_string(file).map_err(|source| ConfigError::Unreadable { file: file.to_owned(), source })?;
    parse(file, &text)
}

/// Parses the text of `file`, whose name appears in errors only.
pub fn parse(file: &Path, text: &str) -> Result<Spec, ConfigError> {
    let raw: raw::Raw = toml::from_str(text).map_err(|error| {
        let offset = error.span().map_or(0, |span| span.start);
        let (line, written) = line_at(text, offset);
        ConfigError::Malformed {
            file: file.to_owned(),
            line,
            text: written.to_owned(),
            message: error.message().to_owned(),
        }
    })?;
    spec::check(raw).map_err(|illegal| ConfigError::Illegal {
        file: file.to_owned(),
        line: line_at(text, illegal.offset).0,
        key: illegal.key,
        value: illegal.value,
        legal: illegal.legal,
    })
}

/// The number and the text of the line that holds byte `offset`.
fn line_at(text: &str, offset: usize) -> (usize, &str) {
    let before = text.get(..offset).unwrap_or(text);
    let number = before.matches('\n').count() + 1;
    (number, text.lines().nth(number - 1).unwrap_or_default().trim())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn parsed(text: &str) -> Result<Spec, ConfigError> {
        parse(Path::new("/etc/nacre/config.toml"), text)
    }

    fn complaint(text: &str) -> String {
        parsed(text).expect_err("must be refused").to_string()
    }

    #[test]
    fn empty_file_means_the_defaults() {
        let spec = parsed("").expect("legal");
        assert_eq!(spec, Spec::default());
        assert_eq!((spec.machine.vcpus, spec.machine.memory_mib), (1, 256));
        assert_eq!(spec.shim.boot_timeout, Duration::from_secs(30));
    }

    #[test]
    fn every_key_of_the_sample_is_legal() {
        let sample = include_str!("../default.toml");
        let uncommented: String = sample
            .lines()
            .map(|line| line.strip_prefix("#:").unwrap_or(line))
            .map(|line| format!("{line}\n"))
            .collect();
        assert_eq!(parsed(sample).expect("sample is legal"), Spec::default());
        let spec = parsed(&uncommented).expect("sample with every key set is legal");
        assert_eq!(spec.paths.kernel, Path::new("/usr/local/lib/nacre/vmlinux"));
    }

    #[test]
    fn unknown_key_is_named_with_its_line() {
        let text = complaint("[machine]\nvcpus = 2\nmemory = 512\n");
        assert!(text.starts_with("/etc/nacre/config.toml:3: unknown field `memory`"), "{text}");
    }

    #[test]
    fn wrong_type_shows_the_line_as_written() {
        let text = complaint("[machine]\nvcpus = \"two\"\n");
        assert!(text.contains("config.toml:2: ") && text.contains("`vcpus = \"two\"`"), "{text}");
    }

    #[test]
    fn value_out_of_range_names_key_and_range() {
        let text = complaint("\n[machine]\nvcpus = 33\n");
        assert_eq!(text, "/etc/nacre/config.toml:3: machine.vcpus = 33 is not legal; it must be 1 to 32");
        assert!(complaint("[machine]\nmemory_mib = 63\n").contains("64 to 65536"));
        assert!(complaint("[shim]\nboot_timeout_s = 0\n").contains("shim.boot_timeout_s"));
    }

    #[test]
    fn path_must_be_absolute() {
        assert!(complaint("[paths]\nvmm = \"nacre-vmm\"\n").contains("paths.vmm = nacre-vmm"));
    }

    #[test]
    fn file_asked_for_by_name_must_exist() {
        let text = read(Path::new("/nonexistent/nacre.toml")).expect_err("absent").to_string();
        assert!(text.contains("/nonexistent/nacre.toml"), "{text}");
    }
}
