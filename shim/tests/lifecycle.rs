//! The shim's two programs, driven as containerd drives them, on a stub instead of a VMM (`examples/stub-vmm.rs`).
//!
//! Each test plays containerd: it makes a bundle, executes `start`, speaks ttrpc on the address that is printed, serves the
//! event service, executes `delete`, and looks for what is left. Mount and network namespaces need root; without it the
//! tests say so and pass.
#![forbid(unsafe_code)]

mod daemon;

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use containerd_shim_protos::{
    api::{ExecProcessRequest, PidsRequest, Status},
    shim_async::TaskClient,
    types::mount::Mount,
};
use tokio::task::spawn_blocking;
use ttrpc::{Code, asynchronous::Client};

use daemon::{Daemon, Pod, SHIM, code, kill_process, within};

#[tokio::test(flavor = "multi_thread")]
async fn container_lives_and_leaves_nothing() {
    let Some(daemon) = Daemon::new("").await else { return };
    let pod = daemon.start("c1", &["/bin/sh", "-c", "echo hello; exit 42"], "").await;
    let output = daemon.directory.path().join("out");
    let pid = pod.create("c1", &output).await.expect("create");
    let root = fs::read_link(format!("/proc/{pid}/root")).expect("the pid lives");
    assert_eq!(root, pod.bundle.join("rootfs"));
    assert_ne!(
        fs::read_link(format!("/proc/{pid}/ns/net")).expect("read"),
        fs::read_link("/proc/self/ns/net").expect("read")
    );
    assert_eq!(fs::read_to_string(format!("/proc/{pid}/comm")).expect("read").trim(), "c1");
    assert_eq!(pod.status("c1").await.expect("state"), Status::CREATED);
    assert_eq!(pod.run("c1").await.expect("start"), pid);
    assert_eq!(pod.wait("c1").await, 42);
    assert_eq!(fs::read_to_string(output).expect("read"), "hello\n");
    assert_eq!(pod.status("c1").await.expect("state"), Status::STOPPED);
    let pids = pod.client.pids(within(), &PidsRequest { id: "c1".into(), ..Default::default() }).await.expect("pids");
    assert_eq!(pids.processes[0].pid, pid);
    assert_eq!(code(&pod.kill("c1", 9).await.expect_err("finished")), Code::NOT_FOUND);
    let exec = ExecProcessRequest { id: "c1".into(), exec_id: "e".into(), ..Default::default() };
    assert_eq!(code(&pod.client.exec(within(), &exec).await.expect_err("not yet")), Code::UNIMPLEMENTED);
    assert_eq!(pod.remove("c1").await.expect("delete"), 42);
    assert_eq!(code(&pod.status("c1").await.expect_err("gone")), Code::NOT_FOUND);
    pod.shutdown("c1").await;
    assert_eq!(daemon.topics(), ["create", "start", "exit", "delete"]);
    assert_eq!(daemon.delete(&pod, "c1").exit_status, 137);
    daemon.assert_nothing_left();
    assert!(daemon.logs().is_empty(), "a pod that ended well takes its log with it");
}

#[tokio::test(flavor = "multi_thread")]
async fn root_is_mounted_for_the_pod_alone_and_unmounted_with_it() {
    let Some(daemon) = Daemon::new("").await else { return };
    let layer = |name: &str| {
        let path = daemon.directory.path().join(name);
        fs::create_dir(&path).expect("create");
        path
    };
    // A tmpfs of the test's own: an overlay cannot have its upper layer on every file system.
    let upper = layer("upper");
    let tmpfs = Command::new("mount").args(["-t", "tmpfs", "nacre-test"]).arg(&upper).status().expect("mount");
    assert!(tmpfs.success());
    // Only now: where mounts are private, a shim does not see what is mounted after its start.
    let pod = daemon.start("c1", &["true"], "").await;
    for name in ["upper/u", "upper/w"] {
        layer(name);
    }
    let lower = layer("lower");
    fs::write(lower.join("file"), "from the image").expect("write");
    let options = format!("lowerdir={},upperdir={1}/u,workdir={1}/w", lower.display(), upper.display());
    let mount = Mount {
        type_: "overlay".into(),
        source: "overlay".into(),
        options: options.split(',').map(str::to_owned).collect(),
        ..Mount::default()
    };
    let pid = pod.create_on("c1", Path::new(""), vec![mount.clone()]).await.expect("create");
    let root = PathBuf::from(format!("/proc/{pid}/root"));
    assert_eq!(fs::read_to_string(root.join("file")).expect("read"), "from the image");
    fs::write(root.join("new"), "from the host").expect("write");
    assert_eq!(fs::read_to_string(upper.join("u/new")).expect("read"), "from the host");
    assert!(!pod.bundle.join("rootfs/file").exists(), "the host does not see the mount");
    pod.remove("c1").await.expect("delete");
    // What is unmounted can be mounted again; a second life of the id proves that nothing was left.
    pod.create_on("c1", Path::new(""), vec![mount]).await.expect("create again");
    kill_process(pod.recorded("shim.pid"));
    daemon.delete(&pod, "c1");
    let unmounted = Command::new("umount").arg(&upper).status().expect("umount");
    assert!(unmounted.success(), "the overlay still holds its upper layer");
    daemon.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn file_is_mounted_through_a_loop_device_that_frees_itself() {
    let Some(daemon) = Daemon::new("").await else { return };
    let image = daemon.directory.path().join("image.ext4");
    let made = Command::new("mkfs.ext4").args(["-q", "-d", "/etc/security"]).arg(&image).arg("4M").status();
    if !made.is_ok_and(|status| status.success()) || !Path::new("/dev/loop-control").exists() {
        eprintln!("skipped: needs mkfs.ext4 and loop devices");
        return;
    }
    let pod = daemon.start("c1", &["true"], "").await;
    let mount = |source: &Path| Mount {
        type_: "ext4".into(),
        source: source.display().to_string(),
        options: vec!["ro".into(), "loop".into()],
        ..Mount::default()
    };
    let error = pod.create_on("c1", Path::new(""), vec![mount(Path::new("/nonexistent/image"))]).await;
    assert!(error.expect_err("absent").to_string().contains("/nonexistent/image"));
    let pid = pod.create_on("c1", Path::new(""), vec![mount(&image)]).await.expect("create");
    assert!(Path::new(&format!("/proc/{pid}/root/limits.conf")).exists());
    pod.remove("c1").await.expect("delete");
    pod.shutdown("c1").await;
    let attached = Command::new("losetup").arg("-j").arg(&image).output().expect("losetup");
    assert!(attached.stdout.is_empty(), "{}", String::from_utf8_lossy(&attached.stdout));
    daemon.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn machine_that_does_not_start_is_explained_by_create() {
    for (cmdline, words) in [
        ("stub=refuse", "failed to start the sandbox VM: /dev/kvm is missing"),
        ("stub=panic", "the guest kernel panicked; the console ends with:\nline 1\nKernel panic - not syncing: stub"),
        ("stub=silent", "its agent did not connect within 2 s (shim.boot_timeout_s)"),
        ("stub=crash", "the VMM ended unexpectedly (exit code 3): stub: about to crash"),
    ] {
        let Some(daemon) = Daemon::new(cmdline).await else { return };
        let pod = daemon.start("c1", &["true"], "").await;
        let error = pod.create("c1", Path::new("")).await.expect_err("no machine");
        assert!(error.to_string().contains(&words.replace('\n', "\\n")), "{cmdline}: {error}");
        assert_eq!(code(&pod.remove("c1").await.expect_err("never was")), Code::NOT_FOUND);
        pod.shutdown("c1").await;
        daemon.delete(&pod, "c1");
        assert!(daemon.topics().is_empty());
        daemon.assert_nothing_left();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_vmm_is_exit_137_and_the_rest_goes_on() {
    let Some(daemon) = Daemon::new("").await else { return };
    let pod = daemon.start("c1", &["sleep", "60"], "").await;
    pod.create("c1", Path::new("")).await.expect("create");
    pod.run("c1").await.expect("start");
    kill_process(pod.recorded("vmm.pid"));
    assert_eq!(pod.wait("c1").await, 137);
    assert_eq!(code(&pod.kill("c1", 9).await.expect_err("finished")), Code::NOT_FOUND);
    assert_eq!(pod.remove("c1").await.expect("delete"), 137);
    pod.shutdown("c1").await;
    assert_eq!(daemon.topics(), ["create", "start", "exit", "delete"]);
    daemon.delete(&pod, "c1");
    // The stub's containers are host processes; a true VM takes them along.
    let _ = Command::new("pkill").args(["-f", "^sleep 60$"]).status();
    daemon.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_shim_leaves_nothing_after_delete() {
    let Some(daemon) = Daemon::new("").await else { return };
    let pod = daemon.start("c1", &["/bin/sh", "-c", "read forever"], "").await;
    let pid = pod.create("c1", Path::new("")).await.expect("create");
    pod.run("c1").await.expect("start");
    kill_process(pod.recorded("shim.pid"));
    let (daemon, pod) = spawn_blocking(move || {
        let answer = daemon.delete(&pod, "c1");
        assert_eq!((answer.pid, answer.exit_status), (pid, 137));
        assert_eq!(daemon.delete(&pod, "c1").exit_status, 137);
        (daemon, pod)
    })
    .await
    .expect("join");
    // Gone, or a zombie that waits for whatever process 1 is here.
    assert!(fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default().is_empty());
    drop(pod);
    daemon.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn server_without_container_and_bundle_ends_by_itself() {
    let Some(daemon) = Daemon::new("").await else { return };
    let pod = daemon.start("c1", &["true"], "").await;
    fs::remove_dir_all(&pod.bundle).expect("remove");
    daemon.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn server_that_hangs_is_found_however_much_of_its_bundle_is_gone() {
    // containerd removes the files one by one, in the order of the file system's directory.
    for rest in [&[][..], &["shim.pid"], &["address"], &["vmm.pid"], &["shim.pid", "vmm.pid"]] {
        let Some(daemon) = Daemon::new("").await else { return };
        let pod = daemon.start("c1", &["true"], "").await;
        let pid =
            rustix::process::Pid::from_raw(i32::try_from(pod.recorded("shim.pid")).expect("a pid")).expect("a pid");
        rustix::process::kill_process(pid, rustix::process::Signal::STOP).expect("stop");
        for entry in fs::read_dir(&pod.bundle).expect("the bundle").flatten() {
            if !rest.iter().any(|name| entry.file_name() == *name) {
                let _ = fs::remove_file(entry.path());
            }
        }
        let daemon = spawn_blocking(move || {
            // Another container's delete leaves the server alone; one with a record of it is not another's.
            if rest.is_empty() {
                assert_eq!(daemon.delete(&pod, "c2").exit_status, 137);
                assert!(!daemon.processes().is_empty());
            }
            assert_eq!(daemon.delete(&pod, "c1").exit_status, 137);
            daemon
        });
        daemon.await.expect("join").assert_nothing_left();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn stale_socket_does_not_prevent_the_next_start() {
    let Some(daemon) = Daemon::new("").await else { return };
    let pod = daemon.start("c1", &["true"], "").await;
    kill_process(pod.recorded("shim.pid"));
    let socket = pod.address.trim_start_matches("unix://").to_owned();
    while std::os::unix::net::UnixStream::connect(&socket).is_ok() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let again = daemon.start("c1", &["true"], "").await;
    assert_eq!(again.address, pod.address);
    again.shutdown("c1").await;
    daemon.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn containers_of_a_group_share_one_shim_until_the_last_is_gone() {
    let Some(daemon) = Daemon::new("").await else { return };
    let group = r#""io.kubernetes.cri.sandbox-id":"pod1""#;
    let first = daemon.start("pod1", &["/bin/sh", "-c", "exit 1"], group).await;
    let second = daemon.start("c2", &["/bin/sh", "-c", "exit 2"], group).await;
    assert_eq!(first.address, second.address);
    first.create("pod1", Path::new("")).await.expect("create");
    second.create("c2", Path::new("")).await.expect("create");
    assert_eq!(first.recorded("shim.pid"), second.recorded("shim.pid"));
    second.run("c2").await.expect("start");
    assert_eq!(second.wait("c2").await, 2);
    second.remove("c2").await.expect("delete");
    second.shutdown("c2").await;
    daemon.delete(&second, "c2");
    fs::remove_dir_all(&second.bundle).expect("containerd removes the bundle");
    assert_eq!(first.status("pod1").await.expect("alive"), Status::CREATED);
    first.run("pod1").await.expect("start");
    assert_eq!(first.wait("pod1").await, 1);
    first.remove("pod1").await.expect("delete");
    first.shutdown("pod1").await;
    daemon.delete(&first, "pod1");
    daemon.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn half_removed_bundle_of_one_container_leaves_the_group_its_shim() {
    for lost in ["address", "shim.pid"] {
        let Some(daemon) = Daemon::new("").await else { return };
        let group = r#""io.kubernetes.cri.sandbox-id":"pod1""#;
        let first = daemon.start("pod1", &["true"], group).await;
        let second = daemon.start("c2", &["true"], group).await;
        first.create("pod1", Path::new("")).await.expect("create");
        second.create("c2", Path::new("")).await.expect("create");
        fs::remove_file(second.bundle.join(lost)).expect("containerd has begun to remove the bundle");
        daemon.delete(&second, "c2");
        fs::remove_dir_all(&second.bundle).expect("containerd removes the bundle");
        assert_eq!(first.status("pod1").await.expect("alive"), Status::CREATED);
        daemon.delete(&first, "pod1");
        daemon.assert_nothing_left();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn program_that_does_not_exist_fails_start_in_known_words() {
    let Some(daemon) = Daemon::new("").await else { return };
    let pod = daemon.start("c1", &["/nonexistent/program"], "").await;
    pod.create("c1", Path::new("")).await.expect("create");
    let error = pod.run("c1").await.expect_err("no such program");
    assert!(error.to_string().contains("executable file not found"), "{error}");
    assert_eq!(pod.wait("c1").await, 127);
    pod.remove("c1").await.expect("delete");
    pod.shutdown("c1").await;
    assert_eq!(daemon.topics(), ["create", "exit", "delete"]);
    daemon.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn server_survives_sigterm_and_a_connection_that_breaks() {
    let Some(daemon) = Daemon::new("").await else { return };
    let pod = daemon.start("c1", &["sleep", "0.2"], "").await;
    pod.create("c1", Path::new("")).await.expect("create");
    let pid = rustix::process::Pid::from_raw(i32::try_from(pod.recorded("shim.pid")).expect("pid")).expect("not zero");
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).expect("kill");
    let address = pod.address.clone();
    drop(pod.client);
    let client = TaskClient::new(Client::connect(&address).await.expect("connect again"));
    let pod = Pod { client, ..pod };
    pod.run("c1").await.expect("start");
    assert_eq!(pod.wait("c1").await, 0);
    pod.remove("c1").await.expect("delete");
    pod.shutdown("c1").await;
    daemon.assert_nothing_left();
}

#[test]
fn start_without_a_bundle_explains_itself_and_exits_nonzero() {
    let directory = tempfile::tempdir().expect("temporary directory");
    let output = Command::new(SHIM)
        .args(["-namespace", "test", "-id", "c1", "start"])
        .current_dir(directory.path())
        .stdin(Stdio::null())
        .output()
        .expect("the shim runs");
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && output.stdout.is_empty());
    assert!(text.contains("config.json"), "{text}");
    let mode = fs::metadata(SHIM).expect("exists").permissions().mode();
    assert_ne!(mode & 0o111, 0);
}

#[tokio::test]
async fn options_and_annotations_reach_the_machine_and_its_end_is_in_the_log() {
    let Some(mut daemon) = Daemon::new("").await else { return };
    daemon.options = "SystemdCgroup = true\n[annotations]\nallow = [\"dev.nacre.kernel_cmdline\"]\n";
    let pod = daemon.start("c1", &["true"], r#""dev.nacre.kernel_cmdline":"stub=panic""#).await;
    let refused = pod.create("c1", Path::new("")).await.expect_err("the guest panics");
    assert!(refused.to_string().contains("Kernel panic - not syncing: stub"), "{refused}");
    pod.shutdown("c1").await;
    let logs = daemon.logs().concat();
    for text in ["annotation dev.nacre.kernel_cmdline", "SystemdCgroup; ignored", "Kernel panic - not syncing: stub"] {
        assert!(logs.contains(text), "{text} is not in: {logs}");
    }
    daemon.options = "";
    let pod = daemon.start("c2", &["true"], r#""dev.nacre.vcpus":"2""#).await;
    let refused = pod.create("c2", Path::new("")).await.expect_err("not allowed").to_string();
    assert!(refused.contains("dev.nacre.vcpus") && refused.contains("annotations.allow"), "{refused}");
    pod.shutdown("c2").await;
    daemon.assert_nothing_left();
}
