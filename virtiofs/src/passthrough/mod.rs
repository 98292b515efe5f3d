//! FUSE requests, one method each: what the protocol says, handed to the rooms that do it.
//!
//! Room by room: `entry` finds files, `inode` reads and sets attributes, `create` makes files, `names` removes
//! and renames them, `file` reads and writes, `dir` lists, `xattr` is what it says, `root` is the directory
//! of shares. Inside, errors are the kernel's numbers ([`rustix::io::Errno`]); they become `io::Error` here.
//!
//! Two requests are answered ENOSYS on purpose, after which a guest's kernel never sends them again:
//! * FLUSH, sent at every close. Pages were written back before it, there are no locks to drop, and the host's own
//!   close comes with RELEASE. It would be a round trip for nothing.
//! * ACCESS. Guests mount with `default_permissions`: their kernel checks modes itself, and knows the caller's groups,
//!   which a request does not carry.

mod create;
mod dir;
mod entry;
mod file;
mod inode;
mod names;
mod root;
mod xattr;

use std::ffi::CStr;
use std::io;
use std::time::Duration;

use fuse_backend_rs::abi::fuse_abi::{CreateIn, stat64, statvfs64};
use fuse_backend_rs::api::filesystem::{
    Context, DirEntry, Entry, FileSystem, FsOptions, GetxattrReply, ListxattrReply, OpenOptions, SetattrValid,
    ZeroCopyReader, ZeroCopyWriter,
};
use rustix::io::Errno;

use crate::ShareTree;

/// What a guest's kernel is asked for, if it offers it.
///
/// * Large requests: ASYNC_READ, BIG_WRITES, MAX_PAGES (1 MiB at a time), ASYNC_DIO.
/// * Fewer requests: PARALLEL_DIROPS, READDIRPLUS when the guest finds that it pays, ATOMIC_O_TRUNC (one request for
///   open and truncate), CACHE_SYMLINKS (an inode's target never changes).
/// * AUTO_INVAL_DATA: pages are dropped when size or modification time change under the guest.
/// * DONT_MASK: the guest's umask comes with the request instead of being applied to the mode beforehand.
/// * HANDLE_KILLPRIV_V2: setuid and setgid bits fall at a write here. Otherwise a guest's kernel would ask for
///   `security.capability` before every single write; so it asks once for each file.
///
/// Not asked for: WRITEBACK_CACHE, POSIX_ACL, locks (see the crate's documentation), EXPLICIT_INVAL_DATA (nothing
/// could ever tell the guest to drop a page).
fn wanted() -> FsOptions {
    FsOptions::ASYNC_READ
        | FsOptions::ASYNC_DIO
        | FsOptions::BIG_WRITES
        | FsOptions::MAX_PAGES
        | FsOptions::PARALLEL_DIROPS
        | FsOptions::DO_READDIRPLUS
        | FsOptions::READDIRPLUS_AUTO
        | FsOptions::ATOMIC_O_TRUNC
        | FsOptions::CACHE_SYMLINKS
        | FsOptions::AUTO_INVAL_DATA
        | FsOptions::DONT_MASK
        | FsOptions::HANDLE_KILLPRIV_V2
}

impl FileSystem for ShareTree {
    type Inode = u64;
    type Handle = u64;

    fn init(&self, capable: FsOptions) -> io::Result<FsOptions> {
        // A second INIT is a guest that started over; what the first one held is nobody's now.
        self.reset();
        self.check_process();
        Ok(wanted() & capable)
    }

    fn destroy(&self) {
        self.reset();
    }

    fn lookup(&self, _: &Context, parent: u64, name: &CStr) -> io::Result<Entry> {
        Ok(self.find(parent, name)?)
    }

    fn forget(&self, _: &Context, inode: u64, count: u64) {
        self.let_go(&[(inode, count)]);
    }

    fn batch_forget(&self, _: &Context, requests: Vec<(u64, u64)>) {
        self.let_go(&requests);
    }

    fn getattr(&self, _: &Context, inode: u64, handle: Option<u64>) -> io::Result<(stat64, Duration)> {
        Ok(self.attributes(inode, handle)?)
    }

    fn setattr(
        &self,
        _: &Context,
        inode: u64,
        attr: stat64,
        handle: Option<u64>,
        valid: SetattrValid,
    ) -> io::Result<(stat64, Duration)> {
        Ok(self.set_attributes(inode, &attr, handle, valid)?)
    }

    fn readlink(&self, _: &Context, inode: u64) -> io::Result<Vec<u8>> {
        Ok(self.link_target(inode)?)
    }

    fn statfs(&self, _: &Context, inode: u64) -> io::Result<statvfs64> {
        self.sizes(inode)
    }

    fn symlink(&self, ctx: &Context, linkname: &CStr, parent: u64, name: &CStr) -> io::Result<Entry> {
        Ok(self.make_symlink(ctx, linkname, parent, name)?)
    }

    fn mknod(&self, ctx: &Context, parent: u64, name: &CStr, mode: u32, rdev: u32, umask: u32) -> io::Result<Entry> {
        Ok(self.make_node(ctx, parent, name, mode, rdev, umask)?)
    }

    fn mkdir(&self, ctx: &Context, parent: u64, name: &CStr, mode: u32, umask: u32) -> io::Result<Entry> {
        Ok(self.make_directory(ctx, parent, name, mode, umask)?)
    }

    fn link(&self, _: &Context, inode: u64, newparent: u64, newname: &CStr) -> io::Result<Entry> {
        Ok(self.make_link(inode, newparent, newname)?)
    }

    fn create(
        &self,
        ctx: &Context,
        parent: u64,
        name: &CStr,
        args: CreateIn,
    ) -> io::Result<(Entry, Option<u64>, OpenOptions, Option<u32>)> {
        let (entry, handle, options) = self.create_file(ctx, parent, name, &args)?;
        Ok((entry, Some(handle), options, None))
    }

    fn unlink(&self, _: &Context, parent: u64, name: &CStr) -> io::Result<()> {
        Ok(self.remove(parent, name, names::Removed::File)?)
    }

    fn rmdir(&self, _: &Context, parent: u64, name: &CStr) -> io::Result<()> {
        Ok(self.remove(parent, name, names::Removed::Directory)?)
    }

    fn rename(
        &self,
        _: &Context,
        olddir: u64,
        oldname: &CStr,
        newdir: u64,
        newname: &CStr,
        flags: u32,
    ) -> io::Result<()> {
        Ok(self.move_name((olddir, oldname), (newdir, newname), flags)?)
    }

    fn open(
        &self,
        _: &Context,
        inode: u64,
        flags: u32,
        fuse_flags: u32,
    ) -> io::Result<(Option<u64>, OpenOptions, Option<u32>)> {
        let (handle, options) = self.open_file(inode, flags, fuse_flags)?;
        Ok((Some(handle), options, None))
    }

    fn read(
        &self,
        _: &Context,
        inode: u64,
        handle: u64,
        w: &mut dyn ZeroCopyWriter,
        size: u32,
        offset: u64,
        _lock_owner: Option<u64>,
        _flags: u32,
    ) -> io::Result<usize> {
        self.read_file(inode, handle, w, size, offset)
    }

    fn write(
        &self,
        _: &Context,
        inode: u64,
        handle: u64,
        r: &mut dyn ZeroCopyReader,
        size: u32,
        offset: u64,
        _lock_owner: Option<u64>,
        delayed_write: bool,
        _flags: u32,
        fuse_flags: u32,
    ) -> io::Result<usize> {
        let from = if delayed_write { file::WrittenBy::PageCache } else { file::WrittenBy::Caller };
        self.write_file(inode, handle, r, file::Write { size, offset, from, fuse_flags })
    }

    fn fsync(&self, _: &Context, inode: u64, datasync: bool, handle: u64) -> io::Result<()> {
        Ok(self.sync(inode, handle, datasync)?)
    }

    fn fallocate(&self, _: &Context, inode: u64, handle: u64, mode: u32, offset: u64, length: u64) -> io::Result<()> {
        Ok(self.allocate(inode, handle, mode, offset, length)?)
    }

    fn lseek(&self, _: &Context, inode: u64, handle: u64, offset: u64, whence: u32) -> io::Result<u64> {
        Ok(self.seek(inode, handle, offset, whence)?)
    }

    fn release(
        &self,
        _: &Context,
        inode: u64,
        _flags: u32,
        handle: u64,
        _flush: bool,
        _flock_release: bool,
        _lock_owner: Option<u64>,
    ) -> io::Result<()> {
        Ok(self.close(inode, handle)?)
    }

    fn opendir(&self, _: &Context, inode: u64, _flags: u32) -> io::Result<(Option<u64>, OpenOptions)> {
        Ok(self.open_directory(inode)?)
    }

    fn readdir(
        &self,
        _: &Context,
        inode: u64,
        handle: u64,
        size: u32,
        offset: u64,
        add_entry: &mut dyn FnMut(DirEntry) -> io::Result<usize>,
    ) -> io::Result<()> {
        self.list(inode, handle, size, offset, &mut dir::Listing::Names(add_entry))
    }

    fn readdirplus(
        &self,
        _: &Context,
        inode: u64,
        handle: u64,
        size: u32,
        offset: u64,
        add_entry: &mut dyn FnMut(DirEntry, Entry) -> io::Result<usize>,
    ) -> io::Result<()> {
        self.list(inode, handle, size, offset, &mut dir::Listing::Entries(add_entry))
    }

    fn fsyncdir(&self, _: &Context, inode: u64, datasync: bool, handle: u64) -> io::Result<()> {
        Ok(self.sync(inode, handle, datasync)?)
    }

    fn releasedir(&self, _: &Context, inode: u64, _flags: u32, handle: u64) -> io::Result<()> {
        Ok(self.close(inode, handle)?)
    }

    fn setxattr(&self, _: &Context, inode: u64, name: &CStr, value: &[u8], flags: u32) -> io::Result<()> {
        Ok(self.set_xattr(inode, name, value, flags)?)
    }

    fn getxattr(&self, _: &Context, inode: u64, name: &CStr, size: u32) -> io::Result<GetxattrReply> {
        Ok(self.get_xattr(inode, name, size)?)
    }

    fn listxattr(&self, _: &Context, inode: u64, size: u32) -> io::Result<ListxattrReply> {
        Ok(self.list_xattrs(inode, size)?)
    }

    fn removexattr(&self, _: &Context, inode: u64, name: &CStr) -> io::Result<()> {
        Ok(self.remove_xattr(inode, name)?)
    }
}

impl ShareTree {
    /// Says what will go wrong if the process lacks what serving files needs: better once, here, than as wrong modes
    /// or failing opens that nobody can explain.
    fn check_process(&self) {
        let _ = self.proc_fds();
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        let umask = status.lines().find_map(|line| line.strip_prefix("Umask:")).map(str::trim);
        if umask.is_some_and(|mask| u32::from_str_radix(mask, 8) != Ok(0)) {
            log::error!("virtiofs: the umask is {umask:?} and not 0; modes of files that guests create will be wrong");
        }
    }
}

/// EINVAL unless this is one name: not empty, not `.` or `..`, without a slash. (A `CStr` has no NUL inside.)
fn check_name(name: &CStr) -> Result<(), Errno> {
    let bytes = name.to_bytes();
    let is_one_name = !bytes.is_empty() && bytes != b"." && bytes != b".." && !bytes.contains(&b'/');
    if is_one_name { Ok(()) } else { Err(Errno::INVAL) }
}
