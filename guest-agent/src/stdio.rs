//! The standard streams of a container.
//!
//! ```text
//!   process ── pipe ──▶ pump (64 KiB) ──▶ stream ──▶ host          stdout, stderr
//!   process ◀── pipe ── pump (64 KiB) ◀── stream ◀── host          stdin
//! ```
//!
//! The process gets pipes and not the streams themselves: `/dev/stdout` of a socket cannot be reopened. The pipes
//! belong to the container's user, so that a program that is not root can reopen them too.
//!
//! Back-pressure: a pump holds at most one buffer and reads again only when all of it is written. So a slow reader on
//! the host stops the process, and nothing grows.
//!
//! End of file: the process closing stdout (or exiting) becomes a half-close of the stream, which stays open until the
//! host closes it (see [`linger`]). The host's half-close
//! becomes the closing of the stdin pipe. A broken stream closes the pipe: the process then gets EPIPE or SIGPIPE.
//!
//! After init has exited:
//! - stdin is dropped at once, what the host still sends is not read;
//! - output pumps run until the pipe's end. That comes at once, since all processes of the container are killed with
//!   init; but a process of another container, to which the pipe was passed, may hold it open for ever. So once init is
//!   gone, a pipe on which nothing comes for [`DRAIN_QUIET`] is closed. Data that is there is never cut, however slow the host reads:
//!   the time counts only while the pump waits for the process.

use std::{io, os::fd::OwnedFd, path::Path, time::Duration};

use agent_proto::Stdio as Ports;
use rustix::{
    fs::{Gid, Mode, OFlags, Uid, fchown, open},
    pipe::{PipeFlags, pipe_with},
};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::unix::pipe,
    sync::watch,
    task::JoinHandle,
};

use crate::link::Link;

/// What a pump holds at most.
pub const BUFFER: usize = 64 * 1024;

/// What is given to a stream in one write. The guest's kernel makes one vsock packet of a write, and from 32 KiB less some
/// bookkeeping on it scatters the packet over several descriptors, which not every vsock device understands.
const MAX_WRITE: usize = 31 * 1024;

/// How long an output pipe may be silent after init's exit before it is given up.
pub const DRAIN_QUIET: Duration = Duration::from_secs(1);

/// Why the streams could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A pipe, or /dev/null.
    #[error("cannot make a pipe for a standard stream: {0}")]
    Pipe(#[from] io::Error),
    /// The host does not listen on a port it named.
    #[error("cannot connect standard stream {name} to port {port} of the host: {error}")]
    #[expect(missing_docs, reason = "named by the message")]
    Dial { name: &'static str, port: u32, error: io::Error },
}

/// The agent's ends of the pipes; `None` where the process has /dev/null.
pub struct Pipes {
    stdin: Option<(u32, pipe::Sender)>,
    stdout: Option<(u32, pipe::Receiver)>,
    stderr: Option<(u32, pipe::Receiver)>,
}

/// Running pumps.
#[derive(Debug)]
pub struct Pumps {
    stdin: Option<JoinHandle<()>>,
    outputs: Vec<JoinHandle<()>>,
    exited: watch::Sender<bool>,
}

/// Makes the process's three descriptors, owned by `user`, and our ends of them.
pub fn make_pipes(ports: &Ports, user: (u32, u32)) -> Result<([OwnedFd; 3], Pipes), Error> {
    let (stdin, our_stdin) = input(ports.stdin_port, user)?;
    let (stdout, our_stdout) = output(ports.stdout_port, user)?;
    let (stderr, our_stderr) = output(ports.stderr_port, user)?;
    Ok(([stdin, stdout, stderr], Pipes { stdin: our_stdin, stdout: our_stdout, stderr: our_stderr }))
}

fn input(port: u32, user: (u32, u32)) -> io::Result<(OwnedFd, Option<(u32, pipe::Sender)>)> {
    if port == 0 {
        return Ok((null(OFlags::RDONLY)?, None));
    }
    let (read, write) = owned_pipe(user)?;
    rustix::io::ioctl_fionbio(&write, true)?;
    Ok((read, Some((port, pipe::Sender::from_owned_fd_unchecked(write)?))))
}

fn output(port: u32, user: (u32, u32)) -> io::Result<(OwnedFd, Option<(u32, pipe::Receiver)>)> {
    if port == 0 {
        return Ok((null(OFlags::WRONLY)?, None));
    }
    let (read, write) = owned_pipe(user)?;
    rustix::io::ioctl_fionbio(&read, true)?;
    Ok((write, Some((port, pipe::Receiver::from_owned_fd_unchecked(read)?))))
}

fn null(mode: OFlags) -> io::Result<OwnedFd> {
    Ok(open(Path::new("/dev/null"), mode | OFlags::CLOEXEC, Mode::empty())?)
}

fn owned_pipe((uid, gid): (u32, u32)) -> io::Result<(OwnedFd, OwnedFd)> {
    let (read, write) = pipe_with(PipeFlags::CLOEXEC)?;
    if (uid, gid) != (0, 0) {
        // Both ends are one inode.
        fchown(&write, Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)))?;
    }
    Ok((read, write))
}

impl Pipes {
    /// Connects each pipe with its stream and starts to pump.
    pub async fn connect(self, link: &Link) -> Result<Pumps, Error> {
        let (exited, watch) = watch::channel(false);
        let mut pumps = Pumps { stdin: None, outputs: Vec::with_capacity(2), exited };
        for (name, end) in [("stdout", self.stdout), ("stderr", self.stderr)] {
            if let Some((port, pipe)) = end {
                let stream = link.dial(port).await.map_err(|error| Error::Dial { name, port, error })?;
                let (read, write) = stream.halves();
                let watch = watch.clone();
                pumps.outputs.push(tokio::spawn(async move {
                    if let Some(write) = pump_out(pipe, write, watch).await {
                        tokio::spawn(linger(read, write));
                    }
                }));
            }
        }
        if let Some((port, pipe)) = self.stdin {
            let stream = link.dial(port).await.map_err(|error| Error::Dial { name: "stdin", port, error })?;
            let (read, kept) = stream.halves();
            pumps.stdin = Some(tokio::spawn(async move {
                pump_in(read, pipe).await;
                drop(kept);
            }));
        }
        Ok(pumps)
    }
}

impl Pumps {
    /// To be called when init has exited: returns when all its output is handed to the streams.
    pub async fn drain(&mut self) {
        if let Some(stdin) = self.stdin.take() {
            stdin.abort();
        }
        self.exited.send_replace(true);
        for output in self.outputs.drain(..) {
            // A pump that panicked ended the agent; one that was aborted has nothing more to write.
            let _ = output.await;
        }
    }

    /// Stops everything at once.
    pub fn abort(&self) {
        self.stdin.iter().chain(&self.outputs).for_each(JoinHandle::abort);
    }
}

impl Drop for Pumps {
    fn drop(&mut self) {
        self.abort();
    }
}

/// Moves what the process writes, then half-closes the stream and returns it; nothing if the stream broke.
async fn pump_out<W: AsyncWrite + Unpin>(
    mut pipe: impl AsyncRead + Unpin,
    mut stream: W,
    mut exited: watch::Receiver<bool>,
) -> Option<W> {
    let mut buffer = vec![0; BUFFER];
    loop {
        let read = tokio::select! {
            biased;
            read = pipe.read(&mut buffer) => read,
            () = quiet_after_exit(&mut exited) => break,
        };
        let Ok(len @ 1..) = read else { break };
        for part in buffer[..len].chunks(MAX_WRITE) {
            stream.write_all(part).await.ok()?;
        }
    }
    stream.shutdown().await.ok()?;
    Some(stream)
}

/// Holds a stream whose output has ended until the host closes it. A vsock that is closed while the device still holds
/// bytes for a slow reader is reset by the kernel after 8 seconds, and the bytes are lost.
async fn linger(mut read: impl AsyncRead + Unpin, write: impl AsyncWrite) {
    let mut nothing = [0; 16];
    while let Ok(1..) = read.read(&mut nothing).await {}
    drop(write);
}

/// Ends [`DRAIN_QUIET`] after init has exited, counted from when the caller began to wait.
async fn quiet_after_exit(exited: &mut watch::Receiver<bool>) {
    // A dropped sender means that the container is being torn down.
    let _ = exited.wait_for(|exited| *exited).await;
    tokio::time::sleep(DRAIN_QUIET).await;
}

/// Moves what the host sends until its half-close, then closes the pipe. A process that has closed its stdin ends it.
async fn pump_in(mut stream: impl AsyncRead + Unpin, mut pipe: impl AsyncWrite + Unpin) {
    let mut buffer = vec![0; BUFFER];
    while let Ok(len @ 1..) = stream.read(&mut buffer).await {
        if pipe.write_all(&buffer[..len]).await.is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::net::UnixStream;

    use super::*;

    fn runtime(test: impl Future<Output = ()>) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("runtime");
        runtime.block_on(test);
    }

    fn nonblocking_pipe() -> (pipe::Sender, pipe::Receiver) {
        pipe::pipe().expect("pipe")
    }

    #[test]
    fn output_arrives_whole_and_ends_with_a_half_close() {
        runtime(async {
            let (mut process, pipe) = nonblocking_pipe();
            let (ours, mut host) = UnixStream::pair().expect("pair");
            let (_exited, watch) = watch::channel(false);
            let pump = tokio::spawn(pump_out(pipe, ours, watch));
            let sent: Vec<u8> = (0..3 * BUFFER + 17).map(|at| at as u8).collect();
            let copy = sent.clone();
            tokio::spawn(async move { process.write_all(&copy).await });
            let mut got = Vec::new();
            host.read_to_end(&mut got).await.expect("read");
            assert_eq!(got, sent);
            pump.await.expect("pump ends");
        });
    }

    #[test]
    fn a_host_that_does_not_read_stops_the_process() {
        runtime(async {
            let (process, pipe) = nonblocking_pipe();
            let (ours, host) = UnixStream::pair().expect("pair");
            let (_exited, watch) = watch::channel(false);
            tokio::spawn(pump_out(pipe, ours, watch));
            let mut written = 0;
            // Full when it stays unwritable although the pump had its turns.
            while let Ok(Ok(())) = tokio::time::timeout(Duration::from_millis(200), process.writable()).await {
                written += process.try_write(&[7; 4096]).unwrap_or(0);
            }
            // Pipe 64 KiB, buffer 64 KiB, socket some 200 KiB.
            assert!(written < 1024 * 1024, "{written} bytes were swallowed");
            drop(host);
        });
    }

    #[test]
    fn input_reaches_the_process_and_its_half_close_closes_the_pipe() {
        runtime(async {
            let (pipe, mut process) = nonblocking_pipe();
            let (ours, mut host) = UnixStream::pair().expect("pair");
            tokio::spawn(pump_in(ours, pipe));
            host.write_all(b"hello").await.expect("write");
            host.shutdown().await.expect("half-close");
            let mut got = String::new();
            process.read_to_string(&mut got).await.expect("read");
            assert_eq!(got, "hello");
        });
    }

    #[test]
    fn a_process_that_outlives_init_and_keeps_the_pipe_does_not_hold_the_drain() {
        runtime(async {
            tokio::time::pause();
            let (mut process, pipe) = nonblocking_pipe();
            let (ours, mut host) = UnixStream::pair().expect("pair");
            let (exited, watch) = watch::channel(false);
            let output = tokio::spawn(async move { drop(pump_out(pipe, ours, watch).await) });
            process.write_all(b"last words").await.expect("write");
            let mut pumps = Pumps { stdin: None, outputs: vec![output], exited };
            pumps.drain().await;
            let mut got = String::new();
            host.read_to_string(&mut got).await.expect("read");
            assert_eq!(got, "last words");
            drop(process);
        });
    }
}
