//! What was written means: defaults, then each source in turn, ranges checked.

use std::{fmt::Display, ops::RangeInclusive, path::PathBuf, time::Duration};

use toml::Spanned;

use crate::{annotations, raw::Raw};

/// Where `make install` puts the parts, then where a distribution's package does.
const LIBRARY_DIRECTORIES: [&str; 2] = ["/usr/local/lib/nacre", "/usr/lib/nacre"];

/// The KVM device of every host.
const KVM: &str = "/dev/kvm";

/// Where the logs of pods go: it outlives a crash of the machine, which `/run` does not.
const LOG_DIRECTORY: &str = "/var/log/nacre";

/// A checked configuration.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Spec {
    /// Files that the shim needs.
    pub paths: Paths,
    /// The machine of each pod.
    pub machine: Machine,
    /// The shim itself.
    pub shim: Shim,
    /// Annotations that a pod may set, by their whole name. None unless the operator says so.
    pub allowed_annotations: Vec<String>,
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
    /// Where each pod has a log file of its own; `None` for no files.
    pub log_dir: Option<PathBuf>,
    /// The most that one pod's log takes on disk, 16 to 65536 KiB.
    pub log_max_kib: u32,
    /// How many logs of pods that are gone are kept, 0 to 10000.
    pub log_keep: u32,
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

impl LogLevel {
    const ALL: [(Self, &str); 5] = [
        (Self::Error, "error"),
        (Self::Warn, "warn"),
        (Self::Info, "info"),
        (Self::Debug, "debug"),
        (Self::Trace, "trace"),
    ];

    /// As it is written.
    #[must_use]
    pub fn name(self) -> &'static str {
        Self::ALL.into_iter().find(|(level, _)| *level == self).map_or("info", |(_, name)| name)
    }
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
        Self {
            boot_timeout: Duration::from_secs(30),
            log_level: LogLevel::Info,
            log_dir: Some(LOG_DIRECTORY.into()),
            log_max_kib: 256,
            log_keep: 50,
        }
    }
}

/// A value that breaks a rule, before anybody knows where it was written.
#[derive(Debug)]
pub(crate) struct Illegal {
    pub(crate) key: &'static str,
    pub(crate) value: String,
    pub(crate) legal: &'static str,
    pub(crate) offset: usize,
}

impl Spec {
    /// Lets what `raw` says replace what was said before; `note` hears which key was set, and at which byte.
    pub(crate) fn apply(&mut self, raw: Raw, note: &mut dyn FnMut(&'static str, usize)) -> Result<(), Illegal> {
        let mut set = Setter { note };
        set.value(&mut self.paths.vmm, "paths.vmm", raw.paths.vmm, path)?;
        set.value(&mut self.paths.holder, "paths.holder", raw.paths.holder, path)?;
        set.value(&mut self.paths.kernel, "paths.kernel", raw.paths.kernel, path)?;
        set.value(&mut self.paths.agent, "paths.agent", raw.paths.agent, path)?;
        set.value(&mut self.paths.kvm, "paths.kvm", raw.paths.kvm, path)?;
        let (machine, written) = (&mut self.machine, raw.machine);
        set.value(&mut machine.vcpus, "machine.vcpus", written.vcpus, number(1..=32, "1 to 32 virtual CPUs"))?;
        let memory = number(64..=65_536, "64 to 65536 MiB");
        set.value(&mut machine.memory_mib, "machine.memory_mib", written.memory_mib, memory)?;
        set.value(&mut machine.kernel_cmdline, "machine.kernel_cmdline", written.kernel_cmdline, cmdline)?;
        let (shim, written) = (&mut self.shim, raw.shim);
        set.value(&mut shim.boot_timeout, "shim.boot_timeout_s", written.boot_timeout_s, |key, written| {
            number::<u32>(1..=600, "1 to 600 seconds")(key, written).map(|s| Duration::from_secs(u64::from(s)))
        })?;
        set.value(&mut shim.log_level, "shim.log_level", written.log_level, log_level)?;
        set.value(&mut shim.log_dir, "shim.log_dir", written.log_dir, log_directory)?;
        let size = number(16..=65_536, "16 to 65536 KiB");
        set.value(&mut shim.log_max_kib, "shim.log_max_kib", written.log_max_kib, size)?;
        set.value(&mut shim.log_keep, "shim.log_keep", written.log_keep, number(0..=10_000, "0 to 10000 files"))?;
        let (allowed, written) = (&mut self.allowed_annotations, raw.annotations.allow);
        set.value(allowed, "annotations.allow", written, |_, names| names.get_ref().iter().map(annotation).collect())?;
        Ok(())
    }
}

struct Setter<'a> {
    note: &'a mut dyn FnMut(&'static str, usize),
}

impl Setter<'_> {
    fn value<W, T>(
        &mut self,
        slot: &mut T,
        key: &'static str,
        written: Option<Spanned<W>>,
        read: impl FnOnce(&'static str, &Spanned<W>) -> Result<T, Illegal>,
    ) -> Result<(), Illegal> {
        if let Some(written) = written {
            *slot = read(key, &written)?;
            (self.note)(key, written.span().start);
        }
        Ok(())
    }
}

/// The first place where `name` is installed; the first of all places if it is in none, so that the error which follows
/// names the usual one.
fn installed(name: &str) -> PathBuf {
    let mut places = LIBRARY_DIRECTORIES.iter().map(|directory| PathBuf::from(directory).join(name));
    let usual = PathBuf::from(LIBRARY_DIRECTORIES[0]).join(name);
    places.find(|place| place.exists()).unwrap_or(usual)
}

fn path(key: &'static str, written: &Spanned<String>) -> Result<PathBuf, Illegal> {
    if written.get_ref().starts_with('/') {
        return Ok(written.get_ref().into());
    }
    Err(illegal(key, written, "an absolute path"))
}

fn log_directory(key: &'static str, written: &Spanned<String>) -> Result<Option<PathBuf>, Illegal> {
    match written.get_ref().as_str() {
        "" => Ok(None),
        text if text.starts_with('/') => Ok(Some(text.into())),
        _ => Err(illegal(key, written, "an absolute path, or empty for no log files")),
    }
}

fn number<T: TryFrom<i64>>(
    range: RangeInclusive<i64>,
    legal: &'static str,
) -> impl FnOnce(&'static str, &Spanned<i64>) -> Result<T, Illegal> {
    move |key, written| {
        let value = Some(*written.get_ref()).filter(|value| range.contains(value));
        value.and_then(|value| T::try_from(value).ok()).ok_or_else(|| illegal(key, written, legal))
    }
}

fn cmdline(key: &'static str, written: &Spanned<String>) -> Result<String, Illegal> {
    let legal = |byte: u8| byte == b' ' || byte.is_ascii_graphic();
    if written.get_ref().len() <= 1024 && written.get_ref().bytes().all(legal) {
        return Ok(written.get_ref().clone());
    }
    Err(illegal(key, written, "at most 1024 printable ASCII characters"))
}

fn log_level(key: &'static str, written: &Spanned<String>) -> Result<LogLevel, Illegal> {
    let named = LogLevel::ALL.into_iter().find(|(_, name)| name == written.get_ref());
    named.map(|(level, _)| level).ok_or_else(|| illegal(key, written, "error, warn, info, debug or trace"))
}

fn annotation(written: &Spanned<String>) -> Result<String, Illegal> {
    if annotations::NAMES.contains(&written.get_ref().as_str()) {
        return Ok(written.get_ref().clone());
    }
    Err(illegal("annotations.allow", written, annotations::LEGAL))
}

fn illegal<T: Display>(key: &'static str, written: &Spanned<T>, legal: &'static str) -> Illegal {
    Illegal { key, value: written.get_ref().to_string(), legal, offset: written.span().start }
}
