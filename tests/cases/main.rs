//! VM tests: run in the lab by `make test`, one at a time, against a real containerd and a real KVM.
//!
//! ```text
//!   first_light   the main job, as a user does it
//!   rootfs        where the root comes from, and where writes go
//!   stdio         bytes in, bytes out, end of file, order
//!   refusals      bad input: a clear error, nothing left behind
//!   files         virtio-fs as programs use it
//!   oci           the runtime spec, field by field, as runtime-tools' runtimetest sees it from inside
//!   operator      options, annotations, `nacre check` and `ps`, logs
//!   core          what must hold on each of the lab's containerds
//!   pods          several containers, one machine
//!   faults        things that die, and things that stand still
//!   lifecycle     tasks that outlive their ctr: start, kill, wait, delete
//!   machine       processors, ends
//!   many          many in a row, many at once
//!   memory        what the host pays for
//! ```
#![forbid(unsafe_code)]

mod core;
mod faults;
mod files;
mod first_light;
mod lifecycle;
mod machine;
mod many;
mod memory;
mod oci;
mod operator;
mod pods;
mod refusals;
mod rootfs;
mod stdio;
