//! The guest agent: process 1 of a pod's virtual machine, which runs the pod's containers for the shim.
//!
//! `main.rs` is the boot list; everything else is here so that it can be tested as an ordinary process.
//!
//! ```text
//!   boot ──▶ link ──▶ server ──▶ container ──▶ process ──▶ init (child) ──▶ root · entrypoint · credentials
//!   (once)   (dial)   (ttrpc)    (registry,    (clone3,     up to exec)
//!                                 states)       gate)
//!                                    │             reap: the one caller of waitid
//!                                    └─ stdio: pipes ⇄ streams       spec: JSON ──▶ Plan
//! ```
//!
//! Rules that hold everywhere:
//! - One thread. `sys::clone_child` depends on it (a second thread could hold the allocator's lock at the clone),
//!   so nothing here uses `spawn_blocking` or `tokio::fs`.
//! - Nothing polls and nothing sleeps, except the one stated drain deadline in [`stdio`].
//! - The host is trusted, its requests are not assumed to be well-formed: they end in a typed error, one enum per
//!   module, and [`status`] is the only place that turns errors into ttrpc codes.

pub mod boot;
pub mod cgroup;
pub mod container;
pub mod copy_up;
pub mod credentials;
pub mod devices;
pub mod entrypoint;
pub mod init;
pub mod link;
pub mod mounts;
pub mod net;
pub mod power;
pub mod priorities;
pub mod process;
pub mod reap;
pub mod root;
pub mod seccomp;
pub mod server;
pub mod spec;
pub mod status;
pub mod stdio;
pub mod sys;
mod syscall_table;
