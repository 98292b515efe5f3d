//! Open files and directories: what a guest reads and writes through.
//!
//! A handle is a number that stands for one open descriptor and the node it was opened as. It lives from OPEN to
//! RELEASE, or until its share is detached; numbers are not given out twice. A number that is unknown, or that was
//! given out for another node, is EBADF (ESTALE if the node's share is gone, which the caller finds out).
//!
//! The number of handles is capped: without it a guest could use up the VMM's descriptors, and the operations that
//! recover from that (unlink, readdir) need a few themselves.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};

use rustix::io::Errno;

use crate::descriptors::Held;
use crate::share::Share;
use crate::tree::{NodeId, ShareId};

/// One open file or directory.
pub(crate) struct Handle {
    pub node: NodeId,
    pub share: Arc<Share>,
    pub file: Held,
    pub writable: bool,
    /// Opened with O_APPEND, where the kernel ignores the offset of a write.
    pub append: bool,
    /// The same file without O_APPEND, opened when the first page of a mapping is written back through this handle.
    pub at_offset: OnceLock<OwnedFd>,
    /// A directory's position belongs to one reader at a time.
    pub position: Mutex<()>,
}

impl Handle {
    pub fn new(node: NodeId, share: &Arc<Share>, file: &Held, writable: bool, append: bool) -> Handle {
        Handle {
            node,
            share: Arc::clone(share),
            file: Arc::clone(file),
            writable,
            append,
            at_offset: OnceLock::new(),
            position: Mutex::new(()),
        }
    }
}

/// All handles of one device.
pub(crate) struct Handles {
    table: RwLock<HashMap<u64, Arc<Handle>>>,
    last: AtomicU64,
    capacity: usize,
}

impl Handles {
    pub fn new(capacity: usize) -> Handles {
        Handles { table: RwLock::default(), last: AtomicU64::new(0), capacity }
    }

    /// ENFILE if no more can be opened: asked before a file is created for a handle that could not be given.
    pub fn check_room(&self) -> Result<(), Errno> {
        if self.len() < self.capacity { Ok(()) } else { Err(Errno::NFILE) }
    }

    /// Gives a handle its number. ESTALE if its share was detached meanwhile.
    pub fn add(&self, handle: Handle) -> Result<u64, Errno> {
        let mut table = self.table.write().unwrap_or_else(PoisonError::into_inner);
        if !handle.share.is_attached() {
            return Err(Errno::STALE);
        }
        if table.len() >= self.capacity {
            return Err(Errno::NFILE);
        }
        let number = self.last.fetch_add(1, Ordering::Relaxed) + 1;
        table.insert(number, Arc::new(handle));
        Ok(number)
    }

    pub fn get(&self, number: u64, node: NodeId) -> Option<Arc<Handle>> {
        let table = self.table.read().unwrap_or_else(PoisonError::into_inner);
        table.get(&number).filter(|handle| handle.node == node).cloned()
    }

    pub fn remove(&self, number: u64, node: NodeId) -> Option<Arc<Handle>> {
        let mut table = self.table.write().unwrap_or_else(PoisonError::into_inner);
        table.get(&number).filter(|handle| handle.node == node)?;
        table.remove(&number)
    }

    /// Closes every handle of a share.
    pub fn release(&self, share: ShareId) {
        let mut table = self.table.write().unwrap_or_else(PoisonError::into_inner);
        let closed: Vec<_> = table.extract_if(|_, handle| handle.share.id == share).collect();
        // The last close of a file may wait for its server; nobody else should.
        drop(table);
        drop(closed);
    }

    pub fn clear(&self) {
        let all = std::mem::take(&mut *self.table.write().unwrap_or_else(PoisonError::into_inner));
        drop(all);
    }

    pub fn len(&self) -> usize {
        self.table.read().unwrap_or_else(PoisonError::into_inner).len()
    }
}
