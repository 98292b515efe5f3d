//! The jail around this process (ADR-0007): what a guest that has taken it over can still reach.
//!
//! ```text
//!   as spawned ──enter──► shut in ──(owner maps our ids)──close──► closed
//!   root, new namespaces   no file in sight, a user namespace        root of that namespace over what it is handed,
//!                          in which we are nobody yet                few capabilities
//! ```
//!
//! * [`enter`] runs before the first request, with nothing from outside read yet; [`Shut::close`] runs at the first
//!   request, which the owner sends after it has mapped our ids. No request is looked at in between.
//! * What is left: descriptors that the owner handed in, and a read-only root directory with nothing in it but a `/proc`
//!   of our own pid namespace.
//! * There is no way back, and no half of it: whatever fails ends the process with the reason in the log.
//! * Every thread has a list of system calls ([`Role`]) and takes it before the guest's first instruction.

mod filter;
mod privileges;
mod root;
mod syscalls;

use std::io;

use nix::sched::{CloneFlags, unshare};
use rustix::{
    io::Errno,
    process::getpid,
    time::{ClockId, clock_gettime},
};

pub use syscalls::Role;

/// Why the jail is not closed.
#[derive(Debug, thiserror::Error)]
pub enum JailError {
    /// We are not the first process of a pid namespace.
    #[error("this VMM was not started in namespaces of its own; use vmm_api::spawn, as the shim does")]
    NotSpawned,
    /// The empty root could not be entered.
    #[error("cannot leave the host's files: {step}: {errno}")]
    Root {
        /// What was tried.
        step: &'static str,
        /// The reason.
        errno: Errno,
    },
    /// No more user namespaces, or they are switched off.
    #[error("cannot enter a user namespace: {0}; see /proc/sys/user/max_user_namespaces")]
    UserNamespace(#[source] nix::Error),
    /// The owner has not mapped our ids, or something could not be given up.
    #[error("cannot give up {what}: {errno}")]
    Privilege {
        /// What was to be given up.
        what: &'static str,
        /// The reason.
        errno: Errno,
    },
    /// The kernel has no seccomp, or the list is not a program.
    #[error("cannot restrict the system calls of {role:?}: {source}")]
    Seccomp {
        /// Whose.
        role: Role,
        /// The reason.
        source: io::Error,
    },
}

/// A process that sees no file of the host and has no ids yet.
#[derive(Debug)]
pub struct Shut(());

/// Leaves the host's files and enters a user namespace. Must be called before any thread is started.
pub fn enter() -> Result<Shut, JailError> {
    if !getpid().is_init() {
        return Err(JailError::NotSpawned);
    }
    // rustix reads the auxiliary vector when it first needs the vDSO's clock, by means that no list has.
    let _now = clock_gettime(ClockId::Monotonic);
    root::leave()?;
    privileges::limit()?;
    unshare(CloneFlags::CLONE_NEWUSER).map_err(JailError::UserNamespace)?;
    Ok(Shut(()))
}

impl Shut {
    /// Becomes root of the user namespace that the owner has mapped by now, and keeps what serving files needs of that.
    pub fn close(self) -> Result<(), JailError> {
        privileges::drop_all_but_files()
    }
}
