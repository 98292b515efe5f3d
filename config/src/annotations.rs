//! Annotations: what a pod may ask for itself, if the operator lets it.
//!
//! A pod's author is not the operator. So an annotation counts only if `annotations.allow` lists it by name, no file or
//! path can be named by one, and what is asked for passes the same ranges as the file. Everything else that starts with
//! [`PREFIX`] is refused, by name: a pod that silently got less than it asked for fails later, and elsewhere.

use std::collections::BTreeMap;

use serde::Deserialize;
use toml::Spanned;

use crate::{ConfigError, raw::Raw};

/// What all annotations of ours start with.
pub const PREFIX: &str = "dev.nacre.";

/// The annotations that exist. Each is the prefix and a key of the configuration file.
pub(crate) const NAMES: [&str; 5] = [
    "dev.nacre.vcpus",
    "dev.nacre.memory_mib",
    "dev.nacre.kernel_cmdline",
    "dev.nacre.boot_timeout_s",
    "dev.nacre.log_level",
];

/// The same, for a person.
pub(crate) const LEGAL: &str = "dev.nacre.vcpus, dev.nacre.memory_mib, dev.nacre.kernel_cmdline, \
    dev.nacre.boot_timeout_s or dev.nacre.log_level";

/// The part of an OCI spec that is read here.
#[derive(Deserialize)]
struct Annotated {
    #[serde(default)]
    annotations: BTreeMap<String, String>,
}

/// Our annotations in the text of an OCI spec.
pub fn of_spec(text: &str) -> Result<BTreeMap<String, String>, serde_json::Error> {
    // Few pods have any, and this is on the way of every start: do not parse what cannot matter.
    if !text.contains(PREFIX) {
        return Ok(BTreeMap::new());
    }
    let mut spec: Annotated = serde_json::from_str(text)?;
    spec.annotations.retain(|name, _| name.starts_with(PREFIX));
    Ok(spec.annotations)
}

/// What one annotation says, if it may say it.
pub(crate) fn read(name: &str, value: &str, allowed: &[String]) -> Result<Raw, ConfigError> {
    if !NAMES.contains(&name) {
        return Err(ConfigError::UnknownAnnotation { name: name.to_owned() });
    }
    if !allowed.iter().any(|allowed| allowed == name) {
        return Err(ConfigError::ForbiddenAnnotation { name: name.to_owned() });
    }
    let text = || Some(Spanned::new(0..0, value.to_owned()));
    // What is no number is out of every range, whose error then shows it as it was written.
    let number = || Some(Spanned::new(0..0, value.trim().parse().unwrap_or(i64::MIN)));
    let mut raw = Raw::default();
    match &name[PREFIX.len()..] {
        "vcpus" => raw.machine.vcpus = number(),
        "memory_mib" => raw.machine.memory_mib = number(),
        "kernel_cmdline" => raw.machine.kernel_cmdline = text(),
        "boot_timeout_s" => raw.shim.boot_timeout_s = number(),
        _ => raw.shim.log_level = text(),
    }
    Ok(raw)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_our_annotations_are_taken_from_a_spec() {
        let text = r#"{"annotations":{"dev.nacre.vcpus":"2","io.kubernetes.cri.sandbox-id":"p"},"process":{}}"#;
        let found = of_spec(text).expect("JSON");
        assert_eq!(found.into_iter().collect::<Vec<_>>(), [("dev.nacre.vcpus".to_owned(), "2".to_owned())]);
        assert!(of_spec(r#"{"process":{"args":["dev.nacre.vcpus"]}}"#).expect("JSON").is_empty());
        assert!(of_spec("no JSON, and nothing of ours").expect("not looked at").is_empty());
    }

    #[test]
    fn every_annotation_that_exists_sets_something() {
        let allowed = NAMES.map(str::to_owned);
        for name in NAMES {
            assert!(LEGAL.contains(name));
            let raw = format!("{:?}", read(name, "1", &allowed).expect("allowed"));
            assert_ne!(raw, format!("{:?}", Raw::default()), "{name}");
        }
    }
}
