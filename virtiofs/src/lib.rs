//! Directories of the host, served to a guest as one FUSE file system: the file half of a virtio-fs device.
//!
//! This crate knows nothing of virtio or VMs. A device wraps a [`ShareTree`] in
//! [`Server`] and hands it requests from its queues.
//!
//! ```text
//!   /            the root: a read-only directory that this crate makes up
//!   ├── rootfs   a share: a directory of the host, attached by descriptor
//!   └── hosts    another: a single file
//! ```
//!
//! # How a file is known
//!
//! By its place. `tree` holds what the guest has looked up: nodes with parent and name, no descriptors. When a node
//! is needed, `reach` opens it again from its parent, one name at a time, and checks that it is still the same
//! file. `descriptors` caches a bounded number of these. So a guest that walks a million files costs this process
//! memory for their names and not a million descriptors, which would pin as many inodes of the host's kernel.
//!
//! # Invariants
//!
//! * Nothing above a share's root is ever opened, whatever guest and host rename: every step is one name, follows no
//!   link, and must find the file that was there before.
//! * Only regular files and directories are ever opened. A device node that a guest makes on a share is a name to us;
//!   the guest's own kernel gives it a meaning there.
//! * Whatever a guest sends (numbers, names, sizes, offsets) is answered with an error at worst. Each table that it
//!   can fill has a limit in [`Limits`].
//! * A detached share holds no descriptor, and everything in it is ESTALE.
//!
//! # What the process must provide
//!
//! * **umask 0**. Modes come from the guest with its own umask applied; the host's would take bits away a second
//!   time. A library has no business changing it behind its process: call [`clear_umask`] once, before threads
//!   start. A first FUSE_INIT under another umask is logged as an error.
//! * **/proc**, of the pid namespace the process is in: regular files are opened through `/proc/self/fd`. It is
//!   opened at the first request that needs it.
//! * **Privilege over what it serves**: root, or root of a user namespace that the shares are mapped into. Owners are
//!   set with chown after creation. The other way, `setfsuid` around each call, costs four system calls more on
//!   every creation, also takes away the capabilities that the server needs to reach the directory (the guest has
//!   checked permissions already), and is not needed at all for root's own files, which are most of them.
//!
//! # What is not here
//!
//! * **Locks shared with the host**: `flock` and `fcntl` locks are the guest's own, on purpose. All containers of a pod
//!   are one guest, so they exclude each other, with waiting, deadlock detection and release at death done by one
//!   kernel and without a round trip. Passed on, a lock that waits would hold up the queue behind it (or needs a
//!   thread for each), a guest could lock a host's program out for good, and the host could not tell guest processes
//!   apart when one dies; fuse-backend-rs hands SETLKW to the method for SETLK besides. The price: a guest and
//!   whoever else has the volume do not exclude each other, and must not write one SQLite database at the same time.
//! * **Birth times** (statx): the guest's kernel gets everything else from GETATTR. [`server`](Server) has the list of
//!   all requests and their answers.
//! * **POSIX ACLs enforced by the guest**: the attributes are carried, but checking them would cost the guest a
//!   request for each file that is not its caller's own.
//! * **The writeback cache**: a guest that holds back writes owns size and modification time, and the host would see
//!   neither. `docker cp`, `commit` and other containers on the same volume read what is there now.

mod descriptors;
mod handles;
mod limits;
mod passthrough;
mod reach;
mod server;
mod share;
mod stat;
mod sys;
mod tree;

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::descriptors::Descriptors;
use crate::handles::Handles;
use crate::share::Shares;
use crate::tree::Tree;

pub use crate::limits::Limits;
pub use crate::server::Server;
pub use crate::share::{CachePolicy, ShareError, ShareOptions};

/// The file system of one virtio-fs device: a root directory with shares in it.
///
/// Any number of threads may serve requests on it. Locks are taken in the order renames, shares, tree, descriptors;
/// only `renames`, and a directory handle's position, are held across a system call.
pub struct ShareTree {
    limits: Limits,
    shares: RwLock<Shares>,
    tree: Mutex<Tree>,
    descriptors: Descriptors,
    handles: Handles,
    /// Held for reading while names are walked, for writing while one changes: see `reach`.
    renames: RwLock<()>,
    /// The host's devices in the order in which they were met: see `guest_ino`.
    devices: Mutex<HashMap<u64, u64>>,
    proc_fds: OnceLock<OwnedFd>,
}

impl ShareTree {
    /// A file system without shares. Limits that the process could not keep are lowered first.
    pub fn new(limits: Limits) -> ShareTree {
        let limits = limits.within_process();
        ShareTree {
            shares: RwLock::default(),
            tree: Mutex::new(Tree::new(limits.nodes)),
            descriptors: Descriptors::new(limits.cached_fds, limits.orphans),
            handles: Handles::new(limits.handles),
            renames: RwLock::new(()),
            devices: Mutex::default(),
            proc_fds: OnceLock::new(),
            limits,
        }
    }

    /// The limits in force.
    pub fn limits(&self) -> Limits {
        self.limits
    }

    /// How many nodes the guest holds, and how many handles: for the VMM's own figures.
    pub fn in_use(&self) -> (usize, usize) {
        (self.tree().len(), self.handles.len())
    }

    /// Forgets everything that a guest held, as at a device reset; shares stay attached.
    pub fn reset(&self) {
        self.handles.clear();
        self.tree().clear();
        self.descriptors.clear();
    }

    /// The inode number that a guest sees.
    ///
    /// All shares are one device to the guest, but may be several on the host, where numbers repeat; two files with
    /// one number look like hard links to tar, rsync or find. Those of the first device met stay as they are, those
    /// of others are moved by a large stride.
    fn guest_ino(&self, dev: u64, ino: u64) -> u64 {
        const STRIDE_BITS: u32 = 48;
        let mut devices = self.devices.lock().unwrap_or_else(PoisonError::into_inner);
        let next = devices.len() as u64;
        let index = *devices.entry(dev).or_insert(next);
        ino ^ index.wrapping_shl(STRIDE_BITS)
    }

    fn tree(&self) -> MutexGuard<'_, Tree> {
        self.tree.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn shares(&self) -> RwLockReadGuard<'_, Shares> {
        self.shares.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn shares_mut(&self) -> RwLockWriteGuard<'_, Shares> {
        self.shares.write().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Sets the process's umask to 0, which serving files needs. For the process to call, once, before threads start.
pub fn clear_umask() {
    rustix::process::umask(rustix::fs::Mode::empty());
}
