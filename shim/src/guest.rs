//! The agent in the guest, as its client sees it.
//!
//! The guest is hostile. Each call has a deadline, except Wait, which its caller ends when the machine ends. Texts are cut
//! to [`TEXT_MAX`] bytes and stripped of control characters before anyone sees them; status codes are reduced to the few
//! that the tasks act on. Frames are bounded by ttrpc (4 MiB).
//!
//! Failure paths: the agent refuses (its words pass through, because clients look for "executable file not found" in
//! them), it does not answer in time, or the connection is gone.

use std::{os::fd::OwnedFd, time::Duration};

use agent_proto::{
    AgentClient, CreateContainerRequest, DeleteContainerRequest, PauseContainerRequest, ResumeContainerRequest,
    SignalContainerRequest, StartContainerRequest, WaitContainerRequest,
};
use tokio::{net::UnixStream, time::timeout};
use ttrpc::{
    Code,
    asynchronous::{Client, transport::Socket},
    context::{self, Context},
};

/// Longest text of the guest's that is passed on.
const TEXT_MAX: usize = 2048;

/// Mounts and an exec may have to read a cold image.
const SLOW: Duration = Duration::from_secs(30);

/// A signal is one system call in the guest; a pause waits for running processes to reach a place where they can stop.
const QUICK: Duration = Duration::from_secs(5);

/// containerd gives Delete ten seconds; write-back of dirty data may need most of them.
const DELETE: Duration = Duration::from_secs(8);

/// Why the agent did not do it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GuestError {
    /// It refused.
    #[error("{text}")]
    Refused {
        /// The kind of refusal.
        refusal: Refusal,
        /// Its words, cleaned.
        text: String,
    },
    /// It did not answer.
    #[error("the agent in the guest did not {verb} container {id} within {} s", after.as_secs())]
    Deadline {
        /// What was asked.
        verb: &'static str,
        /// On which container.
        id: String,
        /// The deadline.
        after: Duration,
    },
    /// The connection to it is gone.
    #[error("the connection to the agent in the guest is lost: {0}")]
    Lost(String),
}

/// The kinds of refusal that make a difference.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// No such container, or it has exited.
    NotFound,
    /// Exists already.
    AlreadyExists,
    /// Not in this state.
    Precondition,
    /// Malformed.
    Invalid,
    /// Not implemented in the guest.
    Unimplemented,
    /// Anything else.
    Other,
}

/// A connection to an agent.
#[derive(Clone)]
pub struct Agent {
    client: AgentClient,
}

impl Agent {
    /// Takes the stream that the agent opened to its control port.
    pub fn new(stream: UnixStream) -> Self {
        Self { client: AgentClient::new(Client::new(Socket::new(stream))) }
    }

    /// Prepares a container.
    pub async fn create(&self, request: &CreateContainerRequest) -> Result<(), GuestError> {
        let call = self.client.create_container(within(SLOW), request);
        bounded("create", &request.id, SLOW, call).await.map(drop)
    }

    /// Lets it run.
    pub async fn start(&self, id: &str) -> Result<(), GuestError> {
        let request = StartContainerRequest { id: id.to_owned(), ..StartContainerRequest::default() };
        let call = self.client.start_container(within(SLOW), &request);
        bounded("start", id, SLOW, call).await.map(drop)
    }

    /// Signals it.
    pub async fn signal(&self, id: &str, signal: u32, all: bool) -> Result<(), GuestError> {
        let request = SignalContainerRequest { id: id.to_owned(), signal, all, ..SignalContainerRequest::default() };
        let call = self.client.signal_container(within(QUICK), &request);
        bounded("signal", id, QUICK, call).await.map(drop)
    }

    /// Stops its processes where they are.
    pub async fn pause(&self, id: &str) -> Result<(), GuestError> {
        let request = PauseContainerRequest { id: id.to_owned(), ..PauseContainerRequest::default() };
        let call = self.client.pause_container(within(QUICK), &request);
        bounded("pause", id, QUICK, call).await.map(drop)
    }

    /// Lets them go on.
    pub async fn resume(&self, id: &str) -> Result<(), GuestError> {
        let request = ResumeContainerRequest { id: id.to_owned(), ..ResumeContainerRequest::default() };
        let call = self.client.resume_container(within(QUICK), &request);
        bounded("resume", id, QUICK, call).await.map(drop)
    }

    /// Waits for its end, for as long as it takes.
    pub async fn wait(&self, id: &str) -> Result<u32, GuestError> {
        let request = WaitContainerRequest { id: id.to_owned(), ..WaitContainerRequest::default() };
        let response =
            self.client.wait_container(Context::default(), &request).await.map_err(|error| classify(&error))?;
        Ok(response.exit_status.min(255))
    }

    /// Removes it.
    pub async fn delete(&self, id: &str) -> Result<(), GuestError> {
        let request = DeleteContainerRequest { id: id.to_owned(), ..DeleteContainerRequest::default() };
        let call = self.client.delete_container(within(DELETE), &request);
        bounded("delete", id, DELETE, call).await.map(drop)
    }
}

/// A stream of the VMM's as the runtime wants it.
pub fn stream(fd: OwnedFd) -> std::io::Result<UnixStream> {
    let stream = std::os::unix::net::UnixStream::from(fd);
    stream.set_nonblocking(true)?;
    UnixStream::from_std(stream)
}

/// What the request says about its deadline. Ours in [`bounded`] comes first, so that one error means "too late".
fn within(deadline: Duration) -> Context {
    context::with_duration(deadline + Duration::from_secs(1))
}

/// The deadline is ours to keep: an agent may ignore the one in the request.
async fn bounded<T>(
    verb: &'static str,
    id: &str,
    after: Duration,
    call: impl Future<Output = ttrpc::Result<T>>,
) -> Result<T, GuestError> {
    let late = || GuestError::Deadline { verb, id: id.to_owned(), after };
    match timeout(after, call).await {
        Err(_elapsed) => Err(late()),
        Ok(Err(ttrpc::Error::RpcStatus(status))) if status.code() == Code::DEADLINE_EXCEEDED => Err(late()),
        Ok(outcome) => outcome.map_err(|error| classify(&error)),
    }
}

fn classify(error: &ttrpc::Error) -> GuestError {
    let ttrpc::Error::RpcStatus(status) = error else { return GuestError::Lost(cleaned(&error.to_string())) };
    let refusal = match status.code() {
        Code::NOT_FOUND => Refusal::NotFound,
        Code::ALREADY_EXISTS => Refusal::AlreadyExists,
        Code::FAILED_PRECONDITION => Refusal::Precondition,
        Code::INVALID_ARGUMENT => Refusal::Invalid,
        Code::UNIMPLEMENTED => Refusal::Unimplemented,
        _ => Refusal::Other,
    };
    GuestError::Refused { refusal, text: cleaned(&status.message) }
}

/// Text of a guest's or a VMM's, fit to be shown.
#[must_use]
pub fn cleaned(text: &str) -> String {
    let visible = text.chars().map(|c| if c.is_control() && c != '\n' { ' ' } else { c });
    let mut kept = String::new();
    for c in visible {
        if kept.len() + c.len_utf8() > TEXT_MAX {
            kept.push('…');
            break;
        }
        kept.push(c);
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hostile_text_is_cut_and_stripped() {
        assert_eq!(cleaned("a\x1b[2J\0b"), "a [2J b");
        assert!(cleaned(&"é".repeat(5000)).len() <= TEXT_MAX + '…'.len_utf8());
    }

    #[test]
    fn refusals_keep_their_words_and_their_kind() {
        let text = "exec: \"nope\": executable file not found in $PATH";
        let error = ttrpc::Error::RpcStatus(ttrpc::get_status(Code::NOT_FOUND, text));
        assert_eq!(classify(&error), GuestError::Refused { refusal: Refusal::NotFound, text: text.into() });
    }

    #[tokio::test]
    async fn broken_connection_is_told_apart_from_a_refusal() {
        let (ours, theirs) = UnixStream::pair().expect("socketpair");
        drop(theirs);
        assert!(matches!(Agent::new(ours).start("c1").await, Err(GuestError::Lost(_))));
    }

    #[tokio::test(start_paused = true)]
    async fn silent_agent_costs_no_more_than_the_deadline() {
        let (ours, _theirs) = UnixStream::pair().expect("socketpair");
        let outcome = Agent::new(ours).signal("c1", 9, false).await;
        assert!(matches!(outcome, Err(GuestError::Deadline { .. })), "{outcome:?}");
    }
}
