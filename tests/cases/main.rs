//! VM tests: run in the lab by `make test`, one at a time, against a real containerd and a real KVM.
//!
//! ```text
//!   first_light   the main job, as a user does it
//!   rootfs        where the root comes from, and where writes go
//!   stdio         bytes in, bytes out, end of file, order
//!   refusals      bad input: a clear error, nothing left behind
//!   faults        things that die
//!   files         virtio-fs as programs use it
//!   operator      options, annotations, `nacre check` and `ps`, logs
//!   lifecycle     tasks that outlive their ctr: start, kill, wait, delete
//!   machine       processors, ends
//!   memory        what the host pays for
//! ```
#![forbid(unsafe_code)]

mod faults;
mod files;
mod first_light;
mod lifecycle;
mod machine;
mod memory;
mod operator;
mod refusals;
mod rootfs;
mod stdio;
