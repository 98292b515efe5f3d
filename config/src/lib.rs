//! What an operator may choose, and what it means.
//!
//! ```text
//!   defaults ◄─ /etc/nacre/config.toml ◄─ runtime options ◄─ annotations of the pod        the later word counts
//!                      │                       │                    │
//!                      └──────────────► raw (as written) ◄──────────┘
//!                                          │ ranges
//!                                          ▼
//!                           Effective: spec, and the origin of each value
//! ```
//!
//! * The file is optional: without it every key has its default. `NACRE_CONFIG`, or `ConfigPath` of the runtime options
//!   before it, names another file, which then must exist: a typing error in a path must not silently mean "defaults".
//! * The file and the options are the operator's; annotations are the pod's, and count only where the operator allows it
//!   ([`annotations`]).
//! * Failure paths: a file that cannot be read, text that is not TOML, a key that does not exist, a value out of
//!   range, an annotation that is not allowed. Each error names the place, the key and the legal range, because its reader
//!   sees it as the answer to `ctr run`, far from this file.
//! * Invariant: a [`Spec`] is legal as a whole; nobody downstream checks a range again.
#![forbid(unsafe_code)]

pub mod annotations;
pub mod options;
mod origin;
mod raw;
mod spec;

use std::{
    env, fs, io,
    path::{Path, PathBuf},
};

pub use options::{Asked, Options};
pub use origin::{Effective, Origin};
pub use spec::{LogLevel, Machine, Paths, Shim, Spec};

/// Where the file is looked for when nobody says otherwise.
pub const DEFAULT_FILE: &str = "/etc/nacre/config.toml";

/// The environment variable that names another file.
pub const FILE_VARIABLE: &str = "NACRE_CONFIG";

/// What errors call the body of the runtime options, which is no file.
const BODY: &str = "runtime options (ConfigBody)";

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
    /// An annotation that exists, and is not for this host's pods to set.
    #[error(
        "annotation {name} is not allowed on this host; the operator can add it to annotations.allow in {DEFAULT_FILE}"
    )]
    ForbiddenAnnotation {
        /// The annotation.
        name: String,
    },
    /// An annotation of ours that does not exist.
    #[error("annotation {name} does not exist; there are {}", annotations::LEGAL)]
    UnknownAnnotation {
        /// The annotation.
        name: String,
    },
    /// An annotation with an illegal value.
    #[error("annotation {name} = {value:?} is not legal; it must be {legal}")]
    IllegalAnnotation {
        /// The annotation.
        name: String,
        /// What was written.
        value: String,
        /// What may be written.
        legal: &'static str,
    },
    /// What a pod asks for cannot be read.
    #[error("cannot read {}, which says what the pod asks for: {source}", file.display())]
    Bundle {
        /// The file.
        file: PathBuf,
        /// The reason.
        source: io::Error,
    },
}

/// What is in force for a pod that asks for `asked`.
pub fn load(asked: &Asked) -> Result<Effective, ConfigError> {
    let mut effective = match chosen_file(&asked.options) {
        Some(file) => read(&file)?,
        None => match read(Path::new(DEFAULT_FILE)) {
            Err(ConfigError::Unreadable { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                Effective::default()
            }
            other => other?,
        },
    };
    adopt(&mut effective, asked)?;
    Ok(effective)
}

/// The file that was asked for by name.
fn chosen_file(options: &Options) -> Option<PathBuf> {
    let path = Some(&options.config_path).filter(|path| !path.is_empty());
    path.map(PathBuf::from).or_else(|| env::var_os(FILE_VARIABLE).map(PathBuf::from))
}

/// Loads one file, which must exist.
pub fn read(file: &Path) -> Result<Effective, ConfigError> {
    let text = fs::read_to_string(file).map_err(|source| ConfigError::Unreadable { file: file.to_owned(), source })?;
    parse(file, &text)
}

/// Parses the text of `file`, whose name appears in errors and origins only.
pub fn parse(file: &Path, text: &str) -> Result<Effective, ConfigError> {
    let mut effective = Effective::default();
    let raw = raw::file(text).map_err(|error| malformed(file, text, &error))?;
    let origin = |offset| Origin::File { file: file.to_owned(), line: line_at(text, offset).0 };
    effective.apply(raw, origin).map_err(|value| illegal(file, text, value))?;
    Ok(effective)
}

/// Adds what the options' body and the annotations say.
fn adopt(effective: &mut Effective, asked: &Asked) -> Result<(), ConfigError> {
    let (body, text) = (Path::new(BODY), asked.options.config_body.as_str());
    if !text.is_empty() {
        let (raw, ignored) = raw::options_table(text).map_err(|error| malformed(body, text, &error))?;
        let origin = |offset| Origin::Options { line: line_at(text, offset).0 };
        effective.apply(raw, origin).map_err(|value| illegal(body, text, value))?;
        effective.ignore(ignored);
    }
    for (name, value) in &asked.annotations {
        let raw = annotations::read(name, value, &effective.spec.allowed_annotations)?;
        effective.apply(raw, |_| Origin::Annotation(name.clone())).map_err(|illegal| {
            ConfigError::IllegalAnnotation { name: name.clone(), value: value.clone(), legal: illegal.legal }
        })?;
    }
    Ok(())
}

fn malformed(file: &Path, text: &str, error: &toml::de::Error) -> ConfigError {
    let (line, written) = line_at(text, error.span().map_or(0, |span| span.start));
    ConfigError::Malformed {
        file: file.to_owned(),
        line,
        text: written.to_owned(),
        message: error.message().to_owned(),
    }
}

fn illegal(file: &Path, text: &str, illegal: spec::Illegal) -> ConfigError {
    let spec::Illegal { key, value, legal, offset } = illegal;
    ConfigError::Illegal { file: file.to_owned(), line: line_at(text, offset).0, key, value, legal }
}

/// The number and the text of the line that holds byte `offset`.
fn line_at(text: &str, offset: usize) -> (usize, &str) {
    let before = text.get(..offset).unwrap_or(text);
    let number = before.matches('\n').count() + 1;
    (number, text.lines().nth(number - 1).unwrap_or_default().trim())
}

#[cfg(test)]
mod tests;
