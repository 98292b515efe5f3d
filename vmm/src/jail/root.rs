//! Leaving the host's files: a root directory with nothing in it but a `/proc` of our own pid namespace.
//!
//! That `/proc` shows processes only (`subset=pid`), of which there is one, ourselves: the share tree opens files again by
//! `/proc/self/fd`. It belongs to the root of the host, as all mounts here do: nobody in the jail can mount, unmount or
//! remount anything.

use std::os::fd::OwnedFd;

use rustix::{
    fs::{CWD, Mode, mkdirat},
    io::Errno,
    mount::{
        FsMountFlags, FsOpenFlags, MountAttrFlags, MountFlags, MountPropagationFlags, MoveMountFlags, UnmountFlags,
        fsconfig_create, fsconfig_set_string, fsmount, fsopen, mount_change, mount_remount, move_mount, unmount,
    },
    process::{chdir, fchdir, pivot_root},
};

use super::JailError;

/// A directory that every host has, to put the new root on for as long as it takes to turn around.
const FOOTHOLD: &str = "/proc";

/// Enters the new root directory.
pub fn leave() -> Result<(), JailError> {
    let step = |step| move |errno: Errno| JailError::Root { step, errno };
    // Unmounting must not reach the host's own namespace.
    let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
    mount_change("/", private).map_err(step("mount / private"))?;
    let empty = detached("tmpfs", &[("mode", "0555")]).map_err(step("make an empty tmpfs"))?;
    move_mount(&empty, "", CWD, FOOTHOLD, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)
        .map_err(step("mount an empty tmpfs"))?;
    mkdirat(&empty, "proc", Mode::from_raw_mode(0o555)).map_err(step("make /proc"))?;
    let proc = detached("proc", &[("subset", "pid")]).map_err(step("make a /proc of our own"))?;
    move_mount(&proc, "", &empty, "proc", MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)
        .map_err(step("mount a /proc of our own"))?;
    fchdir(&empty).map_err(step("enter the empty root"))?;
    // Both are ".": the old root ends up on top of the new one, from where it is taken away.
    pivot_root(".", ".").map_err(step("pivot_root (is the host's root an initramfs?)"))?;
    unmount(".", UnmountFlags::DETACH).map_err(step("unmount the host's root"))?;
    chdir("/").map_err(step("chdir"))?;
    let closed = MountFlags::BIND | MountFlags::RDONLY | MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    mount_remount("/", closed, "").map_err(step("remount / read-only"))
}

/// A new file system that is mounted nowhere.
fn detached(kind: &str, options: &[(&str, &str)]) -> Result<OwnedFd, Errno> {
    let context = fsopen(kind, FsOpenFlags::FSOPEN_CLOEXEC)?;
    for (key, value) in options {
        fsconfig_set_string(&context, *key, *value)?;
    }
    fsconfig_create(&context)?;
    let attributes =
        MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV | MountAttrFlags::MOUNT_ATTR_NOEXEC;
    fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes)
}
