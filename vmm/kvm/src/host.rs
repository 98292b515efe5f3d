//! The host's `/dev/kvm`: handed in by the owner, checked for what we rely on.
#![expect(unsafe_code)]

use std::os::fd::{FromRawFd, IntoRawFd, OwnedFd};

use kvm_bindings::{CpuId, KVM_API_VERSION, KVM_MAX_CPUID_ENTRIES};
use kvm_ioctls::{Cap, Kvm};

/// Why this host cannot run a machine.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// Another device, or not the stable API. -1 stands for a device that knows no such question.
    #[error("what was handed in as /dev/kvm speaks API version {0}, not {KVM_API_VERSION}")]
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
    /// Takes an open `/dev/kvm` and checks it.
    pub fn new(device: OwnedFd) -> Result<Self, HostError> {
        // SAFETY:
        // * The descriptor is open, and ours alone from here on: it was owned.
        // * It need not be KVM's: the first ioctl fails on anything else, and changes nothing there (0xAE00, _IO).
        let kvm = unsafe { Kvm::from_raw_fd(device.into_raw_fd()) };
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
