//! The recipe of Create, read from top to bottom, and its undoing.
//!
//! ```text
//!   refuse what we cannot do ─► take the id ─► read the spec ─► mount the root, start the holder   (host, while the VM boots)
//!       ─► open stdio ─► attach shares ─► ask the agent ─► Created: event, watcher
//! ```
//!
//! Whatever fails, [`Remains`] holds exactly what has been made so far and removes it; the id is free again. The recipe
//! is run to its end even if the caller goes away (see `service`): a container is whole or it does not exist.

use std::{
    io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, atomic::Ordering},
};

use agent_proto::{CreateContainerRequest, ShareMount, Stdio};
use config::Options;
use containerd_shim_protos::{
    events::task::{TaskCreate, TaskIO},
    types::mount::Mount,
};
use protobuf::MessageField;
use rustix::fs::{Mode, OFlags, open};
use share_mount::Access;
use tokio::{sync::watch, task::spawn_blocking};
use vmm_api::ShareName;

use super::{State, Step, Task, Tasks};
use crate::{
    bundle::{Bundle, HOLDER_PID, ROOTFS, SHIM_PID, VMM_PID},
    cgroup::Cgroup,
    engine::Sandbox,
    error::TaskError,
    holder::Holder,
    io::{Ends, Slot, Streams},
    locked,
    rootfs::{Mounted, mount_all},
    spec::{BindMount, Spec},
    trace,
};

/// The names that containerd gave to the standard streams; empty means none.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StdioNames {
    /// Read by the container.
    pub stdin: String,
    /// Written by it.
    pub stdout: String,
    /// Written by it.
    pub stderr: String,
}

/// What Create is asked for.
#[derive(Debug, Clone, Default)]
pub struct Create {
    /// The container's id.
    pub id: String,
    /// Its bundle.
    pub bundle: PathBuf,
    /// How to mount its root; empty if it is mounted already.
    pub rootfs: Vec<Mount>,
    /// Its streams.
    pub stdio: StdioNames,
    /// A terminal instead of streams.
    pub terminal: bool,
    /// Restore instead of create.
    pub checkpoint: String,
    /// Runtime options, if there are any for us.
    pub options: Option<Options>,
}

/// What a container has on the host. Fields are removed from first to last.
#[derive(Default)]
pub(super) struct Remains {
    streams: Option<Arc<Streams>>,
    shares: Vec<ShareName>,
    holder: Option<Holder>,
    mounted: Option<Mounted>,
    cgroup: Option<Cgroup>,
}

/// What the host's part of the recipe yields.
struct Prepared {
    spec: Vec<u8>,
    root: BindMount,
    volumes: Vec<BindMount>,
    holder: Holder,
    mounted: Mounted,
    cgroup: Option<Cgroup>,
}

impl Remains {
    /// Removes everything. Nothing here can fail in a way that the next step could not cope with. The cgroup comes back if
    /// the VMM is in it.
    pub(super) async fn remove<S: Sandbox>(mut self, sandbox: &S) -> Option<Cgroup> {
        if let Some(streams) = self.streams.take() {
            streams.close().await;
        }
        for name in self.shares.drain(..) {
            if let Err(error) = sandbox.detach(name).await {
                log::debug!("detach: {error}");
            }
        }
        // Blocking: a kill and a wait, then unmounts. The holder's root is in the mount, so it goes first.
        let (holder, mounted, cgroup) = (self.holder.take(), self.mounted.take(), self.cgroup.take());
        let removed = spawn_blocking(move || {
            drop(holder);
            drop(mounted);
            cgroup.and_then(Cgroup::leave)
        });
        removed.await.ok().flatten()
    }
}

impl<S: Sandbox> Tasks<S> {
    /// Creates a container; its pid.
    pub async fn create(self: &Arc<Self>, request: Create) -> Result<u32, TaskError> {
        if request.terminal {
            return Err(TaskError::Unimplemented(
                "terminal=true: terminals are not supported yet; run without -t".into(),
            ));
        }
        if !request.checkpoint.is_empty() {
            return Err(TaskError::Unimplemented(
                "checkpoint: a VM's container cannot be restored from CRIU images".into(),
            ));
        }
        if request.options.as_ref().is_some_and(|options| *options != self.asked.options) {
            // The operator may have changed them since the pod was started, and its containers must still restart.
            log::warn!(
                "the runtime options of container {} are not those that the pod's VM was built with; they are ignored",
                request.id
            );
        }
        let task = self.reserve(&request)?;
        // Nobody can contend for a new task's turn before it is in the table with it taken.
        let _turn = task.turn.lock().await;
        let mut remains = Remains::default();
        match self.build(&task, &request, &mut remains).await {
            Ok(pid) => {
                *locked(&task.remains) = Some(remains);
                self.announce(&task, request);
                tokio::spawn(self.clone().watch(task.clone()));
                Ok(pid)
            }
            Err(error) => {
                let lingering = remains.remove(&*self.sandbox).await;
                locked(&self.lingering).extend(lingering);
                task.bundle.forget(HOLDER_PID);
                task.step(Step::Removed);
                locked(&self.table).remove(&request.id);
                Err(error)
            }
        }
    }

    fn reserve(&self, request: &Create) -> Result<Arc<Task>, TaskError> {
        let mut table = locked(&self.table);
        if table.contains_key(&request.id) {
            return Err(TaskError::AlreadyExists(request.id.clone()));
        }
        let task = Arc::new(Task {
            id: request.id.clone(),
            bundle: Bundle::new(&request.bundle),
            stdio: request.stdio.clone(),
            state: Mutex::new(State::Creating),
            turn: tokio::sync::Mutex::default(),
            pid: 0.into(),
            exit: watch::Sender::new(None),
            streams: Mutex::default(),
            remains: Mutex::default(),
        });
        table.insert(request.id.clone(), task.clone());
        Ok(task)
    }

    async fn build(&self, task: &Task, request: &Create, remains: &mut Remains) -> Result<u32, TaskError> {
        let StdioNames { stdin, stdout, stderr } = &request.stdio;
        let ends = Ends::open(stdin, stdout, stderr).await?;
        let (bundle, rootfs) = (task.bundle.clone(), request.rootfs.clone());
        let (holder, id, asked) = (self.holder.clone(), request.id.clone(), self.asked.annotations.clone());
        let prepared = spawn_blocking(move || {
            let spec = Spec::read(&bundle)?;
            spec.must_fit(&asked)?;
            prepare(&spec, &bundle, &rootfs, &holder, &id)
        });
        let prepared = prepared.await;
        let Prepared { spec, root, volumes, holder, mounted, cgroup } =
            prepared.map_err(|_cancelled| TaskError::Invalid("the shim is shutting down".into()))??;
        let pid = holder.pid();
        task.pid.store(pid, Ordering::Relaxed);
        (remains.holder, remains.mounted, remains.cgroup) = (Some(holder), Some(mounted), cgroup);
        let root_share = self.attach("r", root, remains).await?;
        let mut share_mounts = Vec::with_capacity(volumes.len());
        for volume in volumes {
            let mount_index = volume.index;
            let share = self.attach("v", volume, remains).await?;
            share_mounts.push(ShareMount { mount_index, share, ..ShareMount::default() });
        }
        let stdio = self.connect(task, ends, remains);
        let request = CreateContainerRequest {
            id: request.id.clone(),
            spec,
            root_share,
            share_mounts,
            stdio: MessageField::some(stdio),
            ..CreateContainerRequest::default()
        };
        self.sandbox.create(request).await?;
        trace::mark("created", &task.id);
        Ok(pid)
    }

    /// Attaches one directory or file under a name that no other container of the pod has.
    async fn attach(&self, prefix: &str, source: BindMount, remains: &mut Remains) -> Result<String, TaskError> {
        let name = format!("{prefix}{}", self.shares.fetch_add(1, Ordering::Relaxed));
        let share = ShareName::new(name.clone()).map_err(|error| TaskError::Invalid(error.to_string()))?;
        self.sandbox.attach(share.clone(), source.source, source.read_only).await?;
        remains.shares.push(share);
        Ok(name)
    }

    /// Starts the pumps and says on which ports their streams are expected; 0 where there is none.
    fn connect(&self, task: &Task, ends: Ends, remains: &mut Remains) -> Stdio {
        let present = ends.present();
        let expect = |wanted: bool| -> (u32, Option<Slot>) {
            if !wanted {
                return (0, None);
            }
            let (port, slot) = self.sandbox.expect_stream();
            (port, Some(slot))
        };
        let (stdin_port, stdin) = expect(present.stdin);
        let (stdout_port, stdout) = expect(present.stdout);
        let (stderr_port, stderr) = expect(present.stderr);
        let streams = Arc::new(Streams::start(ends, stdin, stdout, stderr));
        *locked(&task.streams) = Some(streams.clone());
        remains.streams = Some(streams);
        Stdio { stdin_port, stdout_port, stderr_port, ..Stdio::default() }
    }

    fn announce(&self, task: &Task, request: Create) {
        task.step(Step::Prepared);
        let StdioNames { stdin, stdout, stderr } = request.stdio;
        let io = TaskIO { stdin, stdout, stderr, ..TaskIO::default() };
        self.events.push(&TaskCreate {
            container_id: request.id,
            bundle: request.bundle.display().to_string(),
            rootfs: request.rootfs,
            io: MessageField::some(io),
            pid: task.pid(),
            ..TaskCreate::default()
        });
    }
}

/// The host's part: it blocks, and needs no VM.
fn prepare(spec: &Spec, bundle: &Bundle, rootfs: &[Mount], holder: &Path, id: &str) -> Result<Prepared, TaskError> {
    let for_guest = spec.for_guest()?;
    let volumes = spec.bind_mounts(bundle)?;
    let (path, mounted) = if rootfs.is_empty() {
        (spec.root(bundle)?, Mounted::default())
    } else {
        let path = bundle.path(ROOTFS);
        let mounted = mount_all(rootfs, &path)?;
        (path, mounted)
    };
    let opened = open(&path, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty());
    let opened = opened.map_err(|errno| TaskError::Root { path: path.clone(), source: errno.into() })?;
    // A root that is mounted already may have mounts of its own in it, as runc's would.
    let source = share_mount::detach(&opened, &path, Access { read_only: false, recursive: true });
    let source = source.map_err(|error| TaskError::Root { path: path.clone(), source: io::Error::other(error) })?;
    let holder = Holder::spawn(holder, id, &path, &spec.network())?;
    // For `delete`. A bundle that cannot be written to has bigger problems, which containerd will report.
    for (name, pid) in [(HOLDER_PID, holder.pid()), (SHIM_PID, std::process::id())] {
        if let Err(error) = bundle.record(name, pid) {
            log::warn!("cannot write {name} into {}: {error}", bundle.directory().display());
        }
    }
    // The VMM's record is in the bundle of the pod's first container.
    let vmm = bundle.recorded(VMM_PID).map(|vmm| vmm.pid);
    let pids: Vec<u32> = vmm.into_iter().chain([holder.pid()]).collect();
    let cgroup = Cgroup::enter(spec.cgroups_path(), bundle, &pids);
    let root = BindMount { index: 0, source, read_only: false };
    Ok(Prepared { spec: for_guest, root, volumes, holder, mounted, cgroup })
}
