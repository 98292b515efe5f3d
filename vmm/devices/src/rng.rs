//! The entropy device (virtio 1.2, 5.4): one queue; every writable byte of a chain is filled from the host.
//!
//! Threats: a guest can only ask for bytes. A request is served up to [`MAX_REQUEST`] bytes, so one chain that covers
//! all of guest memory costs no more than that at a time; the driver asks again for the rest.

use event_manager::{EventOps, Events, MutEventSubscriber};
use rustix::rand::{GetRandomFlags, getrandom};
use virtio::{Activation, Chain, Device, Memory, StartError, Virtqueue, Worker};
use virtio_bindings::virtio_ids::VIRTIO_ID_RNG;
use vm_memory::Bytes;

/// Most bytes given for one chain: far above what Linux asks for (64), far below what would stall the thread.
const MAX_REQUEST: usize = 4096;

/// The entropy device.
pub struct Rng {
    worker: Worker,
}

impl Rng {
    /// A device that fills buffers on `worker`.
    #[must_use]
    pub fn new(worker: Worker) -> Self {
        Self { worker }
    }
}

struct Source {
    queue: Virtqueue,
}

impl Device for Rng {
    fn name(&self) -> &'static str {
        "rng"
    }

    fn id(&self) -> u32 {
        VIRTIO_ID_RNG
    }

    fn queue_sizes(&self) -> &[u16] {
        &[16]
    }

    fn start(&mut self, mut activation: Activation) -> Result<(), StartError> {
        let queue = activation.queues.remove(0);
        self.worker.start(Box::new(Source { queue }))
    }

    fn stop(&mut self) {
        self.worker.stop();
    }
}

impl MutEventSubscriber for Source {
    fn init(&mut self, ops: &mut EventOps<'_>) {
        self.queue.listen(ops, 0);
    }

    fn process(&mut self, _events: Events, ops: &mut EventOps<'_>) {
        self.queue.serve(ops, fill);
    }
}

/// Fills the writable part of a chain; returns how many bytes it wrote.
fn fill(memory: &Memory, chain: Chain) -> u32 {
    let mut written = 0;
    for descriptor in chain.writable() {
        let wanted = (descriptor.len() as usize).min(MAX_REQUEST - written);
        let mut bytes = [0u8; MAX_REQUEST];
        let Ok(given) = getrandom(&mut bytes[..wanted], GetRandomFlags::empty()) else { break };
        if memory.write_slice(&bytes[..given], descriptor.addr()).is_err() {
            break;
        }
        written += given;
        if written == MAX_REQUEST {
            break;
        }
    }
    written as u32
}
