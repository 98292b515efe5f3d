//! The console device (virtio 1.2, 5.3): what the guest prints ends in a bounded ring, the [`ConsoleTail`].
//!
//! Two queues, no multiport. Nothing is ever given to the guest: its receive queue is left alone. The same ring takes
//! the bytes of the early serial port, so a panic before the device exists is seen too.
//!
//! Threats: a guest may print without end; the ring forgets the oldest bytes. What leaves the ring as text is printable
//! ASCII and newlines, so a guest cannot send escape sequences to an operator's terminal.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, PoisonError},
};

use event_manager::{EventOps, Events, MutEventSubscriber};
use virtio::{Activation, Chain, Device, Memory, StartError, Virtqueue, Worker};
use virtio_bindings::virtio_ids::VIRTIO_ID_CONSOLE;
use vm_memory::Bytes;

/// Index of the queue from the guest.
const TRANSMIT: usize = 1;

/// Most bytes read from one chain. Linux prints a line or a page at a time.
const MAX_CHUNK: usize = 4096;

/// The last output of a machine, in at most a fixed number of bytes.
#[derive(Debug, Clone)]
pub struct ConsoleTail {
    ring: Arc<Mutex<VecDeque<u8>>>,
    capacity: usize,
}

impl ConsoleTail {
    /// Keeps the last `capacity` bytes.
    #[must_use]
    pub fn new(capacity: usize) -> Self {
        Self { ring: Arc::default(), capacity }
    }

    /// Adds output.
    pub fn append(&self, bytes: &[u8]) {
        let mut ring = self.ring.lock().unwrap_or_else(PoisonError::into_inner);
        let kept = &bytes[bytes.len().saturating_sub(self.capacity)..];
        let excess = (ring.len() + kept.len()).saturating_sub(self.capacity);
        ring.drain(..excess);
        ring.extend(kept);
    }

    /// What is kept, as printable ASCII and newlines; every other byte becomes `?`, carriage returns vanish.
    #[must_use]
    pub fn text(&self) -> String {
        let ring = self.ring.lock().unwrap_or_else(PoisonError::into_inner);
        ring.iter()
            .filter(|byte| **byte != b'\r')
            .map(|byte| match byte {
                b'\n' | b' '..=b'~' => char::from(*byte),
                b'\t' => ' ',
                _ => '?',
            })
            .collect()
    }
}

/// The console device.
pub struct Console {
    tail: ConsoleTail,
    worker: Worker,
}

impl Console {
    /// A console whose output goes to `tail`, on `worker`.
    #[must_use]
    pub fn new(tail: ConsoleTail, worker: Worker) -> Self {
        Self { tail, worker }
    }
}

impl Device for Console {
    fn name(&self) -> &'static str {
        "console"
    }

    fn id(&self) -> u32 {
        VIRTIO_ID_CONSOLE
    }

    fn queue_sizes(&self) -> &[u16] {
        &[16, 64]
    }

    fn start(&mut self, mut activation: Activation) -> Result<(), StartError> {
        let output = Output { queue: activation.queues.remove(TRANSMIT), tail: self.tail.clone() };
        self.worker.start(Box::new(output))
    }

    fn stop(&mut self) {
        self.worker.stop();
    }
}

struct Output {
    queue: Virtqueue,
    tail: ConsoleTail,
}

impl MutEventSubscriber for Output {
    fn init(&mut self, ops: &mut EventOps<'_>) {
        self.queue.listen(ops, 0);
    }

    fn process(&mut self, _events: Events, ops: &mut EventOps<'_>) {
        let Self { queue, tail } = self;
        queue.serve(ops, |memory, chain| take(memory, chain, tail));
    }
}

fn take(memory: &Memory, chain: Chain, tail: &ConsoleTail) -> u32 {
    let mut left = MAX_CHUNK;
    for descriptor in chain.readable() {
        let mut bytes = [0u8; MAX_CHUNK];
        let length = (descriptor.len() as usize).min(left);
        if memory.read_slice(&mut bytes[..length], descriptor.addr()).is_err() {
            break;
        }
        tail.append(&bytes[..length]);
        left -= length;
    }
    0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tail_keeps_the_last_bytes_whatever_the_sizes() {
        let tail = ConsoleTail::new(8);
        tail.append(b"abc");
        tail.append(b"defghij");
        assert_eq!(tail.text(), "cdefghij");
        tail.append(b"0123456789");
        assert_eq!(tail.text(), "23456789");
    }

    #[test]
    fn text_carries_no_escape_sequences() {
        let tail = ConsoleTail::new(64);
        tail.append(b"a\x1b[31m\tb\r\n\xff");
        assert_eq!(tail.text(), "a?[31m b\n?");
    }
}
