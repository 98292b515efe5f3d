//! The root directory: made up from the list of shares, read-only, with times of zero.
//!
//! A share's number is also its position in a listing, so a listing that was interrupted goes on correctly even if
//! shares came and went in between. Names are believed for a second at most: a share that was detached must go, and
//! one that was attached under the same name must come.

use std::ffi::CStr;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use fuse_backend_rs::abi::fuse_abi::{Attr, stat64};
use fuse_backend_rs::api::filesystem::{DirEntry, Entry};
use rustix::io::Errno;

use super::dir::Listing;
use crate::ShareTree;
use crate::share::Share;
use crate::stat;
use crate::tree::ROOT;

/// How long a guest may believe that a share is there.
const SHARE_LIFETIME: Duration = Duration::from_secs(1);

/// Positions of `.` and `..`; shares follow.
const DOTS: [&CStr; 2] = [c".", c".."];

impl ShareTree {
    pub(super) fn root_attributes(&self) -> (stat64, Duration) {
        let attr = Attr {
            ino: ROOT,
            mode: libc::S_IFDIR | 0o555,
            nlink: 2 + self.shares().len() as u32,
            blksize: 4096,
            ..Attr::default()
        };
        (stat64::from(attr), SHARE_LIFETIME)
    }

    pub(super) fn find_share(&self, name: &CStr) -> Result<Entry, Errno> {
        // A name that is not there yet may be attached at any moment: never a negative entry.
        let share = self.shares().named(name).ok_or(Errno::NOENT)?;
        self.share_entry(&share)
    }

    fn share_entry(&self, share: &Arc<Share>) -> Result<Entry, Errno> {
        let found = stat::of_descriptor(&share.root)?;
        let node = self.tree().enter_share(share.key, share.kind)?;
        Ok(Entry { entry_timeout: SHARE_LIFETIME, ..self.entry(share, node, &found) })
    }

    pub(super) fn list_root(&self, offset: u64, listing: &mut Listing) -> io::Result<()> {
        let mut position = offset;
        while let Some(name) = usize::try_from(position).ok().and_then(|at| DOTS.get(at)) {
            let dirent =
                DirEntry { ino: ROOT, offset: position + 1, type_: libc::DT_DIR.into(), name: name.to_bytes() };
            if !listing.add(dirent, || Ok(Entry::default()))? {
                return Ok(());
            }
            position += 1;
        }
        let dots = DOTS.len() as u64;
        let mut last = position - dots;
        loop {
            // The lock is not held while an entry is made.
            let next = self.shares().after(last);
            let Some(share) = next else { return Ok(()) };
            let dirent = DirEntry {
                ino: self.guest_ino(share.key.dev, share.key.ino),
                offset: share.id + dots,
                type_: share.kind >> 12,
                name: share.name.to_bytes(),
            };
            let made = std::cell::Cell::new(None);
            let added = listing.add(dirent, || {
                let entry = self.share_entry(&share)?;
                made.set(Some(entry.inode));
                Ok(entry)
            })?;
            if !added {
                self.take_back(made.get());
                return Ok(());
            }
            last = share.id;
        }
    }
}
