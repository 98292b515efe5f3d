//! The shim's two programs, driven as containerd drives them, on a stub instead of a VMM (`examples/stub-vmm.rs`).
//!
//! Each test plays containerd: it makes a bundle, executes `start`, speaks ttrpc on the address that is printed, serves the
//! event service, executes `delete`, and looks for what is left. Mount and network namespaces need root; without it the
//! tests say so and pass.
#![forbid(unsafe_code)]

use std::{
    fs,
    io::Write,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use containerd_shim_protos::{
    api::{
        CreateTaskRequest, DeleteRequest, DeleteResponse, Empty, ExecProcessRequest, KillRequest, PidsRequest,
        ShutdownRequest, StartRequest, StateRequest, Status, WaitRequest,
    },
    bootstrap_api::{BootstrapParams, Extension},
    protobuf::{Message, well_known_types::any::Any},
    shim::{event::Envelope, events::ForwardRequest},
    shim_async::{Events, TaskClient, create_events},
    types::mount::Mount,
};
use tokio::task::spawn_blocking;
use ttrpc::{
    Code,
    asynchronous::{Client, Server, TtrpcContext},
    context::{Context, with_duration},
};

const SHIM: &str = env!("CARGO_BIN_EXE_containerd-shim-nacre-v2");
const HOLDER: &str = env!("CARGO_BIN_EXE_nacre-holder");

#[derive(Default)]
struct Recorder(Mutex<Vec<Envelope>>);

#[async_trait::async_trait]
impl Events for Recorder {
    async fn forward(&self, _ctx: &TtrpcContext, request: ForwardRequest) -> ttrpc::Result<Empty> {
        self.0.lock().expect("lock").push(request.envelope.unwrap_or_default());
        Ok(Empty::new())
    }
}

/// containerd, as far as a shim can see it.
struct Daemon {
    directory: tempfile::TempDir,
    events: Arc<Recorder>,
    _server: Server,
    /// The runtime's table of options in containerd's configuration.
    options: &'static str,
}

/// One container's bundle and the connection to its shim.
struct Pod {
    bundle: PathBuf,
    address: String,
    client: TaskClient,
}

impl Daemon {
    /// `None` without root, which namespaces need.
    async fn new(cmdline: &str) -> Option<Self> {
        if !rustix::process::geteuid().is_root() {
            eprintln!("skipped: needs root");
            return None;
        }
        let directory = tempfile::tempdir().expect("temporary directory");
        let stub = Path::new(SHIM).with_file_name("examples").join("stub-vmm");
        assert!(stub.exists(), "{} is missing: run `cargo build -p shim --example stub-vmm`", stub.display());
        for image in ["vmlinux", "agent"] {
            fs::write(directory.path().join(image), "").expect("write");
        }
        let root = directory.path().display();
        let config = format!(
            "[paths]\nvmm = \"{}\"\nholder = \"{HOLDER}\"\nkernel = \"{root}/vmlinux\"\nagent = \"{root}/agent\"\n\
             kvm = \"/dev/null\"\n\
             [machine]\nkernel_cmdline = \"{cmdline}\"\n[shim]\nboot_timeout_s = 2\nlog_dir = \"{root}/log\"\n",
            stub.display()
        );
        fs::write(directory.path().join("config.toml"), config).expect("write");
        fs::create_dir_all(directory.path().join("tasks")).expect("create");
        let events = Arc::new(Recorder::default());
        let mut server = Server::new()
            .bind(&format!("unix://{root}/ttrpc"))
            .expect("bind")
            .register_service(create_events(events.clone()));
        server.start().await.expect("serve events");
        Some(Self { directory, events, _server: server, options: "" })
    }

    fn bundle(&self, id: &str, args: &[&str], annotations: &str) -> PathBuf {
        let bundle = self.directory.path().join("tasks").join(id);
        fs::create_dir_all(bundle.join("rootfs")).expect("create");
        let args = serde_json::to_string(args).expect("JSON");
        let config = format!(
            r#"{{"ociVersion":"1.0.2","process":{{"args":{args}}},"root":{{"path":"rootfs"}},"annotations":{{{annotations}}},
            "linux":{{"namespaces":[{{"type":"pid"}},{{"type":"network"}}]}}}}"#
        );
        fs::write(bundle.join("config.json"), config).expect("write");
        bundle
    }

    fn execute(&self, bundle: &Path, id: &str, action: &str) -> Output {
        let params = BootstrapParams {
            instance_id: id.into(),
            namespace: "test".into(),
            containerd_ttrpc_address: self.directory.path().join("ttrpc").display().to_string(),
            socket_dir: Some(self.directory.path().join("s").display().to_string()),
            extensions: vec![Extension { value: Some(self.runtime_options()).into(), ..Default::default() }],
            ..BootstrapParams::default()
        };
        let mut command = Command::new(SHIM);
        command.args(["-namespace", "test", "-id", id, "-address", "/nonexistent/containerd.sock"]);
        if action == "delete" {
            command.arg("-bundle").arg(bundle);
        }
        let mut child = command
            .arg(action)
            .current_dir(bundle)
            .env("NACRE_CONFIG", self.directory.path().join("config.toml"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the shim runs");
        let bytes = params.write_to_bytes().expect("encodes");
        // `delete` gets nothing, in any version.
        let mut stdin = child.stdin.take().expect("piped");
        if action == "start" {
            stdin.write_all(&bytes).expect("write");
        }
        drop(stdin);
        child.wait_with_output().expect("wait")
    }

    /// As CRI makes them of its table.
    fn runtime_options(&self) -> Any {
        // config_body = 3
        let value = [&[0x1a, u8::try_from(self.options.len()).expect("short")], self.options.as_bytes()].concat();
        Any { type_url: "runtimeoptions.v1.Options".into(), value, ..Any::default() }
    }

    /// The text of all log files.
    fn logs(&self) -> Vec<String> {
        let files = fs::read_dir(self.directory.path().join("log")).into_iter().flatten().flatten();
        files.map(|file| fs::read_to_string(file.path()).expect("readable")).collect()
    }

    async fn start(&self, id: &str, args: &[&str], annotations: &str) -> Pod {
        let bundle = self.bundle(id, args, annotations);
        let output = self.execute(&bundle, id, "start");
        assert!(output.status.success() && output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
        let address = String::from_utf8(output.stdout).expect("text");
        assert!(address.starts_with("unix:///"), "{address}");
        assert_eq!(fs::read_to_string(bundle.join("address")).expect("read"), address);
        let client = TaskClient::new(Client::connect(&address).await.expect("connect"));
        Pod { bundle, address, client }
    }

    fn delete(&self, pod: &Pod, id: &str) -> DeleteResponse {
        let before = Instant::now();
        let output = self.execute(&pod.bundle, id, "delete");
        assert!(output.status.success() && before.elapsed() < Duration::from_secs(5));
        DeleteResponse::parse_from_bytes(&output.stdout).expect("a DeleteResponse")
    }

    fn topics(&self) -> Vec<String> {
        let events = self.events.0.lock().expect("lock");
        events.iter().map(|envelope| envelope.topic.replace("/tasks/", "")).collect()
    }

    /// Processes that were started for us and still run.
    fn processes(&self) -> Vec<String> {
        let ours = self.directory.path().display().to_string();
        let mut found = Vec::new();
        for entry in fs::read_dir("/proc").expect("proc").flatten() {
            let read = |name: &str| fs::read(entry.path().join(name)).unwrap_or_default();
            let command = String::from_utf8_lossy(&read("cmdline")).replace('\0', " ");
            let environment = String::from_utf8_lossy(&read("environ")).into_owned();
            if !command.is_empty() && (command.contains(&ours) || environment.contains(&ours)) {
                found.push(command);
            }
        }
        found
    }

    fn assert_nothing_left(&self) {
        let deadline = Instant::now() + Duration::from_secs(5);
        while !self.processes().is_empty() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(10));
        }
        assert_eq!(self.processes(), Vec::<String>::new());
        let sockets = fs::read_dir(self.directory.path().join("s")).map_or(0, Iterator::count);
        assert_eq!(sockets, 0, "a socket is left");
        let mounts = fs::read_to_string("/proc/mounts").expect("mounts");
        assert!(!mounts.contains(&self.directory.path().display().to_string()), "a mount is left");
    }
}

impl Pod {
    async fn create(&self, id: &str, stdout: &Path) -> ttrpc::Result<u32> {
        self.create_on(id, stdout, Vec::new()).await
    }

    async fn create_on(&self, id: &str, stdout: &Path, rootfs: Vec<Mount>) -> ttrpc::Result<u32> {
        let stdout = if stdout.as_os_str().is_empty() { String::new() } else { format!("file://{}", stdout.display()) };
        let request = CreateTaskRequest {
            id: id.into(),
            bundle: self.bundle.display().to_string(),
            stdout,
            rootfs,
            ..CreateTaskRequest::default()
        };
        self.client.create(within(), &request).await.map(|response| response.pid)
    }

    async fn run(&self, id: &str) -> ttrpc::Result<u32> {
        self.client
            .start(within(), &StartRequest { id: id.into(), ..Default::default() })
            .await
            .map(|response| response.pid)
    }

    async fn wait(&self, id: &str) -> u32 {
        let request = WaitRequest { id: id.into(), ..Default::default() };
        self.client.wait(within(), &request).await.expect("wait").exit_status
    }

    async fn status(&self, id: &str) -> ttrpc::Result<Status> {
        let request = StateRequest { id: id.into(), ..Default::default() };
        let response = self.client.state(within(), &request).await?;
        Ok(response.status.enum_value().expect("known"))
    }

    async fn kill(&self, id: &str, signal: u32) -> ttrpc::Result<Empty> {
        self.client.kill(within(), &KillRequest { id: id.into(), signal, ..Default::default() }).await
    }

    async fn remove(&self, id: &str) -> ttrpc::Result<u32> {
        let request = DeleteRequest { id: id.into(), ..Default::default() };
        self.client.delete(within(), &request).await.map(|response| response.exit_status)
    }

    async fn shutdown(&self, id: &str) {
        let request = ShutdownRequest { id: id.into(), ..Default::default() };
        self.client.shutdown(within(), &request).await.expect("shutdown");
    }

    fn recorded(&self, name: &str) -> u32 {
        let text = fs::read_to_string(self.bundle.join(name)).expect("a record");
        text.split(' ').next().and_then(|pid| pid.parse().ok()).expect("a pid")
    }
}

fn within() -> Context {
    with_duration(Duration::from_secs(20))
}

fn code(error: &ttrpc::Error) -> Code {
    match error {
        ttrpc::Error::RpcStatus(status) => status.code(),
        other => panic!("not a status: {other}"),
    }
}

fn kill_process(pid: u32) {
    let pid = rustix::process::Pid::from_raw(i32::try_from(pid).expect("a pid")).expect("not zero");
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).expect("kill");
}

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
async fn server_that_hangs_is_found_although_its_bundle_is_gone() {
    let Some(daemon) = Daemon::new("").await else { return };
    let pod = daemon.start("c1", &["true"], "").await;
    let pid = rustix::process::Pid::from_raw(i32::try_from(pod.recorded("shim.pid")).expect("a pid")).expect("a pid");
    rustix::process::kill_process(pid, rustix::process::Signal::STOP).expect("stop");
    for entry in fs::read_dir(&pod.bundle).expect("the bundle").flatten() {
        let _ = fs::remove_file(entry.path());
    }
    let daemon = spawn_blocking(move || {
        assert_eq!(daemon.delete(&pod, "c2").exit_status, 137);
        assert!(!daemon.processes().is_empty(), "another container's delete leaves it alone");
        assert_eq!(daemon.delete(&pod, "c1").exit_status, 137);
        daemon
    });
    daemon.await.expect("join").assert_nothing_left();
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
