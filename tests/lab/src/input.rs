//! The input disk: everything that goes into a lab, as one read-only ext4 image made by `mkfs.ext4 -d`.
//!
//! ```text
//! lab/settings   shell variables for lab-init: mode, which containerd, what to copy out, terminal size
//! lab/cmd        the command, a bash script
//! lab/place      shell lines that copy place/N to its destination
//! stage/         root trees, laid over / before containerd starts
//! in/NAME        inputs without a destination, seen at /in
//! place/N        inputs with one
//! ```

use crate::cli::{OutTransfer, Transfer};
use std::ffi::OsStr;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Why the disk could not be made.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file of the disk's tree could not be written.
    #[error("cannot prepare the input disk at {0}: {1}")]
    Write(PathBuf, #[source] io::Error),
    /// Something to copy in does not exist.
    #[error("{0}: {1}; --in and --stage take files and folders of this machine")]
    Source(PathBuf, #[source] io::Error),
    /// A program failed.
    #[error("`{0}` failed: {1}")]
    Program(String, String),
}

/// Identity of the disk's file system.
const DISK_ID: &str = "6e616372-652d-6c61-622d-696e70757400";
/// And of its directory hashes.
const DISK_HASH: &str = "hash_seed=6e616372-652d-6c61-622d-696e70757401";

/// Sizes that an NVDIMM may have are multiples of 128 MiB.
const NVDIMM_KIB: u64 = 128 * 1024;

/// What the guest is to do.
#[derive(Debug, Clone, Default)]
pub struct Order {
    /// Words of the command; empty for a shell.
    pub command: Vec<String>,
    /// Root trees.
    pub stages: Vec<PathBuf>,
    /// Copied in.
    pub inputs: Vec<Transfer>,
    /// Copied out.
    pub outputs: Vec<OutTransfer>,
    /// Name of the containerd that is started.
    pub containerd: Option<&'static str>,
    /// Whether lab-init gives a sign of life every few seconds.
    pub beat: bool,
    /// Rows and columns of the terminal of a shell, and its TERM.
    pub terminal: Option<(u16, u16, String)>,
}

/// One word for a shell.
pub fn quote(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

impl Order {
    /// The bash script: one word is a script of its own, several are an argument vector.
    fn script(&self) -> String {
        match self.command.as_slice() {
            [script] => format!("{script}\n"),
            words => format!("exec {}\n", words.iter().map(|w| quote(w)).collect::<Vec<_>>().join(" ")),
        }
    }

    /// Variables for lab-init.
    fn settings(&self) -> String {
        let mut lines = vec![
            format!("LAB_MODE={}", if self.terminal.is_some() { "shell" } else { "run" }),
            format!("LAB_CONTAINERD={}", self.containerd.unwrap_or_default()),
            format!("LAB_BEAT={}", u8::from(self.beat)),
        ];
        let out: Vec<_> = self.outputs.iter().map(|o| quote(relative(&o.from))).collect();
        lines.push(format!("LAB_OUT={}", quote(&out.join(" "))));
        if let Some((rows, cols, term)) = &self.terminal {
            lines.push(format!("LAB_ROWS={rows} LAB_COLS={cols} LAB_TERM={}", quote(term)));
        }
        lines.join("\n") + "\n"
    }

    /// Lines that put inputs where they belong.
    fn placing(&self) -> String {
        let mut lines = String::new();
        for (n, to) in self.inputs.iter().enumerate().filter_map(|(n, i)| Some((n, i.to.as_ref()?))) {
            let to = to.to_string_lossy();
            let target = match to.ends_with('/') {
                true => format!("{to}{}", name_of(&self.inputs[n].from)),
                false => to.into_owned(),
            };
            let folder = Path::new(&target).parent().unwrap_or(Path::new("/")).to_string_lossy().into_owned();
            lines += &format!(
                "mkdir -p {} && /usr/bin/cp -aT /run/lab/disk/place/{n} {} &&\n",
                quote(&folder),
                quote(&target)
            );
        }
        lines + "true\n"
    }

    /// Makes the disk in `folder`.
    pub fn make_disk(&self, folder: &Path) -> Result<PathBuf, Error> {
        let tree = folder.join("tree");
        for sub in ["lab", "in", "place"] {
            fs::create_dir_all(tree.join(sub)).map_err(|e| Error::Write(tree.join(sub), e))?;
        }
        for (name, text) in [("cmd", self.script()), ("settings", self.settings()), ("place", self.placing())] {
            let path = tree.join("lab").join(name);
            fs::write(&path, text).map_err(|e| Error::Write(path, e))?;
        }
        for stage in &self.stages {
            copy(&stage.join("."), &tree.join("stage"))?;
        }
        for (n, input) in self.inputs.iter().enumerate() {
            let to = match input.to {
                Some(_) => tree.join("place").join(n.to_string()),
                None => tree.join("in").join(name_of(&input.from)),
            };
            copy(&input.from, &to)?;
        }
        let disk = folder.join("in.img");
        pack(&tree, &disk)?;
        fs::remove_dir_all(&tree).map_err(|e| Error::Write(tree, e))?;
        Ok(disk)
    }
}

/// Without the leading slash, for tar.
fn relative(path: &Path) -> &str {
    path.to_str().unwrap_or_default().trim_start_matches('/')
}

/// The last component, or `input` for paths like `..`.
fn name_of(path: &Path) -> String {
    path.file_name().unwrap_or(OsStr::new("input")).to_string_lossy().into_owned()
}

/// A copy with everything.
fn copy(from: &Path, to: &Path) -> Result<(), Error> {
    fs::metadata(from).map_err(|e| Error::Source(from.to_path_buf(), e))?;
    run(Command::new("cp").args(["-a", "--reflink=auto", "-T", "--"]).arg(from).arg(to)).map(drop)
}

/// An ext4 image that has room for the tree and its inodes. No journal: it is never written. Fixed ids, so that the same
/// tree gives the same bytes to a counted lab.
fn pack(tree: &Path, disk: &Path) -> Result<(), Error> {
    let size = run(Command::new("du").args(["-s", "--apparent-size", "-k", "--"]).arg(tree))?;
    let inodes = run(Command::new("du").args(["-s", "--inodes", "--"]).arg(tree))?;
    let first = |text: &str| text.split_whitespace().next().and_then(|n| n.parse::<u64>().ok()).unwrap_or(0);
    let (kib, files) = (first(&size), first(&inodes));
    let kib = (kib + kib / 8 + files * 4 + 8192).next_multiple_of(NVDIMM_KIB);
    let inodes = (files + files / 8 + 64).to_string();
    run(Command::new("mkfs.ext4")
        .args([
            "-q",
            "-F",
            "-L",
            "lab-in",
            "-b",
            "4096",
            "-m",
            "0",
            "-O",
            "^has_journal",
            "-U",
            DISK_ID,
            "-E",
            DISK_HASH,
            "-N",
            &inodes,
            "-d",
        ])
        .arg(tree)
        .arg(disk)
        .arg(format!("{kib}k")))
    .map(drop)
}

/// Runs a program to its end and gives its stdout.
fn run(command: &mut Command) -> Result<String, Error> {
    let output = command.env("PATH", search_path()).output();
    let name = format!("{command:?}").replace('"', "");
    match output {
        Ok(o) if o.status.success() => Ok(String::from_utf8_lossy(&o.stdout).into_owned()),
        Ok(o) => Err(Error::Program(name, String::from_utf8_lossy(&o.stderr).trim().to_string())),
        Err(e) => Err(Error::Program(name, e.to_string())),
    }
}

/// mkfs lives in sbin, which a user's PATH may lack.
fn search_path() -> String {
    format!("{}:/usr/sbin:/sbin", std::env::var("PATH").unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_word_is_a_script_and_several_are_arguments() {
        let mut order = Order { command: vec!["echo a | wc -c".into()], ..Order::default() };
        assert_eq!(order.script(), "echo a | wc -c\n");
        order.command = vec!["echo".into(), "it's $HOME".into()];
        assert_eq!(order.script(), "exec 'echo' 'it'\\''s $HOME'\n");
    }

    #[test]
    fn destinations_name_a_file_or_a_folder() {
        let input = |from: &str, to: &str| Transfer { from: from.into(), to: Some(to.into()) };
        let order = Order { inputs: vec![input("a/b", "/root/c"), input("x/y", "/opt/")], ..Order::default() };
        let placing = order.placing();
        assert!(
            placing.contains("mkdir -p '/root' && /usr/bin/cp -aT /run/lab/disk/place/0 '/root/c' &&"),
            "{placing}"
        );
        assert!(placing.contains("/usr/bin/cp -aT /run/lab/disk/place/1 '/opt/y' &&"), "{placing}");
    }

    #[test]
    fn settings_are_shell_words() {
        let outputs = vec![OutTransfer { from: "/var/log/a b".into(), to: "x".into() }];
        let settings = Order { outputs, containerd: Some("1.7"), ..Order::default() }.settings();
        assert!(settings.contains("LAB_MODE=run\n") && settings.contains("LAB_CONTAINERD=1.7\n"));
        assert!(settings.contains(r"LAB_OUT=''\''var/log/a b'\'''"), "{settings}");
    }

    #[test]
    fn a_disk_holds_what_was_asked_for() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("hello");
        fs::write(&file, "hi").expect("written");
        let inputs = vec![Transfer { from: file, to: None }];
        let order = Order { command: vec!["true".into()], inputs, ..Order::default() };
        let disk = order.make_disk(folder.path()).expect("a disk");
        let shown = run(Command::new("debugfs").args(["-R", "cat /in/hello"]).arg(&disk)).expect("debugfs reads it");
        assert_eq!(shown, "hi");
    }

    #[test]
    fn a_missing_input_is_named() {
        let folder = tempfile::tempdir().expect("a folder");
        let inputs = vec![Transfer { from: "/no/such".into(), to: None }];
        let error = Order { inputs, ..Order::default() }.make_disk(folder.path()).expect_err("no such input");
        assert!(error.to_string().starts_with("/no/such: "), "{error}");
    }
}
