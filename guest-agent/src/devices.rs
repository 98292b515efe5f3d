//! Device nodes of a container: those that every container has, and those of its spec that mean something in a guest.
//!
//! A spec names devices by the numbers of the host. A guest has no disk, GPU or console of the host; what it has are the
//! character devices of its own kernel whose numbers are the same everywhere ([`SHARED_NUMBERS`]). Others are left out and
//! not refused: privileged containers list every device of the host. A pipe needs no device and is always made.

use std::{
    fs, io,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
};

use oci_spec::runtime::{LinuxDevice, LinuxDeviceType};
use rustix::{
    fs::{CWD, FileType, Gid, Mode, Uid, chmod, chown, makedev, mknodat, symlink},
    io::Errno,
    mount::{MoveMountFlags, OpenTreeFlags, move_mount, open_tree},
};

use crate::mounts::{Mount, What};

/// Character devices (Documentation/admin-guide/devices.txt) that a guest's kernel has: memory devices, the terminal's
/// own, entropy, TUN, FUSE.
const SHARED_NUMBERS: [(i64, i64); 11] =
    [(1, 3), (1, 5), (1, 7), (1, 8), (1, 9), (5, 0), (5, 1), (5, 2), (10, 183), (10, 200), (10, 229)];

/// A node that the spec asks for and the guest can give.
#[derive(Debug, PartialEq, Eq)]
pub struct Node {
    path: PathBuf,
    kind: FileType,
    major: u32,
    minor: u32,
    mode: u32,
    /// User and group, in the container's ids.
    owner: (u32, u32),
}

/// The nodes among `written` that mean something here.
pub fn plan(written: &[LinuxDevice]) -> Vec<Node> {
    let node = |device: &LinuxDevice| {
        let kind = match device.typ() {
            LinuxDeviceType::C | LinuxDeviceType::U => FileType::CharacterDevice,
            LinuxDeviceType::P => FileType::Fifo,
            _ => return None,
        };
        let known = kind == FileType::Fifo || SHARED_NUMBERS.contains(&(device.major(), device.minor()));
        known.then(|| Node {
            path: Path::new("/").join(device.path()),
            kind,
            major: device.major() as u32,
            minor: device.minor() as u32,
            mode: device.file_mode().unwrap_or(0o666) & 0o7777,
            owner: (device.uid().unwrap_or(0), device.gid().unwrap_or(0)),
        })
    };
    written.iter().filter_map(node).collect()
}

impl Node {
    /// Makes it, with the directories above it. One that is there already keeps its mode and owner.
    fn make(&self) -> io::Result<()> {
        if let Some(parent) = self.path.parent() {
            fs::create_dir_all(parent)?;
        }
        let mode = Mode::from_raw_mode(self.mode);
        match mknodat(CWD, &self.path, self.kind, mode, makedev(self.major, self.minor)) {
            // A user namespace cannot make nodes, and a root that is shared with the host has none.
            Err(Errno::EXIST | Errno::PERM | Errno::ACCESS) => return Ok(()),
            made => made?,
        }
        // The mask took bits away.
        chmod(&self.path, mode)?;
        chown(&self.path, Some(Uid::from_raw(self.owner.0)), Some(Gid::from_raw(self.owner.1)))?;
        Ok(())
    }
}

/// Device nodes that every container has: name, major, minor.
pub const DEVICES: [(&str, u32, u32); 6] =
    [("null", 1, 3), ("zero", 1, 5), ("full", 1, 7), ("random", 1, 8), ("urandom", 1, 9), ("tty", 5, 0)];

/// Links that every container has in /dev.
const DEVICE_LINKS: [(&str, &str); 5] = [
    ("/proc/self/fd", "/dev/fd"),
    ("/proc/self/fd/0", "/dev/stdin"),
    ("/proc/self/fd/1", "/dev/stdout"),
    ("/proc/self/fd/2", "/dev/stderr"),
    ("pts/ptmx", "/dev/ptmx"),
];

/// Fills /dev, unless a share is mounted there, which is then used as it is.
pub fn make(mounts: &[Mount], nodes: &[Node], old_root: &OwnedFd) -> io::Result<()> {
    let on_dev = mounts.iter().rev().find(|mount| mount.destination == Path::new("/dev"));
    if on_dev.is_some_and(|mount| matches!(mount.what, What::Share { .. })) {
        return Ok(());
    }
    // First, because what the spec says of a device that every container has is what it gets.
    for node in nodes {
        node.make()?;
    }
    for (name, major, minor) in DEVICES {
        let path = format!("/dev/{name}");
        match mknodat(CWD, &path, FileType::CharacterDevice, Mode::from_raw_mode(0o666), makedev(major, minor)) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(Errno::PERM | Errno::ACCESS) => bind_device(&path, name, old_root)?,
            Err(error) => return Err(error.into()),
        }
    }
    for (target, link) in DEVICE_LINKS {
        match symlink(target, link) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Where nodes cannot be made (a user namespace, a shared root), the agent's own is bound.
fn bind_device(path: &str, name: &str, old_root: &OwnedFd) -> io::Result<()> {
    let tree =
        open_tree(old_root, format!("dev/{name}"), OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC)?;
    fs::OpenOptions::new().create(true).append(true).open(path)?;
    Ok(move_mount(&tree, "", CWD, path, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn planned(text: &str) -> Vec<Node> {
        plan(&serde_json::from_str::<Vec<LinuxDevice>>(text).expect("devices"))
    }

    #[test]
    fn devices_of_the_guests_kernel_are_given_and_the_hosts_left_out() {
        let nodes = planned(
            r#"[{"path":"/dev/fuse","type":"c","major":10,"minor":229,"fileMode":438,"uid":0,"gid":5},
                {"path":"/dev/sda","type":"b","major":8,"minor":0},
                {"path":"/dev/nvidia0","type":"c","major":195,"minor":0},
                {"path":"/dev/net/tun","type":"c","major":10,"minor":200}]"#,
        );
        let paths: Vec<_> = nodes.iter().map(|node| node.path.display().to_string()).collect();
        assert_eq!(paths, ["/dev/fuse", "/dev/net/tun"]);
        assert_eq!((nodes[0].mode, nodes[0].owner), (0o666, (0, 5)));
    }

    #[test]
    fn pipe_is_made_whatever_its_numbers() {
        assert_eq!(planned(r#"[{"path":"/dev/p","type":"p","major":0,"minor":0}]"#)[0].kind, FileType::Fifo);
    }

    #[test]
    fn block_device_with_the_numbers_of_a_known_one_is_left_out() {
        assert_eq!(planned(r#"[{"path":"/dev/x","type":"b","major":1,"minor":3}]"#), []);
    }
}
