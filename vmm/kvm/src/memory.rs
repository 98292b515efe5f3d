//! Guest memory: anonymous, faulted lazily and in huge pages (ADR-0014).
//!
//! Layout of guest-physical addresses (MiB memory, MMIO gap):
//!
//! ```text
//!   0 ─────────── min(size, 3 GiB) │ 3 GiB ── 4 GiB │ 4 GiB ── 4 GiB + rest
//!        RAM, a mapping            │  MMIO, IOAPIC,  │   RAM, another mapping
//!                                  │  local APIC     │
//! ```
//!
//! A page is in one of two states: *absent*, as all are at first, and *present* from the first access, by the guest or by
//! us, on. [`Memory::release`] makes it absent again; the next access finds zeroes.

use std::{
    fs::File,
    io::{self, Seek, SeekFrom},
    sync::Arc,
};

use rustix::io::Errno;
use vm_memory::{
    Bytes, GuestAddress, GuestMemory, GuestMemoryError, GuestMemoryMmap, GuestMemoryRegion, GuestRegionCollectionError,
    GuestRegionMmap,
};

use crate::mapping::{self, MappingError};

/// The type through which everybody touches guest memory: bounds are checked, accesses are volatile.
pub type Ram = GuestMemoryMmap<()>;

/// First address that is never RAM: devices and interrupt controllers live from here to 4 GiB.
pub const MMIO_GAP_START: u64 = 3 << 30;

/// First address after the gap.
const MMIO_GAP_END: u64 = 4 << 30;

const MIB: u64 = 1 << 20;

/// Least unit in which memory is given back.
const PAGE: u64 = 4096;

/// Why there is no guest memory.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// The host refused to map it.
    #[error("cannot map {mib} MiB of guest memory: {error}")]
    Map {
        /// Size asked for.
        mib: u32,
        /// The host's answer.
        error: MappingError,
    },
    /// The mappings do not make a memory: they are none, or overlap.
    #[error("cannot lay out {mib} MiB of guest memory: {error}")]
    Layout {
        /// Size asked for.
        mib: u32,
        /// The library's answer.
        error: GuestRegionCollectionError,
    },
    /// A stretch of addresses that is not all RAM.
    #[error("{length} bytes at {address:#x} do not lie in guest memory")]
    Outside {
        /// Guest-physical address.
        address: u64,
        /// Bytes.
        length: u64,
    },
    /// A file could not be copied in.
    #[error("the file cannot be copied: {0}")]
    Copy(io::Error),
    /// A file ended too early.
    #[error("the file is too short: {length} bytes from {offset} on are needed")]
    Short {
        /// First byte.
        offset: u64,
        /// Bytes.
        length: u64,
    },
    /// The host does not take a stretch back.
    #[error("the host does not take {length} bytes at {address:#x} back: {error}")]
    Kept {
        /// Guest-physical address.
        address: u64,
        /// Bytes.
        length: u64,
        /// The host's answer.
        error: Errno,
    },
}

/// Where RAM lies in the guest-physical address space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    /// Bytes below the gap, from address 0.
    pub low: u64,
    /// Bytes from 4 GiB on; 0 if everything fits below the gap.
    pub high: u64,
}

impl Layout {
    /// Lays `mib` MiB around the gap.
    #[must_use]
    pub fn of_mib(mib: u32) -> Self {
        let size = u64::from(mib) * MIB;
        let low = size.min(MMIO_GAP_START);
        Self { low, high: size - low }
    }

    /// Guest-physical (start, length) of each stretch of RAM, in ascending order.
    pub fn ranges(self) -> impl Iterator<Item = (u64, u64)> {
        [(0, self.low), (MMIO_GAP_END, self.high)].into_iter().filter(|(_, length)| *length > 0)
    }
}

/// The machine's memory.
#[derive(Debug, Clone)]
pub struct Memory {
    ram: Arc<Ram>,
    layout: Layout,
}

impl Memory {
    /// Makes `mib` MiB of zeroed memory; the host gives pages when the guest first touches them.
    pub fn new(mib: u32) -> Result<Self, MemoryError> {
        let layout = Layout::of_mib(mib);
        let mut regions = Vec::new();
        for (start, length) in layout.ranges() {
            // Lossless: this crate is for 64-bit hosts only.
            let mapping = mapping::map(length as usize).map_err(|error| MemoryError::Map { mib, error })?;
            regions
                .push(GuestRegionMmap::new(mapping, GuestAddress(start)).expect("a layout ends in the address space"));
        }
        let ram = Ram::from_regions(regions).map_err(|error| MemoryError::Layout { mib, error })?;
        Ok(Self { ram: Arc::new(ram), layout })
    }

    /// Copies `length` bytes of `file` from `offset` on to guest-physical `address`, and moves the file's position.
    pub fn load(&self, mut file: &File, offset: u64, address: u64, length: u64) -> Result<(), MemoryError> {
        if self.stretch(address, length).is_none() {
            return Err(MemoryError::Outside { address, length });
        }
        file.seek(SeekFrom::Start(offset)).map_err(MemoryError::Copy)?;
        self.ram.read_exact_volatile_from(GuestAddress(address), &mut file, length as usize).map_err(
            |error| match error {
                GuestMemoryError::IOError(error) if error.kind() != io::ErrorKind::UnexpectedEof => {
                    MemoryError::Copy(error)
                }
                _ => MemoryError::Short { offset, length },
            },
        )
    }

    /// Gives `length` bytes at guest-physical `address`, which a guest named, back to the host. What is not whole pages in
    /// one stretch of RAM is left alone.
    pub fn release(&self, address: u64, length: u64) -> Result<(), MemoryError> {
        let whole = length > 0 && address.is_multiple_of(PAGE) && length.is_multiple_of(PAGE);
        let Some((region, offset)) = self.stretch(address, length).filter(|_| whole) else {
            return Err(MemoryError::Outside { address, length });
        };
        mapping::discard(region, offset as usize, length as usize).map_err(|error| MemoryError::Kept {
            address,
            length,
            error,
        })
    }

    /// The mapping in which the stretch lies, and where in there, if it is all RAM and in one piece.
    fn stretch(&self, address: u64, length: u64) -> Option<(&GuestRegionMmap, u64)> {
        let region = self.ram.find_region(GuestAddress(address))?;
        let offset = address - region.start_addr().0;
        (offset.checked_add(length)? <= region.len()).then_some((region, offset))
    }

    /// Access to the bytes.
    #[must_use]
    pub fn ram(&self) -> &Arc<Ram> {
        &self.ram
    }

    /// Where the bytes lie.
    #[must_use]
    pub fn layout(&self) -> Layout {
        self.layout
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_above_the_gap_starts_at_4_gib() {
        let ranges: Vec<_> = Layout::of_mib(4096).ranges().collect();
        assert_eq!(ranges, [(0, 3 << 30), (4 << 30, 1 << 30)]);
        assert_eq!(Layout::of_mib(3072).ranges().count(), 1);
    }

    #[test]
    fn memory_is_zeroed_and_ends_where_it_should() {
        let memory = Memory::new(64).expect("64 MiB");
        let last = GuestAddress(64 * MIB - 8);
        assert_eq!(memory.ram().read_obj::<u64>(last).expect("inside"), 0);
        assert!(memory.ram().read_obj::<u64>(GuestAddress(64 * MIB)).is_err());
        assert!(memory.ram().find_region(GuestAddress(MMIO_GAP_START)).is_none());
    }

    /// Whether the byte at `address` is there, in a machine all of whose bytes were 7.
    fn present(memory: &Memory, address: u64) -> bool {
        memory.ram().read_obj::<u8>(GuestAddress(address)).expect("inside") == 7
    }

    fn full(mib: u32) -> Memory {
        let memory = Memory::new(mib).expect("memory");
        memory.ram().write_slice(&vec![7; (u64::from(mib) * MIB) as usize], GuestAddress(0)).expect("fill");
        memory
    }

    #[test]
    fn released_pages_read_as_zeroes_and_their_neighbours_stay() {
        let memory = full(4);
        memory.release(MIB + 8192, 16 * PAGE).expect("whole pages");
        let end = MIB + 8192 + 16 * PAGE;
        assert_eq!([MIB + 8191, MIB + 8192, end - 1, end].map(|at| present(&memory, at)), [true, false, false, true]);
    }

    #[test]
    fn stretch_that_is_not_whole_pages_of_ram_is_left_alone() {
        let memory = full(4);
        let allegations = [
            (1, PAGE),
            (0, PAGE - 1),
            (0, 0),
            (4 * MIB - PAGE, 2 * PAGE),  // over the end
            (4 * MIB, PAGE),             // behind it
            (u64::MAX - PAGE + 1, PAGE), // at the end of the world
            (0, !(PAGE - 1)),
        ];
        for (address, length) in allegations {
            let refused = memory.release(address, length);
            assert!(matches!(refused, Err(MemoryError::Outside { .. })), "{address:#x}, {length:#x}: {refused:?}");
        }
        assert!((0..4 * MIB).step_by(PAGE as usize).all(|address| present(&memory, address)));
    }

    #[test]
    fn stretches_lie_in_the_host_as_in_the_guest_within_a_huge_page() {
        let memory = Memory::new(4096).expect("not all of it is used");
        for (start, _) in memory.layout().ranges() {
            let host = memory.ram().get_host_address(GuestAddress(start)).expect("RAM") as u64;
            assert_eq!(host % (2 * MIB), start % (2 * MIB), "{start:#x} lies at {host:#x}");
        }
    }

    #[test]
    fn load_says_that_a_file_is_too_short() {
        let memory = Memory::new(4).expect("memory");
        let file = File::open("/dev/null").expect("null");
        let short = memory.load(&file, 0, 0, 10);
        assert!(matches!(short, Err(MemoryError::Short { offset: 0, length: 10 })), "{short:?}");
    }
}
