//! `unsafe` lives in three homes (design.md §4); every other crate root forbids it.

use std::path::Path;

use super::{read, sources};

/// Where an unsafe block may stand.
const HOMES: [&str; 3] = ["vmm/kvm/src", "virtiofs/src/sys.rs", "guest-agent/src/sys.rs"];

/// Crate roots inside the homes: they deny it, and one room each allows it.
const HOME_ROOTS: [&str; 4] =
    ["vmm/kvm/src/lib.rs", "virtiofs/src/lib.rs", "guest-agent/src/main.rs", "guest-agent/src/lib.rs"];

fn is_home(source: &Path) -> bool {
    HOMES.iter().any(|home| source.starts_with(home))
}

/// The code of a line: without its comment and without the lint's name.
fn code(line: &str) -> String {
    let line = line.split("//").next().unwrap_or_default();
    line.replace("unsafe_code", "").replace("unsafe_op_in_unsafe_fn", "")
}

#[test]
fn unsafe_stands_only_in_its_homes() {
    for source in sources().iter().filter(|source| !is_home(source) && !source.starts_with("tests/house")) {
        for (number, line) in (1..).zip(read(source).lines()) {
            let is_unsafe = code(line).split(|c: char| !c.is_alphanumeric() && c != '_').any(|word| word == "unsafe");
            assert!(!is_unsafe, "{}:{number}: unsafe outside of its homes {HOMES:?}", source.display());
        }
    }
}

#[test]
fn every_other_crate_root_forbids_unsafe() {
    let is_root = |source: &&std::path::PathBuf| {
        let name = source.file_name().unwrap_or_default();
        let folder = source.parent().unwrap_or(Path::new(""));
        (name == "lib.rs" || name == "main.rs") && folder.ends_with("src") || folder.ends_with("src/bin")
    };
    for source in sources().iter().filter(is_root) {
        let wanted = if HOME_ROOTS.iter().any(|root| source == Path::new(root)) {
            continue;
        } else {
            "#![forbid(unsafe_code)]"
        };
        assert!(read(source).contains(wanted), "{}: a crate root must say {wanted}", source.display());
    }
}
