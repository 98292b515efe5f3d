//! The protocol between shim and guest agent: `proto/agent.proto`, generated at build time.
//!
//! Layer 0: types only. Ports and limits that both sides must agree on stand here too.
#![forbid(unsafe_code)]

/// Context identifier of the host in AF_VSOCK addresses (virtio spec 1.2, 5.10.4).
pub const HOST_CID: u32 = 2;

/// Host port to which the agent connects when it is ready to serve.
pub const CONTROL_PORT: u32 = 1024;

/// First host port used for stdio streams; below are ports with a fixed meaning.
pub const FIRST_STDIO_PORT: u32 = 2048;

/// Tag of the one virtio-fs device, in whose root directory all shares appear by name.
pub const SHARES_TAG: &str = "nacre";

/// Messages of the protocol.
#[allow(warnings, clippy::all)]
pub mod agent {
    include!(concat!(env!("OUT_DIR"), "/agent.rs"));
}

/// Client and server of the protocol.
#[allow(warnings, clippy::all)]
pub mod agent_ttrpc {
    use super::agent;
    include!(concat!(env!("OUT_DIR"), "/agent_ttrpc.rs"));
}

pub use agent::*;
pub use agent_ttrpc::{Agent, AgentClient, create_agent};
