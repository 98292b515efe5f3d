//! The driver of the fuzz target (`tests/fuzz`): bytes as steps of a hostile guest and of what happens on the host.

use std::io::{Read, Write};

use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::epoll::EventSet;

use super::{
    driver::{BUFFERS, Driver, MEMORY, Piece},
    mux::MAX_CONNECTIONS,
    packet::{HEADER_SIZE, Header, Key},
};

const MAX_STEPS: usize = 64;

/// Numbers at which something may turn over.
const EDGES: [u32; 8] = [0, 1, 43, 44, 0x1_0000, 0x7fff_ffff, 0xffff_ff00, u32::MAX];

/// The input; zeros after its end.
struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        *first
    }

    fn short(&mut self) -> u16 {
        u16::from_le_bytes([self.byte(), self.byte()])
    }

    /// Small ones and edges are as likely as all others.
    fn number(&mut self) -> u32 {
        match self.byte() % 4 {
            0 => self.byte().into(),
            1 => self.short().into(),
            2 => EDGES[usize::from(self.byte()) % EDGES.len()],
            _ => u32::from(self.short()) << 16 | u32::from(self.short()),
        }
    }

    /// A few buffers, most of them in memory.
    fn pieces(&mut self) -> Vec<Piece> {
        let count = 1 + self.byte() % 4;
        let piece = |input: &mut Self| match input.byte() % 4 {
            0 => (input.number().into(), input.number()),
            1 => (BUFFERS, EDGES[usize::from(input.byte()) % EDGES.len()]),
            2 => (BUFFERS, input.byte().into()),
            _ => (BUFFERS + u64::from(input.short()), input.short().into()),
        };
        (0..count).map(|_| piece(self)).collect()
    }
}

/// Plays a guest that does what `bytes` say, on a device of its own. Panics, or never returns, if the guest did harm.
pub fn hostile_socket_driver(bytes: &[u8]) {
    let (mut driver, mut input, mut streams) = (Driver::new(), Input(bytes), Vec::new());
    for _ in 0..MAX_STEPS {
        // A broken queue is the end of the device, as of its thread.
        if input.0.is_empty() || step(&mut driver, &mut input, &mut streams).is_err() {
            break;
        }
        assert!(driver.switch.mux.connections() <= MAX_CONNECTIONS);
        for stream in driver.streams.try_iter() {
            stream.set_nonblocking(true).expect("nonblocking");
            streams.push(stream);
        }
    }
}

type Streams = Vec<std::os::unix::net::UnixStream>;

fn step(driver: &mut Driver, input: &mut Input<'_>, streams: &mut Streams) -> Result<(), virtio::QueueError> {
    match input.byte() % 10 {
        0..=2 => send_well_formed(driver, input),
        3 => driver.send(&input.pieces()),
        4 => driver.listen(&input.pieces()),
        5 => driver.listen(&[(BUFFERS + 0x2_0000, 4096 + HEADER_SIZE as u32)]),
        6 => {
            let token = token(driver, input);
            driver.turn(token, EventSet::from_bits_truncate(input.short().into()))
        }
        7 => driver.dial(input.byte().into()),
        8 => {
            scribble(driver, input);
            Ok(())
        }
        _ => owner_acts(driver, input, streams),
    }
}

/// A packet of any kind that belongs to a stream or could, in one buffer or two.
fn send_well_formed(driver: &mut Driver, input: &mut Input<'_>) -> Result<(), virtio::QueueError> {
    let key = port_pair(input);
    let operation = u16::from(input.byte() % 16);
    let (flags, length) = (u32::from(input.byte()), u32::from(input.short()));
    let header = Header { key, operation, flags, length, window: input.number(), taken: input.number() };
    let cut = input.number() % (HEADER_SIZE as u32 + length + 1);
    driver.send_packet(&header, cut)
}

/// Streams that the guest opens, or that were dialled.
fn port_pair(input: &mut Input<'_>) -> Key {
    let (guest_port, host) = (u32::from(input.byte() % 8), input.byte());
    let host_port = if host < 128 { 1024 } else { (1 << 30) + u32::from(host % 4) };
    Key { guest_port, host_port }
}

/// A stream that there has been.
fn token(driver: &Driver, input: &mut Input<'_>) -> u32 {
    let which = usize::from(input.byte()) % driver.tokens.len().max(1);
    driver.tokens.get(which).copied().unwrap_or_default()
}

/// Bytes anywhere in memory, rings included.
fn scribble(driver: &mut Driver, input: &mut Input<'_>) {
    let at = u64::from(input.number()) % (MEMORY as u64 - 64);
    let (bytes, rest) = input.0.split_at(usize::from(input.byte() % 48).min(input.0.len()));
    input.0 = rest;
    driver.memory.write_slice(bytes, GuestAddress(at)).expect("in memory");
}

/// The host's end of a stream speaks, listens, closes one side or goes away; then its token wakes the device.
fn owner_acts(driver: &mut Driver, input: &mut Input<'_>, streams: &mut Streams) -> Result<(), virtio::QueueError> {
    let which = usize::from(input.byte()) % streams.len().max(1);
    let Some(stream) = streams.get_mut(which) else { return Ok(()) };
    match input.byte() % 4 {
        0 => drop(stream.write(&vec![7; input.short().into()])),
        1 => drop(stream.read(&mut vec![0; input.short().into()])),
        2 => drop(stream.shutdown(std::net::Shutdown::Write)),
        _ => drop(streams.remove(which)),
    }
    let token = token(driver, input);
    driver.turn(token, EventSet::IN | EventSet::OUT)
}
