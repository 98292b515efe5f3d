//! The command line.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

use crate::check::Area;

/// Containers in microVMs of their own: what runs on this host, and whether it can.
#[derive(Debug, Parser)]
#[command(
    name = "nacre",
    version,
    after_help = "\
Examples:
  nacre check                       is everything there that a pod needs?
  nacre ps                          pods, their VMs, containers and memory
  nacre config show                 the settings in force, and where each comes from
  ctr run --rm --runtime io.containerd.nacre.v2 IMAGE NAME COMMAND"
)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Check what this host needs to run pods: one line each, with the fix if it fails.
    #[command(after_help = "\
Exit code: 0 if everything passes, 1 if something fails.

Examples:
  nacre check                       everything
  nacre check kvm                   only whether KVM can run a guest kernel
  nacre check --json | jq -r '.checks[] | select(.ok|not) | .fix'")]
    Check(CheckArgs),
    /// List pods with their VM, containers, age and memory.
    #[command(after_help = "\
MEMORY is what shim and VMM take of the host's memory, guest included (PSS). Pods are found by their bundles and by their
shims, without asking containerd. STATE is `running`, `no-vm` (the VMM is gone) or `dead` (the shim is gone).

Examples:
  nacre ps
  nacre ps --json | jq '[.pods[].memory_kib] | add'
  nacre ps --state /run/k3s/containerd/io.containerd.runtime.v2.task")]
    Ps(PsArgs),
    /// Settings: what is in force.
    #[command(subcommand)]
    Config(ConfigCommand),
}

/// Commands about settings.
#[derive(Debug, Subcommand)]
pub enum ConfigCommand {
    /// Print every setting with its value and where it comes from: default, file:line, runtime options or annotation.
    #[command(after_help = "\
Examples:
  nacre config show                         what a pod gets that asks for nothing
  nacre config show --pod web -n k8s.io     what the pod `web` asked for, and gets
  nacre config show --file ./new.toml       is this file legal, and what would it mean?
  nacre config show --json | jq -r '.settings[] | select(.source != \"default\")'")]
    Show(ShowArgs),
}

/// Of `nacre check`.
#[derive(Debug, Args)]
pub struct CheckArgs {
    /// What to check; everything if nothing is named.
    #[arg(value_enum)]
    pub areas: Vec<Area>,
    /// For programs: {"ok":…,"checks":[{"name","ok","detail","fix"}]}.
    #[arg(long)]
    pub json: bool,
}

/// Of `nacre ps`.
#[derive(Debug, Args)]
pub struct PsArgs {
    /// A further folder of containerd's in which to look for bundles (…/io.containerd.runtime.v2.task).
    #[arg(long, value_name = "FOLDER")]
    pub state: Vec<PathBuf>,
    /// For programs: {"pods":[{"namespace","pod","state",…}]}.
    #[arg(long)]
    pub json: bool,
}

/// Of `nacre config show`.
#[derive(Debug, Args)]
pub struct ShowArgs {
    /// What a pod that runs gets, by the id of its first container.
    #[arg(long, value_name = "ID", conflicts_with = "file")]
    pub pod: Option<String>,
    /// The pod's namespace in containerd.
    #[arg(short, long, default_value = "default", requires = "pod")]
    pub namespace: String,
    /// A further folder of containerd's in which to look for the pod's bundle.
    #[arg(long, value_name = "FOLDER", requires = "pod")]
    pub state: Vec<PathBuf>,
    /// This file instead of the one in force.
    #[arg(long, value_name = "FILE")]
    pub file: Option<PathBuf>,
    /// For programs: {"settings":[{"key","value","source","where"}],"ignored":[…]}.
    #[arg(long)]
    pub json: bool,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn every_command_has_help_with_examples() {
        fn look(command: &clap::Command) {
            let leaf = command.get_subcommands().next().is_none();
            if leaf && command.get_name() != "help" {
                let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
                assert!(help.contains("Examples:\n"), "{} has no examples", command.get_name());
            }
            command.get_subcommands().for_each(look);
        }
        Cli::command().debug_assert();
        look(&Cli::command());
    }

    #[test]
    fn areas_are_named_on_the_command_line() {
        let cli = Cli::try_parse_from(["nacre", "check", "kvm", "--json"]).expect("legal");
        let Command::Check(asked) = cli.command else { panic!("another command") };
        assert!(asked.json && asked.areas == [Area::Kvm]);
        assert!(Cli::try_parse_from(["nacre", "check", "nonsense"]).is_err());
        assert!(Cli::try_parse_from(["nacre", "config", "show", "--pod", "a", "--file", "/f"]).is_err());
    }
}
