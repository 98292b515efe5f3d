//! Spawning a VMM: into namespaces of its own, with two sockets and a log pipe, and nothing else of ours.
//!
//! ```text
//!   owner                                        VMM
//!   thread in new namespaces ── spawn ──►        process 1 of its pid namespace, still root of the host
//!                                                leaves the host's files, enters a user namespace
//!   writes its id maps       ◄── Born ──
//!                            ── first request ►  drops what is left of its privileges, then reads on
//! ```
//!
//! Mount, pid, network, IPC, UTS and cgroup namespaces are made here, on a thread that ends with the call: a process
//! cannot put itself into a pid namespace, and a program that has been started in one need not be started twice. The
//! user namespace is made by the VMM itself, last, because mounts can only be left by who owns them. Its maps can only be
//! written from outside: [`Vmm::map_ids`].
//!
//! Invariant: a VMM that is not mapped owns nothing. Until its first request it has done nothing for a guest.

use std::{
    fs, io,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::Duration,
};

use nix::sched::{CloneFlags, unshare};

use crate::{Channel, ChannelError, Client, ClientError, EventStream};

/// Why there is no VMM.
#[derive(Debug, thiserror::Error)]
pub enum SpawnError {
    /// The program cannot be run.
    #[error("cannot run the VMM {}: {source}", path.display())]
    Run {
        /// The program.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// This process may not make namespaces, or there are too many.
    #[error("cannot make the namespaces of the VMM's jail: {0}; run as root, and see /proc/sys/user/max_*_namespaces")]
    Namespaces(#[source] nix::Error),
    /// The sockets to it.
    #[error("cannot make the sockets to the VMM: {0}")]
    Channel(#[from] ChannelError),
    /// The client on the control socket.
    #[error("cannot prepare the VMM's control socket: {0}")]
    Client(#[from] ClientError),
}

/// The host ids that a VMM's ids 0, 1, 2… stand for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IdRange {
    /// The first one.
    pub base: u32,
    /// How many.
    pub count: u32,
}

impl IdRange {
    /// Every id stands for itself: for files on file systems that cannot be idmapped.
    pub const IDENTITY: Self = Self { base: 0, count: u32::MAX };
}

/// A VMM that has been spawned and asked for nothing yet.
#[derive(Debug)]
pub struct Vmm {
    /// The process; its standard error is its log.
    pub child: Child,
    /// To ask it.
    pub client: Client,
    /// To hear it.
    pub events: EventStream,
}

/// Spawns `program`. Waits for nothing but its exec; its answers later may each take `deadline`.
pub fn spawn(program: &Path, log_level: &str, deadline: Duration) -> Result<Vmm, SpawnError> {
    let (control, its_control) = Channel::pair()?;
    let (events, its_events) = Channel::pair()?;
    let mut command = Command::new(program);
    command
        .env_clear()
        .env("NACRE_VMM_LOG", log_level)
        .stdin(its_control)
        .stdout(its_events)
        .stderr(Stdio::piped())
        .process_group(0);
    let child = thread::scope(|scope| {
        let born = scope.spawn(|| {
            unshare(JAIL).map_err(SpawnError::Namespaces)?;
            command.spawn().map_err(|source| SpawnError::Run { path: program.to_owned(), source })
        });
        born.join().expect("the thread has nothing to panic about")
    })?;
    Ok(Vmm { child, client: Client::new(control, deadline)?, events: EventStream::new(events) })
}

/// All namespaces but the user's, which the VMM enters itself.
const JAIL: CloneFlags = CloneFlags::CLONE_NEWNS
    .union(CloneFlags::CLONE_NEWPID)
    .union(CloneFlags::CLONE_NEWNET)
    .union(CloneFlags::CLONE_NEWIPC)
    .union(CloneFlags::CLONE_NEWUTS)
    .union(CloneFlags::CLONE_NEWCGROUP);

/// Gives the VMM's user namespace its ids. Legal once, after [`crate::Event::Born`] and before the first request.
pub fn map_ids(pid: u32, range: IdRange) -> io::Result<()> {
    let map = format!("0 {} {}", range.base, range.count);
    // One write each: the kernel takes a map whole or not at all. Groups first: a process without a user map is nobody.
    fs::write(format!("/proc/{pid}/gid_map"), &map)?;
    fs::write(format!("/proc/{pid}/uid_map"), &map)
}
