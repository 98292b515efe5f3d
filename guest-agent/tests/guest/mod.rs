//! A guest without a machine: the agent runs as process 1 of namespaces of its own, its host is the test, and the image is
//! one static busybox.
//!
//! Needs root, a cgroup2 mount and /bin/busybox (package busybox-static); says so and passes where they are missing,
//! since the same is tested again in a real machine.

use std::{
    fs,
    os::unix::fs::{PermissionsExt, symlink},
    path::{Path, PathBuf},
    process::{Child, Command},
    time::Duration,
};

use agent_proto::{
    AgentClient, CreateContainerRequest, DeleteContainerRequest, StartContainerRequest, Stdio, WaitContainerRequest,
};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{UnixListener, UnixStream},
};
use ttrpc::{
    r#async::{Client, transport::Socket},
    context,
};

/// A running agent and its host half.
pub struct Guest {
    pub agent: AgentClient,
    process: Child,
    pub dir: tempfile::TempDir,
    cgroup: PathBuf,
}

/// Host ends of a container's streams.
pub struct Streams {
    pub stdin: UnixStream,
    pub stdout: UnixStream,
    pub stderr: UnixStream,
}

fn cgroup2() -> Option<PathBuf> {
    ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"]
        .map(PathBuf::from)
        .into_iter()
        .find(|p| p.join("cgroup.procs").exists() && p.join("cgroup.controllers").exists())
}

/// Runs `test` with a fresh agent.
pub fn with_guest<F: Future<Output = ()>>(test: impl FnOnce(Guest) -> F) {
    let (true, Some(cgroup)) = (rustix::process::geteuid().is_root() && Path::new("/bin/busybox").exists(), cgroup2())
    else {
        eprintln!("skipped: needs root, a cgroup2 mount and /bin/busybox");
        return;
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("runtime");
    runtime.block_on(async {
        let guest = Guest::start(&cgroup).await;
        tokio::time::timeout(Duration::from_secs(60), test(guest)).await.expect("the test ends in time");
    });
}

fn image(root: &Path) {
    for dir in ["bin", "etc", "proc", "sys", "dev", "tmp"] {
        fs::create_dir_all(root.join(dir)).expect("directory");
    }
    fs::copy("/bin/busybox", root.join("bin/busybox")).expect("busybox");
    for applet in [
        "sh", "cat", "true", "sleep", "hostname", "id", "dd", "wc", "touch", "ls", "grep", "mount", "ip", "stat",
        "pwd", "umount", "chroot",
    ] {
        symlink("busybox", root.join("bin").join(applet)).expect("link");
    }
    fs::write(root.join("etc/passwd"), "root:x:0:0::/root:/bin/sh\napp:x:1000:1000::/home/app:/bin/sh\n")
        .expect("passwd");
    fs::write(root.join("bin/plain"), "x").expect("file");
}

impl Guest {
    async fn start(cgroup2: &Path) -> Self {
        let dir = tempfile::tempdir().expect("directory");
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).expect("mode");
        let (shares, sockets) = (dir.path().join("shares"), dir.path().join("sockets"));
        fs::create_dir(&sockets).expect("directory");
        image(&shares.join("root0"));
        let cgroup = cgroup2.join(format!("nacre-test-{}", dir.path().file_name().expect("name").display()));
        fs::create_dir(&cgroup).expect("cgroup");
        let control = UnixListener::bind(sockets.join("1024")).expect("socket");
        let example = std::env::current_exe()
            .expect("path")
            .parent()
            .and_then(Path::parent)
            .expect("folder")
            .join("examples/agent_on_sockets");
        let process = Command::new("unshare")
            .args(["--mount", "--pid", "--net", "--ipc", "--uts", "--mount-proc", "--fork", "--kill-child"])
            .arg(example)
            .args([&shares, &cgroup, &sockets])
            .spawn()
            .expect("unshare");
        let (stream, _) = control.accept().await.expect("the agent connects");
        let agent = AgentClient::new(Client::new(Socket::new(stream)));
        Self { agent, process, dir, cgroup }
    }

    pub fn root(&self) -> PathBuf {
        self.dir.path().join("shares/root0")
    }

    pub fn request(&self, id: &str, spec: &Value) -> CreateContainerRequest {
        CreateContainerRequest {
            id: id.into(),
            spec: spec.to_string().into_bytes(),
            root_share: "root0".into(),
            ..Default::default()
        }
    }

    /// Creates with all three streams.
    pub async fn create(&self, id: &str, spec: &Value) -> ttrpc::Result<Streams> {
        self.create_from(self.request(id, spec)).await
    }

    pub async fn create_from(&self, mut request: CreateContainerRequest) -> ttrpc::Result<Streams> {
        let base = self.dir.path().join("sockets");
        let port = |at: u32| 2048 + at + 10 * fs::read_dir(&base).expect("sockets").count() as u32;
        let ports = [port(0), port(1), port(2)];
        let listeners = ports.map(|port| UnixListener::bind(base.join(port.to_string())).expect("socket"));
        request.stdio =
            Some(Stdio { stdin_port: ports[0], stdout_port: ports[1], stderr_port: ports[2], ..Default::default() })
                .into();
        self.agent.create_container(context::with_timeout(0), &request).await?;
        let mut streams = Vec::new();
        for listener in &listeners {
            streams.push(listener.accept().await.expect("stream").0);
        }
        let [stdin, stdout, stderr] = <[UnixStream; 3]>::try_from(streams).expect("three");
        Ok(Streams { stdin, stdout, stderr })
    }

    pub async fn go(&self, id: &str) -> ttrpc::Result<()> {
        let request = StartContainerRequest { id: id.into(), ..Default::default() };
        self.agent.start_container(context::with_timeout(0), &request).await.map(drop)
    }

    pub async fn wait(&self, id: &str) -> u32 {
        let request = WaitContainerRequest { id: id.into(), ..Default::default() };
        self.agent.wait_container(context::with_timeout(0), &request).await.expect("wait").exit_status
    }

    pub async fn delete(&self, id: &str) {
        let request = DeleteContainerRequest { id: id.into(), ..Default::default() };
        self.agent.delete_container(context::with_timeout(0), &request).await.expect("delete");
    }

    /// Create, start, read all, wait: output, errors, status.
    pub async fn run(&self, id: &str, spec: &Value) -> (String, String, u32) {
        let mut streams = self.create(id, spec).await.expect("create");
        streams.stdin.shutdown().await.expect("half-close");
        self.go(id).await.expect("start");
        let status = self.wait(id).await;
        let (mut out, mut err) = (String::new(), String::new());
        streams.stdout.read_to_string(&mut out).await.expect("stdout");
        streams.stderr.read_to_string(&mut err).await.expect("stderr");
        self.delete(id).await;
        (out, err, status)
    }

    pub async fn sh(&self, script: &str) -> (String, String, u32) {
        self.run("c1", &spec(&["sh", "-c", script])).await
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        for path in ["nacre", "."] {
            let _ = fs::remove_dir(self.cgroup.join(path));
        }
        let _ = fs::remove_dir(&self.cgroup);
    }
}

pub fn spec(args: &[&str]) -> Value {
    let caps = ["CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_SETUID", "CAP_SETGID", "CAP_KILL", "CAP_MKNOD"];
    json!({
        "ociVersion": "1.1.0",
        "process": {"user": {"uid": 0, "gid": 0}, "args": args, "env": ["PATH=/sbin:/bin"], "cwd": "/", "noNewPrivileges": true,
            "capabilities": {"bounding": caps, "effective": caps, "permitted": caps},
            "rlimits": [{"type": "RLIMIT_NOFILE", "hard": 1024, "soft": 512}]},
        "root": {"path": "rootfs"},
        "hostname": "box",
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc", "options": ["nosuid", "noexec", "nodev"]},
            {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "strictatime", "mode=755", "size=65536k"]},
            {"destination": "/dev/pts", "type": "devpts", "source": "devpts", "options": ["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620"]},
            {"destination": "/dev/shm", "type": "tmpfs", "source": "shm", "options": ["nosuid", "noexec", "nodev", "mode=1777", "size=65536k"]},
            {"destination": "/dev/mqueue", "type": "mqueue", "source": "mqueue", "options": ["nosuid", "noexec", "nodev"]},
            {"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": ["nosuid", "noexec", "nodev", "ro"]},
            {"destination": "/sys/fs/cgroup", "type": "cgroup", "source": "cgroup", "options": ["nosuid", "noexec", "nodev", "relatime", "ro"]},
        ],
        "linux": {
            "cgroupsPath": "system.slice:nacre:c1",
            "namespaces": [{"type": "pid"}, {"type": "ipc"}, {"type": "uts"}, {"type": "mount"}, {"type": "network"}],
            "maskedPaths": ["/proc/kcore", "/proc/keys", "/sys/firmware", "/proc/none"],
            "readonlyPaths": ["/proc/sys", "/proc/bus", "/proc/none"],
        },
    })
}
