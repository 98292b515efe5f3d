//! LOOKUP and FORGET: how nodes come and go.
//!
//! A lookup is one `statx(parent, name)`; nothing is opened until something needs it. Each entry that is told to the
//! guest counts as one lookup, which FORGET takes back.

use std::ffi::CStr;
use std::sync::Arc;

use fuse_backend_rs::api::filesystem::Entry;
use rustix::io::Errno;

use super::check_name;
use crate::ShareTree;
use crate::descriptors::Held;
use crate::share::Share;
use crate::stat::{self, Stat};
use crate::tree::{NodeId, ROOT, Refusal, Tree};

impl From<Refusal> for Errno {
    fn from(refusal: Refusal) -> Errno {
        match refusal {
            Refusal::Full => Errno::NFILE,
            Refusal::Stale => Errno::STALE,
        }
    }
}

impl ShareTree {
    pub(super) fn find(&self, parent: NodeId, name: &CStr) -> Result<Entry, Errno> {
        check_name(name)?;
        if parent == ROOT {
            return self.find_share(name);
        }
        let share = self.share_of(parent)?;
        let directory = self.reach(&share, parent)?;
        match stat::of_name(&directory, name) {
            Ok(found) => self.enter(&share, parent, name, &found),
            Err(Errno::NOENT) if !share.options.cache.negative.is_zero() => {
                // Node 0: "there is nothing, and for this long there will not be".
                Ok(Entry { entry_timeout: share.options.cache.negative, ..Entry::default() })
            }
            Err(errno) => Err(errno),
        }
    }

    /// Records a file that was just made without a name.
    pub(super) fn enter_nameless(&self, share: &Share, made: &Stat) -> Result<Entry, Errno> {
        let entered = self.change(|tree| tree.enter_nameless(made.key(share.id), made.kind()))?;
        Ok(self.entry(share, entered, made))
    }

    /// Records a file that was found and describes it to the guest.
    pub(super) fn enter(&self, share: &Share, parent: NodeId, name: &CStr, found: &Stat) -> Result<Entry, Errno> {
        let entered = self.change(|tree| tree.enter(parent, name, found.key(share.id), found.kind()))?;
        Ok(self.entry(share, entered, found))
    }

    /// Changes the tree; the descriptors of nodes that this frees are let go of when it is no longer locked.
    pub(super) fn change<T>(&self, change: impl FnOnce(&mut Tree) -> T) -> T {
        let (outcome, freed) = {
            let mut tree = self.tree();
            (change(&mut tree), tree.take_freed())
        };
        self.descriptors.forgotten(&freed);
        outcome
    }

    pub(super) fn entry(&self, share: &Share, node: NodeId, found: &Stat) -> Entry {
        Entry {
            inode: node,
            // Node numbers are never given out twice, so one generation is enough.
            generation: 0,
            attr: found.to_guest(self.guest_ino(found.dev(), found.ino())),
            attr_flags: 0,
            attr_timeout: share.options.cache.attributes,
            entry_timeout: share.options.cache.entry,
        }
    }

    pub(super) fn let_go(&self, requests: &[(NodeId, u64)]) {
        self.change(|tree| {
            for (node, count) in requests {
                tree.forget(*node, *count);
            }
        });
    }

    /// A directory in which a name is about to change: its share, which must be writable, and a descriptor.
    pub(super) fn directory_to_change(&self, parent: NodeId, name: &CStr) -> Result<(Arc<Share>, Held), Errno> {
        check_name(name)?;
        if parent == ROOT {
            return Err(Errno::ROFS);
        }
        let share = self.share_of(parent)?;
        share.check_writable()?;
        let directory = self.reach(&share, parent)?;
        Ok((share, directory))
    }
}
