//! A processor's thread: run, answer, run again, until the machine ends.

use std::{
    io,
    ops::ControlFlow,
    sync::{Arc, OnceLock},
    thread,
};

use kvm::{Exit, Memory, Vcpu};
use rustix::time::{ClockId, clock_gettime};
use vm_memory::{Bytes, GuestAddress};
use vmm::jail::Role;
use vmm_api::{Event, ExitReason};

use crate::{
    bus::{Bus, Step},
    ending::Owner,
};

/// Where the kernel leaves the mode of a reboot, and the value of a warm one (arch/x86/kernel/reboot.c).
///
/// The command line says `reboot=panic_warm`, so only a panic reboots warm: that is how it is told from a reset.
const REBOOT_MODE: GuestAddress = GuestAddress(0x472);
const WARM: u16 = 0x1234;

/// Holds processors back until the whole machine is ready.
#[derive(Debug, Clone, Default)]
pub struct Gate(Arc<OnceLock<()>>);

impl Gate {
    /// Lets all of them run.
    pub fn open(&self) {
        self.0.get_or_init(|| ());
    }
}

/// Starts the thread of one processor, which waits at the gate.
pub fn spawn(mut vcpu: Vcpu, bus: Arc<Bus>, memory: Memory, owner: Owner, gate: Gate) -> io::Result<()> {
    let index = vcpu.index();
    let run = move || {
        Role::Vcpu.restrict_or_end();
        gate.0.wait();
        if index == 0 {
            owner.tell(
                &Event::Entered { at_ns: now_ns(ClockId::Monotonic), cpu_ns: now_ns(ClockId::ProcessCPUTime) },
                &[],
            );
        }
        let reason = loop {
            if let ControlFlow::Break(reason) = step(&mut vcpu, &bus) {
                break reason;
            }
        };
        owner.end(explain(reason, &memory))
    };
    thread::Builder::new().name(format!("vcpu{index}")).spawn(run).map(drop)
}

fn step(vcpu: &mut Vcpu, bus: &Bus) -> Step {
    match vcpu.run() {
        Exit::PortIn(port, data) => bus.port_in(port, data),
        Exit::PortOut(port, data) => return bus.port_out(port, data),
        Exit::MmioRead(address, data) => bus.mmio_read(address, data),
        Exit::MmioWrite(address, data) => bus.mmio_write(address, data),
        Exit::Again => {}
        Exit::Shutdown => return Step::Break(ExitReason::TripleFault),
        Exit::Fault(message) => return Step::Break(ExitReason::Fault { message }),
    }
    Step::Continue(())
}

/// A warm reset is a panic.
fn explain(reason: ExitReason, memory: &Memory) -> ExitReason {
    let warm = || memory.ram().read_obj::<u16>(REBOOT_MODE).is_ok_and(|mode| mode == WARM);
    if reason == ExitReason::Reset && warm() { ExitReason::Panic } else { reason }
}

fn now_ns(clock: ClockId) -> u64 {
    let now = clock_gettime(clock);
    // Neither clock is ever negative.
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warm_reset_is_a_panic() {
        let memory = Memory::new(64).expect("memory");
        assert_eq!(explain(ExitReason::Reset, &memory), ExitReason::Reset);
        memory.ram().write_obj(WARM, REBOOT_MODE).expect("inside");
        assert_eq!(explain(ExitReason::Reset, &memory), ExitReason::Panic);
        assert_eq!(explain(ExitReason::TripleFault, &memory), ExitReason::TripleFault);
    }
}
