//! Containers end to end, without a machine: the agent runs as process 1 of namespaces of its own, its host is this
//! test, and the image is one static busybox.
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
    AgentClient, CreateContainerRequest, DeleteContainerRequest, ListProcessesRequest, PauseContainerRequest,
    ResumeContainerRequest, ShareMount, SignalContainerRequest, StartContainerRequest, Stdio, WaitContainerRequest,
};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{UnixListener, UnixStream},
};
use ttrpc::{
    Code,
    r#async::{Client, transport::Socket},
    context,
};

/// A running agent and its host half.
struct Guest {
    agent: AgentClient,
    process: Child,
    dir: tempfile::TempDir,
    cgroup: PathBuf,
}

/// Host ends of a container's streams.
struct Streams {
    stdin: UnixStream,
    stdout: UnixStream,
    stderr: UnixStream,
}

fn cgroup2() -> Option<PathBuf> {
    ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"]
        .map(PathBuf::from)
        .into_iter()
        .find(|p| p.join("cgroup.procs").exists() && p.join("cgroup.controllers").exists())
}

/// Runs `test` with a fresh agent.
fn with_guest<F: Future<Output = ()>>(test: impl FnOnce(Guest) -> F) {
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

    fn root(&self) -> PathBuf {
        self.dir.path().join("shares/root0")
    }

    fn request(&self, id: &str, spec: &Value) -> CreateContainerRequest {
        CreateContainerRequest {
            id: id.into(),
            spec: spec.to_string().into_bytes(),
            root_share: "root0".into(),
            ..Default::default()
        }
    }

    /// Creates with all three streams.
    async fn create(&self, id: &str, spec: &Value) -> ttrpc::Result<Streams> {
        self.create_from(self.request(id, spec)).await
    }

    async fn create_from(&self, mut request: CreateContainerRequest) -> ttrpc::Result<Streams> {
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

    async fn go(&self, id: &str) -> ttrpc::Result<()> {
        let request = StartContainerRequest { id: id.into(), ..Default::default() };
        self.agent.start_container(context::with_timeout(0), &request).await.map(drop)
    }

    async fn wait(&self, id: &str) -> u32 {
        let request = WaitContainerRequest { id: id.into(), ..Default::default() };
        self.agent.wait_container(context::with_timeout(0), &request).await.expect("wait").exit_status
    }

    async fn signal(&self, id: &str, signal: u32, all: bool) -> ttrpc::Result<()> {
        let request = SignalContainerRequest { id: id.into(), signal, all, ..Default::default() };
        self.agent.signal_container(context::with_timeout(0), &request).await.map(drop)
    }

    async fn freeze(&self, id: &str, frozen: bool) -> ttrpc::Result<()> {
        let (pause, resume) = (
            PauseContainerRequest { id: id.into(), ..Default::default() },
            ResumeContainerRequest { id: id.into(), ..Default::default() },
        );
        let done = match frozen {
            true => self.agent.pause_container(context::with_timeout(0), &pause).await,
            false => self.agent.resume_container(context::with_timeout(0), &resume).await,
        };
        done.map(drop)
    }

    async fn delete(&self, id: &str) {
        let request = DeleteContainerRequest { id: id.into(), ..Default::default() };
        self.agent.delete_container(context::with_timeout(0), &request).await.expect("delete");
    }

    /// Create, start, read all, wait: output, errors, status.
    async fn run(&self, id: &str, spec: &Value) -> (String, String, u32) {
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

    async fn sh(&self, script: &str) -> (String, String, u32) {
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

fn spec(args: &[&str]) -> Value {
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

fn rpc(result: ttrpc::Result<impl Sized>) -> (Code, String) {
    match result.err().expect("must fail") {
        ttrpc::Error::RpcStatus(status) => (status.code(), status.message().to_owned()),
        other => panic!("{other}"),
    }
}

#[test]
fn output_errors_and_status_come_back() {
    with_guest(|guest| async move {
        assert_eq!(guest.sh("echo out; echo err >&2; exit 42").await, ("out\n".into(), "err\n".into(), 42));
        assert_eq!(guest.run("c2", &spec(&["true"])).await, (String::new(), String::new(), 0));
    });
}

#[test]
fn a_container_is_alone_in_its_namespaces() {
    with_guest(|guest| async move {
        let script = "echo $$; hostname; cat /proc/self/cgroup; ls /sys/fs/cgroup | grep -c cgroup.procs; ip -o link | grep -c UP; echo /proc/[0-9]*; pwd";
        let (out, err, _) = guest.sh(script).await;
        assert_eq!(err, "");
        let lines: Vec<&str> = out.lines().filter(|line| !line.contains(':') || line.starts_with("0::")).collect();
        assert_eq!(lines, ["1", "box", "0::/", "1", "1", "/proc/1", "/"], "{out}");
    });
}

#[test]
fn paths_are_masked_and_read_only_as_the_spec_says() {
    with_guest(|guest| async move {
        let (out, err, _) =
            guest.sh("wc -c </proc/keys; ls /sys/firmware; echo 1 >/proc/sys/kernel/pid_max; ls /dev").await;
        assert!(out.starts_with("0\n"), "{out}");
        assert!(err.contains("Read-only file system"), "{err}");
        for name in ["null", "fd", "ptmx", "shm", "tty", "urandom"] {
            assert!(out.lines().any(|line| line == name), "{name} in {out}");
        }
        let mut readonly = spec(&["touch", "/x"]);
        readonly["root"]["readonly"] = json!(true);
        let (_, err, status) = guest.run("c2", &readonly).await;
        assert!(err.contains("Read-only file system") && status == 1, "{err}");
    });
}

#[test]
fn a_user_that_is_not_root_can_reopen_its_output_and_has_a_home() {
    with_guest(|guest| async move {
        let mut user =
            spec(&["sh", "-c", "id -u; id -g; echo $HOME; echo reopened >/dev/stdout; grep CapEff /proc/self/status"]);
        user["process"]["user"] = json!({"uid": 1000, "gid": 1000, "additionalGids": [7, 8]});
        user["process"]["capabilities"] = json!({});
        let (out, err, status) = guest.run("c1", &user).await;
        assert_eq!((err.as_str(), status), ("", 0));
        assert_eq!(out, "1000\n1000\n/home/app\nreopened\nCapEff:\t0000000000000000\n");
    });
}

#[test]
fn capabilities_limits_and_privileges_are_the_specs() {
    with_guest(|guest| async move {
        let (out, ..) = guest.sh("ulimit -n; ulimit -Hn; grep -E 'CapEff|CapBnd|NoNewPrivs' /proc/self/status").await;
        let mask = 1u64 | 1 << 1 | 1 << 5 | 1 << 6 | 1 << 7 | 1 << 27;
        assert_eq!(out, format!("512\n1024\nCapEff:\t{mask:016x}\nCapBnd:\t{mask:016x}\nNoNewPrivs:\t1\n"));
    });
}

#[test]
fn a_missing_entry_point_is_told_at_create_in_the_words_of_runc() {
    with_guest(|guest| async move {
        let prefix = "OCI runtime create failed: unable to start container process: exec: ";
        for (name, code, text) in [
            ("nope", Code::NOT_FOUND, r#""nope": executable file not found in $PATH"#),
            ("/no/such", Code::NOT_FOUND, r#""/no/such": stat /no/such: no such file or directory"#),
            ("/bin", Code::PERMISSION_DENIED, r#""/bin": is a directory"#),
            ("/bin/plain", Code::PERMISSION_DENIED, r#""/bin/plain": permission denied"#),
        ] {
            assert_eq!(rpc(guest.create("c1", &spec(&[name])).await), (code, format!("{prefix}{text}")));
        }
        // Nothing is left behind: the id is free.
        assert_eq!(guest.sh("echo fine").await.0, "fine\n");
    });
}

#[test]
fn a_program_that_the_kernel_refuses_is_told_at_start() {
    with_guest(|guest| async move {
        fs::set_permissions(guest.root().join("bin/plain"), fs::Permissions::from_mode(0o755)).expect("mode");
        let _streams = guest.create("c1", &spec(&["/bin/plain"])).await.expect("create");
        let (_, text) = rpc(guest.go("c1").await);
        assert_eq!(
            text,
            "OCI runtime start failed: unable to start container process: exec /bin/plain: exec format error"
        );
        assert_eq!(guest.wait("c1").await, 127);
        guest.delete("c1").await;
    });
}

#[test]
fn input_reaches_the_process_until_it_is_half_closed() {
    with_guest(|guest| async move {
        let mut streams = guest.create("c1", &spec(&["cat"])).await.expect("create");
        guest.go("c1").await.expect("start");
        streams.stdin.write_all(b"one\n").await.expect("write");
        let mut line = [0; 4];
        streams.stdout.read_exact(&mut line).await.expect("read");
        assert_eq!(&line, b"one\n");
        streams.stdin.shutdown().await.expect("half-close");
        assert_eq!(guest.wait("c1").await, 0);
        guest.delete("c1").await;
    });
}

#[test]
fn a_waiting_sibling_does_not_hold_the_end_of_input_back() {
    with_guest(|guest| async move {
        let mut streams = guest.create("c1", &spec(&["cat"])).await.expect("create");
        guest.go("c1").await.expect("start");
        let _created_only = guest.create("c2", &spec(&["true"])).await.expect("create");
        streams.stdin.shutdown().await.expect("half-close");
        assert_eq!(guest.wait("c1").await, 0);
        guest.delete("c2").await;
        guest.delete("c1").await;
    });
}

#[test]
fn a_slow_reader_gets_every_byte_before_wait_returns() {
    with_guest(|guest| async move {
        let mut streams =
            guest.create("c1", &spec(&["dd", "if=/dev/zero", "bs=64k", "count=64"])).await.expect("create");
        guest.go("c1").await.expect("start");
        let wait = guest.wait("c1");
        tokio::pin!(wait);
        let early = tokio::time::timeout(Duration::from_millis(300), &mut wait).await;
        assert!(early.is_err(), "nothing was read, yet the output counts as written");
        let mut all = Vec::new();
        let (read, status) = tokio::join!(streams.stdout.read_to_end(&mut all), wait);
        assert_eq!((read.expect("read"), status), (4 * 1024 * 1024, 0));
        guest.delete("c1").await;
    });
}

#[test]
fn signals_reach_init_and_what_is_gone_is_not_found() {
    with_guest(|guest| async move {
        let _streams = guest.create("c1", &spec(&["sleep", "1000"])).await.expect("create");
        let early = guest.wait("c1");
        assert_eq!(rpc(guest.go("nope").await).0, Code::NOT_FOUND);
        guest.go("c1").await.expect("start");
        assert_eq!(rpc(guest.go("c1").await).0, Code::FAILED_PRECONDITION);
        guest.signal("c1", 0, false).await.expect("alive");
        assert_eq!(rpc(guest.signal("c1", 65, false).await).0, Code::INVALID_ARGUMENT);
        let pids = ListProcessesRequest { id: "c1".into(), ..Default::default() };
        assert_eq!(guest.agent.list_processes(context::with_timeout(0), &pids).await.expect("list").pids.len(), 1);
        guest.signal("c1", 9, true).await.expect("kill");
        assert_eq!(early.await, 137);
        assert_eq!(guest.wait("c1").await, 137);
        assert_eq!(rpc(guest.signal("c1", 15, false).await), (Code::NOT_FOUND, "process already finished".into()));
        assert_eq!(rpc(guest.signal("c9", 15, false).await), (Code::NOT_FOUND, r#"container not found: "c9""#.into()));
        guest.delete("c1").await;
        guest.delete("c1").await;
    });
}

#[test]
fn a_container_can_be_deleted_in_any_state_and_its_waiters_are_answered() {
    with_guest(|guest| async move {
        let _created = guest.create("c1", &spec(&["sleep", "1000"])).await.expect("create");
        assert_eq!(rpc(guest.create("c1", &spec(&["true"])).await).0, Code::ALREADY_EXISTS);
        guest.delete("c1").await;
        let _running = guest.create("c1", &spec(&["sh", "-c", "sleep 1000 & sleep 1000"])).await.expect("create");
        guest.go("c1").await.expect("start");
        let (status, ()) = tokio::join!(guest.wait("c1"), guest.delete("c1"));
        assert_eq!(status, 137);
    });
}

#[test]
fn shares_are_mounted_as_files_and_directories() {
    with_guest(|guest| async move {
        let shares = guest.dir.path().join("shares");
        fs::create_dir(shares.join("vol")).expect("share");
        fs::write(shares.join("hosts"), "127.0.0.1 localhost\n").expect("share");
        let mut with = spec(&["sh", "-c", "cat /etc/hosts; echo x >/new/deep/vol/x; echo y >/etc/hosts"]);
        let mounts = with["mounts"].as_array_mut().expect("mounts");
        mounts.push(json!({"destination": "/etc/hosts", "type": "bind", "source": "/var/lib/x/hosts", "options": ["rbind", "ro", "rprivate"]}));
        mounts.push(
            json!({"destination": "/new/deep/vol", "type": "bind", "source": "/srv/vol", "options": ["bind", "rw"]}),
        );
        let mut request = guest.request("c1", &with);
        request.share_mounts = [(7, "hosts"), (8, "vol")]
            .map(|(mount_index, share)| ShareMount { mount_index, share: share.into(), ..Default::default() })
            .into();
        let mut streams = guest.create_from(request).await.expect("create");
        guest.go("c1").await.expect("start");
        guest.wait("c1").await;
        let (mut out, mut err) = (String::new(), String::new());
        streams.stdout.read_to_string(&mut out).await.expect("stdout");
        streams.stderr.read_to_string(&mut err).await.expect("stderr");
        assert_eq!(out, "127.0.0.1 localhost\n");
        assert!(err.contains("/etc/hosts: Read-only file system"), "{err}");
        assert_eq!(fs::read_to_string(shares.join("vol/x")).expect("written through"), "x\n");
        guest.delete("c1").await;
    });
}

#[test]
fn links_in_the_image_cannot_lead_a_mount_out_of_the_root() {
    with_guest(|guest| async move {
        let outside = guest.dir.path().join("outside");
        fs::create_dir(&outside).expect("directory");
        fs::remove_dir(guest.root().join("tmp")).expect("directory");
        symlink(&outside, guest.root().join("tmp")).expect("link");
        let mut with = spec(&["true"]);
        with["mounts"]
            .as_array_mut()
            .expect("mounts")
            .push(json!({"destination": "/tmp/x", "type": "tmpfs", "source": "tmpfs"}));
        let _ = guest.create("c1", &with).await;
        assert_eq!(fs::read_dir(&outside).expect("directory").count(), 0);
        guest.delete("c1").await;
    });
}

#[test]
fn containers_of_a_pod_share_its_names_and_if_asked_its_processes() {
    with_guest(|guest| async move {
        let mut sandbox = spec(&["sleep", "1000"]);
        sandbox["annotations"] = json!({"io.kubernetes.cri.container-type": "sandbox"});
        let _streams = guest.create("pod", &sandbox).await.expect("create");
        guest.go("pod").await.expect("start");
        let mut app = spec(&[
            "sh",
            "-c",
            "hostname; grep -c . /proc/1/cmdline; cat /proc/1/comm; sleep 1000 >/dev/null & echo $$",
        ]);
        app["hostname"] = json!("");
        app["linux"]["namespaces"] = json!([{"type": "pid", "path": "/proc/7/ns/pid"}, {"type": "uts", "path": "/proc/7/ns/uts"},
            {"type": "ipc", "path": "/proc/7/ns/ipc"}, {"type": "network", "path": "/var/run/netns/x"}, {"type": "mount"}]);
        let (out, err, status) = guest.run("c1", &app).await;
        assert_eq!((err.as_str(), status), ("", 0));
        let lines: Vec<&str> = out.lines().collect();
        assert_eq!(lines[..3], ["box", "1", "sleep"], "{out}");
        assert_ne!(lines[3], "1");
        // The process that was left behind is gone with its container's init.
        let pids = ListProcessesRequest { id: "pod".into(), ..Default::default() };
        assert_eq!(guest.agent.list_processes(context::with_timeout(0), &pids).await.expect("list").pids.len(), 1);
        guest.delete("pod").await;
    });
}

#[test]
fn a_seccomp_profile_is_enforced() {
    with_guest(|guest| async move {
        let mut with = spec(&["sh", "-c", "hostname other; echo $?"]);
        with["linux"]["seccomp"] = json!({"defaultAction": "SCMP_ACT_ALLOW", "architectures": ["SCMP_ARCH_X86_64"],
            "syscalls": [{"names": ["sethostname"], "action": "SCMP_ACT_ERRNO", "errnoRet": 38}]});
        let (out, err, _) = guest.run("c1", &with).await;
        assert_eq!(out, "1\n");
        assert!(err.contains("Function not implemented"), "{err}");
    });
}

#[test]
fn a_user_namespace_is_mapped() {
    with_guest(|guest| async move {
        let mut with = spec(&["sh", "-c", "id -u; cat /proc/self/uid_map; echo ok >/dev/null; echo up >/dev/stderr"]);
        with["linux"]["namespaces"].as_array_mut().expect("list").push(json!({"type": "user"}));
        with["linux"]["uidMappings"] = json!([{"containerID": 0, "hostID": 100000, "size": 65536}]);
        with["linux"]["gidMappings"] = json!([{"containerID": 0, "hostID": 100000, "size": 65536}]);
        with["linux"]["maskedPaths"] = json!([]);
        let (out, err, status) = guest.run("c1", &with).await;
        assert_eq!((err.as_str(), status), ("up\n", 0));
        assert_eq!(out.split_whitespace().collect::<Vec<_>>(), ["0", "0", "100000", "65536"]);
    });
}

#[test]
fn a_paused_container_stands_still_and_can_be_resumed_killed_and_deleted() {
    with_guest(|guest| async move {
        let mut streams =
            guest.create("c1", &spec(&["sh", "-c", "while read x; do echo $x; done"])).await.expect("create");
        guest.go("c1").await.expect("start");
        guest.freeze("c1", true).await.expect("pause");
        streams.stdin.write_all(b"one\n").await.expect("write");
        let mut line = [0; 4];
        let early = tokio::time::timeout(Duration::from_millis(300), streams.stdout.read_exact(&mut line)).await;
        assert!(early.is_err(), "a paused process answered");
        guest.freeze("c1", false).await.expect("resume");
        streams.stdout.read_exact(&mut line).await.expect("read");
        assert_eq!(&line, b"one\n");
        guest.freeze("c1", true).await.expect("pause");
        guest.signal("c1", 9, false).await.expect("kill");
        assert_eq!(guest.wait("c1").await, 137);
        assert_eq!(rpc(guest.freeze("c1", true).await).0, Code::NOT_FOUND);
        guest.delete("c1").await;
        let _streams = guest.create("c1", &spec(&["sleep", "1000"])).await.expect("create");
        guest.go("c1").await.expect("start");
        guest.freeze("c1", true).await.expect("pause");
        guest.delete("c1").await;
    });
}
