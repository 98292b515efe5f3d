//! Spawning a VMM: the first thing that a server does, before its runtime and before any other thread.
//!
//! Nothing is waited for. The VMM is born with its two sockets and a pipe for its log, without any environment of ours; the
//! images it boots from are opened here, so that a missing file is told apart from a bad one.

use std::{
    fs::File,
    io,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

use config::{LogLevel, Machine, Spec};
use vmm_api::{Boot, Channel, ChannelError, Client, ClientError, EventStream};

/// How long the VMM may take to answer one request. Booting reads the kernel, maybe from a cold disk.
const DEADLINE: Duration = Duration::from_secs(10);

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
    pub(super) child: Child,
    pub(super) client: Client,
    pub(super) events: EventStream,
    pub(super) boot: Boot,
    pub(super) images: [File; 2],
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
