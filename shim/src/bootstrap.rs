//! The `start` action: leave a server behind and print where it listens.
//!
//! ```text
//!   flags + stdin ──► Launch ──► bind the socket ──┬─ ours ──────► spawn the server, write `address` and `shim.pid`
//!                                                  ├─ served ────► the pod has a server already: only print
//!                                                  └─ stale ─────► unlink, bind again, once
//! ```
//!
//! This program is executed for every container, so it does as little as it can: no runtime, no configuration, and
//! the spec is parsed only if it may name a group.
//!
//! # What containerd sends
//!
//! Up to 2.2 stdin holds the runtime options as an `Any`, or nothing. From 2.3 on it holds `BootstrapParams`, which
//! happens to decode as an `Any`, too (id as type, namespace as value). So it is decoded as `BootstrapParams` first and
//! believed only if it carries our own id and namespace.
//!
//! # What containerd reads
//!
//! Standard output and standard error together, until both are closed: the server inherits neither, and nothing but the
//! answer is printed. The answer is the bare address, which every version takes for "version 2, ttrpc".
//!
//! Failure paths: whatever fails after the bind removes the socket again; a server that was spawned before a file could
//! not be written is killed. Then exit code 1 and one line that says what, where and what to do.

use std::{
    env, fs,
    io::{self, Read},
    os::{
        fd::OwnedFd,
        unix::{
            net::{UnixListener, UnixStream},
            process::CommandExt,
        },
    },
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use config::Options;
use containerd_shim_protos::bootstrap_api::BootstrapParams;
use protobuf::{Message, well_known_types::any::Any};
use rustix::fs::Mode;
use sha2::{Digest, Sha256};

use crate::{
    bundle::{Bundle, SHIM_PID},
    flags::Flags,
    options, trace,
};

/// Where sockets go unless containerd says otherwise.
const SOCKET_DIRECTORY: &str = "/run/containerd/s";

/// The longest path that fits into a Unix address, with its terminator.
const SOCKET_PATH_MAX: usize = 106;

/// Largest input that is read from containerd, as containerd's own limit.
const INPUT_MAX: u64 = 10 << 20;

/// Where containerd takes events; also how the server learns it.
pub const TTRPC_ADDRESS: &str = "TTRPC_ADDRESS";

/// Why no server was started.
#[derive(Debug, thiserror::Error)]
pub enum BootstrapError {
    /// The command line lacks something.
    #[error("start needs -{0}; this program is meant to be called by containerd")]
    MissingFlag(&'static str),
    /// A file operation failed.
    #[error("{what} {}: {source}", path.display())]
    File {
        /// What was tried.
        what: &'static str,
        /// On which object.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// The socket's path does not fit.
    #[error("socket path {} is longer than {SOCKET_PATH_MAX} bytes; set a shorter socket directory in containerd", .0.display())]
    LongSocketPath(PathBuf),
    /// The server could not be spawned.
    #[error("cannot spawn the shim server {}: {source}", path.display())]
    Spawn {
        /// This program.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
}

/// What `start` was asked for, whatever version asked.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Launch {
    /// Where events go, if it is known.
    pub ttrpc_address: Option<String>,
    /// Where the socket is to be made, if containerd cares.
    pub socket_directory: Option<String>,
    /// containerd logs at debug level.
    pub debug: bool,
    /// What the operator wrote about this runtime (`ctr run --runtime-config-path`, CRI's and Docker's `options`).
    pub options: Options,
}

impl Launch {
    /// Makes sense of stdin. `ttrpc_address` is the environment's, which older daemons set.
    #[must_use]
    pub fn interpret(stdin: &[u8], flags: &Flags, ttrpc_address: Option<String>) -> Self {
        let mut legacy = Self { ttrpc_address, debug: flags.debug, ..Self::default() };
        if stdin.is_empty() {
            return legacy;
        }
        match BootstrapParams::parse_from_bytes(stdin) {
            Ok(params) if params.instance_id == flags.id && params.namespace == flags.namespace => Self {
                debug: flags.debug || params.log_level.value() < 0,
                ttrpc_address: Some(params.containerd_ttrpc_address)
                    .filter(|address| !address.is_empty())
                    .or(legacy.ttrpc_address),
                socket_directory: params.socket_dir.filter(|directory| !directory.is_empty()),
                options: params
                    .extensions
                    .iter()
                    .find_map(|extension| options::decode(&extension.value))
                    .unwrap_or_default(),
            },
            _ => {
                let options = Any::parse_from_bytes(stdin).ok().and_then(|any| options::decode(&any));
                legacy.options = options.unwrap_or_default();
                legacy
            }
        }
    }
}

/// The whole action. The result is what goes to standard output.
pub fn start(flags: &Flags) -> Result<String, BootstrapError> {
    trace::mark("shim_start", &flags.id);
    if flags.id.is_empty() {
        return Err(BootstrapError::MissingFlag("id"));
    }
    if flags.namespace.is_empty() {
        return Err(BootstrapError::MissingFlag("namespace"));
    }
    let launch = Launch::interpret(&input(), flags, env::var(TTRPC_ADDRESS).ok());
    let directory =
        env::current_dir().map_err(file("find the bundle, which is the working directory,", Path::new(".")))?;
    let bundle = Bundle::new(directory);
    let config = bundle.path(crate::bundle::CONFIG);
    let group = bundle.group().map_err(file("read the OCI spec", &config))?;
    let socket = socket_path(&launch, flags, group.as_deref().unwrap_or(&flags.id))?;
    let address = format!("unix://{}", socket.display());
    if let Some(listener) = listen(&socket)? {
        let undo = |error| {
            let _ = fs::remove_file(&socket);
            error
        };
        leave_options(&bundle, &launch.options).map_err(undo)?;
        let mut server = spawn_server(&launch, flags, group.as_deref(), &socket, listener).map_err(undo)?;
        if let Err(error) = leave_traces(&bundle, &address, &server) {
            let _ = server.kill();
            return Err(undo(error));
        }
    } else {
        bundle.write_address(&address).map_err(file("write the address into", bundle.directory()))?;
    }
    Ok(address)
}

fn input() -> Vec<u8> {
    let mut bytes = Vec::new();
    // A closed or unreadable stdin is what older daemons give us instead of an empty one.
    let _ = io::stdin().lock().take(INPUT_MAX).read_to_end(&mut bytes);
    bytes
}

/// By convention the name is the hash of containerd's address, the namespace and the group.
fn socket_path(launch: &Launch, flags: &Flags, group: &str) -> Result<PathBuf, BootstrapError> {
    let digest = Sha256::digest(format!("{}/{}/{group}", flags.address, flags.namespace));
    let name: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
    let path = Path::new(launch.socket_directory.as_deref().unwrap_or(SOCKET_DIRECTORY)).join(name);
    if path.as_os_str().len() > SOCKET_PATH_MAX {
        return Err(BootstrapError::LongSocketPath(path));
    }
    Ok(path)
}

/// Binds `socket`. `None`: a server of our group listens on it.
fn listen(socket: &Path) -> Result<Option<UnixListener>, BootstrapError> {
    // Only root may speak to the server.
    rustix::process::umask(Mode::from_raw_mode(0o077));
    let mut bound = UnixListener::bind(socket);
    if let Err(error) = &bound {
        match error.kind() {
            io::ErrorKind::AddrInUse if UnixStream::connect(socket).is_ok() => return Ok(None),
            // Left behind by a server that was killed.
            io::ErrorKind::AddrInUse => {
                fs::remove_file(socket).map_err(file("remove the stale socket", socket))?;
            }
            io::ErrorKind::NotFound => {
                let directory = socket.parent().unwrap_or(socket);
                fs::create_dir_all(directory).map_err(file("create the socket directory", directory))?;
            }
            _ => {}
        }
        bound = UnixListener::bind(socket);
    }
    bound.map(Some).map_err(file("bind the socket", socket))
}

/// Executes this program again as the server. It gets the listening socket as its standard input and none of our
/// outputs; it is not waited for, so it becomes a child of init (or of the nearest subreaper).
fn spawn_server(
    launch: &Launch,
    flags: &Flags,
    group: Option<&str>,
    socket: &Path,
    listener: UnixListener,
) -> Result<Child, BootstrapError> {
    let program = env::current_exe().map_err(file("find this program at", Path::new("/proc/self/exe")))?;
    let mut command = Command::new(&program);
    command.arg("-namespace").arg(&flags.namespace).arg("-id").arg(&flags.id).arg("-socket").arg(socket);
    if let Some(group) = group {
        command.arg("-group").arg(group);
    }
    if launch.debug {
        command.arg("-debug");
    }
    if let Some(address) = &launch.ttrpc_address {
        command.env(TTRPC_ADDRESS, address);
    }
    command.stdin(OwnedFd::from(listener)).stdout(Stdio::null()).stderr(Stdio::null());
    // Own process group: a signal to containerd's group is not meant for the pod.
    command.process_group(0).spawn().map_err(|source| BootstrapError::Spawn { path: program, source })
}

/// The server reads them there, and so does whoever wants to know later.
fn leave_options(bundle: &Bundle, options: &Options) -> Result<(), BootstrapError> {
    if options.is_empty() {
        return Ok(());
    }
    options.write(bundle.directory()).map_err(file("leave the runtime options in", bundle.directory()))
}

fn leave_traces(bundle: &Bundle, address: &str, server: &Child) -> Result<(), BootstrapError> {
    bundle.record(SHIM_PID, server.id()).map_err(file("record the server in", bundle.directory()))?;
    bundle.write_address(address).map_err(file("write the address into", bundle.directory()))?;
    spare_from_oom(server.id());
    Ok(())
}

/// The kernel should prefer the server to containerd by one point, and to nothing else. Best effort: a container
/// works without it.
fn spare_from_oom(server: u32) {
    let parent = format!("/proc/{}/oom_score_adj", std::os::unix::process::parent_id());
    let score = fs::read_to_string(parent).ok().and_then(|text| text.trim().parse::<i32>().ok());
    if let Some(score) = score {
        let _ = fs::write(format!("/proc/{server}/oom_score_adj"), (score + 1).min(1000).to_string());
    }
}

fn file(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> BootstrapError {
    move |source| BootstrapError::File { what, path: path.to_owned(), source }
}

#[cfg(test)]
mod tests {
    use config::Options;
    use containerd_shim_protos::bootstrap_api::Extension;
    use protobuf::{EnumOrUnknown, MessageField};

    use super::*;

    fn flags() -> Flags {
        Flags {
            id: "c1".into(),
            namespace: "default".into(),
            address: "/run/containerd/containerd.sock".into(),
            ..Flags::default()
        }
    }

    fn params() -> BootstrapParams {
        BootstrapParams {
            instance_id: "c1".into(),
            namespace: "default".into(),
            containerd_ttrpc_address: "/new.ttrpc".into(),
            socket_dir: Some("/run/s".into()),
            log_level: EnumOrUnknown::from_i32(-4),
            ..BootstrapParams::default()
        }
    }

    #[test]
    fn empty_stdin_leaves_flags_and_environment() {
        let launch = Launch::interpret(&[], &flags(), Some("/old.ttrpc".into()));
        assert_eq!(launch, Launch { ttrpc_address: Some("/old.ttrpc".into()), ..Launch::default() });
    }

    #[test]
    fn bootstrap_params_of_our_own_win_over_the_environment() {
        let bytes = params().write_to_bytes().expect("encodes");
        let launch = Launch::interpret(&bytes, &flags(), Some("/old.ttrpc".into()));
        let expected = Launch {
            ttrpc_address: Some("/new.ttrpc".into()),
            socket_directory: Some("/run/s".into()),
            debug: true,
            options: Options::default(),
        };
        assert_eq!(launch, expected);
    }

    #[test]
    fn bootstrap_params_do_parse_as_any_which_is_why_any_comes_second() {
        let bare =
            BootstrapParams { instance_id: "c1".into(), namespace: "default".into(), ..BootstrapParams::default() };
        let any = Any::parse_from_bytes(&bare.write_to_bytes().expect("encodes")).expect("parses as Any");
        assert_eq!((any.type_url.as_str(), any.value.as_slice()), ("c1", b"default".as_slice()));
    }

    #[test]
    fn runtime_options_are_not_taken_for_bootstrap_params() {
        let any = Any { type_url: "runtimeoptions.v1.Options".into(), value: vec![1, 2, 3], ..Any::default() };
        let launch = Launch::interpret(&any.write_to_bytes().expect("encodes"), &flags(), Some("/old.ttrpc".into()));
        assert_eq!(launch.ttrpc_address.as_deref(), Some("/old.ttrpc"));
    }

    #[test]
    fn configuration_file_is_found_in_the_options_of_either_form() {
        // type_url = 1: "t", config_path = 2: "/c"
        let value = vec![0x0a, 1, b't', 0x12, 2, b'/', b'c'];
        let any = Any { type_url: "runtimeoptions.v1.Options".into(), value, ..Any::default() };
        let launch = Launch::interpret(&any.write_to_bytes().expect("encodes"), &flags(), None);
        assert_eq!(launch.options.config_path, "/c");
        let foreign = Any { type_url: "containerd.runc.v1.Options".into(), ..any.clone() };
        let extensions = [foreign, any].map(|any| Extension { value: MessageField::some(any), ..Extension::default() });
        let new = BootstrapParams { extensions: extensions.into(), ..params() };
        let launch = Launch::interpret(&new.write_to_bytes().expect("encodes"), &flags(), None);
        assert_eq!(launch.options.config_path, "/c");
    }

    #[test]
    fn garbage_on_stdin_is_survived() {
        let launch = Launch::interpret(&[0xff; 64], &flags(), None);
        assert_eq!(launch, Launch::default());
    }

    #[test]
    fn socket_name_is_the_conventional_hash() {
        let flags = Flags { id: "123".into(), ..flags() };
        let path = socket_path(&Launch::default(), &flags, "123").expect("short enough");
        let name = "0ddfbd72d02b3551e75f3a0ed90b9965b533401be618f43a568bc522764e0ad0";
        assert_eq!(path, Path::new(SOCKET_DIRECTORY).join(name));
        let long = Launch { socket_directory: Some("/x".repeat(40)), ..Launch::default() };
        assert!(matches!(socket_path(&long, &flags, "123"), Err(BootstrapError::LongSocketPath(_))));
    }

    #[test]
    fn stale_socket_is_replaced_and_a_live_one_is_joined() {
        let directory = tempfile::tempdir().expect("temporary directory");
        let socket = directory.path().join("new/s");
        let first = listen(&socket).expect("binds").expect("is ours");
        assert!(listen(&socket).expect("joins").is_none());
        drop(first);
        assert!(listen(&socket).expect("binds again").is_some());
    }
}
