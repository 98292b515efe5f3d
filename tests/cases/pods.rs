//! Pods: several containers, one machine, and what each of them gives back.

use std::{fs, thread::sleep, time::Duration};

use tests::{Census, Container, RUNTIME, Task, Victim, create_task, ctr, images, shell};

const IN_POD: &str = "--annotation=io.kubernetes.cri.sandbox-id=pod";

fn in_pod() -> Container {
    Container::new(images::BUSYBOX).flag(IN_POD)
}

#[test]
fn container_that_is_restarted_in_its_pod_leaves_no_trace_of_earlier_lives() {
    let before = Census::take();
    let sandbox = Task::start_in("pod", "pod", "sleep 1000");
    let crash = || {
        let script = "find / -xdev > /dev/null; cat > /dev/null; head -c 1000000 /dev/zero > /junk; \
                      sleep 1000 < /bin/busybox & exit 1";
        let container = in_pod().script(script);
        let _ = container.stdin(b"some input").run().expect_code(1);
    };
    // The first ones fill tables and caches that are kept.
    (0..2).for_each(|_| crash());
    let open = || (Victim::Shim.descriptors().len(), Victim::Vmm.descriptors().len(), Census::take());
    let first = open();
    (0..8).for_each(|_| crash());
    // A descriptor of the last one may still be on its way out.
    tests::until("the last container's descriptors to be closed", Duration::from_secs(10), || {
        let now = open();
        (now.0 <= first.0 && now.1 <= first.1).then_some(())
    });
    first.2.expect_nothing_new();
    sandbox.remove();
    before.expect_nothing_new();
}

#[test]
fn created_container_that_is_deleted_before_its_start_gives_its_streams_back() {
    let before = Census::take();
    let sandbox = Task::start_in("pod", "pod", "sleep 1000");
    let make = "mkdir -p /tmp/plain/bin && cp /bin/busybox /tmp/plain/bin/";
    let _ = shell(make).expect_code(0);
    let words =
        ["container", "create", "--runtime", RUNTIME, IN_POD, "--rootfs", "/tmp/plain", "never", "/bin/busybox"];
    let _ = ctr(&words).expect_code(0);
    let created = Task::known("never");
    for _ in 0..2 {
        // ctr removes the streams of a task that it deletes.
        let _ = shell("cd /tmp && rm -f in out err && mkfifo in out err").expect_code(0);
        let _ = create_task("never", ["/tmp/in", "/tmp/out", "/tmp/err"]).expect_code(0);
        assert_eq!(created.status(), "CREATED");
        assert!(Victim::Shim.descriptors().iter().any(|name| name == "/tmp/out"));
        let _ = created.verb(&["rm", "-f"]);
        assert_eq!(created.status(), "");
        let left: Vec<_> = Victim::Shim.descriptors().into_iter().filter(|name| name.starts_with("/tmp/")).collect();
        assert!(left.is_empty(), "{left:?}");
    }
    let _ = ctr(&["container", "rm", "never"]).expect_code(0);
    sandbox.remove();
    let _ = shell("rm -r /tmp/plain /tmp/in /tmp/out /tmp/err");
    before.expect_nothing_new();
}

#[test]
fn create_that_outlasts_its_caller_does_not_keep_the_pod_alive() {
    let before = Census::take();
    let sandbox = Task::start_in("pod", "pod", "sleep 1000");
    Victim::Vmm.stop();
    let late = Container::new(images::BUSYBOX).flag(IN_POD).keep().script("sleep 1000");
    let mut caller = late.start();
    let bundle = format!("/run/containerd/io.containerd.runtime.v2.task/default/{}", late.id());
    tests::until("Create to be under way", Duration::from_secs(30), || fs::exists(&bundle).ok()?.then_some(()));
    caller.kill().and_then(|()| caller.wait()).expect("the caller gave up");
    Victim::Vmm.go_on();
    let task = Task::known(late.id());
    // Its client is gone: containerd takes back what it asked for, or keeps a task that can be removed.
    sleep(Duration::from_secs(3));
    if !task.status().is_empty() {
        let _ = task.verb(&["rm", "-f"]);
        assert_eq!(task.status(), "");
    }
    let _ = ctr(&["container", "rm", late.id()]).expect_code(0);
    sandbox.remove();
    before.expect_nothing_new();
}

#[test]
fn container_without_a_group_has_a_machine_of_its_own() {
    let before = Census::take();
    let first = Task::start("one", "sleep 1000");
    let second = Task::start("two", "sleep 1000");
    assert_eq!((Victim::Shim.pids().len(), Victim::Vmm.pids().len()), (2, 2));
    first.remove();
    assert_eq!(second.status(), "RUNNING");
    second.remove();
    before.expect_nothing_new();
}
