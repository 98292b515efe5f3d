//! Any guest, again: packets of any kind in any order. Nothing may panic, and what a guest can fill has its bound.

use proptest::{collection::vec, prelude::*};
use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::epoll::EventSet;

use super::{
    connection::WINDOW,
    device::{FIRST_STREAM, RECEIVE},
    driver::{BUFFERS, Driver},
    mux::MAX_CONNECTIONS,
    packet::*,
    tests::{Guest, guest},
};

/// A packet, or what the owner's side does in between.
#[derive(Debug, Clone)]
enum Step {
    Packet { ports: (u32, u32), operation: u16, flags: u32, payload: usize, window: u32, taken: u32 },
    Hear,
    OwnerCloses(usize),
    StreamWakes(usize),
}

fn step() -> impl Strategy<Value = Step> {
    let number = || prop_oneof![Just(0), Just(1), Just(4096), Just(u32::MAX), any::<u32>()];
    let packet = (
        (0..4u32, prop_oneof![Just(1024u32), 0..4u32]),
        prop_oneof![8 => 0..8u16, 1 => any::<u16>()],
        prop_oneof![3 => 0..4u32, 1 => any::<u32>()],
        prop_oneof![Just(0usize), 0..5000usize],
        number(),
        number(),
    );
    prop_oneof![
        6 => packet.prop_map(|(ports, operation, flags, payload, window, taken)| {
            Step::Packet { ports, operation, flags, payload, window, taken }
        }),
        2 => Just(Step::Hear),
        1 => (0..4usize).prop_map(Step::OwnerCloses),
        1 => (0..8usize).prop_map(Step::StreamWakes),
    ]
}

impl Guest {
    fn take(&mut self, step: Step, tokens: &mut Vec<u32>, streams: &mut Vec<std::os::unix::net::UnixStream>) {
        match step {
            Step::Packet { ports: (guest_port, host_port), operation, flags, payload, window, taken } => {
                (self.window, self.taken) = (window, taken);
                self.send(Key { guest_port, host_port }, operation, flags, &vec![7; payload]);
            }
            Step::Hear => drop(self.hear()),
            Step::OwnerCloses(nth) if nth < streams.len() => drop(streams.remove(nth)),
            Step::StreamWakes(nth) if nth < tokens.len() => {
                self.mux.stream_ready(tokens[nth], EventSet::IN | EventSet::OUT | EventSet::HANG_UP);
            }
            Step::OwnerCloses(_) | Step::StreamWakes(_) => {}
        }
        tokens.extend(self.mux.take_opened().into_iter().map(|(token, _)| token));
        streams.extend(self.streams.try_iter().map(|(_, stream)| stream));
        drop(self.mux.take_retired());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn packets_in_any_order_do_no_harm(steps in vec(step(), 0..80)) {
        let mut guest = guest();
        let (mut tokens, mut streams) = (Vec::new(), Vec::new());
        for step in steps {
            guest.take(step, &mut tokens, &mut streams);
            prop_assert!(guest.mux.connections() <= MAX_CONNECTIONS);
        }
        // Whatever happened, it falls silent once it has been heard: nothing is said for ever.
        guest.hear();
        prop_assert!(!guest.mux.has_output());
    }
}

#[test]
fn dial_reaches_the_guest_through_its_rings() {
    let mut driver = Driver::new();
    driver.dial(80).expect("it waits for a buffer");
    driver.listen(&[(BUFFERS, 4096)]).expect("asked");
    let mut asked = [0; HEADER_SIZE];
    driver.memory.read_slice(&mut asked, GuestAddress(BUFFERS)).expect("in memory");
    assert_eq!((asked[20], u16::from(asked[30])), (80, OP_REQUEST));
}

#[test]
fn buffers_with_no_room_for_payload_are_handed_back() {
    let mut driver = Driver::new();
    let key = Key { guest_port: 1, host_port: 1024 };
    let request = Header { key, operation: OP_REQUEST, flags: 0, length: 0, window: 4096, taken: 0 };
    driver.send_packet(&request, 0).expect("sent");
    let whole = (BUFFERS, 4096);
    driver.listen(&[whole]).expect("answered");
    let mut owner = driver.streams.try_recv().expect("the owner got the stream");
    std::io::Write::write_all(&mut owner, b"payload").expect("written");
    driver.turn(FIRST_STREAM, EventSet::IN).expect("it waits for a buffer");
    driver.listen(&[(BUFFERS, HEADER_SIZE as u32)]).expect("a turn that ends");
    assert_eq!(driver.used(RECEIVE), 2);
    driver.listen(&[whole]).expect("spoken");
    assert_eq!(driver.used(RECEIVE), 3);
    let heard: [u8; 7] = driver.memory.read_obj(GuestAddress(BUFFERS + HEADER_SIZE as u64)).expect("in memory");
    assert_eq!(&heard, b"payload");
}

#[test]
fn a_thousand_streams_carry_their_own_bytes() {
    let mut guest = guest();
    let mut open = Vec::new();
    for port in 0..1000 {
        let key = Key { guest_port: 10_000 + port, host_port: 1024 };
        open.push((key, guest.open(key)));
    }
    for (key, (_, stream)) in &mut open {
        let bytes = key.guest_port.to_le_bytes();
        guest.send(*key, OP_RW, 0, &bytes);
        let mut got = [0; 4];
        std::io::Read::read_exact(stream, &mut got).expect("delivered");
        assert_eq!(got, bytes);
    }
}

#[test]
fn two_gigabytes_arrive_unchanged_within_the_window() {
    // Every byte is told by its place.
    const TOTAL: u64 = 2 << 30;
    const PACKET: usize = 60 * 1024;
    const PERIOD: usize = 509 * 256;
    let mut guest = guest();
    let key = Key { guest_port: 7, host_port: 1024 };
    let (token, mut stream) = guest.open(key);
    let reader = std::thread::spawn(move || {
        let (mut seen, mut bytes) = (0u64, vec![0; 1 << 20]);
        loop {
            let length = std::io::Read::read(&mut stream, &mut bytes).expect("read");
            if length == 0 {
                return seen;
            }
            // One byte in 509 is looked at, in an order that no page or packet size divides.
            let first = (509 - seen % 509) % 509;
            for at in (first..length as u64).step_by(509) {
                assert_eq!(bytes[at as usize], ((seen + at) / 509) as u8, "byte {}", seen + at);
            }
            seen += length as u64;
        }
    });
    let pattern: Vec<u8> = (0..PERIOD + PACKET).map(|at| (at / 509) as u8).collect();
    let mut sent = 0u64;
    while sent < TOTAL {
        let length = PACKET.min((TOTAL - sent) as usize);
        // No more than the device has promised room for: what it has taken, as it last said, and its window.
        while sent + length as u64 > u64::from(guest.told) + u64::from(WINDOW) {
            guest.mux.stream_ready(token, EventSet::OUT);
            guest.hear();
        }
        let first = sent as usize % PERIOD;
        guest.send(key, OP_RW, 0, &pattern[first..first + length]);
        sent += length as u64;
    }
    guest.send(key, OP_SHUTDOWN, NO_SEND, &[]);
    while !reader.is_finished() {
        guest.mux.stream_ready(token, EventSet::OUT);
    }
    assert_eq!(reader.join().expect("every byte was right"), TOTAL);
}
