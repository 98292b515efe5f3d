//! `--probe`: a machine of a few instructions instead of one for a pod, for `nacre check`. KVM is its standard input.

use std::{
    io::stdin,
    os::fd::{AsFd, OwnedFd},
    time::Duration,
};

use kvm::probe::{INSTRUCTIONS, ProbeError, probe};
use vmm_api::Probe;

/// How often the guest is run: what else the host does can make it slower, but never faster, so the fastest run counts.
const RUNS: u32 = 5;

/// Runs the probe and says how it fared.
pub fn report() -> Probe {
    let runs = (0..RUNS).map(|_| match stdin().as_fd().try_clone_to_owned() {
        Ok(device) => run(device),
        Err(error) => Probe::Refused { message: error.to_string() },
    });
    runs.max_by_key(Probe::rate).expect("there is more than one run")
}

fn run(device: OwnedFd) -> Probe {
    let ns = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
    match probe(device) {
        Ok(time) => Probe::Ran { instructions: INSTRUCTIONS, ns: ns(time).max(1) },
        Err(error @ ProbeError::Stopped { counted_in, .. }) => {
            let ns = counted_in.map_or(0, ns);
            Probe::Stopped { message: error.to_string(), instructions: INSTRUCTIONS, ns }
        }
        Err(error) => Probe::Refused { message: error.to_string() },
    }
}
