//! The boot recipe: read it top to bottom.
//!
//! Devices are fixed at boot (ADR-0009): console, file system, sockets, entropy, balloon. Each has one page of registers from
//! [`FIRST_WINDOW`] on and one line of the interrupt controller, both told to the kernel on its command line.

use std::{os::fd::OwnedFd, sync::Arc};

use devices::{Balloon, Console, Dialer, Fs, GiveBack, Rng, Vsock};
use kvm::{Host, Memory, MemoryError, Vm, kernel, x86_64};
use virtio::{DOORBELL_OFFSET, Device, MmioTransport, WINDOW, Worker};
use virtiofs::ShareTree;
use vmm::jail::{JailError, Role};
use vmm_api::{Boot, Failure};

use crate::{
    bus::Bus,
    ending::Owner,
    vcpu::{self, Gate},
};

/// Tag of the file system device; the agent mounts it by this name (`agent_proto::SHARES_TAG`).
const SHARES_TAG: &str = "nacre";

/// Where the device windows lie: inside of the gap that is never RAM, clear of the interrupt controllers.
const FIRST_WINDOW: u64 = 0xd000_0000;

/// Most processors: what the MP table and the guest kernel (NR_CPUS) have room for.
const MAX_VCPUS: u8 = 32;

/// Least memory in MiB in which kernel, agent and a small container live.
const MIN_MEMORY_MIB: u32 = 64;

/// Most memory in MiB: what the guest kernel's direct map and our address layout are tested with.
const MAX_MEMORY_MIB: u32 = 1 << 20;

/// What the machine needs to be told, whatever its owner adds:
/// no chatter, said first, or the early console repeats all that was said before the word: 765 characters, two exits each ·
/// the console and its early stand-in · a panic ends the machine at once, warm, by the keyboard controller · a name for
/// containers that have none of their own · clocks and the processor's entropy are trusted, not tested.
const BASE_CMDLINE: &str = "quiet console=hvc0 earlyprintk=serial,ttyS0 panic=-1 reboot=k,panic_warm \
     hostname=nacre tsc=reliable no_timer_check random.trust_cpu=on";

/// Why a machine does not run.
#[derive(Debug, thiserror::Error)]
pub enum MachineError {
    /// A number out of range.
    #[error("a machine cannot have {what}; {legal} are possible")]
    Invalid {
        /// The number asked for, with its unit.
        what: String,
        /// The legal range.
        legal: String,
    },
    /// KVM is missing or lacks something.
    #[error(transparent)]
    Host(#[from] kvm::HostError),
    /// No memory.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// Unusable images.
    #[error(transparent)]
    Kernel(#[from] kernel::KernelError),
    /// Unusable command line.
    #[error(transparent)]
    Tables(#[from] x86_64::BootError),
    /// KVM refused.
    #[error(transparent)]
    Vm(#[from] kvm::VmError),
    /// The jail does not close.
    #[error(transparent)]
    Jail(#[from] JailError),
    /// The host refused a thread or a descriptor.
    #[error("cannot start the machine's threads: {0}")]
    Threads(#[from] std::io::Error),
}

impl MachineError {
    /// Its kind on the wire.
    pub fn failure(&self) -> Failure {
        match self {
            Self::Invalid { .. } | Self::Tables(_) => Failure::Invalid,
            Self::Host(_) => Failure::NoKvm,
            Self::Kernel(_) => Failure::BadImage,
            Self::Memory(_) | Self::Vm(_) | Self::Jail(_) | Self::Threads(_) => Failure::Internal,
        }
    }
}

/// A running machine: what of it the control loop still needs.
pub struct Machine {
    /// Opens streams into the guest.
    pub dialer: Dialer,
    /// KVM takes the machine down when its last descriptor goes; ours is the last after the vCPUs'.
    _vm: Vm,
}

/// What a machine is made from.
pub struct Parts<'a> {
    /// An open `/dev/kvm`.
    pub kvm: OwnedFd,
    /// An uncompressed ELF.
    pub kernel: OwnedFd,
    /// The agent's.
    pub initramfs: OwnedFd,
    /// What the guest will see.
    pub shares: &'a Arc<ShareTree>,
}

/// Builds the machine and lets it run. All threads exist, and this one is restricted, before the guest's first
/// instruction.
pub fn boot(boot: &Boot, parts: Parts<'_>, owner: &Owner) -> Result<Machine, MachineError> {
    check(boot)?;
    let host = Host::new(parts.kvm)?;
    let memory = Memory::new(boot.memory_mib)?;
    let loaded = kernel::load(&memory, parts.kernel, parts.initramfs)?;
    let vm = Vm::new(&host, memory.clone())?;
    let (devices, dialer) = devices(parts.shares, &memory, owner)?;
    let cmdline = cmdline(devices.len(), &boot.cmdline);
    let windows = (0..).zip(devices).map(|(slot, device)| wire(&vm, slot, device)).collect::<Result<_, _>>()?;
    let bus = Arc::new(Bus::new(owner.console().clone(), FIRST_WINDOW, windows));
    x86_64::write_tables(&memory, &loaded, &cmdline, boot.vcpus)?;
    let template = x86_64::cpuid_template(&host, boot.vcpus)?;
    // All processors exist before the first runs: the kernel wakes the others by their interrupt controllers.
    let vcpus = (0..boot.vcpus).map(|index| vm.vcpu(index)).collect::<Result<Vec<_>, _>>()?;
    let gate = Gate::default();
    for vcpu in vcpus {
        x86_64::prepare(&vcpu, &template, &loaded)?;
        vcpu::spawn(vcpu, Arc::clone(&bus), memory.clone(), owner.clone(), gate.clone())?;
    }
    Role::Control.restrict()?;
    gate.open();
    Ok(Machine { dialer, _vm: vm })
}

/// The fixed set of devices, each with its thread.
fn devices(
    shares: &Arc<ShareTree>,
    memory: &Memory,
    owner: &Owner,
) -> Result<(Vec<Box<dyn Device>>, Dialer), MachineError> {
    let worker = |name, role: Role| Worker::new(name, move || role.restrict_or_end());
    let (vsock, dialer) = Vsock::new(Box::new(owner.clone()), worker("vsock", Role::Sockets)?)?;
    let devices: Vec<Box<dyn Device>> = vec![
        Box::new(Console::new(owner.console().clone(), worker("console", Role::Console)?)),
        Box::new(Fs::new(SHARES_TAG, Arc::clone(shares), worker("fs", Role::Files)?)),
        Box::new(vsock),
        Box::new(Rng::new(worker("rng", Role::Entropy)?)),
        Box::new(Balloon::new(worker("balloon", Role::Balloon)?, give_back(memory.clone()))),
    ];
    Ok((devices, dialer))
}

/// What the balloon does with a block that the guest gives away. That the block is none of its memory is the guest's affair.
fn give_back(memory: Memory) -> Arc<GiveBack> {
    Arc::new(move |address, length| match memory.release(address, length) {
        Ok(()) | Err(MemoryError::Outside { .. }) => {}
        Err(error) => log::warn!("virtio-balloon: {error}"),
    })
}

fn check(boot: &Boot) -> Result<(), MachineError> {
    if !(1..=MAX_VCPUS).contains(&boot.vcpus) {
        let what = format!("{} processors", boot.vcpus);
        return Err(MachineError::Invalid { what, legal: format!("1 to {MAX_VCPUS}") });
    }
    if !(MIN_MEMORY_MIB..=MAX_MEMORY_MIB).contains(&boot.memory_mib) {
        let what = format!("{} MiB of memory", boot.memory_mib);
        return Err(MachineError::Invalid { what, legal: format!("{MIN_MEMORY_MIB} to {MAX_MEMORY_MIB} MiB") });
    }
    Ok(())
}

/// Register window and interrupt line of the device in `slot`.
fn place(slot: u32) -> (u64, u32) {
    let line = x86_64::DEVICE_IRQS.start() + slot;
    assert!(x86_64::DEVICE_IRQS.contains(&line), "the fixed set of devices fits the interrupt controller");
    (FIRST_WINDOW + u64::from(slot) * WINDOW, line)
}

/// Gives a device its window, its line and its doorbells.
fn wire(vm: &Vm, slot: u32, device: Box<dyn Device>) -> Result<MmioTransport, MachineError> {
    let (window, line) = place(slot);
    let irq = vm.irq(line)?;
    let queues = 0..device.queue_sizes().len() as u32;
    let doorbells = queues.map(|queue| vm.doorbell(window + DOORBELL_OFFSET, queue)).collect::<Result<_, _>>()?;
    let name = device.name();
    let raise = move || {
        if let Err(error) = irq.raise() {
            log::error!("virtio-{name}: cannot raise its interrupt: {error}");
        }
    };
    Ok(MmioTransport::new(device, Arc::clone(vm.memory().ram()), raise, doorbells))
}

fn cmdline(devices: usize, extra: &str) -> String {
    let mut text = String::from(BASE_CMDLINE);
    for slot in 0..devices as u32 {
        let (window, line) = place(slot);
        text.push_str(&format!(" virtio_mmio.device=4K@{window:#x}:{line}"));
    }
    if !extra.is_empty() {
        text.push(' ');
        text.push_str(extra);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_out_of_range_are_refused_with_the_range() {
        let fine = Boot { vcpus: 1, memory_mib: 256, cmdline: String::new() };
        check(&fine).expect("in range");
        for bad in
            [Boot { vcpus: 0, ..fine.clone() }, Boot { vcpus: 33, ..fine.clone() }, Boot { memory_mib: 63, ..fine }]
        {
            let error = check(&bad).expect_err("out of range");
            assert_eq!(error.failure(), Failure::Invalid);
            assert!(error.to_string().contains(" to "), "{error}");
        }
    }

    #[test]
    fn command_line_names_every_device() {
        let text = cmdline(2, "debug");
        assert!(text.contains("virtio_mmio.device=4K@0xd0000000:5 virtio_mmio.device=4K@0xd0001000:6 debug"), "{text}");
    }
}
