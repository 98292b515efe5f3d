//! The containers of this guest and what can be asked of them.
//!
//! ```text
//!             create                start                init exits         delete
//!   (nothing) ──────▶ Created ──────────────▶ Running ──────────────▶ Exited ──────▶ (nothing)
//!                 │        │                                            ▲     ▲
//!                 ▼        └── init is killed before its start ─────────┘     │
//!              failed: nothing is left            output drained: waiters go ─┘
//! ```
//!
//! - A container is in the registry from the end of a successful create to the beginning of delete. What `create` made
//!   before a failure it takes back itself.
//! - Paused is no state of its own: the cgroup's processes do not run, and that is all. SIGKILL and delete work as ever.
//! - "Exited" for signals is the moment of init's end; "exited" for waiters comes later, when the output is written.
//! - Any number of waiters, at any time until delete; those who wait during a delete are answered too.
//! - Delete from any state: it kills, then cleans up. Of an unknown id it is a success.
//! - No lock is held across an await.

use std::{
    collections::HashMap,
    io,
    os::fd::AsFd,
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use agent_proto::CreateContainerRequest;
use rustix::fs::{Mode, OFlags, open, syncfs};
use tokio::sync::{Notify, watch};

use crate::{
    cgroup::Cgroup,
    link::Link,
    process::{self, Gate, Init},
    reap::{Exit, ExitWatch, Reaper, ended},
    spec::{self, Plan},
    stdio::{self, Pumps},
    sys,
};

/// Longest id: containerd's limit.
const MAX_ID: usize = 76;
/// Highest signal number.
const MAX_SIGNAL: u32 = 64;
const SIGKILL: u32 = libc::SIGKILL as u32;

/// Why a request about a container failed.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "named by the messages")]
pub enum Error {
    #[error(
        "{0:?} cannot be a container id: it must be 1 to {MAX_ID} of A-Z a-z 0-9 . _ - and begin with a letter or digit"
    )]
    Id(String),
    #[error("container {0:?} already exists")]
    Exists(String),
    #[error("container not found: {0:?}")]
    NotFound(String),
    #[error("process already finished")]
    Finished,
    #[error("container {0:?} was started already")]
    Started(String),
    #[error("signal {0} does not exist: 0 to {MAX_SIGNAL} do")]
    Signal(u32),
    #[error(transparent)]
    Spec(#[from] spec::Error),
    #[error(transparent)]
    Stdio(#[from] stdio::Error),
    #[error("cannot {what} the cgroup of container {id:?}: {error}")]
    Cgroup { what: &'static str, id: String, error: io::Error },
    #[error("cannot set {file} of container {id:?} to {value:?}: {error}")]
    Limit { id: String, file: String, value: String, error: io::Error },
    #[error("OCI runtime create failed: {0}")]
    Create(process::Error),
    #[error("OCI runtime start failed: {0}")]
    Start(process::Error),
    #[error("cannot signal container {id:?}: {error}")]
    Kill { id: String, error: io::Error },
    #[error("cannot {what} container {id:?}: {error}")]
    Freeze { what: &'static str, id: String, error: io::Error },
    #[error("cannot write the files of container {id:?} back to the host: {error}")]
    Sync { id: String, error: io::Error },
}

/// Where things are in the guest.
#[derive(Clone, Debug)]
pub struct Places {
    /// All shares, by name.
    pub shares: PathBuf,
    /// The root of the cgroup tree.
    pub cgroup: PathBuf,
    /// The host.
    pub link: Link,
}

/// All containers.
pub struct Containers {
    places: Places,
    reaper: Reaper,
    all: Mutex<HashMap<String, Arc<Container>>>,
}

struct Container {
    init: Init,
    cgroup: Arc<Cgroup>,
    root_share: String,
    is_sandbox: bool,
    /// There until start.
    gate: Mutex<Option<Gate>>,
    /// Set once init is gone and its output written.
    finished: ExitWatch,
    /// Told by delete: stop writing output.
    torn_down: Arc<Notify>,
}

impl Containers {
    /// None yet.
    pub fn new(places: Places, reaper: Reaper) -> Self {
        Self { places, reaper, all: Mutex::default() }
    }

    fn all(&self) -> MutexGuard<'_, HashMap<String, Arc<Container>>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn get(&self, id: &str) -> Result<Arc<Container>, Error> {
        self.all().get(id).cloned().ok_or_else(|| Error::NotFound(id.to_owned()))
    }

    /// Prepares a container up to the exec; returns init's pid.
    pub async fn create(&self, request: &CreateContainerRequest) -> Result<u32, Error> {
        let id = &request.id;
        check_id(id)?;
        if self.all().contains_key(id) {
            return Err(Error::Exists(id.clone()));
        }
        let plan = spec::reduce(&request.spec, &request.root_share, &request.share_mounts)?;
        let cgroup = Cgroup::create(&self.places.cgroup, id).map_err(|error| match error.kind() {
            io::ErrorKind::AlreadyExists => Error::Exists(id.clone()),
            _ => Error::Cgroup { what: "create", id: id.clone(), error },
        })?;
        match self.launch(request, &plan, &cgroup).await {
            Ok((init, gate, pumps)) => {
                let pid = init.pid;
                self.all().insert(id.clone(), Arc::new(supervised(init, gate, pumps, cgroup, plan)));
                Ok(pid)
            }
            Err(error) => {
                if let Err(left) = cgroup.remove().await {
                    log::warn!("the cgroup of container {id:?}, which failed to be created, stays behind: {left}");
                }
                Err(error)
            }
        }
    }

    /// Limits, pipes, init; while init prepares itself, its streams are connected.
    async fn launch(
        &self,
        request: &CreateContainerRequest,
        plan: &Plan,
        cgroup: &Cgroup,
    ) -> Result<(Init, Gate, Pumps), Error> {
        cgroup.apply(&plan.cgroup_values).map_err(|(file, error)| {
            let value = plan.cgroup_values.iter().find(|(name, _)| *name == file).map(|(_, value)| value.clone());
            Error::Limit { id: request.id.clone(), file, value: value.unwrap_or_default(), error }
        })?;
        let (ends, pipes) = stdio::make_pipes(&request.stdio, plan.owner())?;
        let sandbox =
            plan.in_pod_pids.then(|| self.all().values().find(|container| container.is_sandbox).cloned()).flatten();
        let pod = sandbox.as_ref().map(|sandbox| sandbox.init.pidfd.as_fd());
        let (mut init, mut gate) =
            process::spawn(plan, &self.places.shares, cgroup, ends, pod, &self.reaper).map_err(Error::Create)?;
        let (ready, pumps) = tokio::join!(gate.ready(), pipes.connect(&self.places.link));
        match (ready, pumps) {
            (Ok(()), Ok(pumps)) => Ok((init, gate, pumps)),
            (ready, pumps) => {
                // Best effort: a child that has failed is on its way out by itself.
                let _ = sys::signal_pidfd(init.pidfd.as_fd(), libc::SIGKILL);
                ended(&mut init.exit).await;
                Err(ready.map_err(Error::Create).err().or(pumps.err().map(Error::Stdio)).unwrap_or(Error::Finished))
            }
        }
    }

    /// Lets init exec.
    pub async fn start(&self, id: &str) -> Result<(), Error> {
        let container = self.get(id)?;
        if container.init.exit.borrow().is_some() {
            return Err(Error::Finished);
        }
        let gate = container.gate.lock().unwrap_or_else(PoisonError::into_inner).take();
        gate.ok_or_else(|| Error::Started(id.to_owned()))?.go().await.map_err(Error::Start)
    }

    /// Signals init or, with `all`, each process.
    pub fn signal(&self, id: &str, signal: u32, all: bool) -> Result<(), Error> {
        let container = self.get(id)?;
        if signal > MAX_SIGNAL {
            return Err(Error::Signal(signal));
        }
        let result = if all { container.signal_all(signal) } else { container.signal_init(signal) };
        result.map_err(|error| match error.raw_os_error() {
            Some(libc::ESRCH) => Error::Finished,
            _ => Error::Kill { id: id.to_owned(), error },
        })
    }

    /// Waits until init is gone and its output written.
    pub async fn wait(&self, id: &str) -> Result<Exit, Error> {
        let mut finished = self.get(id)?.finished.clone();
        Ok(ended(&mut finished).await)
    }

    /// The guest's process ids.
    pub fn pids(&self, id: &str) -> Result<Vec<u32>, Error> {
        let container = self.get(id)?;
        container.cgroup.pids().map_err(|error| Error::Cgroup { what: "read", id: id.to_owned(), error })
    }

    /// Stops a container's processes where they are, or lets them go on.
    pub async fn freeze(&self, id: &str, frozen: bool) -> Result<(), Error> {
        let container = self.get(id)?;
        if container.init.exit.borrow().is_some() {
            return Err(Error::Finished);
        }
        let what = if frozen { "pause" } else { "resume" };
        container.cgroup.freeze(frozen).await.map_err(|error| Error::Freeze { what, id: id.to_owned(), error })
    }

    /// Removes a container, whatever its state.
    pub async fn delete(&self, id: &str) -> Result<(), Error> {
        let Some(container) = self.all().remove(id) else { return Ok(()) };
        container.tear_down().await.map_err(|error| Error::Cgroup { what: "remove", id: id.to_owned(), error })?;
        self.write_back(&container.root_share).await.map_err(|error| Error::Sync { id: id.to_owned(), error })
    }

    /// Writes what is dirty in a share (pages of shared mappings) back to the host. As long as that may take, other
    /// containers must go on: then it is done by a child.
    async fn write_back(&self, share: &str) -> io::Result<()> {
        let root = open(self.places.shares.join(share), OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
        if self.all().is_empty() {
            return Ok(syncfs(&root)?);
        }
        let sync = || i32::from(syncfs(&root).is_err());
        let child = sys::clone_child(0, None, sync)?;
        match ended(&mut self.reaper.watch(child.pid)).await.status {
            0 => Ok(()),
            _ => Err(io::Error::other("syncfs failed")),
        }
    }
}

/// The container, with a task that follows init to its end.
fn supervised(init: Init, gate: Gate, mut pumps: Pumps, cgroup: Cgroup, plan: Plan) -> Container {
    let cgroup = Arc::new(cgroup);
    let alone = plan.namespaces & libc::CLONE_NEWPID as u64 != 0;
    let processes = cgroup.clone();
    let (sender, finished) = watch::channel(None);
    let torn_down = Arc::new(Notify::new());
    let (mut exit, stop) = (init.exit.clone(), torn_down.clone());
    tokio::spawn(async move {
        let exit = ended(&mut exit).await;
        // The end of a process namespace's init ends all others in it; in a shared namespace that is ours to do. A
        // failure leaves them to delete.
        if !alone && let Err(error) = processes.kill() {
            log::warn!("cannot end the processes that outlived their container's init: {error}");
        }
        tokio::select! {
            () = pumps.drain() => {}
            () = stop.notified() => {}
        }
        sender.send_replace(Some(exit));
    });
    Container {
        init,
        cgroup,
        root_share: plan.root_share,
        is_sandbox: plan.is_sandbox,
        gate: Mutex::new(Some(gate)),
        finished,
        torn_down,
    }
}

impl Container {
    fn signal_init(&self, signal: u32) -> io::Result<()> {
        sys::signal_pidfd(self.init.pidfd.as_fd(), signal as i32)
    }

    fn signal_all(&self, signal: u32) -> io::Result<()> {
        let pids = self.cgroup.pids()?;
        if pids.is_empty() {
            return Err(io::Error::from_raw_os_error(libc::ESRCH));
        }
        if signal == SIGKILL {
            return self.cgroup.kill();
        }
        for pid in pids {
            match sys::signal_pid(pid, signal as i32) {
                // It has just ended.
                Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {}
                result => result?,
            }
        }
        Ok(())
    }

    /// Kills what remains, ends the pumps, removes the cgroup.
    async fn tear_down(&self) -> io::Result<()> {
        let mut exit = self.init.exit.clone();
        let alive = exit.borrow().is_none();
        if alive || !self.cgroup.pids()?.is_empty() {
            self.cgroup.kill()?;
        }
        ended(&mut exit).await;
        self.torn_down.notify_one();
        self.cgroup.remove().await
    }
}

fn check_id(id: &str) -> Result<(), Error> {
    let plain = |byte: u8| byte.is_ascii_alphanumeric();
    let valid = id.len() <= MAX_ID
        && id.bytes().next().is_some_and(plain)
        && id.bytes().all(|byte| plain(byte) || matches!(byte, b'.' | b'_' | b'-'));
    if valid { Ok(()) } else { Err(Error::Id(id.to_owned())) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_a_plain_name() {
        for id in ["a", "0", "redis-1.2_x", &"x".repeat(76)] {
            assert!(check_id(id).is_ok(), "{id}");
        }
        for id in ["", ".", "..", "-a", "a/b", "a b", "ü", &"x".repeat(77)] {
            assert!(matches!(check_id(id), Err(Error::Id(_))), "{id}");
        }
    }
}
