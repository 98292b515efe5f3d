//! From a node to a descriptor: the only way to a file, one name at a time.
//!
//! A node that has a descriptor (cached, orphan or open) is reached through it. Any other is reached from the nearest
//! ancestor that has one, at worst the share's root, by `openat(parent, name, O_PATH | O_NOFOLLOW)` for each name on
//! the way, and each file found must be the one that the node stands for (device, inode and type). Hence:
//! * nothing above a share's root can be reached: there is no name with a slash, no `..`, no link that is followed;
//! * a name that means another file now, or none, is ESTALE, upon which the guest's kernel looks it up again;
//! * `O_PATH` opens no device and waits for no fifo, so looking costs nothing whatever is there.
//!
//! A descriptor that exists is used without looking at names again: a directory that the host moves elsewhere stays
//! reachable to a guest that holds it, as it does to a process on the host that has it as working directory, until
//! the cache lets go of it.
//!
//! Renames and unlinks take [`ShareTree::renames`] for writing, around the system call and its entry in the tree;
//! walking takes it for reading. A walk therefore never sees a name that was moved but not yet recorded.
//!
//! Failure paths: EMFILE and ENFILE empty the cache and are tried once more, then told to the guest.

use std::ffi::CStr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, PoisonError};

use rustix::fs::{Mode, OFlags, openat};
use rustix::io::Errno;
use rustix::path::DecInt;

use crate::ShareTree;
use crate::descriptors::Held;
use crate::share::Share;
use crate::stat::{self, Stat};
use crate::tree::{FileKey, NodeId, Place};

/// What one step of a walk must find.
struct Step {
    node: NodeId,
    key: FileKey,
    kind: u32,
    place: Place,
}

impl ShareTree {
    /// The share that a node belongs to. ESTALE if either is gone.
    pub(crate) fn share_of(&self, node: NodeId) -> Result<Arc<Share>, Errno> {
        let id = self.tree().get(node).ok_or(Errno::STALE)?.key.share;
        self.shares().get(id).ok_or(Errno::STALE)
    }

    /// A descriptor for a node: good for statx, for what takes `AT_EMPTY_PATH`, as a directory to start from, and to
    /// be opened again by [`reopen`](Self::reopen). Not for reading.
    pub(crate) fn reach(&self, share: &Arc<Share>, node: NodeId) -> Result<Held, Errno> {
        if let Some(held) = self.descriptors.get(node) {
            return Ok(held);
        }
        let _no_rename = self.renames.read().unwrap_or_else(PoisonError::into_inner);
        self.walk(share, node)
    }

    /// The attributes of a node, without opening it if its parent will do.
    pub(crate) fn stat(&self, share: &Arc<Share>, node: NodeId) -> Result<Stat, Errno> {
        if let Some(held) = self.descriptors.get(node) {
            return stat::of_descriptor(&held);
        }
        let _no_rename = self.renames.read().unwrap_or_else(PoisonError::into_inner);
        let (key, kind, places) = {
            let tree = self.tree();
            let known = tree.get(node).ok_or(Errno::STALE)?;
            if known.share_root {
                return stat::of_descriptor(&share.root);
            }
            (known.key, known.kind, known.places.clone())
        };
        first_that_works(&places, |place| {
            let found = stat::of_name(self.walk(share, place.parent)?, &place.name)?;
            if share.is(&found, key, kind) { Ok(found) } else { Err(Errno::STALE) }
        })
    }

    /// Opens what a descriptor stands for, for reading or writing.
    ///
    /// Through `/proc/self/fd`: a name could mean a device by now, the descriptor cannot. The caller has seen that it
    /// is a regular file.
    pub(crate) fn reopen(&self, held: &OwnedFd, flags: OFlags) -> Result<OwnedFd, Errno> {
        let flags = flags | OFlags::CLOEXEC | OFlags::NOCTTY;
        self.shedding(|| openat(self.proc_fds()?, DecInt::from_fd(held), flags, Mode::empty()))
    }

    /// Does something that needs a descriptor, once more after the cache is emptied if there is none left.
    pub(crate) fn shedding<T>(&self, mut attempt: impl FnMut() -> Result<T, Errno>) -> Result<T, Errno> {
        match attempt() {
            Err(Errno::MFILE | Errno::NFILE) => {
                self.descriptors.shed();
                attempt()
            }
            other => other,
        }
    }

    /// Finds one name and says what it is, as a descriptor that neither follows nor opens anything.
    pub(crate) fn step(&self, directory: impl AsFd, name: &CStr) -> Result<(OwnedFd, Stat), Errno> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let found = self.shedding(|| openat(&directory, name, flags, Mode::empty()))?;
        let stat = stat::of_descriptor(&found)?;
        Ok((found, stat))
    }

    /// `/proc/self/fd`, opened when it is first needed: by then the process is in the jail it stays in.
    pub(crate) fn proc_fds(&self) -> Result<&OwnedFd, Errno> {
        if let Some(fds) = self.proc_fds.get() {
            return Ok(fds);
        }
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let opened = rustix::fs::open(c"/proc/self/fd", flags, Mode::empty()).inspect_err(|errno| {
            log::error!("virtiofs: cannot open /proc/self/fd, which opening a shared file needs: {errno}");
        })?;
        Ok(self.proc_fds.get_or_init(|| opened))
    }

    /// Reaches a node; the caller holds `renames`.
    fn walk(&self, share: &Arc<Share>, node: NodeId) -> Result<Held, Errno> {
        if let Some(held) = self.descriptors.get(node) {
            return Ok(held);
        }
        let (key, kind, places) = {
            let tree = self.tree();
            let known = tree.get(node).filter(|known| known.key.share == share.id).ok_or(Errno::STALE)?;
            if known.share_root {
                return Ok(Arc::clone(&share.root));
            }
            (known.key, known.kind, known.places.clone())
        };
        first_that_works(&places, |place| {
            let (mut held, steps) = self.way_to(share, place.parent)?;
            let last = Step { node, key, kind, place: place.clone() };
            for step in steps.into_iter().rev().chain([last]) {
                held = self.descend(share, &held, &step)?;
            }
            Ok(held)
        })
    }

    /// The nearest ancestor (or self) that has a descriptor, and the steps down from there, last one first.
    fn way_to(&self, share: &Arc<Share>, node: NodeId) -> Result<(Held, Vec<Step>), Errno> {
        let mut steps = Vec::new();
        let mut at = node;
        loop {
            if let Some(held) = self.descriptors.get(at) {
                return Ok((held, steps));
            }
            let tree = self.tree();
            let known = tree.get(at).filter(|known| known.key.share == share.id).ok_or(Errno::STALE)?;
            if known.share_root {
                return Ok((Arc::clone(&share.root), steps));
            }
            let place = known.places.first().ok_or(Errno::STALE)?.clone();
            let parent = place.parent;
            steps.push(Step { node: at, key: known.key, kind: known.kind, place });
            at = parent;
        }
    }

    fn descend(&self, share: &Share, parent: &Held, step: &Step) -> Result<Held, Errno> {
        let (found, stat) = self.step(parent, &step.place.name)?;
        if !share.is(&stat, step.key, step.kind) {
            return Err(Errno::STALE);
        }
        let held = Arc::new(found);
        let tree = self.tree();
        // A node that was forgotten meanwhile must not leave a descriptor behind.
        if tree.get(step.node).is_some() {
            self.descriptors.cache(share, step.node, &held);
        }
        Ok(held)
    }
}

/// Tries a node's places in turn. A name that is gone makes the node stale, not the name the guest asked for.
fn first_that_works<T>(places: &[Place], mut attempt: impl FnMut(&Place) -> Result<T, Errno>) -> Result<T, Errno> {
    let mut failure = Errno::STALE;
    for place in places {
        match attempt(place) {
            Ok(found) => return Ok(found),
            Err(Errno::NOENT | Errno::NOTDIR | Errno::STALE) => {}
            Err(errno) => failure = errno,
        }
    }
    Err(failure)
}
