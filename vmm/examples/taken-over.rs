//! A VMM that its guest has taken over, for `tests/jail.rs`: it goes into the jail as `nacre-vmm` does, and then tries to get
//! out. It is handed one share; the file `attempt` in it says what to try.
//!
//! `reach PID PORT NAME`: everything that the namespaces and capabilities must keep out of reach, without any list of
//! system calls: a process of the host, a TCP port that it listens on, a Unix socket of that name. It writes a line to
//! its log for each thing that it could reach, and `done`.
//! `call`: one system call that is not on the list of the role.
#![forbid(unsafe_code)]

use std::{
    fs,
    io::{Read, stdin, stdout},
    net::TcpStream,
    os::{
        fd::{AsFd, OwnedFd},
        linux::net::SocketAddrExt,
        unix::net::{SocketAddr, UnixStream},
    },
};

use nix::{sys::ptrace, unistd::Pid};
use rustix::{
    fs::{AtFlags, CWD, FileType, Mode, OFlags, makedev, mknodat, open, openat, statat},
    mount::{MountFlags, UnmountFlags, mount, mount_remount, unmount},
    process::{Signal, kill_process},
    system::sethostname,
    thread::{Uid, set_thread_res_uid},
};
use vmm::jail::{self, Role};
use vmm_api::{Channel, Event, Request};

fn main() {
    let control = Channel::new(stdin().as_fd().try_clone_to_owned().expect("control"));
    let events = Channel::new(stdout().as_fd().try_clone_to_owned().expect("events"));
    kvm::trap::install().expect("handler");
    let jail = jail::enter().expect("enter");
    events.send(&Event::Born, &[]).expect("event");
    control.wait().expect("request");
    jail.close().expect("close");
    let (_request, mut fds): (Request, _) = control.recv().expect("request");
    let share = fds.remove(0);
    let words = read(&share, "attempt");
    match words.split_whitespace().collect::<Vec<_>>().as_slice() {
        ["reach", pid, port, name] => {
            reach_files(&share);
            reach_others(pid.parse().expect("pid"), port, name);
            gain_power(&share);
        }
        _ => {
            Role::Files.restrict().expect("list");
            let _ = TcpStream::connect("127.0.0.1:1");
        }
    }
    eprintln!("done");
}

fn read(directory: &OwnedFd, name: &str) -> String {
    let mut text = String::new();
    let file = openat(directory, name, OFlags::RDONLY, Mode::empty()).expect("open");
    fs::File::from(file).read_to_string(&mut text).expect("read");
    text
}

/// Says what was reached although it must not be.
fn out_of_reach<T, E>(what: &str, outcome: Result<T, E>) {
    if outcome.is_ok() {
        eprintln!("reached: {what}");
    }
}

fn reach_files(share: &OwnedFd) {
    for path in ["/etc/passwd", "/dev/kvm", "/dev/null", "/proc/kcore", "/proc/sysrq-trigger", "/proc/sys", "/sys"] {
        out_of_reach(path, open(path, OFlags::PATH, Mode::empty()));
    }
    for path in ["../etc/passwd", "../../../../../../etc/passwd", "null"] {
        out_of_reach(path, openat(share, path, OFlags::RDONLY, Mode::empty()));
    }
    out_of_reach("a new file in /", fs::write("/x", "x"));
    let names = |path| fs::read_dir(path).expect("list").map(|one| one.expect("entry").file_name()).collect::<Vec<_>>();
    if names("/") != ["proc"] {
        eprintln!("reached: {:?} in /", names("/"));
    }
    let strangers = names("/proc")
        .into_iter()
        .filter(|name| name.to_str().is_some_and(|name| name != "1" && name.parse::<u32>().is_ok()));
    strangers.for_each(|pid| eprintln!("reached: process {pid:?} in /proc"));
    let same = |path| statat(share, path, AtFlags::empty()).expect("stat").st_ino;
    if same("..") != same(".") {
        eprintln!("reached: the directory above the share");
    }
}

fn reach_others(pid: i32, port: &str, name: &str) {
    let process = rustix::process::Pid::from_raw(pid).expect("a pid");
    out_of_reach("a host process, by a signal", kill_process(process, Signal::CONT));
    out_of_reach("a host process, by ptrace", ptrace::attach(Pid::from_raw(pid)));
    out_of_reach("the parent process", rustix::process::getppid().ok_or(()));
    out_of_reach("a TCP port of the host", TcpStream::connect(format!("127.0.0.1:{port}")));
    out_of_reach("a Unix socket, by path", UnixStream::connect(name));
    let address = SocketAddr::from_abstract_name(name).expect("name");
    out_of_reach("a Unix socket, by abstract name", UnixStream::connect_addr(&address));
}

fn gain_power(share: &OwnedFd) {
    let none = MountFlags::empty();
    out_of_reach("a mount", mount("none", "/proc", "tmpfs", none, None));
    out_of_reach("an unmount", unmount("/proc", UnmountFlags::DETACH));
    out_of_reach("a writable root", mount_remount("/", MountFlags::BIND, ""));
    let mode = Mode::from_raw_mode(0o666);
    out_of_reach("a device", mknodat(share, "mem", FileType::CharacterDevice, mode, makedev(1, 1)));
    out_of_reach("a device in /", mknodat(CWD, "/mem", FileType::CharacterDevice, mode, makedev(1, 1)));
    out_of_reach("the host's name", sethostname(b"taken"));
    let user = Uid::from_raw(1000);
    out_of_reach("another user", set_thread_res_uid(user, user, user));
}
