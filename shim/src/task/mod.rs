//! The verbs of the task service, plain: no ttrpc, no protobuf replies.
//!
//! * Each task has a state ([`state`], behind a plain lock that is never held across an await) and a *turn*: an async
//!   lock that create, start, exit and delete hold from their first step to their event. So events of one task are in
//!   order, and an exit that comes while Start is under way is reported after the start.
//! * State, Pids, Connect and Wait never take the turn and never ask the guest: a guest that hangs cannot make containerd
//!   take its shim for dead.
//! * Locks of the table are held only to look up or change an entry.
//! * Exit is reported once: by the watcher that Create leaves behind, or by a Start that failed, whoever takes the state
//!   to Stopped. The watcher first lets every byte of output be delivered.
//! * A machine that ends takes its containers with it: their watchers report 137, and Delete and Shutdown go on without
//!   a guest.

mod create;
pub mod state;
#[cfg(test)]
mod tests;

use std::{
    collections::HashMap,
    path::PathBuf,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, Ordering},
    },
};

use config::Asked;
use containerd_shim_protos::events::task::{TaskDelete, TaskExit, TaskPaused, TaskResumed, TaskStart};
use protobuf::MessageField;
use tokio::sync::watch;

pub use create::{Create, StdioNames};
use state::{Exit, State, Step};

use crate::{
    bundle::Bundle,
    cgroup::Cgroup,
    cleanup::{KILLED, timestamp},
    engine::{EngineError, Sandbox},
    error::TaskError,
    events::Queue,
    guest::{GuestError, Refusal},
    io::Streams,
    locked, trace,
};

/// The largest signal number of Linux.
const SIGNAL_MAX: u32 = 64;

/// Exit status of a container about which nothing better is known.
const UNKNOWN: u32 = 255;

/// Signal 9.
const SIGKILL: u32 = 9;

/// One container.
struct Task {
    id: String,
    bundle: Bundle,
    stdio: StdioNames,
    state: Mutex<State>,
    turn: tokio::sync::Mutex<()>,
    pid: AtomicU32,
    exit: watch::Sender<Option<Exit>>,
    streams: Mutex<Option<Arc<Streams>>>,
    /// What Create made on the host; taken by whoever removes it.
    remains: Mutex<Option<create::Remains>>,
}

/// What State answers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Status {
    /// Where it is.
    pub state: State,
    /// The holder's pid.
    pub pid: u32,
    /// The bundle's directory.
    pub bundle: PathBuf,
    /// The names of its streams.
    pub stdio: StdioNames,
}

/// The containers of one pod.
pub struct Tasks<S> {
    sandbox: Arc<S>,
    events: Queue,
    /// The holder's program.
    holder: PathBuf,
    /// What the machine was built for.
    asked: Asked,
    /// Set if further containers may join this pod.
    grouped: bool,
    table: Mutex<HashMap<String, Arc<Task>>>,
    shares: AtomicU32,
    /// Cgroups of deleted containers that the VMM is still in.
    lingering: Mutex<Vec<Cgroup>>,
}

impl Task {
    fn state(&self) -> State {
        *locked(&self.state)
    }

    fn step(&self, step: Step) -> Option<State> {
        let mut state = locked(&self.state);
        let next = state.after(step)?;
        *state = next;
        Some(next)
    }

    /// Refuses `verb` unless the task is in the one state where it is legal.
    fn demand(&self, wanted: State, verb: &'static str) -> Result<(), TaskError> {
        match self.state() {
            state if state == wanted => Ok(()),
            State::Gone => Err(TaskError::NotFound(self.id.clone())),
            state => Err(TaskError::Precondition { verb, id: self.id.clone(), state: state.name() }),
        }
    }

    fn pid(&self) -> u32 {
        self.pid.load(Ordering::Relaxed)
    }
}

impl<S: Sandbox> Tasks<S> {
    /// No containers yet.
    #[must_use]
    pub fn new(sandbox: Arc<S>, events: Queue, holder: PathBuf, asked: Asked, grouped: bool) -> Arc<Self> {
        let (table, shares, lingering) = (Mutex::default(), AtomicU32::new(0), Mutex::default());
        Arc::new(Self { sandbox, events, holder, asked, grouped, table, shares, lingering })
    }

    /// Removes the cgroups that the VMM was in. To be called when it is gone.
    pub fn leave_cgroups(&self) {
        let left: Vec<_> = locked(&self.lingering).drain(..).filter_map(Cgroup::leave).collect();
        if !left.is_empty() {
            log::warn!("a process is left in the cgroups {left:?}");
        }
    }

    /// Lets a created container run; its pid.
    pub async fn start(&self, id: &str) -> Result<u32, TaskError> {
        let task = self.find(id)?;
        let _turn = task.turn.lock().await;
        task.demand(State::Created, "start")?;
        match self.sandbox.start(id).await {
            Ok(()) => {
                task.step(Step::Started);
                trace::mark("started", id);
                self.events.push(&TaskStart { container_id: id.to_owned(), pid: task.pid(), ..TaskStart::default() });
                Ok(task.pid())
            }
            Err(error) => {
                // The agent's refusal is final: init is gone, and clients delete only what has stopped. Without an
                // answer nothing is known; with the machine ended the watcher reports.
                if let EngineError::Guest(GuestError::Refused { text, .. }) = &error {
                    self.report_exit(&task, Exit::now(status_of_failed_exec(text)));
                }
                Err(error.into())
            }
        }
    }

    /// Signals a container.
    pub async fn kill(&self, id: &str, signal: u32, all: bool) -> Result<(), TaskError> {
        let task = self.find(id)?;
        if signal > SIGNAL_MAX {
            return Err(TaskError::Invalid(format!("signal {signal} does not exist; the largest is {SIGNAL_MAX}")));
        }
        match task.state() {
            State::Created | State::Running | State::Paused => {}
            State::Stopped(_) => return Err(TaskError::Finished(id.to_owned())),
            state => return Err(TaskError::Precondition { verb: "kill", id: id.to_owned(), state: state.name() }),
        }
        match self.sandbox.signal(id, signal, all).await {
            Err(EngineError::Guest(GuestError::Refused { refusal: Refusal::NotFound, .. })) => {
                Err(TaskError::Finished(id.to_owned()))
            }
            // The machine is gone and the exit is on its way.
            Err(EngineError::NotStarted(_) | EngineError::Ended(_)) => Err(TaskError::Finished(id.to_owned())),
            // SIGKILL must work. A guest whose agent does not answer is beyond help.
            Err(error @ EngineError::Guest(GuestError::Deadline { .. })) if signal == SIGKILL => {
                log::error!("killing the VM: {error}");
                self.sandbox.kill(&format!("killed, because {error}"));
                Ok(())
            }
            other => Ok(other?),
        }
    }

    /// Stops a container's processes where they are.
    pub async fn pause(&self, id: &str) -> Result<(), TaskError> {
        let task = self.find(id)?;
        let _turn = task.turn.lock().await;
        task.demand(State::Running, "pause")?;
        self.sandbox.pause(id).await?;
        // It may have ended meanwhile: its exit is then on its way, and waits for the turn.
        task.step(Step::Paused);
        self.events.push(&TaskPaused { container_id: id.to_owned(), ..TaskPaused::default() });
        Ok(())
    }

    /// Lets them go on.
    pub async fn resume(&self, id: &str) -> Result<(), TaskError> {
        let task = self.find(id)?;
        let _turn = task.turn.lock().await;
        task.demand(State::Paused, "resume")?;
        self.sandbox.resume(id).await?;
        task.step(Step::Resumed);
        self.events.push(&TaskResumed { container_id: id.to_owned(), ..TaskResumed::default() });
        Ok(())
    }

    /// Removes a container that does not run; its pid and how it ended.
    pub async fn delete(&self, id: &str) -> Result<(u32, Exit), TaskError> {
        let task = self.find(id)?;
        let _turn = task.turn.lock().await;
        let exit = match task.state() {
            State::Created => Exit::now(KILLED),
            State::Stopped(exit) => exit,
            // A Create that failed, or another Delete, was faster.
            State::Gone => return Err(TaskError::NotFound(id.to_owned())),
            state => return Err(TaskError::Precondition { verb: "delete", id: id.to_owned(), state: state.name() }),
        };
        if let Err(error) = self.sandbox.delete(id).await {
            log::warn!("container {id} is removed from the host only: {error}");
            // What follows would wait for the same guest again. Others in the pod may still be well.
            if matches!(error, EngineError::Guest(GuestError::Deadline { .. })) && self.is_last(id) {
                self.sandbox.kill(&format!("killed, because {error}"));
            }
        }
        let remains = locked(&task.remains).take();
        if let Some(remains) = remains {
            let lingering = remains.remove(&*self.sandbox).await;
            locked(&self.lingering).extend(lingering);
        }
        task.bundle.forget(crate::bundle::HOLDER_PID);
        task.step(Step::Removed);
        locked(&self.table).remove(id);
        task.exit.send_if_modified(|slot| slot.is_none() && slot.replace(exit).is_none());
        self.events.push(&TaskDelete {
            container_id: id.to_owned(),
            pid: task.pid(),
            exit_status: exit.status,
            exited_at: MessageField::some(timestamp(exit.at)),
            ..TaskDelete::default()
        });
        Ok((task.pid(), exit))
    }

    /// Waits for a container's end.
    pub async fn wait(&self, id: &str) -> Result<Exit, TaskError> {
        let task = self.find(id)?;
        let mut exit = task.exit.subscribe();
        let ended = exit.wait_for(Option::is_some).await.ok().and_then(|exit| *exit);
        ended.ok_or_else(|| TaskError::NotFound(id.to_owned()))
    }

    /// What is known of a container.
    pub fn status(&self, id: &str) -> Result<Status, TaskError> {
        let task = self.find(id)?;
        let (bundle, stdio) = (task.bundle.directory().to_owned(), task.stdio.clone());
        match task.state() {
            State::Creating | State::Gone => Err(TaskError::NotFound(id.to_owned())),
            state => Ok(Status { state, pid: task.pid(), bundle, stdio }),
        }
    }

    /// Ends a container's input. Harmless after its end.
    pub fn close_stdin(&self, id: &str) -> Result<(), TaskError> {
        let task = self.find(id)?;
        if let Some(streams) = &*locked(&task.streams) {
            streams.close_stdin();
        }
        Ok(())
    }

    /// Whether nothing would be lost if the pod ended now.
    ///
    /// A container on its way holds a shared pod. In a pod of its own it does not: its client has given up on it, or it
    /// would not have asked.
    #[must_use]
    pub fn may_end(&self) -> bool {
        locked(&self.table).values().all(|task| !self.grouped && task.state() == State::Creating)
    }

    /// Whether there is no container at all.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        locked(&self.table).is_empty()
    }

    fn is_last(&self, id: &str) -> bool {
        locked(&self.table).keys().all(|other| other == id)
    }

    fn find(&self, id: &str) -> Result<Arc<Task>, TaskError> {
        locked(&self.table).get(id).cloned().ok_or_else(|| TaskError::NotFound(id.to_owned()))
    }

    /// Follows a prepared container to its end.
    async fn watch(self: Arc<Self>, task: Arc<Task>) {
        let exit = match self.sandbox.wait(&task.id).await {
            Ok(status) => Exit::now(status),
            Err(error @ (EngineError::NotStarted(_) | EngineError::Ended(_))) => {
                log::error!("container {} ended with its VM: {error}", task.id);
                Exit::now(KILLED)
            }
            Err(error) => {
                log::error!("the end of container {} is not known: {error}", task.id);
                Exit::now(UNKNOWN)
            }
        };
        let streams = locked(&task.streams).clone();
        if let Some(streams) = streams {
            streams.drained().await;
        }
        let _turn = task.turn.lock().await;
        self.report_exit(&task, exit);
    }

    /// Takes the task to Stopped and says so, unless somebody has. The caller holds the turn.
    fn report_exit(&self, task: &Task, exit: Exit) {
        if task.step(Step::Exited(exit)).is_none() {
            return;
        }
        trace::mark("exited", &task.id);
        self.events.push(&TaskExit {
            container_id: task.id.clone(),
            id: task.id.clone(),
            pid: task.pid(),
            exit_status: exit.status,
            exited_at: MessageField::some(timestamp(exit.at)),
            ..TaskExit::default()
        });
        task.exit.send_replace(Some(exit));
    }
}

/// As shells have it: found and not executable, not found, anything else.
fn status_of_failed_exec(text: &str) -> u32 {
    let text = text.to_ascii_lowercase();
    if text.contains("permission denied") {
        126
    } else if text.contains("not found") || text.contains("no such file") {
        127
    } else {
        UNKNOWN
    }
}
