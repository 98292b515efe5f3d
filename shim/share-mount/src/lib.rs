//! What a VMM is handed to serve: a directory or file of the host as a mount of its own, mounted nowhere.
//!
//! A descriptor of a directory leads everywhere: `openat(fd, "..")` walks up to the root of the host, whatever mount
//! namespace its holder is in. The root of a detached mount has no parent, so from there `..` leads to itself. The kernel
//! itself keeps a VMM that was taken over inside, not the good manners of the VMM's code.
//!
//! The mount's attributes bind whoever holds the descriptor: read-only where the share is, and never a device, because
//! opening a node needs no capability, and an image may contain any node.
//!
//! Failure paths: the source is gone, the process may not mount, the kernel is older than 5.12.
#![deny(unsafe_code)]

mod sys;

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    path::{Path, PathBuf},
};

use rustix::{
    io::Errno,
    mount::{OpenTreeFlags, open_tree},
};

/// What the mount allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Access {
    /// No change of anything in it.
    pub read_only: bool,
    /// What is mounted below the source belongs to it.
    pub recursive: bool,
}

/// Why a source cannot be handed out.
#[derive(Debug, thiserror::Error)]
pub enum ShareMountError {
    /// No mount of its own.
    #[error("cannot give {} a mount of its own: {errno}", path.display())]
    Detach {
        /// The source.
        path: PathBuf,
        /// The reason.
        errno: Errno,
    },
    /// The mount is there and does not take its attributes.
    #[error("cannot restrict the mount of {}: {source} (mount_setattr needs Linux 5.12)", path.display())]
    Restrict {
        /// The source.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
}

/// Makes a detached mount of `source`, an open descriptor of it; `path` is its name in errors.
pub fn detach(source: impl AsFd, path: &Path, access: Access) -> Result<OwnedFd, ShareMountError> {
    let mut flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_EMPTY_PATH;
    flags.set(OpenTreeFlags::AT_RECURSIVE, access.recursive);
    let mount = open_tree(&source, "", flags).map_err(|errno| ShareMountError::Detach { path: path.into(), errno })?;
    sys::restrict(mount.as_fd(), access).map_err(|source| ShareMountError::Restrict { path: path.into(), source })?;
    Ok(mount)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, mknodat, open, openat, statat};

    use super::*;

    fn share(directory: &Path, access: Access) -> OwnedFd {
        let source = open(directory, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).expect("open");
        detach(&source, directory, access).expect("this test runs as root")
    }

    fn inode(directory: impl AsFd, name: &str) -> u64 {
        statat(directory, name, AtFlags::EMPTY_PATH).expect("stat").st_ino
    }

    #[test]
    fn no_way_leads_up_from_a_share() {
        let directory = tempfile::tempdir().expect("directory");
        let share = share(directory.path(), Access::default());
        assert_eq!(inode(&share, ".."), inode(&share, "."));
        assert_eq!(inode(&share, "../../../.."), inode(&share, "."));
        let plain = open(directory.path(), OFlags::PATH, Mode::empty()).expect("open");
        assert_ne!(inode(&plain, ".."), inode(&plain, "."), "from a plain descriptor one does");
    }

    #[test]
    fn read_only_share_refuses_writes_and_the_source_takes_them() {
        let directory = tempfile::tempdir().expect("directory");
        let share = share(directory.path(), Access { read_only: true, recursive: false });
        let create = OFlags::CREATE | OFlags::WRONLY;
        assert_eq!(openat(&share, "x", create, Mode::RUSR).expect_err("read-only"), Errno::ROFS);
        fs::write(directory.path().join("x"), "1").expect("the source is not read-only");
    }

    #[test]
    fn device_in_a_share_opens_for_nobody() {
        let directory = tempfile::tempdir().expect("directory");
        let node = directory.path().join("null");
        let null = rustix::fs::makedev(1, 3);
        mknodat(CWD, &node, FileType::CharacterDevice, Mode::from_raw_mode(0o666), null)
            .expect("this test runs as root");
        fs::read(&node).expect("it opens where it was made");
        let share = share(directory.path(), Access::default());
        assert_eq!(openat(&share, "null", OFlags::RDONLY, Mode::empty()).expect_err("no devices"), Errno::ACCESS);
    }

    #[test]
    fn single_file_is_a_share_too() {
        let file = tempfile::NamedTempFile::new().expect("file");
        let share = share(file.path(), Access { read_only: true, recursive: true });
        assert_eq!(inode(&share, ""), inode(CWD, file.path().to_str().expect("text")));
    }
}
