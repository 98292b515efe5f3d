//! Any guest behind the MMIO transport: registers in any order, rings of any bytes, doorbells in between.
//!
//! An input is a list of steps. Registers and memory can be written freely; a step that starts the device as a driver
//! would, and one that writes a whole descriptor, spare the fuzzer from finding these by luck. Each turn of the device
//! must end, however the rings lie: a turn without an end is found by libFuzzer's timeout.
#![no_main]

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use libfuzzer_sys::{
    arbitrary::{Result, Unstructured},
    fuzz_target,
};
use virtio::{Activation, Device, Memory, MmioTransport, StartError, Virtqueue};
use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// Two ranges with a hole between them.
const RANGES: [(GuestAddress, usize); 2] = [(GuestAddress(0), 0x3000), (GuestAddress(0x4000), 0x1000)];
const SIZES: [u16; 2] = [16, 4];
const MAX_STEPS: usize = 100;

/// Numbers at which something may turn over.
const EDGES: [u32; 8] = [0, 1, 0x2ff0, 0x3000, 0x7fff_ffff, 0x8000_0000, 0xffff_fff0, u32::MAX];

type Queues = Arc<Mutex<Vec<Virtqueue>>>;

/// A device that leaves its queues to the fuzzer.
struct Open(Queues);

fn lock(queues: &Queues) -> MutexGuard<'_, Vec<Virtqueue>> {
    queues.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Device for Open {
    fn name(&self) -> &'static str {
        "open"
    }
    fn id(&self) -> u32 {
        4
    }
    fn queue_sizes(&self) -> &[u16] {
        &SIZES
    }
    fn config_space(&self) -> &[u8] {
        b"abc"
    }
    fn start(&mut self, activation: Activation) -> std::result::Result<(), StartError> {
        *lock(&self.0) = activation.queues;
        Ok(())
    }
    fn stop(&mut self) {
        lock(&self.0).clear();
    }
}

struct Guest {
    memory: Arc<Memory>,
    transport: MmioTransport,
    queues: Queues,
}

impl Guest {
    fn new() -> Self {
        let memory = Arc::new(Memory::from_ranges(&RANGES).expect("memory"));
        let queues = Queues::default();
        let bells = SIZES.iter().map(|_| EventFd::new(EFD_NONBLOCK).expect("eventfd")).collect();
        let device = Box::new(Open(Arc::clone(&queues)));
        let transport = MmioTransport::new(device, Arc::clone(&memory), || {}, bells);
        Self { memory, transport, queues }
    }

    fn step(&mut self, u: &mut Unstructured<'_>) -> Result<()> {
        match u.int_in_range(0..=8)? {
            0 => self.write_register(u)?,
            1 => self.read_register(u)?,
            2 => self.start(u)?,
            3 => self.poke(u.arbitrary::<u16>()?.into(), &u.arbitrary::<u16>()?.to_le_bytes()),
            4 => self.poke(u.arbitrary::<u16>()?.into(), &number(u)?.to_le_bytes()),
            5 => self.describe(u)?,
            6 => self.drain(u.arbitrary()?),
            7 => self.pop_and_push(u)?,
            _ => lock(&self.queues).iter().for_each(Virtqueue::answer_doorbell),
        }
        Ok(())
    }

    fn poke(&mut self, at: u64, bytes: &[u8]) {
        // A guest can only write where memory is.
        let _ = self.memory.write_slice(bytes, GuestAddress(at));
    }

    fn write_register(&mut self, u: &mut Unstructured<'_>) -> Result<()> {
        let offset = 4 * u64::from(u.arbitrary::<u8>()?);
        let bytes = u64::from(number(u)?).to_le_bytes();
        let length = if u.ratio(7, 8)? { 4 } else { u.int_in_range(0..=8)? };
        self.transport.write(offset, &bytes[..length]);
        Ok(())
    }

    fn read_register(&mut self, u: &mut Unstructured<'_>) -> Result<()> {
        let mut answer = [0; 8];
        let offset = number(u)?.into();
        self.transport.read(offset, &mut answer[..u.int_in_range(0..=8)?]);
        Ok(())
    }

    /// The steps of a driver, with sizes and addresses of the guest's choice.
    fn start(&mut self, u: &mut Unstructured<'_>) -> Result<()> {
        let mut set = |offset: u64, value: u32| self.transport.write(offset, &value.to_le_bytes());
        for status in [0, 1, 3] {
            set(0x70, status);
        }
        set(0x20, if u.arbitrary()? { 1 << 29 } else { 0 });
        set(0x24, 1);
        set(0x20, 1);
        set(0x70, 11);
        for queue in 0..SIZES.len() as u32 {
            set(0x30, queue);
            set(0x38, 1 << u.int_in_range(0..=4)?);
            for (offset, alignment) in [(0x80, 16), (0x90, 2), (0xa0, 4)] {
                set(offset, u32::from(u.arbitrary::<u16>()?) & !(alignment - 1));
            }
            set(0x44, 1);
        }
        set(0x70, 15);
        Ok(())
    }

    fn describe(&mut self, u: &mut Unstructured<'_>) -> Result<()> {
        let at = 16 * u64::from(u.arbitrary::<u16>()? & 0xfff);
        let (address, length) = (u64::from(number(u)?), number(u)?);
        let (flags, next) = (u.int_in_range(0..=7u16)?, u.int_in_range(0..=17u16)?);
        let bytes =
            [&address.to_le_bytes()[..], &length.to_le_bytes(), &flags.to_le_bytes(), &next.to_le_bytes()].concat();
        self.poke(at, &bytes);
        Ok(())
    }

    /// A turn of a device that looks at every byte of every chain.
    fn drain(&mut self, written: u32) {
        for (queue, size) in lock(&self.queues).iter_mut().zip(SIZES) {
            let mut chains = 0;
            // A broken queue is an answer; hanging or panicking is not.
            let _ = queue.drain(|memory, chain| {
                chains += 1;
                // A ring that the device itself overwrites with its own used entries may offer a few more.
                assert!(chains <= 8 * usize::from(size), "endless");
                for descriptor in chain {
                    let mut bytes = vec![0; (descriptor.len() as usize).min(4096)];
                    let _ = memory.read_slice(&mut bytes, descriptor.addr());
                }
                written
            });
        }
    }

    /// What a device does that cannot serve a chain at once.
    fn pop_and_push(&mut self, u: &mut Unstructured<'_>) -> Result<()> {
        let (again, head, written) = (u.arbitrary()?, u.arbitrary::<Option<u16>>()?, u.arbitrary()?);
        for queue in lock(&self.queues).iter_mut() {
            let Ok(Some(chain)) = queue.pop() else { continue };
            if again {
                queue.unpop();
                continue;
            }
            let ours = chain.head_index();
            let _ = chain.writable().count();
            let _ = queue.push(head.unwrap_or(ours), written);
            let _ = queue.notify();
            let _ = queue.await_more();
        }
        Ok(())
    }
}

/// A number as a hostile driver would choose it: small ones and edges are as likely as all others.
fn number(u: &mut Unstructured<'_>) -> Result<u32> {
    Ok(match u.int_in_range(0..=3)? {
        0 => u.arbitrary::<u8>()?.into(),
        1 => u.arbitrary::<u16>()?.into(),
        2 => *u.choose(&EDGES)?,
        _ => u.arbitrary()?,
    })
}

fuzz_target!(|bytes: &[u8]| {
    let mut u = Unstructured::new(bytes);
    let mut guest = Guest::new();
    for _ in 0..MAX_STEPS {
        if u.is_empty() || guest.step(&mut u).is_err() {
            break;
        }
    }
});
