//! What the file means: defaults filled in, ranges checked.

use std::{fmt::Display, path::PathBuf, time::Duration};

use toml::Spanned;

use crate::raw::Raw;

/// Where `make install` puts the parts, then where a distribution's package does.
const LIBRARY_DIRECTORIES: [&str; 2] = ["/usr/local/lib/nacre", "/usr/lib/nacre"];

/// The KVM device of every host.
const KVM: &str = "/dev/kvm";

/// A checked configuration.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Spec {
    /// Files that the shim needs.
    pub paths: Paths,
    /// The machine of each pod.
    pub machine: Machine,
    /// The shim itself.
    pub shim: Shim,
}

/// Files that the shim needs; all absolute.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Paths {
    /// The VMM.
    pub vmm: PathBuf,
    /// The process that stands for a container on the host.
    pub holder: PathBuf,
    /// The guest kernel, an uncompressed ELF.
    pub kernel: PathBuf,
    /// The initramfs that holds the agent.
    pub agent: PathBuf,
    /// The KVM device.
    pub kvm: PathBuf,
}

/// The machine of each pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Machine {
    /// Virtual CPUs, 1 to 32.
    pub vcpus: u8,
    /// Memory, 64 to 65536 MiB.
    pub memory_mib: u32,
    /// Appended to the guest kernel's command line.
    pub kernel_cmdline: String,
}

/// The shim itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shim {
    /// How long a guest may take from the start of its VMM until its agent answers.
    pub boot_timeout: Duration,
    /// The least severe message that is logged.
    pub log_level: LogLevel,
}

/// How much is logged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum LogLevel {
    /// What failed.
    Error,
    /// What may fail soon.
    Warn,
    /// What happened.
    Info,
    /// How it happened.
    Debug,
    /// Every message on every wire.
    Trace,
}

impl Default for Paths {
    fn default() -> Self {
        Self {
            vmm: installed("nacre-vmm"),
            holder: installed("nacre-holder"),
            kernel: installed("vmlinux"),
            agent: installed("nacre-agent.cpio"),
            kvm: KVM.into(),
        }
    }
}

impl Default for Machine {
    fn default() -> Self {
        Self { vcpus: 1, memory_mib: 256, kernel_cmdline: String::new() }
    }
}

impl Default for Shim {
    fn default() -> Self {
        Self { boot_timeout: Duration::from_secs(30), log_level: LogLevel::Info }
    }
}

/// A value that breaks a rule, before anybody knows which file it came from.
pub(crate) struct Illegal {
    pub(crate) key: &'static str,
    pub(crate) value: String,
    pub(crate) legal: &'static str,
    pub(crate) offset: usize,
}

/// Checks what was written and fills in what was not.
pub(crate) fn check(raw: Raw) -> Result<Spec, Illegal> {
    let paths = Paths {
        vmm: path("paths.vmm", raw.paths.vmm, "nacre-vmm")?,
        holder: path("paths.holder", raw.paths.holder, "nacre-holder")?,
        kernel: path("paths.kernel", raw.paths.kernel, "vmlinux")?,
        agent: path("paths.agent", raw.paths.agent, "nacre-agent.cpio")?,
        kvm: path("paths.kvm", raw.paths.kvm, KVM)?,
    };
    let defaults = Machine::default();
    let machine = Machine {
        vcpus: number("machine.vcpus", raw.machine.vcpus, 1..=32, "1 to 32")?.unwrap_or(defaults.vcpus),
        memory_mib: number("machine.memory_mib", raw.machine.memory_mib, 64..=65_536, "64 to 65536")?
            .unwrap_or(defaults.memory_mib),
        kernel_cmdline: raw.machine.kernel_cmdline.map(cmdline).transpose()?.unwrap_or_default(),
    };
    let defaults = Shim::default();
    let seconds = number::<u32>("shim.boot_timeout_s", raw.shim.boot_timeout_s, 1..=600, "1 to 600")?;
    let shim = Shim {
        boot_timeout: seconds.map_or(defaults.boot_timeout, |s| Duration::from_secs(u64::from(s))),
        log_level: raw.shim.log_level.map(log_level).transpose()?.unwrap_or(defaults.log_level),
    };
    Ok(Spec { paths, machine, shim })
}

/// The first place where `name` is installed; the first of all places if it is in none, so that the error which follows
/// names the usual one.
fn installed(name: &str) -> PathBuf {
    let mut places = LIBRARY_DIRECTORIES.iter().map(|directory| PathBuf::from(directory).join(name));
    let usual = PathBuf::from(LIBRARY_DIRECTORIES[0]).join(name);
    places.find(|place| place.exists()).unwrap_or(usual)
}

fn path(key: &'static str, written: Option<Spanned<String>>, name: &str) -> Result<PathBuf, Illegal> {
    match written {
        None => Ok(installed(name)),
        Some(text) if text.get_ref().starts_with('/') => Ok(PathBuf::from(text.into_inner())),
        Some(text) => Err(illegal(key, &text, "an absolute path")),
    }
}

fn number<T: TryFrom<i64>>(
    key: &'static str,
    written: Option<Spanned<i64>>,
    range: std::ops::RangeInclusive<i64>,
    legal: &'static str,
) -> Result<Option<T>, Illegal> {
    let Some(written) = written else { return Ok(None) };
    let value = Some(*written.get_ref()).filter(|value| range.contains(value));
    match value.and_then(|value| T::try_from(value).ok()) {
        Some(value) => Ok(Some(value)),
        None => Err(illegal(key, &written, legal)),
    }
}

fn cmdline(written: Spanned<String>) -> Result<String, Illegal> {
    let legal = |byte: u8| byte == b' ' || byte.is_ascii_graphic();
    if written.get_ref().len() <= 1024 && written.get_ref().bytes().all(legal) {
        return Ok(written.into_inner());
    }
    Err(illegal("machine.kernel_cmdline", &written, "at most 1024 printable ASCII characters"))
}

fn log_level(written: Spanned<String>) -> Result<LogLevel, Illegal> {
    match written.get_ref().as_str() {
        "error" => Ok(LogLevel::Error),
        "warn" => Ok(LogLevel::Warn),
        "info" => Ok(LogLevel::Info),
        "debug" => Ok(LogLevel::Debug),
        "trace" => Ok(LogLevel::Trace),
        _ => Err(illegal("shim.log_level", &written, "error, warn, info, debug or trace")),
    }
}

fn illegal<T: Display>(key: &'static str, written: &Spanned<T>, legal: &'static str) -> Illegal {
    Illegal { key, value: written.get_ref().to_string(), legal, offset: written.span().start }
}
