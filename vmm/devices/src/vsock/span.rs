//! A run of guest memory in pieces: the readable or the writable descriptors of a chain, in order.
//!
//! Where a driver cuts its buffers is its own business (Linux sends a large payload as a page in each descriptor), so a
//! header or a payload may start and end anywhere.

use std::io;

use virtio::{Chain, Descriptor, Memory};
use vm_memory::{GuestMemory, ReadVolatile, VolatileMemoryError, VolatileSlice, WriteVolatile};

/// Pieces of guest memory, each checked to be memory. There are at most 65,535: the guest may put them into an indirect
/// table, and virtio-queue takes one of any size that a 16-bit index reaches.
#[derive(Debug, Default)]
pub struct Span<'m> {
    pieces: Vec<VolatileSlice<'m>>,
}

impl<'m> Span<'m> {
    /// What the guest gave us to read; `None` if a piece is not memory.
    pub fn readable(memory: &'m Memory, chain: Chain) -> Option<Self> {
        Self::of(memory, chain.readable())
    }

    /// What the guest gave us to write into; `None` if a piece is not memory.
    pub fn writable(memory: &'m Memory, chain: Chain) -> Option<Self> {
        Self::of(memory, chain.writable())
    }

    fn of(memory: &'m Memory, descriptors: impl Iterator<Item = Descriptor>) -> Option<Self> {
        let piece = |one: Descriptor| memory.get_slice(one.addr(), one.len() as usize).ok();
        Some(Self { pieces: descriptors.map(piece).collect::<Option<_>>()? })
    }

    /// Bytes in all pieces.
    pub fn len(&self) -> usize {
        self.pieces.iter().map(VolatileSlice::len).sum()
    }

    /// Cuts `count` bytes off the front; `None` if there are not as many.
    pub fn split_front(&mut self, count: usize) -> Option<Span<'m>> {
        let (mut whole, mut wanted) = (0, count);
        while wanted > 0 && self.pieces.get(whole)?.len() <= wanted {
            wanted -= self.pieces[whole].len();
            whole += 1;
        }
        let cut = if wanted > 0 { Some(self.pieces.get(whole)?.split_at(wanted).ok()?) } else { None };
        // In one go: one by one, each would move all that are behind it, which may be very many.
        let mut front = Span { pieces: self.pieces.drain(..whole).collect() };
        if let Some((head, tail)) = cut {
            front.pieces.push(head);
            self.pieces[0] = tail;
        }
        Some(front)
    }

    /// Copies all of it out.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.len()];
        let mut rest = bytes.as_mut_slice();
        for piece in &self.pieces {
            let (here, after) = rest.split_at_mut(piece.len());
            piece.copy_to(here);
            rest = after;
        }
        bytes
    }

    /// Copies `bytes` to its front, as many as fit.
    pub fn fill(&self, mut bytes: &[u8]) {
        for piece in &self.pieces {
            let (here, after) = bytes.split_at(piece.len().min(bytes.len()));
            piece.copy_from(here);
            bytes = after;
        }
    }

    /// Writes it to `stream` until the stream takes no more; returns the bytes taken. An error after the first byte shows
    /// at the next call.
    pub fn write_to(&self, stream: &mut impl WriteVolatile) -> io::Result<usize> {
        let mut taken = 0;
        for piece in self.pieces.iter().filter(|piece| !piece.is_empty()) {
            match stream.write_volatile(piece).map_err(os_error) {
                Ok(count) if count < piece.len() => return Ok(taken + count),
                Ok(count) => taken += count,
                Err(error) if taken == 0 => return Err(error),
                Err(_) => break,
            }
        }
        Ok(taken)
    }

    /// Fills its front, at most `limit` bytes, from `stream`; returns the bytes read, 0 at the end of the stream.
    pub fn read_from(&self, stream: &mut impl ReadVolatile, limit: usize) -> io::Result<usize> {
        let mut read = 0;
        for piece in self.pieces.iter().filter(|piece| !piece.is_empty()) {
            let wanted = piece.len().min(limit - read);
            if wanted == 0 {
                break;
            }
            // A part of a piece that has been checked is within it.
            let Ok(mut part) = piece.subslice(0, wanted) else { break };
            match stream.read_volatile(&mut part).map_err(os_error) {
                Ok(count) if count < wanted => return Ok(read + count),
                Ok(count) => read += count,
                Err(error) if read == 0 => return Err(error),
                Err(_) => break,
            }
        }
        Ok(read)
    }
}

/// The operating system's error inside of vm-memory's.
fn os_error(error: VolatileMemoryError) -> io::Error {
    match error {
        VolatileMemoryError::IOError(error) => error,
        other => io::Error::other(other),
    }
}

#[cfg(test)]
mod tests {
    use vm_memory::GuestAddress;

    use super::*;

    /// As many pieces of one byte as the largest indirect table has.
    #[test]
    fn front_of_many_pieces_is_split_in_one_go() {
        let memory = Memory::from_ranges(&[(GuestAddress(0), 0x1000)]).expect("memory");
        let piece = memory.get_slice(GuestAddress(0), 1).expect("in memory");
        let mut span = Span { pieces: vec![piece; u16::MAX.into()] };
        for count in [44, 0, 60_000] {
            assert_eq!(span.split_front(count).expect("as many are there").len(), count);
        }
        assert_eq!(span.len(), usize::from(u16::MAX) - 60_044);
        assert!(span.split_front(6000).is_none());
    }

    #[test]
    fn front_ends_within_a_piece_and_passes_empty_ones() {
        let memory = Memory::from_ranges(&[(GuestAddress(0), 0x1000)]).expect("memory");
        let piece = |at, length| memory.get_slice(GuestAddress(at), length).expect("in memory");
        let mut span = Span { pieces: vec![piece(0, 0), piece(0, 10), piece(20, 0), piece(30, 10)] };
        span.fill(b"0123456789abcdefghij");
        assert_eq!(span.split_front(13).expect("13 of 20").to_vec(), b"0123456789abc");
        assert_eq!(span.to_vec(), b"defghij");
        assert_eq!(span.split_front(7).expect("the rest").len(), 7);
        assert_eq!(span.len(), 0);
    }
}
