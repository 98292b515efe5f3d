//! The runtime spec as a container sees it: `runtimetest` of opencontainers/runtime-tools runs in the guest, compares what
//! is there with the spec that the container was made by, and says so in TAP.
//!
//! Two of its containers ask for everything that it looks at: one is restricted as far as a spec can, the other is root of
//! a user namespace with all capabilities. What it does not look at (namespaces, umask, options of mounts, what seccomp
//! answers, limits, priorities) a shell in the third one prints. A "not ok" that is none of the exceptions named here, each
//! with its reason, fails the test; so does an exception that has become ok.

use std::{fs, path::PathBuf};

use serde_json::{Value, json};
use tests::{Census, Outcome, RUNTIME, ctr, shell};

/// Where `tests/lab/cases` puts it.
const RUNTIMETEST: &str = "/opt/cases/runtimetest";

/// A root directory of busybox and runtimetest, and the spec of a container on it.
struct Bundle {
    id: &'static str,
    at: PathBuf,
    spec: Value,
}

impl Bundle {
    /// `spec` without what all have in common: version, root, the usual mounts before its own.
    fn new(id: &'static str, mut spec: Value) -> Self {
        let at = PathBuf::from("/var/lib/oci").join(id);
        let make = format!(
            "rm -rf {at} && mkdir -p {at}/volume {at}/root && cd {at}/root && mkdir bin dev proc sys tmp filled secrets && \
             cp /bin/busybox bin/ && for name in $(bin/busybox --list); do ln -s busybox bin/$name; done; cp {RUNTIMETEST} bin/ && \
             echo masked > secrets/key && cp secrets/key secret && echo below > filled/file && echo of the host > ../volume/file",
            at = at.display()
        );
        let _ = shell(&make).expect_code(0);
        spec["ociVersion"] = "1.2.0".into();
        spec["root"]["path"] = at.join("root").display().to_string().into();
        let own = spec["mounts"].as_array().cloned().unwrap_or_default();
        spec["mounts"] = usual_mounts().into_iter().chain(own).collect();
        Self { id, at, spec }
    }

    /// Runs the container to its end. runtimetest reads the spec in the root.
    fn run(&self) -> Outcome {
        let before = Census::take();
        let file = self.at.join("config.json");
        for file in [&file, &self.at.join("root/config.json")] {
            fs::write(file, self.spec.to_string()).expect("the lab's disk is writable");
        }
        let config = format!("--config={}", file.display());
        let outcome = ctr(&["run", "--rm", "--runtime", RUNTIME, &config, self.id]);
        before.expect_nothing_new();
        outcome
    }

    /// Runs runtimetest and expects it to find everything as specified, but for `exceptions`.
    #[track_caller]
    fn conforms(mut self, checks: usize, exceptions: &[&str]) {
        // "may": also what the spec only recommends.
        self.spec["process"]["args"] = json!(["runtimetest", "--path=/", "--compliance-level=may"]);
        let outcome = self.run();
        let failed: Vec<_> = described(&outcome, "not ok").collect();
        assert_eq!(failed, exceptions, "{}{}", outcome.stderr, around_failures(&outcome.stdout));
        // The plan is its last line: without it, it stopped half way.
        assert!(outcome.code == 0 && outcome.stdout.lines().any(|line| line.starts_with("1..")), "{outcome:?}");
        let passed = described(&outcome, "ok").count();
        assert!(passed >= checks, "{passed} checks and not {checks}: {outcome:?}");
    }
}

/// Of each line `VERDICT 7 - description` the description. What runtime-tools themselves have left to do, and what they
/// skip, is told in other ways.
fn described<'a>(outcome: &'a Outcome, verdict: &'a str) -> impl Iterator<Item = &'a str> {
    let lines = outcome.stdout.lines().filter(|line| !line.contains("# TODO") && !line.contains("# SKIP"));
    lines.filter_map(move |line| line.strip_prefix(verdict)?.split_once(" - ")).map(|(_, text)| text)
}

/// The failures with what was expected and found.
fn around_failures(tap: &str) -> String {
    let parts = tap.split("\nnot ok").skip(1);
    parts.map(|part| format!("\nnot ok{}", part.split("\nok").next().unwrap_or_default())).collect()
}

fn usual_mounts() -> Vec<Value> {
    let mount = |kind: &str, at: &str, options: &[&str]| json!({"type": kind, "source": kind, "destination": at, "options": options});
    vec![
        mount("proc", "/proc", &["nosuid", "noexec", "nodev"]),
        mount("tmpfs", "/dev", &["nosuid", "strictatime", "mode=755", "size=65536k"]),
        mount("devpts", "/dev/pts", &["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620"]),
        mount("tmpfs", "/dev/shm", &["nosuid", "noexec", "nodev", "mode=1777", "size=65536k"]),
        mount("mqueue", "/dev/mqueue", &["nosuid", "noexec", "nodev"]),
        mount("sysfs", "/sys", &["nosuid", "noexec", "nodev", "ro"]),
        mount("cgroup2", "/sys/fs/cgroup", &["nosuid", "noexec", "nodev", "relatime", "ro"]),
    ]
}

fn namespaces(kinds: &[&str]) -> Value {
    kinds.iter().map(|kind| json!({"type": kind})).collect()
}

#[test]
fn restricted_container_is_what_its_spec_says() {
    let limit = |(kind, soft, hard): (&str, u64, u64)| json!({"type": kind, "soft": soft, "hard": hard});
    let limits = [
        ("RLIMIT_CPU", 600, 900),
        ("RLIMIT_FSIZE", 1 << 30, 1 << 31),
        ("RLIMIT_DATA", 1 << 36, 1 << 37),
        ("RLIMIT_STACK", 8 << 20, 16 << 20),
        ("RLIMIT_CORE", 0, 1 << 20),
        ("RLIMIT_RSS", 1 << 30, u64::MAX),
        ("RLIMIT_NPROC", 200, 300),
        // Go raises the soft limit of itself.
        ("RLIMIT_NOFILE", 1500, 1500),
        ("RLIMIT_MEMLOCK", 1 << 16, 1 << 17),
        ("RLIMIT_AS", 1 << 40, 1 << 41),
        ("RLIMIT_LOCKS", 100, 200),
        ("RLIMIT_MSGQUEUE", 800_000, 900_000),
        ("RLIMIT_NICE", 5, 10),
        ("RLIMIT_RTPRIO", 1, 2),
        ("RLIMIT_RTTIME", 500_000, 600_000),
    ];
    let device = |path: &str, kind: &str, major: u32, minor: u32, mode: u32, owner: (u32, u32)| json!({"path": path, "type": kind, "major": major, "minor": minor, "fileMode": mode, "uid": owner.0, "gid": owner.1});
    let spec = json!({
        "root": {"readonly": true},
        "hostname": "restricted",
        "process": {
            "user": {"uid": 1000, "gid": 1001, "additionalGids": [5, 27, 70000]},
            "env": ["PATH=/usr/bin:/bin", "GREETING=hello world", "EMPTY="],
            "cwd": "/made/by/the/runtime",
            "capabilities": {
                "bounding": ["CAP_CHOWN", "CAP_KILL", "CAP_NET_BIND_SERVICE", "CAP_NET_RAW", "CAP_CHECKPOINT_RESTORE"],
                "permitted": ["CAP_KILL", "CAP_NET_BIND_SERVICE"],
                "effective": ["CAP_KILL", "CAP_NET_BIND_SERVICE"],
                "inheritable": ["CAP_CHOWN", "CAP_KILL", "CAP_NET_BIND_SERVICE"],
                "ambient": ["CAP_KILL", "CAP_NET_BIND_SERVICE"]
            },
            "rlimits": limits.map(limit),
            "noNewPrivileges": true,
            "oomScoreAdj": 321
        },
        "mounts": [
            {"type": "tmpfs", "source": "scratch", "destination": "/tmp", "options": ["nosuid", "nodev", "size=1m", "mode=1777"]},
            // Of no type: then runtimetest looks for it.
            {"source": "/var/lib/oci/restricted/volume", "destination": "/volume", "options": ["rbind", "ro"]}
        ],
        "linux": {
            "namespaces": namespaces(&["pid", "ipc", "uts", "mount", "cgroup", "network"]),
            "devices": [
                device("/dev/fuse", "c", 10, 229, 0o640, (1000, 5)),
                device("/dev/net/tun", "c", 10, 200, 0o666, (0, 0)),
                device("/dev/under/another/name", "u", 1, 5, 0o604, (7, 8)),
                // The spec's own wins over the one that every container has.
                device("/dev/full", "c", 1, 7, 0o600, (1000, 1001)),
                device("/dev/queue", "p", 0, 0, 0o620, (0, 1001)),
            ],
            "sysctl": {
                "kernel.msgmax": "65432", "kernel.shm_rmid_forced": "1", "fs.mqueue.msg_max": "21",
                "net.ipv4.ip_unprivileged_port_start": "99", "net.ipv4.ip_forward": "1"
            },
            "maskedPaths": ["/secret", "/secrets", "/proc/keys", "/proc/timer_list", "/proc/kcore", "/sys/firmware", "/absent"],
            "seccomp": {
                "defaultAction": "SCMP_ACT_ALLOW", "architectures": ["SCMP_ARCH_X86_64"],
                "syscalls": [{"names": ["ptrace", "keyctl"], "action": "SCMP_ACT_ERRNO"}]
            }
        }
    });
    // The guest knows a volume as a share, and not by its path on the host.
    Bundle::new("restricted", spec).conforms(300, &["mounts[8] (/volume) found"]);
}

#[test]
fn root_of_a_user_namespace_is_what_its_spec_says() {
    let all = shell("cat /proc/sys/kernel/cap_last_cap").stdout;
    assert_eq!(all.trim(), "40", "the list below is complete");
    let spec = json!({
        "root": {"readonly": false},
        "hostname": "mapped",
        "process": {
            "user": {"uid": 0, "gid": 0, "additionalGids": [10]},
            "env": ["PATH=/bin"],
            "cwd": "/",
            "capabilities": {"bounding": CAPABILITIES, "permitted": CAPABILITIES, "effective": CAPABILITIES},
        },
        "linux": {
            "namespaces": namespaces(&["pid", "ipc", "uts", "mount", "cgroup", "user"]),
            "uidMappings": [{"containerID": 0, "hostID": 1000, "size": 500}, {"containerID": 500, "hostID": 3000, "size": 100}],
            "gidMappings": [{"containerID": 0, "hostID": 2000, "size": 500}],
            "readonlyPaths": ["/proc/sys", "/proc/fs", "/proc/irq", "/filled", "/bin/busybox"],
            "rootfsPropagation": "shared"
        }
    });
    let bundle = Bundle::new("mapped", spec);
    let _ = shell("chown -R -h 1000:2000 /var/lib/oci/mapped/root").expect_code(0);
    // It is a copy of the machine's, made before the container's root is entered, so it is in front of all others.
    bundle.conforms(250, &["mounts[5] (/sys) found in order"]);
}

#[rustfmt::skip]
const CAPABILITIES: &[&str] = &[
    "CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_DAC_READ_SEARCH", "CAP_FOWNER", "CAP_FSETID", "CAP_KILL", "CAP_SETGID", "CAP_SETUID",
    "CAP_SETPCAP", "CAP_LINUX_IMMUTABLE", "CAP_NET_BIND_SERVICE", "CAP_NET_BROADCAST", "CAP_NET_ADMIN", "CAP_NET_RAW",
    "CAP_IPC_LOCK", "CAP_IPC_OWNER", "CAP_SYS_MODULE", "CAP_SYS_RAWIO", "CAP_SYS_CHROOT", "CAP_SYS_PTRACE", "CAP_SYS_PACCT",
    "CAP_SYS_ADMIN", "CAP_SYS_BOOT", "CAP_SYS_NICE", "CAP_SYS_RESOURCE", "CAP_SYS_TIME", "CAP_SYS_TTY_CONFIG", "CAP_MKNOD",
    "CAP_LEASE", "CAP_AUDIT_WRITE", "CAP_AUDIT_CONTROL", "CAP_SETFCAP", "CAP_MAC_OVERRIDE", "CAP_MAC_ADMIN", "CAP_SYSLOG",
    "CAP_WAKE_ALARM", "CAP_BLOCK_SUSPEND", "CAP_AUDIT_READ", "CAP_PERFMON", "CAP_BPF", "CAP_CHECKPOINT_RESTORE",
];

/// Each line prints one fact.
const FACTS: &str = r#"
# The machine's own namespaces have fixed numbers.
for kind in cgroup ipc pid uts user time; do
    case $(readlink /proc/self/ns/$kind) in *402653183?]) echo $kind: the machine\'s ;; *) echo $kind: its own ;; esac
done
echo umask: $(umask)
echo domain: $(cat /proc/sys/kernel/domainname)
echo policy: $(awk '{ print $41 ", nice " $19 }' /proc/$$/stat), io $(ionice -p $$)
echo sigpending: $(awk '/pending signals/ { print $4, $5 }' /proc/self/limits)
echo personality: $(cat /proc/self/personality)
for file in memory.max pids.max cpu.max cpu.max.burst cpu.idle; do echo $file: $(cat /sys/fs/cgroup/$file); done
echo mkdir: $(mkdir /made 2>&1 | sed 's/.*: //')
sleep 100 & kill -PWR $! 2>/dev/null || echo kill: PWR is refused; kill $! && echo kill: TERM is not
echo volume: $(cat /volume/file; /volume/busybox true 2>&1 | sed 's/.*: //'; cp /filled/file /volume/file 2>&1 | sed 's/.*: //')
for at in /volume /quiet; do echo $at: $(awk -v at=$at '$5 == at { print $6 }' /proc/self/mountinfo); done
echo /quiet: $(stat -c %a:%u:%g /quiet)
echo /filled: $(stat -c %a /filled), $(cat /filled/file) $(stat -c %a:%u:%g /filled/file), $(stat -f -c %T /filled)
"#;

const EXPECTED_FACTS: &str = "cgroup: its own
ipc: its own
pid: its own
uts: its own
user: the machine's
time: the machine's
umask: 0027
domain: facts.example
policy: 3, nice 7, io best-effort: prio 6
sigpending: 300 400
personality: 00000008
memory.max: 67108864
pids.max: 64
cpu.max: 90000 100000
cpu.max.burst: 1000
cpu.idle: 1
mkdir: Operation not supported
kill: PWR is refused
kill: TERM is not
volume: of the host Permission denied Read-only file system
/volume: ro,nosuid,nodev,noexec,relatime
/quiet: rw,nosuid,nodev,noexec,noatime
/quiet: 710:3:4
/filled: 2750, below 640:12:34, tmpfs
";

const SOME: [&str; 2] = ["CAP_KILL", "CAP_DAC_OVERRIDE"];

#[test]
fn what_runtimetest_does_not_look_at_is_what_the_spec_says() {
    let spec = json!({
        "domainname": "facts.example",
        "process": {
            "args": ["sh", "-c", FACTS], "cwd": "/", "env": ["PATH=/bin"],
            "user": {"uid": 0, "gid": 0, "umask": 0o027},
            "capabilities": {"bounding": SOME, "permitted": SOME, "effective": SOME},
            // runtimetest spells its name in another way.
            "rlimits": [{"type": "RLIMIT_SIGPENDING", "soft": 300, "hard": 400}],
            "scheduler": {"policy": "SCHED_BATCH", "nice": 7},
            "ioPriority": {"class": "IOPRIO_CLASS_BE", "priority": 6}
        },
        "mounts": [
            {"type": "bind", "source": "/var/lib/oci/facts/volume", "destination": "/volume",
                "options": ["rbind", "ro", "noexec", "nosuid", "nodev"]},
            {"type": "tmpfs", "source": "tmpfs", "destination": "/quiet",
                "options": ["noexec", "nosuid", "nodev", "noatime", "lazytime", "size=64k", "mode=0710", "uid=3", "gid=4"]},
            {"type": "tmpfs", "source": "tmpfs", "destination": "/filled", "options": ["tmpcopyup", "size=1m"]}
        ],
        "linux": {
            "namespaces": namespaces(&["pid", "ipc", "uts", "mount", "cgroup"]),
            "personality": {"domain": "LINUX32"},
            "resources": {
                "memory": {"limit": 64 << 20}, "pids": {"limit": 64},
                "cpu": {"shares": 512, "quota": 90_000, "period": 100_000, "burst": 1000, "idle": 1}
            },
            "seccomp": {
                "defaultAction": "SCMP_ACT_ALLOW",
                "syscalls": [
                    {"names": ["mkdir", "mkdirat", "no_such_call"], "action": "SCMP_ACT_ERRNO", "errnoRet": 95},
                    {"names": ["kill"], "action": "SCMP_ACT_ERRNO", "args": [{"index": 1, "value": 30, "op": "SCMP_CMP_EQ"}]}
                ]
            }
        }
    });
    let bundle = Bundle::new("facts", spec);
    let _ = shell(
        "cd /var/lib/oci/facts; cp /bin/busybox volume; chmod 2750 root/filled; chown 12:34 root/filled/file; \
                   chmod 640 root/filled/file",
    )
    .expect_code(0);
    assert_eq!(bundle.run().expect_code(0).stdout, EXPECTED_FACTS);
}
