//! The jail, from inside: `examples/taken-over.rs` is the prisoner. Runs as root; needs no KVM.

use std::{
    fs,
    io::Read,
    net::TcpListener,
    os::{
        fd::AsFd,
        linux::net::SocketAddrExt,
        unix::net::{SocketAddr, UnixListener},
    },
    path::{Path, PathBuf},
    thread::sleep,
    time::{Duration, Instant},
};

use rustix::fs::{CWD, FileType, Mode, OFlags, makedev, mknodat, open};
use share_mount::Access;
use vmm_api::{Event, IdRange, ShareName, Vmm, map_ids};

const DEADLINE: Duration = Duration::from_secs(10);

/// Cargo puts examples beside the folder of test programs.
fn prisoner() -> PathBuf {
    let test = std::env::current_exe().expect("path");
    let profile = test.parent().and_then(Path::parent).expect("target folder");
    profile.join("examples/taken-over")
}

/// Lets the prisoner try what `attempt` says in a share; its exit code and its log.
fn try_to_get_out(attempt: &str) -> (Option<i32>, String) {
    let directory = tempfile::tempdir().expect("directory");
    fs::write(directory.path().join("attempt"), attempt).expect("write");
    let null = directory.path().join("null");
    mknodat(CWD, &null, FileType::CharacterDevice, Mode::from_raw_mode(0o666), makedev(1, 3)).expect("root");
    let source = open(directory.path(), OFlags::PATH, Mode::empty()).expect("open");
    let share = share_mount::detach(&source, directory.path(), Access::default()).expect("share");
    let mut vmm = vmm_api::spawn(&prisoner(), "info", DEADLINE).expect("spawn");
    assert_eq!(first_event(&vmm), Event::Born);
    map_ids(vmm.child.id(), IdRange::IDENTITY).expect("map");
    let name = ShareName::new("r0").expect("name");
    // It answers nothing: it ends.
    let _ = vmm.client.attach_share(name, share.as_fd(), false);
    let mut log = String::new();
    vmm.child.stderr.take().expect("log").read_to_string(&mut log).expect("read");
    (vmm.child.wait().expect("wait").code(), log)
}

fn first_event(vmm: &Vmm) -> Event {
    let start = Instant::now();
    while start.elapsed() < DEADLINE {
        if let Some((event, _)) = vmm.events.try_next().expect("event") {
            return event;
        }
        sleep(Duration::from_millis(1));
    }
    panic!("no event within {DEADLINE:?}");
}

#[test]
fn vmm_that_was_taken_over_reaches_nothing_of_the_host() {
    let tcp = TcpListener::bind("127.0.0.1:0").expect("listen");
    let port = tcp.local_addr().expect("address").port();
    let directory = tempfile::tempdir().expect("directory");
    let path = directory.path().join("socket");
    let _by_path = UnixListener::bind(&path).expect("listen");
    let name = path.to_str().expect("text");
    let abstract_name = SocketAddr::from_abstract_name(name).expect("name");
    let _by_name = UnixListener::bind_addr(&abstract_name).expect("listen");
    let (code, log) = try_to_get_out(&format!("reach {} {port} {name}", std::process::id()));
    assert_eq!((code, log.as_str()), (Some(0), "done\n"));
}

#[test]
fn system_call_that_is_on_no_list_is_named_and_ends_the_vmm() {
    let (code, log) = try_to_get_out("call");
    assert!(log.contains("forbidden system call socket (number 41); the machine ends"), "{log}");
    assert_eq!(code, Some(159));
}

#[test]
fn vmm_that_is_not_jailed_does_not_start() {
    let output = std::process::Command::new(env!("CARGO_BIN_EXE_nacre-vmm")).output().expect("run");
    assert!(!output.status.success());
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(text.contains("not started in namespaces of its own"), "{text}");
}
