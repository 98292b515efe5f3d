//! Watching over a machine: its events, and how it ended.
//!
//! Failure paths, each of which ends the machine: the agent does not connect in time, the VMM sends nonsense, its socket
//! closes without a last event.

use std::{io, os::fd::AsFd, sync::Arc, time::Duration};

use tokio::{
    io::Interest,
    net::UnixStream,
    task::spawn_blocking,
    time::{Instant, sleep, sleep_until, timeout},
};
use vmm_api::{ChannelError, Event, EventStream, ExitReason};

use super::{Birth, Kvm, LINGER, Phase};
use crate::{
    engine::Sandbox,
    guest::{cleaned, stream},
    locked, trace,
};

/// How much of the console is shown with an error; all of it is in the log.
const CONSOLE_SHOWN: usize = 1200;

/// How long a process may take to be gone after its socket.
const VANISH: Duration = Duration::from_millis(100);

/// Reads events until the machine has ended, then reaps it and says why.
pub(super) async fn watch_over(
    kvm: Arc<Kvm>,
    events: EventStream,
    birth: Birth,
    boot_deadline: Instant,
    boot_timeout: Duration,
) {
    // A second descriptor of the socket is what the runtime polls.
    let last = match events.as_fd().try_clone_to_owned().and_then(stream) {
        Ok(readiness) => read_events(&kvm, &events, birth, &readiness, boot_deadline, boot_timeout).await,
        Err(error) => {
            kvm.kill(&format!("its events cannot be read: {error}"));
            None
        }
    };
    let process = kvm.process.clone();
    // The process ends by itself after its last event; it is not asked twice.
    let linger = async {
        while locked(&process.child).as_mut().is_some_and(|child| matches!(child.try_wait(), Ok(None))) {
            sleep(Duration::from_millis(1)).await;
        }
    };
    let _ = timeout(if last.is_some() { LINGER } else { VANISH }, linger).await;
    let reaper = process.clone();
    let status = spawn_blocking(move || reaper.reap()).await.unwrap_or_default();
    let verdict = locked(&process.verdict).clone();
    let why = match (last, verdict) {
        (Some(last), _) => last,
        (None, Some(verdict)) => verdict,
        (None, None) => {
            // Let the last lines of the log arrive.
            sleep(Duration::from_millis(20)).await;
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
    birth: Birth,
    readiness: &UnixStream,
    boot_deadline: Instant,
    boot_timeout: Duration,
) -> Option<String> {
    let mut birth = Some(birth);
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
            Ok((Event::Born, _)) => match birth.take() {
                Some(birth) => {
                    let process = kvm.process.clone();
                    spawn_blocking(move || birth.complete(&process));
                }
                None => log::warn!("the VMM says that it was born twice"),
            },
            Ok((Event::Entered { at_ns, cpu_ns }, _)) => trace::mark_entry(&kvm.id, at_ns, cpu_ns),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn good_end_is_told_without_a_console() {
        assert_eq!(obituary(&ExitReason::PowerOff, "login:"), "the guest powered off");
        assert_eq!(obituary(&ExitReason::Reset, " \n"), "the guest reset itself");
    }

    #[test]
    fn panic_is_told_with_the_last_whole_lines_of_the_console() {
        let console = format!("{}Kernel panic - not syncing: VFS\n", "x".repeat(99) + "\n").repeat(30);
        let text = obituary(&ExitReason::Panic, &console);
        let start = "the guest kernel panicked; the console ends with:\n";
        assert!(text.starts_with(&format!("{start}x")) || text.starts_with(&format!("{start}Kernel")), "{text}");
        assert!(text.ends_with("not syncing: VFS") && text.len() < CONSOLE_SHOWN + 100);
    }

    #[test]
    fn console_that_is_not_ascii_is_survived() {
        obituary(&ExitReason::Panic, &"é".repeat(CONSOLE_SHOWN));
    }
}
