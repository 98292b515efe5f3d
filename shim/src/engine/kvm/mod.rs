//! The engine that drives `nacre-vmm`.
//!
//! ```text
//!   launch (before any thread) ──► Kvm::adopt ──► Booting: Born ► ids, boot ► Connected{1024} ──► Ready ──► Ended
//! ```
//!
//! * [`launch()`] only spawns: the VM boots while containerd is still on its way to Create. What fails there is kept and
//!   becomes the answer to Create, because `start` has long returned.
//! * One task reads events ([`watch`]); it alone ends the machine, exactly once, with the best reason there is: the
//!   guest's own last event, else the VMM's refusal, else its exit status and its last line of log.
//! * A VMM that does not answer a request in time, or answers nonsense, is killed: its next reply could be the last one's.
//!   So one that is stopped costs each verb its deadline, once.
//! * Killing the VMM's process is always safe and always enough: what it holds goes with it.
//! * The streams that tasks expect wait in a table by port. A stream on a port that nobody expects is closed.

mod launch;
mod process;
mod watch;

use std::{
    collections::HashMap,
    fs::File,
    os::fd::{AsFd, OwnedFd},
    sync::{Arc, Mutex},
    time::Duration,
};

use agent_proto::{CONTROL_PORT, CreateContainerRequest, FIRST_STDIO_PORT};
use tokio::{
    net::UnixStream,
    sync::{oneshot, watch as watched},
    task::spawn_blocking,
    time::{Instant, timeout},
};
use vmm_api::{Boot, ChannelError, Client, ClientError, IdRange, ShareName, Vmm, map_ids};

pub use launch::{LaunchError, Launched, launch};
use process::{Process, follow_log};
use watch::watch_over;

use crate::{
    engine::{EngineError, Sandbox},
    guest::{Agent, GuestError, cleaned, stream},
    io::Slot,
    locked, trace,
};

/// How long a VMM may take for a request while its machine runs. It does little more for it than open a directory.
const PROMPT: Duration = Duration::from_secs(5);

/// How long a process may live on after its last event, or a connection be gone before its machine is.
const LINGER: Duration = Duration::from_secs(2);

/// Where the machine is in its life.
#[derive(Clone)]
enum Phase {
    Booting,
    Ready(Agent),
    Ended(EngineError),
}

/// One machine.
pub struct Kvm {
    id: String,
    phase: watched::Sender<Phase>,
    client: Option<Arc<Client>>,
    process: Arc<Process>,
    expected: Mutex<Expected>,
    /// The VMM has its ids: the jail closes at its first request, whichever that is, and cannot without them.
    mapped: watched::Sender<bool>,
}

/// What a VMM gets once it has said that it is born.
struct Birth {
    pid: u32,
    client: Arc<Client>,
    boot: Boot,
    parts: [File; 3],
    mapped: watched::Sender<bool>,
}

impl Birth {
    /// Maps its ids, then asks it to boot. Blocks.
    fn complete(self, process: &Process) {
        // Every id is itself, until shares are idmapped to a range (ADR-0007).
        if let Err(error) = map_ids(self.pid, IdRange::IDENTITY) {
            return process.kill(&format!("its user namespace cannot be given ids: {error}"));
        }
        self.mapped.send_replace(true);
        let [kernel, agent, kvm] = &self.parts;
        match self.client.boot(self.boot, [kernel.as_fd(), agent.as_fd(), kvm.as_fd()]) {
            // Fails only for a deadline of zero.
            Ok(()) => drop(self.client.set_deadline(PROMPT)),
            Err(ClientError::Refused { message, .. }) => process.kill(&cleaned(&message)),
            // It died or hangs: its end, which the events tell, has the better reason.
            Err(error @ ClientError::Broken(ChannelError::TimedOut)) => process.kill(&error.to_string()),
            Err(error) => log::error!("boot: {error}"),
        }
    }
}

/// Streams that have been announced to the guest and have not arrived.
#[derive(Debug)]
struct Expected {
    next: u32,
    slots: HashMap<u32, oneshot::Sender<UnixStream>>,
}

impl Kvm {
    /// A machine that never came to be: every verb answers with `why`.
    #[must_use]
    pub fn failed(id: &str, why: &str) -> Arc<Self> {
        let phase = Phase::Ended(EngineError::NotStarted(why.into()));
        Arc::new(Self::with(id, phase, None, Process::new(None)))
    }

    /// Boots the machine and watches over it. Must be called within the runtime.
    #[must_use]
    pub fn adopt(id: &str, launched: Launched, boot_timeout: Duration) -> Arc<Self> {
        let Launched { vmm: Vmm { mut child, client, events }, boot, parts } = launched;
        let log = child.stderr.take().map(OwnedFd::from);
        let mapped = watched::Sender::new(false);
        let birth = Birth { pid: child.id(), client: Arc::new(client), boot, parts, mapped: mapped.clone() };
        let process = Process::new(Some(child));
        let kvm = Self::with(id, Phase::Booting, Some(birth.client.clone()), process);
        let kvm = Arc::new(Self { mapped, ..kvm });
        if let Some(log) = log {
            tokio::spawn(follow_log(kvm.process.clone(), log));
        }
        tokio::spawn(watch_over(kvm.clone(), events, birth, Instant::now() + boot_timeout, boot_timeout));
        kvm
    }

    fn with(id: &str, phase: Phase, client: Option<Arc<Client>>, process: Process) -> Self {
        Self {
            id: id.to_owned(),
            phase: watched::Sender::new(phase),
            client,
            process: Arc::new(process),
            expected: Mutex::new(Expected { next: FIRST_STDIO_PORT, slots: HashMap::new() }),
            mapped: watched::Sender::new(false),
        }
    }

    /// The agent, as soon as it is there. The boot deadline bounds the wait.
    async fn agent(&self) -> Result<Agent, EngineError> {
        let mut phase = self.phase.subscribe();
        let settled = phase.wait_for(|phase| !matches!(phase, Phase::Booting)).await;
        match settled.as_deref() {
            Ok(Phase::Ready(agent)) => Ok(agent.clone()),
            Ok(Phase::Ended(error)) => Err(error.clone()),
            Ok(Phase::Booting) | Err(_) => Err(EngineError::NotStarted("the shim is shutting down".into())),
        }
    }

    /// Resolves when the machine has ended.
    async fn ended(&self) -> EngineError {
        let mut phase = self.phase.subscribe();
        match phase.wait_for(|phase| matches!(phase, Phase::Ended(_))).await.as_deref() {
            Ok(Phase::Ended(error)) => error.clone(),
            _ => EngineError::Ended("the shim is shutting down".into()),
        }
    }

    /// Runs a verb of the agent's, unless the machine ends first.
    async fn guarded<T>(&self, call: impl Future<Output = Result<T, GuestError>>) -> Result<T, EngineError> {
        tokio::select! {
            biased;
            outcome = call => match outcome {
                Err(GuestError::Lost(text)) => Err(self.lost(&text).await),
                other => Ok(other?),
            },
            error = self.ended() => Err(error),
        }
    }

    /// The agent's connection is gone: either the machine is, too, and will say why, or it is of no use any more.
    async fn lost(&self, text: &str) -> EngineError {
        if timeout(LINGER, self.ended()).await.is_err() {
            self.kill(&format!("the connection to its agent is lost: {text}"));
        }
        self.ended().await
    }

    async fn request(
        &self,
        verb: &'static str,
        name: ShareName,
        call: impl FnOnce(&Client, ShareName) -> Result<(), ClientError> + Send + 'static,
    ) -> Result<(), EngineError> {
        if let Phase::Ended(error) = &*self.phase.borrow() {
            return Err(error.clone());
        }
        let Some(client) = self.client.clone() else { return Err(self.ended().await) };
        let mut mapped = self.mapped.subscribe();
        tokio::select! {
            _ = mapped.wait_for(|mapped| *mapped) => {}
            error = self.ended() => return Err(error),
        }
        let object = format!("share {name}");
        match spawn_blocking(move || call(&client, name)).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(ClientError::Broken(ChannelError::Closed))) => Err(self.lost("control socket closed").await),
            Ok(Err(ClientError::Broken(error))) => {
                self.kill(&format!("the VMM did not {verb} {object}: {error}"));
                Err(self.ended().await)
            }
            Ok(Err(source)) => Err(EngineError::Vmm { verb, object, source: Arc::new(source) }),
            Err(_cancelled) => Err(EngineError::Ended("the shim is shutting down".into())),
        }
    }

    fn connected(&self, port: u32, fd: OwnedFd) {
        let Ok(stream) = stream(fd) else { return log::error!("stream on port {port} is unusable") };
        if port == CONTROL_PORT {
            let first = self.phase.send_if_modified(|phase| {
                let booting = matches!(phase, Phase::Booting);
                if booting {
                    *phase = Phase::Ready(Agent::new(stream));
                }
                booting
            });
            if first {
                trace::mark("agent_ready", &self.id);
            }
        } else if let Some(slot) = locked(&self.expected).slots.remove(&port) {
            // The task may have given up: then the stream closes here.
            let _ = slot.send(stream);
        } else {
            log::warn!("the guest opened port {port}, which nobody expects");
        }
    }

    fn end(&self, why: &str) {
        self.phase.send_if_modified(|phase| {
            let why: Arc<str> = why.into();
            *phase = match phase {
                Phase::Booting => Phase::Ended(EngineError::NotStarted(why)),
                Phase::Ready(_) => Phase::Ended(EngineError::Ended(why)),
                Phase::Ended(_) => return false,
            };
            true
        });
        // Whoever waits for a stream must not wait for ever.
        locked(&self.expected).slots.clear();
    }
}

impl Sandbox for Kvm {
    async fn attach(&self, name: ShareName, root: OwnedFd, read_only: bool) -> Result<(), EngineError> {
        self.request("attach", name, move |client, name| client.attach_share(name, root.as_fd(), read_only)).await
    }

    async fn detach(&self, name: ShareName) -> Result<(), EngineError> {
        self.request("detach", name, |client, name| client.detach_share(name)).await
    }

    fn expect_stream(&self) -> (u32, Slot) {
        let (sender, slot) = oneshot::channel();
        let mut expected = locked(&self.expected);
        // Slots of tasks that have given up.
        expected.slots.retain(|_, sender| !sender.is_closed());
        let port = expected.next;
        expected.next = port.checked_add(1).unwrap_or(FIRST_STDIO_PORT);
        if !matches!(&*self.phase.borrow(), Phase::Ended(_)) {
            expected.slots.insert(port, sender);
        }
        (port, slot)
    }

    async fn create(&self, request: CreateContainerRequest) -> Result<(), EngineError> {
        let agent = self.agent().await?;
        self.guarded(agent.create(&request)).await
    }

    async fn start(&self, id: &str) -> Result<(), EngineError> {
        let agent = self.agent().await?;
        self.guarded(agent.start(id)).await
    }

    async fn signal(&self, id: &str, signal: u32, all: bool) -> Result<(), EngineError> {
        let agent = self.agent().await?;
        self.guarded(agent.signal(id, signal, all)).await
    }

    async fn pause(&self, id: &str) -> Result<(), EngineError> {
        let agent = self.agent().await?;
        self.guarded(agent.pause(id)).await
    }

    async fn resume(&self, id: &str) -> Result<(), EngineError> {
        let agent = self.agent().await?;
        self.guarded(agent.resume(id)).await
    }

    async fn wait(&self, id: &str) -> Result<u32, EngineError> {
        let agent = self.agent().await?;
        self.guarded(agent.wait(id)).await
    }

    async fn delete(&self, id: &str) -> Result<(), EngineError> {
        let agent = self.agent().await?;
        self.guarded(agent.delete(id)).await
    }

    fn kill(&self, why: &str) {
        self.process.kill(why);
    }

    async fn stop(&self) {
        self.process.kill("the pod was removed");
        let mut gone = self.process.gone.subscribe();
        // A process in an uninterruptible wait is not gone when it is killed; nobody can do more about it.
        if timeout(LINGER, gone.wait_for(|gone| *gone)).await.is_err() {
            log::error!("the VMM was killed and is still not gone after {} s", LINGER.as_secs());
        }
    }
}
