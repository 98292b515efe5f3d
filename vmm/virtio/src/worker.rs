//! A device's thread: an event loop that ends when the device is stopped or dropped.

use std::{
    io,
    thread::{self, JoinHandle},
};

use event_manager::{EventManager, EventOps, Events, MutEventSubscriber, SubscriberOps};
use vmm_sys_util::{
    epoll::EventSet,
    eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd},
};

/// What runs on the thread.
pub type Subscriber = Box<dyn MutEventSubscriber + Send>;

/// A running event loop with one device on it.
pub struct Worker {
    stop: EventFd,
    thread: Option<JoinHandle<()>>,
}

/// The stop event as a subscriber beside the device; it needs to do nothing, since waking the loop is enough.
struct Stopper(EventFd);

impl MutEventSubscriber for Stopper {
    fn process(&mut self, _events: Events, _ops: &mut EventOps<'_>) {}

    fn init(&mut self, ops: &mut EventOps<'_>) {
        // Failing to add one's own fresh eventfd to a fresh epoll is not a state to go on in.
        ops.add(Events::new(&self.0, EventSet::IN)).expect("epoll takes the stop event");
    }
}

impl Worker {
    /// Starts a thread called `name` (at most 15 bytes) and runs `device` on it.
    pub fn spawn(name: &'static str, device: Subscriber) -> io::Result<Self> {
        let stop = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?;
        let seen = stop.try_clone()?;
        let mut events = EventManager::<Subscriber>::new().map_err(io::Error::other)?;
        events.add_subscriber(Box::new(Stopper(stop.try_clone()?)));
        let run = move || {
            events.add_subscriber(device);
            // Between two turns of the loop nothing is in flight, so this is where a stop may happen.
            while seen.read().is_err() {
                if let Err(error) = events.run() {
                    log::error!("virtio-{name}: event loop: {error}; the device stops");
                    return;
                }
            }
        };
        let thread = thread::Builder::new().name(name.into()).spawn(run)?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for Worker {
    /// Stops the loop and waits for the thread, so that the queues are free when this returns.
    fn drop(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        if self.stop.write(1).is_ok() && thread.join().is_err() {
            log::error!("a virtio worker ended by a panic");
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
    fn dropped_worker_has_let_go_of_its_device() {
        let bell = EventFd::new(EFD_NONBLOCK).expect("eventfd");
        let (sender, heard) = mpsc::channel();
        let worker = Worker::spawn("echo", Box::new(Echo(bell.try_clone().expect("dup"), sender))).expect("spawn");
        bell.write(1).expect("ring");
        heard.recv().expect("the device heard it");
        drop(worker);
        assert!(heard.recv().is_err(), "the device, and its sender with it, is gone");
    }
}
