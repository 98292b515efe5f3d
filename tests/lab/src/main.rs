//! The `lab` command. Its exit code is the command's; 124 is a command that took too long, 125 is the lab itself.
#![forbid(unsafe_code)]

use clap::Parser;
use lab::accel::{self, Choice};
use lab::boot::{self, Boot, Outcome};
use lab::cache::Cache;
use lab::cli::{Cli, MachineArgs, RunArgs, Verb};
use lab::input::Order;
use lab::qemu::Accel;
use lab::{recipe, terminal};
use std::process::ExitCode;
use std::time::Duration;

/// As `timeout` ends.
const TOO_LONG: u8 = 124;
/// As `docker run` ends when it is Docker's own fault.
const LAB_FAILED: u8 = 125;
/// Hardware that is not what it seems is found out by this time.
const HARDWARE_TRIAL: Duration = Duration::from_secs(30);

type Failure = Box<dyn std::error::Error>;

fn main() -> ExitCode {
    let done = match Cli::parse().verb {
        Verb::Build => recipe::build().map(|()| 0).map_err(Failure::from),
        Verb::Run(args) => run(&args),
        Verb::Shell(args) => shell(&args),
    };
    ExitCode::from(done.unwrap_or_else(|e| {
        eprintln!("lab: {e}");
        LAB_FAILED
    }))
}

fn run(args: &RunArgs) -> Result<u8, Failure> {
    let order = Order { command: args.command.clone(), outputs: args.outputs.clone(), ..order(&args.machine) };
    let limits = (Some(Duration::from_secs(args.timeout)), args.silence.map(Duration::from_secs));
    attempt(&args.machine, &order, limits)
}

fn shell(machine: &MachineArgs) -> Result<u8, Failure> {
    let (rows, cols) = terminal::size();
    let term = std::env::var("TERM").unwrap_or("xterm".into());
    let order = Order { terminal: Some((rows, cols, term)), ..order(machine) };
    let raw = terminal::Raw::enter();
    let done = attempt(machine, &order, (None, None));
    drop(raw);
    done
}

/// What every lab gets.
fn order(machine: &MachineArgs) -> Order {
    Order {
        stages: machine.stage.clone(),
        inputs: machine.inputs.clone(),
        containerd: (!machine.no_containerd).then_some(machine.containerd.name()),
        beat: !machine.counted,
        ..Order::default()
    }
}

/// How often a lab is booted again after a fault of its own. Where instructions are counted, a machine whose QEMU could not be
/// mended hangs about once in thirty starts (ADR-0012), and a command makes a dozen.
fn second_chances(machine: &MachineArgs) -> u32 {
    if machine.counted { 3 } else { 1 }
}

/// Boots, and again after a fault of the lab's own. The limits are the command's time, and that of its silence.
fn attempt(
    machine: &MachineArgs,
    order: &Order,
    (limit, silence): (Option<Duration>, Option<Duration>),
) -> Result<u8, Failure> {
    let cache = Cache::from_env()?;
    let mut choice = accel::choose(machine.counted)?;
    let mut faults = 0;
    loop {
        announce(machine, &choice);
        let boot_limit = if choice.tentative { HARDWARE_TRIAL } else { machine.boot_deadline() };
        let outcome = Boot { cache: &cache, machine, accel: choice.accel, order, limit, boot_limit, silence }.run()?;
        match (outcome, choice.tentative) {
            (Outcome::Fault(fault), true) => {
                eprintln!("lab: {fault}; this machine's KVM does not do, going on with emulation");
                choice = Choice { accel: Accel::Tcg, tentative: false, why: "its KVM failed" };
            }
            (Outcome::Fault(fault), false) if faults < second_chances(machine) => {
                eprintln!("lab: LAB FAULT: {fault}; booting again");
                faults += 1;
            }
            (outcome, _) => return Ok(report(outcome, limit)),
        }
    }
}

fn announce(machine: &MachineArgs, choice: &Choice) {
    let how = match choice.accel {
        Accel::Tcg => "emulated",
        Accel::Counted => "emulated, counted",
        Accel::Kvm => "hardware",
    };
    eprintln!("lab: booting, {how} ({}), {} CPUs, {} MiB", choice.why, machine.cpu_count(), machine.memory);
}

/// The exit code of an outcome, with words where it is not the command's.
fn report(outcome: boot::Outcome, limit: Option<Duration>) -> u8 {
    match outcome {
        Outcome::Exit(code) => u8::try_from(code).unwrap_or(1),
        Outcome::TimedOut => {
            eprintln!("lab: the command was not done after {} s", limit.unwrap_or_default().as_secs());
            TOO_LONG
        }
        Outcome::SetupFailed(why) => {
            eprintln!("lab: not set up: {why}");
            LAB_FAILED
        }
        Outcome::Fault(fault) => {
            eprintln!("lab: LAB FAULT, again: {fault}");
            LAB_FAILED
        }
    }
}
