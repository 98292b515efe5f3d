//! Runtime options: what the operator wrote about this runtime into the configuration of containerd or Docker.
//!
//! containerd passes them to the shim's `start` as `runtimeoptions.v1.Options`. `start` leaves them in the bundle
//! ([`FILE`]), because the server that it spawns, Create and `nacre config show` need them after it is gone.
//!
//! * `ConfigPath` names a configuration file that is read instead of the usual one.
//! * `ConfigBody` is TOML that is read after the file. CRI fills it with the whole `options` table of the runtime unless
//!   the table has a `ConfigPath`, so keys of other runtimes may lie beside our sections.
//! * `TypeUrl` says what the writer took the body for; it is kept and not judged.

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use crate::{ConfigError, annotations};

/// The options' place in the bundle.
pub const FILE: &str = "nacre-options.json";

/// The OCI spec's place in the bundle.
const OCI_SPEC: &str = "config.json";

/// Keys of containerd's own that CRI leaves in the body.
pub(crate) const CONTAINERDS: [&str; 3] = ["TypeUrl", "ConfigPath", "ConfigBody"];

/// Runtime options, `runtimeoptions.v1.Options` by name.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Options {
    /// What the body is meant to be.
    pub type_url: String,
    /// A file; empty for none.
    pub config_path: String,
    /// TOML; empty for none.
    pub config_body: String,
}

impl Options {
    /// Whether nothing was asked for.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.config_path.is_empty() && self.config_body.is_empty()
    }

    /// Leaves them in `bundle`.
    pub fn write(&self, bundle: &Path) -> io::Result<()> {
        fs::write(bundle.join(FILE), serde_json::to_vec(self)?)
    }
}

/// All that was asked for one pod, beside the file that is for every pod.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Asked {
    /// By the operator, for this runtime.
    pub options: Options,
    /// By the pod's author.
    pub annotations: BTreeMap<String, String>,
}

impl Asked {
    /// The same without what the pod's author added.
    #[must_use]
    pub fn operators(&self) -> Self {
        Self { options: self.options.clone(), annotations: BTreeMap::new() }
    }

    /// Reads what the bundle of a pod's first container says.
    pub fn in_bundle(bundle: &Path) -> Result<Self, ConfigError> {
        let options = match present(&bundle.join(FILE))? {
            None => Options::default(),
            Some((file, text)) => {
                serde_json::from_str(&text).map_err(|source| ConfigError::Bundle { file, source: source.into() })?
            }
        };
        let annotations = match present(&bundle.join(OCI_SPEC))? {
            None => BTreeMap::new(),
            Some((file, text)) => {
                annotations::of_spec(&text).map_err(|source| ConfigError::Bundle { file, source: source.into() })?
            }
        };
        Ok(Self { options, annotations })
    }
}

fn present(file: &Path) -> Result<Option<(PathBuf, String)>, ConfigError> {
    match fs::read_to_string(file) {
        Ok(text) => Ok(Some((file.to_owned(), text))),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(ConfigError::Bundle { file: file.to_owned(), source }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_and_annotations_are_found_in_a_bundle() {
        let bundle = tempfile::tempdir().expect("temporary directory");
        assert_eq!(Asked::in_bundle(bundle.path()).expect("empty"), Asked::default());
        let options =
            Options { config_path: "/c.toml".into(), config_body: "[machine]\n".into(), ..Options::default() };
        options.write(bundle.path()).expect("write");
        fs::write(bundle.path().join(OCI_SPEC), r#"{"annotations":{"dev.nacre.vcpus":"2"}}"#).expect("write");
        let asked = Asked::in_bundle(bundle.path()).expect("readable");
        assert_eq!(asked.options, options);
        assert_eq!(asked.annotations["dev.nacre.vcpus"], "2");
    }

    #[test]
    fn damaged_options_are_named() {
        let bundle = tempfile::tempdir().expect("temporary directory");
        fs::write(bundle.path().join(FILE), "{").expect("write");
        let text = Asked::in_bundle(bundle.path()).expect_err("damaged").to_string();
        assert!(text.contains(FILE), "{text}");
    }
}
