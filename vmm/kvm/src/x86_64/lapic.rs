//! The local interrupt pins: LINT0 takes the legacy controller, LINT1 is NMI (Intel MP spec 1.4, 3.6.2.1).

use kvm_bindings::kvm_lapic_state;

use crate::{Vcpu, vcpu::Prepared, vm::refused};

/// Register offsets (Intel SDM volume 3, table 11-1).
const LVT_LINT0: usize = 0x350;
const LVT_LINT1: usize = 0x360;
const DELIVERY_MODE: u32 = 0x700;
const MODE_EXTINT: u32 = 0x700;
const MODE_NMI: u32 = 0x400;

pub(super) fn set_local_interrupts(vcpu: &Vcpu) -> Prepared {
    let mut lapic = vcpu.fd.get_lapic().map_err(refused("to show a local APIC"))?;
    set_mode(&mut lapic, LVT_LINT0, MODE_EXTINT);
    set_mode(&mut lapic, LVT_LINT1, MODE_NMI);
    vcpu.fd.set_lapic(&lapic).map_err(refused("a local APIC state"))
}

fn set_mode(lapic: &mut kvm_lapic_state, register: usize, mode: u32) {
    let bytes: Vec<u8> = lapic.regs[register..register + 4].iter().map(|byte| *byte as u8).collect();
    let old = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    let new = (old & !DELIVERY_MODE) | mode;
    for (slot, byte) in lapic.regs[register..].iter_mut().zip(new.to_le_bytes()) {
        *slot = byte as _;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_delivery_mode_changes() {
        let mut lapic = kvm_lapic_state::default();
        lapic.regs[LVT_LINT0 + 2] = 1; // masked
        set_mode(&mut lapic, LVT_LINT0, MODE_EXTINT);
        let word: Vec<u8> = lapic.regs[LVT_LINT0..LVT_LINT0 + 4].iter().map(|byte| *byte as u8).collect();
        assert_eq!(word, [0, 7, 1, 0]);
    }
}
