//! Things that die.

use std::io::{BufRead, BufReader};

use tests::{Census, Container, images, shell};

/// Starts a container that sleeps, does `harm` as soon as it has spoken, and returns the exit code of `ctr run`.
#[track_caller]
fn killed_by(harm: &str) -> i32 {
    let before = Census::take();
    let container = Container::new(images::BUSYBOX).script("echo running; exec sleep 1000");
    let mut running = container.start();
    let mut output = BufReader::new(running.stdout.take().expect("stdout is a pipe"));
    let mut line = String::new();
    // Ends with the container's first word, or with ctr itself: nothing is polled.
    output.read_line(&mut line).expect("the pipe is readable");
    assert_eq!(line, "running\n");
    let _ = shell(harm).expect_code(0);
    let ended = running.wait().expect("ctr ends");
    before.expect_nothing_new();
    ended.code().unwrap_or(-1)
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
