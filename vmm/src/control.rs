//! Serves the owner's requests, one at a time, until it closes the socket.

use std::{
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
    time::Duration,
};

use devices::DialError;
use virtiofs::{Limits, ShareError, ShareTree};
use vmm::jail::{JailError, Shut};
use vmm_api::{Channel, ChannelError, Event, Failure, Reply, Request};

use crate::{
    ending::Owner,
    machine::{self, Machine, Parts},
};

/// How long a guest may take to answer a dial. The owner's own deadline is longer.
const DIAL_DEADLINE: Duration = Duration::from_secs(2);

/// A refusal, or the one descriptor of the answer.
type Answer = Result<Option<OwnedFd>, (Failure, String)>;

/// The VMM before and after its machine runs.
struct Vmm {
    owner: Owner,
    shares: Arc<ShareTree>,
    machine: Option<Machine>,
}

/// Why serving ended.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// The owner talks nonsense or does not listen.
    #[error(transparent)]
    Channel(#[from] ChannelError),
    /// We would not have been alone with the guest.
    #[error(transparent)]
    Jail(#[from] JailError),
}

/// Serves `control`; ends well when the owner has closed it. The jail closes at the first request, before it is looked
/// at: by then the owner has mapped our ids.
pub fn serve(control: &Channel, events: Channel, jail: Shut) -> Result<(), ControlError> {
    let owner = Owner::new(events)?;
    owner.tell(&Event::Born, &[]);
    match control.wait() {
        Err(ChannelError::Closed) => return Ok(()),
        waited => waited?,
    }
    jail.close()?;
    let shares = Arc::new(ShareTree::new(Limits::default()));
    let mut vmm = Vmm { owner, shares, machine: None };
    loop {
        let (request, fds) = match control.recv::<Request>() {
            Ok(request) => request,
            // With the owner goes the machine: the process ends, whatever the guest does.
            Err(ChannelError::Closed) => return Ok(()),
            Err(error) => return Err(error.into()),
        };
        match vmm.answer(request, fds) {
            Ok(None) => control.send(&Reply::Done, &[])?,
            Ok(Some(fd)) => control.send(&Reply::Done, &[fd.as_fd()])?,
            Err((failure, message)) => control.send(&Reply::Failed { failure, message }, &[])?,
        }
    }
}

impl Vmm {
    fn answer(&mut self, request: Request, mut fds: Vec<OwnedFd>) -> Answer {
        match (request, fds.len()) {
            (Request::Boot(boot), 3) => {
                if self.machine.is_some() {
                    return Err((Failure::WrongState, "the machine runs already".into()));
                }
                let (kvm, initramfs, kernel) = (fds.remove(2), fds.remove(1), fds.remove(0));
                let parts = Parts { kvm, kernel, initramfs, shares: &self.shares };
                let machine =
                    machine::boot(&boot, parts, &self.owner).map_err(|error| (error.failure(), error.to_string()))?;
                self.machine = Some(machine);
                Ok(None)
            }
            (Request::AttachShare { name, read_only }, 1) => {
                self.shares.attach(name.as_str(), fds.remove(0), read_only).map_err(|error| refused(&error))?;
                Ok(None)
            }
            (Request::DetachShare { name }, 0) => {
                self.shares.detach(name.as_str()).map_err(|error| refused(&error))?;
                Ok(None)
            }
            (Request::Dial { port }, 0) => self.dial(port).map(Some),
            (request, count) => Err((Failure::Invalid, format!("{count} descriptors do not belong to {request:?}"))),
        }
    }

    fn dial(&self, port: u32) -> Result<OwnedFd, (Failure, String)> {
        let Some(machine) = &self.machine else {
            return Err((Failure::WrongState, "no machine runs yet".into()));
        };
        machine.dialer.dial(port, DIAL_DEADLINE).map_err(|error| {
            let failure = match error {
                DialError::Refused => Failure::NotFound,
                DialError::NotRunning => Failure::WrongState,
                DialError::TimedOut | DialError::TooMany => Failure::Internal,
            };
            (failure, format!("cannot open a stream to guest port {port}: {error}"))
        })
    }
}

fn refused(error: &ShareError) -> (Failure, String) {
    let failure = match error {
        ShareError::NameTaken(_) => Failure::AlreadyExists,
        ShareError::NotAttached(_) => Failure::NotFound,
        ShareError::BadName(_) | ShareError::SymbolicLink(_) => Failure::Invalid,
        ShareError::Unreadable { .. } => Failure::Internal,
    };
    (failure, error.to_string())
}
