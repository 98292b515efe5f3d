//! The machine itself: its processors, and the ways in which it ends.

use tests::{Census, Container, Settings, images, shell};

#[test]
fn machine_has_the_processors_that_were_asked_for() {
    // Two: processors that wait for each other on the one CPU of an emulated lab take a minute when they are four.
    let _settings = Settings::with("[machine]\nvcpus = 2\n[shim]\nboot_timeout_s = 120\n");
    let outcome = Container::new(images::BUSYBOX).command(&["nproc"]).run().expect_code(0);
    assert_eq!(outcome.stdout, "2\n");
}

#[test]
fn reset_by_the_guest_is_told_from_a_panic() {
    end_by_panic("reboot=panic_cold", "the guest reset itself");
}

#[test]
fn triple_fault_is_told_from_a_reset() {
    end_by_panic("reboot=t", "a guest CPU triple-faulted");
}

/// Has the guest's kernel panic, with a command line by which a panic ends the machine in another way, and expects the
/// shim's account of the end.
fn end_by_panic(cmdline: &str, account: &str) {
    let before = Census::take();
    let _settings = Settings::with(&format!("[machine]\nmemory_mib = 96\nkernel_cmdline = \"{cmdline}\"\n"));
    let container = Container::new(images::BUSYBOX).flag("--privileged");
    let _ = container.script("echo 2 > /proc/sys/vm/panic_on_oom && tail /dev/zero").run().expect_code(137);
    let told = shell("grep -a 'VM ended' /var/log/containerd.log | tail -n 1").expect_code(0).stdout;
    assert!(told.contains(account), "{told}");
    before.expect_nothing_new();
}
