//! The balloon device (virtio 1.2, 5.5): what the guest does not use goes back to the host.
//!
//! Three queues: pages that the guest gives away (inflate), that it takes back (deflate), and free blocks that it reports
//! unasked (VIRTIO_BALLOON_F_REPORTING), which is what shrinks a machine by itself: Linux reports blocks of 2 MiB that have
//! been free for about two seconds. The host never asks for pages here: the target stays 0.
//!
//! How pages are given back is the business of whoever made the memory; here they are a [`GiveBack`] with the block's
//! address and length as the guest named them.
//!
//! Threats: a guest names pages by number, any number, and whoever gives back leaves alone what is not the guest's. Naming pages that it uses costs it their contents, nothing else. It can keep this thread busy, as
//! any; the work for one chain is bounded by [`MAX_CHAIN`].

use std::sync::Arc;

use event_manager::{EventOps, Events, MutEventSubscriber};
use virtio::{Activation, Chain, Device, Memory, StartError, Virtqueue, Worker};
use virtio_bindings::virtio_ids::VIRTIO_ID_BALLOON;
use vm_memory::{Address, Bytes};

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

/// Gives a block of guest memory back to the host: guest-physical address and length in bytes, both unchecked.
pub type GiveBack = dyn Fn(u64, u64) + Send + Sync;

/// The balloon device.
pub struct Balloon {
    worker: Worker,
    give_back: Arc<GiveBack>,
}

impl Balloon {
    /// A balloon that nobody inflates, on `worker`.
    #[must_use]
    pub fn new(worker: Worker, give_back: Arc<GiveBack>) -> Self {
        Self { worker, give_back }
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
        self.worker.start(Box::new(Taker { queues: activation.queues, give_back: Arc::clone(&self.give_back) }))
    }

    fn stop(&mut self) {
        self.worker.stop();
    }
}

struct Taker {
    queues: Vec<Virtqueue>,
    give_back: Arc<GiveBack>,
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
        let give_back = &*self.give_back;
        queue.serve(ops, |memory, chain| {
            match index {
                INFLATE => take_numbered(memory, chain, give_back),
                REPORTED => take_blocks(chain, give_back),
                // A page that is taken back is there when it is touched.
                DEFLATE => {}
                _ => unreachable!("the device has three queues"),
            }
            0
        });
    }
}

/// Each descriptor is an array of page numbers.
fn take_numbered(memory: &Memory, chain: Chain, give_back: &GiveBack) {
    for descriptor in chain.readable().take(MAX_CHAIN) {
        let mut numbers = [0; MAX_PFNS * PFN];
        let length = (descriptor.len() as usize).min(numbers.len()) / PFN * PFN;
        if memory.read_slice(&mut numbers[..length], descriptor.addr()).is_err() {
            return;
        }
        for number in numbers[..length].chunks_exact(PFN) {
            let number = number.try_into().map_or(0, u32::from_le_bytes);
            give_back(u64::from(number) * PAGE, PAGE);
        }
    }
}

/// Each descriptor is a block of free memory itself.
fn take_blocks(chain: Chain, give_back: &GiveBack) {
    for descriptor in chain.writable().take(MAX_CHAIN) {
        give_back(descriptor.addr().raw_value(), u64::from(descriptor.len()));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use virtio_bindings::virtio_ring::VRING_DESC_F_WRITE;
    use virtio_queue::{
        Queue, QueueOwnedT,
        desc::{RawDescriptor, split::Descriptor},
        mock::MockSplitQueue,
    };
    use vm_memory::GuestAddress;

    use super::*;

    const SIZE: usize = 1 << 20;

    /// What `take` gives back of a chain of descriptors (address, length, writable) in a memory that begins as `fill` says.
    fn given(
        fill: impl Fn(&Memory),
        descriptors: &[(u64, u32, bool)],
        take: impl Fn(&Memory, Chain, &GiveBack),
    ) -> Vec<(u64, u64)> {
        let memory = Arc::new(Memory::from_ranges(&[(GuestAddress(0), SIZE)]).expect("memory"));
        fill(&memory);
        let rings = MockSplitQueue::new(&*memory, 128);
        let raw: Vec<_> = descriptors
            .iter()
            .map(|&(address, length, writable)| {
                let flags = if writable { VRING_DESC_F_WRITE as u16 } else { 0 };
                RawDescriptor::from(Descriptor::new(address, length, flags, 0))
            })
            .collect();
        rings.build_desc_chain(&raw).expect("a chain");
        let mut queue: Queue = rings.create_queue().expect("a queue");
        let chain = queue.iter(Arc::clone(&memory)).expect("rings in memory").next().expect("one chain");
        let given = Arc::new(Mutex::new(Vec::new()));
        let list = Arc::clone(&given);
        take(&memory, chain, &move |address, length| list.lock().expect("one thread").push((address, length)));
        given.lock().expect("one thread").clone()
    }

    fn numbers(of: &[u32]) -> impl Fn(&Memory) {
        let bytes: Vec<u8> = of.iter().flat_map(|number| number.to_le_bytes()).collect();
        move |memory| memory.write_slice(&bytes, GuestAddress(0x8_0000)).expect("inside")
    }

    #[test]
    fn numbered_pages_are_given_back_one_by_one() {
        let given = given(numbers(&[3, 1, u32::MAX]), &[(0x8_0000, 8, false), (0x8_0008, 7, false)], take_numbered);
        assert_eq!(given, [(3 * PAGE, PAGE), (PAGE, PAGE), (u64::from(u32::MAX) * PAGE, PAGE)]);
    }

    #[test]
    fn one_descriptor_names_no_more_pages_than_linux_would() {
        let given = given(numbers(&[5; 300]), &[(0x8_0000, 1200, false)], take_numbered);
        assert_eq!(given.len(), MAX_PFNS);
    }

    #[test]
    fn numbers_outside_of_memory_end_the_chain() {
        let given = given(numbers(&[5]), &[(SIZE as u64, 4, false), (0x8_0000, 4, false)], take_numbered);
        assert_eq!(given, []);
    }

    #[test]
    fn free_blocks_are_given_back_as_the_guest_names_them() {
        let blocks = [(0x20_0000, 0x20_0000, true), (u64::MAX, 4096, true), (0, 4096, false)];
        let given = given(|_| {}, &blocks, |_, chain, give_back| take_blocks(chain, give_back));
        assert_eq!(given, [(0x20_0000, 0x20_0000), (u64::MAX, 4096)]);
    }

    #[test]
    fn one_chain_keeps_the_thread_for_so_many_blocks_at_most() {
        let blocks = [(0, 4096, true); MAX_CHAIN + 10];
        let given = given(|_| {}, &blocks, |_, chain, give_back| take_blocks(chain, give_back));
        assert_eq!(given.len(), MAX_CHAIN);
    }
}
