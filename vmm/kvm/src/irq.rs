//! The two eventfds between KVM and a device: the line it raises, the doorbell it hears.

use std::io;

use vmm_sys_util::eventfd::EventFd;

/// Raises one interrupt line of the machine (an irqfd): one write, no exit of the guest.
#[derive(Debug)]
pub struct IrqLine {
    pub(crate) event: EventFd,
}

impl IrqLine {
    /// Raises the line once (edge).
    pub fn raise(&self) -> io::Result<()> {
        self.event.write(1)
    }
}

/// Rings when the guest writes to one address (an ioeventfd): KVM signals it without leaving the kernel.
pub type Doorbell = EventFd;
