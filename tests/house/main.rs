//! The house rules as tests: which crate may see which, where unsafe may live, how rooms are named and how large.
//!
//! They read the sources and `cargo metadata`, run nothing of the project, and name the place and the rule they found
//! broken.
#![forbid(unsafe_code)]

mod layers;
mod rooms;
mod unsafe_homes;

use std::path::{Path, PathBuf};

/// The workspace's root folder, as cargo says when it runs us: this program may have been built for another clone.
fn root() -> PathBuf {
    let crate_folder = std::env::var_os("CARGO_MANIFEST_DIR").expect("cargo runs this test");
    Path::new(&crate_folder).parent().expect("tests/ lies in the workspace").to_path_buf()
}

/// All Rust sources of the workspace, as paths relative to its root.
fn sources() -> Vec<PathBuf> {
    let mut found = Vec::new();
    for top in ["config", "shim", "vmm", "virtiofs", "guest-agent", "node", "tests"] {
        walk(&root().join(top), &mut found);
    }
    assert!(found.len() > 50, "the sources are where this test looks for them");
    found.into_iter().map(|path| path.strip_prefix(root()).expect("below the root").to_path_buf()).collect()
}

fn walk(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in folder.read_dir().expect("a source folder is readable") {
        let path = entry.expect("an entry is readable").path();
        if path.is_dir() && !path.ends_with("target") {
            walk(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

fn read(source: &Path) -> String {
    std::fs::read_to_string(root().join(source)).expect("a source is readable")
}
