//! What a device is to its transport.

use std::{io, sync::Arc};

use crate::{Memory, Virtqueue};

/// Tells the guest that something happened. Cheap, never blocks, callable from any thread.
pub trait Interrupt: Send + Sync {
    /// A used ring has news.
    fn queue(&self);
    /// The configuration space has changed.
    fn config(&self);
}

/// Everything a device needs to run, given to it at DRIVER_OK and given up at reset.
pub struct Activation {
    /// Guest memory.
    pub memory: Arc<Memory>,
    /// One for each of [`Device::queue_sizes`], in order.
    pub queues: Vec<Virtqueue>,
    /// The features that the driver accepted.
    pub features: u64,
}

/// Why a device did not start; the transport then asks the driver for a reset.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The host gave no thread or descriptor.
    #[error("cannot start the worker of virtio device {device}: {error}")]
    Worker {
        /// Name of the device.
        device: &'static str,
        /// The host's answer.
        error: io::Error,
    },
}

/// A virtio device: a number, some features, some queues, a configuration space.
pub trait Device: Send {
    /// Its name in logs and of its thread.
    fn name(&self) -> &'static str;
    /// Its number (virtio 1.2, chapter 5).
    fn id(&self) -> u32;
    /// Features of its own, besides those of the transport and the ring.
    fn features(&self) -> u64 {
        0
    }
    /// The largest size of each of its queues, each a power of two.
    fn queue_sizes(&self) -> &[u16];
    /// Its configuration space, read-only to the guest.
    fn config_space(&self) -> &[u8] {
        &[]
    }
    /// The driver is ready.
    fn start(&mut self, activation: Activation) -> Result<(), StartError>;
    /// The driver resets the device: let go of the queues before returning.
    fn stop(&mut self);
}
