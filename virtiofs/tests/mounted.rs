//! A share mounted by a real kernel (the host's own, see [`bridge`]) is a file system that programs can use.
//!
//! Skipped where this process may not mount.

mod bridge;

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use bridge::Mounted;
use tempfile::{TempDir, tempdir};
use virtiofs::{CachePolicy, Limits, ShareOptions, ShareTree};

/// A mounted share; unmounted before its directory goes.
struct Stage {
    mounted: Mounted,
    tree: Arc<ShareTree>,
    _dir: TempDir,
    behind: PathBuf,
}

impl Stage {
    fn set(cache: CachePolicy) -> Option<Stage> {
        virtiofs::clear_umask();
        let dir = tempdir().expect("tempdir");
        let (behind, at) = (dir.path().join("behind"), dir.path().join("mounted"));
        fs::create_dir(&behind).expect("mkdir");
        fs::create_dir(&at).expect("mkdir");
        let tree = Arc::new(ShareTree::new(Limits { cached_fds: 16, ..Limits::default() }));
        let root = File::open(&behind).expect("open").into();
        tree.attach_with("share", root, ShareOptions { read_only: false, cache }).expect("attach");
        match Mounted::new(Arc::clone(&tree), &at) {
            Ok(mounted) => Some(Stage { mounted, tree, _dir: dir, behind }),
            Err(error) => {
                eprintln!("skipped: cannot mount: {error}");
                None
            }
        }
    }

    fn share(&self) -> PathBuf {
        self.mounted.at.join("share")
    }

    /// Runs a script in the share and gives what it printed.
    fn run(&self, script: &str) -> String {
        let out = Command::new("sh").args(["-euc", script]).current_dir(self.share()).output().expect("sh runs");
        let errors = String::from_utf8_lossy(&out.stderr).into_owned();
        assert!(out.status.success(), "{script}: {errors}");
        String::from_utf8_lossy(&out.stdout).into_owned()
    }
}

#[test]
fn shell_tools_find_what_they_expect() {
    let Some(stage) = Stage::set(CachePolicy::private()) else { return };
    let printed = stage.run(
        "umask 027
         echo hello > a; ln a b; ln -s a l; cat l; stat -c '%h %a' b
         mkdir -p d/e/f; echo deep > d/e/f/g; mv d/e d2; cat d2/f/g; rmdir d
         chmod 4755 a; stat -c %a b; echo more >> a; wc -c < b
         truncate -s 3 a; cat b; echo
         touch -d '2001-02-03 04:05:06 UTC' a; stat -c %Y b
         mkfifo p; (echo through > p &); cat p
         cp -a d2 copy; diff -r d2 copy; rm -r d2 copy; ls",
    );
    assert_eq!(printed, "hello\n2 640\ndeep\n4755\n11\nhel\n981173106\nthrough\na\nb\nl\np\n");
}

#[test]
fn an_overlay_keeps_its_upper_on_a_share() {
    let Some(stage) = Stage::set(CachePolicy::private()) else { return };
    stage.run(
        "mkdir -p low/dir up work merged; echo 1 > low/a; echo 2 > low/dir/b
         mount -t overlay overlay -o lowerdir=low,upperdir=up,workdir=work merged
         cd merged; rm a; rm -r dir; mkdir dir; echo new > dir/n; mv dir/n x; cd ..
         ls merged/dir; cat merged/x; umount merged",
    );
    let whiteout = fs::symlink_metadata(stage.behind.join("up/a")).expect("a whiteout on the host");
    assert!(whiteout.file_type().is_char_device() && whiteout.rdev() == 0);
}

#[test]
fn a_file_behind_a_mapping_keeps_its_size() {
    // Mapping is unsafe code, so Python does it where there is one. The rule itself is tested in files.rs, by the flag
    // that marks pages written back.
    let Some(stage) = Stage::set(CachePolicy::private()) else { return };
    let python = "import mmap
f = open('m', 'w+b'); f.truncate(1024); m = mmap.mmap(f.fileno(), 1024); a = open('m', 'ab'); f.close()
m[10:14] = b'wxyz'; m.flush(); m.close(); a.close()";
    let ran = Command::new("python3").args(["-c", python]).current_dir(stage.share()).status();
    if ran.is_ok_and(|status| status.success()) {
        let content = fs::read(stage.behind.join("m")).expect("on the host");
        assert_eq!((content.len(), &content[10..14]), (1024, &b"wxyz"[..]));
    }
}

#[test]
fn many_threads_make_nested_directories_and_files_at_once() {
    let Some(stage) = Stage::set(CachePolicy::private()) else { return };
    let share = stage.share();
    std::thread::scope(|scope| {
        for writer in 0..16 {
            let share = &share;
            scope.spawn(move || {
                for at in 0..20 {
                    let dir = share.join(format!("{at}/{}", writer % 4));
                    fs::create_dir_all(&dir).expect("mkdir -p");
                    fs::write(dir.join(format!("{writer}")), "x".repeat(writer + 1)).expect("write");
                }
            });
        }
    });
    for writer in 0..16 {
        for at in 0..20 {
            let made = stage.behind.join(format!("{at}/{}/{writer}", writer % 4));
            assert_eq!(fs::metadata(made).expect("made").len() as usize, writer + 1);
        }
    }
}

#[test]
fn what_the_host_changes_in_a_volume_is_seen() {
    // As for a volume, only that nobody waits for the second to pass.
    let cache = CachePolicy { entry: Duration::ZERO, attributes: Duration::ZERO, ..CachePolicy::shared() };
    let Some(stage) = Stage::set(cache) else { return };
    let (here, there) = (stage.share().join("f"), stage.behind.join("f"));
    fs::write(&there, "a\n").expect("the host writes");
    assert_eq!(fs::read_to_string(&here).expect("read"), "a\n");
    OpenOptions::new().append(true).open(&there).expect("open").write_all(b"b\n").expect("the host appends");
    assert_eq!(fs::read_to_string(&here).expect("read"), "a\nb\n");
    fs::write(stage.behind.join("new"), "replaced").expect("write");
    fs::rename(stage.behind.join("new"), &there).expect("the host replaces it");
    assert_eq!(fs::read_to_string(&here).expect("read"), "replaced");
}

#[test]
fn an_open_file_outlives_its_name() {
    let Some(stage) = Stage::set(CachePolicy::private()) else { return };
    let path = stage.share().join("f");
    let mut file = File::options().read(true).write(true).create_new(true).open(&path).expect("create");
    fs::remove_file(&path).expect("unlink");
    file.write_all(b"nameless").expect("write");
    file.set_len(4).expect("truncate");
    assert_eq!(file.metadata().expect("fstat").nlink(), 0);
    file.seek(SeekFrom::Start(0)).expect("seek");
    let mut content = String::new();
    file.read_to_string(&mut content).expect("read");
    assert_eq!(content, "name");
}

#[test]
fn a_share_can_be_detached_under_a_program_that_has_a_file_open() {
    let Some(stage) = Stage::set(CachePolicy::private()) else { return };
    let mut file = File::create(stage.share().join("f")).expect("create");
    stage.tree.detach("share").expect("detach");
    let failed = file.write_all(b"x").expect_err("the share is gone");
    assert_eq!(failed.raw_os_error(), Some(libc::ESTALE));
    drop(file);
    assert_eq!(stage.tree.in_use().1, 0);
}

/// Python, where there is one, in the share; what it printed.
fn python(stage: &Stage, script: &str) -> Option<String> {
    let out = Command::new("python3").args(["-c", script]).current_dir(stage.share()).output().ok()?;
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    Some(String::from_utf8_lossy(&out.stdout).into_owned())
}

#[test]
fn processes_exclude_each_other_by_locks_and_wait_for_them() {
    let Some(stage) = Stage::set(CachePolicy::private()) else { return };
    let script = "import fcntl, os, time
for name, lock in (('flock', fcntl.flock), ('fcntl', fcntl.lockf)):
    f = open('lock', 'w'); lock(f, fcntl.LOCK_EX)
    ready, told = os.pipe()
    child = os.fork()
    if child == 0:
        g = open('lock', 'w')
        try: lock(g, fcntl.LOCK_EX | fcntl.LOCK_NB); os._exit(1)
        except BlockingIOError: os.write(told, b'x')
        before = time.monotonic(); lock(g, fcntl.LOCK_EX)
        os._exit(0 if time.monotonic() - before > 0.15 else 2)
    os.read(ready, 1); time.sleep(0.3); lock(f, fcntl.LOCK_UN)
    print(name, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))";
    if let Some(printed) = python(&stage, script) {
        assert_eq!(printed, "flock 0\nfcntl 0\n");
    }
}

#[test]
fn a_nameless_file_is_filled_and_then_named() {
    let Some(stage) = Stage::set(CachePolicy::private()) else { return };
    let script = "import os
f = os.open('.', os.O_TMPFILE | os.O_RDWR, 0o640); os.write(f, b'whole')
assert os.listdir() == [], os.listdir()
assert os.fstat(f).st_nlink == 0
os.link(f'/proc/self/fd/{f}', 'named', src_dir_fd=f)
assert os.fstat(f).st_nlink == 1; os.close(f)
print(open('named').read())";
    if let Some(printed) = python(&stage, script) {
        assert_eq!(printed, "whole\n");
        assert_eq!(fs::read(stage.behind.join("named")).expect("on the host"), b"whole");
    }
}

#[test]
fn copies_are_whole_whatever_the_guest_still_has_in_its_cache() {
    let Some(stage) = Stage::set(CachePolicy::private()) else { return };
    let printed = stage.run(
        "head -c 20000000 /dev/urandom > a; cp a b; cmp a b; echo more >> a; cp a b; cmp a b
         cp --sparse=always a c; cmp a c; sync; sync a; wc -c < b",
    );
    assert_eq!(printed, "20000005\n");
}
