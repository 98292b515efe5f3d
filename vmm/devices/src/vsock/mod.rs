//! The socket device (virtio 1.2, 5.10): streams between the guest and this host, without a path or a port on the host.
//!
//! # Who connects to whom
//!
//! * Guest to host port P: we make a pair of Unix sockets, keep one end and give the other to the machine's owner
//!   ([`StreamHost::connected`]). There is no listener: whether P means anything is the owner's business, and closing
//!   the descriptor is a refusal.
//! * Owner to guest port P ([`Dialer::dial`]): we send REQUEST; the guest's RESPONSE completes the dial with one end of
//!   a fresh pair.
//!
//! # Rooms
//!
//! ```text
//!   device (queues, epoll)  ─►  mux (which connection)  ─►  connection (one stream's state machine)
//!                                            packet (the wire) ─► span (guest memory in pieces)
//! ```
//!
//! # Threats
//!
//! | the guest | what happens |
//! |---|---|
//! | opens without end | [`mux::MAX_CONNECTIONS`] at once; the next is reset |
//! | sends more than its window | that stream is reset |
//! | never reads | we stop reading from its stream: the sender on the host waits (back-pressure) |
//! | sends to nobody | RST, at most [`mux::MAX_RESETS`] owed at once |
//! | malformed packets, other socket types | dropped or reset, counted in no buffer |
mod connection;
mod device;
#[cfg(any(test, fuzzing))]
mod driver;
#[cfg(fuzzing)]
mod fuzz;
#[cfg(test)]
mod hostile;
mod mux;
mod packet;
mod span;
#[cfg(test)]
mod tests;

pub use device::{DialError, Dialer, Vsock};
#[cfg(fuzzing)]
pub use fuzz::hostile_socket_driver;
pub use mux::StreamHost;
