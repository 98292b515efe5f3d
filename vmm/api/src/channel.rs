//! One end of a control or event socket: JSON packets with descriptors, every wait bounded.

use std::{
    io::{IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    time::Duration,
};

use rustix::{
    io::Errno,
    net::{
        AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
        SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recv, recvmsg, sendmsg, socketpair,
        sockopt::{Timeout, set_socket_timeout},
    },
};
use serde::{Serialize, de::DeserializeOwned};

/// Largest message in bytes. The largest legal one is a console tail with every byte escaped.
pub const MAX_MESSAGE: usize = 128 * 1024;

/// Most descriptors that ride on one message.
pub const MAX_FDS: usize = 4;

/// What can go wrong between two processes.
#[derive(Debug, thiserror::Error)]
pub enum ChannelError {
    /// The other end is gone.
    #[error("the other end of the VMM socket is closed")]
    Closed,
    /// Nothing came, or nothing could be sent, within the deadline.
    #[error("the other end of the VMM socket did not answer in time")]
    TimedOut,
    /// A message of ours is larger than the wire allows.
    #[error("a VMM message of {0} bytes exceeds the limit of {MAX_MESSAGE}")]
    TooLarge(usize),
    /// The peer sent more than one packet may hold, or more descriptors.
    #[error("the peer sent an oversized VMM message")]
    Truncated,
    /// The peer sent something that is not a message of this version.
    #[error("the peer sent a malformed VMM message: {0}")]
    Malformed(#[source] serde_json::Error),
    /// The kernel refused.
    #[error("VMM socket: {0}")]
    Os(#[from] Errno),
}

/// A connected socket that carries messages.
#[derive(Debug)]
pub struct Channel {
    fd: OwnedFd,
}

impl Channel {
    /// Wraps a connected `SOCK_SEQPACKET` socket.
    #[must_use]
    pub fn new(fd: OwnedFd) -> Self {
        Self { fd }
    }

    /// Makes a connected pair, both close-on-exec.
    pub fn pair() -> Result<(Self, OwnedFd), ChannelError> {
        let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        Ok((Self::new(ours), theirs))
    }

    /// Bounds every later [`Self::send`] and [`Self::recv`].
    pub fn set_deadline(&self, deadline: Duration) -> Result<(), ChannelError> {
        set_socket_timeout(&self.fd, Timeout::Recv, Some(deadline))?;
        set_socket_timeout(&self.fd, Timeout::Send, Some(deadline))?;
        Ok(())
    }

    /// Sends one message with its descriptors.
    pub fn send(&self, message: &impl Serialize, fds: &[BorrowedFd<'_>]) -> Result<(), ChannelError> {
        assert!(fds.len() <= MAX_FDS, "a message of ours carries too many descriptors");
        let bytes = serde_json::to_vec(message).map_err(ChannelError::Malformed)?;
        if bytes.len() > MAX_MESSAGE {
            return Err(ChannelError::TooLarge(bytes.len()));
        }
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            let fits = control.push(SendAncillaryMessage::ScmRights(fds));
            assert!(fits, "the control buffer holds MAX_FDS descriptors");
        }
        loop {
            match sendmsg(&self.fd, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL) {
                Ok(_) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(error) => return Err(classify(error)),
            }
        }
    }

    /// Waits until a message is there, and leaves it there.
    pub fn wait(&self) -> Result<(), ChannelError> {
        let mut byte = [0];
        loop {
            match recv(&self.fd, &mut byte, RecvFlags::PEEK | RecvFlags::TRUNC) {
                Ok((_, 0)) => return Err(ChannelError::Closed),
                Ok(_) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(error) => return Err(classify(error)),
            }
        }
    }

    /// Receives one message with its descriptors.
    pub fn recv<T: DeserializeOwned>(&self) -> Result<(T, Vec<OwnedFd>), ChannelError> {
        self.recv_with(RecvFlags::empty())
    }

    /// Receives one message if one is there; `None` if not yet.
    pub fn try_recv<T: DeserializeOwned>(&self) -> Result<Option<(T, Vec<OwnedFd>)>, ChannelError> {
        match self.recv_with(RecvFlags::DONTWAIT) {
            Err(ChannelError::TimedOut) => Ok(None),
            other => other.map(Some),
        }
    }

    fn recv_with<T: DeserializeOwned>(&self, flags: RecvFlags) -> Result<(T, Vec<OwnedFd>), ChannelError> {
        let mut bytes = vec![0; MAX_MESSAGE];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let received = loop {
            let mut parts = [IoSliceMut::new(&mut bytes)];
            match recvmsg(&self.fd, &mut parts, &mut control, flags | RecvFlags::CMSG_CLOEXEC) {
                Ok(received) => break received,
                Err(Errno::INTR) => {}
                Err(error) => return Err(classify(error)),
            }
        };
        let fds = take_fds(&mut control);
        if received.bytes == 0 {
            return Err(ChannelError::Closed);
        }
        // The buffer is a little larger than MAX_FDS descriptors need, for its alignment: the kernel may fit in one more.
        if received.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) || fds.len() > MAX_FDS {
            return Err(ChannelError::Truncated);
        }
        let message = serde_json::from_slice(&bytes[..received.bytes]).map_err(ChannelError::Malformed)?;
        Ok((message, fds))
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

fn take_fds(control: &mut RecvAncillaryBuffer<'_>) -> Vec<OwnedFd> {
    control
        .drain()
        .filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(fds) => Some(fds),
            _ => None,
        })
        .flatten()
        .collect()
}

fn classify(error: Errno) -> ChannelError {
    match error {
        Errno::AGAIN => ChannelError::TimedOut,
        Errno::PIPE | Errno::CONNRESET => ChannelError::Closed,
        other => ChannelError::Os(other),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    fn pair() -> (Channel, Channel) {
        let (ours, theirs) = Channel::pair().expect("socketpair");
        (ours, Channel::new(theirs))
    }

    #[test]
    fn message_and_descriptors_arrive_together() {
        let (a, b) = pair();
        let null = File::open("/dev/null").expect("open /dev/null");
        a.send(&"hello", &[null.as_fd(), null.as_fd()]).expect("send");
        let (text, fds): (String, _) = b.recv().expect("recv");
        assert_eq!((text.as_str(), fds.len()), ("hello", 2));
    }

    #[test]
    fn closed_peer_is_told_apart_from_a_silent_one() {
        let (a, b) = pair();
        b.set_deadline(Duration::from_millis(1)).expect("deadline");
        assert!(matches!(b.recv::<String>(), Err(ChannelError::TimedOut)));
        assert!(matches!(b.try_recv::<String>(), Ok(None)));
        drop(a);
        assert!(matches!(b.recv::<String>(), Err(ChannelError::Closed)));
        assert!(matches!(b.send(&1, &[]), Err(ChannelError::Closed)));
    }

    #[test]
    fn malformed_and_oversized_messages_are_errors() {
        let (a, b) = pair();
        a.send(&42, &[]).expect("send");
        assert!(matches!(b.recv::<String>(), Err(ChannelError::Malformed(_))));
        let long = "x".repeat(MAX_MESSAGE);
        assert!(matches!(a.send(&long, &[]), Err(ChannelError::TooLarge(_))));
    }
}
