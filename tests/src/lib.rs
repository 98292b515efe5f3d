//! What the VM tests in `cases/` share: a way to run `ctr`, and a census of what a run may leave behind.
//!
//! The tests run inside of the lab, as root, one at a time, against the lab's containerd. A test keeps its host half
//! (Rust) and its guest half (the command that runs in the container) in one function.
#![forbid(unsafe_code)]

mod census;
mod ctr;
mod settings;

pub use census::Census;
pub use ctr::{Container, Outcome, RUNTIME, ctr, images, shell};
pub use settings::Settings;
