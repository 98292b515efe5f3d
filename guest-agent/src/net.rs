//! The network namespace a container starts in.
//!
//! A new namespace has a loopback interface that is down; programs expect it up, as under runc.

use std::{io, os::fd::AsFd};

use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

/// Brings `lo` up in the namespace of the caller. The kernel gives it 127.0.0.1 and ::1 by itself.
pub fn loopback_up() -> io::Result<()> {
    let socket = socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    crate::sys::loopback_up(socket.as_fd())
}
