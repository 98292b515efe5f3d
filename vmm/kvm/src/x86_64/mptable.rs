//! The MP table (Intel MultiProcessor Specification 1.4): how a kernel without ACPI finds processors and interrupts.
//!
//! One floating pointer, one configuration table: a processor entry per vCPU, one ISA bus, one IOAPIC, one entry per
//! line (identity mapped), and the two local pins. It lies in the last KiB of low memory, where the kernel looks.

use vm_memory::{Bytes, GuestAddress, GuestMemoryError};

use super::{DEVICE_IRQS, MP_TABLE};
use crate::Memory;

/// The table must end before the ROM area at 640 KiB.
const ROOM: usize = 1024;
const HEADER_LENGTH: usize = 44;
const FLOATING_LENGTH: usize = 16;

const SPEC_REVISION: u8 = 4;
const APIC_VERSION: u8 = 0x14;
const LOCAL_APIC: u32 = 0xfee0_0000;
const IO_APIC: u32 = 0xfec0_0000;

/// Entry types.
const PROCESSOR: u8 = 0;
const BUS: u8 = 1;
const IOAPIC: u8 = 2;
const IO_INTERRUPT: u8 = 3;
const LOCAL_INTERRUPT: u8 = 4;

/// Interrupt types.
const INT: u8 = 0;
const NMI: u8 = 1;
const EXTINT: u8 = 3;

const ENABLED: u8 = 1;
const BOOT_PROCESSOR: u8 = 2;

pub(super) fn write(memory: &Memory, vcpus: u8) -> Result<(), GuestMemoryError> {
    let table = table(vcpus);
    memory.ram().write_slice(&table, GuestAddress(MP_TABLE))
}

fn table(vcpus: u8) -> Vec<u8> {
    let (entries, count) = entries(vcpus);
    let length = HEADER_LENGTH + entries.len();
    let mut header = Vec::with_capacity(length);
    header.extend(b"PCMP");
    header.extend((length as u16).to_le_bytes());
    header.extend([SPEC_REVISION, 0]);
    header.extend(b"NACRE   ");
    header.extend(b"MICROVM     ");
    header.extend([0; 6]); // no OEM table
    header.extend(count.to_le_bytes());
    header.extend(LOCAL_APIC.to_le_bytes());
    header.extend([0; 4]); // no extended entries
    header.extend(&entries);
    header[7] = checksum(&header);

    let mut table = Vec::with_capacity(FLOATING_LENGTH + length);
    table.extend(b"_MP_");
    table.extend((MP_TABLE as u32 + FLOATING_LENGTH as u32).to_le_bytes());
    table.extend([1, SPEC_REVISION, 0, 0, 0, 0, 0, 0]);
    table[10] = checksum(&table);
    table.extend(header);
    assert!(table.len() <= ROOM, "the MP table of the largest machine fits below 640 KiB");
    table
}

fn entries(vcpus: u8) -> (Vec<u8>, u16) {
    let ioapic_id = vcpus;
    let mut bytes = Vec::new();
    let mut count = 0u16;
    let mut add = |entry: &[u8]| {
        bytes.extend(entry);
        count += 1;
    };
    for id in 0..vcpus {
        let flags = ENABLED | if id == 0 { BOOT_PROCESSOR } else { 0 };
        let mut entry = [0u8; 20];
        entry[..4].copy_from_slice(&[PROCESSOR, id, APIC_VERSION, flags]);
        // Stepping and features: the kernel reads CPUID instead.
        entry[4..8].copy_from_slice(&0x600u32.to_le_bytes());
        entry[8..12].copy_from_slice(&0x201u32.to_le_bytes());
        add(&entry);
    }
    add(&[BUS, 0, b'I', b'S', b'A', b' ', b' ', b' ']);
    let base = IO_APIC.to_le_bytes();
    add(&[IOAPIC, ioapic_id, APIC_VERSION, ENABLED, base[0], base[1], base[2], base[3]]);
    for line in 0..=*DEVICE_IRQS.end() as u8 {
        add(&[IO_INTERRUPT, INT, 0, 0, 0, line, ioapic_id, line]);
    }
    add(&[LOCAL_INTERRUPT, EXTINT, 0, 0, 0, 0, 0, 0]);
    add(&[LOCAL_INTERRUPT, NMI, 0, 0, 0, 0, 0xff, 1]);
    (bytes, count)
}

/// The byte that makes the sum of all zero.
fn checksum(bytes: &[u8]) -> u8 {
    bytes.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte)).wrapping_neg()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_structures_sum_to_zero() {
        for vcpus in [1, 2, 32] {
            let table = table(vcpus);
            let (floating, config) = table.split_at(FLOATING_LENGTH);
            assert_eq!(checksum(floating), 0);
            assert_eq!(checksum(config), 0);
            assert_eq!(usize::from(u16::from_le_bytes([config[4], config[5]])), config.len());
        }
    }

    #[test]
    fn only_the_first_processor_boots() {
        let (entries, _) = entries(2);
        assert_eq!(entries[3], ENABLED | BOOT_PROCESSOR);
        assert_eq!(entries[23], ENABLED);
    }
}
