//! `lab build`: runs the scripts that make what a lab needs, in order, and nothing that is cached.
//!
//! The scripts decide by their own keys whether there is something to do; they print their progress themselves. They are
//! found beside this crate's sources, or under `NACRE_TREE` when the binary has been moved to another machine.

use std::path::PathBuf;
use std::process::Command;
use std::time::Instant;

/// Why something was not built.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The tree is not where it was at build time.
    #[error("{0} is missing: set NACRE_TREE to the source tree")]
    NoTree(PathBuf),
    /// A script could not be started.
    #[error("cannot run {0}: {1}")]
    Start(PathBuf, #[source] std::io::Error),
    /// A script failed; it has said why.
    #[error("{0} failed")]
    Failed(PathBuf),
}

/// What is made, in this order.
const STEPS: [(&str, &str); 5] = [
    ("emulator", "tests/lab/mkqemu"),
    ("guest kernel", "vmm/guest-kernel/build"),
    ("test images", "tests/lab/mkimages"),
    ("containerds", "tests/lab/mkdaemons"),
    ("lab root", "tests/lab/mkroot"),
];

/// Makes everything.
pub fn build() -> Result<(), Error> {
    let tree = match std::env::var_os("NACRE_TREE") {
        Some(tree) => PathBuf::from(tree),
        None => PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")),
    };
    let all = Instant::now();
    for (n, (name, script)) in STEPS.iter().enumerate() {
        let path = tree.join(script);
        if !path.exists() {
            return Err(Error::NoTree(path));
        }
        let started = Instant::now();
        eprintln!("lab: [{}/{}] {name}", n + 1, STEPS.len());
        let status = Command::new(&path).status().map_err(|e| Error::Start(path.clone(), e))?;
        if !status.success() {
            return Err(Error::Failed(path));
        }
        eprintln!("lab: [{}/{}] {name}: {:.0} s", n + 1, STEPS.len(), started.elapsed().as_secs_f64());
    }
    eprintln!("lab: all there after {:.0} s", all.elapsed().as_secs_f64());
    Ok(())
}
