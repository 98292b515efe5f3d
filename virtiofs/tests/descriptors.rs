//! How many descriptors a guest can make the server hold, and what works when there is none left.
//!
//! These tests lower the process's own limit, so they take turns.

mod guest;

use std::fs::{self, File};
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use guest::{Guest, ROOT, open_below};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tempfile::{TempDir, tempdir};
use virtiofs::{Limits, ShareOptions};

static TURN: Mutex<()> = Mutex::new(());

/// The process's descriptor limit, lowered until this is dropped.
struct Lowered {
    before: Rlimit,
    _turn: MutexGuard<'static, ()>,
}

fn at_most(descriptors: u64) -> Lowered {
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let before = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: Some(descriptors), ..before }).expect("lowering is allowed");
    Lowered { before, _turn: turn }
}

impl Drop for Lowered {
    fn drop(&mut self) {
        let _ = setrlimit(Resource::Nofile, self.before);
    }
}

/// In memory if there is such a place: making 50,000 files on a disk takes minutes.
fn a_fast_directory() -> TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempdir()).expect("tempdir")
}

fn fill(dir: &Path, files: usize) {
    fs::create_dir_all(dir).expect("mkdir");
    for at in 0..files {
        File::create(dir.join(format!("file-{at:05}"))).expect("create");
    }
}

#[test]
fn walking_fifty_thousand_files_holds_no_more_descriptors_than_the_cache() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let dir = a_fast_directory();
    for at in 0..50 {
        fill(&dir.path().join(format!("dir-{at:02}")), 1000);
    }
    let limits = Limits { cached_fds: 64, ..Limits::default() };
    let (guest, top) = Guest::with_share(dir.path(), limits, ShareOptions::default());
    let mut files = 0;
    let mut most = 0;
    for directory in guest.names(top).expect("list") {
        let node = guest.walk(top, &directory).expect("lookup");
        for listed in guest.list(node, 32 << 10, true).expect("list").iter().filter(|one| one.node != 0) {
            files += 1;
            guest.getattr(listed.node).expect("getattr");
            if files % 10 == 0 {
                let handle = guest.open(listed.node, libc::O_RDONLY).expect("open");
                guest.release(listed.node, handle).expect("release");
            }
        }
        most = most.max(open_below(dir.path()));
    }
    assert_eq!(files, 50_000);
    assert_eq!(guest.fs.in_use(), (50_051, 0));
    // The cache and the share's root.
    assert!(most <= 65, "{most} descriptors");
    guest.forget_everything();
    assert_eq!(guest.fs.in_use(), (0, 0));
    assert_eq!(open_below(dir.path()), 1);
}

#[test]
fn with_every_handle_in_use_listing_and_removing_go_on() {
    let dir = a_fast_directory();
    fill(dir.path(), 300);
    let _lowered = at_most(256);
    let (guest, top) = Guest::with_share(dir.path(), Limits::default(), ShareOptions::default());
    let names = guest.names(top).expect("list");
    assert_eq!(names.len(), 300);
    let mut held = Vec::new();
    let refused = loop {
        let node = guest.walk(top, &names[held.len()]).expect("lookups need no descriptor");
        match guest.open(node, libc::O_RDONLY) {
            Ok(handle) => held.push((node, handle)),
            Err(errno) => break errno,
        }
    };
    assert_eq!(refused, libc::ENFILE);
    assert!(held.len() > 50, "only {} files could be opened", held.len());
    assert_eq!(guest.create(top, "one-more", 0o644), Err(libc::ENFILE));
    assert!(!dir.path().join("one-more").exists(), "nothing is left of a file that could not be opened");
    let (node, handle) = held.pop().expect("some are open");
    guest.release(node, handle).expect("release");
    for plus in [false, true] {
        let listed = guest.list(top, 4096, plus).expect("list");
        assert_eq!(listed.len(), 302, "an entry is missing");
    }
    for name in &names {
        guest.unlink(top, name).expect("unlink");
    }
    assert_eq!(guest.names(top), Ok(vec![]));
}

#[test]
fn without_a_single_descriptor_left_the_cache_makes_room() {
    let dir = tempdir().expect("tempdir");
    fill(&dir.path().join("a/b/c"), 20);
    let _lowered = at_most(256);
    let (guest, top) = Guest::with_share(dir.path(), Limits::default(), ShareOptions::default());
    let deep = guest.walk(top, "a/b/c").expect("lookup");
    // Makes the cache hold what is on the way.
    guest.list(deep, 4096, true).expect("list");
    let mut taken = Vec::new();
    while let Ok(file) = File::open("/dev/null") {
        taken.push(file);
    }
    assert_eq!(guest.list(deep, 4096, true).expect("list").len(), 22);
    assert!(guest.getattr(deep).is_ok());
    drop(taken);
    assert_eq!(guest.walk(ROOT, "share/a/b/c"), Ok(deep));
}

#[test]
fn without_a_descriptor_and_without_a_cache_the_error_is_told() {
    let dir = tempdir().expect("tempdir");
    fill(&dir.path().join("a/b"), 1);
    let _lowered = at_most(256);
    let (guest, top) = Guest::with_share(dir.path(), Limits::default(), ShareOptions::default());
    let file = guest.walk(top, "a/b/file-00000").expect("lookup");
    let mut taken = Vec::new();
    for _ in 0..2 {
        // The second round takes what the cache gave up in the first.
        while let Ok(opened) = File::open("/dev/null") {
            taken.push(opened);
        }
        let refused = guest.open(file, libc::O_RDONLY).and_then(|handle| guest.release(file, handle));
        assert!(matches!(refused, Ok(()) | Err(libc::EMFILE)), "{refused:?}");
    }
    assert_eq!(guest.unlink(top, "none"), Err(libc::ENOENT));
    drop(taken);
    assert!(guest.open(file, libc::O_RDONLY).is_ok());
}
