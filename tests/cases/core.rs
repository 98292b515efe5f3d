//! What must hold on every containerd: `make test` runs this room on each of the lab's three.

use std::fs;

use tests::{
    Census, Container, RUNTIME, Task, Victim, containerd_name, ctr, images, kill_containerd, shell, start_containerd,
    within,
};

#[test]
fn container_runs_and_its_output_and_exit_code_are_ctrs() {
    let before = Census::take();
    let outcome = Container::new(images::BUSYBOX).script("uname -r; echo err >&2; exit 7").run().expect_code(7);
    assert!(outcome.stdout.ends_with("-nacre\n") && outcome.stderr == "err\n", "{outcome:?}");
    before.expect_nothing_new();
}

#[test]
fn options_of_the_caller_reach_the_shim_and_a_bad_one_leaves_nothing() {
    fs::write("/tmp/bad.toml", "[machine]\nmemroy_mib = 256\n").expect("/tmp is writable");
    let before = Census::take();
    let container = Container::new(images::BUSYBOX).flag("--runtime-config-path=/tmp/bad.toml").command(&["true"]);
    let _ = within(30, || container.run()).expect_failure_with("/tmp/bad.toml:2: unknown field `memroy_mib`");
    before.expect_nothing_new();
}

#[test]
fn features_say_what_works_and_containerd_reads_them() {
    let told = shell("containerd-shim-nacre-v2 -info < /dev/null").expect_code(0).stdout;
    assert!(told.contains(RUNTIME) && told.contains(r#""ociVersionMax""#), "{told}");
    // containerd 1.7 does not ask.
    if containerd_name() != "1.7" {
        let read = ctr(&["plugins", "inspect-runtime", "--runtime", RUNTIME]).expect_code(0).stdout;
        for word in [RUNTIME, "ociVersionMax", r#""rbind""#, r#""network""#] {
            assert!(read.contains(word), "{word} is not in: {read}");
        }
        assert!(!read.contains(r#""user""#) && !read.contains(r#""rro""#), "announced and not there: {read}");
    }
}

#[test]
fn containers_of_a_pod_share_one_machine_until_the_last_is_gone() {
    let before = Census::take();
    let sandbox = Task::start_in("pod", "pod", "sleep 1000");
    let app = Task::start_in("pod", "app", "sleep 1000");
    assert_eq!((Victim::Shim.pids().len(), Victim::Vmm.pids().len()), (1, 1));
    let _ = app.verb(&["kill", "-s", "SIGKILL"]).expect_code(0);
    app.expect_status("STOPPED");
    let removed = app.verb(&["rm"]);
    assert!(removed.code == 137 || removed.stderr.contains("137"), "{removed:?}");
    let _ = ctr(&["container", "rm", "app"]).expect_code(0);
    assert_eq!(sandbox.status(), "RUNNING");
    let again = Task::start_in("pod", "again", "sleep 1000");
    assert_eq!((Victim::Shim.pids().len(), Victim::Vmm.pids().len()), (1, 1));
    again.remove();
    sandbox.remove();
    before.expect_nothing_new();
}

#[test]
fn tasks_in_every_state_survive_a_containerd_that_is_killed() {
    let before = Census::take();
    let talker = "n=0; while :; do n=$((n+1)); echo $n; echo $n > /count; sleep 0.2; done";
    let running = Task::start_in("pod", "running", talker);
    let paused = Task::start_in("pod", "paused", "sleep 1000");
    let _ = paused.verb(&["pause"]).expect_code(0);
    paused.expect_status("PAUSED");
    let stopped = Task::start_in("pod", "stopped", "exit 5");
    stopped.expect_status("STOPPED");
    let ending = Task::start_in("pod", "ending", "until test -e /end; do sleep 0.2; done; exit 6");
    let (count, end) = (running.in_root("count"), ending.in_root("end"));
    kill_containerd();
    // It ends while nobody listens; the other goes on writing to a stream that nobody reads.
    fs::write(end, "").expect("the root is writable on the host");
    let wait =
        format!("n=$(cat {count}); timeout 30 sh -c \"until [ \\$(cat {count}) -gt $((n + 5)) ]; do sleep 0.2; done\"");
    let _ = shell(&wait).expect_code(0);
    within(60, start_containerd);
    for (task, status) in [(&running, "RUNNING"), (&paused, "PAUSED"), (&stopped, "STOPPED"), (&ending, "STOPPED")] {
        task.expect_status(status);
    }
    let removed = ending.verb(&["rm"]);
    assert!(removed.code == 6 || removed.stderr.contains('6'), "{removed:?}");
    let _ = ctr(&["container", "rm", "ending"]).expect_code(0);
    stopped.remove_stopped();
    let _ = paused.verb(&["resume"]).expect_code(0);
    paused.expect_status("RUNNING");
    let _ = paused.verb(&["pause"]).expect_code(0);
    paused.remove();
    running.remove();
    before.expect_nothing_new();
}

#[test]
fn containerd_killed_in_the_middle_of_create_leaves_nothing_that_cannot_be_removed() {
    let before = Census::take();
    let container = Container::new(images::BUSYBOX).keep().script("sleep 1000");
    let mut running = container.start();
    Victim::Vmm.appears();
    kill_containerd();
    assert!(!running.wait().expect("ctr ends").success());
    within(60, start_containerd);
    remove_what_is_known(&container);
    before.expect_nothing_new();
}

/// A container whose client has gone: its task may have been taken over, or nobody knows it.
#[track_caller]
pub fn remove_what_is_known(container: &Container) {
    let task = Task::known(container.id());
    if !task.status().is_empty() {
        let _ = task.verb(&["rm", "-f"]);
        assert_eq!(task.status(), "");
    }
    let _ = ctr(&["container", "rm", container.id()]).expect_code(0);
}

#[test]
fn task_of_a_machine_that_died_has_stopped_and_answers_like_it() {
    let before = Census::take();
    let task = Task::start("dead", "sleep 1000");
    Victim::Vmm.kill();
    within(30, || task.expect_status("STOPPED"));
    let late = task.verb(&["kill", "-s", "SIGKILL"]);
    assert!(late.code != 0 && late.stderr.contains("process already finished"), "{late:?}");
    let removed = within(30, || task.verb(&["rm"]));
    assert!(removed.code == 137 || removed.stderr.contains("137"), "{removed:?}");
    let _ = ctr(&["container", "rm", "dead"]).expect_code(0);
    before.expect_nothing_new();
}

#[test]
fn shim_that_is_killed_takes_everything_with_it() {
    let before = Census::take();
    let task = Task::start("orphan", "sleep 1000");
    // Not even a machine that stands still outlives its shim.
    Victim::Vmm.stop();
    Victim::Shim.kill();
    within(30, || {
        tests::until("the task to be gone", std::time::Duration::from_secs(30), || {
            matches!(task.status().as_str(), "" | "STOPPED").then_some(())
        })
    });
    let _ = task.verb(&["rm"]);
    let _ = ctr(&["container", "rm", "orphan"]).expect_code(0);
    before.expect_nothing_new();
}

#[test]
fn shim_that_stands_still_does_not_keep_containerd_from_starting() {
    let before = Census::take();
    let task = Task::start("still", "sleep 1000");
    Victim::Shim.stop();
    kill_containerd();
    within(60, start_containerd);
    assert_eq!(within(20, || task.status()), "", "it answers nobody, so containerd has removed it");
    let _ = ctr(&["container", "rm", "still"]).expect_code(0);
    before.expect_nothing_new();
}
