//! Tasks that outlive their `ctr`: start, kill, wait, delete.

use std::{fs, thread::sleep, time::Duration};

use tests::{Census, RUNTIME, Task, ctr, images, shell, until};

/// A detached container; `ctr` returns when it runs.
fn start(id: &str, script: &str) {
    let _ = ctr(&["run", "-d", "--runtime", RUNTIME, images::BUSYBOX, id, "sh", "-c", script]).expect_code(0);
}

fn remove(id: &str) {
    let _ = ctr(&["container", "rm", id]).expect_code(0);
}

#[test]
fn detached_container_is_listed_killed_and_deleted() {
    let before = Census::take();
    start("life", "trap 'exit 3' TERM; while :; do sleep 1; done");
    let tasks = ctr(&["task", "ls"]).expect_code(0).stdout;
    assert!(tasks.lines().any(|line| line.starts_with("life") && line.ends_with("RUNNING")), "{tasks}");
    let pids = ctr(&["task", "ps", "life"]).expect_code(0).stdout;
    assert!(pids.lines().count() >= 2, "{pids}");
    let refused = ctr(&["task", "rm", "life"]);
    assert_ne!(refused.code, 0, "a running task is not deleted");
    let _ = ctr(&["task", "kill", "-s", "SIGTERM", "life"]).expect_code(0);
    let _ =
        shell("timeout 30 sh -c 'until ctr task ls | grep -q \"life .*STOPPED\"; do sleep 0.1; done'").expect_code(0);
    let deleted = ctr(&["task", "rm", "life"]);
    assert!(deleted.code == 3 || deleted.stderr.contains("3"), "{deleted:?}");
    remove("life");
    before.expect_nothing_new();
}

#[test]
fn kill_after_exit_says_that_the_process_has_finished() {
    start("gone", "exit 0");
    let _ =
        shell("timeout 30 sh -c 'until ctr task ls | grep -q \"gone .*STOPPED\"; do sleep 0.1; done'").expect_code(0);
    let late = ctr(&["task", "kill", "gone"]);
    assert!(late.code != 0 && late.stderr.contains("process already finished"), "{late:?}");
    let _ = ctr(&["task", "rm", "gone"]).expect_code(0);
    remove("gone");
}

#[test]
fn created_container_that_never_starts_can_be_deleted() {
    let before = Census::take();
    let _ = ctr(&["container", "create", "--runtime", RUNTIME, images::BUSYBOX, "never", "true"]).expect_code(0);
    remove("never");
    before.expect_nothing_new();
}

#[test]
fn events_come_in_order_and_the_exit_once() {
    let script = format!(
        "timeout 100 ctr events > /tmp/events & pid=$!; sleep 1; ctr run --rm --runtime {RUNTIME} {} ordered true; \
         sleep 1; kill $pid; grep -o '/tasks/[a-z-]*' /tmp/events",
        images::BUSYBOX
    );
    let topics = shell(&script).stdout;
    assert_eq!(topics, "/tasks/create\n/tasks/start\n/tasks/exit\n/tasks/delete\n");
}

#[test]
fn task_pid_shows_the_container_and_not_the_host() {
    start("seen", "echo inside > /root/mark; sleep 1000");
    let script = "pid=$(ctr task ls | awk '$1==\"seen\"{print $2}'); \
                  timeout 10 sh -c \"until cat /proc/$pid/root/root/mark 2>/dev/null; do sleep 0.1; done\"; \
                  test \"$(readlink /proc/$pid/ns/net)\" != \"$(readlink /proc/1/ns/net)\" && echo own net";
    assert_eq!(shell(script).stdout, "inside\nown net\n");
    let _ = ctr(&["task", "kill", "-s", "SIGKILL", "seen"]).expect_code(0);
    let _ =
        shell("timeout 30 sh -c 'until ctr task ls | grep -q \"seen .*STOPPED\"; do sleep 0.1; done'").expect_code(0);
    let _ = ctr(&["task", "rm", "seen"]);
    remove("seen");
}

#[test]
fn paused_container_stands_still_until_it_is_resumed_and_events_say_so() {
    let before = Census::take();
    let _ = shell("(timeout 100 ctr events > /tmp/events 2>&1 &); sleep 1").expect_code(0);
    let task = Task::start("counter", "n=0; while :; do n=$((n+1)); echo $n > /count; sleep 0.1; done");
    let file = task.in_root("count");
    // The shell truncates the file before it writes into it.
    let count = || fs::read_to_string(&file).ok()?.trim().parse::<u32>().ok();
    let _ = until("the first count", Duration::from_secs(30), count);
    let _ = task.verb(&["pause"]).expect_code(0);
    let stands = count();
    sleep(Duration::from_secs(2));
    assert_eq!(count(), stands);
    let _ = task.verb(&["pause"]).expect_failure_with("it is paused");
    let _ = task.verb(&["resume"]).expect_code(0);
    until("the count to go on", Duration::from_secs(30), || count().filter(|now| Some(*now) > stands));
    let _ = task.verb(&["resume"]).expect_failure_with("it is running");
    task.remove();
    let topics = shell("pkill -x -f 'ctr events'; grep -o '/tasks/[a-z-]*' /tmp/events").stdout;
    assert_eq!(topics, "/tasks/create\n/tasks/start\n/tasks/paused\n/tasks/resumed\n/tasks/exit\n/tasks/delete\n");
    before.expect_nothing_new();
}
