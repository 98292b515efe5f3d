//! Any guest: registers written in any order, rings of any bytes. Nothing may panic, and every turn of a device ends.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use proptest::{collection::vec, prelude::*};
use virtio::{Activation, Device, Memory, MmioTransport, StartError};
use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

const MEMORY: usize = 0x4000;
const SIZE: u16 = 16;

/// A device that serves what is in its queue as soon as it starts, and looks at every byte of it.
struct Greedy {
    chains: Arc<AtomicUsize>,
}

impl Device for Greedy {
    fn name(&self) -> &'static str {
        "greedy"
    }
    fn id(&self) -> u32 {
        4
    }
    fn queue_sizes(&self) -> &[u16] {
        &[SIZE]
    }
    fn start(&mut self, mut activation: Activation) -> Result<(), StartError> {
        let served = activation.queues[0].drain(|memory, chain| {
            assert!(self.chains.fetch_add(1, Ordering::Relaxed) < 100_000, "endless");
            for descriptor in chain {
                let mut bytes = vec![0; (descriptor.len() as usize).min(4096)];
                let _ = memory.read_slice(&mut bytes, descriptor.addr());
            }
            u32::MAX
        });
        // A broken queue is an answer; hanging or panicking is not.
        let _ = served;
        Ok(())
    }
    fn stop(&mut self) {}
}

fn transport(bytes: &[u8]) -> (MmioTransport, Arc<AtomicUsize>) {
    let memory = Arc::new(Memory::from_ranges(&[(GuestAddress(0), MEMORY)]).expect("memory"));
    memory.write_slice(bytes, GuestAddress(0)).expect("fits");
    let chains = Arc::new(AtomicUsize::new(0));
    let bell = EventFd::new(EFD_NONBLOCK).expect("eventfd");
    (MmioTransport::new(Box::new(Greedy { chains: Arc::clone(&chains) }), memory, || {}, vec![bell]), chains)
}

fn set(transport: &mut MmioTransport, offset: u64, value: u32) {
    transport.write(offset, &value.to_le_bytes());
}

/// The steps of a driver, with ring addresses of the guest's choice.
fn start(transport: &mut MmioTransport, event_idx: bool, size: u32, rings: [u32; 3]) {
    for status in [1, 3] {
        set(transport, 0x70, status);
    }
    set(transport, 0x20, if event_idx { 1 << 29 } else { 0 });
    set(transport, 0x24, 1);
    set(transport, 0x20, 1);
    set(transport, 0x70, 11);
    set(transport, 0x38, size);
    for (offset, address) in [0x80, 0x90, 0xa0].into_iter().zip(rings) {
        set(transport, offset, address);
    }
    set(transport, 0x44, 1);
    set(transport, 0x70, 15);
}

/// Bytes as a hostile driver would choose them: small numbers and flags are as likely as all others together.
fn ring_bytes() -> impl Strategy<Value = Vec<u8>> {
    let byte = prop_oneof![3 => Just(0u8), 2 => 0..20u8, 1 => any::<u8>()];
    vec(byte, 0x1000..0x1800)
}

#[test]
fn index_that_is_the_devices_own_doorbell_flag_ends_the_turn() {
    let (mut transport, chains) = transport(&[]);
    // Two bytes into the ring of chains is its index: here it is the first field of the used ring.
    start(&mut transport, false, 4, [0, 0x1ffe, 0x2000]);
    assert_eq!(chains.load(Ordering::Relaxed), 1);
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 96, ..ProptestConfig::default() })]

    #[test]
    fn rings_of_any_bytes_end_the_turn(
        bytes in ring_bytes(),
        event_idx: bool,
        power in 0..5u32,
        rings in [0..24u32, 0..24u32, 0..24u32],
    ) {
        let (mut transport, chains) = transport(&bytes);
        start(&mut transport, event_idx, 1 << power, rings.map(|slot| slot * 0x100));
        // A ring that the device itself overwrites with its own used entries may offer a few more.
        prop_assert!(chains.load(Ordering::Relaxed) <= 4 * usize::from(SIZE));
    }

    #[test]
    fn registers_in_any_order_do_no_harm(writes in vec((0..0x110u64, any::<u32>(), 0..9usize), 0..60)) {
        let (mut transport, _) = transport(&[]);
        for (offset, value, length) in writes {
            let bytes = [value.to_le_bytes(), value.to_be_bytes()].concat();
            transport.write(offset & !3, &bytes[..length]);
            let mut answer = vec![0; length];
            transport.read(offset, &mut answer);
        }
    }
}
