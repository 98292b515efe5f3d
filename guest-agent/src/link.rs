//! How the agent reaches its host: it always dials, the host listens.
//!
//! In a machine that is vsock to CID 2. As an ordinary process (tests) a port is a Unix socket `<directory>/<port>`.
//! Half-close is end of file in both directions, on both transports.

use std::{io, path::PathBuf};

use agent_proto::HOST_CID;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::UnixStream,
};
use tokio_vsock::{VsockAddr, VsockStream};

/// The two directions of a stream.
pub type Halves = (Box<dyn AsyncRead + Send + Sync + Unpin>, Box<dyn AsyncWrite + Send + Sync + Unpin>);

/// Where the host's ports are.
#[derive(Clone, Debug)]
pub enum Link {
    /// AF_VSOCK, CID 2.
    Vsock,
    /// Sockets in a directory.
    Directory(PathBuf),
}

/// One connected stream.
pub enum Stream {
    /// See [`Link::Vsock`].
    Vsock(VsockStream),
    /// See [`Link::Directory`].
    Unix(UnixStream),
}

impl Link {
    /// Connects to a port of the host.
    pub async fn dial(&self, port: u32) -> io::Result<Stream> {
        match self {
            Self::Vsock => VsockStream::connect(VsockAddr::new(HOST_CID, port)).await.map(Stream::Vsock),
            Self::Directory(path) => UnixStream::connect(path.join(port.to_string())).await.map(Stream::Unix),
        }
    }
}

impl Stream {
    /// Reading and writing side, usable apart.
    pub fn halves(self) -> Halves {
        match self {
            Self::Vsock(stream) => {
                let (read, write) = stream.into_split();
                (Box::new(read), Box::new(write))
            }
            Self::Unix(stream) => {
                let (read, write) = stream.into_split();
                (Box::new(read), Box::new(write))
            }
        }
    }
}
