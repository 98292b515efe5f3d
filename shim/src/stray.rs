//! A server whose bundle is gone: found by its command line and its working directory.
//!
//! When Create fails because the server hangs, containerd removes the bundle and executes `delete` at the same time. Then
//! the server's record, its address or both may be gone before `delete` can read them, and nobody else knows of it. The
//! command line that `start` gave the server names its container and its socket, its working directory is the bundle, and
//! none of them can be lost. Ids alone would not do: two containerds on one host may have a container of the same name.
//!
//! All of `/proc` is read, so this is for the case in which a bundle lacks one of the two: a server that ends well leaves
//! a word that says so (see [`crate::bundle::Bundle::has_ended`]).

use std::{env, fs, path::Path};

use crate::{
    bundle::{Bundle, Process},
    flags::Flags,
};

/// What the kernel appends to the name of a working directory that was removed.
const REMOVED: &str = " (deleted)";

/// The server that `start` left for this container, if it lives.
#[must_use]
pub fn find(flags: &Flags, bundle: &Bundle) -> Option<Process> {
    let program = env::current_exe().ok()?;
    let pids = fs::read_dir("/proc").ok()?.flatten();
    pids.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).find_map(|pid: u32| {
        let folder = Path::new("/proc").join(pid.to_string());
        let process = Process::running(pid).ok()?;
        let server = server(&fs::read(folder.join("cmdline")).ok()?)?;
        let asked = server.id == flags.id && server.namespace == flags.namespace;
        // Another program may claim to be one of ours.
        let ours = fs::read_link(folder.join("exe")).ok()?.file_name() == program.file_name();
        let here = lives_in(&fs::read_link(folder.join("cwd")).ok()?.to_string_lossy(), bundle);
        (asked && ours && here).then_some(process)
    })
}

/// Where a server listens, if it lives: the same for every container of its group.
#[must_use]
pub fn socket(process: Process) -> Option<String> {
    let command_line = fs::read(format!("/proc/{}/cmdline", process.pid)).ok()?;
    // Asked afterwards: then it was its command line.
    process.is_alive().then_some(server(&command_line)?.socket)
}

/// containerd puts a dot before a bundle's name, then removes it.
fn lives_in(directory: &str, bundle: &Bundle) -> bool {
    let directory = Path::new(directory.strip_suffix(REMOVED).unwrap_or(directory));
    let name = |path: &Path| path.file_name().map(|name| name.to_string_lossy().trim_start_matches('.').to_owned());
    directory.parent() == bundle.directory().parent() && name(directory) == name(bundle.directory())
}

/// What a server was told, if this is the command line of one.
fn server(command_line: &[u8]) -> Option<Flags> {
    let words = command_line.strip_suffix(b"\0").unwrap_or(command_line).split(|byte| *byte == 0).skip(1);
    let flags = Flags::parse(words.map(|word| String::from_utf8_lossy(word).into_owned()));
    (flags.action.is_empty() && !flags.socket.is_empty()).then_some(flags)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flags(id: &str) -> Flags {
        Flags { id: id.into(), namespace: "default".into(), ..Flags::default() }
    }

    #[test]
    fn server_is_known_by_its_command_line() {
        let line = b"/usr/bin/shim\0-namespace\0default\0-id\0c1\0-socket\0/run/s/x\0-group\0pod\0";
        let known = Flags { socket: "/run/s/x".into(), group: "pod".into(), ..flags("c1") };
        assert_eq!(server(line), Some(known));
    }

    #[test]
    fn start_and_delete_of_the_same_container_are_no_servers() {
        for line in
            [&b"shim\0-namespace\0default\0-id\0c1\0start\0"[..], b"shim\0-namespace\0default\0-id\0c1\0delete\0", b""]
        {
            assert_eq!(server(line), None);
        }
    }

    #[test]
    fn process_that_is_no_server_has_no_socket() {
        assert_eq!(socket(Process::running(std::process::id()).expect("we live")), None);
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
