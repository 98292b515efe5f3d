//! Processor features: what KVM supports, with this machine's own topology written into it.
//!
//! One package of N cores without hyper-threading. Leaves follow Intel's SDM volume 2 (CPUID) and AMD's APM volume 3,
//! appendix E.

use kvm_bindings::{CpuId, kvm_cpuid_entry2};

use crate::{Vcpu, vcpu::Prepared, vm::refused};

const LEAF_FEATURES: u32 = 0x1;
const LEAF_CACHES: u32 = 0x4;
const LEAF_TOPOLOGY: [u32; 2] = [0xb, 0x1f];
const LEAF_AMD_CACHES: u32 = 0x8000_001d;
const LEAF_AMD_SIZES: u32 = 0x8000_0008;
const LEAF_AMD_TOPOLOGY: u32 = 0x8000_001e;

const ECX_TSC_DEADLINE: u32 = 1 << 24;
const ECX_HYPERVISOR: u32 = 1 << 31;
const EDX_HYPER_THREADING: u32 = 1 << 28;

/// Level types of the topology leaves.
const LEVEL_THREAD: u32 = 1;
const LEVEL_CORE: u32 = 2;

/// Writes what is the same for every processor.
pub(super) fn describe_machine(template: &mut CpuId, vcpus: u8, tsc_deadline: bool) {
    let count = u32::from(vcpus);
    for entry in template.as_mut_slice() {
        match entry.function {
            LEAF_FEATURES => {
                entry.ecx |= ECX_HYPERVISOR;
                entry.ecx = with(entry.ecx, ECX_TSC_DEADLINE, tsc_deadline);
                entry.edx = with(entry.edx, EDX_HYPER_THREADING, vcpus > 1);
                entry.ebx = (entry.ebx & 0x0000_ffff) | (count << 16);
            }
            LEAF_CACHES | LEAF_AMD_CACHES => describe_cache(entry, count),
            LEAF_AMD_SIZES => entry.ecx = (entry.ecx & !0xf0ff) | (apic_id_bits(vcpus) << 12) | (count - 1),
            leaf if LEAF_TOPOLOGY.contains(&leaf) => describe_level(entry, vcpus),
            _ => {}
        }
    }
}

/// The first levels belong to one core, the last to all of them.
fn describe_cache(entry: &mut kvm_cpuid_entry2, count: u32) {
    let level = (entry.eax >> 5) & 0x7;
    let sharing = if level >= 3 { count - 1 } else { 0 };
    entry.eax = (entry.eax & !0x03ff_c000) | (sharing << 14);
    if entry.function == LEAF_CACHES {
        entry.eax = (entry.eax & !0xfc00_0000) | ((count - 1).min(63) << 26);
    }
}

fn describe_level(entry: &mut kvm_cpuid_entry2, vcpus: u8) {
    let (shift, processors, kind) = match entry.index {
        0 => (0, 1, LEVEL_THREAD),
        1 => (apic_id_bits(vcpus), u32::from(vcpus), LEVEL_CORE),
        _ => (0, 0, 0),
    };
    (entry.eax, entry.ebx) = (shift, processors);
    entry.ecx = (kind << 8) | (entry.index & 0xff);
}

/// Gives one processor the template with its own APIC id in it.
pub(super) fn set(vcpu: &Vcpu, template: &CpuId) -> Prepared {
    let mut own = template.clone();
    let id = u32::from(vcpu.index());
    for entry in own.as_mut_slice() {
        match entry.function {
            LEAF_FEATURES => entry.ebx = (entry.ebx & 0x00ff_ffff) | (id << 24),
            LEAF_AMD_TOPOLOGY => (entry.eax, entry.ebx, entry.ecx) = (id, id, 0),
            leaf if LEAF_TOPOLOGY.contains(&leaf) => entry.edx = id,
            _ => {}
        }
    }
    vcpu.fd.set_cpuid2(&own).map_err(refused("the processor features"))
}

/// Bits that number `vcpus` processors.
fn apic_id_bits(vcpus: u8) -> u32 {
    u32::from(vcpus).next_power_of_two().trailing_zeros()
}

fn with(register: u32, bit: u32, on: bool) -> u32 {
    if on { register | bit } else { register & !bit }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(function: u32, index: u32) -> kvm_cpuid_entry2 {
        kvm_cpuid_entry2 { function, index, ..Default::default() }
    }

    #[test]
    fn topology_is_one_package_of_cores() {
        let mut template =
            CpuId::from_entries(&[entry(LEAF_FEATURES, 0), entry(0xb, 0), entry(0xb, 1), entry(0xb, 2)]).expect("few");
        describe_machine(&mut template, 3, true);
        let [features, thread, core, end] = template.as_slice() else { panic!("four entries") };
        assert_eq!(features.ebx >> 16 & 0xff, 3);
        assert_eq!(features.ecx, ECX_HYPERVISOR | ECX_TSC_DEADLINE);
        assert_eq!((thread.eax, thread.ebx, thread.ecx), (0, 1, 0x100));
        assert_eq!((core.eax, core.ebx, core.ecx), (2, 3, 0x201));
        assert_eq!((end.ebx, end.ecx), (0, 2));
    }

    #[test]
    fn apic_id_bits_cover_every_processor() {
        assert_eq!([1, 2, 3, 4, 32].map(apic_id_bits), [0, 1, 2, 2, 5]);
    }
}
