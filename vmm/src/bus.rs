//! Where the guest's ports and device addresses lead.
//!
//! | ports | what | why |
//! |---|---|---|
//! | 0x3f8..0x400 | a serial port, output only | the kernel's earlyprintk, before the console device exists |
//! | 0x60, 0x64 | the reset line of a keyboard controller | `reboot=k` |
//! | 0x604 | the power button: write 1 | there is no ACPI; the agent's `Shutdown` ends here |
//!
//! Every other port reads all ones and swallows writes, as an empty bus does. Device windows are one page each.

use std::{
    convert::Infallible,
    io,
    ops::ControlFlow,
    sync::{Mutex, PoisonError},
};

use devices::ConsoleTail;
use virtio::{MmioTransport, WINDOW};
use vm_superio::{Serial, Trigger, serial::NoEvents};
use vmm_api::ExitReason;

const SERIAL: u16 = 0x3f8;
const SERIAL_PORTS: u16 = 8;
const KEYBOARD_DATA: u16 = 0x60;
const KEYBOARD_COMMAND: u16 = 0x64;
const KEYBOARD_RESET: u8 = 0xfe;
const POWER: u16 = 0x604;
const POWER_OFF: u8 = 1;

/// Goes on, or ends the machine. A panic cannot be told from a reset by its port: the vCPU looks at memory.
pub type Step = ControlFlow<ExitReason>;

/// The serial port needs no interrupt: nobody waits for it.
struct NoInterrupt;

impl Trigger for NoInterrupt {
    type E = Infallible;
    fn trigger(&self) -> Result<(), Infallible> {
        Ok(())
    }
}

/// Serial output goes where console output goes.
struct ToTail(ConsoleTail);

impl io::Write for ToTail {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.append(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// All that answers outside of RAM.
pub struct Bus {
    serial: Mutex<Serial<NoInterrupt, NoEvents, ToTail>>,
    first_window: u64,
    windows: Vec<Mutex<MmioTransport>>,
}

impl Bus {
    /// A bus with `windows` side by side from `first_window` on.
    pub fn new(console: ConsoleTail, first_window: u64, windows: Vec<MmioTransport>) -> Self {
        let serial = Mutex::new(Serial::new(NoInterrupt, ToTail(console)));
        Self { serial, first_window, windows: windows.into_iter().map(Mutex::new).collect() }
    }

    /// The guest reads from a port.
    pub fn port_in(&self, port: u16, data: &mut [u8]) {
        data.fill(0xff);
        let Some(byte) = data.first_mut() else { return };
        match port {
            // No key waits, and the controller takes commands at once.
            KEYBOARD_DATA | KEYBOARD_COMMAND => *byte = 0,
            _ => {
                if let Some(register) = serial_register(port) {
                    *byte = self.serial.lock().unwrap_or_else(PoisonError::into_inner).read(register);
                }
            }
        }
    }

    /// The guest writes to a port.
    pub fn port_out(&self, port: u16, data: &[u8]) -> Step {
        match (port, data) {
            (KEYBOARD_COMMAND, [KEYBOARD_RESET]) => return Step::Break(ExitReason::Reset),
            (POWER, [POWER_OFF, ..]) => return Step::Break(ExitReason::PowerOff),
            (port, [byte]) => {
                if let Some(register) = serial_register(port) {
                    let mut serial = self.serial.lock().unwrap_or_else(PoisonError::into_inner);
                    // It can only fail where its interrupt or its output fails, and ours cannot.
                    let _ = serial.write(register, *byte);
                }
            }
            _ => {}
        }
        Step::Continue(())
    }

    /// The guest reads from an address that is no RAM.
    pub fn mmio_read(&self, address: u64, data: &mut [u8]) {
        match self.window(address) {
            Some((window, offset)) => window.lock().unwrap_or_else(PoisonError::into_inner).read(offset, data),
            None => data.fill(0xff),
        }
    }

    /// The guest writes to an address that is no RAM.
    pub fn mmio_write(&self, address: u64, data: &[u8]) {
        if let Some((window, offset)) = self.window(address) {
            window.lock().unwrap_or_else(PoisonError::into_inner).write(offset, data);
        }
    }

    fn window(&self, address: u64) -> Option<(&Mutex<MmioTransport>, u64)> {
        let offset = address.checked_sub(self.first_window)?;
        let window = self.windows.get(usize::try_from(offset / WINDOW).ok()?)?;
        Some((window, offset % WINDOW))
    }
}

fn serial_register(port: u16) -> Option<u8> {
    let register = port.checked_sub(SERIAL)?;
    (register < SERIAL_PORTS).then_some(register as u8)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bus() -> (Bus, ConsoleTail) {
        let tail = ConsoleTail::new(64);
        (Bus::new(tail.clone(), 0xd000_0000, Vec::new()), tail)
    }

    #[test]
    fn early_serial_output_reaches_the_console_tail() {
        let (bus, tail) = bus();
        for byte in *b"panic" {
            assert!(bus.port_out(SERIAL, &[byte]).is_continue());
        }
        assert_eq!(tail.text(), "panic");
        let mut status = [0];
        bus.port_in(SERIAL + 5, &mut status);
        assert_ne!(status[0] & 0x20, 0, "the transmitter is always ready");
    }

    #[test]
    fn reset_and_power_off_are_told_apart() {
        let (bus, _) = bus();
        assert_eq!(bus.port_out(KEYBOARD_COMMAND, &[0xfe]), Step::Break(ExitReason::Reset));
        assert_eq!(bus.port_out(POWER, &[1]), Step::Break(ExitReason::PowerOff));
        assert!(bus.port_out(POWER, &[0]).is_continue());
    }

    #[test]
    fn empty_bus_reads_all_ones() {
        let (bus, _) = bus();
        let mut data = [0; 4];
        bus.port_in(0xcf8, &mut data);
        assert_eq!(data, [0xff; 4]);
        for address in [0, 0xd000_0000, u64::MAX] {
            let mut data = [0; 8];
            bus.mmio_read(address, &mut data);
            assert_eq!(data, [0xff; 8]);
        }
    }
}
