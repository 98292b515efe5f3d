//! One boot of a lab, from an empty run folder to a verdict.
//!
//! QEMU is a child under `setpriv --pdeathsig KILL`, so it never outlives us. All that happens comes as an event through one
//! channel; each phase waits for events until its deadline: the boot, the command, the power-off. After the end, output is
//! drained. What happened is an [`Outcome`]; a [`Fault`] is for the caller to repeat.

use crate::cache::{self, Cache};
use crate::cli::MachineArgs;
use crate::input::{self, Order};
use crate::ports::{self, Event};
use crate::qemu::{Accel, Machine};
use crate::verdict::{Ending, Fault, judge};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

/// lab-init gives a sign of life every 2 s; a starved host may delay it much.
const SILENCE: Duration = Duration::from_secs(120);
/// A lab that was not heard for so long may have lost an interrupt, see [`ports::Nudge`].
const NUDGED_AFTER: Duration = Duration::from_secs(4);
/// From the exit code to QEMU's end.
const LEAVING: Duration = Duration::from_secs(60);
/// From QEMU's end to the last byte of output.
const DRAINING: Duration = Duration::from_secs(10);
/// Room for files that come out; sparse.
const OUTPUT_BYTES: u64 = 8 << 30;

/// Why a boot could not be tried.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Something is not built, or no folder.
    #[error(transparent)]
    Cache(#[from] cache::Error),
    /// The input disk.
    #[error(transparent)]
    Input(#[from] input::Error),
    /// A port.
    #[error(transparent)]
    Port(#[from] ports::Error),
    /// QEMU does not start.
    #[error("cannot start {0}: {1}; `lab build` installs it")]
    Spawn(&'static str, #[source] io::Error),
    /// A file of the run folder.
    #[error("{0}: {1}")]
    File(PathBuf, #[source] io::Error),
    /// Files of the lab did not come out.
    #[error("{0} did not come out of the lab: {1}")]
    Output(PathBuf, String),
}

/// How a boot ended.
#[derive(Debug)]
pub enum Outcome {
    /// The command's exit code.
    Exit(i32),
    /// The command took longer than it may.
    TimedOut,
    /// The lab could not be set up: the stage, the input or the disk is wrong.
    SetupFailed(String),
    /// The lab's own fault.
    Fault(Fault),
}

/// What to boot.
pub struct Boot<'a> {
    /// Where files are.
    pub cache: &'a Cache,
    /// The machine asked for.
    pub machine: &'a MachineArgs,
    /// Who executes.
    pub accel: Accel,
    /// The input disk's content.
    pub order: &'a Order,
    /// How long the command may take; `None` for a shell.
    pub limit: Option<Duration>,
    /// How long the boot may take.
    pub boot_limit: Duration,
    /// How long a lab without beats may print nothing; `None` for ever.
    pub silence: Option<Duration>,
}

/// Which wait we are in.
enum Phase {
    Booting,
    Running { last_beat: Instant },
    Leaving,
}

/// A running QEMU that is killed and reaped when dropped.
struct Qemu(Child);

impl Qemu {
    /// How it ended, once its stderr is at its end.
    fn end(&mut self, words: &str) -> String {
        let status = self.0.wait().map_or_else(|e| e.to_string(), |s| s.to_string());
        if words.is_empty() { status } else { format!("{status}: {words}") }
    }
}

impl Drop for Qemu {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What comes from the guest, and the nudge that it gets when nothing does.
struct Heard {
    events: Receiver<Event>,
    nudge: ports::Nudge,
    within: Duration,
}

impl Heard {
    /// The next event within `patience`.
    fn next(&self, patience: Duration) -> Result<Event, RecvTimeoutError> {
        let deadline = Instant::now() + patience;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.events.recv_timeout(left.min(self.within)) {
                Err(RecvTimeoutError::Timeout) if left > self.within => self.nudge.send(),
                heard => return heard,
            }
        }
    }
}

impl Boot<'_> {
    /// Boots once.
    pub fn run(&self) -> Result<Outcome, Error> {
        let folder = self.cache.run_folder()?;
        let machine = self.machine_in(folder.path())?;
        let (send, events) = mpsc::channel();
        let nudge = ports::control(folder.path(), send.clone())?;
        ports::output(folder.path(), "out", io::stdout(), send.clone())?;
        ports::output(folder.path(), "err", io::stderr(), send.clone())?;
        let mut open_ports = 2;
        if machine.terminal {
            ports::terminal(folder.path(), send.clone())?;
            open_ports += 1;
        }
        let started = Instant::now();
        let mut qemu = spawn(&self.cache.qemu()?, &machine)?;
        if let Some(stderr) = qemu.0.stderr.take() {
            ports::last_words(stderr, send);
        }
        // Where instructions are counted there are no beats, and a nudge would be counted, too.
        let events = Heard { events, nudge, within: if self.order.beat { NUDGED_AFTER } else { Duration::MAX } };
        let outcome = self.follow(&events, &mut qemu, started, &mut open_ports, folder.path());
        drop(qemu);
        drain(&events.events, open_ports);
        self.keep_console(folder.path(), &outcome);
        if let Outcome::Exit(_) = outcome {
            self.take_out(folder.path())?;
        }
        Ok(outcome)
    }

    /// The machine with its disks, made in the run folder.
    fn machine_in(&self, folder: &Path) -> Result<Machine, Error> {
        let input = self.order.make_disk(folder)?;
        let output = match self.order.outputs.is_empty() {
            true => None,
            false => Some(sparse(&folder.join("out.img"))?),
        };
        let root = self.cache.lab_file("root.img")?;
        let (root_bytes, input_bytes) = (size(&root)?, size(&input)?);
        Ok(Machine {
            accel: self.accel,
            cpus: self.machine.cpu_count(),
            memory: self.machine.memory,
            kernel: self.cache.lab_file("vmlinuz")?,
            initrd: self.cache.lab_file("initrd")?,
            root,
            root_bytes,
            input,
            input_bytes,
            output,
            folder: folder.to_path_buf(),
            terminal: self.order.terminal.is_some(),
            append: self.machine.append.clone(),
        })
    }

    /// Events until there is an outcome and QEMU is gone, or a deadline passes.
    fn follow(
        &self,
        events: &Heard,
        qemu: &mut Qemu,
        started: Instant,
        open_ports: &mut usize,
        folder: &Path,
    ) -> Outcome {
        let mut phase = Phase::Booting;
        let mut phase_began = started;
        let mut outcome = None;
        loop {
            match events.next(self.patience(&phase, phase_began)) {
                Ok(Event::Up) => {
                    eprintln!("lab: up in {:.1} s", started.elapsed().as_secs_f64());
                    phase_began = Instant::now();
                    phase = Phase::Running { last_beat: phase_began };
                }
                Ok(Event::Beat) => {
                    if let Phase::Running { last_beat } = &mut phase {
                        *last_beat = Instant::now();
                    }
                }
                Ok(Event::Exit(code)) => {
                    outcome = Some(Outcome::Exit(code));
                    (phase, phase_began) = (Phase::Leaving, Instant::now());
                }
                Ok(Event::SetupFailed(why)) => {
                    outcome = Some(Outcome::SetupFailed(why));
                    (phase, phase_began) = (Phase::Leaving, Instant::now());
                }
                Ok(Event::Closed) => *open_ports -= 1,
                Ok(Event::QemuGone(words)) => {
                    return outcome.unwrap_or_else(|| blame(folder, Ending::Gone(qemu.end(&words))));
                }
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                    return outcome.unwrap_or_else(|| blame(folder, self.ending(&phase)));
                }
            }
        }
    }

    /// How long the current phase may still wait.
    fn patience(&self, phase: &Phase, began: Instant) -> Duration {
        let until = match phase {
            Phase::Booting => began + self.boot_limit,
            Phase::Leaving => began + LEAVING,
            Phase::Running { last_beat } => {
                let beat = self.silence().map(|silence| *last_beat + silence);
                let command = self.limit.map(|l| began + l);
                let far = Instant::now() + Duration::from_secs(7 * 24 * 3600);
                [beat, command].into_iter().flatten().min().unwrap_or(far)
            }
        };
        until.saturating_duration_since(Instant::now())
    }

    /// After how long a lab that was not heard counts as hung.
    fn silence(&self) -> Option<Duration> {
        if self.order.beat { Some(SILENCE) } else { self.silence }
    }

    /// Which deadline it was that passed.
    fn ending(&self, phase: &Phase) -> Ending {
        match phase {
            Phase::Running { last_beat } if self.silence().is_some_and(|silence| last_beat.elapsed() > silence / 4) => {
                Ending::NoBeat
            }
            Phase::Running { .. } => Ending::CommandTooLong,
            Phase::Booting | Phase::Leaving => Ending::NotUp,
        }
    }

    /// The console log is kept where asked, and after everything but an exit code.
    fn keep_console(&self, folder: &Path, outcome: &Outcome) {
        let log = folder.join("console.log");
        if let Some(to) = &self.machine.console
            && let Err(e) = fs::copy(&log, to)
        {
            eprintln!("lab: the console log could not be kept as {}: {e}", to.display());
        }
        let kept = self.cache.kept_console();
        if !matches!(outcome, Outcome::Exit(_)) && fs::copy(&log, &kept).is_ok() {
            eprintln!("lab: console log kept as {}", kept.display());
        }
    }

    /// Unpacks what the guest wrote to the output disk.
    fn take_out(&self, folder: &Path) -> Result<(), Error> {
        if self.order.outputs.is_empty() {
            return Ok(());
        }
        let tree = folder.join("files");
        fs::create_dir_all(&tree).map_err(|e| Error::File(tree.clone(), e))?;
        let unpacked = program(Command::new("tar").arg("-xf").arg(folder.join("out.img")).arg("-C").arg(&tree));
        for wanted in &self.order.outputs {
            let inside = tree.join(wanted.from.strip_prefix("/").unwrap_or(&wanted.from));
            let missing = |why: String| Error::Output(wanted.from.clone(), why);
            if !inside.exists() {
                return Err(missing(unpacked.clone().err().unwrap_or("no such file in the lab".into())));
            }
            program(Command::new("cp").args(["-a", "-T", "--"]).arg(&inside).arg(&wanted.to)).map_err(missing)?;
        }
        Ok(())
    }
}

/// The judgement of the console log.
fn blame(folder: &Path, ending: Ending) -> Outcome {
    let console = fs::read(folder.join("console.log")).unwrap_or_default();
    match judge(&String::from_utf8_lossy(&console), &ending) {
        Some(fault) => Outcome::Fault(fault),
        None => Outcome::TimedOut,
    }
}

/// Starts QEMU so that it dies with us.
fn spawn(program: &Path, machine: &Machine) -> Result<Qemu, Error> {
    let child = Command::new("setpriv")
        .args(["--pdeathsig", "KILL"])
        .arg(program)
        .args(machine.arguments())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn();
    child.map(Qemu).map_err(|e| Error::Spawn("setpriv qemu-system-x86_64", e))
}

/// Waits for the end of the ports, so that the last bytes are out.
fn drain(events: &Receiver<Event>, mut open_ports: usize) {
    let until = Instant::now() + DRAINING;
    while open_ports > 0 {
        match events.recv_timeout(until.saturating_duration_since(Instant::now())) {
            Ok(Event::Closed) => open_ports -= 1,
            Ok(_) => {}
            Err(_) => return,
        }
    }
}

/// Bytes of a file.
fn size(path: &Path) -> Result<u64, Error> {
    Ok(fs::metadata(path).map_err(|e| Error::File(path.to_path_buf(), e))?.len())
}

/// An empty sparse file for the output disk.
fn sparse(path: &Path) -> Result<PathBuf, Error> {
    let fail = |e| Error::File(path.to_path_buf(), e);
    fs::File::create(path).map_err(fail)?.set_len(OUTPUT_BYTES).map_err(fail)?;
    Ok(path.to_path_buf())
}

/// Runs a program; its stderr is the error.
fn program(command: &mut Command) -> Result<(), String> {
    let output = command.output().map_err(|e| format!("{command:?}: {e}"))?;
    if output.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&output.stderr).trim().to_string()) }
}
