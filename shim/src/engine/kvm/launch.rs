//! Spawning a VMM: the first thing that a server does, before its runtime and before any other thread.
//!
//! Nothing is waited for. The VMM is born in namespaces of its own (`vmm_api::spawn`); what it boots from, and KVM itself,
//! are opened here, because its jail has no paths, and so that a missing file is told apart from a bad one.

use std::{
    fs::{File, OpenOptions},
    io,
    path::{Path, PathBuf},
    time::Duration,
};

use config::{LogLevel, Machine, Spec};
use vmm_api::{Boot, SpawnError, Vmm};

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
    /// The device that it runs machines with.
    #[error("cannot open {}: {source}; load kvm_amd or kvm_intel, and run as root or in group kvm", path.display())]
    Kvm {
        /// Where it was looked for.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// The VMM itself.
    #[error("{0}; install nacre, or set paths.vmm in its configuration")]
    Spawn(#[from] SpawnError),
}

/// A VMM that has been spawned and asked for nothing yet.
#[derive(Debug)]
pub struct Launched {
    pub(super) vmm: Vmm,
    pub(super) boot: Boot,
    /// Kernel, initramfs and KVM, as [`vmm_api::Client::boot`] wants them.
    pub(super) parts: [File; 3],
}

impl Launched {
    /// Its pid.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.vmm.child.id()
    }
}

/// Spawns a VMM for one machine. Does not wait for anything.
pub fn launch(spec: &Spec) -> Result<Launched, LaunchError> {
    let kernel = image("guest kernel", "kernel", &spec.paths.kernel)?;
    let agent = image("guest agent", "agent", &spec.paths.agent)?;
    let kvm = OpenOptions::new().read(true).write(true).open(&spec.paths.kvm);
    let kvm = kvm.map_err(|source| LaunchError::Kvm { path: spec.paths.kvm.clone(), source })?;
    let vmm = vmm_api::spawn(&spec.paths.vmm, vmm_log_level(spec.shim.log_level), DEADLINE)?;
    Ok(Launched { vmm, boot: boot(&spec.machine), parts: [kernel, agent, kvm] })
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
