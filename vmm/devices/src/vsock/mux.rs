//! Which stream a packet belongs to, and whose turn it is to speak to the guest.
//!
//! Streams with something to say wait in one line and speak one packet per turn, so none can starve the others. A
//! stream stands in the line at most once.

use std::{
    collections::{HashMap, VecDeque},
    os::{
        fd::{AsRawFd, OwnedFd, RawFd},
        unix::net::UnixStream,
    },
    sync::mpsc::SyncSender,
};

use vmm_sys_util::epoll::EventSet;

use super::{
    connection::Connection,
    device::DialError,
    packet::{Header, Key, OP_REQUEST, OP_RST},
    span::Span,
};

/// Most streams at once. Each may hold one window of bytes and one descriptor: 128 MiB and 1,024 descriptors at worst.
pub const MAX_CONNECTIONS: usize = 1024;

/// Most RST packets owed to a guest that sends to nobody; beyond, it gets no answer.
pub const MAX_RESETS: usize = 256;

/// Host ports of streams that we open: above the ones that have a meaning.
const FIRST_DIAL_PORT: u32 = 1 << 30;

/// Takes the streams that the guest opens.
pub trait StreamHost: Send {
    /// The guest opened a stream to `port`; `stream` is the owner's end. False if it cannot be handed over.
    fn connected(&mut self, port: u32, stream: OwnedFd) -> bool;
}

/// Where the answer to a dial goes.
pub type DialReply = SyncSender<Result<OwnedFd, DialError>>;

struct Slot {
    connection: Connection,
    token: u32,
    in_line: bool,
    /// The other end and the one who waits for it, until the guest has answered.
    dial: Option<(OwnedFd, DialReply)>,
}

/// All streams of one device.
pub struct Mux {
    host: Box<dyn StreamHost>,
    slots: HashMap<Key, Slot>,
    tokens: HashMap<u32, Key>,
    line: VecDeque<Key>,
    resets: VecDeque<Key>,
    opened: Vec<Key>,
    retired: Vec<Connection>,
    next_token: u32,
    next_port: u32,
}

impl Mux {
    /// An empty one; tokens for events start at `first_token`.
    pub fn new(host: Box<dyn StreamHost>, first_token: u32) -> Self {
        Self {
            host,
            slots: HashMap::new(),
            tokens: HashMap::new(),
            line: VecDeque::new(),
            resets: VecDeque::new(),
            opened: Vec::new(),
            retired: Vec::new(),
            next_token: first_token,
            next_port: FIRST_DIAL_PORT,
        }
    }

    /// How many streams there are.
    #[cfg(any(test, fuzzing))]
    pub fn connections(&self) -> usize {
        self.slots.len()
    }

    /// Takes a packet from the guest.
    pub fn receive(&mut self, header: &Header, payload: Span<'_>) {
        let key = header.key;
        if self.slots.contains_key(&key) {
            self.with_slot(key, |slot| slot.connection.receive(header, payload));
        } else if header.operation == OP_REQUEST {
            self.accept(header);
        } else if header.operation != OP_RST {
            self.owe_reset(key);
        }
    }

    fn accept(&mut self, header: &Header) {
        let key = header.key;
        let Some((ours, theirs)) = self.pair() else { return self.owe_reset(key) };
        if self.host.connected(key.host_port, theirs) {
            self.add(key, Connection::accepted(key, ours, header), None);
        } else {
            self.owe_reset(key);
        }
    }

    /// Opens a stream to `port` in the guest; `reply` gets the end of it.
    pub fn dial(&mut self, port: u32, reply: DialReply) {
        let Some((ours, theirs)) = self.pair() else {
            // The one who asked may have given up; then nobody minds.
            let _ = reply.try_send(Err(DialError::TooMany));
            return;
        };
        let key = Key { guest_port: port, host_port: self.next_port };
        self.next_port = self.next_port.checked_add(1).unwrap_or(FIRST_DIAL_PORT);
        self.add(key, Connection::dialled(key, ours), Some((theirs, reply)));
    }

    fn pair(&self) -> Option<(UnixStream, OwnedFd)> {
        if self.slots.len() >= MAX_CONNECTIONS {
            return None;
        }
        let (ours, theirs) = UnixStream::pair().ok()?;
        ours.set_nonblocking(true).ok()?;
        Some((ours, theirs.into()))
    }

    fn add(&mut self, key: Key, connection: Connection, dial: Option<(OwnedFd, DialReply)>) {
        let token = self.next_token;
        self.next_token = self.next_token.wrapping_add(1).max(16);
        self.tokens.insert(token, key);
        self.slots.insert(key, Slot { connection, token, in_line: false, dial });
        self.opened.push(key);
        self.with_slot(key, |_| {});
    }

    /// The stream behind `token` has news.
    pub fn stream_ready(&mut self, token: u32, events: EventSet) {
        if let Some(key) = self.tokens.get(&token).copied() {
            self.with_slot(key, |slot| slot.connection.stream_ready(events));
        }
    }

    /// Does something to a stream, then answers its dial, lines it up or retires it, as its new state wants.
    fn with_slot(&mut self, key: Key, act: impl FnOnce(&mut Slot)) {
        let Some(slot) = self.slots.get_mut(&key) else { return };
        act(slot);
        if slot.connection.is_established()
            && let Some((end, reply)) = slot.dial.take()
        {
            let _ = reply.try_send(Ok(end));
        }
        if slot.connection.is_finished() {
            self.retire(key);
        } else if slot.connection.has_output() && !slot.in_line {
            slot.in_line = true;
            self.line.push_back(key);
        }
    }

    fn retire(&mut self, key: Key) {
        let Some(slot) = self.slots.remove(&key) else { return };
        self.tokens.remove(&slot.token);
        if let Some((_, reply)) = slot.dial {
            let _ = reply.try_send(Err(DialError::Refused));
        }
        // The event loop must forget the descriptor before it is closed.
        self.retired.push(slot.connection);
    }

    fn owe_reset(&mut self, key: Key) {
        if self.resets.len() < MAX_RESETS {
            self.resets.push_back(key);
        }
    }

    /// True if somebody waits to speak.
    pub fn has_output(&self) -> bool {
        !self.line.is_empty() || !self.resets.is_empty()
    }

    /// Lets the next one speak: its payload goes into `room`, its header is returned; `None` if it turned out to have
    /// nothing to say.
    pub fn speak(&mut self, room: &Span<'_>) -> Option<Header> {
        if let Some(key) = self.resets.pop_front() {
            return Some(Header { key, operation: OP_RST, flags: 0, length: 0, window: 0, taken: 0 });
        }
        let key = self.line.pop_front()?;
        let mut said = None;
        self.with_slot(key, |slot| {
            slot.in_line = false;
            said = slot.connection.speak(room);
        });
        said
    }

    /// Streams that the event loop does not know yet: token and descriptor, valid until the next call of another method.
    pub fn take_opened(&mut self) -> Vec<(u32, RawFd)> {
        let opened = std::mem::take(&mut self.opened);
        let slot = |key| self.slots.get(&key).map(|slot| (slot.token, slot.connection.stream().as_raw_fd()));
        opened.into_iter().filter_map(slot).collect()
    }

    /// Streams that the event loop must forget before they are dropped.
    pub fn take_retired(&mut self) -> Vec<Connection> {
        std::mem::take(&mut self.retired)
    }
}
