//! Making files: CREATE, TMPFILE, MKNOD, MKDIR, SYMLINK, LINK.
//!
//! The kernel makes a file as this process's own and with the parent's setgid rules applied; where the caller is
//! somebody else it is then given to them. In between, other requests may see it with root as owner, as nobody whom
//! its mode would not let in anyway. A file that cannot be given away is removed again.

use std::ffi::CStr;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use fuse_backend_rs::abi::fuse_abi::CreateIn;
use fuse_backend_rs::api::filesystem::{Context, Entry, OpenOptions};
use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags, Uid, makedev};
use rustix::io::Errno;
use rustix::path::DecInt;

use super::file::{open_options, usable_flags};
use crate::ShareTree;
use crate::descriptors::Held;
use crate::handles::Handle;
use crate::share::Share;
use crate::stat::{self, Stat};
use crate::tree::{NodeId, ROOT};

/// Where something new appears, and for whom.
struct Birthplace<'a> {
    share: Arc<Share>,
    parent: NodeId,
    directory: Held,
    name: &'a CStr,
    uid: Uid,
    gid: Gid,
}

/// Whom a new file goes to, as far as it is not theirs already.
#[derive(Clone, Copy)]
struct Owner {
    uid: Option<Uid>,
    gid: Option<Gid>,
}

impl ShareTree {
    fn birthplace<'a>(&self, ctx: &Context, parent: NodeId, name: &'a CStr) -> Result<Birthplace<'a>, Errno> {
        let (uid, gid) = (user(ctx.uid)?, group(ctx.gid)?);
        let (share, directory) = self.directory_to_change(parent, name)?;
        Ok(Birthplace { share, parent, directory, name, uid, gid })
    }

    pub(super) fn make_symlink(
        &self,
        ctx: &Context,
        target: &CStr,
        parent: NodeId,
        name: &CStr,
    ) -> Result<Entry, Errno> {
        let place = self.birthplace(ctx, parent, name)?;
        rustix::fs::symlinkat(target, &place.directory, name)?;
        self.enter_new(&place, 0)
    }

    pub(super) fn make_directory(
        &self,
        ctx: &Context,
        parent: NodeId,
        name: &CStr,
        mode: u32,
        umask: u32,
    ) -> Result<Entry, Errno> {
        let place = self.birthplace(ctx, parent, name)?;
        let mode = mode & !umask & 0o7777;
        rustix::fs::mkdirat(&place.directory, name, Mode::from_raw_mode(mode))?;
        self.enter_new(&place, mode)
    }

    /// Fifos, sockets, and device nodes where the kernel permits them (a whiteout, character device 0:0, always).
    pub(super) fn make_node(
        &self,
        ctx: &Context,
        parent: NodeId,
        name: &CStr,
        mode: u32,
        rdev: u32,
        umask: u32,
    ) -> Result<Entry, Errno> {
        let kind = match mode & libc::S_IFMT {
            // POSIX lets 0 stand for a regular file.
            0 => FileType::RegularFile,
            kind => FileType::from_raw_mode(kind),
        };
        let place = self.birthplace(ctx, parent, name)?;
        let mode = mode & !umask & 0o7777;
        rustix::fs::mknodat(&place.directory, name, kind, Mode::from_raw_mode(mode), device(rdev))?;
        self.enter_new(&place, mode)
    }

    pub(super) fn make_link(&self, node: NodeId, parent: NodeId, name: &CStr) -> Result<Entry, Errno> {
        if node == ROOT {
            return Err(Errno::PERM);
        }
        let (share, directory) = self.directory_to_change(parent, name)?;
        if self.share_of(node)?.id != share.id {
            return Err(Errno::XDEV);
        }
        let held = self.reach(&share, node)?;
        // By descriptor: AT_EMPTY_PATH wants a capability over the whole host, the way through /proc does not.
        let flags = AtFlags::SYMLINK_FOLLOW;
        rustix::fs::linkat(self.proc_fds()?, DecInt::from_fd(&held), &directory, name, flags)?;
        let found = stat::of_descriptor(&held)?;
        self.enter(&share, parent, name, &found)
    }

    pub(super) fn create_file(
        &self,
        ctx: &Context,
        parent: NodeId,
        name: &CStr,
        args: &CreateIn,
    ) -> Result<(Entry, u64, OpenOptions), Errno> {
        let place = self.birthplace(ctx, parent, name)?;
        self.handles.check_room()?;
        let mode = args.mode & !args.umask & 0o7777;
        // EXCL: what this opens is new and therefore a regular file. O_NOFOLLOW comes with it.
        let flags = usable_flags(args.flags) | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let made = self.shedding(|| rustix::fs::openat(&place.directory, name, flags, Mode::from_raw_mode(mode)));
        let file = match made {
            Ok(file) => file,
            Err(Errno::EXIST) if args.flags & libc::O_EXCL as u32 == 0 => return self.open_existing(&place, args),
            Err(errno) => return Err(errno),
        };
        let found = self.adopt_file(&place, &file, mode).inspect_err(|_| discard(&place, AtFlags::empty()))?;
        let entry = self.enter(&place.share, parent, name, &found)?;
        self.hand_out(&place.share, entry, file, args.flags)
    }

    /// O_TMPFILE: a file without a name, which is reached through its handle until LINK gives it one.
    pub(crate) fn create_nameless(
        &self,
        ctx: &Context,
        parent: NodeId,
        args: &CreateIn,
    ) -> Result<(Entry, u64, OpenOptions), Errno> {
        // It is made in the directory as such.
        let place = self.birthplace(ctx, parent, c"-")?;
        self.handles.check_room()?;
        let mode = args.mode & !args.umask & 0o7777;
        // With O_EXCL it can never be given a name.
        let kept = OFlags::from_bits_retain(args.flags) & OFlags::EXCL;
        let flags = usable_flags(args.flags) | kept | OFlags::TMPFILE | OFlags::CLOEXEC;
        let file = self.shedding(|| rustix::fs::openat(&place.directory, c".", flags, Mode::from_raw_mode(mode)))?;
        let found = self.adopt_file(&place, &file, mode)?;
        let entry = self.enter_nameless(&place.share, &found)?;
        self.hand_out(&place.share, entry, file, args.flags)
    }

    /// A file that was just made, with the handle by which it is open.
    fn hand_out(
        &self,
        share: &Arc<Share>,
        entry: Entry,
        file: OwnedFd,
        flags: u32,
    ) -> Result<(Entry, u64, OpenOptions), Errno> {
        // Without its handle the guest does not learn of the entry either.
        let number =
            self.keep_open(share, entry.inode, file, flags).inspect_err(|_| self.let_go(&[(entry.inode, 1)]))?;
        Ok((entry, number, open_options(share, true)))
    }

    /// CREATE found something under the name: the host made it, or another request just did.
    fn open_existing(&self, place: &Birthplace, args: &CreateIn) -> Result<(Entry, u64, OpenOptions), Errno> {
        let entry = self.find(place.parent, place.name)?;
        if entry.inode == 0 {
            return Err(Errno::NOENT);
        }
        match self.open_file(entry.inode, args.flags, args.fuse_flags) {
            Ok((number, options)) => {
                // The open may have truncated it.
                let attr = self.attributes(entry.inode, Some(number))?.0;
                Ok((Entry { attr, ..entry }, number, options))
            }
            Err(errno) => {
                self.let_go(&[(entry.inode, 1)]);
                Err(errno)
            }
        }
    }

    /// Gives an open file its handle.
    pub(super) fn keep_open(&self, share: &Arc<Share>, node: NodeId, file: OwnedFd, flags: u32) -> Result<u64, Errno> {
        let file = Arc::new(file);
        let writable = flags & libc::O_ACCMODE as u32 != libc::O_RDONLY as u32;
        let append = flags & libc::O_APPEND as u32 != 0;
        let number = self.handles.add(Handle::new(node, share, &file, writable, append))?;
        self.descriptors.opened(share, node, number, &file);
        Ok(number)
    }

    /// Gives what was made by name to the caller and records it.
    fn enter_new(&self, place: &Birthplace, mode: u32) -> Result<Entry, Errno> {
        let made = stat::of_name(&place.directory, place.name)?;
        let found = match owner_to_set(place, &made)? {
            None => made,
            Some(owner) => {
                let flags = if made.kind() == libc::S_IFDIR { AtFlags::REMOVEDIR } else { AtFlags::empty() };
                self.give_away(place, &made, mode, owner).inspect_err(|_| discard(place, flags))?
            }
        };
        self.enter(&place.share, place.parent, place.name, &found)
    }

    fn give_away(&self, place: &Birthplace, made: &Stat, mode: u32, owner: Owner) -> Result<Stat, Errno> {
        rustix::fs::chownat(&place.directory, place.name, owner.uid, owner.gid, AtFlags::SYMLINK_NOFOLLOW)?;
        if made.kind() != libc::S_IFDIR && made.kind() != libc::S_IFLNK && mode & 0o6000 != 0 {
            let (held, _) = self.step(&place.directory, place.name)?;
            self.set_mode(&held, made.permissions())?;
        }
        stat::of_name(&place.directory, place.name)
    }

    fn adopt_file(&self, place: &Birthplace, file: &OwnedFd, mode: u32) -> Result<Stat, Errno> {
        let made = stat::of_descriptor(file)?;
        let Some(owner) = owner_to_set(place, &made)? else { return Ok(made) };
        rustix::fs::fchown(file, owner.uid, owner.gid)?;
        // chown takes setuid and setgid away, also from root.
        if mode & 0o6000 != 0 {
            rustix::fs::fchmod(file, Mode::from_raw_mode(made.permissions()))?;
        }
        stat::of_descriptor(file)
    }
}

/// Whom a new file must be given to, if it is not the caller's as it is. A group that came from the parent's setgid
/// bit stays; only where the groups differ is that bit looked at.
fn owner_to_set(place: &Birthplace, made: &Stat) -> Result<Option<Owner>, Errno> {
    let uid = (made.uid() != place.uid.as_raw()).then_some(place.uid);
    let mut gid = None;
    if made.gid() != place.gid.as_raw() && stat::of_descriptor(&place.directory)?.permissions() & libc::S_ISGID == 0 {
        gid = Some(place.gid);
    }
    Ok((uid.is_some() || gid.is_some()).then_some(Owner { uid, gid }))
}

/// Removes what was just made and could not be given away.
fn discard(place: &Birthplace, flags: AtFlags) {
    let _ = rustix::fs::unlinkat(&place.directory, place.name, flags);
}

/// A user as a guest names it. The highest number means "nobody in particular" to the kernel and is EINVAL.
pub(super) fn user(raw: u32) -> Result<Uid, Errno> {
    if raw == u32::MAX { Err(Errno::INVAL) } else { Ok(Uid::from_raw(raw)) }
}

/// A group as a guest names it, see [`user`].
pub(super) fn group(raw: u32) -> Result<Gid, Errno> {
    if raw == u32::MAX { Err(Errno::INVAL) } else { Ok(Gid::from_raw(raw)) }
}

/// FUSE carries device numbers in the kernel's 32-bit encoding.
fn device(rdev: u32) -> rustix::fs::Dev {
    let major = (rdev & 0x000f_ff00) >> 8;
    let minor = (rdev & 0xff) | ((rdev >> 12) & 0x000f_ff00);
    makedev(major, minor)
}
