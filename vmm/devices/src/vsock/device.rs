//! The queues and the event loop of the socket device.
//!
//! One turn: take what woke us (packets from the guest, news of a stream, a dial), then let streams speak as long as the
//! guest has room in its receive queue, then tell the event loop which streams are new and which are gone. If the guest
//! has no room, everything waits for its doorbell.

use std::{
    io,
    os::fd::OwnedFd,
    sync::{
        Arc,
        mpsc::{Receiver, SyncSender, sync_channel},
    },
    time::Duration,
};

use event_manager::{EventOps, Events, MutEventSubscriber};
use virtio::{Activation, Chain, Device, Memory, QueueError, StartError, Virtqueue, Worker};
use virtio_bindings::virtio_ids::VIRTIO_ID_VSOCK;
use vmm_sys_util::{
    epoll::EventSet,
    eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd},
};

use super::{
    mux::{DialReply, Mux, StreamHost},
    packet::{HEADER_SIZE, Header},
    span::Span,
};

/// The guest's context id: any but the reserved ones, since no other guest can see it.
pub(super) const GUEST_CID: u64 = 3;

pub(super) const RECEIVE: usize = 0;
pub(super) const TRANSMIT: usize = 1;

/// Sources of events that are no stream.
pub(super) const TRANSMIT_BELL: u32 = 0;
pub(super) const RECEIVE_BELL: u32 = 1;
pub(super) const DIAL_BELL: u32 = 2;
pub(super) const FIRST_STREAM: u32 = 16;

/// Dials that may wait for the worker at once; the owner has one at a time under way.
const MAX_DIALS: usize = 16;

/// Why a dial failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum DialError {
    /// The guest refused.
    #[error("nothing in the guest listens on that port")]
    Refused,
    /// The guest did not answer.
    #[error("the guest did not answer in time")]
    TimedOut,
    /// No place for another stream.
    #[error("the machine has too many open streams")]
    TooMany,
    /// The driver is not there, or has been reset.
    #[error("the guest's socket driver is not running")]
    NotRunning,
}

/// Opens streams into the guest, from any thread.
#[derive(Debug, Clone)]
pub struct Dialer {
    requests: SyncSender<(u32, DialReply)>,
    bell: Arc<EventFd>,
}

impl Dialer {
    /// Opens a stream to `port` in the guest, and waits for its answer at most `deadline`.
    pub fn dial(&self, port: u32, deadline: Duration) -> Result<OwnedFd, DialError> {
        let (reply, answer) = sync_channel(1);
        self.requests.try_send((port, reply)).map_err(|_| DialError::NotRunning)?;
        self.bell.write(1).map_err(|_| DialError::NotRunning)?;
        answer.recv_timeout(deadline).map_err(|_| DialError::TimedOut)?
    }
}

/// The socket device.
pub struct Vsock {
    config: [u8; 8],
    idle: Option<Parts>,
    worker: Worker,
}

/// What the worker takes with it; a device that has been reset cannot be started again, since its streams are gone and
/// the owner would not know.
struct Parts {
    host: Box<dyn StreamHost>,
    dials: Receiver<(u32, DialReply)>,
    bell: Arc<EventFd>,
}

impl Vsock {
    /// A device whose streams from the guest go to `host`, on `worker`, and the way to open streams to the guest.
    pub fn new(host: Box<dyn StreamHost>, worker: Worker) -> io::Result<(Self, Dialer)> {
        let bell = Arc::new(EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?);
        let (requests, dials) = sync_channel(MAX_DIALS);
        let dialer = Dialer { requests, bell: Arc::clone(&bell) };
        let device = Self { config: GUEST_CID.to_le_bytes(), idle: Some(Parts { host, dials, bell }), worker };
        Ok((device, dialer))
    }
}

impl Device for Vsock {
    fn name(&self) -> &'static str {
        "vsock"
    }

    fn id(&self) -> u32 {
        VIRTIO_ID_VSOCK
    }

    fn queue_sizes(&self) -> &[u16] {
        &[128, 128, 16]
    }

    fn config_space(&self) -> &[u8] {
        &self.config
    }

    fn start(&mut self, mut activation: Activation) -> Result<(), StartError> {
        let reset = || StartError::Worker { device: "vsock", error: io::Error::other("the device was reset") };
        let parts = self.idle.take().ok_or_else(reset)?;
        let transmit = activation.queues.remove(TRANSMIT);
        let receive = activation.queues.remove(RECEIVE);
        let mux = Mux::new(parts.host, FIRST_STREAM);
        let switch = Switch { transmit, receive, mux, dials: parts.dials, bell: parts.bell };
        self.worker.start(Box::new(switch))
    }

    fn stop(&mut self) {
        self.worker.stop();
    }
}

pub(super) struct Switch {
    pub(super) transmit: Virtqueue,
    pub(super) receive: Virtqueue,
    pub(super) mux: Mux,
    pub(super) dials: Receiver<(u32, DialReply)>,
    pub(super) bell: Arc<EventFd>,
}

impl Switch {
    pub(super) fn take_event(&mut self, source: u32, events: EventSet) -> Result<(), QueueError> {
        match source {
            TRANSMIT_BELL => {
                let mux = &mut self.mux;
                self.transmit.drain(|memory, chain| take_packet(mux, memory, chain))
            }
            // There is room again: what waits for it speaks after each event.
            RECEIVE_BELL => Ok(()),
            DIAL_BELL => {
                // Only the count is taken; the requests are in the channel.
                let _ = self.bell.read();
                while let Ok((port, reply)) = self.dials.try_recv() {
                    self.mux.dial(port, reply);
                }
                Ok(())
            }
            token => {
                self.mux.stream_ready(token, events);
                Ok(())
            }
        }
    }

    /// Lets streams speak while the guest has room.
    pub(super) fn speak(&mut self) -> Result<(), QueueError> {
        let mut spoken = false;
        while self.mux.has_output() {
            let Some(chain) = self.receive.pop()? else {
                if self.receive.await_more()? {
                    continue;
                }
                break;
            };
            spoken |= self.fill_chain(chain)?;
        }
        if spoken { self.receive.notify() } else { Ok(()) }
    }

    /// Fills one chain of the guest; false if nobody had anything to say after all.
    fn fill_chain(&mut self, chain: Chain) -> Result<bool, QueueError> {
        let memory = Arc::clone(self.receive.memory());
        let head = chain.head_index();
        let buffer = Span::writable(&memory, chain);
        let parts = buffer.and_then(|mut room| Some((room.split_front(HEADER_SIZE)?, room)));
        // A stream that has data and finds no room for a byte of it would wait in line, and be asked again for ever.
        let Some((front, room)) = parts.filter(|(_, room)| room.len() > 0) else {
            log::debug!("vsock: the guest offers an unusable buffer");
            self.receive.push(head, 0)?;
            return Ok(true);
        };
        let Some(header) = self.mux.speak(&room) else {
            self.receive.unpop();
            return Ok(false);
        };
        front.fill(&header.to_guest(GUEST_CID));
        self.receive.push(head, HEADER_SIZE as u32 + header.length)?;
        Ok(true)
    }

    fn tell_event_loop(&mut self, ops: &mut EventOps<'_>) {
        for connection in self.mux.take_retired() {
            // It is unknown to the loop if it was opened and closed within one turn.
            let _ = ops.remove(Events::empty(connection.stream()));
        }
        let interest = EventSet::IN | EventSet::OUT | EventSet::READ_HANG_UP | EventSet::EDGE_TRIGGERED;
        for (token, stream) in self.mux.take_opened() {
            if let Err(error) = ops.add(Events::with_data_raw(stream, token, interest)) {
                log::error!("vsock: a stream cannot be watched: {error}");
            }
        }
    }
}

impl MutEventSubscriber for Switch {
    fn init(&mut self, ops: &mut EventOps<'_>) {
        self.transmit.listen(ops, TRANSMIT_BELL);
        self.receive.listen(ops, RECEIVE_BELL);
        if let Err(error) = ops.add(Events::with_data(self.bell.as_ref(), DIAL_BELL, EventSet::IN)) {
            log::error!("vsock: cannot listen to the host's dials: {error}");
        }
    }

    fn process(&mut self, events: Events, ops: &mut EventOps<'_>) {
        let done = self.take_event(events.data(), events.event_set()).and_then(|()| self.speak());
        self.tell_event_loop(ops);
        if let Err(error) = done {
            log::warn!("vsock: {error}; its queues stop");
            self.transmit.abandon(ops);
            self.receive.abandon(ops);
        }
    }
}

/// Takes one packet of the guest; nothing is written back into its chain.
fn take_packet(mux: &mut Mux, memory: &Memory, chain: Chain) -> u32 {
    let Some(mut packet) = Span::readable(memory, chain) else {
        log::debug!("vsock: the guest sent a packet that is not in its memory");
        return 0;
    };
    match Header::take(&mut packet, GUEST_CID) {
        Ok(header) => mux.receive(&header, packet),
        Err(error) => log::debug!("vsock: a packet of the guest is dropped: {error}"),
    }
    0
}
