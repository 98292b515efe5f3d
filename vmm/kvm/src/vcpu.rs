//! One virtual processor and the reasons for which it stops.

use kvm_ioctls::{VcpuExit, VcpuFd};

use crate::vm::VmError;

/// Why a processor came back from the guest.
#[derive(Debug)]
pub enum Exit<'a> {
    /// Read from a port; fill the slice before the next run.
    PortIn(u16, &'a mut [u8]),
    /// Write to a port.
    PortOut(u16, &'a [u8]),
    /// Read from an address that is no RAM; fill the slice before the next run.
    MmioRead(u64, &'a mut [u8]),
    /// Write to an address that is no RAM.
    MmioWrite(u64, &'a [u8]),
    /// Nothing to do: a signal arrived, or KVM wants to be called again.
    Again,
    /// Triple fault.
    Shutdown,
    /// KVM cannot go on with this guest.
    Fault(String),
}

/// A virtual processor. Its thread alone calls [`Vcpu::run`].
#[derive(Debug)]
pub struct Vcpu {
    pub(crate) fd: VcpuFd,
    pub(crate) index: u8,
}

impl Vcpu {
    pub(crate) fn new(fd: VcpuFd, index: u8) -> Self {
        Self { fd, index }
    }

    /// Its number, from 0.
    #[must_use]
    pub fn index(&self) -> u8 {
        self.index
    }

    /// Runs the guest until something needs the VMM.
    pub fn run(&mut self) -> Exit<'_> {
        match self.fd.run() {
            Ok(VcpuExit::IoIn(port, data)) => Exit::PortIn(port, data),
            Ok(VcpuExit::IoOut(port, data)) => Exit::PortOut(port, data),
            Ok(VcpuExit::MmioRead(address, data)) => Exit::MmioRead(address, data),
            Ok(VcpuExit::MmioWrite(address, data)) => Exit::MmioWrite(address, data),
            Ok(VcpuExit::Shutdown) => Exit::Shutdown,
            Ok(VcpuExit::Intr) => Exit::Again,
            Ok(other) => Exit::Fault(format!("unexpected KVM exit {other:?}")),
            Err(error) if matches!(error.errno(), EINTR | EAGAIN) => Exit::Again,
            Err(error) => Exit::Fault(format!("KVM_RUN: {error}")),
        }
    }
}

const EINTR: i32 = rustix::io::Errno::INTR.raw_os_error();
const EAGAIN: i32 = rustix::io::Errno::AGAIN.raw_os_error();

/// Shorthand for the preparation code.
pub(crate) type Prepared = Result<(), VmError>;
