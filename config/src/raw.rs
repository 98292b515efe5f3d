//! The file as written: types and spelling are checked here, meaning is not.

use serde::Deserialize;
use toml::Spanned;

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Raw {
    pub(crate) paths: Paths,
    pub(crate) machine: Machine,
    pub(crate) shim: Shim,
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
}
