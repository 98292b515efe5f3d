//! A device's thread: an event loop that runs while the driver uses the device.
//!
//! ```text
//!   new ──► Idle ──start(device)──► Running ──stop──► Idle … ──drop──► gone
//! ```
//!
//! The thread is born with the device, before the guest runs, so that it can be confined to what its device needs
//! before there is anything to fear: a guest's driver starts and resets devices, but never makes a thread.
//!
//! Invariant: when [`Worker::stop`] returns, the device that ran is dropped and its queues are free.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc::{Receiver, Sender, channel},
    },
    thread::{self, JoinHandle},
};

use event_manager::{EventManager, EventOps, Events, MutEventSubscriber, SubscriberOps};
use vmm_sys_util::{
    epoll::EventSet,
    eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd},
};

use crate::StartError;

/// What runs on the thread.
pub type Subscriber = Box<dyn MutEventSubscriber + Send>;

/// A thread for one device.
pub struct Worker {
    name: &'static str,
    running: bool,
    stop: EventFd,
    /// Closed to end the thread.
    devices: Option<Sender<Subscriber>>,
    /// Hears of every device that the thread has let go of.
    released: Receiver<()>,
    thread: Option<JoinHandle<()>>,
}

/// The stop event as a subscriber beside the device. It tells the loop, which would otherwise have to read the event
/// after every turn: a system call for each request of the guest.
struct Stopper {
    bell: EventFd,
    rang: Arc<AtomicBool>,
}

impl MutEventSubscriber for Stopper {
    fn process(&mut self, _events: Events, _ops: &mut EventOps<'_>) {
        self.rang.store(true, Ordering::Relaxed);
    }

    fn init(&mut self, ops: &mut EventOps<'_>) {
        // Failing to add one's own fresh eventfd to a fresh epoll is not a state to go on in.
        ops.add(Events::new(&self.bell, EventSet::IN)).expect("epoll takes the stop event");
    }
}

impl Worker {
    /// Starts an idle thread called `name` (at most 15 bytes), which calls `confine` first of all.
    pub fn new(name: &'static str, confine: impl FnOnce() + Send + 'static) -> io::Result<Self> {
        let stop = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?;
        let seen = stop.try_clone()?;
        let (devices, waiting) = channel::<Subscriber>();
        let (release, released) = channel();
        let run = move || {
            confine();
            for device in waiting {
                if let Err(error) = serve(device, &seen) {
                    log::error!("virtio-{name}: event loop: {error}; the device stops");
                }
                // Nobody listens only if the worker is being dropped.
                let _ = release.send(());
            }
        };
        let thread = thread::Builder::new().name(name.into()).spawn(run)?;
        Ok(Self { name, running: false, stop, devices: Some(devices), released, thread: Some(thread) })
    }

    /// Runs a device on the thread, which must be idle.
    pub fn start(&mut self, device: Subscriber) -> Result<(), StartError> {
        assert!(!self.running, "the transport stops a device before it starts it again");
        let sent = self.devices.as_ref().is_some_and(|devices| devices.send(device).is_ok());
        if !sent {
            let error = io::Error::other("its thread has ended");
            return Err(StartError::Worker { device: self.name, error });
        }
        self.running = true;
        Ok(())
    }

    /// Stops the device, if one runs, and waits until the thread has let go of it.
    pub fn stop(&mut self) {
        if !self.running {
            return;
        }
        self.running = false;
        if self.stop.write(1).is_err() || self.released.recv().is_err() {
            log::error!("virtio-{}: its worker ended by a panic", self.name);
        }
        // The loop has left the bell ringing.
        let _ = self.stop.read();
    }
}

/// Runs the loop of one device until the stop event.
fn serve(device: Subscriber, stop: &EventFd) -> io::Result<()> {
    let mut events = EventManager::<Subscriber>::new().map_err(io::Error::other)?;
    let rang = Arc::new(AtomicBool::new(false));
    events.add_subscriber(Box::new(Stopper { bell: stop.try_clone()?, rang: Arc::clone(&rang) }));
    events.add_subscriber(device);
    // Between two turns of the loop nothing is in flight, so this is where a stop may happen.
    while !rang.load(Ordering::Relaxed) {
        events.run().map_err(io::Error::other)?;
    }
    Ok(())
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.stop();
        self.devices = None;
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            log::error!("virtio-{}: its worker ended by a panic", self.name);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    struct Echo(EventFd, mpsc::Sender<()>);

    impl MutEventSubscriber for Echo {
        fn process(&mut self, _events: Events, _ops: &mut EventOps<'_>) {
            self.0.read().expect("rang");
            self.1.send(()).expect("test listens");
        }

        fn init(&mut self, ops: &mut EventOps<'_>) {
            ops.add(Events::new(&self.0, EventSet::IN)).expect("add");
        }
    }

    #[test]
    fn stopped_worker_has_let_go_of_its_device_and_takes_another() {
        let mut worker = Worker::new("echo", || ()).expect("thread");
        for _ in 0..3 {
            let bell = EventFd::new(EFD_NONBLOCK).expect("eventfd");
            let (sender, heard) = mpsc::channel();
            worker.start(Box::new(Echo(bell.try_clone().expect("dup"), sender))).expect("start");
            bell.write(1).expect("ring");
            heard.recv().expect("the device heard it");
            worker.stop();
            assert!(heard.recv().is_err(), "the device, and its sender with it, is gone");
        }
    }

    #[test]
    fn thread_is_confined_before_any_device_runs() {
        let confined = Arc::new(AtomicBool::new(false));
        let (flag, seen) = (confined.clone(), confined.clone());
        let mut worker = Worker::new("echo", move || flag.store(true, Ordering::SeqCst)).expect("thread");
        let (sender, heard) = mpsc::channel();
        let bell = EventFd::new(EFD_NONBLOCK).expect("eventfd");
        bell.write(1).expect("ring");
        worker.start(Box::new(Echo(bell, sender))).expect("start");
        heard.recv().expect("the device runs");
        assert!(seen.load(Ordering::SeqCst));
    }

    #[test]
    fn worker_that_never_ran_ends() {
        drop(Worker::new("idle", || ()).expect("thread"));
    }
}
