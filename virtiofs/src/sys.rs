//! The one home of `unsafe` in this crate: three calls that no safe wrapper offers.
//!
//! * `preadv` and `pwritev` between a file and guest memory. Guest memory changes while the kernel copies, so it can
//!   never be a `&[u8]`; it is handed over as address and length.
//! * `fstatvfs`, because fuse-backend-rs wants the C library's own struct, which has private fields.
#![expect(unsafe_code)]

use std::io::{Error, Result};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use fuse_backend_rs::abi::fuse_abi::statvfs64;
use fuse_backend_rs::file_buf::FileVolatileSlice;
use fuse_backend_rs::file_traits::FileReadWriteVolatile;

/// How many buffers go into one call: the largest request, 1 MiB in 4 KiB pages, in a single one, from the stack.
const BUFFERS: usize = 256;

/// A borrowed file that reads into and writes from guest memory at given offsets, without its own position.
pub(crate) struct Positioned<'a>(BorrowedFd<'a>);

impl<'a> Positioned<'a> {
    pub fn new(file: &'a OwnedFd) -> Positioned<'a> {
        Positioned(file.as_fd())
    }

    fn transfer(&self, direction: Direction, bufs: &[FileVolatileSlice], offset: u64) -> Result<usize> {
        let mut total = 0;
        for some in bufs.chunks(BUFFERS) {
            match self.transfer_some(direction, some, offset.saturating_add(total as u64)) {
                Ok(0) => break,
                Ok(count) => {
                    total += count;
                    if count < some.iter().map(FileVolatileSlice::len).sum() {
                        break;
                    }
                }
                // What was already transferred counts; the error will come again with the next request.
                Err(_) if total > 0 => break,
                Err(error) => return Err(error),
            }
        }
        Ok(total)
    }

    fn transfer_some(&self, direction: Direction, bufs: &[FileVolatileSlice], offset: u64) -> Result<usize> {
        // A negative offset must not reach the kernel.
        let offset = i64::try_from(offset).map_err(|_| Error::from_raw_os_error(libc::EINVAL))?;
        let mut vectors = [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; BUFFERS];
        for (vector, buf) in vectors.iter_mut().zip(bufs) {
            *vector = libc::iovec { iov_base: buf.as_ptr().cast(), iov_len: buf.len() };
        }
        let count = bufs.len().min(BUFFERS) as libc::c_int;
        let call = match direction {
            Direction::FromFile => libc::preadv64,
            Direction::ToFile => libc::pwritev64,
        };
        // SAFETY:
        // * `vectors` holds at least `count` initialised entries and outlives the call.
        // * Each entry is a FileVolatileSlice, whose maker guarantees that its memory is mapped for its length and
        //   for as long as the slice is borrowed, which `bufs` is here.
        // * No Rust reference to that memory exists: volatile slices are only ever read and written as raw memory,
        //   so that the kernel (or the guest, at the same time) changes it breaks no aliasing rule.
        // * The descriptor is open: it is borrowed.
        let done = unsafe { call(self.0.as_raw_fd(), vectors.as_ptr(), count, offset) };
        usize::try_from(done).map_err(|_| Error::last_os_error())
    }
}

#[derive(Clone, Copy)]
enum Direction {
    FromFile,
    ToFile,
}

impl FileReadWriteVolatile for Positioned<'_> {
    fn read_volatile(&mut self, _: FileVolatileSlice) -> Result<usize> {
        // There is no position to read from; every FUSE request brings its offset.
        Err(Error::from_raw_os_error(libc::ESPIPE))
    }

    fn write_volatile(&mut self, _: FileVolatileSlice) -> Result<usize> {
        Err(Error::from_raw_os_error(libc::ESPIPE))
    }

    fn read_at_volatile(&mut self, slice: FileVolatileSlice, offset: u64) -> Result<usize> {
        self.transfer(Direction::FromFile, &[slice], offset)
    }

    fn read_vectored_at_volatile(&mut self, bufs: &[FileVolatileSlice], offset: u64) -> Result<usize> {
        self.transfer(Direction::FromFile, bufs, offset)
    }

    fn write_at_volatile(&mut self, slice: FileVolatileSlice, offset: u64) -> Result<usize> {
        self.transfer(Direction::ToFile, &[slice], offset)
    }

    fn write_vectored_at_volatile(&mut self, bufs: &[FileVolatileSlice], offset: u64) -> Result<usize> {
        self.transfer(Direction::ToFile, bufs, offset)
    }
}

/// Sizes of the file system that a file is on. `O_PATH` descriptors will do.
pub(crate) fn statvfs(fd: &OwnedFd) -> Result<statvfs64> {
    let mut sizes = MaybeUninit::<statvfs64>::zeroed();
    // SAFETY:
    // * `sizes` is writable memory of the size that the call fills.
    // * The descriptor is open: it is borrowed.
    let failed = unsafe { libc::fstatvfs64(fd.as_raw_fd(), sizes.as_mut_ptr()) } != 0;
    if failed {
        return Err(Error::last_os_error());
    }
    // SAFETY: zeroed is a valid value of this plain struct, and the call has since filled it.
    Ok(unsafe { sizes.assume_init() })
}
