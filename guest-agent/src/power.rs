//! Ending the machine.
//!
//! The VMM has no ACPI. A byte written to I/O port 0x604 is its power button: the VMM ends as soon as the write
//! traps, so nothing after it runs. The port is reached through `/dev/port`, whose file offset is the port number.
//!
//! Failure: without the device (or in a machine that ignores the port) the agent exits instead; process 1 exiting is
//! a kernel panic, which the VMM sees as well, only with a less friendly message.

use std::{fs::OpenOptions, io, os::unix::fs::FileExt};

/// The VMM's power port and the value that means "off".
const POWER_PORT: u64 = 0x604;
const POWER_OFF: u8 = 1;

/// Writes everything back, then switches the machine off. Does not return.
pub fn off() -> ! {
    rustix::fs::sync();
    if let Err(error) = press() {
        log::error!(
            "cannot write to the power port through /dev/port: {error}; the kernel's panic will end the machine"
        );
    }
    std::process::exit(1)
}

fn press() -> io::Result<()> {
    OpenOptions::new().write(true).open("/dev/port")?.write_all_at(&[POWER_OFF], POWER_PORT)
}

/// Makes a panic of the agent end the process, whatever task it happens in: a half-dead process 1 would leave the
/// host waiting. The kernel panics in turn and the VMM reports it.
pub fn exit_on_panic() {
    std::panic::set_hook(Box::new(|info| {
        eprintln!("nacre-agent: {info}");
        crate::sys::exit(101);
    }));
}
