//! containerd, played by a test: bundles, the two actions, the event service, and a look at what is left.

use std::{
    fs,
    io::Write,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use containerd_shim_protos::{
    api::{
        CreateTaskRequest, DeleteRequest, DeleteResponse, Empty, KillRequest, ShutdownRequest, StartRequest,
        StateRequest, Status, WaitRequest,
    },
    bootstrap_api::{BootstrapParams, Extension},
    protobuf::{Message, well_known_types::any::Any},
    shim::{event::Envelope, events::ForwardRequest},
    shim_async::{Events, TaskClient, create_events},
    types::mount::Mount,
};
use ttrpc::{
    Code,
    asynchronous::{Client, Server, TtrpcContext},
    context::{Context, with_duration},
};

pub const SHIM: &str = env!("CARGO_BIN_EXE_containerd-shim-nacre-v2");
pub const HOLDER: &str = env!("CARGO_BIN_EXE_nacre-holder");

#[derive(Default)]
pub struct Recorder(Mutex<Vec<Envelope>>);

#[async_trait::async_trait]
impl Events for Recorder {
    async fn forward(&self, _ctx: &TtrpcContext, request: ForwardRequest) -> ttrpc::Result<Empty> {
        self.0.lock().expect("lock").push(request.envelope.unwrap_or_default());
        Ok(Empty::new())
    }
}

/// containerd, as far as a shim can see it.
pub struct Daemon {
    pub directory: tempfile::TempDir,
    pub events: Arc<Recorder>,
    _server: Server,
    /// The runtime's table of options in containerd's configuration.
    pub options: &'static str,
}

/// One container's bundle and the connection to its shim.
pub struct Pod {
    pub bundle: PathBuf,
    pub address: String,
    pub client: TaskClient,
}

impl Daemon {
    /// `None` without root, which namespaces need.
    pub async fn new(cmdline: &str) -> Option<Self> {
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

    pub fn bundle(&self, id: &str, args: &[&str], annotations: &str) -> PathBuf {
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

    pub fn execute(&self, bundle: &Path, id: &str, action: &str) -> Output {
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
    pub fn runtime_options(&self) -> Any {
        // config_body = 3
        let value = [&[0x1a, u8::try_from(self.options.len()).expect("short")], self.options.as_bytes()].concat();
        Any { type_url: "runtimeoptions.v1.Options".into(), value, ..Any::default() }
    }

    /// The text of all log files.
    pub fn logs(&self) -> Vec<String> {
        let files = fs::read_dir(self.directory.path().join("log")).into_iter().flatten().flatten();
        files.map(|file| fs::read_to_string(file.path()).expect("readable")).collect()
    }

    pub async fn start(&self, id: &str, args: &[&str], annotations: &str) -> Pod {
        let bundle = self.bundle(id, args, annotations);
        let output = self.execute(&bundle, id, "start");
        assert!(output.status.success() && output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
        let address = String::from_utf8(output.stdout).expect("text");
        assert!(address.starts_with("unix:///"), "{address}");
        assert_eq!(fs::read_to_string(bundle.join("address")).expect("read"), address);
        let client = TaskClient::new(Client::connect(&address).await.expect("connect"));
        Pod { bundle, address, client }
    }

    pub fn delete(&self, pod: &Pod, id: &str) -> DeleteResponse {
        let before = Instant::now();
        let output = self.execute(&pod.bundle, id, "delete");
        assert!(output.status.success() && before.elapsed() < Duration::from_secs(5));
        DeleteResponse::parse_from_bytes(&output.stdout).expect("a DeleteResponse")
    }

    pub fn topics(&self) -> Vec<String> {
        let events = self.events.0.lock().expect("lock");
        events.iter().map(|envelope| envelope.topic.replace("/tasks/", "")).collect()
    }

    /// Processes that were started for us and still run.
    pub fn processes(&self) -> Vec<String> {
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

    pub fn assert_nothing_left(&self) {
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
    pub async fn create(&self, id: &str, stdout: &Path) -> ttrpc::Result<u32> {
        self.create_on(id, stdout, Vec::new()).await
    }

    pub async fn create_on(&self, id: &str, stdout: &Path, rootfs: Vec<Mount>) -> ttrpc::Result<u32> {
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

    pub async fn run(&self, id: &str) -> ttrpc::Result<u32> {
        self.client
            .start(within(), &StartRequest { id: id.into(), ..Default::default() })
            .await
            .map(|response| response.pid)
    }

    pub async fn wait(&self, id: &str) -> u32 {
        let request = WaitRequest { id: id.into(), ..Default::default() };
        self.client.wait(within(), &request).await.expect("wait").exit_status
    }

    pub async fn status(&self, id: &str) -> ttrpc::Result<Status> {
        let request = StateRequest { id: id.into(), ..Default::default() };
        let response = self.client.state(within(), &request).await?;
        Ok(response.status.enum_value().expect("known"))
    }

    pub async fn kill(&self, id: &str, signal: u32) -> ttrpc::Result<Empty> {
        self.client.kill(within(), &KillRequest { id: id.into(), signal, ..Default::default() }).await
    }

    pub async fn remove(&self, id: &str) -> ttrpc::Result<u32> {
        let request = DeleteRequest { id: id.into(), ..Default::default() };
        self.client.delete(within(), &request).await.map(|response| response.exit_status)
    }

    pub async fn shutdown(&self, id: &str) {
        let request = ShutdownRequest { id: id.into(), ..Default::default() };
        self.client.shutdown(within(), &request).await.expect("shutdown");
    }

    pub fn recorded(&self, name: &str) -> u32 {
        let text = fs::read_to_string(self.bundle.join(name)).expect("a record");
        text.split(' ').next().and_then(|pid| pid.parse().ok()).expect("a pid")
    }
}

pub fn within() -> Context {
    with_duration(Duration::from_secs(20))
}

pub fn code(error: &ttrpc::Error) -> Code {
    match error {
        ttrpc::Error::RpcStatus(status) => status.code(),
        other => panic!("not a status: {other}"),
    }
}

pub fn kill_process(pid: u32) {
    let pid = rustix::process::Pid::from_raw(i32::try_from(pid).expect("a pid")).expect("not zero");
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).expect("kill");
}
