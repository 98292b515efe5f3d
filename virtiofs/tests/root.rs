//! The directory of shares, and what can be attached to it.

mod guest;

use std::fs;

use fuse_backend_rs::api::filesystem::{FileSystem, FsOptions, OpenOptions, SetattrValid};
use guest::{Guest, ROOT, a_descriptor_of, errno};
use tempfile::tempdir;
use virtiofs::{CachePolicy, Limits, ShareError, ShareOptions};

#[test]
fn shares_appear_under_their_names_in_the_order_of_attachment() {
    let dir = tempdir().expect("tempdir");
    let (guest, _) = Guest::writable(dir.path());
    for name in ["zeta", "alpha"] {
        guest.fs.attach(name, a_descriptor_of(dir.path()), true).expect("attach");
    }
    for plus in [false, true] {
        let listed = guest.list(ROOT, 4096, plus).expect("list");
        let names: Vec<&str> = listed.iter().map(|one| one.name.as_str()).collect();
        assert_eq!(names, [".", "..", "share", "zeta", "alpha"]);
        assert!(listed.iter().all(|one| one.kind == u32::from(libc::DT_DIR)));
        assert!(!plus || listed[2..].iter().all(|one| one.node != 0));
    }
    assert_eq!(guest.list(ROOT, 160, true).expect("one entry at a time").len(), 5);
}

#[test]
fn a_listing_goes_on_although_shares_come_and_go() {
    let dir = tempdir().expect("tempdir");
    let (guest, _) = Guest::writable(dir.path());
    for name in ["b", "c", "d"] {
        guest.fs.attach(name, a_descriptor_of(dir.path()), true).expect("attach");
    }
    let first = guest.list_some(ROOT, 0, 32 * 4, 0, false).expect("list");
    assert_eq!(first.last().map(|one| one.name.as_str()), Some("b"));
    guest.fs.detach("b").expect("detach");
    guest.fs.detach("c").expect("detach");
    guest.fs.attach("e", a_descriptor_of(dir.path()), true).expect("attach");
    let rest = guest.list_some(ROOT, 0, 4096, first[3].offset, false).expect("list");
    let names: Vec<&str> = rest.iter().map(|one| one.name.as_str()).collect();
    assert_eq!(names, ["d", "e"]);
}

#[test]
fn the_root_cannot_be_changed() {
    let dir = tempdir().expect("tempdir");
    let (guest, top) = Guest::writable(dir.path());
    let (file, _) = guest.create(top, "a", 0o644).expect("create");
    assert_eq!(guest.create(ROOT, "x", 0o644), Err(libc::EROFS));
    assert_eq!(guest.mkdir(ROOT, "x", 0o755), Err(libc::EROFS));
    assert_eq!(guest.symlink("y", ROOT, "x"), Err(libc::EROFS));
    assert_eq!(guest.link(file, ROOT, "x"), Err(libc::EROFS));
    assert_eq!(guest.rmdir(ROOT, "share"), Err(libc::EROFS));
    assert_eq!(guest.rename((ROOT, "share"), (ROOT, "x"), 0), Err(libc::EROFS));
    assert_eq!(guest.rename((top, "a"), (ROOT, "x"), 0), Err(libc::EROFS));
    assert_eq!(guest.setattr(ROOT, SetattrValid::MODE, |_| ()).err(), Some(libc::EROFS));
    assert_eq!(guest.open(ROOT, libc::O_RDONLY), Err(libc::EISDIR));
    let attr = guest.getattr(ROOT).expect("getattr");
    assert_eq!((attr.st_mode, attr.st_nlink), (libc::S_IFDIR | 0o555, 3));
    assert!(errno(guest.fs.statfs(&guest.ctx, ROOT)).expect("statfs").f_blocks > 0);
}

#[test]
fn a_single_file_can_be_attached_and_written() {
    let dir = tempdir().expect("tempdir");
    let path = dir.path().join("hosts");
    fs::write(&path, "127.0.0.1").expect("write");
    let (guest, node) = Guest::writable(&path);
    let handle = guest.open(node, libc::O_RDWR).expect("open");
    assert_eq!(guest.read(node, handle, 100, 0).expect("read"), b"127.0.0.1");
    guest.write(node, handle, b"::1      ", 0).expect("write");
    assert_eq!(fs::read(&path).expect("read"), b"::1      ");
    assert_eq!(guest.lookup(node, "x").err(), Some(libc::ENOTDIR));
    let listed = guest.list(ROOT, 4096, true).expect("list");
    assert_eq!(listed[2].kind, u32::from(libc::DT_REG));
}

#[test]
fn names_that_cannot_be_attached_are_refused_with_a_reason() {
    let dir = tempdir().expect("tempdir");
    let (guest, _) = Guest::writable(dir.path());
    let attach = |name: &str| guest.fs.attach(name, a_descriptor_of(dir.path()), false);
    for bad in ["", ".", "..", "a/b", "/", "nul\0inside", &"x".repeat(256)] {
        assert!(matches!(attach(bad), Err(ShareError::BadName(_))), "{bad:?}");
    }
    assert!(matches!(attach("share"), Err(ShareError::NameTaken(_))));
    assert!(matches!(guest.fs.detach("none"), Err(ShareError::NotAttached(_))));
    assert!(attach(&"x".repeat(255)).is_ok());
}

#[test]
fn a_symbolic_link_cannot_be_attached() {
    use rustix::fs::{Mode, OFlags, open};
    let dir = tempdir().expect("tempdir");
    std::os::unix::fs::symlink("/etc", dir.path().join("link")).expect("symlink");
    let (guest, _) = Guest::writable(dir.path());
    let link = open(dir.path().join("link"), OFlags::PATH | OFlags::NOFOLLOW, Mode::empty()).expect("open");
    let refused = guest.fs.attach("link", link, false);
    assert!(matches!(refused, Err(ShareError::SymbolicLink(_))), "{refused:?}");
}

#[test]
fn what_the_guest_may_remember_is_the_shares_policy() {
    let dir = tempdir().expect("tempdir");
    fs::write(dir.path().join("a"), "1").expect("write");
    let policy = CachePolicy::private();
    let options = ShareOptions { read_only: false, cache: policy };
    let (guest, top) = Guest::with_share(dir.path(), Limits::default(), options);
    let entry = guest.lookup(top, "a").expect("lookup");
    assert_eq!((entry.entry_timeout, entry.attr_timeout), (policy.entry, policy.attributes));
    let missing = errno(guest.fs.lookup(&guest.ctx, top, c"none")).expect("a negative entry");
    assert_eq!((missing.inode, missing.entry_timeout), (0, policy.negative));
    assert!(guest.lookup(ROOT, "share").expect("lookup").entry_timeout.as_secs() <= 1);
    let (_, options, _) = errno(guest.fs.open(&guest.ctx, entry.inode, 0, 0)).expect("open");
    assert!(options.contains(OpenOptions::KEEP_CACHE));
    let (_, options) = errno(guest.fs.opendir(&guest.ctx, top, 0)).expect("opendir");
    assert!(options.contains(OpenOptions::CACHE_DIR));
}

#[test]
fn in_a_shared_volume_pages_survive_an_open_only_if_the_file_did_not_change() {
    let dir = tempdir().expect("tempdir");
    let path = dir.path().join("a");
    fs::write(&path, "1").expect("write");
    let (guest, top) = Guest::writable(dir.path());
    let node = guest.walk(top, "a").expect("lookup");
    let keeps = || {
        let (handle, options, _) = errno(guest.fs.open(&guest.ctx, node, 0, 0)).expect("open");
        guest.release(node, handle.expect("a handle")).expect("release");
        options.contains(OpenOptions::KEEP_CACHE)
    };
    assert!(!keeps(), "nothing is known of pages from before");
    assert!(keeps());
    fs::write(&path, "22").expect("the host writes");
    assert!(!keeps());
    assert!(keeps());
    assert!(errno(guest.fs.lookup(&guest.ctx, top, c"none")).is_err(), "missing names are asked for each time");
}

#[test]
fn only_what_is_handled_and_offered_is_asked_of_the_guests_kernel() {
    let dir = tempdir().expect("tempdir");
    let (guest, _) = Guest::writable(dir.path());
    let all = guest.fs.init(FsOptions::all()).expect("init");
    for wanted in [FsOptions::MAX_PAGES, FsOptions::HANDLE_KILLPRIV_V2, FsOptions::DO_READDIRPLUS, FsOptions::DONT_MASK]
    {
        assert!(all.contains(wanted));
    }
    for unwanted in [
        FsOptions::WRITEBACK_CACHE,
        FsOptions::POSIX_LOCKS,
        FsOptions::FLOCK_LOCKS,
        FsOptions::POSIX_ACL,
        FsOptions::EXPLICIT_INVAL_DATA,
        FsOptions::EXPORT_SUPPORT,
    ] {
        assert!(!all.intersects(unwanted), "{unwanted:?}");
    }
    assert_eq!(guest.fs.init(FsOptions::ASYNC_READ).expect("init"), FsOptions::ASYNC_READ);
}
