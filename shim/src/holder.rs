//! The shim's side of `nacre-holder`: spawn it, learn that it is in place, end it.
//!
//! Invariant: a [`Holder`] is a living child that has its root and its network namespace, and is reaped when it ends. Its
//! lifeline is the write end of its standard input, which is held here and nowhere else: it dies with the shim.
//! Failure paths: the program is missing, it says why it cannot, or it says nothing within [`PATIENCE`]; in each case
//! nothing is left running. All calls block; none longer than that.

use std::{
    io::{self, Read},
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// How long a holder may take until it is in place.
const PATIENCE: Duration = Duration::from_secs(10);

/// Longest answer that is read.
const ANSWER_MAX: usize = 1024;

/// Why a container has no holder.
#[derive(Debug, thiserror::Error)]
pub enum HolderError {
    /// The program cannot be executed.
    #[error("cannot run {}: {source}; install nacre, or set paths.holder in its configuration", program.display())]
    Spawn {
        /// The program.
        program: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// It ran and could not do its work.
    #[error("cannot set up the container's holder process: {0}")]
    Refused(String),
    /// It ran and said nothing.
    #[error("the container's holder process did not answer within {} s", PATIENCE.as_secs())]
    Silent,
}

/// Which network namespace the holder lives in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Network {
    /// The host's.
    Host,
    /// One of its own.
    New,
    /// An existing one.
    At(PathBuf),
}

/// A holder in place.
#[derive(Debug)]
pub struct Holder {
    child: Child,
}

impl Holder {
    /// Starts `program` for container `id` and waits until it is in place.
    pub fn spawn(program: &Path, id: &str, root: &Path, network: &Network) -> Result<Self, HolderError> {
        let network = match network {
            Network::Host => Path::new("host"),
            Network::New => Path::new("new"),
            Network::At(path) => path,
        };
        let child = Command::new(program)
            .arg0(id)
            .args([Path::new(id), root, network])
            .env_clear()
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()
            .map_err(|source| HolderError::Spawn { program: program.to_owned(), source })?;
        let mut holder = Self { child };
        // Dropping the holder on failure kills and reaps it.
        match holder.answer()?.as_str() {
            "ok" => Ok(holder),
            "" => Err(HolderError::Refused("it ended without a word".to_owned())),
            text => Err(HolderError::Refused(text.to_owned())),
        }
    }

    /// The pid that the host takes for the container's.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    fn answer(&mut self) -> Result<String, HolderError> {
        let Some(mut stdout) = self.child.stdout.take() else { return Err(HolderError::Silent) };
        let (mut answer, mut buffer) = (Vec::new(), [0; 256]);
        let deadline = Instant::now() + PATIENCE;
        while answer.len() < ANSWER_MAX {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(HolderError::Silent);
            }
            let timeout = Timespec::try_from(left).ok();
            if !matches!(poll(&mut [PollFd::new(&stdout, PollFlags::IN)], timeout.as_ref()), Ok(1..)) {
                // Late or interrupted: the deadline decides.
                continue;
            }
            match stdout.read(&mut buffer) {
                Ok(0) => break,
                Ok(length) => answer.extend_from_slice(buffer.get(..length).unwrap_or_default()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => break,
            }
        }
        Ok(String::from_utf8_lossy(&answer).trim().to_owned())
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        // Kill first: the wait that follows is then short whatever the holder does.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::PermissionsExt};

    use super::*;

    fn script(text: &str) -> (tempfile::TempDir, PathBuf) {
        let directory = tempfile::tempdir().expect("temporary directory");
        let path = directory.path().join("holder");
        fs::write(&path, format!("#!/bin/sh\n{text}\n")).expect("write");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("chmod");
        (directory, path)
    }

    fn spawn(text: &str) -> Result<Holder, HolderError> {
        let (_directory, program) = script(text);
        Holder::spawn(&program, "c1", Path::new("/"), &Network::Host)
    }

    #[test]
    fn holder_lives_until_it_is_dropped() {
        let holder = spawn("echo ok; exec >&-; cat").expect("in place");
        let process = PathBuf::from(format!("/proc/{}", holder.pid()));
        assert!(process.exists());
        drop(holder);
        assert!(!process.exists());
    }

    #[test]
    fn words_of_a_holder_that_cannot_reach_the_caller() {
        match spawn("echo enter root /x: gone; exit 1") {
            Err(HolderError::Refused(text)) => assert_eq!(text, "enter root /x: gone"),
            other => panic!("unexpected {other:?}"),
        }
    }

    #[test]
    fn missing_program_is_named() {
        let error = Holder::spawn(Path::new("/nonexistent/holder"), "c1", Path::new("/"), &Network::Host);
        let text = error.expect_err("cannot run").to_string();
        assert!(text.contains("/nonexistent/holder") && text.contains("paths.holder"), "{text}");
    }
}
