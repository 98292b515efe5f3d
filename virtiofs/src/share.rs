//! Shares: what a host lets a guest see, under a name in the root directory.
//!
//! A share is **attached**, then **detached**; there is no way back, a name attached again is another share with
//! another number. Its root descriptor is the only one that lives as long as the share does; everything else is
//! reached from it. Detaching drops that descriptor, the cached ones, the orphans and the open handles at once, so
//! that the host can unmount what was served even though the guest still holds names (they answer ESTALE from then
//! on). A request that is being served at that moment finishes first; its descriptor goes with it.

use std::collections::BTreeMap;
use std::ffi::{CStr, CString};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::io::Errno;

use crate::ShareTree;
use crate::descriptors::Held;
use crate::stat::{self, Stat};
use crate::tree::{FileKey, ShareId};

/// How long a guest may believe what it was told.
///
/// A virtio-fs device cannot tell a guest that something changed (there is no notification queue), so each of these
/// is the time for which a change made by the host may go unseen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CachePolicy {
    /// For how long a name means the file it meant.
    pub entry: Duration,
    /// For how long attributes hold.
    pub attributes: Duration,
    /// For how long a name that was not there is still not there. Zero: asked each time.
    pub negative: Duration,
    /// True: nobody but this guest writes here, so pages and directory listings survive an open. False: they survive
    /// it if the file's size and modification time are those of the open before.
    pub exclusive: bool,
}

impl CachePolicy {
    /// For a container's own root, which only this guest writes: every path lookup that is spared is a round trip
    /// out of the VM. Sixty seconds is long against a build and short against a container's life. Names that are
    /// missing are believed for one second only, so that a file which the host puts there (`docker cp`) is seen at
    /// once by whoever opens it. A file that the host *replaces*, and a new name in a listing that the guest has, are
    /// seen after a minute at the latest; use [`shared`](Self::shared) where that is too late.
    pub const fn private() -> CachePolicy {
        let minute = Duration::from_secs(60);
        CachePolicy { entry: minute, attributes: minute, negative: Duration::from_secs(1), exclusive: true }
    }

    /// For volumes, which the host and other containers write too: one second, which is what a person who edits on
    /// the host and looks in the guest does not notice. Missing names are asked for each time: programs that wait
    /// for a file to appear poll for it.
    pub const fn shared() -> CachePolicy {
        let second = Duration::from_secs(1);
        CachePolicy { entry: second, attributes: second, negative: Duration::ZERO, exclusive: false }
    }
}

/// How a share is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShareOptions {
    /// Everything that would change a file is EROFS, whatever the host's mount says.
    pub read_only: bool,
    /// What the guest may remember.
    pub cache: CachePolicy,
}

impl Default for ShareOptions {
    /// Writable, and with nothing assumed about who else writes.
    fn default() -> ShareOptions {
        ShareOptions { read_only: false, cache: CachePolicy::shared() }
    }
}

/// Why a share could not be attached or detached.
#[derive(Debug, thiserror::Error)]
pub enum ShareError {
    /// Names are one path component of at most 255 bytes.
    #[error("cannot attach share {0:?}: a name is one path component of 1 to 255 bytes, not \".\" or \"..\"")]
    BadName(String),
    /// Another share has that name.
    #[error("cannot attach share {0:?}: the name is taken")]
    NameTaken(String),
    /// The descriptor is a symbolic link, which leads nowhere a guest may go.
    #[error("cannot attach share {0:?}: its root is a symbolic link, not a file or a directory")]
    SymbolicLink(String),
    /// The descriptor could not be examined.
    #[error("cannot attach share {name:?}: its root cannot be examined: {source}")]
    Unreadable {
        /// The share's name.
        name: String,
        /// What the kernel said.
        source: std::io::Error,
    },
    /// No share has that name.
    #[error("cannot detach share {0:?}: no such share")]
    NotAttached(String),
}

/// One attachment.
pub(crate) struct Share {
    pub id: ShareId,
    pub name: CString,
    /// What was attached: a path or a readable descriptor.
    pub root: Held,
    pub options: ShareOptions,
    /// The key and kind of the root itself.
    pub key: FileKey,
    pub kind: u32,
    attached: AtomicBool,
}

impl Share {
    /// `found` is what the root was seen to be.
    pub fn new(id: ShareId, name: CString, root: Held, options: ShareOptions, found: &Stat) -> Share {
        Share { id, name, root, options, key: found.key(id), kind: found.kind(), attached: AtomicBool::new(true) }
    }

    pub fn is_attached(&self) -> bool {
        self.attached.load(Ordering::Acquire)
    }

    pub fn mark_detached(&self) {
        self.attached.store(false, Ordering::Release);
    }

    /// EROFS if the guest may not write here.
    pub fn check_writable(&self) -> Result<(), Errno> {
        if self.options.read_only { Err(Errno::ROFS) } else { Ok(()) }
    }

    /// True if `stat` is the file that a node with this key and kind stands for.
    pub fn is(&self, stat: &Stat, key: FileKey, kind: u32) -> bool {
        stat.key(self.id) == key && stat.kind() == kind
    }
}

/// All shares, in the order in which they were attached: a share's number is its place in the root directory, so a
/// listing can go on where it stopped although shares came and went.
#[derive(Default)]
pub(crate) struct Shares {
    by_id: BTreeMap<ShareId, Arc<Share>>,
    last: ShareId,
}

impl Shares {
    pub fn get(&self, id: ShareId) -> Option<Arc<Share>> {
        self.by_id.get(&id).cloned()
    }

    pub fn named(&self, name: &CStr) -> Option<Arc<Share>> {
        self.by_id.values().find(|share| share.name.as_c_str() == name).cloned()
    }

    /// The first share whose number is above `id`.
    pub fn after(&self, id: ShareId) -> Option<Arc<Share>> {
        let next = id.checked_add(1)?;
        self.by_id.range(next..).next().map(|(_, share)| Arc::clone(share))
    }

    pub fn len(&self) -> usize {
        self.by_id.len()
    }
}

impl ShareTree {
    /// Makes a directory or a single file appear as `name` in the root directory, with the cautious
    /// [`CachePolicy::shared`].
    ///
    /// `root` may be opened with `O_PATH`. No path is ever walked above it.
    pub fn attach(&self, name: &str, root: OwnedFd, read_only: bool) -> Result<(), ShareError> {
        self.attach_with(name, root, ShareOptions { read_only, ..ShareOptions::default() })
    }

    /// Like [`attach`](Self::attach), with everything that can be chosen.
    pub fn attach_with(&self, name: &str, root: OwnedFd, options: ShareOptions) -> Result<(), ShareError> {
        let c_name = component(name)?;
        // Before the lock: a file system that does not answer must not stop the other shares.
        let found = stat::of_descriptor(&root)
            .map_err(|errno| ShareError::Unreadable { name: name.to_owned(), source: errno.into() })?;
        if found.kind() == libc::S_IFLNK {
            return Err(ShareError::SymbolicLink(name.to_owned()));
        }
        let mut shares = self.shares_mut();
        if shares.named(&c_name).is_some() {
            return Err(ShareError::NameTaken(name.to_owned()));
        }
        shares.last += 1;
        let id = shares.last;
        shares.by_id.insert(id, Arc::new(Share::new(id, c_name, Arc::new(root), options, &found)));
        Ok(())
    }

    /// Takes a share away and closes every descriptor that was held for it. What the guest still holds of it answers
    /// ESTALE.
    pub fn detach(&self, name: &str) -> Result<(), ShareError> {
        let not_attached = || ShareError::NotAttached(name.to_owned());
        let c_name = CString::new(name).map_err(|_| not_attached())?;
        let share = {
            let mut shares = self.shares_mut();
            let share = shares.named(&c_name).ok_or_else(not_attached)?;
            shares.by_id.remove(&share.id);
            share
        };
        // The flag first: whoever still holds the share sees it before putting another descriptor away.
        share.mark_detached();
        self.handles.release(share.id);
        self.descriptors.release(share.id);
        Ok(())
    }
}

fn component(name: &str) -> Result<CString, ShareError> {
    let bad = || ShareError::BadName(name.to_owned());
    let usable = !name.is_empty() && name.len() <= 255 && !name.contains('/') && name != "." && name != "..";
    if usable { CString::new(name).map_err(|_| bad()) } else { Err(bad()) }
}
