//! SIGSYS: a system call that is on no list of the jail's. It is named in the log, and the process ends.
//!
//! The handler runs in the middle of anything, maybe in malloc with its lock held. It therefore allocates nothing, takes
//! no lock, and makes the two system calls that every list has: `write` and `exit_group`.
#![expect(unsafe_code)]

use std::{
    ffi::{c_int, c_void},
    io,
};

use rustix::{io::write, process::getpid, stdio::stderr, thread::gettid};
use syscalls::Sysno;
use vmm_sys_util::signal::register_signal_handler;

/// Exit code of a process that made such a call: as a shell would tell SIGSYS.
const EXIT_CODE: c_int = 128 + libc::SIGSYS;

/// Where the number of the call is in siginfo_t (asm-generic/siginfo.h: signo, errno, code, padding, call address).
const CALL_OFFSET: usize = 24;

/// Names forbidden system calls from now on.
pub fn install() -> io::Result<()> {
    register_signal_handler(libc::SIGSYS, handle).map_err(|error| io::Error::from_raw_os_error(error.errno()))
}

extern "C" fn handle(_signal: c_int, info: *mut libc::siginfo_t, _context: *mut c_void) {
    // SAFETY:
    // * The kernel calls us with a whole siginfo_t (SA_SIGINFO, which vmm-sys-util sets), 128 bytes, aligned to 8.
    // * For SIGSYS of seccomp the field at this offset is an int; for one sent by kill it is whatever, and still there.
    let number = unsafe { info.cast::<u8>().add(CALL_OFFSET).cast::<c_int>().read() };
    let mut line = Line::default();
    line.add(b"nacre-vmm: ERROR: jail: thread ");
    line.add_number(gettid().as_raw_nonzero().get().unsigned_abs());
    line.add(b" of ");
    line.add_number(getpid().as_raw_nonzero().get().unsigned_abs());
    line.add(b" made the forbidden system call ");
    line.add(name(number).as_bytes());
    line.add(b" (number ");
    line.add_number(number.unsigned_abs());
    line.add(b"); the machine ends\n");
    // Nobody is left to tell if the log is gone.
    let _ = write(stderr(), line.bytes());
    // SAFETY: it never returns, and runs no handlers of exit.
    unsafe { libc::_exit(EXIT_CODE) }
}

fn name(number: c_int) -> &'static str {
    let known = usize::try_from(number).ok().and_then(Sysno::new);
    known.map_or("that nobody knows", |call| call.name())
}

/// A line without malloc; what does not fit is cut.
struct Line {
    bytes: [u8; 192],
    length: usize,
}

impl Default for Line {
    fn default() -> Self {
        Self { bytes: [0; 192], length: 0 }
    }
}

impl Line {
    fn add(&mut self, text: &[u8]) {
        for (place, byte) in self.bytes[self.length..].iter_mut().zip(text) {
            *place = *byte;
            self.length += 1;
        }
    }

    fn add_number(&mut self, number: u32) {
        let mut digits = [0; 10];
        let (mut rest, mut first) = (number, digits.len());
        loop {
            first -= 1;
            digits[first] = b'0' + (rest % 10) as u8;
            rest /= 10;
            if rest == 0 {
                break;
            }
        }
        self.add(&digits[first..]);
    }

    fn bytes(&self) -> &[u8] {
        &self.bytes[..self.length]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_is_cut_and_never_overrun() {
        let mut line = Line::default();
        line.add(b"call ");
        line.add_number(0);
        line.add(b" ");
        line.add_number(u32::MAX);
        assert_eq!(line.bytes(), b"call 0 4294967295");
        line.add(&[b'x'; 500]);
        assert_eq!(line.bytes().len(), 192);
    }

    #[test]
    fn calls_have_names() {
        assert_eq!(name(libc::SYS_openat as c_int), "openat");
        assert_eq!(name(-1), "that nobody knows");
        assert_eq!(name(100_000), "that nobody knows");
    }
}
