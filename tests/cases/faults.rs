//! Things that die.

use std::{
    thread,
    time::{Duration, Instant},
};

use tests::{Census, Container, ctr, images, shell};

/// Waits until `ctr task ls` shows the container in a state.
#[track_caller]
fn await_state(id: &str, state: &str) {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let tasks = ctr(&["task", "ls"]).expect_code(0).stdout;
        let line = tasks.lines().find(|line| line.split_whitespace().next() == Some(id));
        if line.is_some_and(|line| line.contains(state)) {
            return;
        }
        assert!(Instant::now() < deadline, "{id} is not {state}: {tasks}");
        thread::sleep(Duration::from_millis(50));
    }
}

/// Starts a container that sleeps, does `harm`, and returns the exit code that `ctr run` then has.
#[track_caller]
fn killed_by(harm: &str) -> i32 {
    let before = Census::take();
    let container = Container::new(images::BUSYBOX).command(&["sleep", "1000"]);
    let running = container.start();
    await_state(container.id(), "RUNNING");
    let _ = shell(harm).expect_code(0);
    let output = running.wait_with_output().expect("ctr ends");
    before.expect_nothing_new();
    output.status.code().unwrap_or(-1)
}

#[test]
fn killed_vmm_ends_the_container_with_137() {
    assert_eq!(killed_by("pkill -9 -x nacre-vmm"), 137);
}

#[test]
fn killed_shim_ends_everything_of_it() {
    // ctr itself was speaking to the shim; it fails with the broken connection, as under every runtime.
    assert_ne!(killed_by("pkill -9 -f '^/usr/local/bin/containerd-shim-nacre-v2'"), 0);
}

#[test]
fn guest_that_panics_while_running_ends_the_container_with_137() {
    let before = Census::take();
    // A privileged container may tell its own kernel to panic when memory runs out, and then use it all.
    let container = Container::new(images::BUSYBOX).flag("--privileged");
    let outcome = container.script("echo 2 > /proc/sys/vm/panic_on_oom && tail /dev/zero").run();
    let _ = outcome.expect_code(137);
    before.expect_nothing_new();
}
