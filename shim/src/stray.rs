//! A server whose bundle is gone: found by its command line and its working directory.
//!
//! When Create fails because the server hangs, containerd removes the bundle and executes `delete` at the same time. Then
//! the record of the server may be gone before `delete` can read it, and nobody else knows of it. The command line that
//! `start` gave the server names its container, its working directory is the bundle, and neither can be lost. Ids alone
//! would not do: two containerds on one host may have a container of the same name.
//!
//! All of `/proc` is read, so this is for the case in which a bundle has no record at all: a server that ends well leaves
//! one that says so (see [`crate::bundle::Bundle::has_record`]).

use std::{env, fs, path::Path};

use crate::{
    bundle::{Bundle, Process},
    flags::Flags,
};

/// What the kernel appends to the name of a working directory that was removed.
const REMOVED: &str = " (deleted)";

/// A server and what it listens on.
#[derive(Debug)]
pub struct Stray {
    /// The server.
    pub process: Process,
    /// Its socket.
    pub socket: String,
}

/// The server that `start` left for this container, if it lives.
#[must_use]
pub fn find(flags: &Flags, bundle: &Bundle) -> Option<Stray> {
    let program = env::current_exe().ok()?;
    let pids = fs::read_dir("/proc").ok()?.flatten();
    pids.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).find_map(|pid: u32| {
        let folder = Path::new("/proc").join(pid.to_string());
        let socket = socket_of(&fs::read(folder.join("cmdline")).ok()?, flags)?;
        let process = Process::running(pid).ok()?;
        // Another program may claim to be one of ours.
        let ours = fs::read_link(folder.join("exe")).ok()?.file_name() == program.file_name();
        let here = lives_in(&fs::read_link(folder.join("cwd")).ok()?.to_string_lossy(), bundle);
        (ours && here).then_some(Stray { process, socket })
    })
}

/// containerd puts a dot before a bundle's name, then removes it.
fn lives_in(directory: &str, bundle: &Bundle) -> bool {
    let directory = Path::new(directory.strip_suffix(REMOVED).unwrap_or(directory));
    let name = |path: &Path| path.file_name().map(|name| name.to_string_lossy().trim_start_matches('.').to_owned());
    directory.parent() == bundle.directory().parent() && name(directory) == name(bundle.directory())
}

/// The socket in a server's command line, if it serves this very container.
fn socket_of(command_line: &[u8], flags: &Flags) -> Option<String> {
    let words = command_line.strip_suffix(b"\0").unwrap_or(command_line).split(|byte| *byte == 0).skip(1);
    let server = Flags::parse(words.map(|word| String::from_utf8_lossy(word).into_owned()));
    let same = server.id == flags.id && server.namespace == flags.namespace && server.action.is_empty();
    (same && !server.socket.is_empty()).then_some(server.socket)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flags(id: &str) -> Flags {
        Flags { id: id.into(), namespace: "default".into(), ..Flags::default() }
    }

    #[test]
    fn server_is_known_by_container_and_namespace() {
        let line = b"/usr/bin/shim\0-namespace\0default\0-id\0c1\0-socket\0/run/s/x\0-group\0pod\0";
        assert_eq!(socket_of(line, &flags("c1")).as_deref(), Some("/run/s/x"));
        assert_eq!(socket_of(line, &flags("c")), None);
        assert_eq!(socket_of(line, &Flags { namespace: "other".into(), ..flags("c1") }), None);
    }

    #[test]
    fn start_and_delete_of_the_same_container_are_no_servers() {
        for line in
            [&b"shim\0-namespace\0default\0-id\0c1\0start\0"[..], b"shim\0-namespace\0default\0-id\0c1\0delete\0", b""]
        {
            assert_eq!(socket_of(line, &flags("c1")), None);
        }
    }

    #[test]
    fn nobody_serves_a_container_that_does_not_exist() {
        assert!(find(&flags("nobody-serves-this"), &Bundle::new("/nonexistent")).is_none());
    }

    #[test]
    fn working_directory_is_compared_whether_it_is_there_or_not() {
        let bundle = Bundle::new("/run/tasks/c1");
        assert!(lives_in("/run/tasks/c1", &bundle) && lives_in("/run/tasks/.c1 (deleted)", &bundle));
        assert!(!lives_in("/run/tasks/c2", &bundle) && !lives_in("/", &bundle));
    }
}
