//! The engine that drives `nacre-vmm`.
//!
//! ```text
//!   launch (before any thread) ──► Kvm::adopt ──► Booting ──Connected{1024}──► Ready ──► Ended
//! ```
//!
//! * [`launch`] only spawns: the VM boots while containerd is still on its way to Create. What fails there is kept and
//!   becomes the answer to Create, because `start` has long returned.
//! * One task reads events; it alone ends the machine ([`Phase::Ended`]), exactly once, with the best reason there is: the
//!   guest's own last event, else the VMM's refusal, else its exit status and its last line of log.
//! * Killing the VMM's process is always safe and always enough: what it holds goes with it.
//! * The streams that tasks expect wait in a table by port. A stream on a port that nobody expects is closed.

use std::{
    collections::HashMap,
    fs::File,
    io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::process::{CommandExt, ExitStatusExt},
    },
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use agent_proto::{CONTROL_PORT, CreateContainerRequest, FIRST_STDIO_PORT};
use config::{LogLevel, Machine, Spec};
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, BufReader, Interest},
    net::{UnixStream, unix::pipe},
    sync::{oneshot, watch},
    task::spawn_blocking,
    time::{Instant, sleep_until, timeout},
};
use vmm_api::{Boot, Channel, ChannelError, Client, ClientError, Event, EventStream, ExitReason, ShareName};

use crate::{
    engine::{EngineError, Sandbox},
    guest::{Agent, GuestError, cleaned, stream},
    io::Slot,
    trace,
};

/// How long the VMM may take to answer one request. Booting reads the kernel, maybe from a cold disk.
const DEADLINE: Duration = Duration::from_secs(10);

/// How long the process may live on after its last event.
const LINGER: Duration = Duration::from_secs(2);

/// How much of the console is shown with an error; all of it is in the log.
const CONSOLE_SHOWN: usize = 1200;

/// Longest line of the VMM's log.
const LOG_LINE_MAX: u64 = 4096;

/// Why no VMM was spawned.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// A file that the guest boots from.
    #[error("cannot open the {what} {}: {source}; install nacre, or set paths.{key} in its configuration", path.display())]
    Image {
        /// What it is.
        what: &'static str,
        /// The key that names it.
        key: &'static str,
        /// Where it was looked for.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// The VMM itself.
    #[error("cannot run the VMM {}: {source}; install nacre, or set paths.vmm in its configuration", path.display())]
    Spawn {
        /// The program.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// The sockets to it.
    #[error("cannot make the sockets to the VMM: {0}")]
    Channel(#[from] ChannelError),
    /// The client on the control socket.
    #[error("cannot prepare the VMM's control socket: {0}")]
    Client(#[from] ClientError),
}

/// A VMM that has been spawned and asked for nothing yet.
#[derive(Debug)]
pub struct Launched {
    child: Child,
    client: Client,
    events: EventStream,
    boot: Boot,
    images: [File; 2],
}

impl Launched {
    /// Its pid.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }
}

/// Spawns a VMM for one machine. Does not wait for anything.
pub fn launch(spec: &Spec) -> Result<Launched, LaunchError> {
    let kernel = image("guest kernel", "kernel", &spec.paths.kernel)?;
    let agent = image("guest agent", "agent", &spec.paths.agent)?;
    let (control, vmm_control) = Channel::pair()?;
    let (events, vmm_events) = Channel::pair()?;
    let child = Command::new(&spec.paths.vmm)
        .env_clear()
        .env("NACRE_VMM_LOG", vmm_log_level(spec.shim.log_level))
        .stdin(vmm_control)
        .stdout(vmm_events)
        .stderr(Stdio::piped())
        .process_group(0)
        .spawn()
        .map_err(|source| LaunchError::Spawn { path: spec.paths.vmm.clone(), source })?;
    Ok(Launched {
        child,
        client: Client::new(control, DEADLINE)?,
        events: EventStream::new(events),
        boot: boot(&spec.machine),
        images: [kernel, agent],
    })
}

/// The VMM's log goes through ours: at the default level only what went wrong is worth that.
fn vmm_log_level(level: LogLevel) -> &'static str {
    match level {
        LogLevel::Error => "error",
        LogLevel::Warn | LogLevel::Info => "warn",
        LogLevel::Debug => "debug",
        LogLevel::Trace => "trace",
    }
}

fn image(what: &'static str, key: &'static str, path: &Path) -> Result<File, LaunchError> {
    File::open(path).map_err(|source| LaunchError::Image { what, key, path: path.to_owned(), source })
}

fn boot(machine: &Machine) -> Boot {
    Boot { vcpus: machine.vcpus, memory_mib: machine.memory_mib, cmdline: machine.kernel_cmdline.clone() }
}

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
    phase: watch::Sender<Phase>,
    client: Option<Arc<Client>>,
    process: Arc<Process>,
    expected: Mutex<Expected>,
}

/// Streams that have been announced to the guest and have not arrived.
#[derive(Debug)]
struct Expected {
    next: u32,
    slots: HashMap<u32, oneshot::Sender<UnixStream>>,
}

/// The VMM's process.
#[derive(Debug)]
struct Process {
    child: Mutex<Option<Child>>,
    gone: watch::Sender<bool>,
    /// Why it was killed, if we killed it.
    verdict: Mutex<Option<String>>,
    last_words: Mutex<String>,
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
        let Launched { mut child, client, events, boot, images } = launched;
        let log = child.stderr.take().map(OwnedFd::from);
        let client = Arc::new(client);
        let kvm = Arc::new(Self::with(id, Phase::Booting, Some(client.clone()), Process::new(Some(child))));
        if let Some(log) = log {
            tokio::spawn(follow_log(kvm.process.clone(), log));
        }
        let process = kvm.process.clone();
        spawn_blocking(move || {
            let [kernel, agent] = &images;
            match client.boot(boot, kernel.as_fd(), agent.as_fd()) {
                Ok(()) => {}
                Err(ClientError::Refused { message, .. }) => process.kill(&cleaned(&message)),
                // It died or hangs: its end, which the events tell, has the better reason.
                Err(error @ ClientError::Broken(ChannelError::TimedOut)) => process.kill(&error.to_string()),
                Err(error) => log::error!("boot: {error}"),
            }
        });
        tokio::spawn(watch_over(kvm.clone(), events, Instant::now() + boot_timeout, boot_timeout));
        kvm
    }

    fn with(id: &str, phase: Phase, client: Option<Arc<Client>>, process: Process) -> Self {
        Self {
            id: id.to_owned(),
            phase: watch::Sender::new(phase),
            client,
            process: Arc::new(process),
            expected: Mutex::new(Expected { next: FIRST_STDIO_PORT, slots: HashMap::new() }),
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
        let object = format!("share {name}");
        match spawn_blocking(move || call(&client, name)).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(ClientError::Broken(ChannelError::Closed))) => Err(self.lost("control socket closed").await),
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
        let _ = gone.wait_for(|gone| *gone).await;
    }
}

impl Process {
    fn new(child: Option<Child>) -> Self {
        Self {
            gone: watch::Sender::new(child.is_none()),
            child: Mutex::new(child),
            verdict: Mutex::new(None),
            last_words: Mutex::new(String::new()),
        }
    }

    /// Kills it; the first reason given is the one that counts.
    fn kill(&self, why: &str) {
        locked(&self.verdict).get_or_insert_with(|| why.to_owned());
        if let Some(child) = locked(&self.child).as_mut() {
            // Fails only if it has ended already.
            let _ = child.kill();
        }
    }

    /// Kills it if it still runs, reaps it, and says how it ended.
    fn reap(&self) -> String {
        let Some(mut child) = locked(&self.child).take() else { return "it was never started".to_owned() };
        let status = match child.try_wait() {
            Ok(Some(status)) => Ok(status),
            _ => {
                let _ = child.kill();
                child.wait()
            }
        };
        match status {
            Ok(status) if status.signal().is_some() => {
                format!("killed by signal {}", status.signal().unwrap_or_default())
            }
            Ok(status) => format!("exit code {}", status.code().unwrap_or_default()),
            Err(error) => format!("cannot be waited for: {error}"),
        }
    }
}

/// Reads events until the machine has ended, then reaps it and says why.
async fn watch_over(kvm: Arc<Kvm>, events: EventStream, boot_deadline: Instant, boot_timeout: Duration) {
    // A second descriptor of the socket is what the runtime polls.
    let last = match events.as_fd().try_clone_to_owned().and_then(stream) {
        Ok(readiness) => read_events(&kvm, &events, &readiness, boot_deadline, boot_timeout).await,
        Err(error) => {
            kvm.kill(&format!("its events cannot be read: {error}"));
            None
        }
    };
    let process = kvm.process.clone();
    // The process ends by itself after its last event; it is not asked twice.
    let linger = async {
        while locked(&process.child).as_mut().is_some_and(|child| matches!(child.try_wait(), Ok(None))) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    let _ = timeout(if last.is_some() { LINGER } else { Duration::from_millis(100) }, linger).await;
    let reaper = process.clone();
    let status = spawn_blocking(move || reaper.reap()).await.unwrap_or_default();
    let verdict = locked(&process.verdict).clone();
    let why = match (last, verdict) {
        (Some(last), _) => last,
        (None, Some(verdict)) => verdict,
        (None, None) => {
            // Let the last lines of the log arrive.
            tokio::time::sleep(Duration::from_millis(20)).await;
            let words = locked(&process.last_words).clone();
            format!("the VMM ended unexpectedly ({status}){}{words}", if words.is_empty() { "" } else { ": " })
        }
    };
    log::info!("VM ended: {why}; VMM: {status}");
    kvm.end(&why);
    process.gone.send_replace(true);
}

/// The guest's own account of its end, if it gave one.
async fn read_events(
    kvm: &Kvm,
    events: &EventStream,
    readiness: &UnixStream,
    boot_deadline: Instant,
    boot_timeout: Duration,
) -> Option<String> {
    loop {
        let booting = matches!(*kvm.phase.borrow(), Phase::Booting);
        let event = tokio::select! {
            event = readiness.async_io(Interest::READABLE, || match events.try_next() {
                Ok(None) => Err(io::ErrorKind::WouldBlock.into()),
                Ok(Some(event)) => Ok(Ok(event)),
                Err(error) => Ok(Err(error)),
            }) => event.ok()?,
            () = sleep_until(boot_deadline), if booting => {
                kvm.kill(&format!("its agent did not connect within {} s (shim.boot_timeout_s)", boot_timeout.as_secs()));
                return None;
            }
        };
        match event {
            Ok((Event::Entered { at_ns }, _)) => trace::mark_at("entered", &kvm.id, at_ns),
            Ok((Event::Connected { port }, Some(fd))) => kvm.connected(port, fd),
            Ok((Event::Connected { port }, None)) => log::error!("stream on port {port} came without descriptor"),
            Ok((Event::Exited { reason, console }, _)) => return Some(obituary(&reason, &console)),
            Err(ChannelError::Closed) => return None,
            Err(error) => {
                kvm.kill(&error.to_string());
                return None;
            }
        }
    }
}

/// How the machine ended, with the end of its console unless it ended well.
fn obituary(reason: &ExitReason, console: &str) -> String {
    let reason_text = cleaned(&reason.to_string());
    if *reason == ExitReason::PowerOff || console.trim().is_empty() {
        return reason_text;
    }
    log::error!("console: {console}");
    let start = console.len().saturating_sub(CONSOLE_SHOWN);
    // From the start of a line, and on a character: the console is ASCII by contract, not by proof.
    let tail: String = console.char_indices().filter(|(at, _)| *at >= start).map(|(_, c)| c).collect();
    let tail = if start > 0 { tail.split_once('\n').map_or(tail.as_str(), |(_, rest)| rest) } else { tail.as_str() };
    format!("{reason_text}; the console ends with:\n{}", cleaned(tail).trim_end())
}

/// Copies the VMM's standard error into the log, line by line.
async fn follow_log(process: Arc<Process>, log: OwnedFd) {
    let Ok(log) = pipe::Receiver::from_owned_fd(log) else { return };
    let mut log = BufReader::new(log);
    let mut line = Vec::new();
    loop {
        line.clear();
        match (&mut log).take(LOG_LINE_MAX).read_until(b'\n', &mut line).await {
            Ok(0) | Err(_) => return,
            Ok(_) => {
                let text = cleaned(String::from_utf8_lossy(&line).trim_end());
                log::info!("vmm: {text}");
                if !text.is_empty() {
                    *locked(&process.last_words) = text;
                }
            }
        }
    }
}

/// A panic while one of these locks is held leaves plain data behind, which is still good.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}
