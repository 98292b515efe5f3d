//! Runs `ctr` and keeps what it said.

use std::{
    io::Write,
    process::{Command, Stdio},
    sync::atomic::{AtomicU32, Ordering},
};

/// The one word that a user changes.
pub const RUNTIME: &str = "io.containerd.nacre.v2";

/// Images that the lab has imported.
pub mod images {
    /// Busybox alone.
    pub const BUSYBOX: &str = "nacre.test/busybox:latest";
    /// Debian, slim.
    pub const DEBIAN: &str = "nacre.test/debian-slim:latest";
    /// The same with Python.
    pub const PYTHON: &str = "nacre.test/python:latest";
}

/// What a command left: its exit code and all that it printed.
#[derive(Debug)]
pub struct Outcome {
    /// Exit code, or 128 + signal.
    pub code: i32,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
}

impl Outcome {
    /// Fails the test unless the exit code is `code`.
    #[track_caller]
    pub fn expect_code(self, code: i32) -> Self {
        assert_eq!(self.code, code, "stdout: {}\nstderr: {}", self.stdout, self.stderr);
        self
    }

    /// Fails the test unless the command failed and said `text`.
    #[track_caller]
    pub fn expect_failure_with(self, text: &str) -> Self {
        assert_ne!(self.code, 0, "it succeeded: {}", self.stdout);
        assert!(self.stderr.contains(text), "{text:?} is not in: {}", self.stderr);
        self
    }
}

/// A container to be run by `ctr run`.
#[derive(Debug)]
pub struct Container {
    id: String,
    image: String,
    flags: Vec<String>,
    command: Vec<String>,
    stdin: Option<Vec<u8>>,
}

impl Container {
    /// A container with an id of its own, removed after its run.
    #[must_use]
    pub fn new(image: &str) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let id = format!("t{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        Self { id, image: image.into(), flags: vec!["--rm".into()], command: Vec::new(), stdin: None }
    }

    /// Its id.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Adds a flag of `ctr run`.
    #[must_use]
    pub fn flag(mut self, flag: &str) -> Self {
        self.flags.push(flag.into());
        self
    }

    /// Keeps the container and its snapshot after the run.
    #[must_use]
    pub fn keep(mut self) -> Self {
        self.flags.retain(|flag| flag != "--rm");
        self
    }

    /// The guest half: what runs in it.
    #[must_use]
    pub fn command(mut self, words: &[&str]) -> Self {
        self.command = words.iter().map(|word| (*word).into()).collect();
        self
    }

    /// The guest half as a shell script.
    #[must_use]
    pub fn script(self, script: &str) -> Self {
        self.command(&["sh", "-c", script])
    }

    /// What it reads.
    #[must_use]
    pub fn stdin(mut self, bytes: &[u8]) -> Self {
        self.stdin = Some(bytes.into());
        self
    }

    /// The whole command line of `ctr`.
    #[must_use]
    pub fn arguments(&self) -> Vec<String> {
        let mut words: Vec<String> = vec!["run".into(), "--runtime".into(), RUNTIME.into()];
        words.extend(self.flags.iter().cloned());
        words.extend([self.image.clone(), self.id.clone()]);
        words.extend(self.command.iter().cloned());
        words
    }

    /// Runs it to its end.
    #[must_use]
    pub fn run(&self) -> Outcome {
        let words = self.arguments();
        run(Command::new("ctr").args(&words), self.stdin.as_deref())
    }

    /// Starts `ctr run` and does not wait for it.
    #[must_use]
    pub fn start(&self) -> std::process::Child {
        let mut command = Command::new("ctr");
        command.args(self.arguments()).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().expect("ctr starts")
    }
}

/// Runs `ctr` with `words`.
#[must_use]
pub fn ctr(words: &[&str]) -> Outcome {
    run(Command::new("ctr").args(words), None)
}

/// Runs a script of the lab's own shell.
#[must_use]
pub fn shell(script: &str) -> Outcome {
    run(Command::new("sh").args(["-c", script]), None)
}

/// A container that hangs must not hang the tests: a run takes seconds even in the emulator.
const DEADLINE_SECONDS: &str = "120";

fn run(command: &mut Command, stdin: Option<&[u8]>) -> Outcome {
    let mut guarded = Command::new("timeout");
    guarded.args(["--kill-after=5", DEADLINE_SECONDS]).arg(command.get_program()).args(command.get_args());
    let input = if stdin.is_some() { Stdio::piped() } else { Stdio::null() };
    let mut child =
        guarded.stdin(input).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the command starts");
    if let (Some(bytes), Some(mut pipe)) = (stdin, child.stdin.take()) {
        // A command may end without reading all of it.
        let _ = pipe.write_all(bytes);
    }
    let output = child.wait_with_output().expect("the command ends");
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    Outcome { code: output.status.code().unwrap_or(128), stdout: text(output.stdout), stderr: text(output.stderr) }
}
