//! The option `tmpcopyup`: a new tmpfs starts with a copy of the directory that it hides.
//!
//! The hidden directory is reached by its descriptor alone, and the current directory of the container's init is it while
//! the copy is made: names below need no path, and no symbolic link of the image is followed on either side. Modes, owners
//! and links are kept; times, hard links and extended attributes are not, nor are sockets, pipes and devices.
//!
//! Failure: the tmpfs is full, or the file system below cannot be read; the container's creation fails with the reason.

use std::{
    fs, io,
    os::{
        fd::AsFd,
        unix::fs::{MetadataExt, PermissionsExt, lchown, symlink},
    },
    path::Path,
};

use rustix::process::{chdir, fchdir};

/// Copies what is in the directory `hidden` into the directory `to`, an absolute path. The current directory is the root
/// afterwards.
pub fn fill(hidden: impl AsFd, to: &Path) -> io::Result<()> {
    fchdir(hidden)?;
    let copied = copy_entries(Path::new("."), to);
    chdir("/")?;
    copied
}

fn copy_entries(from: &Path, to: &Path) -> io::Result<()> {
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        copy(&entry.path(), &to.join(entry.file_name()))?;
    }
    Ok(())
}

fn copy(from: &Path, to: &Path) -> io::Result<()> {
    let metadata = fs::symlink_metadata(from)?;
    let kind = metadata.file_type();
    if kind.is_symlink() {
        symlink(fs::read_link(from)?, to)?;
    } else if kind.is_dir() {
        fs::create_dir(to)?;
        copy_entries(from, to)?;
    } else if kind.is_file() {
        fs::copy(from, to)?;
    } else {
        return Ok(());
    }
    lchown(to, Some(metadata.uid()), Some(metadata.gid()))?;
    if kind.is_symlink() {
        return Ok(());
    }
    // After the owner, whose change clears the set-user-id bit.
    fs::set_permissions(to, fs::Permissions::from_mode(metadata.mode() & 0o7777))
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    #[test]
    fn files_links_and_modes_are_copied_and_links_not_followed() {
        let (from, to) = (tempfile::tempdir().expect("directory"), tempfile::tempdir().expect("directory"));
        fs::create_dir(from.path().join("d")).expect("directory");
        fs::write(from.path().join("d/file"), "content").expect("file");
        fs::set_permissions(from.path().join("d/file"), fs::Permissions::from_mode(0o4711)).expect("mode");
        symlink("/absent", from.path().join("link")).expect("link");
        fill(File::open(from.path()).expect("directory"), to.path()).expect("copied");
        let copied = to.path().join("d/file");
        assert_eq!(fs::read_to_string(&copied).expect("file"), "content");
        assert_eq!(fs::metadata(&copied).expect("file").mode() & 0o7777, 0o4711);
        assert_eq!(fs::read_link(to.path().join("link")).expect("link"), Path::new("/absent"));
    }
}
