//! What an operator sets, asks and reads: options, annotations, `nacre check`, `nacre ps`, logs.

use std::{fs, io::BufRead, io::BufReader, path::Path};

use tests::{Census, Container, Settings, ctr, images, shell};

/// Where pods log unless they are told otherwise.
const LOGS: &str = "/var/log/nacre";

/// What a guest sees of its machine: MiB of memory, and its kernel's command line.
fn machine() -> Container {
    Container::new(images::BUSYBOX).script("awk '/MemTotal/{print int($2/1024)}' /proc/meminfo; cat /proc/cmdline")
}

/// The guest kernel keeps some of its memory for itself.
#[track_caller]
fn expect_memory(stdout: &str, mib: u32) {
    let seen: u32 = stdout.lines().next().and_then(|line| line.parse().ok()).expect("a number");
    assert!((mib - 64..=mib).contains(&seen), "{seen} MiB of {mib}");
}

#[track_caller]
fn refuse(container: &Container, texts: &[&str]) {
    let before = Census::take();
    let outcome = container.run().expect_failure_with(texts[0]);
    assert!(texts.iter().all(|text| outcome.stderr.contains(text)), "{texts:?}: {}", outcome.stderr);
    before.expect_nothing_new();
}

fn logs() -> Vec<String> {
    let files = fs::read_dir(LOGS).into_iter().flatten().flatten();
    files.map(|file| file.path().display().to_string()).collect()
}

/// Those that have come while `act` ran.
fn new_logs(act: impl FnOnce()) -> Vec<String> {
    let before = logs();
    act();
    logs().into_iter().filter(|log| !before.contains(log)).collect()
}

#[test]
fn annotations_that_the_operator_allows_shape_the_machine() {
    let _settings = Settings::with(
        "[machine]\nmemory_mib = 512\n\
         [annotations]\nallow = [\"dev.nacre.memory_mib\", \"dev.nacre.kernel_cmdline\"]\n",
    );
    let container = machine().flag("--annotation=dev.nacre.memory_mib=192");
    let outcome = container.flag("--annotation=dev.nacre.kernel_cmdline=nacre.mark=1").run().expect_code(0);
    expect_memory(&outcome.stdout, 192);
    assert!(outcome.stdout.contains("nacre.mark=1"), "{}", outcome.stdout);
}

#[test]
fn annotation_that_is_not_allowed_is_refused_by_name() {
    let asked = machine().flag("--annotation=dev.nacre.memory_mib=192");
    refuse(&asked, &["annotation dev.nacre.memory_mib is not allowed", "annotations.allow"]);
    refuse(&machine().flag("--annotation=dev.nacre.cpus=2"), &["annotation dev.nacre.cpus does not exist"]);
}

#[test]
fn annotation_out_of_range_is_refused_with_the_range() {
    let _settings = Settings::with("[annotations]\nallow = [\"dev.nacre.vcpus\"]\n");
    let asked = machine().flag("--annotation=dev.nacre.vcpus=33");
    refuse(&asked, &["dev.nacre.vcpus = \"33\" is not legal", "1 to 32 virtual CPUs"]);
}

#[test]
fn configuration_file_of_the_runtime_options_wins_over_the_hosts() {
    let _settings = Settings::with("[machine]\nmemory_mib = 512\n");
    fs::write("/tmp/options.toml", "[machine]\nmemory_mib = 160\n").expect("/tmp is writable");
    let outcome = machine().flag("--runtime-config-path=/tmp/options.toml").run().expect_code(0);
    expect_memory(&outcome.stdout, 160);
    refuse(&machine().flag("--runtime-config-path=/nonexistent/options.toml"), &["/nonexistent/options.toml"]);
}

#[test]
fn check_passes_where_containers_run() {
    let outcome = shell("nacre check").expect_code(0);
    assert!(outcome.stdout.lines().count() >= 12, "{}", outcome.stdout);
    assert!(outcome.stdout.lines().all(|line| line.starts_with("pass  ")), "{}", outcome.stdout);
    let json = shell("nacre check --json | tee /dev/stderr | jq -r '.ok, (.checks | length)'").expect_code(0);
    assert_eq!(json.stdout, format!("true\n{}\n", outcome.stdout.lines().count()), "{}", json.stderr);
}

#[test]
fn check_names_what_is_broken_and_the_fix() {
    let kernel = fs::read("/usr/local/lib/nacre/vmlinux").expect("the kernel is installed");
    let mut other = kernel[..4096].to_vec();
    other[18] = 183;
    for (image, text) in [(&kernel[..kernel.len() / 2], "cut off"), (&other, "another architecture")] {
        let _settings = Settings::with_image("kernel", image);
        let outcome = shell("nacre check").expect_code(1);
        let failed: Vec<_> = outcome.stdout.lines().filter(|line| line.starts_with("FAIL")).collect();
        assert!(failed.len() == 1 && failed[0].contains("guest-kernel"), "{failed:?}");
        assert!(failed[0].contains(text) && failed[0].contains("Fix: "), "{failed:?}");
    }
    let _ = shell("mv /dev/kvm /dev/kvm.away").expect_code(0);
    let outcome = shell("nacre check kvm");
    let _ = shell("mv /dev/kvm.away /dev/kvm").expect_code(0);
    assert!(outcome.code == 1 && outcome.stdout.contains("cannot open /dev/kvm"), "{outcome:?}");
}

#[test]
fn pod_that_runs_is_listed_with_its_memory_and_its_settings() {
    let _settings = Settings::with("[annotations]\nallow = [\"dev.nacre.memory_mib\"]\n");
    let container = Container::new(images::BUSYBOX).flag("--annotation=dev.nacre.memory_mib=192");
    let container = container.script("echo running; exec sleep 1000");
    let mut running = container.start();
    let mut line = String::new();
    let mut output = BufReader::new(running.stdout.take().expect("stdout is a pipe"));
    output.read_line(&mut line).expect("the pipe is readable");
    let id = container.id();
    let one = format!("nacre ps --json | jq -c '.pods[] | select(.pod == \"{id}\")");
    let listed = shell(&format!("{one} | [.namespace, .state, .containers[0].id, (.memory_kib > 8192)]'")).stdout;
    let table = shell("nacre ps").expect_code(0).stdout;
    let show = format!(
        "nacre config show --pod {id} --json | jq -r '.settings[] | select(.key==\"machine.memory_mib\").where'"
    );
    let shown = shell(&show).stdout;
    let _ = ctr(&["task", "kill", "-s", "SIGKILL", id]).expect_code(0);
    let _ = running.wait().expect("ctr ends");
    assert_eq!(listed, format!("[\"default\",\"running\",\"{id}\",true]\n"));
    assert!(table.lines().any(|line| line.contains(id) && line.contains(" MiB")), "{table}");
    assert_eq!(shown, "annotation dev.nacre.memory_mib\n");
    let left = shell("nacre ps --json | jq '.pods | length'").stdout;
    assert_eq!(left, "0\n");
}

#[test]
fn pod_that_ends_well_leaves_no_log_and_one_whose_guest_panics_leaves_the_console() {
    let container = Container::new(images::BUSYBOX).command(&["true"]);
    let quiet = new_logs(|| drop(container.run().expect_code(0)));
    assert_eq!(quiet, Vec::<String>::new());
    // containerd has the shim's lines, too, by the bundle's fifo.
    let told = fs::read_to_string("/var/log/containerd.log").expect("containerd logs");
    assert!(told.contains(&format!("shim=nacre id={}", container.id())), "no line of the shim's");
    let loud = new_logs(|| {
        let _settings = Settings::with("[machine]\nkernel_cmdline = \"rdinit=/nonexistent init=/nonexistent\"\n");
        let outcome = Container::new(images::BUSYBOX).command(&["true"]).run();
        assert!(outcome.expect_failure_with("the console ends with").stderr.contains("Kernel panic"));
    });
    assert_eq!(loud.len(), 1, "{loud:?}");
    let text = fs::read_to_string(&loud[0]).expect("the log is readable");
    assert!(text.contains("level=error") && text.contains("Kernel panic"), "{text}");
    let _ = fs::remove_file(&loud[0]);
}

#[test]
fn log_outlives_a_killed_shim_within_the_number_that_is_kept() {
    let _settings = Settings::with("[shim]\nlog_dir = \"/tmp/logs\"\nlog_keep = 1\nlog_level = \"debug\"\n");
    let mut kept = Vec::new();
    for _ in 0..2 {
        let container = Container::new(images::BUSYBOX).script("echo running; exec sleep 1000");
        let before = Census::take();
        let mut running = container.start();
        let mut output = BufReader::new(running.stdout.take().expect("stdout is a pipe"));
        output.read_line(&mut String::new()).expect("the pipe is readable");
        let _ = shell("pkill -9 -f '^/usr/local/bin/containerd-shim-nacre-v2'").expect_code(0);
        let _ = running.wait().expect("ctr ends");
        before.expect_nothing_new();
        let _ = ctr(&["container", "rm", container.id()]);
        let files = fs::read_dir(Path::new("/tmp/logs")).expect("the folder was made").flatten();
        kept = files.map(|file| file.file_name().to_string_lossy().into_owned()).collect();
        assert!(kept.iter().any(|name| name.contains(container.id())), "{kept:?}");
    }
    assert_eq!(kept.len(), 1, "{kept:?}");
}
