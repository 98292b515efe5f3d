//! Where the lab's files are: everything big lives in the cache folder, nothing in the tree.
//!
//! `$NACRE_CACHE` (default `~/.cache/nacre`) holds `kernel/`, `images/`, `lab/` and `stage/`. Run folders are
//! `lab/run/<pid>-*`: sockets, the input disk and the console log of one boot. They are removed when the boot ends; those of
//! a `lab` that was killed are removed by the next one, which sees that their process is gone.

use std::path::{Path, PathBuf};
use std::{env, fs, io};

/// Why the cache cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Neither `NACRE_CACHE` nor `HOME` says where the cache is.
    #[error("no cache folder: set NACRE_CACHE or HOME")]
    NoHome,
    /// A file that `lab build` makes is missing.
    #[error("{0} is missing: run `lab build` first")]
    NotBuilt(PathBuf),
    /// The run folder could not be made.
    #[error("cannot make a folder for this boot in {0}: {1}")]
    RunFolder(PathBuf, #[source] io::Error),
}

/// The cache folder.
#[derive(Debug, Clone)]
pub struct Cache {
    root: PathBuf,
}

impl Cache {
    /// From the environment.
    pub fn from_env() -> Result<Self, Error> {
        let root = match (env::var_os("NACRE_CACHE"), env::var_os("HOME")) {
            (Some(cache), _) => PathBuf::from(cache),
            (None, Some(home)) => PathBuf::from(home).join(".cache/nacre"),
            (None, None) => return Err(Error::NoHome),
        };
        Ok(Self { root })
    }

    /// The folder itself.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The QEMU that runs the lab, which must be there.
    pub fn qemu(&self) -> Result<PathBuf, Error> {
        let path = self.root.join("qemu/qemu-system-x86_64");
        if path.exists() { Ok(path) } else { Err(Error::NotBuilt(path)) }
    }

    /// One of `root.img`, `vmlinuz`, `initrd`, which must be there.
    pub fn lab_file(&self, name: &str) -> Result<PathBuf, Error> {
        let path = self.root.join("lab").join(name);
        if path.exists() { Ok(path) } else { Err(Error::NotBuilt(path)) }
    }

    /// Where a console log is kept for a person to read after a fault.
    pub fn kept_console(&self) -> PathBuf {
        self.root.join("lab").join(format!("console.{}.log", std::process::id()))
    }

    /// A new folder for one boot. Removed when the returned value is dropped.
    pub fn run_folder(&self) -> Result<tempfile::TempDir, Error> {
        let runs = self.root.join("lab/run");
        let fail = |e| Error::RunFolder(runs.clone(), e);
        fs::create_dir_all(&runs).map_err(fail)?;
        remove_dead(&runs);
        tempfile::Builder::new().prefix(&format!("{}-", std::process::id())).tempdir_in(&runs).map_err(fail)
    }
}

/// Removes run folders whose process is gone. What cannot be removed is left to the next run.
fn remove_dead(runs: &Path) {
    for entry in fs::read_dir(runs).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let pid = name.to_string_lossy().split('-').next().and_then(|p| p.parse::<u32>().ok());
        if pid.is_none_or(|pid| !Path::new(&format!("/proc/{pid}")).exists()) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}
