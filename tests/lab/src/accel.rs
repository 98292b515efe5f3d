//! Emulated or hardware: which accelerator a lab boots with.
//!
//! Hardware is used when the host's KVM can run a hypervisor inside a guest. A `/dev/kvm` alone proves nothing: some machines
//! have one that takes every ioctl and emulates kernel mode in software. So the CPU must show the extension, the module must
//! allow nesting, and the first boot has a short deadline, after which the caller goes on with emulation and says so.
//! `LAB_ACCEL=tcg|kvm` overrides.

use crate::qemu::Accel;
use std::fs;
use std::fs::OpenOptions;

/// A choice, and why, for the progress line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Choice {
    /// What to boot with.
    pub accel: Accel,
    /// Whether a failing boot may be repeated with emulation.
    pub tentative: bool,
    /// For people.
    pub why: &'static str,
}

/// `LAB_ACCEL` has a value that means nothing.
#[derive(Debug, thiserror::Error)]
#[error("LAB_ACCEL={0} is not known: use tcg or kvm")]
pub struct UnknownAccel(String);

/// Looks at this machine.
pub fn choose(counted: bool) -> Result<Choice, UnknownAccel> {
    let wish = std::env::var("LAB_ACCEL").ok();
    let nested = ["kvm_amd", "kvm_intel"]
        .iter()
        .filter_map(|m| fs::read_to_string(format!("/sys/module/{m}/parameters/nested")).ok())
        .any(|v| matches!(v.trim(), "1" | "Y"));
    decide(counted, wish.as_deref(), || {
        let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        has_extension(&cpuinfo) && nested && OpenOptions::new().read(true).write(true).open("/dev/kvm").is_ok()
    })
}

/// The decision, without the machine.
fn decide(counted: bool, wish: Option<&str>, usable: impl Fn() -> bool) -> Result<Choice, UnknownAccel> {
    let choice = |accel, tentative, why| Ok(Choice { accel, tentative, why });
    match (counted, wish) {
        (true, _) => choice(Accel::Counted, false, "instructions are counted"),
        (_, Some("tcg")) => choice(Accel::Tcg, false, "LAB_ACCEL=tcg"),
        (_, Some("kvm")) => choice(Accel::Kvm, false, "LAB_ACCEL=kvm"),
        (_, Some(other)) if !other.is_empty() => Err(UnknownAccel(other.to_string())),
        _ if usable() => choice(Accel::Kvm, true, "this machine has nested KVM"),
        _ => choice(Accel::Tcg, false, "no KVM with nesting here"),
    }
}

/// Whether the CPU flags have hardware virtualisation.
fn has_extension(cpuinfo: &str) -> bool {
    cpuinfo.lines().filter(|l| l.starts_with("flags")).any(|l| l.split_whitespace().any(|f| f == "svm" || f == "vmx"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kvm_without_the_cpu_flag_is_refused() {
        assert!(!has_extension("model name : svm lookalike\nflags\t\t: fpu vme de\n"));
        assert!(has_extension("flags\t\t: fpu svm lm\n"));
        assert_eq!(decide(false, None, || false).expect("a choice").accel, Accel::Tcg);
    }

    #[test]
    fn counting_wins_and_words_are_checked() {
        assert_eq!(decide(true, Some("kvm"), || true).expect("a choice").accel, Accel::Counted);
        assert_eq!(decide(false, Some("kvm"), || false).expect("a choice").accel, Accel::Kvm);
        assert!(decide(false, Some("xen"), || true).is_err());
        assert!(decide(false, Some(""), || true).expect("a choice").tentative);
    }
}
