//! `unsafe` lives in four homes (design.md §4, ADR-0011); every other crate root forbids it.

use std::path::Path;

use super::{read, sources};

/// Where an unsafe block may stand.
const HOMES: [&str; 4] =
    ["vmm/kvm/src", "virtiofs/src/sys.rs", "guest-agent/src/sys.rs", "shim/share-mount/src/sys.rs"];

/// Crate roots inside the homes: they deny it, and one room each allows it.
const HOME_ROOTS: [&str; 5] = [
    "vmm/kvm/src/lib.rs",
    "virtiofs/src/lib.rs",
    "guest-agent/src/main.rs",
    "guest-agent/src/lib.rs",
    "shim/share-mount/src/lib.rs",
];

fn is_home(source: &Path) -> bool {
    HOMES.iter().any(|home| source.starts_with(home))
}

/// What follows the keyword where it is one, and not a word in a string.
const OPENERS: [&str; 5] = ["{", "fn", "impl", "trait", "extern"];

/// True if the line opens something unsafe outside of a comment.
fn opens_unsafe(line: &str) -> bool {
    let code = line.split("//").next().unwrap_or_default();
    code.split("unsafe ").skip(1).any(|after| OPENERS.iter().any(|opener| after.trim_start().starts_with(opener)))
}

#[test]
fn rule_tells_the_keyword_from_the_word() {
    for line in ["let x = unsafe { y };", "unsafe impl Send for X {}", "pub unsafe fn z() {"] {
        assert!(opens_unsafe(line), "{line}");
    }
    for line in ["cache=unsafe", "// unsafe { }", "#![forbid(unsafe_code)]"] {
        assert!(!opens_unsafe(line), "{line}");
    }
}

#[test]
fn unsafe_stands_only_in_its_homes() {
    for source in sources().iter().filter(|source| !is_home(source) && !source.starts_with("tests/house")) {
        for (number, line) in (1..).zip(read(source).lines()) {
            assert!(!opens_unsafe(line), "{}:{number}: unsafe outside of its homes {HOMES:?}", source.display());
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
