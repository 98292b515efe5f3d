//! The owner's side: requests with a deadline, and the stream of events.

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Mutex,
    time::Duration,
};

use crate::{Boot, Channel, ChannelError, Event, Failure, Reply, Request, ShareName};

/// Why a request did not happen.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The VMM refused; it goes on as before.
    #[error("{message}")]
    Refused {
        /// Which rule was broken.
        failure: Failure,
        /// The VMM's own words.
        message: String,
    },
    /// The VMM is gone, silent, or talks nonsense: it must be killed.
    #[error(transparent)]
    Broken(#[from] ChannelError),
    /// The VMM said that it sent a descriptor, and did not.
    #[error("the VMM's reply lacks its descriptor")]
    NoDescriptor,
}

/// Speaks to one VMM. Calls block for at most the deadline and may come from any thread, one at a time. After a call that
/// broke, a late reply may still arrive and be taken for the next one's: kill the VMM.
#[derive(Debug)]
pub struct Client {
    control: Mutex<Channel>,
}

impl Client {
    /// Takes our end of the control socket; no call takes longer than `deadline`.
    pub fn new(control: Channel, deadline: Duration) -> Result<Self, ClientError> {
        control.set_deadline(deadline)?;
        Ok(Self { control: Mutex::new(control) })
    }

    /// Changes the deadline of the calls that follow.
    pub fn set_deadline(&self, deadline: Duration) -> Result<(), ClientError> {
        let control = self.control.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        Ok(control.set_deadline(deadline)?)
    }

    /// Builds and runs the machine from kernel, initramfs and an open `/dev/kvm`.
    pub fn boot(&self, boot: Boot, parts: [BorrowedFd<'_>; 3]) -> Result<(), ClientError> {
        self.call(&Request::Boot(boot), &parts).map(drop)
    }

    /// Attaches `root` to the guest's file system as `name`.
    pub fn attach_share(&self, name: ShareName, root: BorrowedFd<'_>, read_only: bool) -> Result<(), ClientError> {
        self.call(&Request::AttachShare { name, read_only }, &[root]).map(drop)
    }

    /// Takes the share away.
    pub fn detach_share(&self, name: ShareName) -> Result<(), ClientError> {
        self.call(&Request::DetachShare { name }, &[]).map(drop)
    }

    /// Opens a stream to a listener in the guest.
    pub fn dial(&self, port: u32) -> Result<OwnedFd, ClientError> {
        self.call(&Request::Dial { port }, &[])?.pop().ok_or(ClientError::NoDescriptor)
    }

    fn call(&self, request: &Request, fds: &[BorrowedFd<'_>]) -> Result<Vec<OwnedFd>, ClientError> {
        // A panic while the lock was held leaves at worst an unread reply, which the deadline of the next call finds.
        let control = self.control.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        control.send(request, fds)?;
        match control.recv()? {
            (Reply::Done, fds) => Ok(fds),
            (Reply::Failed { failure, message }, _) => Err(ClientError::Refused { failure, message }),
        }
    }
}

/// The events of one VMM, in order. Poll the descriptor for readability, then take what is there.
#[derive(Debug)]
pub struct EventStream {
    events: Channel,
}

impl EventStream {
    /// Takes our end of the event socket.
    #[must_use]
    pub fn new(events: Channel) -> Self {
        Self { events }
    }

    /// The next event with its descriptor, or `None` if none has come yet.
    pub fn try_next(&self) -> Result<Option<(Event, Option<OwnedFd>)>, ChannelError> {
        Ok(self.events.try_recv()?.map(|(event, mut fds)| (event, fds.pop())))
    }
}

impl AsFd for EventStream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.events.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    fn client_and_vmm() -> (Client, Channel) {
        let (ours, theirs) = Channel::pair().expect("socketpair");
        (Client::new(ours, Duration::from_millis(200)).expect("client"), Channel::new(theirs))
    }

    #[test]
    fn refusal_carries_its_kind_and_words() {
        let (client, vmm) = client_and_vmm();
        let server = thread::spawn(move || {
            let (_request, _fds): (Request, _) = vmm.recv().expect("request");
            let reply = Reply::Failed { failure: Failure::NotFound, message: "no share v0".into() };
            vmm.send(&reply, &[]).expect("reply");
        });
        let name = ShareName::new("v0").expect("legal");
        match client.detach_share(name) {
            Err(ClientError::Refused { failure: Failure::NotFound, message }) => assert_eq!(message, "no share v0"),
            other => panic!("unexpected {other:?}"),
        }
        server.join().expect("server thread");
    }

    #[test]
    fn silent_vmm_costs_no_more_than_the_deadline() {
        let (client, _vmm) = client_and_vmm();
        assert!(matches!(client.dial(1), Err(ClientError::Broken(ChannelError::TimedOut))));
    }

    #[test]
    fn deadline_can_be_made_shorter_once_the_machine_runs() {
        let (ours, _theirs) = Channel::pair().expect("socketpair");
        let client = Client::new(ours, Duration::from_secs(60)).expect("client");
        client.set_deadline(Duration::from_millis(50)).expect("set");
        let started = std::time::Instant::now();
        assert!(matches!(client.dial(1), Err(ClientError::Broken(ChannelError::TimedOut))));
        assert!(started.elapsed() < Duration::from_secs(10));
    }

    #[test]
    fn dial_without_a_descriptor_is_an_error() {
        let (client, vmm) = client_and_vmm();
        let server = thread::spawn(move || {
            let (_request, _fds): (Request, _) = vmm.recv().expect("request");
            vmm.send(&Reply::Done, &[]).expect("reply");
        });
        assert!(matches!(client.dial(1), Err(ClientError::NoDescriptor)));
        server.join().expect("server thread");
    }
}
