//! The boot processor's first state: long mode, flat segments, the first GiB mapped one to one.

use kvm_bindings::{Msrs, kvm_msr_entry, kvm_regs, kvm_segment};
use vm_memory::{Bytes, GuestAddress, GuestMemoryError};

use super::{BOOT_STACK, GDT, PAGE_TABLES, ZERO_PAGE};
use crate::{Memory, Vcpu, vcpu::Prepared, vm::refused};

const PAGE: u64 = 0x1000;
const PDPT: u64 = PAGE_TABLES + PAGE;
const DIRECTORY: u64 = PAGE_TABLES + 2 * PAGE;

/// Page table bits: present, writable, and a 2 MiB page.
const PRESENT_WRITABLE: u64 = 0x3;
const LARGE: u64 = 0x80;

const CR0_PE: u64 = 1;
const CR0_ET: u64 = 1 << 4;
const CR0_PG: u64 = 1 << 31;
const CR4_PAE: u64 = 1 << 5;
const EFER_LME: u64 = 1 << 8;
const EFER_LMA: u64 = 1 << 10;

/// Flat segments as the boot protocol wants them: selectors 0x10 (code) and 0x18 (data).
const CODE: Segment = Segment { selector: 0x10, kind: 0xb, long: true };
const DATA: Segment = Segment { selector: 0x18, kind: 0x3, long: false };

/// MSRs (Intel SDM volume 4).
const MSR_MISC_ENABLE: u32 = 0x1a0;
const MISC_ENABLE_FAST_STRING: u64 = 1;
const MSR_MTRR_DEFAULT_TYPE: u32 = 0x2ff;
/// MTRRs on, everything write-back.
const MTRR_WRITE_BACK: u64 = (1 << 11) | 6;

struct Segment {
    selector: u16,
    kind: u8,
    long: bool,
}

impl Segment {
    /// As KVM wants it.
    fn register(&self) -> kvm_segment {
        kvm_segment {
            base: 0,
            limit: 0xffff_ffff,
            selector: self.selector,
            type_: self.kind,
            present: 1,
            dpl: 0,
            db: u8::from(!self.long),
            s: 1,
            l: u8::from(self.long),
            g: 1,
            ..Default::default()
        }
    }

    /// As it stands in the table in memory.
    fn descriptor(&self) -> u64 {
        let kind = u64::from(self.kind);
        let (long, big) = (u64::from(self.long), u64::from(!self.long));
        0x000f_0000_0000_ffff | (kind << 40) | (1 << 44) | (1 << 47) | (long << 53) | (big << 54) | (1 << 55)
    }
}

pub(super) fn write_gdt_and_page_tables(memory: &Memory) -> Result<(), GuestMemoryError> {
    let ram = memory.ram();
    for (selector, descriptor) in [(CODE.selector, CODE.descriptor()), (DATA.selector, DATA.descriptor())] {
        ram.write_obj(descriptor, GuestAddress(GDT + u64::from(selector)))?;
    }
    ram.write_obj(PDPT | PRESENT_WRITABLE, GuestAddress(PAGE_TABLES))?;
    ram.write_obj(DIRECTORY | PRESENT_WRITABLE, GuestAddress(PDPT))?;
    let directory: Vec<u8> =
        (0..512u64).flat_map(|index| ((index << 21) | PRESENT_WRITABLE | LARGE).to_le_bytes()).collect();
    ram.write_slice(&directory, GuestAddress(DIRECTORY))
}

pub(super) fn set_boot_state(vcpu: &Vcpu, entry: u64) -> Prepared {
    let mut special = vcpu.fd.get_sregs().map_err(refused("to show the control registers"))?;
    special.gdt.base = GDT;
    special.gdt.limit = DATA.selector + 7;
    special.cs = CODE.register();
    let data = DATA.register();
    (special.ds, special.es, special.fs, special.gs, special.ss) = (data, data, data, data, data);
    special.cr3 = PAGE_TABLES;
    special.cr4 |= CR4_PAE;
    special.cr0 = CR0_PE | CR0_ET | CR0_PG;
    special.efer |= EFER_LME | EFER_LMA;
    vcpu.fd.set_sregs(&special).map_err(refused("the control registers"))?;
    let general =
        kvm_regs { rflags: 0x2, rip: entry, rsp: BOOT_STACK, rbp: BOOT_STACK, rsi: ZERO_PAGE, ..Default::default() };
    vcpu.fd.set_regs(&general).map_err(refused("the general registers"))
}

pub(super) fn set_msrs(vcpu: &Vcpu) -> Prepared {
    let entry = |index, data| kvm_msr_entry { index, data, ..Default::default() };
    let wanted = [entry(MSR_MISC_ENABLE, MISC_ENABLE_FAST_STRING), entry(MSR_MTRR_DEFAULT_TYPE, MTRR_WRITE_BACK)];
    let msrs = Msrs::from_entries(&wanted).expect("two entries fit");
    // AMD has no MISC_ENABLE and old KVM none to give: what is not taken is not needed.
    vcpu.fd.set_msrs(&msrs).map(drop).map_err(refused("the model-specific registers"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_are_the_boot_protocols_flat_segments() {
        assert_eq!(CODE.descriptor(), 0x00af_9b00_0000_ffff);
        assert_eq!(DATA.descriptor(), 0x00cf_9300_0000_ffff);
    }

    #[test]
    fn first_gib_is_mapped_one_to_one() {
        let memory = Memory::new(64).expect("memory");
        write_gdt_and_page_tables(&memory).expect("inside");
        let last: u64 = memory.ram().read_obj(GuestAddress(DIRECTORY + 511 * 8)).expect("inside");
        assert_eq!(last, (511 << 21) | PRESENT_WRITABLE | LARGE);
    }
}
