//! Whether KVM can run a guest kernel. The VMM tries it (`nacre-vmm --probe`); here it is judged.

use std::{fs::OpenOptions, path::Path, time::Duration};

use vmm_api::{PROBE_FLAG, Probe};

use super::Check;
use crate::program;

/// Below this many instructions a second nobody's hardware runs the guest. Software emulation of ring 0 reaches under
/// two million; a guest in an emulated machine that is true to its hardware some tens of millions; hardware thousands.
const LEAST_RATE: u64 = 8_000_000;

/// A probe takes a third of a second where ring 0 is emulated.
const DEADLINE: Duration = Duration::from_secs(20);

const NAME: &str = "kvm";

/// What makes KVM appear.
const SWITCH_ON: &str = "load kvm_amd or kvm_intel, switch virtualization on in the firmware, run as root";

/// Makes the check with the VMM at `vmm` and the device at `kvm`.
pub fn check(vmm: &Path, kvm: &Path) -> Check {
    let device = match OpenOptions::new().read(true).write(true).open(kvm) {
        Ok(device) => device,
        Err(error) => return Check::fail(NAME, format!("cannot open {}: {error}", kvm.display()), SWITCH_ON),
    };
    let probed = program::output(vmm, &[PROBE_FLAG], device.into(), DEADLINE).and_then(|line| {
        Probe::parse(&line).map_err(|error| format!("{} is not of this version: {error}", vmm.display()))
    });
    match probed {
        Ok(probe) => judge(&probe),
        Err(text) => Check::fail(NAME, text, "install nacre (make install), or set paths.vmm in its configuration"),
    }
}

fn judge(probe: &Probe) -> Check {
    let elsewhere =
        "use a host whose hardware runs guests (bare metal, or a VM with nested KVM); `make lab` works anywhere";
    match (probe, probe.rate()) {
        (Probe::Refused { message }, _) => Check::fail(NAME, message, SWITCH_ON),
        (_, Some(rate)) if rate < LEAST_RATE => {
            let gives_up = match probe {
                Probe::Stopped { message, .. } => format!("; {message}"),
                _ => String::new(),
            };
            let detail = format!(
                "/dev/kvm emulates ring 0 (a guest's kernel mode) in software, at {} million instructions a second, \
                 which no Linux kernel can boot on{gives_up}",
                millions(rate)
            );
            Check::fail(NAME, detail, elsewhere)
        }
        (Probe::Stopped { message, .. }, _) => Check::fail(NAME, message, elsewhere),
        (Probe::Ran { .. }, rate) => {
            let rate = rate.unwrap_or_default();
            Check::pass(
                NAME,
                format!("runs a guest's kernel mode, at {} million instructions a second", millions(rate)),
            )
        }
    }
}

fn millions(rate: u64) -> String {
    if rate < 10_000_000 { format!("{:.1}", rate as f64 / 1e6) } else { format!("{}", rate / 1_000_000) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ring_0_in_software_is_named_whether_it_comes_to_its_end_or_not() {
        let slow = Probe::Ran { instructions: 200_000, ns: 125_000_000 };
        let stopped = Probe::Stopped { message: "KVM stopped".into(), instructions: 200_000, ns: 300_000_000 };
        for probe in [slow, stopped] {
            let check = judge(&probe);
            assert!(check.fix.is_some() && check.detail.contains("emulates ring 0"), "{check:?}");
        }
        assert!(judge(&Probe::Ran { instructions: 200_000, ns: 125_000_000 }).detail.contains(" 1.6 million"));
    }

    #[test]
    fn true_kvm_passes_and_a_missing_one_is_told_apart() {
        assert!(judge(&Probe::Ran { instructions: 200_000, ns: 60_000 }).is_good());
        let missing = check(Path::new("/nonexistent/vmm"), Path::new("/nonexistent/kvm"));
        assert!(missing.detail.contains("/nonexistent/kvm") && missing.fix.expect("fails").contains("kvm_amd"));
        assert!(!judge(&Probe::Refused { message: "this host's KVM lacks irqfd".into() }).is_good());
        let fast = Probe::Stopped { message: "KVM stopped the guest".into(), instructions: 200_000, ns: 60_000 };
        assert!(!judge(&fast).is_good() && !judge(&fast).detail.contains("emulates"));
    }

    #[test]
    fn vmm_that_cannot_be_asked_fails_the_check() {
        for vmm in ["/nonexistent/nacre-vmm", "/bin/echo", "/bin/false"] {
            let check = check(Path::new(vmm), Path::new("/dev/null"));
            assert!(!check.is_good() && check.detail.contains(vmm), "{check:?}");
        }
    }
}
