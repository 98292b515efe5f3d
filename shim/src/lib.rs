//! The shim: what containerd executes for each pod, and what it then talks to for as long as the pod lives.
//!
//! ```text
//!   containerd ── exec `start` ──► bootstrap ── spawns ──► server ── spawns ──► nacre-vmm (one per pod)
//!       │                                                    │  └── spawns ──► nacre-holder (one per container)
//!       ├── ttrpc ──► service ──► task ──► engine, guest, rootfs, io, holder
//!       └── exec `delete` ──► cleanup   (needs neither a live shim nor a live VM)
//! ```
//!
//! Rooms, from the outside in: [`flags`], [`bootstrap`] and [`cleanup`] are the two short-lived actions; [`server`] is
//! the long-lived one; [`service`] is its ttrpc shell; [`task`] holds the verbs and the state machine; the rest is what
//! the verbs need. [`error`] is the only place that knows status codes.
//!
//! Trust: containerd is trusted. The VMM and the guest are not: every wait for them has a deadline, every text from
//! them is cut and cleaned before it is shown, and no path comes from them.
#![forbid(unsafe_code)]

pub mod bootstrap;
pub mod bundle;
pub mod cgroup;
pub mod cleanup;
pub mod engine;
pub mod error;
pub mod events;
pub mod flags;
pub mod guest;
pub mod holder;
pub mod info;
pub mod io;
pub mod log_file;
pub mod logger;
pub mod options;
pub mod rootfs;
pub mod server;
pub mod service;
pub mod spec;
pub mod stray;
pub mod task;
pub mod trace;

use std::sync::{Mutex, MutexGuard};

/// Locks plain data. A panic while such a lock was held leaves data behind that is still good.
pub(crate) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}
