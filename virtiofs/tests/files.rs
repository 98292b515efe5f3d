//! Files in a writable share behave as on the host.

mod guest;

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};

use fuse_backend_rs::api::filesystem::{FileSystem, GetxattrReply, ListxattrReply, SetattrValid};
use guest::{Guest, c, content, errno, we_are_root};
use tempfile::tempdir;

#[test]
fn what_is_written_can_be_read_and_is_on_the_host() {
    let dir = tempdir().expect("tempdir");
    let (guest, top) = Guest::writable(dir.path());
    let (node, handle) = guest.create(top, "a", 0o644).expect("create");
    assert_eq!(guest.write(node, handle, b"hello, host", 0), Ok(11));
    assert_eq!(guest.write(node, handle, b"HOST", 7), Ok(4));
    assert_eq!(guest.read(node, handle, 100, 0).expect("read"), b"hello, HOST");
    assert_eq!(content(&dir.path().join("a")), b"hello, HOST");
    assert_eq!(guest.getattr(node).expect("getattr").st_size, 11);
    guest.release(node, handle).expect("release");
    assert_eq!(guest.read(node, handle, 1, 0), Err(libc::EBADF));
}

#[test]
fn modes_are_taken_as_given_and_the_guests_umask_is_applied() {
    let dir = tempdir().expect("tempdir");
    let (guest, top) = Guest::writable(dir.path());
    guest.create(top, "a", 0o4777).expect("create");
    errno(guest.fs.mkdir(&guest.ctx, top, &c("d"), 0o1777, 0o027)).expect("mkdir");
    errno(guest.fs.mknod(&guest.ctx, top, &c("f"), libc::S_IFIFO | 0o666, 0, 0o077)).expect("mknod");
    let mode = |name: &str| fs::metadata(dir.path().join(name)).expect("there").mode() & 0o7777;
    assert_eq!((mode("a"), mode("d"), mode("f")), (0o4777, 0o1750, 0o600));
}

#[test]
fn new_files_belong_to_the_caller() {
    if !we_are_root() {
        return;
    }
    let dir = tempdir().expect("tempdir");
    let (guest, top) = Guest::writable(dir.path());
    let user = guest.caller(1000, 1001);
    user.create(top, "file", 0o6755).expect("create");
    user.mkdir(top, "dir", 0o755).expect("mkdir");
    user.symlink("nowhere", top, "link").expect("symlink");
    user.mknod(top, "fifo", libc::S_IFIFO | 0o4644, 0).expect("mknod");
    for name in ["file", "dir", "link", "fifo"] {
        let found = fs::symlink_metadata(dir.path().join(name)).expect("there");
        assert_eq!((found.uid(), found.gid()), (1000, 1001), "{name}");
    }
    let mode = |name: &str| fs::metadata(dir.path().join(name)).expect("there").mode() & 0o7777;
    assert_eq!((mode("file"), mode("fifo")), (0o6755, 0o4644), "chown must not cost setuid");
}

#[test]
fn in_a_setgid_directory_new_files_get_its_group() {
    if !we_are_root() {
        return;
    }
    let dir = tempdir().expect("tempdir");
    std::os::unix::fs::chown(dir.path(), None, Some(500)).expect("chown");
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o2777)).expect("chmod");
    let (guest, top) = Guest::writable(dir.path());
    let user = guest.caller(1000, 1001);
    user.create(top, "file", 0o644).expect("create");
    user.mkdir(top, "dir", 0o755).expect("mkdir");
    let file = fs::metadata(dir.path().join("file")).expect("there");
    let sub = fs::metadata(dir.path().join("dir")).expect("there");
    assert_eq!((file.uid(), file.gid()), (1000, 500));
    assert_eq!((sub.uid(), sub.gid(), sub.mode() & 0o7777), (1000, 500, 0o2755));
}

#[test]
fn a_whiteout_can_be_made_and_left_behind_by_a_rename() {
    if !we_are_root() {
        return;
    }
    let dir = tempdir().expect("tempdir");
    let (guest, top) = Guest::writable(dir.path());
    let node = guest.mknod(top, "white", libc::S_IFCHR, 0).expect("mknod");
    assert_eq!(guest.getattr(node).expect("getattr").st_rdev, 0);
    guest.create(top, "a", 0o644).expect("create");
    guest.rename((top, "a"), (top, "b"), libc::RENAME_WHITEOUT).expect("rename");
    let left = guest.lookup(top, "a").expect("the whiteout is there");
    assert_eq!(left.attr.st_mode & libc::S_IFMT, libc::S_IFCHR);
}

#[test]
fn attributes_can_be_set_without_a_handle() {
    let dir = tempdir().expect("tempdir");
    fs::write(dir.path().join("a"), "0123456789").expect("write");
    let (guest, top) = Guest::writable(dir.path());
    let node = guest.walk(top, "a").expect("lookup");
    let valid = SetattrValid::MODE | SetattrValid::SIZE | SetattrValid::MTIME | SetattrValid::ATIME_NOW;
    let attr = guest
        .setattr(node, valid, |attr| {
            attr.st_mode = 0o601;
            attr.st_size = 4;
            attr.st_mtime = 1_000_000;
            attr.st_mtime_nsec = 5;
        })
        .expect("setattr");
    assert_eq!((attr.st_mode & 0o7777, attr.st_size, attr.st_mtime, attr.st_mtime_nsec), (0o601, 4, 1_000_000, 5));
    assert!(attr.st_atime > 1_000_000_000);
    assert_eq!(content(&dir.path().join("a")), b"0123");
    assert_eq!(guest.setattr(node, SetattrValid::SIZE, |attr| attr.st_size = -1).err(), Some(libc::EINVAL));
}

#[test]
fn a_symbolic_links_own_owner_and_times_are_set_not_its_targets() {
    let dir = tempdir().expect("tempdir");
    fs::write(dir.path().join("target"), "").expect("write");
    let (guest, top) = Guest::writable(dir.path());
    let link = guest.symlink("target", top, "link").expect("symlink");
    let before = fs::metadata(dir.path().join("target")).expect("there").mtime();
    guest.setattr(link, SetattrValid::MTIME, |attr| attr.st_mtime = 77).expect("setattr");
    assert_eq!(fs::symlink_metadata(dir.path().join("link")).expect("there").mtime(), 77);
    assert_eq!(fs::metadata(dir.path().join("target")).expect("there").mtime(), before);
    assert_eq!(guest.readlink(link).as_deref(), Ok("target"));
}

#[test]
fn setuid_falls_at_a_write_and_at_a_truncate_that_ask_for_it() {
    let dir = tempdir().expect("tempdir");
    let (guest, top) = Guest::writable(dir.path());
    let (node, handle) = guest.create(top, "a", 0o6777).expect("create");
    guest.write(node, handle, b"by root", 0).expect("write");
    assert_eq!(guest.getattr(node).expect("getattr").st_mode & 0o7777, 0o6777);
    guest.write_with(node, handle, b"by a user", 0, 4).expect("write");
    assert_eq!(guest.getattr(node).expect("getattr").st_mode & 0o7777, 0o777);
    guest.setattr(node, SetattrValid::MODE, |attr| attr.st_mode = 0o6745).expect("chmod");
    let valid = SetattrValid::SIZE | SetattrValid::KILL_SUIDGID;
    let attr = guest.setattr(node, valid, |attr| attr.st_size = 1).expect("truncate");
    assert_eq!(attr.st_mode & 0o7777, 0o2745, "setgid without group execute is no privilege");
}

#[test]
fn a_page_written_back_through_an_appending_handle_lands_at_its_offset() {
    let dir = tempdir().expect("tempdir");
    fs::write(dir.path().join("a"), "0123456789").expect("write");
    let (guest, top) = Guest::writable(dir.path());
    let node = guest.walk(top, "a").expect("lookup");
    let handle = guest.open(node, libc::O_RDWR | libc::O_APPEND).expect("open");
    guest.write_with(node, handle, b"AB", 2, 1).expect("from the page cache");
    assert_eq!(content(&dir.path().join("a")), b"01AB456789");
    guest.write(node, handle, b"!", 0).expect("from a program");
    assert_eq!(content(&dir.path().join("a")), b"01AB456789!");
}

#[test]
fn creating_a_name_that_is_there_opens_it_unless_it_must_be_new() {
    let dir = tempdir().expect("tempdir");
    fs::write(dir.path().join("a"), "there").expect("write");
    let (guest, top) = Guest::writable(dir.path());
    let (node, handle) = guest.create(top, "a", 0o600).expect("open");
    assert_eq!(guest.read(node, handle, 10, 0).expect("read"), b"there");
    assert_eq!(guest.create_with(top, "a", 0o600, libc::O_EXCL), Err(libc::EEXIST));
    let (node, _) = guest.create_with(top, "a", 0o600, libc::O_TRUNC | libc::O_WRONLY).expect("truncate");
    assert_eq!(guest.getattr(node).expect("getattr").st_size, 0);
}

#[test]
fn hard_links_are_one_node_and_survive_each_other() {
    let dir = tempdir().expect("tempdir");
    let (guest, top) = Guest::writable(dir.path());
    let (node, handle) = guest.create(top, "a", 0o644).expect("create");
    guest.write(node, handle, b"x", 0).expect("write");
    guest.release(node, handle).expect("release");
    assert_eq!(guest.link(node, top, "b"), Ok(node));
    assert_eq!(guest.getattr(node).expect("getattr").st_nlink, 2);
    guest.unlink(top, "a").expect("unlink");
    assert_eq!(guest.walk(top, "b"), Ok(node));
    let handle = guest.open(node, libc::O_RDONLY).expect("open by the other name");
    assert_eq!(guest.read(node, handle, 10, 0).expect("read"), b"x");
}

#[test]
fn a_removed_file_lives_on_for_whoever_holds_it() {
    let dir = tempdir().expect("tempdir");
    let (guest, top) = Guest::writable(dir.path());
    let (open, handle) = guest.create(top, "open", 0o644).expect("create");
    guest.write(open, handle, b"still here", 0).expect("write");
    let held = guest.mkdir(top, "cwd", 0o755).expect("mkdir");
    guest.unlink(top, "open").expect("unlink");
    guest.rmdir(top, "cwd").expect("rmdir");
    assert_eq!(guest.read(open, handle, 100, 0).expect("read"), b"still here");
    assert_eq!(guest.getattr(open).expect("getattr").st_nlink, 0);
    guest.setattr(open, SetattrValid::MODE, |attr| attr.st_mode = 0o600).expect("fchmod");
    assert_eq!(guest.getattr(held).expect("getattr of a removed directory").st_nlink, 0);
    assert_eq!(guest.names(held), Err(libc::ENOENT), "as the kernel answers for a directory that is gone");
    assert_eq!(guest.create(held, "x", 0o644), Err(libc::ENOENT));
}

#[test]
fn a_file_that_was_replaced_by_rename_lives_on_too() {
    let dir = tempdir().expect("tempdir");
    let (guest, top) = Guest::writable(dir.path());
    let (old, handle) = guest.create(top, "config", 0o644).expect("create");
    guest.write(old, handle, b"old", 0).expect("write");
    guest.release(old, handle).expect("release");
    let (new, _) = guest.create(top, "config.tmp", 0o644).expect("create");
    guest.rename((top, "config.tmp"), (top, "config"), 0).expect("rename");
    assert_eq!(guest.walk(top, "config"), Ok(new));
    let handle = guest.open(old, libc::O_RDONLY).expect("the old one has no name but is held");
    assert_eq!(guest.read(old, handle, 10, 0).expect("read"), b"old");
}

#[test]
fn a_renamed_directory_takes_what_is_below_with_it() {
    let dir = tempdir().expect("tempdir");
    let (guest, top) = Guest::writable(dir.path());
    let from = guest.mkdir(top, "from", 0o755).expect("mkdir");
    let to = guest.mkdir(top, "to", 0o755).expect("mkdir");
    let deep = guest.mkdir(from, "deep", 0o755).expect("mkdir");
    let (node, handle) = guest.create(deep, "file", 0o644).expect("create");
    guest.release(node, handle).expect("release");
    guest.rename((from, "deep"), (to, "moved"), 0).expect("rename");
    assert!(guest.getattr(node).is_ok());
    assert_eq!(guest.walk(top, "to/moved/file"), Ok(node));
    assert_eq!(guest.walk(top, "from/deep"), Err(libc::ENOENT));
}

#[test]
fn rename_flags_are_honoured() {
    let dir = tempdir().expect("tempdir");
    let (guest, top) = Guest::writable(dir.path());
    let (a, _) = guest.create(top, "a", 0o644).expect("create");
    let b = guest.mkdir(top, "b", 0o755).expect("mkdir");
    assert_eq!(guest.rename((top, "a"), (top, "b"), libc::RENAME_NOREPLACE), Err(libc::EEXIST));
    guest.rename((top, "a"), (top, "b"), libc::RENAME_EXCHANGE).expect("exchange");
    assert_eq!((guest.walk(top, "a"), guest.walk(top, "b")), (Ok(b), Ok(a)));
    assert_eq!(guest.rename((top, "a"), (top, "b"), 1 << 20), Err(libc::EINVAL));
}

#[test]
fn extended_attributes_are_carried() {
    let dir = tempdir().expect("tempdir");
    let (guest, top) = Guest::writable(dir.path());
    let (node, _) = guest.create(top, "a", 0o644).expect("create");
    let set = guest.fs.setxattr(&guest.ctx, node, c"user.colour", b"blue", 0);
    if errno(set) == Err(libc::EOPNOTSUPP) {
        return; // this host's temporary directory has none
    }
    let get = |size| errno(guest.fs.getxattr(&guest.ctx, node, c"user.colour", size));
    assert!(matches!(get(0), Ok(GetxattrReply::Count(4))));
    assert!(matches!(get(u32::MAX), Ok(GetxattrReply::Value(value)) if value == b"blue"));
    assert_eq!(get(2).err(), Some(libc::ERANGE));
    let list = errno(guest.fs.listxattr(&guest.ctx, node, 4096)).expect("listxattr");
    assert!(matches!(list, ListxattrReply::Names(names) if names.windows(12).any(|w| w == b"user.colour\0")));
    errno(guest.fs.removexattr(&guest.ctx, node, c"user.colour")).expect("removexattr");
    assert_eq!(get(64).err(), Some(libc::ENODATA));
}

#[test]
fn holes_and_allocated_ranges_are_seen() {
    let dir = tempdir().expect("tempdir");
    let (guest, top) = Guest::writable(dir.path());
    let (node, handle) = guest.create(top, "a", 0o644).expect("create");
    guest.write(node, handle, b"end", 1 << 20).expect("write");
    let seek = |offset, whence: i32| errno(guest.fs.lseek(&guest.ctx, node, handle, offset, whence as u32));
    assert_eq!(seek(0, libc::SEEK_HOLE), Ok(0));
    assert!(seek(0, libc::SEEK_DATA).expect("data") >= 4096);
    assert_eq!(seek(1 << 21, libc::SEEK_DATA), Err(libc::ENXIO));
    assert_eq!(seek(0, libc::SEEK_SET), Err(libc::EINVAL));
    errno(guest.fs.fallocate(&guest.ctx, node, handle, 0, 0, 2 << 20)).expect("fallocate");
    assert_eq!(guest.getattr(node).expect("getattr").st_size, 2 << 20);
    errno(guest.fs.fsync(&guest.ctx, node, true, handle)).expect("fdatasync");
    errno(guest.fs.fsync(&guest.ctx, node, false, handle)).expect("fsync");
}

#[test]
fn a_large_request_is_one_transfer_of_all_its_bytes() {
    let dir = tempdir().expect("tempdir");
    let (guest, top) = Guest::writable(dir.path());
    let (node, handle) = guest.create(top, "a", 0o644).expect("create");
    let data: Vec<u8> = (0..1 << 20).map(|at: u32| (at % 251) as u8).collect();
    assert_eq!(guest.write(node, handle, &data, 0), Ok(data.len()));
    assert_eq!(guest.read(node, handle, 1 << 20, 0).expect("read"), data);
}

#[test]
fn flush_and_access_are_left_to_the_guest() {
    let dir = tempdir().expect("tempdir");
    let (guest, top) = Guest::writable(dir.path());
    let (node, handle) = guest.create(top, "a", 0o644).expect("create");
    assert_eq!(errno(guest.fs.flush(&guest.ctx, node, handle, 0)), Err(libc::ENOSYS));
    assert_eq!(errno(guest.fs.access(&guest.ctx, node, 0)), Err(libc::ENOSYS));
}
