//! The driver's side of a virtqueue in memory that can be shared with another process: one request at a time.

use std::fs::File;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{Ordering, fence};

use rustix::fs::{MemfdFlags, memfd_create};
use virtio::Memory;
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestMemory};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::Outcome;

pub const SIZE: u16 = 16;
pub const MEMORY: usize = 8 << 20;
const REQUEST: u64 = 0x10_0000;
const REPLY: u64 = 0x40_0000;
/// The largest message: 1 MiB of data and the headers.
const MESSAGE: usize = (1 << 20) + 4096;

/// Where the parts of queue `index` lie.
pub fn parts(index: u64) -> [u64; 3] {
    [0x1000, 0x2000, 0x3000].map(|part| part + index * 0x4000)
}

/// Queue 1 of a device, and the memory that both of its queues are in.
pub struct Ring {
    pub memory: std::sync::Arc<Memory>,
    pub backing: RawFd,
    pub doorbells: Vec<EventFd>,
    pub interrupt: EventFd,
    next: u16,
}

impl Ring {
    pub fn new() -> Outcome<Ring> {
        let file = File::from(memfd_create(c"guest", MemfdFlags::CLOEXEC)?);
        file.set_len(MEMORY as u64)?;
        let backing = file.as_raw_fd();
        let range = (GuestAddress(0), MEMORY, Some(FileOffset::new(file, 0)));
        let memory = std::sync::Arc::new(Memory::from_ranges_with_files([range])?);
        let doorbells = vec![EventFd::new(EFD_NONBLOCK)?, EventFd::new(EFD_NONBLOCK)?];
        Ok(Ring { memory, backing, doorbells, interrupt: EventFd::new(0)?, next: 0 })
    }

    /// Where guest memory lies in this process.
    pub fn base(&self) -> Outcome<u64> {
        Ok(self.memory.get_host_address(GuestAddress(0))? as u64)
    }

    /// Takes the next request from `device` into memory; its length.
    pub fn take(&self, mut device: &File) -> Result<usize, vm_memory::GuestMemoryError> {
        self.memory.read_volatile_from(GuestAddress(REQUEST), &mut device, MESSAGE)
    }

    /// How long the reply may be: as in a guest, no longer than was asked for, and virtiofsd reads as much as fits.
    fn room(&self) -> Outcome<usize> {
        const HEADER: usize = 16;
        let opcode: u32 = self.memory.read_obj(GuestAddress(REQUEST + 4))?;
        // READ, READDIR, READDIRPLUS: header, handle and offset, then the size.
        let asked = matches!(opcode, 15 | 28 | 44).then(|| self.memory.read_obj::<u32>(GuestAddress(REQUEST + 56)));
        Ok(HEADER + asked.transpose()?.map_or(4096, |size| (size as usize).min(MESSAGE - HEADER)))
    }

    /// Has the request served, and hands the reply to `device`.
    pub fn serve(&mut self, length: usize, mut device: &File) -> Outcome<()> {
        let [table, available, used] = parts(1);
        let room = self.room()? as u32;
        for (at, (address, length, flags, next)) in
            (table..).step_by(16).zip([(REQUEST, length as u32, 1u16, 1u16), (REPLY, room, 2, 0)])
        {
            self.memory.write_obj(address, GuestAddress(at))?;
            self.memory.write_obj(length, GuestAddress(at + 8))?;
            self.memory.write_obj(flags, GuestAddress(at + 12))?;
            self.memory.write_obj(next, GuestAddress(at + 14))?;
        }
        let slot = u64::from(self.next % SIZE);
        self.memory.write_obj(0u16, GuestAddress(available + 4 + slot * 2))?;
        self.next = self.next.wrapping_add(1);
        self.memory.store(self.next, GuestAddress(available + 2), Ordering::Release)?;
        fence(Ordering::SeqCst);
        self.doorbells[1].write(1)?;
        while self.memory.load::<u16>(GuestAddress(used + 2), Ordering::Acquire)? != self.next {
            self.interrupt.read()?;
        }
        let written: u32 = self.memory.read_obj(GuestAddress(used + 4 + slot * 8 + 4))?;
        if written > 0 {
            // ENOENT: the mount is gone, with whatever it had asked last.
            let _ = self.memory.write_volatile_to(GuestAddress(REPLY), &mut device, written as usize);
        }
        Ok(())
    }
}
