//! What was written, wherever it was written: types and spelling are checked here, meaning is not.

use serde::Deserialize;
use toml::{
    Spanned,
    de::{DeTable, DeValue, Deserializer, Error},
};

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Raw {
    pub(crate) paths: Paths,
    pub(crate) machine: Machine,
    pub(crate) shim: Shim,
    pub(crate) annotations: Annotations,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Paths {
    pub(crate) vmm: Option<Spanned<String>>,
    pub(crate) holder: Option<Spanned<String>>,
    pub(crate) kernel: Option<Spanned<String>>,
    pub(crate) agent: Option<Spanned<String>>,
    pub(crate) kvm: Option<Spanned<String>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Machine {
    pub(crate) vcpus: Option<Spanned<i64>>,
    pub(crate) memory_mib: Option<Spanned<i64>>,
    pub(crate) kernel_cmdline: Option<Spanned<String>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Shim {
    pub(crate) boot_timeout_s: Option<Spanned<i64>>,
    pub(crate) log_level: Option<Spanned<String>>,
    pub(crate) log_dir: Option<Spanned<String>>,
    pub(crate) log_max_kib: Option<Spanned<i64>>,
    pub(crate) log_keep: Option<Spanned<i64>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Annotations {
    pub(crate) allow: Option<Spanned<Vec<Spanned<String>>>>,
}

/// Reads a file: every key must be ours.
pub(crate) fn file(text: &str) -> Result<Raw, Error> {
    toml::from_str(text)
}

/// Reads the table that containerd passes on from its own configuration, and says which of its keys are not ours.
///
/// All of our keys live in sections. A plain value beside them is containerd's or was meant for runc
/// (`SystemdCgroup = true` is copied from runtime to runtime), and must not keep a pod from starting.
pub(crate) fn options_table(text: &str) -> Result<(Raw, Vec<String>), Error> {
    let mut table = DeTable::parse(text)?;
    let mut foreign = Vec::new();
    let ours = std::mem::take(table.get_mut()).into_iter().filter(|(key, value)| {
        let section = matches!(value.get_ref(), DeValue::Table(_));
        if !section {
            foreign.push(key.get_ref().to_string());
        }
        section
    });
    *table.get_mut() = ours.collect();
    Ok((Raw::deserialize(Deserializer::from(table))?, foreign))
}
