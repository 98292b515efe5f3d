//! A guest's half of the socket device: packets in guest memory, given to a [`Mux`] and taken from it.

use std::{
    io::{ErrorKind, Read, Write},
    net::Shutdown,
    os::{fd::OwnedFd, unix::net::UnixStream},
    sync::{
        Arc,
        mpsc::{Receiver, Sender, channel, sync_channel},
    },
};

use virtio::{Chain, Memory};
use virtio_bindings::virtio_ring::VRING_DESC_F_WRITE;
use virtio_queue::{
    QueueT,
    desc::{RawDescriptor, split::Descriptor},
    mock::MockSplitQueue,
};
use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::epoll::EventSet;

use super::{
    connection::WINDOW,
    device::DialError,
    mux::{MAX_CONNECTIONS, MAX_RESETS, Mux, StreamHost},
    packet::*,
    span::Span,
};

const CID: u64 = 3;
const HEADER_AT: u64 = 0x4_0000;
const PAYLOAD_AT: u64 = 0x5_0000;
const RECEIVE_ROOM: u32 = 4096;
/// A driver may cut a payload where it likes; Linux cuts at pages.
const PIECE: usize = 4096;

/// An owner that keeps every stream, or refuses.
struct Owner(Option<Sender<(u32, UnixStream)>>);

impl StreamHost for Owner {
    fn connected(&mut self, port: u32, stream: OwnedFd) -> bool {
        self.0.as_ref().is_some_and(|keep| keep.send((port, stream.into())).is_ok())
    }
}

/// The guest's driver, as far as a test needs one.
pub struct Guest {
    pub memory: Arc<Memory>,
    pub mux: Mux,
    pub streams: Receiver<(u32, UnixStream)>,
    pub window: u32,
    pub taken: u32,
    /// How much the device has taken, as it last said of any stream.
    pub told: u32,
}

/// What the device said: operation, flags, payload.
pub type Said = (u16, u32, Vec<u8>);

pub fn guest() -> Guest {
    let (keep, streams) = channel();
    let memory = Arc::new(Memory::from_ranges(&[(GuestAddress(0), 0x10_0000)]).expect("memory"));
    Guest { memory, mux: Mux::new(Box::new(Owner(Some(keep))), 16), streams, window: 1 << 16, taken: 0, told: 0 }
}

fn key(guest_port: u32) -> Key {
    Key { guest_port, host_port: 1024 }
}

/// A chain of the header and `length` bytes of payload, cut into pieces.
fn chain(memory: &Arc<Memory>, length: usize, writable: bool) -> Chain {
    let flags = if writable { VRING_DESC_F_WRITE as u16 } else { 0 };
    let queue = MockSplitQueue::new(memory.as_ref(), 32);
    let describe = |at, length: usize| RawDescriptor::from(Descriptor::new(at, length as u32, flags, 0));
    let mut descriptors = vec![describe(HEADER_AT, HEADER_SIZE)];
    for offset in (0..length).step_by(PIECE) {
        descriptors.push(describe(PAYLOAD_AT + offset as u64, PIECE.min(length - offset)));
    }
    queue.build_desc_chain(&descriptors).expect("chain");
    let mut queue: virtio_queue::Queue = queue.create_queue().expect("queue");
    queue.pop_descriptor_chain(Arc::clone(memory)).expect("the chain that was built")
}

impl Guest {
    pub fn send(&mut self, key: Key, operation: u16, flags: u32, payload: &[u8]) {
        let length = payload.len() as u32;
        // What we write as the host is what a guest writes but for the two ids and ports, which change places.
        let header = Header { key, operation, flags, length, window: self.window, taken: self.taken };
        let turned = Header { key: Key { guest_port: key.host_port, host_port: key.guest_port }, ..header };
        let mut bytes = turned.to_guest(CID);
        bytes[..8].copy_from_slice(&CID.to_le_bytes());
        bytes[8..16].copy_from_slice(&HOST_CID.to_le_bytes());
        let chain = chain(&self.memory, payload.len(), false);
        self.memory.write_slice(&bytes, GuestAddress(HEADER_AT)).expect("header");
        self.memory.write_slice(payload, GuestAddress(PAYLOAD_AT)).expect("payload");
        let mut span = Span::readable(&self.memory, chain).expect("in memory");
        assert_eq!(Header::take(&mut span, CID), Ok(header));
        self.mux.receive(&header, span);
    }

    /// Lets the device speak until it falls silent.
    pub fn hear(&mut self) -> Vec<(Key, Said)> {
        let mut said = Vec::new();
        while self.mux.has_output() {
            let mut room =
                Span::writable(&self.memory, chain(&self.memory, RECEIVE_ROOM as usize, true)).expect("room");
            room.split_front(HEADER_SIZE).expect("a header fits");
            if let Some(header) = self.mux.speak(&room) {
                let mut payload = vec![0; header.length as usize];
                self.memory.read_slice(&mut payload, GuestAddress(PAYLOAD_AT)).expect("payload");
                self.told = header.taken;
                said.push((header.key, (header.operation, header.flags, payload)));
            }
        }
        said
    }

    pub fn open(&mut self, key: Key) -> (u32, UnixStream) {
        self.send(key, OP_REQUEST, 0, &[]);
        let answers = self.hear();
        assert_eq!(answers, [(key, (OP_RESPONSE, 0, vec![]))]);
        let (port, stream) = self.streams.recv().expect("the owner got the stream");
        assert_eq!(port, key.host_port);
        let (token, _) = self.mux.take_opened()[0];
        (token, stream)
    }
}

#[test]
fn bytes_flow_both_ways_and_stay_within_the_guests_window() {
    let mut guest = guest();
    guest.window = 6000;
    let (token, mut owner) = guest.open(key(1));
    guest.send(key(1), OP_RW, 0, b"ping");
    let mut heard = [0; 4];
    owner.read_exact(&mut heard).expect("ping");
    assert_eq!(&heard, b"ping");

    let message: Vec<u8> = (0..10_000u32).map(|value| value as u8).collect();
    owner.write_all(&message).expect("pong");
    guest.mux.stream_ready(token, EventSet::IN);
    let mut got: Vec<u8> = guest.hear().into_iter().flat_map(|(_, (_, _, payload))| payload).collect();
    assert_eq!(got.len(), 6000, "no more than the guest has room for");
    guest.taken = 6000;
    guest.send(key(1), OP_CREDIT_UPDATE, 0, &[]);
    got.extend(guest.hear().into_iter().flat_map(|(_, (_, _, payload))| payload));
    assert_eq!(got, message);
}

#[test]
fn slow_owner_costs_the_guest_its_window_and_no_byte() {
    let mut guest = guest();
    let (token, mut owner) = guest.open(key(1));
    let chunk = vec![7u8; MAX_PAYLOAD as usize];
    let mut sent = 0usize;
    let mut told = 0usize;
    // The Unix socket takes some, the backlog the rest, up to the window that the guest was promised.
    while sent - told + chunk.len() <= WINDOW as usize {
        guest.send(key(1), OP_RW, 0, &chunk);
        sent += chunk.len();
        if guest.hear().iter().any(|(_, (operation, ..))| *operation == OP_CREDIT_UPDATE) {
            told = sent;
        }
        assert!(sent < 16 << 20, "back-pressure must set in");
    }
    owner.set_nonblocking(true).expect("nonblocking");
    let mut got = 0;
    let mut buffer = vec![0; 1 << 16];
    loop {
        match owner.read(&mut buffer) {
            Ok(count) => got += count,
            Err(error) if error.kind() == ErrorKind::WouldBlock && got < sent => {
                guest.mux.stream_ready(token, EventSet::OUT);
            }
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::WouldBlock);
                break;
            }
        }
    }
    assert_eq!(got, sent);
}

#[test]
fn guest_that_exceeds_its_window_is_reset() {
    let mut guest = guest();
    let (_token, _owner) = guest.open(key(1));
    let chunk = vec![0u8; MAX_PAYLOAD as usize];
    for _ in 0..64 {
        guest.send(key(1), OP_RW, 0, &chunk);
    }
    let said = guest.hear();
    assert!(said.iter().any(|(_, (operation, ..))| *operation == OP_RST), "{said:?}");
    assert_eq!(guest.mux.take_retired().len(), 1);
}

#[test]
fn end_of_file_travels_in_each_direction_alone() {
    let mut guest = guest();
    let (token, mut owner) = guest.open(key(1));
    owner.write_all(b"last").expect("write");
    owner.shutdown(Shutdown::Write).expect("half-close");
    guest.mux.stream_ready(token, EventSet::IN | EventSet::READ_HANG_UP);
    let said = guest.hear();
    assert_eq!(said, [(key(1), (OP_RW, 0, b"last".to_vec())), (key(1), (OP_SHUTDOWN, NO_SEND, vec![]))]);

    guest.send(key(1), OP_RW, 0, b"reply");
    guest.send(key(1), OP_SHUTDOWN, NO_SEND, &[]);
    let mut heard = Vec::new();
    owner.read_to_end(&mut heard).expect("reply, then end of file");
    assert_eq!(heard, b"reply");

    guest.send(key(1), OP_SHUTDOWN, CLOSED, &[]);
    assert_eq!(guest.hear(), [(key(1), (OP_RST, 0, vec![]))]);
    assert_eq!(guest.mux.take_retired().len(), 1, "both sides are done");
}

#[test]
fn reset_by_the_guest_delivers_what_was_sent_before() {
    let mut guest = guest();
    let (_token, mut owner) = guest.open(key(1));
    guest.send(key(1), OP_RW, 0, b"before");
    guest.send(key(1), OP_RST, 0, &[]);
    let mut heard = String::new();
    owner.read_to_string(&mut heard).expect("end of file");
    assert_eq!(heard, "before");
    assert_eq!(guest.mux.take_retired().len(), 1);
    assert!(guest.hear().is_empty(), "a reset is not answered by a reset");
}

#[test]
fn owner_that_goes_away_is_told_to_the_guest() {
    let mut guest = guest();
    let (token, owner) = guest.open(key(1));
    drop(owner);
    guest.mux.stream_ready(token, EventSet::IN | EventSet::HANG_UP);
    let said = guest.hear();
    assert_eq!(said, [(key(1), (OP_SHUTDOWN, NO_SEND, vec![]))]);
    guest.send(key(1), OP_RW, 0, b"into the void");
    assert_eq!(guest.hear(), [(key(1), (OP_SHUTDOWN, CLOSED, vec![]))]);
}

#[test]
fn packets_to_nobody_are_reset_and_the_debt_is_bounded() {
    let mut guest = guest();
    for port in 0..2 * MAX_RESETS as u32 {
        guest.send(key(port), OP_RW, 0, b"?");
    }
    guest.send(key(9), OP_RST, 0, &[]);
    let said = guest.hear();
    assert_eq!(said.len(), MAX_RESETS);
    assert!(said.iter().all(|(_, (operation, ..))| *operation == OP_RST));
}

#[test]
fn connections_are_bounded_and_the_next_is_refused() {
    let mut guest = guest();
    for port in 0..MAX_CONNECTIONS as u32 {
        guest.send(key(port), OP_REQUEST, 0, &[]);
    }
    assert_eq!(guest.hear().len(), MAX_CONNECTIONS);
    guest.send(key(5000), OP_REQUEST, 0, &[]);
    assert_eq!(guest.hear(), [(key(5000), (OP_RST, 0, vec![]))]);
}

#[test]
fn owner_that_refuses_resets_the_stream() {
    let mut guest = guest();
    guest.mux = Mux::new(Box::new(Owner(None)), 16);
    guest.send(key(1), OP_REQUEST, 0, &[]);
    assert_eq!(guest.hear(), [(key(1), (OP_RST, 0, vec![]))]);
}

#[test]
fn streams_take_turns() {
    let mut guest = guest();
    let (first, mut one) = guest.open(key(1));
    let (second, mut two) = guest.open(key(2));
    one.write_all(&[1; 12_000]).expect("write");
    two.write_all(&[2; 12_000]).expect("write");
    guest.mux.stream_ready(first, EventSet::IN);
    guest.mux.stream_ready(second, EventSet::IN);
    let order: Vec<u32> = guest.hear().iter().map(|(key, _)| key.guest_port).collect();
    assert_eq!(order[..6], [1, 2, 1, 2, 1, 2]);
}

#[test]
fn dial_ends_with_the_guests_answer() {
    let mut guest = guest();
    let (reply, answer) = sync_channel(1);
    guest.mux.dial(80, reply);
    let said = guest.hear();
    let [(asked, (OP_REQUEST, 0, _))] = said[..] else { panic!("{said:?}") };
    assert_eq!(asked.guest_port, 80);
    assert!(answer.try_recv().is_err(), "not before the guest has answered");
    guest.send(asked, OP_RESPONSE, 0, &[]);
    let mut stream = UnixStream::from(answer.recv().expect("answered").expect("accepted"));
    guest.send(asked, OP_RW, 0, b"hello");
    let mut heard = [0; 5];
    stream.read_exact(&mut heard).expect("hello");

    let (reply, answer) = sync_channel(1);
    guest.mux.dial(81, reply);
    let (asked, _) = guest.hear().pop().expect("request");
    guest.send(asked, OP_RST, 0, &[]);
    assert_eq!(answer.recv().expect("answered").expect_err("refused"), DialError::Refused);
}

#[test]
fn malformed_packets_are_told_apart() {
    let memory = Arc::new(Memory::from_ranges(&[(GuestAddress(0), 0x10_0000)]).expect("memory"));
    let header = Header { key: key(1), operation: OP_RW, flags: 0, length: 0, window: 0, taken: 0 };
    let take = |bytes: &[u8], payload: usize| {
        let chain = chain(&memory, payload, false);
        memory.write_slice(bytes, GuestAddress(HEADER_AT)).expect("header");
        Header::take(&mut Span::readable(&memory, chain).expect("in memory"), CID)
    };
    // A header of ours comes from the host, not from the guest.
    assert_eq!(take(&header.to_guest(CID), 0), Err(Malformed::Foreign));
    for (length, payload) in [(100, 99), (MAX_PAYLOAD + 1, 0), (u32::MAX, 4096)] {
        let mut bytes = Header { length, ..header }.to_guest(CID);
        bytes[..8].copy_from_slice(&CID.to_le_bytes());
        bytes[8..16].copy_from_slice(&HOST_CID.to_le_bytes());
        assert_eq!(take(&bytes, payload), Err(Malformed::Length(length)));
    }
    assert_eq!(Header::take(&mut Span::default(), CID), Err(Malformed::Short));
}
