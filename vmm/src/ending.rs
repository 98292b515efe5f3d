//! How a machine ends: the first reason wins, is told to the owner with the console's tail, and ends the process.
//!
//! There is no orderly stop of threads and devices: everything this process holds is a descriptor or its own memory,
//! and the kernel takes both back faster than we could. What must be written back is the guest's to write before it
//! powers off.

use std::{
    os::fd::AsFd,
    process,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use devices::{ConsoleTail, StreamHost};
use vmm_api::{CONSOLE_TAIL_MAX, Channel, Event, ExitReason};

/// The way to the owner, shared by all threads of the machine.
#[derive(Clone)]
pub struct Owner {
    events: Arc<Mutex<Channel>>,
    console: ConsoleTail,
    ended: Arc<AtomicBool>,
}

/// The owner reads events as they come; one that has not for this long is stopped or gone.
const EVENT_DEADLINE: Duration = Duration::from_secs(10);

impl Owner {
    /// Takes the event socket.
    pub fn new(events: Channel) -> Result<Self, vmm_api::ChannelError> {
        events.set_deadline(EVENT_DEADLINE)?;
        Ok(Self {
            events: Arc::new(Mutex::new(events)),
            console: ConsoleTail::new(CONSOLE_TAIL_MAX),
            ended: Arc::default(),
        })
    }

    /// The machine's console.
    pub fn console(&self) -> &ConsoleTail {
        &self.console
    }

    /// Tells the owner something; false if it cannot be told.
    pub fn tell(&self, event: &Event, fds: &[std::os::fd::BorrowedFd<'_>]) -> bool {
        let events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        events.send(event, fds).inspect_err(|error| log::warn!("the owner does not hear {event:?}: {error}")).is_ok()
    }

    /// Ends the process with `reason`.
    pub fn end(&self, reason: ExitReason) -> ! {
        if self.ended.swap(true, Ordering::SeqCst) {
            // Another thread is on its way out; the process ends under us.
            loop {
                thread::park();
            }
        }
        log::info!("{reason}");
        self.tell(&Event::Exited { reason, console: self.console.text() }, &[]);
        process::exit(0);
    }
}

impl StreamHost for Owner {
    fn connected(&mut self, port: u32, stream: std::os::fd::OwnedFd) -> bool {
        self.tell(&Event::Connected { port }, &[stream.as_fd()])
    }
}
