//! The virtual machine: memory slots, interrupt controllers, irqfd and ioeventfd.
#![expect(unsafe_code)]

use std::{io, sync::Arc};

use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::{IoEventAddress, VmFd};
use vm_memory::{Address, GuestMemory, GuestMemoryRegion};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use crate::{Doorbell, Host, IrqLine, Memory, Vcpu};

/// Three pages that Intel's VT-x needs somewhere unused (KVM_SET_TSS_ADDR); AMD ignores them.
const TSS_ADDRESS: usize = 0xfffb_d000;

/// Why a machine could not be put together.
#[derive(Debug, thiserror::Error)]
#[error("KVM refused {what}: {error}")]
pub struct VmError {
    what: &'static str,
    #[source]
    error: io::Error,
}

/// For `map_err`: what KVM was asked, around its answer.
pub(crate) fn refused(what: &'static str) -> impl Fn(kvm_ioctls::Error) -> VmError {
    move |error| VmError { what, error: io::Error::from_raw_os_error(error.errno()) }
}

/// A virtual machine with memory and interrupt controllers, and no processor yet.
#[derive(Debug)]
pub struct Vm {
    fd: VmFd,
    /// Outlives `fd`'s slots, which point into it.
    memory: Memory,
}

impl Vm {
    /// Creates the machine around its memory.
    pub fn new(host: &Host, memory: Memory) -> Result<Self, VmError> {
        let fd = host.kvm.create_vm().map_err(refused("a new virtual machine"))?;
        fd.set_tss_address(TSS_ADDRESS).map_err(refused("the TSS address"))?;
        fd.create_irq_chip().map_err(refused("an interrupt controller"))?;
        let vm = Self { fd, memory };
        vm.map_memory()?;
        Ok(vm)
    }

    fn map_memory(&self) -> Result<(), VmError> {
        for (slot, region) in (0u32..).zip(self.memory.ram().iter()) {
            let address = region
                .get_host_address(vm_memory::MemoryRegionAddress(0))
                .map_err(|error| VmError { what: "a guest memory region", error: io::Error::other(error) })?;
            let region = kvm_userspace_memory_region {
                slot,
                flags: 0,
                guest_phys_addr: region.start_addr().raw_value(),
                memory_size: region.len(),
                userspace_addr: address as u64,
            };
            // SAFETY:
            // * `userspace_addr` and `memory_size` describe exactly one mapping of `self.memory`, made by vm-memory;
            // * the mapping stays in place while the slot exists: `self` owns both and nothing unmaps it before;
            // * the slots do not overlap: vm-memory keeps its regions disjoint, and each has a number of its own.
            unsafe { self.fd.set_user_memory_region(region) }.map_err(refused("a memory slot"))?;
        }
        Ok(())
    }

    /// The machine's memory.
    #[must_use]
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// A line into pin `gsi` of the IOAPIC.
    pub fn irq(&self, gsi: u32) -> Result<Arc<IrqLine>, VmError> {
        let event = new_event()?;
        self.fd.register_irqfd(&event, gsi).map_err(refused("an irqfd"))?;
        Ok(Arc::new(IrqLine { event }))
    }

    /// An event that fires when the guest writes the 32-bit `value` to `address`.
    pub fn doorbell(&self, address: u64, value: u32) -> Result<Doorbell, VmError> {
        let event = new_event()?;
        let at = IoEventAddress::Mmio(address);
        self.fd.register_ioevent(&event, &at, value).map_err(refused("an ioeventfd"))?;
        Ok(event)
    }

    /// Adds processor `index` (which is its APIC id too); not prepared to run yet.
    pub fn vcpu(&self, index: u8) -> Result<Vcpu, VmError> {
        let fd = self.fd.create_vcpu(u64::from(index)).map_err(refused("a virtual CPU"))?;
        Ok(Vcpu::new(fd, index))
    }
}

fn new_event() -> Result<EventFd, VmError> {
    EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC).map_err(|error| VmError { what: "an eventfd", error })
}
