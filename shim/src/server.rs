//! The long-lived process: one per pod, spawned by `start` with the listening socket as its standard input.
//!
//! ```text
//!   serve: quiet ─► own mount namespace ─► configuration ─► VMM spawned ─► runtime ─► answers containerd ─► Shutdown
//! ```
//!
//! The order is forced: a namespace can be entered by a single thread only, everything that is spawned must be in it, and
//! the VM should boot while containerd is still on its way to Create. What fails on the way is not fatal here: `start` has
//! promised an address, so the server answers, and Create says what is wrong.
//!
//! It outlives containerd: SIGTERM, SIGINT and SIGHUP, which a service manager sends to everything in a unit, are blocked.
//! It ends by Shutdown with no container left, by `delete`'s SIGKILL, or when it finds itself without any container after
//! [`ORPHANED`], or without any container and without its bundle. Then the VM is stopped, and the socket and our files in the bundle are removed, before
//! containerd gets its answer.

use std::{
    fs, io,
    os::{fd::AsFd, unix::net::UnixListener},
    path::Path,
    process::ExitCode,
    sync::Arc,
    time::Duration,
};

use config::{Asked, Effective, Spec};
use nix::sys::signal::{SigSet, Signal};
use rustix::fs::{Mode, OFlags, open};
use tokio::time::{sleep, timeout};
use ttrpc::asynchronous::{Server, transport::Listener};

use crate::{
    bootstrap::TTRPC_ADDRESS,
    bundle::{ADDRESS, Bundle, CONFIG, LOG, VMM_PID},
    engine::{
        Sandbox,
        kvm::{self, Kvm, Launched},
    },
    events::{Queue, publish},
    flags::Flags,
    logger, rootfs,
    service::{Ending, TaskService},
    task::Tasks,
    trace,
};

/// A server without a single container for this long has been forgotten, by a containerd that died.
const ORPHANED: Duration = Duration::from_secs(120);

/// How often a server without a container looks whether its bundle is still there. containerd may remove the bundle and
/// fail to execute `delete`, which it does in that directory.
const LOOK: Duration = Duration::from_secs(2);

/// How long the last events may take to reach containerd.
const FLUSH: Duration = Duration::from_secs(1);

/// How long connections may take to close.
const FAREWELL: Duration = Duration::from_secs(1);

/// Why there is no server.
#[derive(Debug, thiserror::Error)]
enum ServeError {
    #[error("standard input is not a listening socket; this program is started by containerd: {0}")]
    Listener(io::Error),
    #[error("cannot start the runtime: {0}")]
    Runtime(io::Error),
    #[error("cannot serve: {0}")]
    Serve(#[from] ttrpc::Error),
}

/// The whole life of the server. The working directory is the bundle.
pub fn serve(flags: &Flags) -> ExitCode {
    trace::mark("server", &flags.id);
    let bundle = Bundle::new(std::env::current_dir().unwrap_or_else(|_| ".".into()));
    match run(flags, &bundle) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            log::error!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn run(flags: &Flags, bundle: &Bundle) -> Result<(), ServeError> {
    be_quiet();
    let listener = take_listener().map_err(ServeError::Listener)?;
    logger::install(&bundle.path(LOG), &flags.id);
    let isolated = rootfs::isolate().map_err(|error| error.to_string());
    let asked = Asked::in_bundle(bundle.directory());
    let effective = asked.as_ref().map_err(ToString::to_string).and_then(|asked| {
        let effective = config::load(asked);
        effective.map_err(|error| error.to_string())
    });
    let effective = isolated.and(effective);
    let launched = effective.as_ref().map_err(String::clone).and_then(|known| launch(&known.spec, bundle, flags));
    let asked = asked.unwrap_or_default();
    let spec = &match &effective {
        Ok(effective) => effective.spec.clone(),
        // Where to log is the operator's word, also when the pod asked for what it may not have.
        Err(_) => config::load(&asked.operators()).unwrap_or_default().spec,
    };
    // After the launch: the log file must not keep the VM waiting.
    logger::configure(&spec.shim, &flags.namespace, &flags.id);
    if let Ok(effective) = &effective {
        tell(effective);
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(ServeError::Runtime)?;
    let outcome = runtime.block_on(answer(flags, bundle, listener, spec, asked, launched));
    // Not dropped: a blocking call into a hung file system must not keep a finished process alive.
    runtime.shutdown_background();
    logger::finish(&spec.shim);
    outcome
}

/// What whoever reads the log asks first.
fn tell(effective: &Effective) {
    log::info!("settings: {}", effective.summary());
    if !effective.ignored.is_empty() {
        log::info!("runtime options that are not Nacre's: {}; ignored", effective.ignored.join(", "));
    }
}

/// Ignores what a service manager sends to a whole unit. Blocking is inherited by every thread; spawned programs start
/// with an empty mask.
fn be_quiet() {
    let signals: SigSet = [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP].into_iter().collect();
    let _ = signals.thread_block();
}

/// Takes the socket off standard input, where nothing that we spawn shall find it.
fn take_listener() -> io::Result<UnixListener> {
    let socket = io::stdin().as_fd().try_clone_to_owned()?;
    // Fails on anything that does not listen.
    if !rustix::net::sockopt::socket_acceptconn(&socket)? {
        return Err(io::ErrorKind::NotConnected.into());
    }
    let null = open("/dev/null", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    rustix::stdio::dup2_stdin(null)?;
    Ok(UnixListener::from(socket))
}

fn launch(spec: &Spec, bundle: &Bundle, flags: &Flags) -> Result<Launched, String> {
    let launched = kvm::launch(spec).map_err(|error| error.to_string())?;
    trace::mark("vmm_spawned", &flags.id);
    if let Err(error) = bundle.record(VMM_PID, launched.pid()) {
        log::warn!("cannot write {VMM_PID} into {}: {error}", bundle.directory().display());
    }
    Ok(launched)
}

async fn answer(
    flags: &Flags,
    bundle: &Bundle,
    listener: UnixListener,
    spec: &Spec,
    asked: Asked,
    launched: Result<Launched, String>,
) -> Result<(), ServeError> {
    let sandbox = match launched {
        Ok(launched) => Kvm::adopt(&flags.id, launched, spec.shim.boot_timeout),
        Err(why) => {
            log::error!("no VM: {why}");
            Kvm::failed(&flags.id, &why)
        }
    };
    let (events, items) = Queue::new(&flags.namespace);
    tokio::spawn(publish(items, std::env::var(TTRPC_ADDRESS).ok().filter(|address| !address.is_empty())));
    let holder = spec.paths.holder.clone();
    let tasks = Tasks::new(sandbox.clone(), events.clone(), holder, asked, !flags.group.is_empty());
    let ending = Arc::new(Ending::default());
    let listener = Listener::try_from(listener).map_err(ServeError::Listener)?;
    let mut server = Server::new().add_listener(listener).register_service(TaskService::register(&tasks, &ending));
    server.start().await?;
    until_the_end(&tasks, &ending, bundle).await;
    // New containers of the group must find no socket rather than a dying server.
    let _ = fs::remove_file(Path::new(&flags.socket));
    sandbox.stop().await;
    tasks.leave_cgroups();
    for name in [VMM_PID, ADDRESS] {
        bundle.forget(name);
    }
    bundle.record_end();
    events.flush(FLUSH).await;
    ending.answer();
    let _ = timeout(FAREWELL, server.shutdown()).await;
    Ok(())
}

async fn until_the_end<S: Sandbox>(tasks: &Arc<Tasks<S>>, ending: &Ending, bundle: &Bundle) {
    let mut alone = Duration::ZERO;
    loop {
        // A pod with containers is not woken up for this.
        let pause = if tasks.is_empty() { LOOK } else { ORPHANED };
        tokio::select! {
            () = ending.asked.notified() => {}
            () = sleep(pause) => {
                alone = if tasks.is_empty() { alone + LOOK } else { Duration::ZERO };
                if alone >= ORPHANED || (!alone.is_zero() && !bundle.path(CONFIG).exists()) {
                    return log::error!("no container, and no Shutdown for {} s; giving up", alone.as_secs());
                }
                continue;
            }
        }
        // A container may have come between the question and now: then Shutdown is answered, and nothing happens.
        if tasks.may_end() {
            return;
        }
        ending.answer();
    }
}
