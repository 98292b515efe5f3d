//! The balloon device (virtio 1.2, 5.5): what the guest does not use goes back to the host.
//!
//! Three queues: pages that the guest gives away (inflate), that it takes back (deflate), and free blocks that it reports
//! unasked (VIRTIO_BALLOON_F_REPORTING), which is what shrinks a machine by itself: Linux reports blocks of 2 MiB that have
//! been free for about two seconds. The host never asks for pages here: the target stays 0.
//!
//! Giving back is a hole in the memory's file: the pages are gone from the host at once, and the next touch finds zeroes.
//!
//! Threats: a guest names pages by number, any number. A block that is not whole pages inside of one stretch of its own
//! memory is left alone. Naming pages that it uses costs it their contents, nothing else. It can keep this thread busy, as
//! any; the work for one chain is bounded by [`MAX_CHAIN`].

use event_manager::{EventOps, Events, MutEventSubscriber};
use rustix::fs::{FallocateFlags, fallocate};
use virtio::{Activation, Chain, Device, Memory, StartError, Virtqueue, Worker};
use virtio_bindings::virtio_ids::VIRTIO_ID_BALLOON;
use vm_memory::{Address, Bytes, GuestAddress, GuestMemory, GuestMemoryRegion};

/// VIRTIO_BALLOON_F_REPORTING: the third queue is there.
const REPORTING: u64 = 1 << 5;

const INFLATE: usize = 0;
const DEFLATE: usize = 1;
const REPORTED: usize = 2;

/// Page numbers are of pages of this size, whatever the guest's are (VIRTIO_BALLOON_PFN_SHIFT).
const PAGE: u64 = 4096;

/// Bytes of one page number.
const PFN: usize = 4;

/// Most descriptors served of one chain; Linux sends at most 32 (PAGE_REPORTING_CAPACITY), or one with 256 numbers.
const MAX_CHAIN: usize = 64;

/// Most page numbers in one descriptor: Linux's array (VIRTIO_BALLOON_ARRAY_PFNS_MAX).
const MAX_PFNS: usize = 256;

/// The balloon device.
pub struct Balloon {
    worker: Worker,
}

impl Balloon {
    /// A balloon that nobody inflates, on `worker`.
    #[must_use]
    pub fn new(worker: Worker) -> Self {
        Self { worker }
    }
}

impl Device for Balloon {
    fn name(&self) -> &'static str {
        "balloon"
    }

    fn id(&self) -> u32 {
        VIRTIO_ID_BALLOON
    }

    fn features(&self) -> u64 {
        REPORTING
    }

    fn queue_sizes(&self) -> &[u16] {
        &[32, 32, 32]
    }

    /// Target and actual size in pages; the guest's notes on the second are of no use to anybody.
    fn config_space(&self) -> &[u8] {
        &[0; 8]
    }

    fn start(&mut self, activation: Activation) -> Result<(), StartError> {
        self.worker.start(Box::new(Taker { queues: activation.queues }))
    }

    fn stop(&mut self) {
        self.worker.stop();
    }
}

struct Taker {
    queues: Vec<Virtqueue>,
}

impl MutEventSubscriber for Taker {
    fn init(&mut self, ops: &mut EventOps<'_>) {
        for (index, queue) in (0..).zip(&self.queues) {
            queue.listen(ops, index);
        }
    }

    fn process(&mut self, events: Events, ops: &mut EventOps<'_>) {
        let index = events.data() as usize;
        let Some(queue) = self.queues.get_mut(index) else { return };
        queue.serve(ops, |memory, chain| {
            match index {
                INFLATE => take_numbered(memory, chain),
                REPORTED => take_blocks(memory, chain),
                // A page that is taken back is there when it is touched.
                DEFLATE => {}
                _ => unreachable!("the device has three queues"),
            }
            0
        });
    }
}

/// Each descriptor is an array of page numbers.
fn take_numbered(memory: &Memory, chain: Chain) {
    for descriptor in chain.readable().take(MAX_CHAIN) {
        let mut numbers = [0; MAX_PFNS * PFN];
        let length = (descriptor.len() as usize).min(numbers.len()) / PFN * PFN;
        if memory.read_slice(&mut numbers[..length], descriptor.addr()).is_err() {
            return;
        }
        for number in numbers[..length].chunks_exact(PFN) {
            let number = number.try_into().map_or(0, u32::from_le_bytes);
            release(memory, GuestAddress(u64::from(number) * PAGE), PAGE);
        }
    }
}

/// Each descriptor is a block of free memory itself.
fn take_blocks(memory: &Memory, chain: Chain) {
    for descriptor in chain.writable().take(MAX_CHAIN) {
        release(memory, descriptor.addr(), u64::from(descriptor.len()));
    }
}

/// Makes a hole of `length` bytes at `address`, if that is whole pages in one stretch of memory; else does nothing.
fn release(memory: &Memory, address: GuestAddress, length: u64) {
    let aligned = address.raw_value().is_multiple_of(PAGE) && length.is_multiple_of(PAGE) && length > 0;
    let Some(region) = memory.find_region(address).filter(|_| aligned) else { return };
    let inside = address.raw_value() - region.start_addr().raw_value();
    let (Some(end), Some(backing)) = (inside.checked_add(length), region.file_offset()) else { return };
    if end > region.len() {
        return;
    }
    let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    if let Err(errno) = fallocate(backing.file(), hole, backing.start() + inside, length) {
        log::warn!("virtio-balloon: the host does not take {length} bytes back: {errno}");
    }
}

#[cfg(test)]
mod tests {
    use std::{fs::File, os::unix::fs::MetadataExt, sync::Arc};

    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
    use vm_memory::FileOffset;

    use super::*;

    const MIB: u64 = 1 << 20;

    /// Two stretches of 1 MiB, at 0 and at 4 MiB, all of whose pages exist.
    fn full_memory() -> (Memory, Arc<File>) {
        let fd = memfd_create("test", MemfdFlags::CLOEXEC).expect("memfd");
        ftruncate(&fd, 2 * MIB).expect("size");
        let file = Arc::new(File::from(fd));
        let stretch =
            |start, offset| (GuestAddress(start), MIB as usize, Some(FileOffset::from_arc(Arc::clone(&file), offset)));
        let memory = Memory::from_ranges_with_files([stretch(0, 0), stretch(4 * MIB, MIB)]).expect("memory");
        for start in [0, 4 * MIB] {
            memory.write_slice(&vec![7; MIB as usize], GuestAddress(start)).expect("fill");
        }
        (memory, file)
    }

    fn resident(file: &File) -> u64 {
        file.metadata().expect("stat").blocks() * 512
    }

    #[test]
    fn released_pages_leave_the_host_and_read_as_zeroes() {
        let (memory, file) = full_memory();
        assert_eq!(resident(&file), 2 * MIB);
        release(&memory, GuestAddress(4 * MIB + 8192), 16 * PAGE);
        assert_eq!(resident(&file), 2 * MIB - 16 * PAGE);
        let byte = |address| memory.read_obj::<u8>(GuestAddress(address)).expect("inside");
        assert_eq!([byte(4 * MIB + 8191), byte(4 * MIB + 8192), byte(4 * MIB + 8192 + 16 * PAGE)], [7, 0, 7]);
    }

    #[test]
    fn block_that_is_not_whole_pages_of_one_stretch_is_left_alone() {
        let (memory, file) = full_memory();
        let allegations = [
            (1, PAGE),
            (0, PAGE - 1),
            (0, 0),
            (MIB - PAGE, 2 * PAGE),      // over the end of its stretch
            (2 * MIB, PAGE),             // between the stretches
            (u64::MAX - PAGE + 1, PAGE), // at the end of the world
            (0, !(PAGE - 1)),
        ];
        for (address, length) in allegations {
            release(&memory, GuestAddress(address), length);
            assert_eq!(resident(&file), 2 * MIB, "{address:#x}, {length:#x}");
        }
    }
}
