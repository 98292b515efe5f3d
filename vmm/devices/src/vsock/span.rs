//! A run of guest memory in pieces: the readable or the writable descriptors of a chain, in order.
//!
//! Where a driver cuts its buffers is its own business (Linux sends a large payload as a page in each descriptor), so a
//! header or a payload may start and end anywhere.

use std::io;

use virtio::{Chain, Descriptor, Memory};
use vm_memory::{GuestMemory, ReadVolatile, VolatileMemoryError, VolatileSlice, WriteVolatile};

/// Pieces of guest memory, each checked to be memory. Their number is bounded by the queue's size.
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
        let mut front = Span::default();
        let mut wanted = count;
        while wanted > 0 {
            let piece = self.pieces.first()?;
            let taken = piece.len().min(wanted);
            let (head, tail) = piece.split_at(taken).ok()?;
            front.pieces.push(head);
            if tail.is_empty() {
                self.pieces.remove(0);
            } else {
                self.pieces[0] = tail;
            }
            wanted -= taken;
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
