//! What the VM tests in `cases/` share: a way to run `ctr`, and a census of what a run may leave behind.
//!
//! The tests run inside of the lab, as root, one at a time, against the lab's containerd. A test keeps its host half
//! (Rust) and its guest half (the command that runs in the container) in one function.
#![forbid(unsafe_code)]

mod census;
mod ctr;
mod daemon;
mod grpc;
mod settings;
mod task;
mod victim;

use std::{
    thread,
    time::{Duration, Instant},
};

pub use census::Census;
pub use ctr::{Container, Outcome, RUNTIME, ctr, images, shell};
pub use daemon::{containerd_name, kill_containerd, start_containerd};
pub use grpc::create_task;
pub use settings::Settings;
pub use task::Task;
pub use victim::{Victim, within};

/// Looks until `found` has something, and fails the test if that takes longer than `patience`.
#[track_caller]
pub fn until<T>(what: &str, patience: Duration, mut found: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + patience;
    loop {
        if let Some(result) = found() {
            return result;
        }
        assert!(Instant::now() < deadline, "waited {} s for {what}", patience.as_secs());
        thread::sleep(Duration::from_millis(50));
    }
}
