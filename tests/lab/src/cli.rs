//! What is typed: `lab build`, `lab run`, `lab shell`.

use clap::{Args, Parser, Subcommand, ValueEnum};
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

/// A virtual machine with real KVM, containerd and the test images.
#[derive(Debug, Parser)]
#[command(name = "lab", version)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub verb: Verb,
}

/// The three verbs.
#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Make what is missing: guest kernel, test images, root disk of the lab
    Build,
    /// Boot a fresh lab, run a command in it, and end with its exit code
    Run(RunArgs),
    /// Boot a fresh lab and open a root shell in it
    Shell(MachineArgs),
}

/// What kind of machine, and what goes into it.
#[derive(Debug, Clone, Args)]
pub struct MachineArgs {
    /// Count instructions: a virtual nanosecond is one instruction, one CPU, repeatable
    #[arg(long)]
    pub counted: bool,
    /// CPUs (2; a counted lab has one)
    #[arg(long, value_name = "N")]
    pub cpus: Option<u32>,
    /// Memory in MiB
    #[arg(long, value_name = "MIB", default_value_t = 4096)]
    pub memory: u32,
    /// A root tree that is laid over / before containerd starts
    #[arg(long, value_name = "DIR")]
    pub stage: Vec<PathBuf>,
    /// A file or folder to copy in, to DEST or to /in/NAME
    #[arg(long = "in", value_name = "PATH[:DEST]")]
    pub inputs: Vec<Transfer>,
    /// Which containerd and ctr the lab has on its PATH
    #[arg(long, value_enum, default_value_t)]
    pub containerd: Daemon,
    /// Do not start containerd
    #[arg(long)]
    pub no_containerd: bool,
    /// More words for the lab kernel's command line
    #[arg(long, value_name = "WORDS")]
    pub append: Option<String>,
    /// Seconds until the lab must be up
    #[arg(long, value_name = "SECS", default_value_t = 300)]
    pub boot_timeout: u64,
    /// Keep the console log of the lab's kernel here
    #[arg(long, value_name = "FILE")]
    pub console: Option<PathBuf>,
}

/// The containerds of the lab.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum Daemon {
    /// Debian trixie's
    #[value(name = "1.7")]
    Trixie,
    /// The newest that Debian has
    #[default]
    Sid,
    /// Built from its Go module
    #[value(name = "2.4")]
    Go,
}

impl Daemon {
    /// As it is typed, and as its folder in the lab is named.
    pub fn name(self) -> &'static str {
        match self {
            Self::Trixie => "1.7",
            Self::Sid => "sid",
            Self::Go => "2.4",
        }
    }
}

/// `lab run`.
#[derive(Debug, Clone, Args)]
pub struct RunArgs {
    /// The machine.
    #[command(flatten)]
    pub machine: MachineArgs,
    /// Seconds of wall time that the command may take; then it ends with 124
    #[arg(long, value_name = "SECS", default_value_t = 600)]
    pub timeout: u64,

    /// Seconds without output after which a counted lab, which gives no other sign of life, counts as hung
    #[arg(long, value_name = "SECONDS")]
    pub silence: Option<u64>,
    /// A file or folder of the lab to copy out to HOST_PATH afterwards
    #[arg(long = "out", value_name = "GUEST_PATH:HOST_PATH")]
    pub outputs: Vec<OutTransfer>,
    /// One word is a shell script, several are a command and its arguments
    #[arg(last = true, required = true, value_name = "CMD")]
    pub command: Vec<String>,
}

impl MachineArgs {
    /// CPUs of the machine: instruction counting needs exactly one.
    pub fn cpu_count(&self) -> u32 {
        if self.counted { 1 } else { self.cpus.unwrap_or(2).max(1) }
    }

    /// How long the boot may take.
    pub fn boot_deadline(&self) -> Duration {
        Duration::from_secs(self.boot_timeout)
    }
}

/// `PATH[:DEST]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Transfer {
    /// On this machine.
    pub from: PathBuf,
    /// In the lab, absolute; `None` means `/in/NAME`, not copied at all.
    pub to: Option<PathBuf>,
}

/// `GUEST_PATH:HOST_PATH`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OutTransfer {
    /// In the lab, absolute.
    pub from: PathBuf,
    /// On this machine.
    pub to: PathBuf,
}

impl FromStr for Transfer {
    type Err = String;
    fn from_str(s: &str) -> Result<Self, String> {
        match s.rsplit_once(':') {
            Some((from, to)) if to.starts_with('/') && !from.is_empty() => {
                Ok(Self { from: from.into(), to: Some(to.into()) })
            }
            Some(_) => Err(format!("'{s}': the destination must be an absolute path in the lab")),
            None => Ok(Self { from: s.into(), to: None }),
        }
    }
}

impl FromStr for OutTransfer {
    type Err = String;
    fn from_str(s: &str) -> Result<Self, String> {
        match s.split_once(':') {
            Some((from, to)) if from.starts_with('/') && !to.is_empty() => {
                Ok(Self { from: from.into(), to: to.into() })
            }
            _ => Err(format!("'{s}' is not GUEST_PATH:HOST_PATH with an absolute GUEST_PATH")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(words: &[&str]) -> RunArgs {
        let cli = Cli::try_parse_from([&["lab", "run"], words].concat()).expect("parses");
        match cli.verb {
            Verb::Run(args) => args,
            other => panic!("not run: {other:?}"),
        }
    }

    #[test]
    fn a_command_keeps_its_own_options() {
        let args = run(&["--counted", "--cpus", "8", "--", "ctr", "run", "--rm", "x"]);
        assert_eq!(args.command, ["ctr", "run", "--rm", "x"]);
        assert_eq!(args.machine.cpu_count(), 1, "a counted lab has one CPU whatever is asked");
    }

    #[test]
    fn transfers_say_where_things_go() {
        let args = run(&["--in", "a/b", "--in", "c:/root/d", "--out", "/var/log/x:y", "--", "true"]);
        assert_eq!(args.machine.inputs[0], Transfer { from: "a/b".into(), to: None });
        assert_eq!(args.machine.inputs[1], Transfer { from: "c".into(), to: Some("/root/d".into()) });
        assert_eq!(args.outputs[0], OutTransfer { from: "/var/log/x".into(), to: "y".into() });
        assert!("x:relative".parse::<Transfer>().is_err());
        assert!("relative:y".parse::<OutTransfer>().is_err());
    }

    #[test]
    fn containerds_are_typed_as_they_are_named() {
        for daemon in Daemon::value_variants() {
            assert_eq!(run(&["--containerd", daemon.name(), "--", "true"]).machine.containerd, *daemon);
        }
        assert_eq!(run(&["--", "true"]).machine.containerd, Daemon::Sid);
        assert!(Cli::try_parse_from(["lab", "run", "--containerd", "1.6", "--", "true"]).is_err());
    }

    #[test]
    fn a_command_is_required() {
        assert!(Cli::try_parse_from(["lab", "run"]).is_err());
    }
}
