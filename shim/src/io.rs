//! Standard streams: between the guest's vsock streams and the fifos or files that containerd named.
//!
//! ```text
//!   guest ──stream──► pump ──► stdout, stderr     ends at the guest's end of file
//!   guest ◄──stream── pump ◄── stdin              ends at the fifo's end of file or CloseIO, with a half-close
//! ```
//!
//! * Back-pressure end to end: a pump holds one buffer of [`BUFFER`] bytes and reads again when it is written.
//! * Output fifos are opened for reading and writing: a reader may go and come back without EPIPE. The stdin fifo is
//!   opened for reading, non-blocking: its end of file is the moment when its last writer has gone.
//! * [`Streams::drained`] is what the exit event waits for. The guest has written everything by then, so silence means
//!   the end: after [`IDLE`] without a byte from the guest, or [`STALLED`] without one accepted by the reader, it stops
//!   waiting. The pumps go on until [`Streams::close`], so a late reader still gets what is there.
//! * Failure paths: a stream that breaks ends as at end of file; an output that breaks (a full disk) is logged, and the
//!   guest's bytes are thrown away rather than blocking it.

use std::{
    io,
    os::unix::fs::FileTypeExt,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use tokio::{
    fs::{self, OpenOptions},
    io::{AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::{
        UnixStream,
        unix::pipe::{self, Receiver},
    },
    sync::{Mutex, Notify, oneshot},
    task::JoinSet,
    time::sleep,
};

/// Bytes that one pump holds.
const BUFFER: usize = 64 * 1024;

/// After exit: how long the guest's streams may stay silent before they count as ended.
const IDLE: Duration = Duration::from_secs(1);

/// After exit: how long a reader may accept nothing before the exit is reported without it.
const STALLED: Duration = Duration::from_secs(10);

/// How often progress is looked at.
const TICK: Duration = Duration::from_millis(100);

/// Why a stream cannot be set up.
#[derive(Debug, thiserror::Error)]
pub enum IoError {
    /// The named place cannot be opened.
    #[error("cannot open {stream} at {place}: {source}")]
    Open {
        /// stdin, stdout or stderr.
        stream: &'static str,
        /// The place.
        place: String,
        /// The reason.
        source: io::Error,
    },
    /// A scheme that is not spoken here.
    #[error("{stream} to {place} is not supported yet; use fifos or file://")]
    Scheme {
        /// stdin, stdout or stderr.
        stream: &'static str,
        /// The place.
        place: String,
    },
}

/// The guest's end of a stream, as soon as it has arrived.
pub type Slot = oneshot::Receiver<UnixStream>;

type Sink = Box<dyn AsyncWrite + Send + Unpin>;

/// What containerd named, opened; not connected to anything yet.
#[derive(Default)]
pub struct Ends {
    stdin: Option<Receiver>,
    stdout: Option<Sink>,
    stderr: Option<Sink>,
}

/// Which of the streams exist.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Present {
    /// There is somebody to read from.
    pub stdin: bool,
    /// There is somebody to write to.
    pub stdout: bool,
    /// There is somebody to write errors to.
    pub stderr: bool,
}

impl Ends {
    /// Opens what is named; an empty name means the null device.
    pub async fn open(stdin: &str, stdout: &str, stderr: &str) -> Result<Self, IoError> {
        Ok(Self {
            stdin: open_input(stdin)?,
            stdout: open_output("stdout", stdout).await?,
            stderr: open_output("stderr", stderr).await?,
        })
    }

    /// Which of them exist.
    #[must_use]
    pub fn present(&self) -> Present {
        Present { stdin: self.stdin.is_some(), stdout: self.stdout.is_some(), stderr: self.stderr.is_some() }
    }
}

fn open_input(place: &str) -> Result<Option<Receiver>, IoError> {
    if place.is_empty() {
        return Ok(None);
    }
    let path = plain("stdin", place)?;
    pipe::OpenOptions::new().open_receiver(path).map(Some).map_err(|source| failed("stdin", place, source))
}

async fn open_output(stream: &'static str, place: &str) -> Result<Option<Sink>, IoError> {
    if place.is_empty() {
        return Ok(None);
    }
    let path = plain(stream, place)?;
    let is_fifo = fs::metadata(&path).await.is_ok_and(|metadata| metadata.file_type().is_fifo());
    let sink = if is_fifo {
        pipe::OpenOptions::new().read_write(true).open_sender(path).map(|pipe| Box::new(pipe) as Sink)
    } else {
        append_to(&path).await.map(|file| Box::new(file) as Sink)
    };
    sink.map(Some).map_err(|source| failed(stream, place, source))
}

fn plain(stream: &'static str, place: &str) -> Result<PathBuf, IoError> {
    match place.split_once("://") {
        None => Ok(place.into()),
        // containerd may add a query; it has no meaning for files.
        Some(("file", path)) => Ok(path.split('?').next().unwrap_or_default().into()),
        Some(_) => Err(IoError::Scheme { stream, place: place.to_owned() }),
    }
}

async fn append_to(path: &Path) -> io::Result<fs::File> {
    if let Some(directory) = path.parent() {
        fs::create_dir_all(directory).await?;
    }
    OpenOptions::new().create(true).append(true).open(path).await
}

fn failed(stream: &'static str, place: &str, source: io::Error) -> IoError {
    IoError::Open { stream, place: place.to_owned(), source }
}

/// How far the output pumps are.
#[derive(Debug, Default)]
struct Progress {
    /// Grows with every byte taken and every byte given.
    moved: AtomicU64,
    /// Some pump waits for its reader.
    writing: AtomicBool,
}

/// The running pumps of one process.
pub struct Streams {
    outputs: Mutex<JoinSet<()>>,
    progress: Arc<Progress>,
    inputs: Mutex<JoinSet<()>>,
    close_stdin: Arc<Notify>,
}

impl Streams {
    /// Starts to pump between `ends` and the guest's streams; a slot is used only where an end exists.
    #[must_use]
    pub fn start(ends: Ends, stdin: Option<Slot>, stdout: Option<Slot>, stderr: Option<Slot>) -> Self {
        let (mut outputs, mut inputs) = (JoinSet::new(), JoinSet::new());
        let progress = Arc::new(Progress::default());
        let close_stdin = Arc::new(Notify::new());
        for (slot, sink) in [(stdout, ends.stdout), (stderr, ends.stderr)] {
            if let (Some(slot), Some(sink)) = (slot, sink) {
                outputs.spawn(pump_out(slot, sink, progress.clone()));
            }
        }
        if let (Some(slot), Some(fifo)) = (stdin, ends.stdin) {
            inputs.spawn(pump_in(slot, fifo, close_stdin.clone()));
        }
        Self { outputs: Mutex::new(outputs), progress, inputs: Mutex::new(inputs), close_stdin }
    }

    /// Ends the process's input after what the fifo holds. Harmless when repeated and after the end.
    pub fn close_stdin(&self) {
        self.close_stdin.notify_one();
    }

    /// Returns when every byte of output has been delivered, or no more can be expected.
    pub async fn drained(&self) {
        let mut outputs = self.outputs.lock().await;
        let (mut moved, mut still) = (self.progress.moved.load(Ordering::Relaxed), Duration::ZERO);
        loop {
            tokio::select! {
                biased;
                ended = outputs.join_next() => if ended.is_none() { return },
                () = sleep(TICK) => {
                    let now = self.progress.moved.load(Ordering::Relaxed);
                    still = if now == moved { still + TICK } else { Duration::ZERO };
                    moved = now;
                    let bound = if self.progress.writing.load(Ordering::Relaxed) { STALLED } else { IDLE };
                    if still >= bound {
                        return log::warn!("output made no progress for {bound:?} after exit; reporting the exit");
                    }
                }
            }
        }
    }

    /// Ends all pumps.
    pub async fn close(&self) {
        self.inputs.lock().await.shutdown().await;
        self.outputs.lock().await.shutdown().await;
    }
}

async fn pump_out(slot: Slot, mut sink: Sink, progress: Arc<Progress>) {
    let Ok(mut stream) = slot.await else { return };
    let mut buffer = vec![0; BUFFER];
    let mut broken = false;
    loop {
        let length = match stream.read(&mut buffer).await {
            Ok(0) | Err(_) => break,
            Ok(length) => length,
        };
        progress.moved.fetch_add(1, Ordering::Relaxed);
        if broken {
            continue;
        }
        progress.writing.store(true, Ordering::Relaxed);
        if let Err(error) = deliver(&mut sink, buffer.get(..length).unwrap_or_default(), &progress).await {
            log::error!("output of a container is lost from here on: {error}");
            broken = true;
        }
        progress.writing.store(false, Ordering::Relaxed);
    }
    let _ = sink.flush().await;
}

async fn deliver(sink: &mut Sink, mut bytes: &[u8], progress: &Progress) -> io::Result<()> {
    while !bytes.is_empty() {
        let length = sink.write(bytes).await?;
        if length == 0 {
            return Err(io::ErrorKind::WriteZero.into());
        }
        progress.moved.fetch_add(1, Ordering::Relaxed);
        bytes = bytes.get(length..).unwrap_or_default();
    }
    Ok(())
}

async fn pump_in(slot: Slot, mut fifo: Receiver, close: Arc<Notify>) {
    let Ok(mut stream) = slot.await else { return };
    let (mut buffer, mut closing) = (vec![0; BUFFER], false);
    loop {
        let length = if closing {
            // What was written before CloseIO came. Not `try_read`: it believes the runtime, which may not have looked.
            rustix::io::read(&fifo, &mut buffer).unwrap_or(0)
        } else {
            tokio::select! {
                biased;
                read = fifo.read(&mut buffer) => read.unwrap_or(0),
                () = close.notified() => {
                    closing = true;
                    continue;
                }
            }
        };
        let bytes = buffer.get(..length).unwrap_or_default();
        if bytes.is_empty() || stream.write_all(bytes).await.is_err() {
            break;
        }
    }
    drop(fifo);
    if stream.shutdown().await.is_ok() {
        // Held open until the guest closes its side: closing both would look like a reset to it.
        let _ = stream.read(&mut buffer).await;
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, io::Read, os::unix::fs::OpenOptionsExt};

    use rustix::fs::{CWD, FileType, Mode, mknodat};

    use super::*;

    fn fifo(directory: &Path, name: &str) -> String {
        let path = directory.join(name);
        mknodat(CWD, &path, FileType::Fifo, Mode::from_raw_mode(0o600), 0).expect("mkfifo");
        path.display().to_string()
    }

    fn connected() -> (Slot, UnixStream) {
        let (ours, guest) = UnixStream::pair().expect("socketpair");
        let (sender, slot) = oneshot::channel();
        sender.send(ours).expect("slot is waiting");
        (slot, guest)
    }

    #[tokio::test]
    async fn every_byte_is_in_the_fifo_when_drained_returns() {
        let directory = tempfile::tempdir().expect("temporary directory");
        let place = fifo(directory.path(), "out");
        let ends = Ends::open("", &place, "").await.expect("open");
        assert_eq!(ends.present(), Present { stdin: false, stdout: true, stderr: false });
        let (slot, mut guest) = connected();
        let streams = Streams::start(ends, None, Some(slot), None);
        let reader = tokio::task::spawn_blocking(move || {
            let mut text = vec![0; 1_000_000];
            fs::File::open(place).expect("open").read_exact(&mut text).expect("all bytes");
            text
        });
        guest.write_all(&vec![b'x'; 1_000_000]).await.expect("write");
        drop(guest);
        streams.drained().await;
        assert!(reader.await.expect("reader").iter().all(|&byte| byte == b'x'));
    }

    #[tokio::test(start_paused = true)]
    async fn reader_that_never_reads_delays_the_exit_and_does_not_prevent_it() {
        let directory = tempfile::tempdir().expect("temporary directory");
        let place = fifo(directory.path(), "out");
        let ends = Ends::open("", &place, "").await.expect("open");
        let (slot, mut guest) = connected();
        let streams = Streams::start(ends, None, Some(slot), None);
        let writer = tokio::spawn(async move { guest.write_all(&vec![b'x'; 1_000_000]).await });
        streams.drained().await;
        assert!(!writer.is_finished(), "the guest is held back");
        streams.close().await;
    }

    #[tokio::test(start_paused = true)]
    async fn silent_stream_that_stays_open_ends_the_wait() {
        let directory = tempfile::tempdir().expect("temporary directory");
        let ends = Ends::open("", &fifo(directory.path(), "out"), "").await.expect("open");
        let (slot, _guest) = connected();
        Streams::start(ends, None, Some(slot), None).drained().await;
    }

    #[tokio::test]
    async fn end_of_stdin_reaches_the_guest_after_its_bytes() {
        let directory = tempfile::tempdir().expect("temporary directory");
        let place = fifo(directory.path(), "in");
        let ends = Ends::open(&place, "", "").await.expect("open");
        let (slot, mut guest) = connected();
        let _streams = Streams::start(ends, Some(slot), None, None);
        let writer = tokio::task::spawn_blocking(move || fs::write(place, "hello"));
        let mut text = String::new();
        guest.read_to_string(&mut text).await.expect("read");
        writer.await.expect("join").expect("write");
        assert_eq!(text, "hello");
    }

    #[tokio::test]
    async fn close_io_ends_stdin_while_its_writer_lives_and_may_be_repeated() {
        let directory = tempfile::tempdir().expect("temporary directory");
        let place = fifo(directory.path(), "in");
        let ends = Ends::open(&place, "", "").await.expect("open");
        let mut writer = fs::OpenOptions::new().write(true).custom_flags(0).open(&place).expect("open");
        io::Write::write_all(&mut writer, b"last words").expect("write");
        let (slot, mut guest) = connected();
        let streams = Streams::start(ends, Some(slot), None, None);
        streams.close_stdin();
        streams.close_stdin();
        let mut text = String::new();
        guest.read_to_string(&mut text).await.expect("read");
        assert_eq!(text, "last words");
        streams.close_stdin();
    }

    #[tokio::test]
    async fn file_is_appended_to_and_its_directory_made() {
        let directory = tempfile::tempdir().expect("temporary directory");
        let path = directory.path().join("logs/c1.log");
        let place = format!("file://{}", path.display());
        for _ in 0..2 {
            let ends = Ends::open("", &place, "").await.expect("open");
            let (slot, mut guest) = connected();
            let streams = Streams::start(ends, None, Some(slot), None);
            guest.write_all(b"line\n").await.expect("write");
            drop(guest);
            streams.drained().await;
        }
        assert_eq!(fs::read_to_string(path).expect("read"), "line\nline\n");
    }

    #[tokio::test]
    async fn unknown_scheme_is_refused_by_name() {
        let error = Ends::open("", "binary:///usr/bin/logger?a=b", "").await.err().expect("refused");
        assert!(matches!(error, IoError::Scheme { stream: "stdout", .. }));
    }
}
