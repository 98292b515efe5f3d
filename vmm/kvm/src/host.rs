//! The host's `/dev/kvm`: opened once, checked for what we rely on.

use kvm_bindings::{CpuId, KVM_API_VERSION, KVM_MAX_CPUID_ENTRIES};
use kvm_ioctls::{Cap, Kvm};

/// Why this host cannot run a machine.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// The device is missing or closed to us.
    #[error("cannot open /dev/kvm: {0}; load kvm_amd or kvm_intel, and run as root or in group kvm")]
    Open(#[source] kvm_ioctls::Error),
    /// Not the stable API.
    #[error("/dev/kvm speaks API version {0}, not {KVM_API_VERSION}")]
    Version(i32),
    /// An ability that we rely on is missing.
    #[error("this host's KVM lacks {0}; a newer kernel has it")]
    Lacks(&'static str),
    /// The processor's features cannot be read.
    #[error("cannot read the processor features that KVM supports: {0}")]
    Cpuid(#[source] kvm_ioctls::Error),
}

/// An open `/dev/kvm` that has what we need.
#[derive(Debug)]
pub struct Host {
    pub(crate) kvm: Kvm,
    pub(crate) tsc_deadline: bool,
}

impl Host {
    /// Opens the device and checks it.
    pub fn open() -> Result<Self, HostError> {
        let kvm = Kvm::new().map_err(HostError::Open)?;
        let version = kvm.get_api_version();
        if u32::try_from(version) != Ok(KVM_API_VERSION) {
            return Err(HostError::Version(version));
        }
        let needed = [
            (Cap::Irqchip, "an in-kernel interrupt controller"),
            (Cap::Irqfd, "irqfd"),
            (Cap::Ioeventfd, "ioeventfd"),
            (Cap::UserMemory, "user memory slots"),
            (Cap::ImmediateExit, "immediate exit"),
        ];
        if let Some((_, name)) = needed.into_iter().find(|(cap, _)| !kvm.check_extension(*cap)) {
            return Err(HostError::Lacks(name));
        }
        let tsc_deadline = kvm.check_extension(Cap::TscDeadlineTimer);
        Ok(Self { kvm, tsc_deadline })
    }

    /// The processor features that KVM can give to a guest.
    pub fn supported_cpuid(&self) -> Result<CpuId, HostError> {
        self.kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).map_err(HostError::Cpuid)
    }
}
