//! Guest memory: one memfd, mapped shared, faulted lazily.
//!
//! Layout of guest-physical addresses (MiB memory, MMIO gap):
//!
//! ```text
//!   0 ─────────── min(size, 3 GiB) │ 3 GiB ── 4 GiB │ 4 GiB ── 4 GiB + rest
//!        RAM, memfd offset 0       │  MMIO, IOAPIC,  │   RAM, memfd offset 3 GiB
//!                                  │  local APIC     │
//! ```
//!
//! A memfd, not anonymous memory: it can be handed to another process, and snapshots can map it.

use std::{fs::File, sync::Arc};

use rustix::{
    fs::{MemfdFlags, SeekFrom, ftruncate, memfd_create, seek, sendfile},
    io::Errno,
};
use vm_memory::{FileOffset, GuestAddress, GuestMemoryMmap, mmap::FromRangesError};

/// The type through which everybody touches guest memory: bounds are checked, accesses are volatile.
pub type Ram = GuestMemoryMmap<()>;

/// First address that is never RAM: devices and interrupt controllers live from here to 4 GiB.
pub const MMIO_GAP_START: u64 = 3 << 30;

/// First address after the gap.
const MMIO_GAP_END: u64 = 4 << 30;

const MIB: u64 = 1 << 20;

/// Why there is no guest memory.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// The host refused to make the file.
    #[error("cannot make a memfd of {mib} MiB for guest memory: {error}")]
    Memfd {
        /// Size asked for.
        mib: u32,
        /// The kernel's answer.
        error: Errno,
    },
    /// The host refused to map it.
    #[error("cannot map {mib} MiB of guest memory: {error}")]
    Map {
        /// Size asked for.
        mib: u32,
        /// The library's answer.
        error: FromRangesError,
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
    Copy(Errno),
    /// A file ended too early.
    #[error("the file is {0} bytes too short")]
    Short(u64),
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
    file: Arc<File>,
}

impl Memory {
    /// Makes `mib` MiB of zeroed memory; the host gives pages when the guest first touches them.
    pub fn new(mib: u32) -> Result<Self, MemoryError> {
        let layout = Layout::of_mib(mib);
        let memfd = |error| MemoryError::Memfd { mib, error };
        let fd = memfd_create("nacre-guest-memory", MemfdFlags::CLOEXEC).map_err(memfd)?;
        ftruncate(&fd, layout.low + layout.high).map_err(memfd)?;
        let file = Arc::new(File::from(fd));
        let mut offset = 0;
        let mut ranges = Vec::new();
        for (start, length) in layout.ranges() {
            let backing = FileOffset::from_arc(Arc::clone(&file), offset);
            // Lossless: this crate is for 64-bit hosts only.
            ranges.push((GuestAddress(start), length as usize, Some(backing)));
            offset += length;
        }
        let ram = Ram::from_ranges_with_files(&ranges).map_err(|error| MemoryError::Map { mib, error })?;
        Ok(Self { ram: Arc::new(ram), layout, file })
    }

    /// Copies `length` bytes of `file` from `offset` on to guest-physical `address`, without touching our mapping.
    pub fn load(&self, file: &File, mut offset: u64, address: u64, length: u64) -> Result<(), MemoryError> {
        let mut place = self.place(address, length).ok_or(MemoryError::Outside { address, length })?;
        let mut left = length;
        while left > 0 {
            // The file of the memory has one position, and only the boot, on one thread, ever moves it.
            seek(&self.file, SeekFrom::Start(place)).map_err(MemoryError::Copy)?;
            let copied = sendfile(&self.file, file, Some(&mut offset), left as usize).map_err(MemoryError::Copy)?;
            if copied == 0 {
                return Err(MemoryError::Short(left));
            }
            place += copied as u64;
            left -= copied as u64;
        }
        Ok(())
    }

    /// Where in the memory's file the stretch lies, if it is all RAM and in one piece.
    fn place(&self, address: u64, length: u64) -> Option<u64> {
        let end = address.checked_add(length)?;
        let mut offset = 0;
        for (start, size) in self.layout.ranges() {
            if (start..=start + size).contains(&address) && end <= start + size {
                return Some(offset + (address - start));
            }
            offset += size;
        }
        None
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
    use vm_memory::{Bytes, GuestMemory};

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
}
