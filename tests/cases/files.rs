//! virtio-fs as programs use it: on a container's root and on volumes.
//!
//! A container takes seconds in the lab, so a guest half makes many checks in one: a Python function each, whose name
//! says what is true. The host half wants every one of them to have said "ok".

use std::process::Child;

use tests::{Container, Victim, images, shell};

/// Runs the functions that a script defines, in the directories that it is given.
const CHECKS: &str = r#"
import ctypes, errno, fcntl, mmap, os, resource, signal, socket, sqlite3, stat, struct, subprocess, sys, threading, time, traceback
libc = ctypes.CDLL(None, use_errno=True)
def refused(number, act, *args, **named):
    try: act(*args, **named)
    except OSError as e: assert e.errno == number, e
    else: raise AssertionError('not refused')
def write(name, data='x'):
    with open(name, 'w') as f: f.write(data)
def read(name):
    with open(name) as f: return f.read()
def rename(old, new, flags):
    if libc.renameat2(-100, old.encode(), -100, new.encode(), flags): raise OSError(ctypes.get_errno(), new)
def run(*checks):
    for top in sys.argv[1:]:
        for check in checks:
            here = f'{top}/{check.__name__}'; os.mkdir(here); os.chdir(here)
            try: check(); print('ok', here, flush=True)
            except BaseException: print('FAILED', here, traceback.format_exc())
"#;

/// Runs `checks` in `folders` of a container, and expects all of them to be ok.
#[track_caller]
fn all_ok(container: Container, checks: &str, folders: &[&str]) {
    let names: Vec<_> = checks.lines().filter_map(|line| line.strip_prefix("def ")?.split('(').next()).collect();
    let program = format!("{CHECKS}{checks}\nrun({})", names.join(", "));
    let outcome = container.command(&[&["python3", "-c", &program], folders].concat()).run().expect_code(0);
    let expected = folders.iter().flat_map(|folder| names.iter().map(move |name| format!("ok {folder}/{name}\n")));
    assert_eq!(outcome.stdout, expected.collect::<String>(), "{}", outcome.stderr);
}

fn volume(name: &str) -> (String, String) {
    let at = format!("/var/lib/{name}");
    let _ = shell(&format!("rm -rf {at}; mkdir {at}")).expect_code(0);
    (format!("--mount=type=bind,src={at},dst=/data,options=rbind:rw"), at)
}

const ATTRIBUTES: &str = r"
def files_belong_to_whoever_they_are_given_to():
    write('f'); assert os.stat('f').st_uid == 0
    os.chown('f', 1000, 1001); os.chmod('f', 0o4751); s = os.stat('f')
    assert (s.st_uid, s.st_gid, stat.S_IMODE(s.st_mode)) == (1000, 1001, 0o4751)
    child = os.fork()
    if child == 0: os.setgid(7); os.setuid(7); os._exit(0 if not os.access('f', os.W_OK) else 1)
    assert os.waitpid(child, 0)[1] == 0
def setuid_falls_when_another_user_writes():
    write('f'); os.chmod('f', 0o6777)
    child = os.fork()
    if child == 0: os.setgid(7); os.setuid(7); write('f', 'y'); os._exit(0)
    os.waitpid(child, 0); assert stat.S_IMODE(os.stat('f').st_mode) == 0o777, oct(os.stat('f').st_mode)
def hard_links_are_one_file():
    write('a'); os.link('a', 'b'); assert os.stat('a').st_ino == os.stat('b').st_ino and os.stat('a').st_nlink == 2
    write('b', 'changed'); assert read('a') == 'changed'; os.unlink('a'); assert os.stat('b').st_nlink == 1
def attributes_of_users_and_capabilities_are_kept():
    write('f'); os.setxattr('f', 'user.k', b'v'); assert os.getxattr('f', 'user.k') == b'v'
    cap = struct.pack('<IIIII', 0x2000001, 1 << 10, 0, 0, 0)
    os.setxattr('f', 'security.capability', cap); assert os.getxattr('f', 'security.capability') == cap
    assert set(os.listxattr('f')) == {'user.k', 'security.capability'}
    os.removexattr('f', 'user.k'); refused(errno.ENODATA, os.getxattr, 'f', 'user.k')
    with open('f', 'a') as f: f.write('more')
    refused(errno.ENODATA, os.getxattr, 'f', 'security.capability')
def rename_keeps_and_exchanges():
    write('a', '1'); write('b', '2'); refused(errno.EEXIST, rename, 'a', 'b', 1)
    rename('a', 'b', 2); assert (read('a'), read('b')) == ('2', '1')
def special_files_work():
    os.mkfifo('p')
    if os.fork() == 0: write('p', 'through'); os._exit(0)
    assert read('p') == 'through'; os.wait()
    s = socket.socket(socket.AF_UNIX); s.bind('s'); s.listen(); c = socket.socket(socket.AF_UNIX); c.connect('s')
    os.symlink('/no/where', 'l'); assert os.readlink('l') == '/no/where' and not os.path.exists('l')
def times_and_sizes_are_set():
    write('f'); os.utime('f', ns=(10**18 + 1, 10**18 + 2)); s = os.stat('f')
    assert (s.st_atime_ns, s.st_mtime_ns) == (10**18 + 1, 10**18 + 2)
    v = os.statvfs('.'); assert v.f_blocks > v.f_bavail > 0 and v.f_namemax == 255
";

const CONTENT: &str = r"
def a_mapped_file_keeps_its_size():
    f = open('f', 'w+b'); f.truncate(1024); m = mmap.mmap(f.fileno(), 1024); a = open('f', 'ab')
    m[10:14] = b'wxyz'; m.flush(); m.close(); f.close(); a.close(); time.sleep(0.1)
    assert os.stat('f').st_size == 1024; assert open('f', 'rb').read()[8:16] == b'\0\0wxyz\0\0'
def a_private_mapping_is_private():
    write('f', 'a' * 8192); f = open('f', 'r+b'); m = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_COPY)
    m[0:3] = b'xyz'; m.close(); assert read('f')[:3] == 'aaa'
def holes_are_found():
    f = os.open('f', os.O_RDWR | os.O_CREAT); os.pwrite(f, b'x' * 4096, 1 << 20); assert os.fstat(f).st_blocks <= 16
    assert os.lseek(f, 0, os.SEEK_DATA) == 1 << 20; assert os.lseek(f, 1 << 20, os.SEEK_HOLE) == (1 << 20) + 4096
    assert libc.fallocate(f, 3, ctypes.c_long(1 << 20), ctypes.c_long(4096)) == 0
    refused(errno.ENXIO, os.lseek, f, 0, os.SEEK_DATA); os.posix_fallocate(f, 0, 2 << 20); assert os.fstat(f).st_size == 2 << 20
def nameless_files_get_a_name():
    f = os.open('.', os.O_TMPFILE | os.O_RDWR, 0o640); os.write(f, b'whole'); assert os.listdir() == []
    os.link(f'/proc/self/fd/{f}', 'named', src_dir_fd=f); os.close(f); assert read('named') == 'whole'
def copies_are_whole_and_reach_the_disk():
    data = os.urandom(3 << 20); s = open('a', 'w+b'); s.write(data); s.flush(); s.seek(0); d = open('b', 'w+b'); left = len(data)
    while left: copied = os.copy_file_range(s.fileno(), d.fileno(), left); assert copied > 0, left; left -= copied
    assert open('b', 'rb').read() == data; os.fsync(d.fileno()); os.fdatasync(d.fileno()); assert libc.syncfs(d.fileno()) == 0
def unlinked_files_live_on():
    f = open('f', 'w+'); os.unlink('f'); f.write('still'); f.flush(); f.seek(0); assert f.read() == 'still'
    assert os.fstat(f.fileno()).st_nlink == 0
def locks_exclude_and_wait():
    for lock in fcntl.flock, fcntl.lockf:
        f = open('f', 'w'); lock(f, fcntl.LOCK_EX); ready, told = os.pipe(); child = os.fork()
        if child == 0:
            g = open('f', 'w')
            try: lock(g, fcntl.LOCK_EX | fcntl.LOCK_NB); os._exit(1)
            except BlockingIOError: os.write(told, b'x')
            lock(g, fcntl.LOCK_EX); os._exit(0 if os.path.exists('released') else 2)
        os.read(ready, 1); time.sleep(0.3); write('released'); lock(f, fcntl.LOCK_UN)
        assert os.waitpid(child, 0)[1] == 0, lock; os.unlink('released')
def databases_stay_whole():
    def work(count):
        db = sqlite3.connect('db', timeout=60)
        for at in range(count): db.execute('insert into t values (?, randomblob(500))', (at,)); db.commit()
        db.close()
    db = sqlite3.connect('db', timeout=60); assert db.execute('pragma journal_mode=wal').fetchone() == ('wal',)
    db.execute('create table t (a, b)'); db.commit(); db.close()
    children = []
    for _ in range(3):
        children.append(os.fork())
        if children[-1] == 0: work(15); os._exit(0)
    for child in children: assert os.waitpid(child, 0)[1] == 0
    db = sqlite3.connect('db'); assert db.execute('pragma integrity_check').fetchone() == ('ok',)
    assert db.execute('select count(*) from t').fetchone() == (45,)
";

const NAMES: &str = r"
def sixteen_writers_make_nested_directories():
    failures = []
    def make(writer):
        try:
            for at in range(6):
                os.makedirs(f'{at}/{writer % 4}', exist_ok=True); write(f'{at}/{writer % 4}/{writer}', 'x' * (writer + 1))
        except BaseException as e: failures.append(e)
    threads = [threading.Thread(target=make, args=(n,)) for n in range(16)]
    for t in threads: t.start()
    for t in threads: t.join()
    assert not failures, failures
    for n in range(16): assert [os.stat(f'{at}/{n % 4}/{n}').st_size for at in range(6)] == [n + 1] * 6
def listings_are_whole_while_names_come_and_go():
    for at in range(400): write(f'stay{at}', '')
    seen, handle = [], os.scandir('.')
    for count, entry in enumerate(handle):
        seen.append(entry.name); os.unlink(f'new{count - 1}') if count and count < 100 else None
        if count < 100: write(f'new{count}', '')
    stayed = [name for name in seen if name.startswith('stay')]
    assert len(stayed) == 400 and len(set(seen)) == len(seen)
def everything_is_listed_while_many_files_are_open():
    resource.setrlimit(resource.RLIMIT_NOFILE, (1600, 1600))
    held = [open(f'f{at}', 'w') for at in range(1100)]
    assert len(os.listdir()) == 1100 and len(list(os.scandir())) == 1100
    try:
        while True: held.append(open('f0'))
    except OSError as e: assert e.errno == errno.EMFILE
    for f in held[:200]: os.unlink(f.name) if f.name != 'f0' else None
    del held[:]; assert len(os.listdir()) == 901; write('after'); assert read('after') == 'x'
";

#[test]
fn attributes_links_and_special_files_are_a_root_file_systems() {
    let (mount, _) = volume("attributes");
    all_ok(Container::new(images::PYTHON).flag(&mount), ATTRIBUTES, &["/root", "/data"]);
}

#[test]
fn content_mappings_holes_locks_and_databases_are_right() {
    let (mount, _) = volume("content");
    all_ok(Container::new(images::PYTHON).flag(&mount), CONTENT, &["/root", "/data"]);
}

#[test]
fn names_are_whole_under_parallel_change_and_without_descriptors() {
    let (mount, at) = volume("names");
    // Privileged: more files than the image's limit are opened.
    all_ok(Container::new(images::PYTHON).flag("--privileged").flag(&mount), NAMES, &["/data"]);
    let found = shell(&format!("ls {at}/everything_is_listed_while_many_files_are_open | wc -l")).stdout;
    assert_eq!(found.trim(), "902");
}

#[test]
fn overlay_in_the_guest_keeps_its_upper_on_a_volume() {
    let (mount, at) = volume("overlay");
    let script = "set -e; cd /data; mkdir -p low/dir up work merged; echo 1 > low/a; echo 2 > low/dir/b; \
                  mount -t overlay overlay -o lowerdir=low,upperdir=up,workdir=work,userxattr merged; \
                  cd merged; rm a; rm -r dir; mkdir dir; echo new > dir/n; mv dir/n x; cd ..; \
                  ls merged/dir; cat merged/x; test ! -e merged/a; umount merged; echo fine";
    let outcome = Container::new(images::DEBIAN).flag("--privileged").flag(&mount).script(script).run().expect_code(0);
    assert_eq!(outcome.stdout, "new\nfine\n");
    assert_eq!(shell(&format!("stat -c '%F %t:%T' {at}/up/a")).stdout, "character special file 0:0\n");
}

/// Follows a container that says with a file `N` in its volume that it is ready for what the host does next.
struct Steps {
    at: String,
    ctr: Child,
}

impl Steps {
    fn host(&self, number: u32, script: &str) {
        let at = &self.at;
        let wait = format!("timeout 300 sh -c 'until test -e {at}/{number}; do sleep 0.1; done'");
        let _ = shell(&format!("{wait} && cd {at} && {script} && touch {at}/go{number}")).expect_code(0);
    }
}

#[test]
fn what_the_host_changes_in_a_volume_is_seen() {
    let (mount, at) = volume("changes");
    let _ = shell(&format!("cd {at}; echo old > f; mkdir d; echo in > d/x; echo keep > open; echo gone > rm"))
        .expect_code(0);
    let guest = "cd /data; exec 3< open; cat f d/x rm > /dev/null
        turn() { touch $1; until test -e go$1; do sleep 0.1; done; sleep 1.2; }
        turn 1; cat f; test -e rm || echo removed; cat e/x; test -e d || echo moved; cat new
        cat <&3; turn 2; cat f; stat -c %a f; ls | grep -c '^many'";
    let container = Container::new(images::BUSYBOX).flag(&mount).script(guest);
    let steps = Steps { at: at.clone(), ctr: container.start() };
    steps.host(
        1,
        "echo replaced > n && mv n f && rm rm && mv d e && echo appeared > new && echo changed > o && mv o open",
    );
    steps.host(2, "echo appended >> f && chmod 600 f && for i in $(seq 50); do touch many$i; done");
    let output = steps.ctr.wait_with_output().expect("ctr ends");
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    let expected = "replaced\nremoved\nin\nmoved\nappeared\nkeep\nreplaced\nappended\n600\n50\n";
    assert_eq!(printed, expected, "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn a_walk_over_a_big_tree_needs_few_descriptors() {
    let (mount, at) = volume("big");
    let _ = shell(&format!("cd {at}; seq 1 40 | xargs mkdir; for d in *; do (cd $d; seq 1 40 | xargs touch); done"))
        .expect_code(0);
    let container = Container::new(images::BUSYBOX).flag(&mount);
    let guest = "cd /data; find . | wc -l; find . -type f -exec cat {} + ; touch 1000; \
                 until test -e go1000; do sleep 0.1; done; ls | wc -l";
    let steps = Steps { at: at.clone(), ctr: container.script(guest).start() };
    steps.host(1000, "true");
    let held = Victim::Vmm.descriptors().len();
    let output = steps.ctr.wait_with_output().expect("ctr ends");
    // What was listed twice: the marks are two more.
    assert_eq!(String::from_utf8_lossy(&output.stdout), "1641\n42\n", "{}", String::from_utf8_lossy(&output.stderr));
    assert!(held < 1400, "the VMM has {held} files open");
}
