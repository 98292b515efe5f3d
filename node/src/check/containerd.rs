//! Whether a containerd runs, is new enough, and finds our shim.
//!
//! A daemon resolves `io.containerd.nacre.v2` by looking for `containerd-shim-nacre-v2` in the PATH of its own process and
//! beside its own binary. So the running process is asked, not the file that a new one would be started from: there may be
//! several (Docker's, k3s's), and a unit may set another PATH than this shell has.

use std::{
    env, fs,
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use super::Check;
use crate::program;

/// The shim's file name, which containerd makes of the runtime's name.
const SHIM: &str = "containerd-shim-nacre-v2";

/// The oldest containerd whose protocol the shim speaks.
const OLDEST: (u32, u32) = (1, 7);

/// How long a program may take to say its version.
const DEADLINE: Duration = Duration::from_secs(20);

/// A running daemon.
#[derive(Debug)]
struct Daemon {
    pid: u32,
    program: PathBuf,
    path: Vec<PathBuf>,
}

/// Two lines for each daemon.
pub fn checks(root: &Path) -> Vec<Check> {
    let daemons = daemons(&root.join("proc"));
    if daemons.is_empty() {
        let fix = "install containerd 1.7 or later and start it (systemctl start containerd); run this as root";
        return vec![Check::fail("containerd", "no containerd runs", fix)];
    }
    daemons.iter().flat_map(|daemon| [version_check(daemon), shim_check(daemon)]).collect()
}

/// All processes that are called `containerd` and that we may look at.
fn daemons(proc: &Path) -> Vec<Daemon> {
    let entries = fs::read_dir(proc).into_iter().flatten().flatten();
    let mut daemons: Vec<_> = entries
        .filter_map(|entry| {
            let pid = entry.file_name().to_str()?.parse().ok()?;
            let name = fs::read_to_string(entry.path().join("comm")).ok()?;
            if name.trim_end() != "containerd" {
                return None;
            }
            let program = fs::read_link(entry.path().join("exe")).ok()?;
            let environment = fs::read(entry.path().join("environ")).ok()?;
            let path = environment.split(|byte| *byte == 0).find_map(|one| one.strip_prefix(b"PATH="));
            let path =
                path.map(|path| env::split_paths(std::ffi::OsStr::from_bytes(path)).collect()).unwrap_or_default();
            Some(Daemon { pid, program, path })
        })
        .collect();
    daemons.sort_by_key(|daemon| daemon.pid);
    daemons
}

fn version_check(daemon: &Daemon) -> Check {
    let (pid, (major, minor)) = (daemon.pid, OLDEST);
    let fix = || format!("install containerd {major}.{minor} or later and restart it");
    match program::output(&daemon.program, &["--version"], Stdio::null(), DEADLINE) {
        Err(error) => Check::fail("containerd", error, fix()),
        Ok(said) => match version(&said) {
            Some((version, text)) if version >= OLDEST => {
                Check::pass("containerd", format!("{text}, {} (pid {pid})", daemon.program.display()))
            }
            Some((_, text)) => {
                Check::fail("containerd", format!("{text} (pid {pid}) is older than {major}.{minor}"), fix())
            }
            None => Check::fail("containerd", format!("pid {pid} does not say its version: {:?}", said.trim()), fix()),
        },
    }
}

/// `containerd github.com/containerd/containerd/v2 v2.1.9 abcdef`, with and without `v`, with a distribution's suffix.
fn version(said: &str) -> Option<((u32, u32), &str)> {
    said.split_whitespace().find_map(|word| {
        let mut numbers = word.strip_prefix('v').unwrap_or(word).split('.');
        let version = (numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?);
        numbers.next().map(|_| (version, word))
    })
}

fn shim_check(daemon: &Daemon) -> Check {
    let pid = daemon.pid;
    let Some(shim) = shim(daemon) else {
        let path: Vec<_> = daemon.path.iter().map(|folder| folder.display().to_string()).collect();
        let detail = format!("containerd (pid {pid}) finds no {SHIM} in its PATH, {}", path.join(":"));
        return Check::fail(
            "shim",
            detail,
            "make install, or add the shim's folder to PATH in containerd's unit and restart it",
        );
    };
    let ours = env!("CARGO_PKG_VERSION");
    match program::output(&shim, &["-v"], Stdio::null(), DEADLINE) {
        Ok(said) if said.split_whitespace().any(|word| word == ours) => {
            Check::pass("shim", format!("{} {ours}, found by pid {pid}", shim.display()))
        }
        Ok(said) => {
            let said = said.split_whitespace().collect::<Vec<_>>().join(" ");
            let detail = format!("{} is not of this version ({ours}): {said}", shim.display());
            Check::fail("shim", detail, "install shim and nacre of one version (make install)")
        }
        Err(error) => Check::fail("shim", error, "install the shim again (make install)"),
    }
}

/// Where containerd finds the shim.
fn shim(daemon: &Daemon) -> Option<PathBuf> {
    let beside = daemon.program.parent().map(Path::to_path_buf);
    daemon.path.iter().cloned().chain(beside).map(|folder| folder.join(SHIM)).find(|file| file.is_file())
}

#[cfg(test)]
mod tests {
    use std::{os::unix::fs::symlink, process::Command};

    use super::*;

    /// Written by another process: a test beside us that forks would inherit our descriptor, and nobody executes a file
    /// that somebody may write to.
    fn script(file: &Path, says: &str) {
        let text = format!("#!/bin/sh\necho '{says}'\n");
        fs::create_dir_all(file.parent().expect("a folder")).expect("create");
        let write = r#"printf %s "$1" > "$2" && chmod 755 "$2""#;
        let written = Command::new("sh").args(["-c", write, "sh", &text]).arg(file).status().expect("sh runs");
        assert!(written.success());
    }

    /// A root with one process called `comm` whose program says that it is version `says`.
    fn root(comm: &str, says: &str) -> tempfile::TempDir {
        let root = tempfile::tempdir().expect("temporary directory");
        let program = root.path().join("sbin/containerd");
        script(&program, says);
        let process = root.path().join("proc/42");
        fs::create_dir_all(&process).expect("create");
        fs::write(process.join("comm"), format!("{comm}\n")).expect("write");
        let path = root.path().join("bin").display().to_string();
        fs::write(process.join("environ"), format!("A=b\0PATH=/nonexistent:{path}\0")).expect("write");
        symlink(program, process.join("exe")).expect("link");
        root
    }

    #[test]
    fn versions_of_all_packagers_are_read() {
        for (said, expected) in [
            ("containerd github.com/containerd/containerd/v2 v2.1.4 75cb2b71", (2, 1)),
            ("containerd github.com/containerd/containerd 1.7.24~ds1 1.7.24~ds1-6+b4", (1, 7)),
            ("containerd containerd.io 1.6.28 ae07eda", (1, 6)),
        ] {
            assert_eq!(version(said).expect("a version").0, expected, "{said}");
        }
        assert!(version("containerd of my own").is_none());
    }

    #[test]
    fn daemon_that_finds_the_shim_passes() {
        let root = root("containerd", "containerd x v2.1.4 y");
        script(&root.path().join("bin").join(SHIM), concat!("Version: ", env!("CARGO_PKG_VERSION")));
        let checks = checks(root.path());
        assert!(checks.len() == 2 && checks.iter().all(Check::is_good), "{checks:?}");
    }

    #[test]
    fn old_daemon_missing_shim_and_no_daemon_are_told_apart() {
        let old = root("containerd", "containerd x v1.6.28 y");
        let found = checks(old.path());
        assert!(found[0].detail.contains("older than 1.7"), "{found:?}");
        assert!(found[1].detail.contains(SHIM) && found[1].detail.contains("/nonexistent:"), "{found:?}");
        let none = checks(root("dockerd", "").path());
        assert!(none.len() == 1 && none[0].detail.contains("no containerd runs"), "{none:?}");
    }

    #[test]
    fn shim_beside_the_daemon_is_found_and_must_be_of_our_version() {
        let root = root("containerd", "containerd x v2.1.4 y");
        script(&root.path().join("sbin").join(SHIM), "Version: 99.0.0");
        let shim = &checks(root.path())[1];
        assert!(!shim.is_good() && shim.detail.contains("99.0.0"), "{shim:?}");
    }
}
