//! The agent without a machine: an ordinary process whose host is a directory of Unix sockets.
//!
//! usage: agent_on_sockets SHARES CGROUP SOCKETS
//!
//! It must be process 1 of a pid namespace and alone in a mount namespace (`unshare --mount --pid --fork`). Used by
//! `tests/guest`. When the connection ends it exits; it presses no power button.
#![forbid(unsafe_code)]

use std::{io, sync::Arc};

use agent_proto::CONTROL_PORT;
use guest_agent::{
    container::{Containers, Places},
    link::Link,
    power,
    reap::Reaper,
    server,
};

#[tokio::main(flavor = "current_thread")]
async fn main() -> io::Result<()> {
    power::exit_on_panic();
    let arguments: Vec<String> = std::env::args().collect();
    let [_, shares, cgroup, sockets] = arguments.as_slice() else {
        return Err(io::Error::other("usage: agent_on_sockets SHARES CGROUP SOCKETS"));
    };
    let reaper = Reaper::default();
    tokio::spawn(reaper.clone().run(Reaper::listen()?));
    let link = Link::Directory(sockets.into());
    let control = link.dial(CONTROL_PORT).await?;
    let places = Places { shares: shares.into(), cgroup: cgroup.into(), link };
    server::serve(control.halves(), Arc::new(Containers::new(places, reaper))).await
}
