//! `nacre-vmm`: one virtual machine, driven over its standard input (see `vmm-api`).
//!
//! It takes no arguments (but `--probe`, see [`probe`]) and opens no path: KVM, kernel, initramfs and shares arrive as
//! descriptors, and the jail of ADR-0007 closes around it before it reads its first request.
#![forbid(unsafe_code)]

mod bus;
mod control;
mod ending;
mod logger;
mod machine;
mod probe;
mod vcpu;

use std::{
    io::{stdin, stdout},
    os::fd::AsFd,
    process::ExitCode,
};

use vmm::jail;
use vmm_api::{Channel, PROBE_FLAG};

const HELP: &str = "\
nacre-vmm: one virtual machine of Nacre. It is started by containerd-shim-nacre-v2, not by hand.

Standard input:  control socket (AF_UNIX, SOCK_SEQPACKET), requests of vmm-api.
Standard output: event socket, of the same kind.
With --probe it runs a guest of a few instructions on the KVM that is its standard input instead, and prints how that
went: for nacre check.
Standard error:  log; NACRE_VMM_LOG=error|warn|info|debug|trace sets the level (default warn).
";

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args_os().skip(1).collect();
    if arguments.as_slice() == [PROBE_FLAG] {
        println!("{}", probe::report().to_line());
        return ExitCode::SUCCESS;
    }
    if !arguments.is_empty() {
        eprint!("{HELP}");
        return ExitCode::from(2);
    }
    logger::init();
    // Modes come from the guest, with its own mask applied.
    virtiofs::clear_umask();
    match serve() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            log::error!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// Serves the owner until it closes the control socket.
fn serve() -> Result<(), Box<dyn std::error::Error>> {
    let control = Channel::new(stdin().as_fd().try_clone_to_owned()?);
    let events = Channel::new(stdout().as_fd().try_clone_to_owned()?);
    kvm::trap::install()?;
    let jail = jail::enter()?;
    Ok(control::serve(&control, events, jail)?)
}
