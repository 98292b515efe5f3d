//! Imports only go down (design.md §4).

use std::{collections::BTreeMap, process::Command};

use serde_json::Value;

use super::root;

/// Each crate of ours with those of ours that it may depend on. A crate that is missing here fails the test.
const LAYERS: [(&str, &[&str]); 15] = [
    // L0: types and protocols
    ("config", &[]),
    ("vmm-api", &[]),
    ("agent-proto", &[]),
    ("share-mount", &[]),
    // L1: siblings do not see each other
    ("kvm", &[]),
    ("virtio", &[]),
    // L2
    ("virtiofs", &[]),
    ("devices", &["virtio", "virtiofs"]),
    // L3
    ("vmm", &["devices", "virtiofs", "kvm", "virtio", "vmm-api", "config"]),
    ("guest-agent", &["agent-proto"]),
    // L4: never the VMM's insides
    ("shim", &["config", "vmm-api", "agent-proto", "share-mount"]),
    ("node", &["config", "vmm-api", "agent-proto"]),
    // beside the house
    ("lab", &[]),
    ("tests", &[]),
    ("perf-files", &["devices", "virtio", "virtiofs"]),
];

/// Crates that may run on tokio; the VMM is threads and epoll.
const ASYNC: [&str; 2] = ["shim", "guest-agent"];

fn dependencies() -> BTreeMap<String, Vec<String>> {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version", "1", "--no-deps", "--offline"])
        .current_dir(root())
        .output()
        .expect("cargo metadata runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: Value = serde_json::from_slice(&output.stdout).expect("cargo metadata is JSON");
    let text = |value: &Value| value.as_str().expect("a string").to_owned();
    let normal = |dependency: &&Value| dependency["kind"].is_null();
    metadata["packages"]
        .as_array()
        .expect("packages")
        .iter()
        .map(|package| {
            let dependencies = package["dependencies"].as_array().expect("dependencies");
            (text(&package["name"]), dependencies.iter().filter(normal).map(|one| text(&one["name"])).collect())
        })
        .collect()
}

#[test]
fn imports_only_go_down() {
    let allowed: BTreeMap<_, _> = LAYERS.into_iter().collect();
    let found = dependencies();
    for (name, uses) in &found {
        let below = allowed.get(name.as_str()).unwrap_or_else(|| panic!("crate {name} has no layer: give it one here"));
        for used in uses.iter().filter(|used| found.contains_key(*used)) {
            assert!(below.contains(&used.as_str()), "{name} must not depend on {used}: it is not below it");
        }
    }
    assert_eq!(found.len(), LAYERS.len(), "a layer is given to a crate that does not exist");
}

#[test]
fn tokio_stays_in_shim_and_agent() {
    for (name, uses) in dependencies() {
        let is_async = uses.iter().any(|used| used == "tokio");
        assert!(!is_async || ASYNC.contains(&name.as_str()), "{name} must not depend on tokio");
    }
}
