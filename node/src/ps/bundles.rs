//! Where bundles of ours are. `docs/formats/bundle.md` says what is in them.
//!
//! Other runtimes have bundles in the same folders. Ours are told by `shim.pid`, which holds two numbers; the shim that
//! is named by `address` is ours then, too.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use super::process::Recorded;

/// Where containerd keeps bundles, `NAMESPACE/ID`, unless it was told otherwise.
const STATE: &str = "/run/containerd/io.containerd.runtime.v2.task";

/// The shim's name as `/proc/PID/exe` has it.
const SHIM: &str = "containerd-shim-nacre-v2";

/// One container's bundle.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bundle {
    /// The container's namespace.
    pub namespace: String,
    /// Its id.
    pub id: String,
    /// Where it is.
    pub directory: PathBuf,
    /// Where its shim listens.
    pub address: String,
    /// Its shim.
    pub shim: Recorded,
}

impl Bundle {
    fn read(directory: PathBuf) -> Option<Self> {
        let name = |path: &Path| Some(path.file_name()?.to_str()?.to_owned());
        Some(Self {
            id: name(&directory)?,
            namespace: name(directory.parent()?)?,
            address: fs::read_to_string(directory.join("address")).ok()?,
            shim: Recorded::read(&directory.join("shim.pid"))?,
            directory,
        })
    }

    /// The process that is recorded under `name`.
    pub fn recorded(&self, name: &str) -> Option<Recorded> {
        Recorded::read(&self.directory.join(name))
    }
}

/// All bundles of ours: in the usual folder, in `further` ones, and in those of running shims.
pub fn find(further: &[PathBuf]) -> Vec<Bundle> {
    let mut folders: BTreeSet<PathBuf> = further.iter().cloned().collect();
    folders.insert(STATE.into());
    folders.extend(of_shims(Path::new("/proc")));
    folders
        .iter()
        .flat_map(|folder| children(folder))
        .flat_map(|namespace| children(&namespace))
        .filter_map(Bundle::read)
        .collect()
}

/// A shim's working directory is `FOLDER/NAMESPACE/ID`.
fn of_shims(proc: &Path) -> Vec<PathBuf> {
    let is_shim = |process: &PathBuf| {
        // The program may have been replaced by a newer one since: then " (deleted)" follows.
        let program = fs::read_link(process.join("exe")).ok();
        program.and_then(|program| Some(program.file_name()?.to_str()?.starts_with(SHIM))).unwrap_or(false)
    };
    let folder = |process: PathBuf| Some(fs::read_link(process.join("cwd")).ok()?.parent()?.parent()?.to_path_buf());
    children(proc).into_iter().filter(is_shim).filter_map(folder).collect()
}

fn children(folder: &Path) -> Vec<PathBuf> {
    let mut found: Vec<_> = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    found.sort();
    found
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn our_bundles_are_told_from_other_runtimes() {
        let state = tempfile::tempdir().expect("temporary directory");
        for (id, shim) in [("ours", "12 3456"), ("runcs", "12"), ("half-made", "")] {
            let bundle = state.path().join("k8s.io").join(id);
            fs::create_dir_all(&bundle).expect("create");
            fs::write(bundle.join("address"), "unix:///s").expect("write");
            fs::write(bundle.join("shim.pid"), shim).expect("write");
        }
        let found = find(&[state.path().to_owned()]);
        let ours: Vec<_> = found.iter().filter(|bundle| bundle.directory.starts_with(state.path())).collect();
        assert_eq!(ours.len(), 1);
        assert_eq!((ours[0].namespace.as_str(), ours[0].id.as_str()), ("k8s.io", "ours"));
    }

    #[test]
    fn folders_of_daemons_elsewhere_are_found_by_their_shims() {
        let proc = tempfile::tempdir().expect("temporary directory");
        for (pid, program) in [("7", "/opt/containerd-shim-nacre-v2 (deleted)"), ("8", "/bin/containerd-shim-runc-v2")]
        {
            let process = proc.path().join(pid);
            fs::create_dir(&process).expect("create");
            symlink(program, process.join("exe")).expect("link");
            symlink(format!("/run/k3s/{pid}/state/default/c1"), process.join("cwd")).expect("link");
        }
        assert_eq!(of_shims(proc.path()), [PathBuf::from("/run/k3s/7/state")]);
    }
}
