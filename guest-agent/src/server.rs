//! The ttrpc shell around [`Containers`]: each method unpacks, calls the plain verb, packs.
//!
//! The agent serves exactly one connection, which it has opened itself. Its end is the end of the machine: the shim
//! or the VMM is gone, or does not want the machine any more. [`serve`] returns then, and also when Shutdown is asked.
//!
//! ttrpc drops a handler when its deadline has passed or its connection ends. Create and delete must not stop half
//! way, so they run as tasks of their own.

use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use agent_proto::{
    Agent, CreateContainerRequest, CreateContainerResponse, DeleteContainerRequest, Empty, ListProcessesRequest,
    ListProcessesResponse, PauseContainerRequest, ResumeContainerRequest, SignalContainerRequest,
    StartContainerRequest, WaitContainerRequest, WaitContainerResponse, create_agent,
};
use async_trait::async_trait;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    sync::Notify,
};
use ttrpc::r#async::{Server, TtrpcContext, transport::Listener};

use crate::{
    container::{Containers, Error},
    link::Halves,
};

/// Serves `control` until it ends or Shutdown is asked.
pub async fn serve(control: Halves, containers: Arc<Containers>) -> io::Result<()> {
    let ended = Arc::new(Notify::new());
    let service = Arc::new(Service { containers, ended: ended.clone() });
    let connection = Connection { read: control.0, write: control.1, ended: ended.clone() };
    let mut server =
        Server::new().register_service(create_agent(service)).add_listener(Listener::new(Once(Some(connection))));
    server.start().await.map_err(io::Error::other)?;
    ended.notified().await;
    Ok(())
}

struct Service {
    containers: Arc<Containers>,
    ended: Arc<Notify>,
}

/// Runs `work` to its end even if the caller is dropped.
async fn to_the_end<T: Send + 'static>(
    work: impl Future<Output = Result<T, Error>> + Send + 'static,
) -> ttrpc::Result<T> {
    match tokio::spawn(work).await {
        Ok(result) => Ok(result?),
        Err(error) => Err(ttrpc::Error::Others(format!("a task of the agent failed: {error}"))),
    }
}

#[async_trait]
impl Agent for Service {
    async fn create_container(
        &self,
        _: &TtrpcContext,
        request: CreateContainerRequest,
    ) -> ttrpc::Result<CreateContainerResponse> {
        let containers = self.containers.clone();
        let pid = to_the_end(async move { containers.create(&request).await }).await?;
        Ok(CreateContainerResponse { pid, ..Default::default() })
    }

    async fn start_container(&self, _: &TtrpcContext, request: StartContainerRequest) -> ttrpc::Result<Empty> {
        let containers = self.containers.clone();
        to_the_end(async move { containers.start(&request.id).await }).await?;
        Ok(Empty::default())
    }

    async fn signal_container(&self, _: &TtrpcContext, request: SignalContainerRequest) -> ttrpc::Result<Empty> {
        self.containers.signal(&request.id, request.signal, request.all)?;
        Ok(Empty::default())
    }

    async fn wait_container(
        &self,
        _: &TtrpcContext,
        request: WaitContainerRequest,
    ) -> ttrpc::Result<WaitContainerResponse> {
        let exit = self.containers.wait(&request.id).await?;
        Ok(WaitContainerResponse { exit_status: exit.status, exited_at_ns: exit.at_ns, ..Default::default() })
    }

    async fn list_processes(
        &self,
        _: &TtrpcContext,
        request: ListProcessesRequest,
    ) -> ttrpc::Result<ListProcessesResponse> {
        let pids = self.containers.pids(&request.id)?;
        Ok(ListProcessesResponse { pids, ..Default::default() })
    }

    async fn pause_container(&self, _: &TtrpcContext, request: PauseContainerRequest) -> ttrpc::Result<Empty> {
        self.containers.freeze(&request.id, true).await?;
        Ok(Empty::default())
    }

    async fn resume_container(&self, _: &TtrpcContext, request: ResumeContainerRequest) -> ttrpc::Result<Empty> {
        self.containers.freeze(&request.id, false).await?;
        Ok(Empty::default())
    }

    async fn delete_container(&self, _: &TtrpcContext, request: DeleteContainerRequest) -> ttrpc::Result<Empty> {
        let containers = self.containers.clone();
        to_the_end(async move { containers.delete(&request.id).await }).await?;
        Ok(Empty::default())
    }

    async fn shutdown(&self, _: &TtrpcContext, _: Empty) -> ttrpc::Result<Empty> {
        self.ended.notify_one();
        // The connection ends instead of a reply.
        std::future::pending().await
    }
}

/// The listener that ttrpc wants: it accepts the one connection, then never another.
struct Once(Option<Connection>);

impl futures_core::Stream for Once {
    type Item = io::Result<Connection>;

    fn poll_next(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.0.take().map_or(Poll::Pending, |connection| Poll::Ready(Some(Ok(connection))))
    }
}

/// The control connection; it reports its own end.
struct Connection {
    read: Box<dyn AsyncRead + Send + Sync + Unpin>,
    write: Box<dyn AsyncWrite + Send + Sync + Unpin>,
    ended: Arc<Notify>,
}

impl AsyncRead for Connection {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let result = Pin::new(&mut self.read).poll_read(cx, buf);
        if matches!(result, Poll::Ready(Err(_))) || (result.is_ready() && buf.filled().len() == before) {
            self.ended.notify_one();
        }
        result
    }
}

impl AsyncWrite for Connection {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.write).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.write).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.write).poll_shutdown(cx)
    }
}
