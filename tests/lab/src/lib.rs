//! The lab: a virtual machine with a true `/dev/kvm`, containerd, Docker and the test images, on any machine.
//!
//! Most build machines have no usable KVM, so the lab is QEMU's software emulation of a machine with AMD SVM, where
//! Linux's `kvm_amd` works as on hardware (design.md §6). A boot is fresh: the root disk is never written, all changes
//! go to a throw-away layer. The host talks to it by three virtio-serial ports (control, stdout, stderr; `guest/lab-init`
//! is the other end) and by disks (input tree, output tar), so output is byte for byte what the command wrote and the
//! serial console holds kernel messages only.
//!
//! ```text
//!             up            exit N          qemu ends
//!  Booting ────────> Running ─────> Leaving ─────────> Done(N)
//!     │ fault TEXT      │               │
//!     │ deadline        │ time-out: 124 │ deadline: qemu is killed, N stands
//!     └───────┬─────────┘
//!   lock-up trace, death or silence of QEMU ──> LabFault: one more boot, and it is said
//! ```
//!
//! - [`cli`]: what is typed. [`cache`]: where things are. [`recipe`]: making kernel, root and images.
//! - [`qemu`]: a machine as a command line. [`accel`]: emulated or hardware. [`input`]: the disk that goes in.
//! - [`ports`]: sockets to the guest, as events. [`boot`]: one boot from start to verdict. [`verdict`]: whose fault it was.
//! - [`terminal`]: raw mode for `lab shell`.
#![forbid(unsafe_code)]

pub mod accel;
pub mod boot;
pub mod cache;
pub mod cli;
pub mod input;
pub mod ports;
pub mod qemu;
pub mod recipe;
pub mod terminal;
pub mod verdict;
