//! `-v` and `-info`: who we are and what we can do.
//!
//! The features are what CRI announces to the kubelet. What is absent is not attempted there (user namespaces,
//! recursive read-only mounts), so nothing may be listed that does not work.

use containerd_shim_protos::types::introspection::{RuntimeInfo, RuntimeVersion};
use protobuf::{Message, MessageField, well_known_types::any::Any};

/// The name under which clients ask for us.
pub const RUNTIME_NAME: &str = "io.containerd.nacre.v2";

const FEATURES_TYPE: &str = "types.containerd.io/opencontainers/runtime-spec/1/features/Features";

const FEATURES: &str = r#"{"ociVersionMin":"1.0.0","ociVersionMax":"1.2.1","hooks":[],
"mountOptions":["bind","rbind","ro","rw","nosuid","nodev","noexec","noatime","relatime","strictatime","rprivate","private"],
"linux":{"namespaces":["cgroup","ipc","mount","network","pid","uts"]}}"#;

/// The answer to `-v`.
#[must_use]
pub fn version() -> String {
    format!("containerd-shim-nacre-v2:\n  Version: {}\n", env!("CARGO_PKG_VERSION"))
}

/// The answer to `-info`, an encoded `RuntimeInfo`.
#[must_use]
pub fn runtime_info() -> Vec<u8> {
    let version = RuntimeVersion { version: env!("CARGO_PKG_VERSION").into(), ..RuntimeVersion::default() };
    let features = Any { type_url: FEATURES_TYPE.into(), value: FEATURES.into(), ..Any::default() };
    let info = RuntimeInfo {
        name: RUNTIME_NAME.into(),
        version: MessageField::some(version),
        features: MessageField::some(features),
        ..RuntimeInfo::default()
    };
    // Encoding into memory fails only on messages beyond 2 GiB.
    info.write_to_bytes().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn info_decodes_and_its_features_are_json() {
        let info = RuntimeInfo::parse_from_bytes(&runtime_info()).expect("decodes");
        assert_eq!((info.name.as_str(), info.version.version.as_str()), (RUNTIME_NAME, env!("CARGO_PKG_VERSION")));
        let features: serde_json::Value = serde_json::from_slice(&info.features.value).expect("JSON");
        let namespaces = features["linux"]["namespaces"].as_array().expect("a list");
        assert!(!namespaces.iter().any(|namespace| namespace == "user"), "user namespaces do not work yet");
    }
}
