//! Where each value came from: the answer to "why does my pod have 256 MiB?".

use std::{collections::BTreeMap, fmt, path::PathBuf};

use serde_json::{Value, json};

use crate::{Spec, options::CONTAINERDS, raw::Raw, spec::Illegal};

/// Who said it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    /// Nobody.
    Default,
    /// A configuration file.
    File {
        /// The file.
        file: PathBuf,
        /// Line, from 1.
        line: usize,
    },
    /// The body of containerd's runtime options.
    Options {
        /// Line, from 1.
        line: usize,
    },
    /// The pod.
    Annotation(String),
}

impl Origin {
    fn kind(&self) -> &'static str {
        match self {
            Self::Default => "default",
            Self::File { .. } => "file",
            Self::Options { .. } => "options",
            Self::Annotation(_) => "annotation",
        }
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::File { file, line } => write!(f, "{}:{line}", file.display()),
            Self::Options { line } => write!(f, "runtime options, line {line} of ConfigBody"),
            Self::Annotation(name) => write!(f, "annotation {name}"),
        }
    }
}

/// The configuration that is in force, and why.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Effective {
    /// What it is.
    pub spec: Spec,
    /// Keys beside our sections in the runtime options, which mean nothing to us.
    pub ignored: Vec<String>,
    origins: BTreeMap<&'static str, Origin>,
}

impl Effective {
    pub(crate) fn apply(&mut self, raw: Raw, origin: impl Fn(usize) -> Origin) -> Result<(), Illegal> {
        let origins = &mut self.origins;
        self.spec.apply(raw, &mut |key, offset| drop(origins.insert(key, origin(offset))))
    }

    pub(crate) fn ignore(&mut self, keys: Vec<String>) {
        self.ignored.extend(keys.into_iter().filter(|key| !CONTAINERDS.contains(&key.as_str())));
    }

    /// Every key with its value and its origin, in the order of the commented default.
    #[must_use]
    pub fn entries(&self) -> Vec<(&'static str, Value, Origin)> {
        let Spec { paths, machine, shim, allowed_annotations } = &self.spec;
        let path = |path: &PathBuf| Value::from(path.display().to_string());
        let values = [
            ("paths.vmm", path(&paths.vmm)),
            ("paths.holder", path(&paths.holder)),
            ("paths.kernel", path(&paths.kernel)),
            ("paths.agent", path(&paths.agent)),
            ("paths.kvm", path(&paths.kvm)),
            ("machine.vcpus", machine.vcpus.into()),
            ("machine.memory_mib", machine.memory_mib.into()),
            ("machine.kernel_cmdline", machine.kernel_cmdline.as_str().into()),
            ("shim.boot_timeout_s", shim.boot_timeout.as_secs().into()),
            ("shim.log_level", shim.log_level.name().into()),
            ("shim.log_dir", shim.log_dir.as_ref().map_or_else(|| "".into(), path)),
            ("shim.log_max_kib", shim.log_max_kib.into()),
            ("shim.log_keep", shim.log_keep.into()),
            ("annotations.allow", allowed_annotations.clone().into()),
        ];
        let origin = |key| self.origins.get(key).cloned().unwrap_or(Origin::Default);
        values.into_iter().map(|(key, value)| (key, value, origin(key))).collect()
    }

    /// The values that somebody has chosen, for one line of a log.
    #[must_use]
    pub fn summary(&self) -> String {
        let chosen = self.entries().into_iter().filter(|(.., origin)| *origin != Origin::Default);
        let words: Vec<_> = chosen.map(|(key, value, origin)| format!("{key} = {value} ({origin})")).collect();
        if words.is_empty() { "all defaults".to_owned() } else { words.join(", ") }
    }

    /// All of it for a program.
    #[must_use]
    pub fn to_json(&self) -> Value {
        let settings: Vec<_> = self
            .entries()
            .into_iter()
            .map(|(key, value, origin)| {
                json!({"key": key, "value": value, "source": origin.kind(), "where": origin.to_string()})
            })
            .collect();
        json!({"settings": settings, "ignored": self.ignored})
    }
}

impl fmt::Display for Effective {
    /// All of it for a person, as TOML that could be written into the file.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut section = "";
        for (key, value, origin) in self.entries() {
            let (this, name) = key.split_once('.').unwrap_or(("", key));
            if this != section {
                let gap = if section.is_empty() { "" } else { "\n" };
                writeln!(f, "{gap}[{this}]")?;
                section = this;
            }
            writeln!(f, "{:<46}  # {origin}", format!("{name} = {value}"))?;
        }
        for key in &self.ignored {
            writeln!(f, "\n# {key}: not a key of Nacre's; ignored (runtime options)")?;
        }
        Ok(())
    }
}
