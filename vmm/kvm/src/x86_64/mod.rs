//! What an x86_64 Linux expects to find before its first instruction.
//!
//! ```text
//!   0x0_0500  GDT            0x0_7000  zero page (boot_params)     0x0_9000  page tables (3 pages)
//!   0x2_0000  command line   0x9_fc00  MP table (end of low RAM)   0x10_0000  kernel and the rest
//! ```
//!
//! The boot processor starts in long mode with the first GiB mapped one to one, `rsi` = zero page. The other
//! processors wait for the kernel's INIT and SIPI.

mod boot_params;
mod cpuid;
mod lapic;
mod mptable;
mod registers;

use kvm_bindings::CpuId;
use vm_memory::GuestMemoryError;

pub use boot_params::BootError;

use crate::{Host, HostError, Memory, Vcpu, VmError, kernel::Loaded};

/// Longest command line in bytes, without its NUL (COMMAND_LINE_SIZE of arch/x86).
pub const CMDLINE_MAX: usize = 2047;

/// Lowest and highest line that a device may be given: below are the legacy ones, above the IOAPIC has no pins.
pub const DEVICE_IRQS: std::ops::RangeInclusive<u32> = 5..=23;

const GDT: u64 = 0x500;
const ZERO_PAGE: u64 = 0x7000;
const BOOT_STACK: u64 = 0x8ff0;
const PAGE_TABLES: u64 = 0x9000;
const CMDLINE: u64 = 0x2_0000;
const MP_TABLE: u64 = 0x9_fc00;
/// The first address of RAM that nothing of a PC's lies in.
pub(crate) const HIGH_MEMORY: u64 = 0x10_0000;

/// Writes everything that the kernel reads from memory: tables, memory map, command line.
pub fn write_tables(memory: &Memory, loaded: &Loaded, cmdline: &str, vcpus: u8) -> Result<(), BootError> {
    registers::write_gdt_and_page_tables(memory)?;
    mptable::write(memory, vcpus)?;
    boot_params::write(memory, loaded, cmdline)
}

/// The processor features that the guests' processors show; one template for all of them.
pub fn cpuid_template(host: &Host, vcpus: u8) -> Result<CpuId, HostError> {
    let mut template = host.supported_cpuid()?;
    cpuid::describe_machine(&mut template, vcpus, host.tsc_deadline);
    Ok(template)
}

/// Brings a new processor into the state from which it can run.
pub fn prepare(vcpu: &Vcpu, template: &CpuId, loaded: &Loaded) -> Result<(), VmError> {
    prepare_at(vcpu, template, loaded.entry)
}

/// The same for a payload that is no kernel.
pub(crate) fn prepare_at(vcpu: &Vcpu, template: &CpuId, entry: u64) -> Result<(), VmError> {
    cpuid::set(vcpu, template)?;
    registers::set_msrs(vcpu)?;
    lapic::set_local_interrupts(vcpu)?;
    // The others are put into their first state by the kernel's SIPI.
    if vcpu.index() == 0 { registers::set_boot_state(vcpu, entry) } else { Ok(()) }
}

/// Writes what a payload needs that is no kernel: segments, and page tables that map the first GiB one to one.
pub(crate) fn write_flat_tables(memory: &Memory) -> Result<(), GuestMemoryError> {
    registers::write_gdt_and_page_tables(memory)
}
