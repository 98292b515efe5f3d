//! A VMM without a machine, for tests of the shim on hosts without KVM: it speaks `vmm-api` as `nacre-vmm` does and is the
//! agent itself. Containers are plain host processes, started with the arguments of their spec.
//!
//! It misbehaves on demand, by a word in the kernel command line: `stub=refuse` (no KVM), `stub=panic` (the guest dies while
//! it boots), `stub=silent` (the agent never connects), `stub=crash` (the process ends without a word).
#![forbid(unsafe_code)]

use std::{
    collections::HashMap,
    io,
    os::{
        fd::{AsFd, OwnedFd},
        linux::net::SocketAddrExt,
        unix::{
            net::{SocketAddr, UnixStream},
            process::ExitStatusExt,
        },
    },
    process::{Command, ExitCode, Stdio},
    sync::{Arc, Mutex},
    thread,
};

use agent_proto::{
    Agent, CONTROL_PORT, CreateContainerRequest, CreateContainerResponse, DeleteContainerRequest, Empty,
    SignalContainerRequest, StartContainerRequest, WaitContainerRequest, WaitContainerResponse, create_agent,
};
use nix::sched::{CloneFlags, unshare};
use rustix::process::{Pid, Signal, kill_process};
use tokio::sync::watch;
use ttrpc::{
    Code,
    asynchronous::{Server, TtrpcContext},
    get_status,
};
use vmm_api::{Channel, Event, ExitReason, Failure, Reply, Request};

fn main() -> ExitCode {
    let inherited = |fd: io::Result<OwnedFd>| fd.map(Channel::new).expect("born with two sockets");
    let control = inherited(io::stdin().as_fd().try_clone_to_owned());
    let events = Arc::new(inherited(io::stdout().as_fd().try_clone_to_owned()));
    let mut shares = HashMap::new();
    unshare(CloneFlags::CLONE_NEWUSER).expect("a user namespace");
    events.send(&Event::Born, &[]).expect("event");
    while let Ok((request, fds)) = control.recv::<Request>() {
        let reply = match request {
            Request::Boot(boot) if boot.cmdline.contains("stub=refuse") => {
                Reply::Failed { failure: Failure::NoKvm, message: "/dev/kvm is missing".into() }
            }
            Request::Boot(boot) if boot.cmdline.contains("stub=crash") => {
                eprintln!("stub: about to crash");
                return ExitCode::from(3);
            }
            Request::Boot(boot) => {
                boot_guest(&boot.cmdline, events.clone());
                Reply::Done
            }
            Request::AttachShare { name, .. } => {
                shares.insert(name, fds);
                Reply::Done
            }
            Request::DetachShare { name } => match shares.remove(&name) {
                Some(_) => Reply::Done,
                None => Reply::Failed { failure: Failure::NotFound, message: format!("no share {name}") },
            },
            Request::Dial { .. } => Reply::Failed { failure: Failure::NotFound, message: "nobody listens".into() },
        };
        if control.send(&reply, &[]).is_err() {
            break;
        }
    }
    ExitCode::SUCCESS
}

fn boot_guest(cmdline: &str, events: Arc<Channel>) {
    if cmdline.contains("stub=panic") {
        let console = "line 1\nKernel panic - not syncing: stub\n".to_owned();
        events.send(&Event::Exited { reason: ExitReason::Panic, console }, &[]).expect("event");
        std::process::exit(0);
    }
    if !cmdline.contains("stub=silent") {
        thread::spawn(move || serve(events));
    }
}

fn serve(events: Arc<Channel>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("runtime");
    runtime.block_on(async {
        let address = format!("@nacre-stub-{}", std::process::id());
        let agent = Arc::new(StubAgent { events: events.clone(), containers: Mutex::default() });
        let mut server =
            Server::new().bind(&format!("unix://{address}")).expect("bind").register_service(create_agent(agent));
        server.start().await.expect("start");
        let name = SocketAddr::from_abstract_name(&address[1..]).expect("address");
        let dialled = UnixStream::connect_addr(&name).expect("connect");
        events.send(&Event::Connected { port: CONTROL_PORT }, &[dialled.as_fd()]).expect("event");
        drop(dialled);
        std::future::pending::<()>().await;
    });
}

struct StubAgent {
    events: Arc<Channel>,
    containers: Mutex<HashMap<String, Container>>,
}

/// The process exists from its start on.
struct Container {
    prepared: Option<Command>,
    pid: Option<Pid>,
    exit: watch::Sender<Option<u32>>,
}

impl StubAgent {
    fn stream(&self, port: u32) -> Stdio {
        if port == 0 {
            return Stdio::null();
        }
        let (ours, theirs) = UnixStream::pair().expect("socketpair");
        self.events.send(&Event::Connected { port }, &[theirs.as_fd()]).expect("event");
        Stdio::from(OwnedFd::from(ours))
    }

    fn with<T>(&self, id: &str, act: impl FnOnce(&mut Container) -> T) -> ttrpc::Result<T> {
        let mut containers = self.containers.lock().expect("lock");
        containers.get_mut(id).map(act).ok_or_else(|| refusal(Code::NOT_FOUND, "no such container"))
    }
}

fn refusal(code: Code, text: &str) -> ttrpc::Error {
    ttrpc::Error::RpcStatus(get_status(code, text))
}

#[async_trait::async_trait]
impl Agent for StubAgent {
    async fn create_container(
        &self,
        _ctx: &TtrpcContext,
        request: CreateContainerRequest,
    ) -> ttrpc::Result<CreateContainerResponse> {
        let spec: serde_json::Value = serde_json::from_slice(&request.spec).expect("JSON");
        let args: Vec<String> = serde_json::from_value(spec["process"]["args"].clone()).expect("args");
        let stdio = request.stdio.unwrap_or_default();
        let mut command = Command::new(&args[0]);
        command
            .args(&args[1..])
            .stdin(self.stream(stdio.stdin_port))
            .stdout(self.stream(stdio.stdout_port))
            .stderr(self.stream(stdio.stderr_port));
        let container = Container { prepared: Some(command), pid: None, exit: watch::Sender::new(None) };
        self.containers.lock().expect("lock").insert(request.id, container);
        Ok(CreateContainerResponse { pid: 2, ..Default::default() })
    }

    async fn start_container(&self, _ctx: &TtrpcContext, request: StartContainerRequest) -> ttrpc::Result<Empty> {
        let (prepared, exit) =
            self.with(&request.id, |container| (container.prepared.take(), container.exit.clone()))?;
        let mut command = prepared.ok_or_else(|| refusal(Code::FAILED_PRECONDITION, "started already"))?;
        let mut child = command.spawn().map_err(|_| {
            exit.send_replace(Some(127));
            let program = command.get_program().display();
            refusal(Code::NOT_FOUND, &format!("exec: \"{program}\": executable file not found in $PATH"))
        })?;
        self.with(&request.id, |container| container.pid = Some(Pid::from_child(&child)))?;
        thread::spawn(move || {
            let status = child.wait().expect("wait");
            let code = status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or_default());
            exit.send_replace(Some(code.unsigned_abs()));
        });
        Ok(Empty::new())
    }

    async fn signal_container(&self, _ctx: &TtrpcContext, request: SignalContainerRequest) -> ttrpc::Result<Empty> {
        let signal = i32::try_from(request.signal).ok().and_then(Signal::from_named_raw);
        let signal = signal.ok_or_else(|| refusal(Code::INVALID_ARGUMENT, "no such signal"))?;
        let gone = || refusal(Code::NOT_FOUND, "process already finished");
        match self.with(&request.id, |container| container.pid)? {
            Some(pid) => kill_process(pid, signal).map_err(|_| gone())?,
            None => self.with(&request.id, |container| {
                container.exit.send_replace(Some(128 + request.signal));
            })?,
        }
        Ok(Empty::new())
    }

    async fn wait_container(
        &self,
        _ctx: &TtrpcContext,
        request: WaitContainerRequest,
    ) -> ttrpc::Result<WaitContainerResponse> {
        let mut exit = self.with(&request.id, |container| container.exit.subscribe())?;
        let status = exit.wait_for(Option::is_some).await.ok().and_then(|status| *status);
        let exit_status = status.ok_or_else(|| refusal(Code::NOT_FOUND, "removed"))?;
        Ok(WaitContainerResponse { exit_status, ..Default::default() })
    }

    async fn delete_container(&self, _ctx: &TtrpcContext, request: DeleteContainerRequest) -> ttrpc::Result<Empty> {
        self.containers.lock().expect("lock").remove(&request.id);
        Ok(Empty::new())
    }
}
