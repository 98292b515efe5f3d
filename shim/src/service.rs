//! The ttrpc shell around the verbs: unpack, call, pack. No decision is made here.
//!
//! * The same service answers as `containerd.task.v2.Task` and `containerd.task.v3.Task`; messages are identical.
//! * ttrpc drops a handler when its caller disconnects, as containerd does when it restarts. A verb that changes something
//!   therefore runs as a task of its own, to its end, and only its reply is lost.
//! * The generated defaults answer NOT_FOUND for methods that are not written, which clients read as "no such container".
//!   So each unsupported method is written, and says Unimplemented.

use std::{collections::HashMap, future::Future, sync::Arc};

use async_trait::async_trait;
use containerd_shim_protos::{
    api::{
        CheckpointTaskRequest, CloseIORequest, ConnectRequest, ConnectResponse, CreateTaskRequest, CreateTaskResponse,
        DeleteRequest, DeleteResponse, Empty, ExecProcessRequest, KillRequest, PauseRequest, PidsRequest, PidsResponse,
        ProcessInfo, ResizePtyRequest, ResumeRequest, ShutdownRequest, StartRequest, StartResponse, StateRequest,
        StateResponse, StatsRequest, StatsResponse, Status as TaskStatus, UpdateTaskRequest, WaitRequest, WaitResponse,
    },
    shim_async::{Task, create_task},
};
use protobuf::MessageField;
use tokio::sync::{Notify, watch};
use ttrpc::asynchronous::{Service, TtrpcContext};

use crate::{
    cleanup::timestamp,
    engine::Sandbox,
    error::TaskError,
    options,
    task::{
        Create, StdioNames, Tasks,
        state::{Exit, State},
    },
};

/// Names under which containerd asks, by version.
const NAMES: [&str; 2] = ["containerd.task.v2.Task", "containerd.task.v3.Task"];

/// The shell.
pub struct TaskService<S> {
    tasks: Arc<Tasks<S>>,
    end: Arc<Ending>,
}

/// How the service asks the server to end, and hears when it may answer.
#[derive(Debug, Default)]
pub struct Ending {
    /// Shutdown was called and nothing is left to lose.
    pub asked: Notify,
    answers: watch::Sender<()>,
}

impl Ending {
    /// Lets every Shutdown that waits answer.
    pub fn answer(&self) {
        self.answers.send_replace(());
    }
}

impl<S: Sandbox> TaskService<S> {
    /// The services to register with a ttrpc server.
    #[must_use]
    pub fn register(tasks: &Arc<Tasks<S>>, end: &Arc<Ending>) -> HashMap<String, Service> {
        let mut services = HashMap::new();
        for name in NAMES {
            let service: Arc<dyn Task + Send + Sync> = Arc::new(Self { tasks: tasks.clone(), end: end.clone() });
            services.extend(create_task(service).into_values().map(|service| (name.to_owned(), service)));
        }
        services
    }
}

#[async_trait]
impl<S: Sandbox> Task for TaskService<S> {
    async fn create(&self, _ctx: &TtrpcContext, request: CreateTaskRequest) -> ttrpc::Result<CreateTaskResponse> {
        let tasks = self.tasks.clone();
        let create = Create {
            id: request.id,
            bundle: request.bundle.into(),
            rootfs: request.rootfs,
            stdio: StdioNames { stdin: request.stdin, stdout: request.stdout, stderr: request.stderr },
            terminal: request.terminal,
            checkpoint: request.checkpoint,
            options: request.options.as_ref().and_then(options::decode),
        };
        let pid = to_the_end(async move { tasks.create(create).await }).await?;
        Ok(CreateTaskResponse { pid, ..CreateTaskResponse::default() })
    }

    async fn start(&self, _ctx: &TtrpcContext, request: StartRequest) -> ttrpc::Result<StartResponse> {
        only_init(&request.id, &request.exec_id)?;
        let tasks = self.tasks.clone();
        let pid = to_the_end(async move { tasks.start(&request.id).await }).await?;
        Ok(StartResponse { pid, ..StartResponse::default() })
    }

    async fn delete(&self, _ctx: &TtrpcContext, request: DeleteRequest) -> ttrpc::Result<DeleteResponse> {
        only_init(&request.id, &request.exec_id)?;
        let tasks = self.tasks.clone();
        let (pid, exit) = to_the_end(async move { tasks.delete(&request.id).await }).await?;
        let exited_at = MessageField::some(timestamp(exit.at));
        Ok(DeleteResponse { pid, exit_status: exit.status, exited_at, ..DeleteResponse::default() })
    }

    async fn kill(&self, _ctx: &TtrpcContext, request: KillRequest) -> ttrpc::Result<Empty> {
        only_init(&request.id, &request.exec_id)?;
        let tasks = self.tasks.clone();
        to_the_end(async move { tasks.kill(&request.id, request.signal, request.all).await }).await?;
        Ok(Empty::new())
    }

    async fn wait(&self, _ctx: &TtrpcContext, request: WaitRequest) -> ttrpc::Result<WaitResponse> {
        only_init(&request.id, &request.exec_id)?;
        let exit = self.tasks.wait(&request.id).await?;
        let exited_at = MessageField::some(timestamp(exit.at));
        Ok(WaitResponse { exit_status: exit.status, exited_at, ..WaitResponse::default() })
    }

    async fn state(&self, _ctx: &TtrpcContext, request: StateRequest) -> ttrpc::Result<StateResponse> {
        only_init(&request.id, &request.exec_id)?;
        let status = self.tasks.status(&request.id)?;
        let (task_status, exit) = match status.state {
            State::Running => (TaskStatus::RUNNING, None),
            State::Paused => (TaskStatus::PAUSED, None),
            State::Stopped(exit) => (TaskStatus::STOPPED, Some(exit)),
            State::Created | State::Creating | State::Gone => (TaskStatus::CREATED, None),
        };
        Ok(StateResponse {
            id: request.id,
            bundle: status.bundle.display().to_string(),
            pid: status.pid,
            status: task_status.into(),
            stdin: status.stdio.stdin,
            stdout: status.stdio.stdout,
            stderr: status.stdio.stderr,
            exit_status: exit.map_or(0, |exit: Exit| exit.status),
            exited_at: exit.map(|exit| timestamp(exit.at)).into(),
            ..StateResponse::default()
        })
    }

    async fn pids(&self, _ctx: &TtrpcContext, request: PidsRequest) -> ttrpc::Result<PidsResponse> {
        let pid = self.tasks.status(&request.id)?.pid;
        Ok(PidsResponse { processes: vec![ProcessInfo { pid, ..ProcessInfo::default() }], ..PidsResponse::default() })
    }

    async fn connect(&self, _ctx: &TtrpcContext, request: ConnectRequest) -> ttrpc::Result<ConnectResponse> {
        let task_pid = self.tasks.status(&request.id).map_or(0, |status| status.pid);
        Ok(ConnectResponse { shim_pid: std::process::id(), task_pid, ..ConnectResponse::default() })
    }

    async fn close_io(&self, _ctx: &TtrpcContext, request: CloseIORequest) -> ttrpc::Result<Empty> {
        only_init(&request.id, &request.exec_id)?;
        if request.stdin {
            self.tasks.close_stdin(&request.id)?;
        }
        Ok(Empty::new())
    }

    async fn shutdown(&self, _ctx: &TtrpcContext, _request: ShutdownRequest) -> ttrpc::Result<Empty> {
        if self.tasks.may_end() {
            let mut answers = self.end.answers.subscribe();
            self.end.asked.notify_one();
            // The pod is gone when containerd hears so: it then looks for what was left behind.
            let _ = answers.changed().await;
        }
        Ok(Empty::new())
    }

    async fn exec(&self, _ctx: &TtrpcContext, _request: ExecProcessRequest) -> ttrpc::Result<Empty> {
        unimplemented("Exec")
    }

    async fn pause(&self, _ctx: &TtrpcContext, request: PauseRequest) -> ttrpc::Result<Empty> {
        let tasks = self.tasks.clone();
        to_the_end(async move { tasks.pause(&request.id).await }).await?;
        Ok(Empty::new())
    }

    async fn resume(&self, _ctx: &TtrpcContext, request: ResumeRequest) -> ttrpc::Result<Empty> {
        let tasks = self.tasks.clone();
        to_the_end(async move { tasks.resume(&request.id).await }).await?;
        Ok(Empty::new())
    }

    async fn checkpoint(&self, _ctx: &TtrpcContext, _request: CheckpointTaskRequest) -> ttrpc::Result<Empty> {
        unimplemented("Checkpoint")
    }

    async fn resize_pty(&self, _ctx: &TtrpcContext, _request: ResizePtyRequest) -> ttrpc::Result<Empty> {
        unimplemented("ResizePty")
    }

    async fn update(&self, _ctx: &TtrpcContext, _request: UpdateTaskRequest) -> ttrpc::Result<Empty> {
        unimplemented("Update")
    }

    async fn stats(&self, _ctx: &TtrpcContext, _request: StatsRequest) -> ttrpc::Result<StatsResponse> {
        unimplemented("Stats")
    }
}

fn unimplemented<T>(method: &str) -> ttrpc::Result<T> {
    Err(TaskError::Unimplemented(method.to_owned()).into())
}

/// No further process can exist in a container before Exec is implemented.
fn only_init(id: &str, exec: &str) -> Result<(), TaskError> {
    if exec.is_empty() {
        return Ok(());
    }
    Err(TaskError::ExecNotFound { id: id.to_owned(), exec: exec.to_owned() })
}

/// Runs a verb even if nobody waits for its outcome any more.
async fn to_the_end<T: Send + 'static>(
    verb: impl Future<Output = Result<T, TaskError>> + Send + 'static,
) -> Result<T, TaskError> {
    match tokio::spawn(verb).await {
        Ok(outcome) => outcome,
        Err(error) => Err(TaskError::Invalid(format!("the shim is shutting down: {error}"))),
    }
}
