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
//! A memfd, not anonymous memory: it can be handed to another process, and snapshots can map it. Pages of the boot images
//! are the exception: they are private mappings over it ([`Memory::load`]), shared between machines until written.

use std::{fs::File, sync::Arc};

use rustix::{
    fs::{MemfdFlags, SeekFrom, ftruncate, memfd_create, seek, sendfile},
    io::Errno,
    mm::{MapFlags, ProtFlags, mmap},
};
use vm_memory::{FileOffset, GuestAddress, GuestMemory, GuestMemoryMmap, mmap::FromRangesError};

/// The type through which everybody touches guest memory: bounds are checked, accesses are volatile.
pub type Ram = GuestMemoryMmap<()>;

/// First address that is never RAM: devices and interrupt controllers live from here to 4 GiB.
pub const MMIO_GAP_START: u64 = 3 << 30;

/// First address after the gap.
const MMIO_GAP_END: u64 = 4 << 30;

const MIB: u64 = 1 << 20;
const PAGE: u64 = 4096;

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

    /// Puts `length` bytes of `file` from `offset` on to guest-physical `address`.
    ///
    /// Whole pages that are aligned alike in both are mapped privately: they cost nothing until the guest touches them,
    /// and what it never writes is shared with every other machine that runs the same image. The rest is copied. The
    /// file must not be written or truncated while the machine runs; images are replaced by renaming (`install`).
    pub fn load(&self, file: &File, offset: u64, address: u64, length: u64) -> Result<(), MemoryError> {
        let place = self.place(address, length).ok_or(MemoryError::Outside { address, length })?;
        let size = file.metadata().map_err(|error| MemoryError::Copy(errno(&error)))?.len();
        let missing = offset.saturating_add(length).saturating_sub(size);
        if missing > 0 {
            return Err(MemoryError::Short(missing));
        }
        let aligned = offset.is_multiple_of(PAGE) && address.is_multiple_of(PAGE);
        let mapped = if aligned { length - length % PAGE } else { 0 };
        if mapped > 0 {
            self.map(file, offset, address, mapped)?;
        }
        self.copy(file, offset + mapped, place + mapped, length - mapped)
    }

    /// Maps whole pages of `file` over guest memory.
    #[expect(unsafe_code)]
    fn map(&self, file: &File, offset: u64, address: u64, length: u64) -> Result<(), MemoryError> {
        let outside = |_| MemoryError::Outside { address, length };
        let slice = self.ram.get_slice(GuestAddress(address), length as usize).map_err(outside)?;
        let place = slice.ptr_guard_mut().as_ptr().cast();
        let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::FIXED);
        // SAFETY:
        // * `get_slice` has checked that the whole stretch lies in one mapping of `self.ram`, so nothing else is
        //   unmapped;
        // * what takes its place has the same bounds and the same access, so every pointer into it stays valid, and
        //   it is unmapped together with the mapping around it;
        // * nobody holds a Rust reference into guest memory: vm-memory gives out volatile accesses only.
        let done = unsafe { mmap(place, length as usize, access, flags, file, offset) };
        done.map(drop).map_err(MemoryError::Copy)
    }

    /// Copies into the memory's file inside of the kernel, so that pages written whole are neither zeroed nor faulted in.
    fn copy(&self, file: &File, mut offset: u64, mut place: u64, mut left: u64) -> Result<(), MemoryError> {
        while left > 0 {
            // The memory's file has one position, and only the boot, on one thread, ever moves it.
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

/// The kernel's answer inside of a library's error; every error of a file operation has one.
fn errno(error: &std::io::Error) -> Errno {
    Errno::from_io_error(error).unwrap_or(Errno::IO)
}

#[cfg(test)]
mod tests {
    use vm_memory::Bytes;

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
