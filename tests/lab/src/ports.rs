//! The guest's ports as events.
//!
//! Each port is a Unix socket that listens before QEMU starts; QEMU connects to it. One thread a port reads until the end:
//! control lines become [`Event`]s, output bytes go straight to our stdout and stderr, unbuffered, and the end of a port
//! is an event too, so that nothing is cut off and nobody polls. QEMU's own stderr is read in the same way: its end is
//! QEMU's end. A port that is never connected (QEMU did not start) leaves its thread in `accept`; it ends with the process.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::mpsc::Sender;
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::Duration;

/// What a boot can hear.
#[derive(Debug)]
pub enum Event {
    /// The command starts now.
    Up,
    /// A sign of life.
    Beat,
    /// The lab could not be set up.
    SetupFailed(String),
    /// The command's exit code.
    Exit(i32),
    /// An output port is at its end.
    Closed,
    /// QEMU is gone; its last words.
    QemuGone(String),
}

/// A port's socket could not be made.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen on {0}: {1}; is NACRE_CACHE a very long path?")]
pub struct Error(PathBuf, #[source] io::Error);

/// Listens on `folder/name`.
fn listen(folder: &Path, name: &str) -> Result<UnixListener, Error> {
    let path = folder.join(name);
    UnixListener::bind(&path).map_err(|e| Error(path, e))
}

/// The way back to the guest's control port, once QEMU has connected to it.
#[derive(Debug, Clone, Default)]
pub struct Nudge(Arc<OnceLock<UnixStream>>);

impl Nudge {
    /// How long a byte may take that QEMU does not want; there is another one later.
    const PATIENCE: Duration = Duration::from_millis(100);

    /// Sends the guest a byte, for the interrupt that comes with it.
    ///
    /// Emulating a CPU, QEMU may lose the note that an interrupt is pending: one thread clears a bit of the same word
    /// without the lock under which another sets it (seen in 7.2, at the exits of nested guests: the timer's vector
    /// stands in the local APIC, interrupts are on, and the CPU sleeps). The next interrupt of any kind wakes it, and
    /// an idle machine whose timer is lost has no next one.
    pub fn send(&self) {
        // If nobody takes it, the guest has not come so far, or is gone.
        let _ = self.0.get().map(|mut port| port.write_all(b"\n"));
    }
}

/// Control lines become events.
pub fn control(folder: &Path, events: Sender<Event>) -> Result<Nudge, Error> {
    let listener = listen(folder, "ctl")?;
    let nudge = Nudge::default();
    let back = nudge.clone();
    thread::spawn(move || {
        let Ok((stream, _)) = listener.accept() else { return };
        if let Ok(port) =
            stream.try_clone().and_then(|port| port.set_write_timeout(Some(Nudge::PATIENCE)).map(|()| port))
        {
            let _ = back.0.set(port);
        }
        for line in BufReader::new(stream).lines().map_while(Result::ok) {
            // A line that is not known comes from a newer guest script: ignoring it is right.
            if let Some(event) = parse(&line)
                && events.send(event).is_err()
            {
                return;
            }
        }
    });
    Ok(nudge)
}

/// One line of lab-init.
fn parse(line: &str) -> Option<Event> {
    let (word, rest) = line.split_once(' ').unwrap_or((line, ""));
    match word {
        "up" => Some(Event::Up),
        "beat" => Some(Event::Beat),
        "fault" => Some(Event::SetupFailed(rest.to_string())),
        "exit" => rest.trim().parse().ok().map(Event::Exit),
        _ => None,
    }
}

/// Output bytes go to `sink` as they come.
pub fn output(
    folder: &Path,
    name: &str,
    sink: impl Write + Send + 'static,
    events: Sender<Event>,
) -> Result<(), Error> {
    let listener = listen(folder, name)?;
    thread::spawn(move || {
        if let Ok((stream, _)) = listener.accept() {
            // A sign of life like any other.
            pump(stream, sink, || drop(events.send(Event::Beat)));
        }
        let _ = events.send(Event::Closed);
    });
    Ok(())
}

/// A terminal: both directions, keys from our stdin.
pub fn terminal(folder: &Path, events: Sender<Event>) -> Result<(), Error> {
    let listener = listen(folder, "tty")?;
    thread::spawn(move || {
        if let Ok((stream, _)) = listener.accept() {
            if let Ok(keys) = stream.try_clone() {
                thread::spawn(move || pump(io::stdin(), keys, || {}));
            }
            pump(stream, io::stdout(), || {});
        }
        let _ = events.send(Event::Closed);
    });
    Ok(())
}

/// QEMU's stderr: what it says last, and the news of its end.
pub fn last_words(mut stderr: impl Read + Send + 'static, events: Sender<Event>) {
    thread::spawn(move || {
        let mut text = String::new();
        let _ = stderr.read_to_string(&mut text);
        let _ = events.send(Event::QemuGone(text.trim().to_string()));
    });
}

/// Copies until the end, and says when there is something. A reader of ours that went away does not stop the guest: its
/// bytes are dropped then.
fn pump(mut from: impl Read, mut to: impl Write, heard: impl Fn()) {
    let mut buffer = [0; 64 * 1024];
    let mut open = true;
    while let Ok(n) = from.read(&mut buffer) {
        if n == 0 {
            return;
        }
        heard();
        open = open && to.write_all(&buffer[..n]).and_then(|()| to.flush()).is_ok();
    }
}

/// For tests of the guest's half: connects as QEMU does.
pub fn connect(folder: &Path, name: &str) -> io::Result<UnixStream> {
    UnixStream::connect(folder.join(name))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[test]
    fn lines_are_events() {
        assert!(matches!(parse("up"), Some(Event::Up)));
        assert!(matches!(parse("exit 137"), Some(Event::Exit(137))));
        assert!(matches!(parse("fault no /dev/kvm"), Some(Event::SetupFailed(t)) if t == "no /dev/kvm"));
        assert!(parse("exit many").is_none() && parse("").is_none());
    }

    #[test]
    fn a_port_delivers_and_says_when_it_ends() {
        let folder = tempfile::tempdir().expect("a folder");
        let (send, events) = mpsc::channel();
        let nudge = control(folder.path(), send.clone()).expect("listens");
        nudge.send();
        output(folder.path(), "out", io::sink(), send).expect("listens");
        let mut ctl = connect(folder.path(), "ctl").expect("connects");
        ctl.write_all(b"up\nexit 3\n").expect("written");
        assert!(matches!(events.recv(), Ok(Event::Up)));
        assert!(matches!(events.recv(), Ok(Event::Exit(3))));
        nudge.send();
        let mut byte = [0];
        ctl.read_exact(&mut byte).expect("nudged");
        connect(folder.path(), "out").expect("connects").write_all(b"words").expect("written");
        assert!(matches!(events.recv(), Ok(Event::Beat)));
        assert!(matches!(events.recv(), Ok(Event::Closed)));
    }
}
