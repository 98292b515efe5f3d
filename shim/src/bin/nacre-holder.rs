//! `nacre-holder ID ROOT NETWORK`: the process whose pid the host sees as the container's (ADR-0006).
//!
//! It runs nothing of the container. `/proc/PID/root` is the container's root file system as the host has it,
//! `/proc/PID/ns/net` the network namespace of the pod; `nerdctl cp`, `docker`, cAdvisor and CNI tools read both.
//!
//! ```text
//!   join or make the network namespace ──► chroot ──► take the container's name ──► say "ok" ──► wait for stdin to end
//! ```
//!
//! NETWORK is `new`, `host`, or the path of a namespace. Standard input is a pipe whose other end the shim holds: it
//! ends with the shim, however that ends, and so does the holder. Failure path: one line on standard output instead of
//! "ok", exit code 1.
#![forbid(unsafe_code)]

use std::{
    env,
    ffi::{OsStr, OsString},
    fs::File,
    io::{self, Read, Write},
    os::unix::ffi::OsStrExt,
    path::Path,
    process::ExitCode,
};

use nix::sched::{CloneFlags, setns, unshare};

fn main() -> ExitCode {
    let args: Vec<OsString> = env::args_os().skip(1).collect();
    let outcome = match args.as_slice() {
        [id, root, network] => hold(id, Path::new(root), network),
        _ => Err("usage: nacre-holder ID ROOT new|host|NETNS, started by the shim".to_owned()),
    };
    let text = outcome.as_ref().err().map_or("ok", String::as_str);
    let told = io::stdout().write_all(text.as_bytes()).and_then(|()| io::stdout().flush());
    if outcome.is_err() || told.is_err() || release_stdout().is_err() {
        return ExitCode::FAILURE;
    }
    let mut nothing = [0; 16];
    while !matches!(io::stdin().read(&mut nothing), Ok(0) | Err(_)) {}
    ExitCode::SUCCESS
}

fn hold(id: &OsStr, root: &Path, network: &OsStr) -> Result<(), String> {
    match network.as_bytes() {
        b"host" => {}
        b"new" => unshare(CloneFlags::CLONE_NEWNET).map_err(|errno| format!("make a network namespace: {errno}"))?,
        path => {
            let path = Path::new(OsStr::from_bytes(path));
            let namespace =
                File::open(path).map_err(|error| format!("open network namespace {}: {error}", path.display()))?;
            setns(namespace, CloneFlags::CLONE_NEWNET)
                .map_err(|errno| format!("join network namespace {}: {errno}", path.display()))?;
        }
    }
    env::set_current_dir(root).map_err(|error| format!("enter root {}: {error}", root.display()))?;
    rustix::process::chroot(".").map_err(|error| format!("make {} the root: {error}", root.display()))?;
    // Only a name: a container works without it.
    if let Ok(name) = std::ffi::CString::new(id.as_bytes()) {
        let _ = rustix::thread::set_name(&name);
    }
    Ok(())
}

/// The shim reads until standard output ends. The null device was opened by the shim as our standard error.
fn release_stdout() -> io::Result<()> {
    Ok(rustix::stdio::dup2_stdout(rustix::stdio::stderr())?)
}
