//! Names that go or move: UNLINK, RMDIR, RENAME.
//!
//! A node that is about to lose its last known name is first given a descriptor: without a name nothing could open it
//! again, and the guest may still hold it (as a working directory, mapped, open). If that fails, for want of
//! descriptors above all, the name goes all the same: removing files is how one recovers.
//!
//! The lock on names is held from before the system call until the tree says the same, see [`crate::reach`].

use std::ffi::CStr;
use std::os::fd::AsFd;
use std::sync::{Arc, PoisonError};

use rustix::fs::{AtFlags, RenameFlags};
use rustix::io::Errno;

use crate::ShareTree;
use crate::descriptors::Held;
use crate::share::Share;
use crate::tree::{NodeId, Tree};

/// Which of two requests removes a name.
#[derive(Clone, Copy)]
pub(super) enum Removed {
    File,
    Directory,
}

/// The descriptor of a node whose last known name is about to go.
struct Rescue {
    node: NodeId,
    held: Held,
}

impl ShareTree {
    pub(super) fn remove(&self, parent: NodeId, name: &CStr, what: Removed) -> Result<(), Errno> {
        let (share, directory) = self.directory_to_change(parent, name)?;
        let flags = match what {
            Removed::File => AtFlags::empty(),
            Removed::Directory => AtFlags::REMOVEDIR,
        };
        let _names = self.renames.write().unwrap_or_else(PoisonError::into_inner);
        let rescue = self.rescue(&share, &directory, parent, name);
        rustix::fs::unlinkat(&directory, name, flags)?;
        self.record(&share, rescue, |tree| tree.unlinked(parent, name));
        Ok(())
    }

    pub(super) fn move_name(&self, from: (NodeId, &CStr), to: (NodeId, &CStr), flags: u32) -> Result<(), Errno> {
        let flags = RenameFlags::from_bits(flags).ok_or(Errno::INVAL)?;
        let (share, old_directory) = self.directory_to_change(from.0, from.1)?;
        let (other_share, new_directory) = self.directory_to_change(to.0, to.1)?;
        if share.id != other_share.id {
            return Err(Errno::XDEV);
        }
        let _names = self.renames.write().unwrap_or_else(PoisonError::into_inner);
        let exchange = flags.contains(RenameFlags::EXCHANGE);
        let replaces = !exchange && !flags.contains(RenameFlags::NOREPLACE);
        let rescue = if replaces { self.rescue(&share, &new_directory, to.0, to.1) } else { None };
        rustix::fs::renameat_with(&old_directory, from.1, &new_directory, to.1, flags)?;
        self.record(&share, rescue, |tree| if exchange { tree.exchanged(from, to) } else { tree.renamed(from, to) });
        Ok(())
    }

    /// A descriptor for the file that this is the only known name of, if the guest holds it.
    fn rescue(&self, share: &Arc<Share>, directory: impl AsFd, parent: NodeId, name: &CStr) -> Option<Rescue> {
        let (node, key, kind) = {
            let tree = self.tree();
            let node = tree.child(parent, name)?;
            let known = tree.get(node).filter(|known| known.places.len() == 1)?;
            (node, known.key, known.kind)
        };
        if !self.descriptors.orphans_have_room() {
            log::warn!("virtiofs: share {:?}: too many removed files are still held by the guest", share.name);
            return None;
        }
        if let Some(held) = self.descriptors.get(node) {
            return Some(Rescue { node, held });
        }
        let (found, stat) = self.step(directory, name).ok()?;
        share.is(&stat, key, kind).then(|| Rescue { node, held: Arc::new(found) })
    }

    /// Records that names changed, and keeps what was rescued if the guest has not forgotten it meanwhile.
    fn record(&self, share: &Share, rescue: Option<Rescue>, change: impl FnOnce(&mut Tree)) {
        self.change(|tree| {
            change(tree);
            if let Some(Rescue { node, held }) = rescue
                && tree.get(node).is_some_and(|known| known.places.is_empty())
            {
                self.descriptors.orphan(share, node, held);
            }
        });
    }
}
