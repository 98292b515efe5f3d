//! A guest's driver down to its rings: chains of any shape, given to a [`Switch`] as its thread would.
//!
//! The rings are those of a true [`MmioTransport`], started as a driver starts it; only the thread is missing, so that a
//! test knows when a turn has ended.

use std::{
    os::{fd::OwnedFd, unix::net::UnixStream},
    sync::{
        Arc,
        mpsc::{Receiver, Sender, SyncSender, channel, sync_channel},
    },
};

use virtio::{Activation, Device, Memory, MmioTransport, QueueError, StartError};
use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::{
    epoll::EventSet,
    eventfd::{EFD_NONBLOCK, EventFd},
};

use super::{
    device::{DIAL_BELL, FIRST_STREAM, GUEST_CID, RECEIVE, RECEIVE_BELL, Switch, TRANSMIT, TRANSMIT_BELL},
    mux::{DialReply, Mux, StreamHost},
    packet::{HEADER_SIZE, HOST_CID, Header, Key},
};

/// Guest memory, most of it for buffers.
pub const MEMORY: usize = 0x4_0000;

/// Where buffers may start that are not to overlap with the rings.
pub const BUFFERS: u64 = 0x1_0000;

/// Entries of each queue.
const SIZE: u16 = 16;

/// The rings of queue 0; those of the next follow after as much again.
const RINGS: u32 = 0x400;

/// From the descriptors of a queue to its other rings.
const AVAILABLE: u32 = 0x100;
const USED: u32 = 0x200;

const WRITABLE: u16 = 2;

/// Keeps what the transport hands to a device at its start.
struct Keep(Sender<Activation>);

impl Device for Keep {
    fn name(&self) -> &'static str {
        "vsock"
    }
    fn id(&self) -> u32 {
        19
    }
    fn queue_sizes(&self) -> &[u16] {
        &[SIZE; 3]
    }
    fn start(&mut self, activation: Activation) -> Result<(), StartError> {
        self.0.send(activation).expect("the driver waits for it");
        Ok(())
    }
    fn stop(&mut self) {}
}

/// An owner that keeps every stream.
struct Owner(Sender<UnixStream>);

impl StreamHost for Owner {
    fn connected(&mut self, _port: u32, stream: OwnedFd) -> bool {
        self.0.send(stream.into()).is_ok()
    }
}

/// One buffer of a chain: where and how long, as the guest says.
pub type Piece = (u64, u32);

/// A driver and the device that it drives.
pub struct Driver {
    pub memory: Arc<Memory>,
    pub switch: Switch,
    /// The owner's ends of the streams that the guest opened.
    pub streams: Receiver<UnixStream>,
    /// Tokens of all streams that there have been.
    pub tokens: Vec<u32>,
    dials: SyncSender<(u32, DialReply)>,
    offered: [u16; 3],
    _transport: MmioTransport,
}

impl Driver {
    /// A device that has just been started.
    pub fn new() -> Self {
        let memory = Arc::new(Memory::from_ranges(&[(GuestAddress(0), MEMORY)]).expect("memory"));
        let bell = || EventFd::new(EFD_NONBLOCK).expect("eventfd");
        let (keep, kept) = channel();
        let bells = vec![bell(), bell(), bell()];
        let mut transport = MmioTransport::new(Box::new(Keep(keep)), Arc::clone(&memory), || {}, bells);
        start(&mut transport);
        let mut queues = kept.try_recv().expect("the device was started").queues;
        let (transmit, receive) = (queues.remove(TRANSMIT), queues.remove(RECEIVE));
        let (owner, streams) = channel();
        let (dials, requests) = sync_channel(16);
        let mux = Mux::new(Box::new(Owner(owner)), FIRST_STREAM);
        let switch = Switch { transmit, receive, mux, dials: requests, bell: Arc::new(bell()) };
        Self { memory, switch, streams, tokens: Vec::new(), dials, offered: [0; 3], _transport: transport }
    }

    /// Puts a chain into a queue, without ringing.
    pub fn offer(&mut self, queue: usize, pieces: &[Piece], writable: bool) {
        let offered = &mut self.offered[queue];
        let rings = u64::from(RINGS * (1 + queue as u32));
        for (index, (address, length)) in (0u16..).zip(pieces) {
            let at = offered.wrapping_add(index) % SIZE;
            let more = u16::from(usize::from(index) + 1 < pieces.len());
            let flags = more | if writable { WRITABLE } else { 0 };
            let next = (at + 1) % SIZE;
            let descriptor = [&length.to_le_bytes()[..], &flags.to_le_bytes(), &next.to_le_bytes()].concat();
            let place = GuestAddress(rings + 16 * u64::from(at));
            self.memory.write_obj(address.to_le(), place).expect("in memory");
            self.memory.write_slice(&descriptor, GuestAddress(place.0 + 8)).expect("in memory");
        }
        let available = rings + u64::from(AVAILABLE);
        let entry = available + 4 + 2 * u64::from(*offered % SIZE);
        self.memory.write_obj((*offered % SIZE).to_le(), GuestAddress(entry)).expect("in memory");
        *offered = offered.wrapping_add(1);
        self.memory.write_obj(offered.to_le(), GuestAddress(available + 2)).expect("in memory");
    }

    /// How many chains of a queue the device has handed back.
    #[cfg(test)]
    pub fn used(&self, queue: usize) -> u16 {
        let used = u64::from(RINGS * (1 + queue as u32) + USED);
        u16::from_le(self.memory.read_obj(GuestAddress(used + 2)).expect("in memory"))
    }

    /// Sends a packet that lies in `pieces`.
    pub fn send(&mut self, pieces: &[Piece]) -> Result<(), QueueError> {
        self.offer(TRANSMIT, pieces, false);
        self.turn(TRANSMIT_BELL, EventSet::IN)
    }

    /// Sends a packet with `header`, seen from the guest, and a payload of what lies there; cut in two after `cut` bytes.
    pub fn send_packet(&mut self, header: &Header, cut: u32) -> Result<(), QueueError> {
        // What the host writes is what a guest writes but for the two ids and ports, which change places.
        let turned = Key { guest_port: header.key.host_port, host_port: header.key.guest_port };
        let mut bytes = Header { key: turned, ..*header }.to_guest(GUEST_CID);
        bytes[..8].copy_from_slice(&GUEST_CID.to_le_bytes());
        bytes[8..16].copy_from_slice(&HOST_CID.to_le_bytes());
        self.memory.write_slice(&bytes, GuestAddress(BUFFERS)).expect("in memory");
        let total = HEADER_SIZE as u32 + header.length;
        let cut = cut.min(total);
        self.send(&[(BUFFERS, cut), (BUFFERS + u64::from(cut), total - cut)])
    }

    /// Gives the device a buffer to speak into.
    pub fn listen(&mut self, pieces: &[Piece]) -> Result<(), QueueError> {
        self.offer(RECEIVE, pieces, true);
        self.turn(RECEIVE_BELL, EventSet::IN)
    }

    /// Lets the owner dial a port of the guest.
    pub fn dial(&mut self, port: u32) -> Result<(), QueueError> {
        let (reply, _) = sync_channel(1);
        let _ = self.dials.try_send((port, reply));
        self.turn(DIAL_BELL, EventSet::IN)
    }

    /// A turn of the device's thread: what woke it, and what comes of it.
    pub fn turn(&mut self, source: u32, events: EventSet) -> Result<(), QueueError> {
        let done = self.switch.take_event(source, events).and_then(|()| self.switch.speak());
        self.tokens.extend(self.switch.mux.take_opened().into_iter().map(|(token, _)| token));
        drop(self.switch.mux.take_retired());
        done
    }
}

fn start(transport: &mut MmioTransport) {
    let mut set = |offset: u64, value: u32| transport.write(offset, &value.to_le_bytes());
    for status in [1, 3] {
        set(0x70, status);
    }
    set(0x24, 1);
    set(0x20, 1);
    set(0x70, 11);
    for queue in 0..3 {
        let rings = RINGS * (1 + queue);
        set(0x30, queue);
        set(0x38, SIZE.into());
        for (offset, address) in [(0x80, rings), (0x90, rings + AVAILABLE), (0xa0, rings + USED)] {
            set(offset, address);
        }
        set(0x44, 1);
    }
    set(0x70, 15);
}
