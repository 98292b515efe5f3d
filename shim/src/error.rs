//! What a verb may fail with, and the one map from there to status codes.
//!
//! Clients act on codes: NotFound ends a kill loop, FailedPrecondition makes them kill before they delete, Unimplemented
//! makes them do without. A bare UNKNOWN would leave a pod in Terminating for ever, so the map is total and has none.
//! Some clients act on words as well: "not found" and "already finished" stand in the texts for them.

use std::{io, path::PathBuf};

use ttrpc::{Code, get_status};
use vmm_api::{ClientError, Failure};

use crate::{
    engine::EngineError,
    guest::{GuestError, Refusal},
    holder::HolderError,
    io::IoError,
    rootfs::RootfsError,
    spec::SpecError,
};

/// Why a verb was not done.
#[derive(Debug, thiserror::Error)]
pub enum TaskError {
    /// No such container.
    #[error("container {0} not found")]
    NotFound(String),
    /// No such process in the container.
    #[error("process {exec} in container {id} not found")]
    ExecNotFound {
        /// The container.
        id: String,
        /// The process.
        exec: String,
    },
    /// It has ended; there is nothing to signal.
    #[error("container {0}: process already finished: not found")]
    Finished(String),
    /// The id is taken.
    #[error("container {0} already exists")]
    AlreadyExists(String),
    /// Not in this state.
    #[error("cannot {verb} container {id}: it is {state}")]
    Precondition {
        /// What was asked.
        verb: &'static str,
        /// Of which container.
        id: String,
        /// Where it is.
        state: &'static str,
    },
    /// Not something that we do.
    #[error("not implemented: {0}")]
    Unimplemented(String),
    /// A request that makes no sense.
    #[error("{0}")]
    Invalid(String),
    /// The directory that should be the root.
    #[error("cannot open the root file system {}: {source}", path.display())]
    Root {
        /// The directory.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// The spec.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// The root's mounts.
    #[error(transparent)]
    Rootfs(#[from] RootfsError),
    /// The holder.
    #[error(transparent)]
    Holder(#[from] HolderError),
    /// The standard streams.
    #[error(transparent)]
    Io(#[from] IoError),
    /// The machine, or the agent in it.
    #[error(transparent)]
    Engine(#[from] EngineError),
}

impl TaskError {
    /// The status code that says the same.
    #[must_use]
    pub fn code(&self) -> Code {
        match self {
            Self::NotFound(_) | Self::ExecNotFound { .. } | Self::Finished(_) => Code::NOT_FOUND,
            Self::AlreadyExists(_) => Code::ALREADY_EXISTS,
            Self::Precondition { .. } => Code::FAILED_PRECONDITION,
            Self::Unimplemented(_) | Self::Io(IoError::Scheme { .. }) | Self::Spec(SpecError::Unsupported(_)) => {
                Code::UNIMPLEMENTED
            }
            Self::Invalid(_) | Self::Spec(_) | Self::Rootfs(RootfsError::Option { .. }) => Code::INVALID_ARGUMENT,
            Self::Root { .. } | Self::Rootfs(_) | Self::Holder(_) | Self::Io(_) => Code::INTERNAL,
            Self::Engine(error) => engine_code(error),
        }
    }
}

fn engine_code(error: &EngineError) -> Code {
    match error {
        // Not UNAVAILABLE: clients take that for a shim that is gone.
        EngineError::NotStarted(_) | EngineError::Ended(_) => Code::INTERNAL,
        EngineError::Vmm { source, .. } => match &**source {
            ClientError::Refused { failure: Failure::Invalid, .. } => Code::INVALID_ARGUMENT,
            ClientError::Refused { failure: Failure::NotFound, .. } => Code::NOT_FOUND,
            ClientError::Refused { failure: Failure::AlreadyExists, .. } => Code::ALREADY_EXISTS,
            ClientError::Refused { failure: Failure::WrongState, .. } => Code::FAILED_PRECONDITION,
            _ => Code::INTERNAL,
        },
        EngineError::Guest(GuestError::Deadline { .. }) => Code::DEADLINE_EXCEEDED,
        EngineError::Guest(GuestError::Lost(_)) => Code::INTERNAL,
        EngineError::Guest(GuestError::Refused { refusal, .. }) => match refusal {
            Refusal::NotFound => Code::NOT_FOUND,
            Refusal::AlreadyExists => Code::ALREADY_EXISTS,
            Refusal::Precondition => Code::FAILED_PRECONDITION,
            Refusal::Invalid => Code::INVALID_ARGUMENT,
            Refusal::Unimplemented => Code::UNIMPLEMENTED,
            Refusal::Other => Code::INTERNAL,
        },
    }
}

impl From<TaskError> for ttrpc::Error {
    fn from(error: TaskError) -> Self {
        Self::RpcStatus(get_status(error.code(), error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_find_the_codes_and_words_they_act_on() {
        let id = || "c1".to_owned();
        let running = TaskError::Precondition { verb: "delete", id: id(), state: "running" };
        for (error, code, words) in [
            (TaskError::NotFound(id()), Code::NOT_FOUND, "not found"),
            (TaskError::Finished(id()), Code::NOT_FOUND, "process already finished"),
            (TaskError::AlreadyExists(id()), Code::ALREADY_EXISTS, "already exists"),
            (running, Code::FAILED_PRECONDITION, "cannot delete container c1: it is running"),
            (TaskError::Unimplemented("Exec".into()), Code::UNIMPLEMENTED, "Exec"),
            (EngineError::NotStarted("no KVM".into()).into(), Code::INTERNAL, "failed to start the sandbox VM: no KVM"),
        ] {
            let ttrpc::Error::RpcStatus(status) = ttrpc::Error::from(error) else { panic!("a bare error is UNKNOWN") };
            assert_eq!(status.code(), code);
            assert!(status.message.contains(words), "{}", status.message);
        }
    }

    #[test]
    fn agents_refusal_keeps_its_code() {
        let refused = GuestError::Refused { refusal: Refusal::NotFound, text: "executable file not found".into() };
        assert_eq!(TaskError::from(EngineError::from(refused)).code(), Code::NOT_FOUND);
    }
}
