//! The seam between a pod's tasks and the machine that runs them.
//!
//! A [`Sandbox`] is one machine with an agent in it. Its verbs are what the tasks need, no more: shares come and go by
//! name, streams are expected on ports, containers are created, started, signalled, waited for and deleted, and the whole
//! can be killed. There is one engine, [`kvm`]; the trait exists because the tasks are tested without a machine.
//!
//! ```text
//!   Booting ──agent answers──► Ready ──► Ended(why)
//!      └───── refused, too slow, crashed ────┘          Ended is final; every verb then fails with the reason
//! ```
//!
//! Invariant: no verb but [`Sandbox::wait`] waits without a deadline, and `wait` ends when the machine does.

use std::{future::Future, os::fd::OwnedFd, sync::Arc};

use agent_proto::CreateContainerRequest;
use vmm_api::{ClientError, ShareName};

use crate::{guest::GuestError, io::Slot};

pub mod kvm;

/// Why the machine did not do what a task needs.
#[derive(Debug, Clone, thiserror::Error)]
pub enum EngineError {
    /// It never came up. All later verbs fail the same way.
    #[error("failed to start the sandbox VM: {0}")]
    NotStarted(Arc<str>),
    /// It ran and has ended. All later verbs fail the same way.
    #[error("the sandbox VM has ended: {0}")]
    Ended(Arc<str>),
    /// The VMM refused a request.
    #[error("the VMM cannot {verb} {object}: {source}")]
    Vmm {
        /// What was asked.
        verb: &'static str,
        /// On what.
        object: String,
        /// The VMM's words.
        source: Arc<ClientError>,
    },
    /// The agent refused a request, or did not answer.
    #[error(transparent)]
    Guest(#[from] GuestError),
}

/// A machine that runs the containers of one pod.
pub trait Sandbox: Send + Sync + 'static {
    /// Makes `root` appear in the guest as share `name`.
    fn attach(
        &self,
        name: ShareName,
        root: OwnedFd,
        read_only: bool,
    ) -> impl Future<Output = Result<(), EngineError>> + Send;

    /// Takes a share away.
    fn detach(&self, name: ShareName) -> impl Future<Output = Result<(), EngineError>> + Send;

    /// Expects the guest to open one stream; the port to give it, and where the stream will arrive.
    fn expect_stream(&self) -> (u32, Slot);

    /// Prepares a container, waiting for the machine to be ready.
    fn create(&self, request: CreateContainerRequest) -> impl Future<Output = Result<(), EngineError>> + Send;

    /// Lets a prepared container run.
    fn start(&self, id: &str) -> impl Future<Output = Result<(), EngineError>> + Send;

    /// Signals a container's init, or all of its processes.
    fn signal(&self, id: &str, signal: u32, all: bool) -> impl Future<Output = Result<(), EngineError>> + Send;

    /// Stops a container's processes where they are.
    fn pause(&self, id: &str) -> impl Future<Output = Result<(), EngineError>> + Send;

    /// Lets them go on.
    fn resume(&self, id: &str) -> impl Future<Output = Result<(), EngineError>> + Send;

    /// Waits for a container's end; the exit status.
    fn wait(&self, id: &str) -> impl Future<Output = Result<u32, EngineError>> + Send;

    /// Removes a container from the guest and writes its data back.
    fn delete(&self, id: &str) -> impl Future<Output = Result<(), EngineError>> + Send;

    /// Ends the machine at once, for the reason given.
    fn kill(&self, why: &str);

    /// Ends the machine and returns when its process is gone.
    fn stop(&self) -> impl Future<Output = ()> + Send;
}
