//! How the shim speaks to a VMM process: all that `shim` and `node` know of it.
//!
//! # Life of a VMM process, as its owner sees it
//!
//! ```text
//!   spawn ──► Unmapped ──Born, ids──► Fresh ──Boot──► Running ──► Exited(reason)      (an event, then the process ends)
//!                │                      │               │
//!                └──────────────────────┴───────────────┴── control socket closed by the owner ──► ends at once
//! ```
//!
//! * The VMM is born with two sockets and nothing else: **control** as its standard input, **events** as its standard
//!   output. Whatever it works on (KVM, kernel, share directories, later taps) reaches it as descriptors over control; it
//!   never resolves a host path, so the jail of ADR-0007 closes around it before its first request ([`spawn`]).
//! * **Control** is strict: one [`Request`], one [`Reply`], in order. **Events** only flow from the VMM to its owner.
//! * The owner's death is the VMM's: end of file on control ends the process, so a killed shim leaves no VM behind.
//! * `AttachShare` and `DetachShare` are legal in Fresh and Running, `Boot` only in Fresh, `Dial` only in Running. Anything
//!   else is answered with [`Reply::Failed`] and changes nothing.
//!
//! # Wire
//!
//! Both sockets are `AF_UNIX SOCK_SEQPACKET`: a message is a packet. Its bytes are one JSON object of at most
//! [`MAX_MESSAGE`] bytes; its descriptors ride along (`SCM_RIGHTS`, at most [`MAX_FDS`]). `docs/formats/vmm-api.md`
//! has the messages with examples. Version 2: fields are only ever added.
//!
//! # Trust
//!
//! A VMM may have been taken over by its guest. Its owner therefore bounds every wait ([`Client::new`]), every size,
//! and reads text from it only as text ([`Event::Exited`]'s console tail is printable ASCII by construction).
#![forbid(unsafe_code)]

mod channel;
mod client;
mod message;
mod probe;
mod spawn;

pub use channel::{Channel, ChannelError, MAX_FDS, MAX_MESSAGE};
pub use client::{Client, ClientError, EventStream};
pub use message::{Boot, CONSOLE_TAIL_MAX, Event, ExitReason, Failure, InvalidShareName, Reply, Request, ShareName};
pub use probe::{PROBE_FLAG, Probe};
pub use spawn::{IdRange, SpawnError, Vmm, map_ids, spawn};
