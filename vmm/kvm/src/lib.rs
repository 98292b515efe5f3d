//! KVM: guest memory, the virtual machine, its processors, and what x86_64 needs before the first instruction.
//!
//! # Order of construction
//!
//! ```text
//!   Host::new ─► Memory::new ─► Vm::new(host, memory) ─► irq(), doorbell()   (devices are wired)
//!                     │                  └─► vcpu(i) ──► x86_64::prepare ──► run() … run()
//!                     └─► kernel::load, x86_64::write_tables
//! ```
//!
//! * A [`Vm`] keeps its [`Memory`] alive: KVM's memory slots point into it.
//! * Every [`Vcpu`] runs on a thread of its own; [`Vcpu::run`] returns one [`Exit`] at a time and never loops.
//! * Failures before the first run are typed errors. After it, what the guest did comes back as an [`Exit`]; nothing a
//!   guest does makes this crate panic.
//!
//! # Unsafe
//!
//! This crate is one of the workspace's three homes for `unsafe` (design.md §4). It needs it four
//! times: to map guest memory, to give KVM its address, to take a descriptor as KVM's, and in the handler of forbidden
//! system calls.
#![deny(unsafe_code)]

mod host;
mod irq;
pub mod kernel;
mod mapping;
mod memory;
pub mod probe;
pub mod trap;
mod vcpu;
mod vm;
pub mod x86_64;

pub use host::{Host, HostError};
pub use irq::{Doorbell, IrqLine};
pub use mapping::MappingError;
pub use memory::{Layout, MMIO_GAP_START, Memory, MemoryError, Ram};
pub use vcpu::{Exit, Vcpu};
pub use vm::{Vm, VmError};
