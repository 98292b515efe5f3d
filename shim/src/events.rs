//! Events to containerd: in order, not lost while containerd restarts, never in the way of the pod.
//!
//! ```text
//!   verbs ──push──► Queue (bounded) ──► publisher: connected ──forward──► containerd
//!                                           ▲   │ failed
//!                                           └───┴ wait (bounded back-off), connect again, same event
//! ```
//!
//! * Order is the queue's: whoever pushes holds the task's lock, so create < start < exit < delete.
//! * A transport failure keeps the event and tries again for as long as this process lives: containerd may be down for
//!   minutes. An event that containerd *refuses* is dropped after [`ATTEMPTS`], or it would block those behind it.
//! * A full queue drops the new event and says so in the log. It takes [`CAPACITY`] unsent events to come to that.
//! * Without an address (CRI-O gives none) events are only logged.

use std::time::{Duration, SystemTime};

use containerd_shim_protos::{
    events::task::{TaskCreate, TaskDelete, TaskExit, TaskPaused, TaskResumed, TaskStart},
    shim::{event::Envelope, events::ForwardRequest},
    shim_async::EventsClient,
    topics,
};
use protobuf::{Message, MessageField, well_known_types::any::Any};
use tokio::{
    net::UnixStream,
    sync::{mpsc, oneshot},
    time::sleep,
};
use ttrpc::{
    asynchronous::{Client, transport::Socket},
    context,
};

use crate::cleanup::timestamp;

/// Most events that wait for containerd.
const CAPACITY: usize = 2048;

/// How often a refused event is sent.
const ATTEMPTS: u32 = 5;

/// How long containerd may take to accept one event.
const DEADLINE: Duration = Duration::from_secs(5);

/// Pauses between attempts: from the first, doubled up to the last.
const BACK_OFF: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(5));

/// Why an event did not arrive.
#[derive(Debug, thiserror::Error)]
enum PublishError {
    #[error("containerd's event service cannot be reached: {0}")]
    Unreachable(String),
    #[error("containerd refused the event: {0}")]
    Refused(String),
}

/// What travels through the queue.
#[derive(Debug)]
pub enum Item {
    /// An event.
    Event(Box<Envelope>),
    /// Everything pushed before this has been dealt with.
    Flush(oneshot::Sender<()>),
}

/// An event of a task's life.
pub trait TaskEvent: Message {
    /// Its message type. Written out: asking the message for it would build its whole description first.
    const TYPE: &'static str;
    /// Where subscribers look for it.
    const TOPIC: &'static str;
}

impl TaskEvent for TaskCreate {
    const TYPE: &'static str = "containerd.events.TaskCreate";
    const TOPIC: &'static str = topics::TASK_CREATE_EVENT_TOPIC;
}

impl TaskEvent for TaskStart {
    const TYPE: &'static str = "containerd.events.TaskStart";
    const TOPIC: &'static str = topics::TASK_START_EVENT_TOPIC;
}

impl TaskEvent for TaskPaused {
    const TYPE: &'static str = "containerd.events.TaskPaused";
    const TOPIC: &'static str = topics::TASK_PAUSED_EVENT_TOPIC;
}

impl TaskEvent for TaskResumed {
    const TYPE: &'static str = "containerd.events.TaskResumed";
    const TOPIC: &'static str = topics::TASK_RESUMED_EVENT_TOPIC;
}

impl TaskEvent for TaskExit {
    const TYPE: &'static str = "containerd.events.TaskExit";
    const TOPIC: &'static str = topics::TASK_EXIT_EVENT_TOPIC;
}

impl TaskEvent for TaskDelete {
    const TYPE: &'static str = "containerd.events.TaskDelete";
    const TOPIC: &'static str = topics::TASK_DELETE_EVENT_TOPIC;
}

/// Where the verbs leave their events.
#[derive(Debug, Clone)]
pub struct Queue {
    sender: mpsc::Sender<Item>,
    namespace: String,
}

impl Queue {
    /// Makes a queue and its other end, which a publisher, or a test, reads.
    #[must_use]
    pub fn new(namespace: &str) -> (Self, mpsc::Receiver<Item>) {
        let (sender, receiver) = mpsc::channel(CAPACITY);
        (Self { sender, namespace: namespace.to_owned() }, receiver)
    }

    /// Appends an event.
    pub fn push<E: TaskEvent>(&self, event: &E) {
        let value = match event.write_to_bytes() {
            Ok(value) => value,
            Err(error) => return log::error!("cannot encode event {}: {error}", E::TOPIC),
        };
        let envelope = Envelope {
            timestamp: MessageField::some(timestamp(SystemTime::now())),
            namespace: self.namespace.clone(),
            topic: E::TOPIC.to_owned(),
            event: MessageField::some(Any { type_url: E::TYPE.to_owned(), value, ..Any::default() }),
            ..Envelope::default()
        };
        if self.sender.try_send(Item::Event(Box::new(envelope))).is_err() {
            log::error!("event {} is lost: {CAPACITY} events wait for containerd already", E::TOPIC);
        }
    }

    /// Waits until containerd has everything pushed so far, at most for `patience`.
    pub async fn flush(&self, patience: Duration) {
        let (done, flushed) = oneshot::channel();
        let _ = tokio::time::timeout(patience, async {
            if self.sender.send(Item::Flush(done)).await.is_ok() {
                let _ = flushed.await;
            }
        })
        .await;
    }
}

/// Sends what arrives in `items` to the ttrpc socket at `address`, until the last queue is gone.
pub async fn publish(mut items: mpsc::Receiver<Item>, address: Option<String>) {
    let mut publisher = address.map(|address| Publisher { address, connection: None });
    while let Some(item) = items.recv().await {
        match (item, &mut publisher) {
            (Item::Flush(done), _) => {
                let _ = done.send(());
            }
            (Item::Event(envelope), Some(publisher)) => publisher.deliver(*envelope).await,
            (Item::Event(envelope), None) => log::info!("event {}", envelope.topic),
        }
    }
}

struct Publisher {
    address: String,
    connection: Option<EventsClient>,
}

impl Publisher {
    async fn deliver(&mut self, envelope: Envelope) {
        let topic = envelope.topic.clone();
        let request = ForwardRequest { envelope: MessageField::some(envelope), ..ForwardRequest::default() };
        let (mut pause, mut refusals) = (BACK_OFF.0, 0);
        loop {
            match self.forward(&request).await {
                Ok(()) => return,
                Err(error @ PublishError::Refused(_)) if refusals + 1 >= ATTEMPTS => {
                    return log::error!("event {topic} is lost: {error}");
                }
                Err(error) => {
                    refusals += u32::from(matches!(error, PublishError::Refused(_)));
                    log::debug!("event {topic} waits: {error}");
                }
            }
            sleep(pause).await;
            pause = (pause * 2).min(BACK_OFF.1);
        }
    }

    async fn forward(&mut self, request: &ForwardRequest) -> Result<(), PublishError> {
        let client = match &self.connection {
            Some(client) => client,
            None => self.connection.insert(connect(&self.address).await?),
        };
        match client.forward(context::with_duration(DEADLINE), request).await {
            Ok(_) => Ok(()),
            Err(ttrpc::Error::RpcStatus(status)) => Err(PublishError::Refused(status.message)),
            Err(error) => {
                self.connection = None;
                Err(PublishError::Unreachable(error.to_string()))
            }
        }
    }
}

async fn connect(address: &str) -> Result<EventsClient, PublishError> {
    let path = address.strip_prefix("unix://").unwrap_or(address);
    let stream =
        UnixStream::connect(path).await.map_err(|error| PublishError::Unreachable(format!("{path}: {error}")))?;
    Ok(EventsClient::new(Client::new(Socket::new(stream))))
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use containerd_shim_protos::{
        shim_async::{Events, create_events},
        types::empty::Empty,
    };
    use ttrpc::asynchronous::{Server, TtrpcContext};

    use super::*;

    #[derive(Default)]
    struct Daemon(Mutex<Vec<Envelope>>);

    #[async_trait::async_trait]
    impl Events for Daemon {
        async fn forward(&self, _ctx: &TtrpcContext, request: ForwardRequest) -> ttrpc::Result<Empty> {
            self.0.lock().expect("lock").push(request.envelope.unwrap_or_default());
            Ok(Empty::new())
        }
    }

    async fn daemon(path: &std::path::Path) -> (Arc<Daemon>, Server) {
        let daemon = Arc::new(Daemon::default());
        let mut server = Server::new()
            .bind(&format!("unix://{}", path.display()))
            .expect("bind")
            .register_service(create_events(daemon.clone()));
        server.start().await.expect("start");
        (daemon, server)
    }

    #[tokio::test]
    async fn events_arrive_in_order_even_if_containerd_comes_late() {
        let directory = tempfile::tempdir().expect("temporary directory");
        let path = directory.path().join("ttrpc");
        let (queue, items) = Queue::new("default");
        tokio::spawn(publish(items, Some(path.display().to_string())));
        queue.push(&TaskStart { container_id: "c1".into(), pid: 7, ..TaskStart::default() });
        queue.push(&TaskExit { container_id: "c1".into(), ..TaskExit::default() });
        sleep(Duration::from_millis(20)).await;
        let (daemon, _server) = daemon(&path).await;
        queue.flush(Duration::from_secs(5)).await;
        let received = daemon.0.lock().expect("lock");
        let topics: Vec<_> = received.iter().map(|envelope| envelope.topic.as_str()).collect();
        assert_eq!(topics, ["/tasks/start", "/tasks/exit"]);
        assert_eq!(received[0].namespace, "default");
        assert_eq!(received[0].event.type_url, "containerd.events.TaskStart");
    }

    #[tokio::test]
    async fn flush_gives_up_when_containerd_stays_away() {
        let (queue, items) = Queue::new("default");
        tokio::spawn(publish(items, Some("/nonexistent/ttrpc".into())));
        queue.push(&TaskStart::default());
        queue.flush(Duration::from_millis(50)).await;
    }
}
