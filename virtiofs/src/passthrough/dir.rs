//! Listings: OPENDIR, READDIR, READDIRPLUS.
//!
//! Positions are the host file system's own (`d_off`), so a listing can be continued or rewound at any entry, also
//! after others were removed. Each request seeks, reads entries, and tells as many as the guest has room for; what is
//! left over is read again by the next request.
//!
//! No entry is ever dropped. An entry whose attributes cannot be had (it just vanished, or the tree is full) is told
//! without them, which the protocol allows (node 0), and the guest's kernel looks it up when somebody asks. Nothing
//! is opened for an entry, so that listing works when there is not a single descriptor left.

use std::cell::Cell;
use std::ffi::CStr;
use std::io;
use std::mem::MaybeUninit;
use std::sync::{Arc, PoisonError};

use fuse_backend_rs::api::filesystem::{DirEntry, Entry, OpenOptions};
use rustix::fs::{Mode, OFlags, RawDir, RawDirEntry, SeekFrom, openat};
use rustix::io::Errno;

use crate::ShareTree;
use crate::handles::Handle;
use crate::stat;
use crate::tree::{NodeId, ROOT};

/// The most that is read from the host for one request, however much room the guest offers: it is on the stack.
const BUFFER: usize = 16 << 10;

/// Room for at least one entry with the longest name.
const SMALLEST_BUFFER: usize = 512;

/// What each entry of READDIRPLUS carries in front of what READDIR tells: `struct fuse_entry_out`.
const ENTRY_SIZE: usize = 128;

/// The two kinds of listing.
pub(super) enum Listing<'a> {
    Names(&'a mut dyn FnMut(DirEntry) -> io::Result<usize>),
    Entries(&'a mut dyn FnMut(DirEntry, Entry) -> io::Result<usize>),
}

impl Listing<'_> {
    /// Tells one entry; false if the guest's buffer is full. Attributes are only asked for if they are told.
    pub fn add(&mut self, dirent: DirEntry, entry: impl FnOnce() -> Result<Entry, Errno>) -> io::Result<bool> {
        let written = match self {
            Listing::Names(add) => add(dirent)?,
            Listing::Entries(add) => add(dirent, entry().unwrap_or_default())?,
        };
        Ok(written > 0)
    }

    /// How much to read so that little is read in vain: the host's entries are about as large as FUSE's.
    fn buffer_size(&self, room: u32) -> usize {
        let room = room as usize;
        let useful = match self {
            Listing::Names(_) => room,
            // With a name of typical length an entry is five times as large as the host's.
            Listing::Entries(_) => room / ((ENTRY_SIZE + 40) / 40) + SMALLEST_BUFFER,
        };
        useful.clamp(SMALLEST_BUFFER, BUFFER)
    }
}

impl ShareTree {
    pub(super) fn open_directory(&self, node: NodeId) -> Result<(Option<u64>, OpenOptions), Errno> {
        if node == ROOT {
            return Ok((None, OpenOptions::empty()));
        }
        let share = self.share_of(node)?;
        self.handles.check_room()?;
        let held = self.reach(&share, node)?;
        // "." of a descriptor is that directory, or ENOTDIR: no way through /proc is needed.
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let file = Arc::new(self.shedding(|| openat(&held, c".", flags, Mode::empty()))?);
        let number = self.handles.add(Handle::new(node, &share, &file, false, false))?;
        self.descriptors.opened(&share, node, number, &file);
        let cached = OpenOptions::CACHE_DIR | OpenOptions::KEEP_CACHE;
        let options = if share.options.cache.exclusive { cached } else { OpenOptions::empty() };
        Ok((Some(number), options))
    }

    pub(super) fn list(
        &self,
        node: NodeId,
        number: u64,
        room: u32,
        offset: u64,
        listing: &mut Listing,
    ) -> io::Result<()> {
        if node == ROOT {
            return self.list_root(offset, listing);
        }
        let handle = self.handle(node, number)?;
        let _position = handle.position.lock().unwrap_or_else(PoisonError::into_inner);
        // A negative position must not reach the kernel as a valid one.
        let offset = i64::try_from(offset).map_err(|_| Errno::INVAL)?.unsigned_abs();
        rustix::fs::seek(&handle.file, SeekFrom::Start(offset))?;
        let mut buffer = [MaybeUninit::uninit(); BUFFER];
        let mut entries = RawDir::new(&handle.file, &mut buffer[..listing.buffer_size(room)]);
        while let Some(next) = entries.next() {
            if !self.list_one(&handle, &next?, listing)? {
                break;
            }
        }
        Ok(())
    }

    fn list_one(&self, handle: &Handle, next: &RawDirEntry, listing: &mut Listing) -> io::Result<bool> {
        let name = next.file_name();
        let dirent = DirEntry {
            ino: self.guest_ino(handle.share.key.dev, next.ino()),
            offset: next.next_entry_cookie(),
            type_: next.file_type().as_raw_mode() >> 12,
            name: name.to_bytes(),
        };
        let made = Cell::new(None);
        let added = listing.add(dirent, || {
            let entry = self.listed(handle, name)?;
            made.set(Some(entry.inode));
            Ok(entry)
        })?;
        if !added {
            self.take_back(made.get());
        }
        Ok(added)
    }

    /// The attributes of one entry. `.` and `..` are told without: the guest has those.
    fn listed(&self, handle: &Handle, name: &CStr) -> Result<Entry, Errno> {
        if name == c"." || name == c".." {
            return Ok(Entry::default());
        }
        let found = stat::of_name(&handle.file, name)?;
        self.enter(&handle.share, handle.node, name, &found)
    }

    /// Forgets an entry that the guest's buffer had no room for.
    pub(super) fn take_back(&self, entered: Option<NodeId>) {
        if let Some(node) = entered.filter(|node| *node != 0) {
            self.let_go(&[(node, 1)]);
        }
    }
}
