//! The devices of a machine, each behind [`virtio::Device`].
//!
//! A device gets its queues when the driver is ready, moves them to a thread of its own ([`virtio::Worker`]) and gives
//! them up at a reset. It never sees KVM: an interrupt is a trait object, a doorbell an event.
//!
//! | device | queues | reads from the guest | gives to the guest | what a hostile guest can do to it |
//! |---|---|---|---|---|
//! | [`Fs`] | 2 | FUSE requests | replies of the share tree | see `virtiofs`; nothing outside of the shares |
//! | [`Vsock`] | 3 | packets | packets | fill its own streams' buffers, bounded in number and size |
//! | [`Rng`] | 1 | nothing | host randomness | ask often: bounded by its own CPU time |
//! | [`Balloon`] | 3 | page numbers, free blocks | nothing | lose the contents of its own pages |
//! | [`Console`] | 2 | bytes | nothing | fill a ring of 16 KiB, over and over |
#![forbid(unsafe_code)]

mod balloon;
mod console;
mod fs;
mod rng;
mod vsock;

pub use balloon::{Balloon, GiveBack};
pub use console::{Console, ConsoleTail};
pub use fs::Fs;
pub use rng::Rng;
#[cfg(fuzzing)]
pub use vsock::hostile_socket_driver;
pub use vsock::{DialError, Dialer, StreamHost, Vsock};
