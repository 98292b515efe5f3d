//! What the host's kernel must have.
//!
//! Everything is read below a root, which is `/` but in tests. vsock is not needed: its device is in the VMM.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use rustix::fs::statfs;

use super::Check;

/// The oldest kernel that Nacre is developed for: Debian 12's. It has idmapped mounts of overlay's layers (5.19) and
/// pidfds (5.3).
const OLDEST: (u32, u32) = (6, 1);

/// Controllers that limit pods.
const CONTROLLERS: [&str; 3] = ["cpu", "memory", "pids"];

/// `f_type` of cgroup v2.
const CGROUP2_MAGIC: i64 = 0x6367_7270;

/// Where containerd keeps what the shares show, unless it was told otherwise.
const CONTAINERD_ROOT: &str = "var/lib/containerd";

/// File systems by `f_type` whose mounts can be idmapped, with the kernel that could first.
const IDMAPPABLE: [(i64, &str, (u32, u32)); 7] = [
    (0xef53, "ext4", (5, 12)),
    (0x5846_5342, "xfs", (5, 12)),
    (0x9123_683e, "btrfs", (5, 15)),
    (0xf2f5_2010, "f2fs", (5, 18)),
    (0xe0f5_e1e2, "erofs", (5, 19)),
    (0x0102_1994, "tmpfs", (6, 3)),
    (0x2fc1_2fc1, "zfs", (6, 1)),
];

/// Version, overlay, user namespaces, idmapped mounts.
pub fn kernel(root: &Path) -> Vec<Check> {
    let release = text(root, "proc/sys/kernel/osrelease").unwrap_or_default().trim().to_owned();
    let version = version(&release);
    let magic = statfs(root.join(CONTAINERD_ROOT)).or_else(|_| statfs(root.join("var/lib"))).map(|stat| stat.f_type);
    vec![
        kernel_version(&release, version),
        overlay(root, &release),
        user_namespaces(root),
        idmapped_mounts(version, magic.ok()),
    ]
}

fn kernel_version(release: &str, version: Option<(u32, u32)>) -> Check {
    let (major, minor) = OLDEST;
    match version {
        Some(version) if version >= OLDEST => Check::pass("kernel", format!("Linux {release}")),
        _ => {
            let detail = format!("Linux {release:?} is older than {major}.{minor}");
            Check::fail("kernel", detail, format!("install a kernel of {major}.{minor} or later"))
        }
    }
}

fn overlay(root: &Path, release: &str) -> Check {
    let known = text(root, "proc/filesystems").unwrap_or_default();
    if known.lines().any(|line| line.split_whitespace().last() == Some("overlay")) {
        return Check::pass("overlay", "the file system is there");
    }
    // A module that is loaded with the first mount.
    let listed =
        |list: &str| text(root, &format!("lib/modules/{release}/{list}")).unwrap_or_default().contains("/overlay.ko");
    if listed("modules.dep") || listed("modules.builtin") {
        return Check::pass("overlay", "a module of the kernel's");
    }
    Check::fail("overlay", "the kernel has no overlay file system", "modprobe overlay, or install a kernel that has it")
}

fn user_namespaces(root: &Path) -> Check {
    let limit = text(root, "proc/sys/user/max_user_namespaces").ok().and_then(|text| text.trim().parse::<u64>().ok());
    match limit {
        None => Check::fail("userns", "the kernel has no user namespaces", "install a kernel with CONFIG_USER_NS"),
        Some(0) => {
            let fix = "sysctl user.max_user_namespaces=10000, and keep it in /etc/sysctl.d";
            Check::fail("userns", "user namespaces are switched off (user.max_user_namespaces = 0)", fix)
        }
        Some(limit) => Check::pass("userns", format!("up to {limit} user namespaces")),
    }
}

/// Judged by version and file system: to try would be to mount.
fn idmapped_mounts(version: Option<(u32, u32)>, magic: Option<i64>) -> Check {
    let known = magic.and_then(|magic| IDMAPPABLE.into_iter().find(|(found, ..)| *found == magic));
    match (known, version) {
        (Some((_, name, first)), Some(version)) if version >= first => {
            Check::pass("idmap", format!("/{CONTAINERD_ROOT} is on {name}, whose mounts can be idmapped"))
        }
        (Some((_, name, (major, minor))), _) => {
            let detail =
                format!("/{CONTAINERD_ROOT} is on {name}, which can be idmapped from Linux {major}.{minor} on");
            Check::fail("idmap", detail, "install a newer kernel, or put containerd's root on ext4 or xfs")
        }
        (None, _) => {
            let detail = format!("/{CONTAINERD_ROOT} is on a file system that is not known to be idmappable");
            Check::fail("idmap", detail, "put containerd's root on ext4, xfs or btrfs")
        }
    }
}

/// cgroup v2, with the controllers that limit pods.
pub fn cgroup(root: &Path) -> Check {
    let mount = root.join("sys/fs/cgroup");
    let magic = statfs(&mount).map_or(0, |stat| stat.f_type);
    judge_cgroup(&mount, magic == CGROUP2_MAGIC)
}

fn judge_cgroup(mount: &Path, is_v2: bool) -> Check {
    if !is_v2 {
        let detail = format!("{} is not cgroup v2", mount.display());
        return Check::fail("cgroup", detail, "boot with systemd.unified_cgroup_hierarchy=1");
    }
    let found = text(mount, "cgroup.controllers").unwrap_or_default();
    let missing: Vec<_> =
        CONTROLLERS.into_iter().filter(|name| !found.split_whitespace().any(|has| has == *name)).collect();
    if missing.is_empty() {
        return Check::pass("cgroup", format!("version 2 with {}", CONTROLLERS.join(", ")));
    }
    let detail = format!("cgroup v2 lacks the controller {}", missing.join(", "));
    Check::fail("cgroup", detail, format!("boot with cgroup_enable={}", missing.join(",")))
}

fn text(root: &Path, file: &str) -> io::Result<String> {
    let path: PathBuf = root.join(file);
    fs::read_to_string(path)
}

/// The first two numbers of `6.12.41+deb13-amd64`.
fn version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn root(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().expect("temporary directory");
        for (file, text) in files {
            let path = root.path().join(file);
            fs::create_dir_all(path.parent().expect("a folder")).expect("create");
            fs::write(path, text).expect("write");
        }
        root
    }

    #[test]
    fn version_is_compared_by_number() {
        for (release, good) in
            [("6.1.0-40-amd64", true), ("6.12.117", true), ("10.0", true), ("5.19.1", false), ("", false)]
        {
            assert_eq!(kernel_version(release, version(release)).is_good(), good, "{release}");
        }
    }

    #[test]
    fn overlay_may_be_there_or_come_as_a_module() {
        let known = root(&[("proc/filesystems", "nodev\ttmpfs\nnodev\toverlay\n")]);
        assert!(overlay(known.path(), "6.1").is_good());
        let module = root(&[("lib/modules/6.1/modules.dep", "kernel/fs/overlayfs/overlay.ko.xz:\n")]);
        assert!(overlay(module.path(), "6.1").is_good());
        assert!(!overlay(module.path(), "6.2").is_good());
    }

    #[test]
    fn user_namespaces_must_exist_and_be_allowed() {
        for (limit, good) in [("15000\n", true), ("0\n", false)] {
            let root = root(&[("proc/sys/user/max_user_namespaces", limit)]);
            assert_eq!(user_namespaces(root.path()).is_good(), good);
        }
        assert!(!user_namespaces(root(&[]).path()).is_good());
    }

    #[test]
    fn idmapping_depends_on_the_file_system_and_the_kernel() {
        assert!(idmapped_mounts(Some((6, 1)), Some(0xef53)).is_good());
        assert!(!idmapped_mounts(Some((6, 1)), Some(0x0102_1994)).is_good());
        assert!(idmapped_mounts(Some((6, 3)), Some(0x0102_1994)).is_good());
        assert!(!idmapped_mounts(Some((6, 12)), Some(0x6969)).is_good());
    }

    #[test]
    fn cgroup_must_be_v2_with_every_controller() {
        let all = root(&[("cgroup.controllers", "cpuset cpu io memory hugetlb pids rdma\n")]);
        assert!(judge_cgroup(all.path(), true).is_good());
        assert!(!judge_cgroup(all.path(), false).is_good());
        let some = root(&[("cgroup.controllers", "cpuset cpu pids\n")]);
        assert!(judge_cgroup(some.path(), true).fix.expect("fails").contains("cgroup_enable=memory"));
    }
}
