//! A virtqueue with its doorbell and its interrupt: pop chains, push results, tell the guest when it wants to know.
//!
//! ```text
//!   listen ──► rings are events ──► serve, serve, … ──► the guest breaks the queue: no event comes any more
//! ```
//!
//! Each ring is an edge of the doorbell, so nobody reads it: one system call less for each request of the guest.

use std::sync::Arc;

use event_manager::{EventOps, Events};
use virtio_queue::{DescriptorChain, Queue, QueueOwnedT, QueueT};
use vmm_sys_util::{epoll::EventSet, eventfd::EventFd};

use crate::{Interrupt, Memory};

/// A descriptor chain of a guest, in its memory. Every address in it is only an allegation.
pub type Chain = DescriptorChain<Arc<Memory>>;

/// The guest broke its queue; the device stops serving it.
#[derive(Debug, thiserror::Error)]
#[error("the guest's virtqueue is broken: {0}")]
pub struct QueueError(#[from] virtio_queue::Error);

/// One running queue.
pub struct Virtqueue {
    device: &'static str,
    queue: Queue,
    memory: Arc<Memory>,
    doorbell: EventFd,
    interrupt: Arc<dyn Interrupt>,
}

impl Virtqueue {
    /// A queue of `device`, which is named in what is logged.
    pub(crate) fn new(
        device: &'static str,
        queue: Queue,
        memory: Arc<Memory>,
        doorbell: EventFd,
        interrupt: Arc<dyn Interrupt>,
    ) -> Self {
        Self { device, queue, memory, doorbell, interrupt }
    }

    /// Makes each ring of the guest an event with `data`.
    pub fn listen(&self, ops: &mut EventOps<'_>, data: u32) {
        let edges = EventSet::IN | EventSet::EDGE_TRIGGERED;
        if let Err(error) = ops.add(Events::with_data(&self.doorbell, data, edges)) {
            log::error!("virtio-{}: cannot listen to a doorbell: {error}", self.device);
        }
    }

    /// Ends [`Virtqueue::listen`]: nothing more can be done with this queue until the driver resets the device.
    pub fn abandon(&self, ops: &mut EventOps<'_>) {
        // It is unknown to the loop if it could not be listened to.
        let _ = ops.remove(Events::empty(&self.doorbell));
    }

    /// Serves what a ring announced, as [`Virtqueue::drain`] does, and abandons the queue if the guest has broken it.
    pub fn serve(&mut self, ops: &mut EventOps<'_>, serve: impl FnMut(&Memory, Chain) -> u32) {
        if let Err(error) = self.drain(serve) {
            log::warn!("virtio-{}: {error}; the queue stops", self.device);
            self.abandon(ops);
        }
    }

    /// The next chain, if there is one.
    pub fn pop(&mut self) -> Result<Option<Chain>, QueueError> {
        Ok(self.queue.iter(Arc::clone(&self.memory))?.next())
    }

    /// Puts the last popped chain back: nothing of it has been used.
    pub fn unpop(&mut self) {
        self.queue.go_to_previous_position();
    }

    /// Hands a chain back with `written` bytes in its writable part.
    pub fn push(&mut self, head: u16, written: u32) -> Result<(), QueueError> {
        Ok(self.queue.add_used(self.memory.as_ref(), head, written)?)
    }

    /// Interrupts the guest if it asked to be told of what has been pushed.
    pub fn notify(&mut self) -> Result<(), QueueError> {
        if self.queue.needs_notification(self.memory.as_ref())? {
            self.interrupt.queue();
        }
        Ok(())
    }

    /// Runs `serve` on every chain, with doorbells off while there is work and a last look after they are on again.
    /// `serve` returns how many bytes it wrote.
    ///
    /// Ends for any ring: an index that promises more chains than the queue has entries breaks the queue, instead of
    /// being looked at again for ever, and so does one that takes its promise back. It would, again and again, if it lay
    /// where the device turns doorbells off and on.
    pub fn drain(&mut self, mut serve: impl FnMut(&Memory, Chain) -> u32) -> Result<(), QueueError> {
        let mut promised = false;
        loop {
            self.queue.disable_notification(self.memory.as_ref())?;
            while let Some(chain) = self.pop()? {
                promised = false;
                let head = chain.head_index();
                let written = serve(&Arc::clone(&self.memory), chain);
                self.push(head, written)?;
                self.notify()?;
            }
            if promised {
                return Err(virtio_queue::Error::InvalidAvailRingIndex.into());
            }
            promised = self.await_more()?;
            if !promised {
                return Ok(());
            }
        }
    }

    /// Turns doorbells on again; true if chains arrived in the meantime.
    pub fn await_more(&mut self) -> Result<bool, QueueError> {
        Ok(self.queue.enable_notification(self.memory.as_ref())?)
    }

    /// Guest memory.
    #[must_use]
    pub fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }
}

/// Builds an idle queue of at most `size` entries.
pub(crate) fn idle(size: u16) -> Queue {
    Queue::new(size).expect("queue sizes of our devices are powers of two")
}
