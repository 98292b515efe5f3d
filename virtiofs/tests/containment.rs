//! What a hostile guest, or a host that moves things about, cannot make the server do.

mod guest;

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use fuse_backend_rs::api::filesystem::{FileSystem, SetattrValid};
use guest::{Guest, ROOT, a_descriptor_of, c, errno, open_below, we_are_root};
use tempfile::{TempDir, tempdir};
use virtiofs::{Limits, ShareOptions};

/// A share that remembers next to nothing, so that everything is reached by place.
fn forgetful(dir: &Path) -> (Guest, u64) {
    Guest::with_share(dir, Limits { cached_fds: 1, ..Limits::default() }, ShareOptions::default())
}

/// A share `shared` next to a secret that is none of the guest's business.
fn a_share_beside_a_secret() -> TempDir {
    let dir = tempdir().expect("tempdir");
    fs::create_dir_all(dir.path().join("shared/dir")).expect("mkdir");
    fs::create_dir(dir.path().join("outside")).expect("mkdir");
    fs::write(dir.path().join("shared/dir/file"), "inside").expect("write");
    fs::write(dir.path().join("shared/other"), "other").expect("write");
    fs::write(dir.path().join("outside/file"), "secret").expect("write");
    dir
}

/// Makes the one cached descriptor another one.
fn evict(guest: &Guest, top: u64) {
    let other = guest.walk(top, "other").expect("lookup");
    for _ in 0..2 {
        let handle = guest.open(other, libc::O_RDONLY).expect("open");
        guest.release(other, handle).expect("release");
    }
}

#[test]
fn names_that_are_not_one_component_are_refused_by_every_request() {
    let dir = a_share_beside_a_secret();
    let (guest, top) = Guest::writable(&dir.path().join("shared"));
    let (file, _) = guest.create(top, "mine", 0o644).expect("create");
    for bad in ["..", ".", "", "../outside", "dir/file", "/etc/passwd", "/"] {
        assert_eq!(guest.lookup(top, bad).err(), Some(libc::EINVAL), "lookup {bad:?}");
        assert_eq!(guest.lookup(ROOT, bad).err(), Some(libc::EINVAL), "lookup {bad:?} in the root");
        assert_eq!(guest.create(top, bad, 0o644), Err(libc::EINVAL), "create {bad:?}");
        assert_eq!(guest.mkdir(top, bad, 0o755), Err(libc::EINVAL), "mkdir {bad:?}");
        assert_eq!(guest.mknod(top, bad, libc::S_IFIFO, 0), Err(libc::EINVAL), "mknod {bad:?}");
        assert_eq!(guest.symlink("x", top, bad), Err(libc::EINVAL), "symlink {bad:?}");
        assert_eq!(guest.link(file, top, bad), Err(libc::EINVAL), "link {bad:?}");
        assert_eq!(guest.unlink(top, bad), Err(libc::EINVAL), "unlink {bad:?}");
        assert_eq!(guest.rmdir(top, bad), Err(libc::EINVAL), "rmdir {bad:?}");
        assert_eq!(guest.rename((top, bad), (top, "x"), 0), Err(libc::EINVAL), "rename from {bad:?}");
        assert_eq!(guest.rename((top, "mine"), (top, bad), 0), Err(libc::EINVAL), "rename to {bad:?}");
    }
}

#[test]
fn a_symbolic_link_is_never_followed() {
    let dir = a_share_beside_a_secret();
    symlink("../outside", dir.path().join("shared/out")).expect("symlink");
    symlink("../outside/file", dir.path().join("shared/secret")).expect("symlink");
    let (guest, top) = forgetful(&dir.path().join("shared"));
    let out = guest.walk(top, "out").expect("the link itself is found");
    assert_eq!(guest.lookup(out, "file").err(), Some(libc::ENOTDIR));
    assert_eq!(guest.create(out, "new", 0o644), Err(libc::ENOTDIR));
    let secret = guest.walk(top, "secret").expect("the link itself is found");
    assert_eq!(guest.open(secret, libc::O_RDONLY), Err(libc::ELOOP));
    assert_eq!(guest.create(top, "secret", 0o644), Err(libc::ELOOP), "CREATE over a link does not open its target");
    let valid = SetattrValid::SIZE;
    assert_eq!(guest.setattr(secret, valid, |attr| attr.st_size = 0).err(), Some(libc::ELOOP));
    assert_eq!(fs::read(dir.path().join("outside/file")).expect("read"), b"secret");
}

#[test]
fn a_directory_that_the_host_replaced_by_a_link_is_stale() {
    let dir = a_share_beside_a_secret();
    let shared = dir.path().join("shared");
    let (guest, top) = forgetful(&shared);
    let node = guest.walk(top, "dir").expect("lookup");
    let file = guest.walk(node, "file").expect("lookup");
    fs::rename(shared.join("dir"), shared.join("moved")).expect("rename");
    symlink("../outside", shared.join("dir")).expect("symlink");
    evict(&guest, top);
    assert_eq!(guest.lookup(node, "file").err(), Some(libc::ESTALE));
    assert_eq!(guest.open(file, libc::O_RDONLY), Err(libc::ESTALE));
    assert_eq!(guest.getattr(file).err(), Some(libc::ESTALE));
    assert_eq!(guest.unlink(node, "file"), Err(libc::ESTALE));
    assert_eq!(guest.list(node, 4096, true).err(), Some(libc::ESTALE));
    assert!(dir.path().join("outside/file").exists());
}

#[test]
fn a_file_that_was_replaced_on_the_host_is_stale_until_it_is_looked_up_again() {
    let dir = a_share_beside_a_secret();
    let shared = dir.path().join("shared");
    let (guest, top) = forgetful(&shared);
    let old = guest.walk(top, "dir/file").expect("lookup");
    fs::write(shared.join("new"), "replaced").expect("write");
    fs::rename(shared.join("new"), shared.join("dir/file")).expect("rename");
    evict(&guest, top);
    assert_eq!(guest.open(old, libc::O_RDONLY), Err(libc::ESTALE));
    let new = guest.walk(top, "dir/file").expect("lookup");
    assert_ne!(old, new);
    let handle = guest.open(new, libc::O_RDONLY).expect("open");
    assert_eq!(guest.read(new, handle, 100, 0).expect("read"), b"replaced");
}

#[test]
fn a_file_that_the_host_removed_stays_with_whoever_has_it_open() {
    let dir = a_share_beside_a_secret();
    let shared = dir.path().join("shared");
    let (guest, top) = forgetful(&shared);
    let node = guest.walk(top, "dir/file").expect("lookup");
    let handle = guest.open(node, libc::O_RDONLY).expect("open");
    fs::remove_file(shared.join("dir/file")).expect("remove");
    evict(&guest, top);
    assert_eq!(guest.read(node, handle, 100, 0).expect("read"), b"inside");
    assert_eq!(guest.getattr(node).expect("fstat comes without a handle").st_nlink, 0);
    guest.release(node, handle).expect("release");
    assert_eq!(guest.getattr(node).err(), Some(libc::ESTALE));
}

#[test]
fn swapping_a_directory_for_a_link_at_any_moment_never_shows_what_is_outside() {
    let dir = a_share_beside_a_secret();
    let shared = dir.path().join("shared");
    symlink("../outside", shared.join("trap")).expect("symlink");
    let (guest, top) = forgetful(&shared);
    let stop = Arc::new(AtomicBool::new(false));
    let swapper = {
        let (stop, shared) = (Arc::clone(&stop), a_descriptor_of(&shared));
        std::thread::spawn(move || {
            while !stop.load(Ordering::Relaxed) {
                let flags = rustix::fs::RenameFlags::EXCHANGE;
                rustix::fs::renameat_with(&shared, c"dir", &shared, c"trap", flags).expect("exchange");
            }
        })
    };
    let until = Instant::now() + Duration::from_millis(500);
    let mut seen = 0;
    while Instant::now() < until {
        evict(&guest, top);
        let read = guest.walk(top, "dir/file").and_then(|node| {
            let handle = guest.open(node, libc::O_RDONLY)?;
            let content = guest.read(node, handle, 100, 0);
            guest.release(node, handle)?;
            content
        });
        if let Ok(content) = read {
            assert_eq!(content, b"inside");
            seen += 1;
        }
    }
    stop.store(true, Ordering::Relaxed);
    swapper.join().expect("the swapper ends");
    assert!(seen > 0, "the test saw the file at least once");
}

#[test]
fn devices_fifos_and_sockets_are_never_opened() {
    let dir = a_share_beside_a_secret();
    let (guest, top) = Guest::writable(&dir.path().join("shared"));
    let fifo = guest.mknod(top, "fifo", libc::S_IFIFO | 0o666, 0).expect("mknod");
    let socket = guest.mknod(top, "socket", libc::S_IFSOCK | 0o666, 0).expect("mknod");
    let mut nodes = vec![fifo, socket];
    if we_are_root() {
        // /dev/zero, which would gladly be read.
        nodes.extend(guest.mknod(top, "zero", libc::S_IFCHR | 0o666, (1 << 8) | 5));
    }
    for node in nodes {
        for flags in [libc::O_RDONLY, libc::O_RDWR, libc::O_WRONLY | libc::O_TRUNC] {
            assert_eq!(guest.open(node, flags), Err(libc::ENXIO));
        }
        assert_eq!(guest.setattr(node, SetattrValid::SIZE, |attr| attr.st_size = 0).err(), Some(libc::ENXIO));
        assert!(guest.getattr(node).is_ok());
    }
    assert_eq!(guest.create(top, "fifo", 0o644), Err(libc::ENXIO));
}

#[test]
fn numbers_that_were_never_given_out_are_errors() {
    let dir = a_share_beside_a_secret();
    let (guest, top) = Guest::writable(&dir.path().join("shared"));
    let (file, handle) = guest.create(top, "mine", 0o644).expect("create");
    for node in [0, 2 + 4711, u64::MAX] {
        assert_eq!(guest.getattr(node).err(), Some(libc::ESTALE));
        assert_eq!(guest.lookup(node, "x").err(), Some(libc::ESTALE));
        assert_eq!(guest.create(node, "x", 0o644), Err(libc::ESTALE));
        assert_eq!(guest.open(node, 0), Err(libc::ESTALE));
        assert_eq!(guest.read(node, handle, 1, 0), Err(libc::ESTALE));
        assert_eq!(guest.link(node, top, "x"), Err(libc::ESTALE));
        assert_eq!(guest.list(node, 4096, false).err(), Some(libc::ESTALE));
        guest.forget(node, u64::MAX);
    }
    for wrong in [0, handle + 1, u64::MAX] {
        assert_eq!(guest.read(file, wrong, 1, 0), Err(libc::EBADF));
        assert_eq!(guest.write(file, wrong, b"x", 0), Err(libc::EBADF));
        assert_eq!(guest.release(file, wrong), Err(libc::EBADF));
        assert_eq!(guest.list_some(top, wrong, 4096, 0, true).err(), Some(libc::EBADF));
    }
    assert_eq!(guest.read(top, handle, 1, 0), Err(libc::EBADF), "a handle belongs to its node");
    assert_eq!(guest.list_some(file, handle, 4096, 0, false).err(), Some(libc::ENOTDIR));
}

#[test]
fn offsets_and_sizes_without_sense_are_errors() {
    let dir = a_share_beside_a_secret();
    let (guest, top) = Guest::writable(&dir.path().join("shared"));
    let (file, handle) = guest.create(top, "mine", 0o644).expect("create");
    assert_eq!(guest.read(file, handle, 1, u64::MAX), Err(libc::EINVAL));
    assert_eq!(guest.write(file, handle, b"x", u64::MAX), Err(libc::EINVAL));
    assert_eq!(guest.write(file, handle, b"x", i64::MAX as u64), Err(libc::EINVAL));
    assert_eq!(guest.read(file, handle, 1, i64::MAX as u64), Err(libc::EINVAL));
    assert_eq!(guest.read(file, handle, 1, 1 << 62).ok(), Some(vec![]));
    for valid in [SetattrValid::UID, SetattrValid::GID] {
        let nobody = guest.setattr(file, valid, |attr| (attr.st_uid, attr.st_gid) = (u32::MAX, u32::MAX));
        assert_eq!(nobody.err(), Some(libc::EINVAL));
    }
    assert_eq!(guest.caller(u32::MAX, 0).create(top, "nobodys", 0o644), Err(libc::EINVAL));
    assert_eq!(guest.lookup(top, "nobodys").err(), Some(libc::ENOENT));
    let allocate = |offset, length| errno(guest.fs.fallocate(&guest.ctx, file, handle, 0, offset, length));
    assert!(allocate(u64::MAX, u64::MAX).is_err() && allocate(0, 0).is_err());
    let directory = errno(guest.fs.opendir(&guest.ctx, top, 0)).expect("opendir").0.expect("a handle");
    assert_eq!(guest.list_some(top, directory, 4096, u64::MAX, false).err(), Some(libc::EINVAL));
    let wide = errno(guest.fs.getxattr(&guest.ctx, file, c"user.none", u32::MAX));
    assert!(wide.is_err(), "and 4 GiB were not set aside for it");
}

#[test]
fn nothing_can_be_written_through_a_read_only_share() {
    let dir = a_share_beside_a_secret();
    let options = ShareOptions { read_only: true, ..ShareOptions::default() };
    let (guest, top) = Guest::with_share(&dir.path().join("shared"), Limits::default(), options);
    let file = guest.walk(top, "dir/file").expect("lookup");
    assert_eq!(guest.create(top, "x", 0o644), Err(libc::EROFS));
    assert_eq!(guest.mkdir(top, "x", 0o755), Err(libc::EROFS));
    assert_eq!(guest.symlink("y", top, "x"), Err(libc::EROFS));
    assert_eq!(guest.mknod(top, "x", libc::S_IFIFO, 0), Err(libc::EROFS));
    assert_eq!(guest.link(file, top, "x"), Err(libc::EROFS));
    assert_eq!(guest.unlink(top, "other"), Err(libc::EROFS));
    assert_eq!(guest.rmdir(top, "dir"), Err(libc::EROFS));
    assert_eq!(guest.rename((top, "other"), (top, "x"), 0), Err(libc::EROFS));
    assert_eq!(guest.setattr(file, SetattrValid::MODE, |_| ()).err(), Some(libc::EROFS));
    for flags in [libc::O_WRONLY, libc::O_RDWR, libc::O_RDONLY | libc::O_TRUNC] {
        assert_eq!(guest.open(file, flags), Err(libc::EROFS));
    }
    let set = guest.fs.setxattr(&guest.ctx, file, c"user.x", b"y", 0);
    assert_eq!(errno(set), Err(libc::EROFS));
    assert_eq!(errno(guest.fs.removexattr(&guest.ctx, file, c"user.x")), Err(libc::EROFS));
    let handle = guest.open(file, libc::O_RDONLY).expect("reading is allowed");
    assert_eq!(guest.write(file, handle, b"x", 0), Err(libc::EBADF));
    assert_eq!(errno(guest.fs.fallocate(&guest.ctx, file, handle, 0, 0, 10)), Err(libc::EBADF));
    assert_eq!(guest.read(file, handle, 100, 0).expect("read"), b"inside");
}

#[test]
fn files_cannot_be_moved_or_linked_from_one_share_to_another() {
    let dir = a_share_beside_a_secret();
    let (guest, top) = Guest::writable(&dir.path().join("shared"));
    guest.fs.attach("second", a_descriptor_of(&dir.path().join("outside")), false).expect("attach");
    let second = guest.walk(ROOT, "second").expect("lookup");
    let other = guest.walk(top, "other").expect("lookup");
    assert_eq!(guest.rename((top, "other"), (second, "x"), 0), Err(libc::EXDEV));
    assert_eq!(guest.link(other, second, "x"), Err(libc::EXDEV));
}

#[test]
fn a_detached_share_is_stale_and_holds_no_descriptor() {
    let dir = a_share_beside_a_secret();
    let shared = dir.path().join("shared");
    let (guest, top) = Guest::writable(&shared);
    let (file, handle) = guest.create(top, "mine", 0o644).expect("create");
    let (gone, gone_handle) = guest.create(top, "gone", 0o644).expect("create");
    guest.release(gone, gone_handle).expect("release");
    guest.unlink(top, "gone").expect("unlink");
    guest.walk(top, "dir/file").expect("lookup");
    let listing = errno(guest.fs.opendir(&guest.ctx, top, 0)).expect("opendir").0.expect("a handle");
    assert!(open_below(&shared) >= 4);

    guest.fs.detach("share").expect("detach");

    assert_eq!(open_below(&shared), 0);
    assert_eq!(guest.lookup(ROOT, "share").err(), Some(libc::ENOENT));
    assert_eq!(guest.getattr(top).err(), Some(libc::ESTALE));
    assert_eq!(guest.getattr(file).err(), Some(libc::ESTALE));
    assert_eq!(guest.getattr(gone).err(), Some(libc::ESTALE));
    assert_eq!(guest.read(file, handle, 1, 0), Err(libc::ESTALE));
    assert_eq!(guest.write(file, handle, b"x", 0), Err(libc::ESTALE));
    assert_eq!(guest.lookup(top, "dir").err(), Some(libc::ESTALE));
    assert_eq!(guest.create(top, "x", 0o644), Err(libc::ESTALE));
    assert_eq!(guest.list_some(top, listing, 4096, 0, true).err(), Some(libc::ESTALE));
    assert_eq!(guest.release(file, handle), Err(libc::ESTALE));
    assert_eq!(open_below(&shared), 0);
    guest.forget_everything();
    assert_eq!(guest.fs.in_use(), (0, 0));
}

#[test]
fn a_name_that_is_attached_again_is_another_share() {
    let dir = a_share_beside_a_secret();
    let shared = dir.path().join("shared");
    let (guest, top) = Guest::writable(&shared);
    guest.fs.detach("share").expect("detach");
    guest.fs.attach("share", a_descriptor_of(&shared), false).expect("attach");
    let again = guest.walk(ROOT, "share").expect("lookup");
    assert_ne!(top, again);
    assert_eq!(guest.getattr(top).err(), Some(libc::ESTALE));
    assert!(guest.getattr(again).is_ok());
}

#[test]
fn a_guest_that_forgets_all_it_knows_leaves_nothing_behind() {
    let dir = a_share_beside_a_secret();
    let shared = dir.path().join("shared");
    let (guest, top) = Guest::writable(&shared);
    let deep = guest.walk(top, "dir").expect("lookup");
    let (file, handle) = guest.create(deep, "x", 0o644).expect("create");
    guest.link(file, top, "y").expect("link");
    guest.rename((deep, "x"), (top, "z"), 0).expect("rename");
    guest.list(top, 4096, true).expect("list");
    guest.list(deep, 200, true).expect("list in small pieces");
    guest.unlink(top, "y").expect("unlink");
    guest.unlink(top, "z").expect("unlink");
    assert_eq!(guest.lookup(top, "z").err(), Some(libc::ENOENT));
    guest.release(file, handle).expect("release");
    guest.forget_everything();
    assert_eq!(guest.fs.in_use(), (0, 0));
    assert_eq!(open_below(&shared), 1, "only the share's own root is open");
}

#[test]
fn a_guest_that_starts_over_finds_nothing_of_the_one_before() {
    let dir = a_share_beside_a_secret();
    let shared = dir.path().join("shared");
    let (guest, top) = Guest::writable(&shared);
    guest.create(top, "mine", 0o644).expect("create");
    guest.fs.init(fuse_backend_rs::api::filesystem::FsOptions::all()).expect("init");
    assert_eq!(guest.fs.in_use(), (0, 0));
    assert_eq!(open_below(&shared), 1);
    assert_eq!(guest.getattr(top).err(), Some(libc::ESTALE));
    assert_eq!(guest.walk(ROOT, "share/mine").map(|_| ()), Ok(()));
}

#[test]
fn a_full_tree_refuses_lookups_and_still_lists_every_name() {
    let dir = tempdir().expect("tempdir");
    for at in 0..50 {
        fs::write(dir.path().join(format!("f{at}")), "").expect("write");
    }
    let limits = Limits { nodes: 10, ..Limits::default() };
    let (guest, top) = Guest::with_share(dir.path(), limits, ShareOptions::default());
    let listed = guest.list(top, 4096, true).expect("list");
    assert_eq!(listed.len(), 52);
    assert_eq!(listed.iter().filter(|one| one.node != 0).count(), 9);
    assert_eq!(guest.mkdir(top, "d", 0o755), Err(libc::ENFILE));
    assert!(dir.path().join("d").is_dir() || !dir.path().join("d").exists());
    guest.forget_everything();
    let top = guest.walk(ROOT, "share").expect("there is room again");
    assert!(guest.walk(top, "f7").is_ok());
    assert_eq!(guest.lookup(top, &c("none").into_string().expect("ascii")).err(), Some(libc::ENOENT));
}
