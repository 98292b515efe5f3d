//! What is kept, dropped and refused of a spec.

use super::*;
use crate::mounts::What;

/// A spec as `ctr run` writes it, with `more` in its `linux` and `process` parts.
fn spec(process: &str, linux: &str, mounts: &str) -> Vec<u8> {
    format!(
        r#"{{"ociVersion":"1.1.0","process":{{"user":{{"uid":0,"gid":0}},"args":["sh"],"env":["PATH=/bin"],"cwd":"/"{process}}},
        "root":{{"path":"rootfs","readonly":true}},"hostname":"box","mounts":[{mounts}],
        "hooks":{{"prestart":[{{"path":"/usr/bin/host-hook"}}]}},
        "linux":{{"namespaces":[{{"type":"pid"}},{{"type":"network","path":"/var/run/netns/x"}},{{"type":"uts"}}],
        "cgroupsPath":"system.slice:cri:abc"{linux}}}}}"#
    )
    .into_bytes()
}

fn reduced(process: &str, linux: &str, mounts: &str) -> Result<Plan, Error> {
    reduce(&spec(process, linux, mounts), "root0", &[])
}

#[test]
fn what_only_a_host_can_do_is_dropped() {
    let plan = reduced(
        r#","apparmorProfile":"cri-containerd.apparmor.d","selinuxLabel":"system_u:system_r:container_t:s0""#,
        r#","mountLabel":"x","devices":[{"path":"/dev/sda","type":"b","major":8,"minor":0}],"resources":{"devices":[{"allow":false,"access":"rwm"}],"cpu":{"cpus":"0-63"}}"#,
        "",
    )
    .expect("reduces");
    assert!(plan.cgroup_values.is_empty());
    assert!(plan.root_readonly);
    assert_eq!(plan.hostname.as_deref(), Some("box"));
}

#[test]
fn a_namespace_with_a_path_is_the_pods_and_one_without_is_new() {
    let plan = reduced("", "", "").expect("reduces");
    let new = libc::CLONE_NEWNS | libc::CLONE_NEWPID | libc::CLONE_NEWUTS;
    assert_eq!(plan.namespaces, new as u64);
}

#[test]
fn a_sandbox_container_is_the_pod_and_has_only_its_processes_apart() {
    let json = String::from_utf8(spec("", "", "")).expect("text").replacen(
        "\"hostname\"",
        "\"annotations\":{\"io.kubernetes.cri.container-type\":\"sandbox\"},\"hostname\"",
        1,
    );
    let plan = reduce(json.as_bytes(), "root0", &[]).expect("reduces");
    assert!(plan.is_sandbox);
    assert_eq!(plan.namespaces, (libc::CLONE_NEWNS | libc::CLONE_NEWPID) as u64);
}

#[test]
fn a_bind_of_a_host_path_without_a_share_is_refused_by_name() {
    let bind = r#"{"destination":"/data","type":"bind","source":"/srv/data","options":["rbind","ro"]}"#;
    let text = reduced("", "", bind).expect_err("refused").to_string();
    assert!(text.contains("\"/srv/data\"") && text.contains("\"/data\""), "{text}");
}

#[test]
fn a_bind_of_the_hosts_kernel_files_shows_the_guests_own() {
    let bind = r#"{"destination":"/host/proc","type":"bind","source":"/proc","options":["rbind","ro"]}"#;
    let plan = reduced("", "", bind).expect("reduces");
    let own = What::Own { path: "/proc".into(), recursive: true };
    assert_eq!(plan.mounts.first().map(|mount| &mount.what), Some(&own));
    let escape = r#"{"destination":"/x","type":"bind","source":"/proc/../srv","options":["rbind"]}"#;
    assert!(matches!(reduced("", "", escape), Err(Error::Mount(mounts::PlanError::NoShare { .. }))));
}

#[test]
fn a_share_takes_the_place_of_a_binds_source() {
    let bind = r#"{"destination":"/data","type":"bind","source":"/srv/data","options":["rbind","ro","rslave"]}"#;
    let share = ShareMount { mount_index: 0, share: "v1".into(), ..Default::default() };
    let plan = reduce(&spec("", "", bind), "root0", &[share]).expect("reduces");
    let mount = plan.mounts.first().expect("one mount");
    assert_eq!(mount.what, What::Share { name: "v1".into(), recursive: true });
    assert_eq!(mount.flags, libc::MS_RDONLY);
    assert!(mount.propagation.is_some_and(|p| p.flag == libc::MS_SLAVE && p.recursive));
}

#[test]
fn options_are_split_into_flags_and_data() {
    let tmpfs = r#"{"destination":"/dev","type":"tmpfs","source":"tmpfs","options":["nosuid","strictatime","mode=755","size=65536k"]}"#;
    let plan = reduced("", "", tmpfs).expect("reduces");
    let mount = plan.mounts.first().expect("one mount");
    assert_eq!(mount.flags, libc::MS_NOSUID | libc::MS_STRICTATIME);
    assert_eq!(mount.data.to_str(), Ok("mode=755,size=65536k"));
}

#[test]
fn options_that_kernels_share_with_the_spec_are_flags_and_id_mapping_is_refused() {
    let tmpfs = |options: &str| {
        let mount = format!(r#"{{"destination":"/t","type":"tmpfs","source":"tmpfs","options":[{options}]}}"#);
        reduced("", "", &mount).map(|plan| plan.mounts.into_iter().next().expect("one mount"))
    };
    let mount =
        tmpfs(r#""lazytime","iversion","silent","remount","nomand","tmpcopyup","rsymfollow""#).expect("reduces");
    assert_eq!(mount.flags, libc::MS_LAZYTIME | libc::MS_I_VERSION | libc::MS_SILENT);
    assert!(mount.data.is_empty() && mount.copy_up);
    assert!(matches!(tmpfs(r#""ridmap""#), Err(Error::Mount(mounts::PlanError::IdMapped(_)))));
}

#[test]
fn a_user_namespace_is_shown_the_sysfs_of_the_machine() {
    let sysfs = r#"{"destination":"/sys","type":"sysfs","source":"sysfs","options":["nosuid","ro"]}"#;
    let json = String::from_utf8(spec("", "", sysfs)).expect("text");
    let json = json.replacen(r#"{"type":"pid"}"#, r#"{"type":"pid"},{"type":"user"}"#, 1);
    let mount = reduce(json.as_bytes(), "root0", &[]).expect("reduces").mounts.into_iter().next().expect("one mount");
    assert_eq!(mount.what, What::Own { path: "/sys".into(), recursive: false });
    assert_eq!(mount.flags, libc::MS_NOSUID | libc::MS_RDONLY);
}

#[test]
fn priorities_are_the_containers_to_set() {
    let plan = reduced(
        r#","scheduler":{"policy":"SCHED_IDLE"},"ioPriority":{"class":"IOPRIO_CLASS_IDLE","priority":0}"#,
        r#","personality":{"domain":"LINUX"}"#,
        "",
    )
    .expect("reduces");
    assert_eq!(plan.process.scheduler.map(|it| it.sched_policy), Some(libc::SCHED_IDLE as u32));
    assert_eq!((plan.process.io_priority, plan.process.personality), (Some(3 << 13), Some(0)));
}

#[test]
fn share_names_cannot_lead_elsewhere() {
    for name in ["", ".", "..", "a/b", "../x", "a\0b"] {
        assert!(matches!(reduce(&spec("", "", ""), name, &[]), Err(Error::ShareName(_))), "{name:?}");
    }
    let share = ShareMount { mount_index: 3, share: "v1".into(), ..Default::default() };
    assert!(matches!(reduce(&spec("", "", ""), "root0", &[share]), Err(Error::MountIndex(3))));
}

#[test]
fn what_a_guest_cannot_give_is_refused() {
    assert!(matches!(reduced(r#","terminal":true"#, "", ""), Err(Error::Terminal)));
    let overlay = r#"{"destination":"/x","type":"overlay","source":"overlay"}"#;
    assert!(matches!(reduced("", "", overlay), Err(Error::Mount(mounts::PlanError::Kind { .. }))));
    assert!(matches!(reduce(b"{}", "root0", &[]), Err(Error::Json(_) | Error::Missing(_))));
    assert!(matches!(reduce(b"not json", "root0", &[]), Err(Error::Json(_))));
}

#[test]
fn ids_are_translated_by_range() {
    let ranges = [IdRange { container: 0, guest: 100_000, size: 10 }, IdRange { container: 50, guest: 7, size: 1 }];
    assert_eq!(mapped(&ranges, 9), Some(100_009));
    assert_eq!(mapped(&ranges, 10), None);
    assert_eq!(mapped(&ranges, 50), Some(7));
}
