//! Things that die, and things that stand still: VMM, shim and containerd while starting, running and deleting.
//!
//! After each, nothing is left, and the caller has its reason in a bounded time. What must hold on every containerd is in
//! `core`.

use std::{
    io::{BufRead, BufReader, Read},
    process::{Child, Command},
    thread::sleep,
    time::Duration,
};

use tests::{Census, Container, Settings, Task, Victim, ctr, images, kill_containerd, shell, start_containerd, within};

use crate::core::remove_what_is_known;

/// Starts a container that sleeps, does `harm` as soon as it has spoken, and returns the exit code of `ctr run`.
#[track_caller]
fn running_while(harm: impl FnOnce(&Container)) -> i32 {
    let before = Census::take();
    let container = Container::new(images::BUSYBOX).script("echo running; exec sleep 1000");
    let mut running = container.start();
    let mut output = BufReader::new(running.stdout.take().expect("stdout is a pipe"));
    let mut line = String::new();
    // Ends with the container's first word, or with ctr itself: nothing is polled.
    output.read_line(&mut line).expect("the pipe is readable");
    assert_eq!(line, "running\n");
    harm(&container);
    let ended = running.wait().expect("ctr ends");
    before.expect_nothing_new();
    ended.code().unwrap_or(-1)
}

/// Starts a container, does `harm` to `victim` as soon as it appears, and returns what `ctr run` then says.
#[track_caller]
fn starting_while(victim: Victim, harm: impl FnOnce()) -> String {
    let before = Census::take();
    let container = Container::new(images::BUSYBOX).command(&["sleep", "1000"]);
    let mut running = container.start();
    victim.appears();
    harm();
    let mut words = String::new();
    let mut stderr = running.stderr.take().expect("stderr is a pipe");
    within(60, || stderr.read_to_string(&mut words)).expect("the pipe is readable");
    assert!(!running.wait().expect("ctr ends").success());
    before.expect_nothing_new();
    words
}

/// A container that has ended and is about to be deleted.
fn stopped(id: &str) -> Task {
    let task = Task::start(id, "exit 3");
    task.expect_status("STOPPED");
    task
}

fn shell_in_background(script: &str) -> Child {
    Command::new("sh").args(["-c", script]).spawn().expect("sh starts")
}

#[test]
fn vmm_killed_while_it_starts_is_named() {
    let words = starting_while(Victim::Vmm, || Victim::Vmm.kill());
    assert!(words.contains("the VMM ended unexpectedly (killed by signal 9)"), "{words}");
}

#[test]
fn vmm_that_stands_still_while_it_starts_is_given_up_in_time() {
    let _settings = Settings::with("[shim]\nboot_timeout_s = 5\n");
    let words = starting_while(Victim::Vmm, || Victim::Vmm.stop());
    assert!(words.contains("its agent did not connect within 5 s"), "{words}");
}

#[test]
fn killed_vmm_ends_the_container_with_137() {
    assert_eq!(running_while(|_| Victim::Vmm.kill()), 137);
}

#[test]
fn container_of_a_vmm_that_stands_still_can_be_killed() {
    let harm = |container: &Container| {
        Victim::Vmm.stop();
        let task = Task::known(container.id());
        assert_eq!(within(5, || task.status()), "RUNNING", "what is known is told without the guest");
        let refused = within(20, || task.verb(&["kill", "-s", "SIGTERM"]));
        assert!(refused.stderr.contains("did not signal"), "{refused:?}");
        let _ = within(20, || task.verb(&["kill", "-s", "SIGKILL"])).expect_code(0);
    };
    assert_eq!(running_while(harm), 137);
}

#[test]
fn task_is_deleted_although_its_vmm_stands_still() {
    let before = Census::take();
    let task = stopped("still");
    Victim::Vmm.stop();
    within(30, || task.remove_stopped());
    before.expect_nothing_new();
}

#[test]
fn task_is_deleted_although_its_vmm_is_dead() {
    let before = Census::take();
    let task = stopped("gone");
    Victim::Vmm.kill();
    within(30, || task.remove_stopped());
    before.expect_nothing_new();
}

#[test]
fn container_that_joins_a_pod_whose_vmm_stands_still_is_refused_in_time() {
    let before = Census::take();
    let sandbox = Task::start_in("pod", "pod", "sleep 1000");
    Victim::Vmm.stop();
    let late = Container::new(images::BUSYBOX).flag("--annotation=io.kubernetes.cri.sandbox-id=pod").command(&["true"]);
    let _ = within(30, || late.run()).expect_failure_with("the VMM did not attach share");
    // A VMM that does not answer is not kept.
    sandbox.expect_status("STOPPED");
    sandbox.remove();
    before.expect_nothing_new();
}

#[test]
fn shim_killed_while_it_starts_fails_the_caller() {
    let words = starting_while(Victim::Shim, || Victim::Shim.kill());
    assert!(!words.is_empty());
}

#[test]
fn killed_shim_ends_everything_of_it() {
    // ctr itself was speaking to the shim; it fails with the broken connection, as under every runtime.
    assert_ne!(running_while(|_| Victim::Shim.kill()), 0);
}

#[test]
fn shim_that_stands_still_while_it_starts_ends_with_its_bundle() {
    let before = Census::take();
    let container = Container::new(images::BUSYBOX).keep().command(&["sleep", "1000"]);
    let mut running = container.start();
    Victim::Shim.appears();
    Victim::Shim.stop();
    // containerd gives Create as much time as its caller has.
    sleep(Duration::from_secs(2));
    running.kill().expect("ctr is there");
    running.wait().expect("ctr ends");
    // containerd then asks in vain for 5 s, removes the bundle, and executes `delete` in it at the same time: that may
    // come too late to be executed at all. Then the shim is on its own, and finds out as soon as it can run.
    sleep(Duration::from_secs(10));
    if !Victim::Shim.pids().is_empty() {
        Victim::Shim.go_on();
    }
    within(60, || before_is_back(&before, &container));
}

/// Waits for containerd's own clean-up, then removes the container.
#[track_caller]
fn before_is_back(before: &Census, container: &Container) {
    tests::until("containerd to take the task back", Duration::from_secs(40), || {
        Victim::Shim.pids().is_empty().then_some(())
    });
    remove_what_is_known(container);
    before.expect_nothing_new();
}

#[test]
fn delete_that_failed_once_succeeds_when_it_is_asked_again() {
    let before = Census::take();
    let task = stopped("again");
    Victim::Shim.stop();
    let failed = shell("timeout -s KILL 3 ctr task rm again");
    assert_ne!(failed.code, 0, "nobody answered");
    Victim::Shim.go_on();
    // The first one may have been carried out meanwhile.
    tests::until("the task to be gone", Duration::from_secs(30), || {
        let _ = task.verb(&["rm"]);
        task.status().is_empty().then_some(())
    });
    let _ = ctr(&["container", "rm", "again"]).expect_code(0);
    before.expect_nothing_new();
}

#[test]
fn delete_action_needs_neither_shim_nor_vmm_and_can_be_repeated() {
    let before = Census::take();
    let task = Task::start("byhand", "sleep 1000");
    Victim::Vmm.stop();
    Victim::Shim.stop();
    let bundle = "/run/containerd/io.containerd.runtime.v2.task/default/byhand";
    let delete = format!("containerd-shim-nacre-v2 -namespace default -id byhand -bundle {bundle} delete | wc -c");
    for _ in 0..2 {
        // containerd waits for 5 s, on a machine that is a hundred times faster.
        let answer = within(5, || shell(&delete)).expect_code(0);
        assert_ne!(answer.stdout.trim(), "0", "a DeleteResponse was expected");
    }
    assert_eq!((Victim::Shim.pids().len(), Victim::Vmm.pids().len()), (0, 0));
    // containerd does it once more, because the connection has ended.
    tests::until("containerd to notice", Duration::from_secs(30), || {
        matches!(task.status().as_str(), "" | "STOPPED").then_some(())
    });
    let _ = task.verb(&["rm"]);
    let _ = ctr(&["container", "rm", "byhand"]).expect_code(0);
    before.expect_nothing_new();
}

#[test]
fn shim_killed_before_a_delete_leaves_nothing_to_delete() {
    let before = Census::take();
    let task = stopped("late");
    Victim::Shim.kill();
    let _ = within(30, || task.verb(&["rm"]));
    assert_eq!(task.status(), "");
    let _ = ctr(&["container", "rm", "late"]).expect_code(0);
    before.expect_nothing_new();
}

#[test]
fn containerd_killed_between_start_and_create_leaves_nothing() {
    let before = Census::take();
    let container = Container::new(images::BUSYBOX).keep().command(&["sleep", "1000"]);
    let mut running = container.start();
    Victim::Shim.appears();
    kill_containerd();
    running.wait().expect("ctr ends");
    within(60, start_containerd);
    remove_what_is_known(&container);
    before.expect_nothing_new();
}

#[test]
fn containerd_killed_while_it_deletes_finds_the_task_again_or_nothing() {
    let before = Census::take();
    let task = stopped("half");
    let mut deleting = shell_in_background("exec ctr task rm half > /dev/null 2>&1");
    // The shim has done its part then, and containerd is about to remove the bundle.
    tests::until("the VMM to be gone", Duration::from_secs(60), || Victim::Vmm.pids().is_empty().then_some(()));
    kill_containerd();
    let _ = deleting.wait();
    within(60, start_containerd);
    if !task.status().is_empty() {
        let _ = task.verb(&["rm"]);
        assert_eq!(task.status(), "");
    }
    let _ = ctr(&["container", "rm", "half"]).expect_code(0);
    before.expect_nothing_new();
}

#[test]
fn exit_is_told_to_a_containerd_that_stood_still() {
    let before = Census::take();
    let task = Task::start("unheard", "sleep 3; exit 4");
    Victim::Containerd.stop();
    sleep(Duration::from_secs(6));
    Victim::Containerd.go_on();
    task.expect_status("STOPPED");
    let removed = task.verb(&["rm"]);
    assert!(removed.code == 4 || removed.stderr.contains('4'), "{removed:?}");
    let _ = ctr(&["container", "rm", "unheard"]).expect_code(0);
    before.expect_nothing_new();
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
