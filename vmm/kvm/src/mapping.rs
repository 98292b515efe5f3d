//! One stretch of guest memory in our address space.
//!
//! Anonymous, private, and asked to come in huge pages: what the guest or a loader touches first brings 2 MiB at once, one
//! fault and one nested page fault instead of 512 of each, and KVM maps it whole. For that the stretch must lie at the same
//! offset within 2 MiB here as in the guest, so it is aligned here and [`crate::Layout`] aligns it there. Where the host has
//! huge pages turned off ("never"), or none free, pages are small and everything else is the same.
//!
//! A mapping stays until the process ends, which is how long a machine lives: nobody can hold a pointer that outlives it.
#![expect(unsafe_code)]

use std::ptr;

use rustix::{
    io::Errno,
    mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous},
};
use vm_memory::{MmapRegion, mmap::MmapRegionError};

/// Size and alignment of a huge page of x86_64.
const HUGE: usize = 2 << 20;

const ACCESS: ProtFlags = ProtFlags::READ.union(ProtFlags::WRITE);

/// Not reserved: a machine may be larger than what is free, as long as its guest does not use all of it.
const KIND: MapFlags = MapFlags::PRIVATE.union(MapFlags::NORESERVE);

/// Why there is no mapping.
#[derive(Debug, thiserror::Error)]
pub enum MappingError {
    /// The host refused.
    #[error(transparent)]
    Host(#[from] Errno),
    /// vm-memory refused.
    #[error(transparent)]
    Region(#[from] MmapRegionError),
}

/// Maps `length` bytes of zeroes, a whole number of pages.
pub fn map(length: usize) -> Result<MmapRegion, MappingError> {
    let room = length.checked_add(HUGE).ok_or(Errno::NOMEM)?;
    // SAFETY:
    // * no address is given, so the kernel places it where nothing is mapped.
    let start = unsafe { mmap_anonymous(ptr::null_mut(), room, ACCESS, KIND) }?;
    let aligned = start.map_addr(|address| address.next_multiple_of(HUGE));
    // SAFETY:
    // * `aligned` is less than HUGE bytes after `start`, so `length` bytes from there lie in the mapping made above;
    // * the advice changes how the kernel backs them and not what they hold.
    match unsafe { madvise(aligned, length, Advice::LinuxHugepage) } {
        // A host whose kernel was built without huge pages.
        Ok(()) | Err(Errno::INVAL) => {}
        Err(errno) => return Err(errno.into()),
    }
    // SAFETY:
    // * `length` bytes from `aligned` lie in the mapping made above, as just said;
    // * nobody else knows it, and it is never unmapped;
    // * `ACCESS` and `KIND` are what it was made with.
    let region = unsafe { MmapRegion::build_raw(aligned.cast(), length, ACCESS.bits() as i32, KIND.bits() as i32) }?;
    Ok(region)
}

/// Gives `length` bytes from `offset` of a stretch back to the host: they read as zeroes from now on.
///
/// # Panics
///
/// If that is not all inside of the stretch, in whole pages: the caller checks what comes from a guest.
pub fn discard(region: &MmapRegion, offset: usize, length: usize) -> Result<(), Errno> {
    assert!(offset.checked_add(length).is_some_and(|end| end <= region.size()), "inside of the stretch");
    // SAFETY:
    // * the bytes lie in the region's mapping, as asserted, which only `map` makes: private and anonymous;
    // * guest memory is reached by volatile accesses alone, so no reference sees its bytes change.
    unsafe { madvise(region.as_ptr().add(offset).cast(), length, Advice::LinuxDontNeed) }
}
