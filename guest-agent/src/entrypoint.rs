//! Finding the program to run, with the words that runc uses when it is not there.
//!
//! Runs in the container's init after it has become the container's user, so that root, PATH, working directory and
//! permissions are those that exec will meet. Docker, Kubernetes and their users know these texts (Docker turns them
//! into exit codes 126 and 127), hence each is written as Go's `exec.LookPath` writes it:
//!
//! | entry point | text |
//! |---|---|
//! | name, in no directory of PATH | `exec: "x": executable file not found in $PATH` |
//! | name, found through a relative PATH entry | `exec: "x": cannot run executable found relative to current directory` |
//! | path, missing | `exec: "/x": stat /x: no such file or directory` |
//! | path, a directory | `exec: "/x": is a directory` |
//! | path, not executable | `exec: "/x": permission denied` |

use std::ffi::CString;

use rustix::{
    fs::{Access, FileType, access, stat},
    io::Errno,
};

/// Why the entry point cannot be run.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "the module's table")]
pub enum Error {
    #[error("exec: {0:?}: executable file not found in $PATH")]
    NotInPath(String),
    #[error("exec: {0:?}: cannot run executable found relative to current directory")]
    Relative(String),
    #[error("exec: {name:?}: stat {name}: {}", errno_text(*errno))]
    Stat { name: String, errno: Errno },
    #[error("exec: {0:?}: is a directory")]
    Directory(String),
    #[error("exec: {0:?}: permission denied")]
    NotExecutable(String),
}

/// The path to exec for `name`; `path` is the container's PATH.
pub fn look_up(name: &str, path: &str) -> Result<CString, Error> {
    let c_string = |path: &str| CString::new(path).map_err(|_| Error::NotInPath(name.to_owned()));
    if name.contains('/') {
        executable(name)?;
        return c_string(name);
    }
    for directory in path.split(':').filter(|_| !name.is_empty() && !path.is_empty()) {
        // An empty entry of PATH means the current directory.
        let directory = if directory.is_empty() { "." } else { directory };
        let candidate = format!("{}/{name}", directory.trim_end_matches('/'));
        if executable(&candidate).is_ok() {
            return if directory.starts_with('/') {
                c_string(&candidate)
            } else {
                Err(Error::Relative(name.to_owned()))
            };
        }
    }
    Err(Error::NotInPath(name.to_owned()))
}

fn executable(path: &str) -> Result<(), Error> {
    let stat = stat(path).map_err(|errno| Error::Stat { name: path.to_owned(), errno })?;
    if FileType::from_raw_mode(stat.st_mode).is_dir() {
        return Err(Error::Directory(path.to_owned()));
    }
    access(path, Access::EXEC_OK).map_err(|_| Error::NotExecutable(path.to_owned()))
}

/// An errno in the words of Go, which are libc's in lower case.
pub fn errno_text(errno: Errno) -> String {
    let text = std::io::Error::from(errno).to_string();
    let text = text.split(" (os error").next().unwrap_or_default();
    let mut chars = text.chars();
    chars.next().map(|first| first.to_lowercase().chain(chars).collect()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::PermissionsExt};

    use super::*;

    fn directory() -> tempfile::TempDir {
        let dir = tempfile::tempdir().expect("temporary directory");
        for (name, mode) in [("tool", 0o755), ("plain", 0o644)] {
            let path = dir.path().join(name);
            fs::write(&path, "#!/bin/sh\n").expect("file");
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).expect("mode");
        }
        fs::create_dir(dir.path().join("folder")).expect("folder");
        dir
    }

    #[test]
    fn a_name_is_found_through_path() {
        let dir = directory();
        let root = dir.path().display().to_string();
        let found = look_up("tool", &format!("/nowhere:{root}")).expect("found");
        assert_eq!(found.to_str(), Ok(format!("{root}/tool").as_str()));
    }

    #[test]
    fn what_cannot_be_run_is_told_in_the_words_of_runc() {
        let dir = directory();
        let root = dir.path().display().to_string();
        let text = |name: &str| look_up(name, &root).expect_err("must fail").to_string();
        assert_eq!(text("nope"), r#"exec: "nope": executable file not found in $PATH"#);
        assert_eq!(text("plain"), r#"exec: "plain": executable file not found in $PATH"#);
        assert_eq!(text("folder"), r#"exec: "folder": executable file not found in $PATH"#);
        assert_eq!(text("/no/such"), r#"exec: "/no/such": stat /no/such: no such file or directory"#);
        assert_eq!(text(&format!("{root}/folder")), format!(r#"exec: "{root}/folder": is a directory"#));
        assert_eq!(text(&format!("{root}/plain")), format!(r#"exec: "{root}/plain": permission denied"#));
        assert_eq!(
            text(&format!("{root}/plain/x")),
            format!(r#"exec: "{root}/plain/x": stat {root}/plain/x: not a directory"#)
        );
    }

    #[test]
    fn without_path_nothing_is_found() {
        assert_eq!(look_up("sh", ""), Err(Error::NotInPath("sh".into())));
        assert_eq!(look_up("", "/bin"), Err(Error::NotInPath(String::new())));
    }
}
