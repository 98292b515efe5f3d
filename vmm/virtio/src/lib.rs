//! virtio over MMIO (virtio 1.2): what every device shares, so that a device is only about its queues.
//!
//! # The life of a device
//!
//! ```text
//!            status: ACKNOWLEDGE ─► DRIVER ─► FEATURES_OK ─► DRIVER_OK
//!   Idle ───────────────────────────────────────────────────────┬──────► Running
//!     ▲                                                          │          │
//!     └────────────── status := 0 (reset) ◄──────────────────────┴──────────┘
//!                                                                │
//!                                           a broken queue ──► NeedsReset ──(reset)──► Idle
//! ```
//!
//! * [`MmioTransport`] owns the registers and the state above; it is called on vCPU threads and never blocks.
//! * [`Device::start`] gets the queues as [`Virtqueue`]s, each with its doorbell and its interrupt, and moves them to a
//!   [`Worker`]: a thread with an event loop. A reset stops the worker and takes everything back.
//! * The guest is hostile: a register it may not write now is ignored, a queue that points outside of memory is refused
//!   at DRIVER_OK, a chain that loops or overflows ends with an error of virtio-queue, never with a panic.
#![forbid(unsafe_code)]

mod device;
mod mmio;
mod queue;
mod worker;

pub use device::{Activation, Device, Interrupt, StartError};
pub use mmio::{DOORBELL_OFFSET, MmioTransport, WINDOW};
pub use queue::{Chain, QueueError, Virtqueue};
pub use worker::{Subscriber, Worker};

/// One descriptor of a [`Chain`].
pub use virtio_queue::desc::split::Descriptor;

/// Guest memory as every device sees it.
pub type Memory = vm_memory::GuestMemoryMmap<()>;
