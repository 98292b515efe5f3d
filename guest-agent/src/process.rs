//! The parent's side of a container's init: clone it, hear that it is ready, let it go.
//!
//! ```text
//!   spawn ──▶ Gate (child prepares) ── ready() ──▶ Gate (child waits) ── go() ──▶ the program runs
//!                     │                                   │
//!                     └── Err: the child's own text       └── Err: the exec's own text
//! ```
//!
//! The child is always reaped through [`crate::reap`], whatever happens to the gate. Dropping a gate before `go` ends
//! the child.

use std::{
    fs, io,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::net::UnixStream as StdStream,
    },
    path::Path,
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::UnixStream,
};

use crate::{
    cgroup::Cgroup,
    init::{self, Failure, GO, Inherited, Kind, MAPPED, READY},
    reap::{ExitWatch, Reaper},
    spec::{IdMaps, IdRange, Plan},
    sys,
};

/// A failure text is one path and some words; more than this is not read.
const MAX_FAILURE: u64 = 16 * 1024;

/// Why init could not be started.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The agent's side failed.
    #[error("cannot {what}: {error}")]
    #[expect(missing_docs, reason = "named by the message")]
    System { what: &'static str, error: io::Error },
    /// The child said why.
    #[error("unable to start container process: {}", .0.text)]
    Init(Failure),
    /// The child ended without a word: it was killed, or it panicked (see the console).
    #[error(
        "unable to start container process: init ended before it was ready: it was killed, or the console says why"
    )]
    Died,
}

fn system(what: &'static str) -> impl FnOnce(io::Error) -> Error {
    move |error| Error::System { what, error }
}

/// The init process of a container.
#[derive(Debug)]
pub struct Init {
    /// Its id in the guest.
    pub pid: u32,
    /// Signals go through this: it can never mean another process.
    pub pidfd: OwnedFd,
    /// Its end.
    pub exit: ExitWatch,
}

/// The agent's end of the conversation with a child that has not yet exec'd.
#[derive(Debug)]
pub struct Gate(UnixStream);

/// Clones the init process of `plan` into `cgroup` with these standard streams, and into the process namespace of
/// `pod` if that is given.
pub fn spawn(
    plan: &Plan,
    shares: &Path,
    cgroup: &Cgroup,
    stdio: [OwnedFd; 3],
    pod: Option<BorrowedFd<'_>>,
    reaper: &Reaper,
) -> Result<(Init, Gate), Error> {
    let (ours, theirs) = StdStream::pair().map_err(system("make the gate to init"))?;
    ours.set_nonblocking(true).map_err(system("make the gate to init"))?;
    let cgroup = cgroup.open().map_err(system("open the container's cgroup"))?;
    let inherited = Inherited { plan, shares, stdio, gate: theirs.into() };
    let clone = move || sys::clone_child(plan.namespaces, Some(cgroup.as_fd()), move || init::run(inherited));
    let child = match pod {
        Some(pod) => sys::with_pid_namespace_of(pod, clone).map_err(system("enter the pod's process namespace"))?,
        None => clone(),
    };
    let child = child.map_err(system("clone init with its namespaces"))?;
    let exit = reaper.watch(child.pid);
    if let Some(maps) = &plan.id_maps {
        write_id_maps(child.pid, maps).map_err(system("write the id maps of the user namespace"))?;
        rustix::io::write(&ours, &[MAPPED]).map_err(|e| system("tell init of its id maps")(e.into()))?;
    }
    let gate = Gate(UnixStream::from_std(ours).map_err(system("watch the gate to init"))?);
    Ok((Init { pid: child.pid, pidfd: child.pidfd, exit }, gate))
}

fn write_id_maps(pid: u32, maps: &IdMaps) -> io::Result<()> {
    let line = |range: &IdRange| format!("{} {} {}\n", range.container, range.guest, range.size);
    fs::write(format!("/proc/{pid}/uid_map"), maps.uid.iter().map(line).collect::<String>())?;
    fs::write(format!("/proc/{pid}/gid_map"), maps.gid.iter().map(line).collect::<String>())
}

impl Gate {
    /// Waits until init is prepared.
    pub async fn ready(&mut self) -> Result<(), Error> {
        match self.next().await? {
            Some(READY) => Ok(()),
            Some(kind) => Err(self.failure(kind).await),
            None => Err(Error::Died),
        }
    }

    /// Lets init exec and waits until it has.
    pub async fn go(mut self) -> Result<(), Error> {
        // A child that is gone has closed its end: the read below tells that and more.
        let _ = self.0.write_all(&[GO]).await;
        match self.next().await? {
            // The exec closed the other end; or a signal ended init just now, which its status will tell.
            None => Ok(()),
            Some(kind) => Err(self.failure(kind).await),
        }
    }

    async fn next(&mut self) -> Result<Option<u8>, Error> {
        let mut byte = [0];
        match self.0.read(&mut byte).await {
            Ok(0) => Ok(None),
            Ok(_) => Ok(Some(byte[0])),
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => Ok(None),
            Err(error) => Err(system("hear from init")(error)),
        }
    }

    async fn failure(&mut self, kind: u8) -> Error {
        let mut text = Vec::new();
        // What was read until an error is still the best there is.
        let _ = (&mut self.0).take(MAX_FAILURE).read_to_end(&mut text).await;
        Error::Init(Failure { kind: Kind::from_byte(kind), text: String::from_utf8_lossy(&text).into_owned() })
    }
}
