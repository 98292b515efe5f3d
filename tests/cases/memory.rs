//! The machine's memory, as the host pays for it.

use tests::{Census, RUNTIME, ctr, images, shell};

/// KiB that the VMM has mapped: guest memory, for all but a few of them.
fn held() -> u64 {
    let script = "awk '/^Rss:/{print $2}' /proc/$(pgrep -x nacre-vmm)/smaps_rollup";
    shell(script).expect_code(0).stdout.trim().parse().expect("KiB")
}

/// Waits until the container has made a file.
fn await_file(name: &str) {
    let script = format!(
        "pid=$(ctr task ls | awk '$1==\"shrink\"{{print $2}}'); \
         timeout 60 sh -c \"until test -e /proc/$pid/root/root/{name}; do sleep 0.2; done\""
    );
    let _ = shell(&script).expect_code(0);
}

#[test]
fn memory_freed_in_the_guest_returns_to_the_host() {
    let before = Census::take();
    let script = "dd if=/dev/zero of=/dev/shm/fill bs=1M count=96 2>/dev/null; touch /root/full; \
                  trap 'rm /dev/shm/fill; touch /root/freed' USR1; while :; do sleep 1; done";
    let shm = "type=tmpfs,src=tmpfs,dst=/dev/shm,options=size=128m";
    let run = ["run", "-d", "--runtime", RUNTIME, "--mount", shm, images::BUSYBOX, "shrink", "sh", "-c", script];
    let _ = ctr(&run).expect_code(0);
    await_file("full");
    let full = held();
    assert!(full > 96 * 1024, "96 MiB are in use: {full} KiB");
    let _ = ctr(&["task", "kill", "-s", "SIGUSR1", "shrink"]).expect_code(0);
    await_file("freed");
    // Linux reports what has been free for two seconds; emulated, everything takes longer.
    let shrunk = (0..40).map(|_| shell("sleep 1")).map(|_| held()).find(|now| now + 80 * 1024 < full);
    assert!(shrunk.is_some(), "of {full} KiB the host still holds {}", held());
    let _ = ctr(&["task", "kill", "-s", "SIGKILL", "shrink"]).expect_code(0);
    let stopped = "timeout 30 sh -c 'until ctr task ls | grep -q \"shrink .*STOPPED\"; do sleep 0.1; done'";
    let _ = shell(stopped).expect_code(0);
    let _ = ctr(&["task", "rm", "shrink"]);
    let _ = ctr(&["container", "rm", "shrink"]).expect_code(0);
    before.expect_nothing_new();
}

#[test]
fn machine_is_accounted_in_the_cgroup_of_its_container() {
    let before = Census::take();
    let _ = ctr(&["run", "-d", "--runtime", RUNTIME, images::BUSYBOX, "counted", "sleep", "1000"]).expect_code(0);
    let charged = shell(
        "pid=$(ctr task ls | awk '$1==\"counted\"{print $2}'); dir=/sys/fs/cgroup$(cut -d: -f3 /proc/$pid/cgroup); \
         echo $dir; grep -qx $(pgrep -x nacre-vmm) $dir/cgroup.procs && echo with its machine; cat $dir/memory.current",
    );
    let lines: Vec<_> = charged.expect_code(0).stdout.lines().map(str::to_owned).collect();
    assert_eq!(&lines[..2], ["/sys/fs/cgroup/default/counted", "with its machine"]);
    let bytes: u64 = lines[2].parse().expect("bytes");
    assert!(bytes > 20 << 20, "the guest's memory is charged there: {bytes}");
    let _ = ctr(&["task", "kill", "-s", "SIGKILL", "counted"]).expect_code(0);
    let stopped = "timeout 30 sh -c 'until ctr task ls | grep -q \"counted .*STOPPED\"; do sleep 0.1; done'";
    let _ = shell(stopped).expect_code(0);
    let _ = ctr(&["task", "rm", "counted"]);
    let _ = ctr(&["container", "rm", "counted"]).expect_code(0);
    before.expect_nothing_new();
}
