//! One stream: a state machine between the guest's packets and one end of a Unix socket pair.
//!
//! ```text
//!    guest REQUEST ──► Established ◄── guest RESPONSE ── Requested ◄── dial
//!                          │
//!          guest SHUTDOWN(both), or RST, or a broken promise
//!                          ▼
//!                      Draining ── backlog written (or the host's end is gone) ──► Finished
//! ```
//!
//! # Flow control (5.10.6.3)
//!
//! * Guest to host: we promise [`WINDOW`] bytes. What the Unix socket does not take at once waits in `backlog`, so the
//!   backlog never exceeds the window of a guest that keeps to it; one that does not is reset.
//! * Host to guest: we read from the Unix socket only as much as the guest has room for.
//!
//! # Half-close
//!
//! End of file from the host's end becomes SHUTDOWN(no more sending) once; a guest that will not send any more closes
//! the write side of the pair after the backlog is out. Edge-triggered readiness is remembered in `readable` and
//! `writable` until a call would block.

use std::{
    collections::VecDeque,
    io::{self, Write},
    net::Shutdown,
    os::unix::net::UnixStream,
};

use vmm_sys_util::epoll::EventSet;

use super::{
    packet::{
        CLOSED, Header, Key, NO_RECEIVE, NO_SEND, OP_CREDIT_REQUEST, OP_CREDIT_UPDATE, OP_REQUEST, OP_RESPONSE, OP_RST,
        OP_RW, OP_SHUTDOWN,
    },
    span::Span,
};

/// Bytes that the guest may send ahead of what the host's end has taken. One largest packet, doubled.
pub const WINDOW: u32 = 128 * 1024;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Requested,
    Established,
    Draining,
    Finished,
}

/// Control packets that we owe to the guest.
#[derive(Debug, Default, Clone, Copy)]
struct Owed {
    request: bool,
    response: bool,
    credit: bool,
    shutdown: u32,
    reset: bool,
}

/// One stream.
#[derive(Debug)]
pub struct Connection {
    key: Key,
    stream: UnixStream,
    phase: Phase,
    owed: Owed,
    /// Guest to host, not yet taken by `stream`.
    backlog: VecDeque<u8>,
    /// Bytes that `stream` has taken, and how much of that the guest knows, both modulo 2^32.
    taken: u32,
    taken_told: u32,
    /// The guest's window, what it has taken, and what we have sent, the last two modulo 2^32.
    guest_window: u32,
    guest_taken: u32,
    sent: u32,
    readable: bool,
    writable: bool,
    /// SHUTDOWN flags that the guest has sent, and that we have sent or owe.
    guest_shut: u32,
    host_shut: u32,
}

impl Connection {
    /// A stream that the guest asked for; RESPONSE is owed.
    pub fn accepted(key: Key, stream: UnixStream, header: &Header) -> Self {
        let mut connection = Self::new(key, stream, Phase::Established);
        connection.owed.response = true;
        connection.learn(header);
        connection
    }

    /// A stream that we ask the guest for; REQUEST is owed.
    pub fn dialled(key: Key, stream: UnixStream) -> Self {
        let mut connection = Self::new(key, stream, Phase::Requested);
        connection.owed.request = true;
        connection
    }

    fn new(key: Key, stream: UnixStream, phase: Phase) -> Self {
        Self {
            key,
            stream,
            phase,
            owed: Owed::default(),
            backlog: VecDeque::new(),
            taken: 0,
            taken_told: 0,
            guest_window: 0,
            guest_taken: 0,
            sent: 0,
            readable: false,
            writable: true,
            guest_shut: 0,
            host_shut: 0,
        }
    }

    /// Our end of the pair.
    pub fn stream(&self) -> &UnixStream {
        &self.stream
    }

    /// Nothing more will come of this stream.
    pub fn is_finished(&self) -> bool {
        self.phase == Phase::Finished && !self.owed.reset
    }

    /// The guest has answered our REQUEST.
    pub fn is_established(&self) -> bool {
        self.phase == Phase::Established
    }

    /// Takes a packet of this stream from the guest.
    pub fn receive(&mut self, header: &Header, payload: Span<'_>) {
        self.learn(header);
        match (header.operation, self.phase) {
            (OP_RST, _) => self.drain_and_finish(),
            (OP_RESPONSE, Phase::Requested) => self.phase = Phase::Established,
            (OP_RW, Phase::Established) => self.take(payload),
            (OP_SHUTDOWN, Phase::Established) => self.guest_shuts(header.flags),
            (OP_CREDIT_UPDATE, _) => {}
            (OP_CREDIT_REQUEST, Phase::Established) => self.owed.credit = true,
            // What is still under way while we drain is of no interest.
            (_, Phase::Draining | Phase::Finished) => {}
            _ => self.reset(),
        }
    }

    fn learn(&mut self, header: &Header) {
        (self.guest_window, self.guest_taken) = (header.window, header.taken);
    }

    fn take(&mut self, mut payload: Span<'_>) {
        let waiting = self.backlog.len() + payload.len();
        if self.guest_shut & NO_SEND != 0 || waiting > WINDOW as usize {
            log::debug!("vsock {:?}: the guest sent beyond its window or its shutdown", self.key);
            return self.reset();
        }
        // Straight from guest memory, if nothing waits before it.
        if self.backlog.is_empty() {
            let taken = self.write_from_guest(&payload);
            self.account(taken);
            let _ = payload.split_front(taken);
        }
        self.backlog.extend(payload.to_vec());
        self.flush();
    }

    /// Returns how many bytes count as taken.
    fn write_from_guest(&mut self, payload: &Span<'_>) -> usize {
        match payload.write_to(&mut self.stream) {
            Ok(count) => count,
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => 0,
            Err(_) => {
                self.owe_shutdown(NO_RECEIVE);
                payload.len()
            }
        }
    }

    /// Counts bytes that have left for the host, and owes the guest the news when half of its window is used up.
    fn account(&mut self, count: usize) {
        self.taken = self.taken.wrapping_add(count as u32);
        if self.taken.wrapping_sub(self.taken_told) >= WINDOW / 2 {
            self.owed.credit = true;
        }
    }

    fn guest_shuts(&mut self, flags: u32) {
        self.guest_shut |= flags & CLOSED;
        if self.guest_shut & NO_RECEIVE != 0 {
            // Nothing that the host's end still sends can be delivered.
            let _ = self.stream.shutdown(Shutdown::Read);
        }
        if self.guest_shut == CLOSED {
            self.owed.reset = true;
            self.drain_and_finish();
        } else {
            self.flush();
        }
    }

    fn drain_and_finish(&mut self) {
        self.phase = Phase::Draining;
        self.flush();
    }

    /// Ends the stream because one side broke a promise.
    fn reset(&mut self) {
        self.owed = Owed { reset: true, ..Owed::default() };
        self.phase = Phase::Finished;
        let _ = self.stream.shutdown(Shutdown::Both);
    }

    /// The Unix socket has news.
    pub fn stream_ready(&mut self, events: EventSet) {
        if events.intersects(EventSet::IN | EventSet::READ_HANG_UP | EventSet::HANG_UP | EventSet::ERROR) {
            self.readable = true;
        }
        if events.intersects(EventSet::OUT | EventSet::HANG_UP | EventSet::ERROR) {
            self.writable = true;
            self.flush();
        }
    }

    /// Writes as much of the backlog as the host's end takes, then does what waited for it.
    fn flush(&mut self) {
        while self.writable && !self.backlog.is_empty() {
            match self.stream.write(self.backlog.as_slices().0) {
                Ok(count) => {
                    self.backlog.drain(..count);
                    self.account(count);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.writable = false,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => self.host_stopped_reading(),
            }
        }
        if !self.backlog.is_empty() {
            return;
        }
        if self.guest_shut & NO_SEND != 0 || self.phase == Phase::Draining {
            let _ = self.stream.shutdown(Shutdown::Write);
        }
        if self.phase == Phase::Draining {
            self.phase = Phase::Finished;
        }
    }

    /// Nobody takes these bytes any more: they count as taken, and the guest is told to stop.
    fn host_stopped_reading(&mut self) {
        self.account(self.backlog.len());
        self.backlog.clear();
        self.owe_shutdown(NO_RECEIVE);
    }

    fn owe_shutdown(&mut self, flag: u32) {
        if self.host_shut & flag == 0 {
            self.host_shut |= flag;
            self.owed.shutdown = self.host_shut;
        }
    }

    fn room_in_guest(&self) -> u32 {
        self.guest_window.saturating_sub(self.sent.wrapping_sub(self.guest_taken))
    }

    fn wants_to_send_data(&self) -> bool {
        self.phase == Phase::Established
            && self.readable
            && self.host_shut & NO_SEND == 0
            && self.guest_shut & NO_RECEIVE == 0
            && self.room_in_guest() > 0
    }

    /// True if [`Self::speak`] has something to say.
    pub fn has_output(&self) -> bool {
        let Owed { request, response, credit, shutdown, reset } = self.owed;
        request
            || response
            || credit
            || shutdown != 0
            || (reset && self.phase == Phase::Finished)
            || self.wants_to_send_data()
    }

    /// Says one thing to the guest: puts payload into `room` and returns the header that goes before it; `None` if there
    /// turned out to be nothing to say.
    pub fn speak(&mut self, room: &Span<'_>) -> Option<Header> {
        let (operation, flags, length) = self.next_control().or_else(|| self.next_data(room))?;
        self.taken_told = self.taken;
        self.owed.credit = false;
        Some(Header { key: self.key, operation, flags, length, window: WINDOW, taken: self.taken })
    }

    fn next_control(&mut self) -> Option<(u16, u32, u32)> {
        let owed = &mut self.owed;
        if std::mem::take(&mut owed.request) {
            Some((OP_REQUEST, 0, 0))
        } else if std::mem::take(&mut owed.response) {
            Some((OP_RESPONSE, 0, 0))
        } else if owed.shutdown != 0 {
            Some((OP_SHUTDOWN, std::mem::take(&mut owed.shutdown), 0))
        } else if owed.reset && self.phase == Phase::Finished {
            owed.reset = false;
            Some((OP_RST, 0, 0))
        } else if std::mem::take(&mut owed.credit) {
            Some((OP_CREDIT_UPDATE, 0, 0))
        } else {
            None
        }
    }

    fn next_data(&mut self, room: &Span<'_>) -> Option<(u16, u32, u32)> {
        if !self.wants_to_send_data() || room.len() == 0 {
            return None;
        }
        let limit = self.room_in_guest() as usize;
        match room.read_from(&mut self.stream, limit) {
            Ok(0) => self.owe_shutdown(NO_SEND),
            Ok(count) => {
                self.sent = self.sent.wrapping_add(count as u32);
                return Some((OP_RW, 0, count as u32));
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.readable = false,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => self.owe_shutdown(NO_SEND),
        }
        self.next_control()
    }
}
