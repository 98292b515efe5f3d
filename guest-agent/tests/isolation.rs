//! What a container sees, and what it may do: namespaces, files, users, privileges (see [`guest`]).

mod guest;

use std::{fs, os::unix::fs::symlink};

use agent_proto::{ListProcessesRequest, ShareMount};
use serde_json::json;
use tokio::io::AsyncReadExt;
use ttrpc::context;

use guest::{spec, with_guest};

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
