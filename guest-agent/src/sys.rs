//! The system calls that have no safe wrapper: the agent's only unsafe code.
//!
//! Each function is safe to call; what it relies on stands in its SAFETY list. Two invariants belong to the whole
//! program and not to a single call:
//! - the agent has one thread (see `lib.rs`), so a child made by [`clone_child`] finds every lock free;
//! - the child never returns from [`clone_child`]: it execs or ends by [`exit`], so no destructor and no `atexit`
//!   handler of the agent runs twice.
#![expect(unsafe_code)]

use std::{
    ffi::{CStr, CString},
    fs::File,
    io,
    os::fd::{AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd},
    ptr,
};

use tokio::io::{Interest, unix::AsyncFd};

/// Of clone3; the constant of libc has the wrong width.
const CLONE_INTO_CGROUP: u64 = 1 << 33;

/// A process just cloned, seen from its parent.
#[derive(Debug)]
pub struct Child {
    /// Its process id here.
    pub pid: u32,
    /// A handle that never means another process.
    pub pidfd: OwnedFd,
}

/// Clones this process into the cgroup `cgroup` with the namespaces `flags` (CLONE_NEW*) and runs `body` in the
/// child, which exits with what it returns.
pub fn clone_child(flags: u64, cgroup: Option<BorrowedFd<'_>>, body: impl FnOnce() -> i32) -> io::Result<Child> {
    let mut pidfd: RawFd = -1;
    // SAFETY: clone_args holds integers only; all zeros is its documented "nothing asked for".
    let mut args: libc::clone_args = unsafe { std::mem::zeroed() };
    args.flags = flags | libc::CLONE_PIDFD as u64;
    args.pidfd = ptr::from_mut(&mut pidfd) as u64;
    args.exit_signal = libc::SIGCHLD as u64;
    if let Some(fd) = cgroup {
        args.flags |= CLONE_INTO_CGROUP;
        args.cgroup = fd.as_raw_fd() as u64;
    }
    // SAFETY:
    // - `args` is a valid clone_args of the size given, and lives across the call;
    // - CLONE_VM is not among the flags, so the child has its own copy of memory and stack;
    // - the process has one thread, so the copy holds no lock of a thread that does not exist in it;
    // - the child runs `body` and exits, so this frame is not left twice.
    let pid = unsafe { libc::syscall(libc::SYS_clone3, &mut args, size_of::<libc::clone_args>()) };
    match pid {
        -1 => Err(io::Error::last_os_error()),
        0 => exit(body()),
        pid => {
            // SAFETY: the kernel stored a new descriptor in `pidfd` (CLONE_PIDFD) and nobody else owns it.
            let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd) };
            Ok(Child { pid: pid as u32, pidfd })
        }
    }
}

/// Ends this process at once: no destructors, no `atexit` handlers.
pub fn exit(status: i32) -> ! {
    // SAFETY: _exit has no preconditions.
    unsafe { libc::_exit(status) }
}

/// In a child of [`clone_child`]: makes `stdio` its descriptors 0 to 2, `gate` number 3 (the only one to close on
/// exec), and closes every other descriptor that it has a copy of. Returns the new gate.
pub fn keep_only(stdio: [OwnedFd; 3], gate: OwnedFd) -> io::Result<OwnedFd> {
    const GATE: RawFd = 3;
    let check = |result: libc::c_int| if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) };
    // Into plain numbers: the descriptors are closed by number below.
    let stdio = stdio.map(IntoRawFd::into_raw_fd);
    let gate = gate.into_raw_fd();
    // SAFETY:
    // - the numbers were owned by this function, and are open;
    // - in this process nothing else uses a descriptor again: it is a copy of the agent that only runs towards its
    //   exec, with what it holds from here on, so no owner of a descriptor closed here is ever dropped;
    // - sources are above 2 (the agent's own 0 to 2 are open), and number 3 is overwritten after the last source that
    //   can be number 3 was copied.
    unsafe {
        for (target, source) in stdio.iter().enumerate() {
            check(libc::dup2(*source, target as RawFd))?;
        }
        if gate != GATE {
            check(libc::dup3(gate, GATE, libc::O_CLOEXEC))?;
        }
        check(libc::close_range(GATE as u32 + 1, u32::MAX, 0))?;
        Ok(OwnedFd::from_raw_fd(GATE))
    }
}

/// Replaces this process by the program at `path`; returns only the error.
pub fn exec(path: &CStr, args: &[CString], env: &[CString]) -> io::Error {
    let pointers = |list: &[CString]| list.iter().map(|s| s.as_ptr()).chain([ptr::null()]).collect::<Vec<_>>();
    let (argv, envp) = (pointers(args), pointers(env));
    // SAFETY:
    // - `path` and every element are NUL-terminated and outlive the call;
    // - both arrays end with a null pointer.
    unsafe { libc::execve(path.as_ptr(), argv.as_ptr(), envp.as_ptr()) };
    io::Error::last_os_error()
}

/// Gives SIGPIPE back its default action (Rust's start-up ignores it, and an ignored signal stays ignored over exec).
pub fn restore_sigpipe() {
    // SAFETY: SIG_DFL is a valid disposition; no handler of ours is involved.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
}

/// Sets `attributes` (MOUNT_ATTR_*) and, when not 0, `propagation` (MS_*) on the mount at `fd` itself, or on all
/// below it too.
pub fn set_mount_attributes(fd: BorrowedFd<'_>, attributes: u64, propagation: u64, recursive: bool) -> io::Result<()> {
    let mut attr = libc::mount_attr { attr_set: attributes, attr_clr: 0, propagation, userns_fd: 0 };
    if attributes & (libc::MOUNT_ATTR_STRICTATIME | libc::MOUNT_ATTR_NOATIME) != 0 {
        attr.attr_clr = libc::MOUNT_ATTR__ATIME;
    }
    let flags = libc::AT_EMPTY_PATH | if recursive { libc::AT_RECURSIVE } else { 0 };
    // SAFETY:
    // - the path is a NUL-terminated literal, `fd` is open;
    // - `attr` is a valid mount_attr of the size given and lives across the call.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            fd.as_raw_fd(),
            c"".as_ptr(),
            flags,
            &mut attr,
            size_of::<libc::mount_attr>(),
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Sends `signal` (0 to 64) to the process `pidfd`.
pub fn signal_pidfd(pidfd: BorrowedFd<'_>, signal: i32) -> io::Result<()> {
    // SAFETY: `pidfd` is open; the null siginfo means the default one; the kernel checks the number.
    let result = unsafe {
        libc::syscall(libc::SYS_pidfd_send_signal, pidfd.as_raw_fd(), signal, ptr::null::<libc::siginfo_t>(), 0)
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Sends `signal` (0 to 64) to the process `pid`.
pub fn signal_pid(pid: u32, signal: i32) -> io::Result<()> {
    // 0 and negative numbers would mean groups of processes, the agent's own among them.
    let pid = i32::try_from(pid).ok().filter(|pid| *pid > 0).ok_or(io::ErrorKind::InvalidInput)?;
    // SAFETY: kill has no memory preconditions.
    if unsafe { libc::kill(pid, signal) } == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Runs `work` while children are made in the process namespace of `pidfd` and not in ours.
pub fn with_pid_namespace_of<T>(pidfd: BorrowedFd<'_>, work: impl FnOnce() -> T) -> io::Result<T> {
    let own = File::open("/proc/self/ns/pid")?;
    let children_in = |fd: RawFd| {
        // SAFETY: `fd` is open; joining a process namespace concerns later children only, nothing of this process.
        if unsafe { libc::setns(fd, libc::CLONE_NEWPID) } == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    };
    children_in(pidfd.as_raw_fd())?;
    let result = work();
    children_in(own.as_raw_fd())?;
    Ok(result)
}

/// Gives this process a cgroup namespace whose root is the cgroup it is in.
pub fn new_cgroup_namespace() -> io::Result<()> {
    // SAFETY: unsharing this namespace changes what paths in /proc look like, nothing in memory or descriptors.
    if unsafe { libc::unshare(libc::CLONE_NEWCGROUP) } == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Brings the interface `lo` of this network namespace up.
pub fn loopback_up(socket: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: ifreq is plain data; all zeros is a valid value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    request.ifr_name[0] = b'l' as libc::c_char;
    request.ifr_name[1] = b'o' as libc::c_char;
    request.ifr_ifru.ifru_flags = (libc::IFF_UP | libc::IFF_RUNNING) as libc::c_short;
    // SAFETY: `socket` is open; SIOCSIFFLAGS reads an ifreq, which lives across the call.
    let result = unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS, &request) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Watches `file` for exceptional readiness (EPOLLPRI), as cgroup.events reports changes.
pub fn watch_priority(file: File) -> io::Result<AsyncFd<File>> {
    // SAFETY: a `File` returns the same descriptor for its whole life, and the `AsyncFd` owns it.
    Ok(unsafe { AsyncFd::register_with_interest(file, Interest::PRIORITY) }?)
}

/// Sets the policy by which this thread gets the guest's CPUs.
pub fn set_scheduler(policy: &libc::sched_attr) -> io::Result<()> {
    // SAFETY: the kernel reads a sched_attr, whose size its first field tells, and which lives across the call.
    let result = unsafe { libc::syscall(libc::SYS_sched_setattr, 0, ptr::from_ref(policy), 0) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Sets the I/O priority (class and level as ioprio_set(2) has them in one number) of this thread.
pub fn set_io_priority(priority: u32) -> io::Result<()> {
    const IOPRIO_WHO_PROCESS: libc::c_int = 1;
    // SAFETY: numbers only.
    let result = unsafe { libc::syscall(libc::SYS_ioprio_set, IOPRIO_WHO_PROCESS, 0, priority) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Sets the execution domain of this process.
pub fn set_personality(domain: u32) -> io::Result<()> {
    // SAFETY: the domains that a plan can have change what later programs are told, nothing in this one's memory.
    let result = unsafe { libc::personality(libc::c_ulong::from(domain)) };
    if result >= 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Installs a seccomp filter on this thread.
pub fn install_seccomp(program: &[libc::sock_filter], flags: u64) -> io::Result<()> {
    let len = u16::try_from(program.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
    let program = libc::sock_fprog { len, filter: program.as_ptr().cast_mut() };
    // SAFETY:
    // - `program` points to `len` instructions that outlive the call; the kernel only reads them and checks them;
    // - the operation changes what this thread may call, nothing in its memory.
    let result = unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, flags, &program) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
