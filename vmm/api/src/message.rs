//! The messages: requests, replies, events, and the checked names they carry.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Longest console tail that [`Event::Exited`] carries, in bytes of printable ASCII and newlines.
///
/// A panic with its trace fits; escaped as JSON it stays below [`crate::MAX_MESSAGE`].
pub const CONSOLE_TAIL_MAX: usize = 16 * 1024;

/// What an owner asks of its VMM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
pub enum Request {
    /// Build the machine and run it. Three descriptors: the kernel (an uncompressed x86_64 ELF), the initramfs, and an
    /// open `/dev/kvm`.
    Boot(Boot),
    /// Make a directory tree or a single file appear under `name` in the guest's one file system.
    /// One descriptor: the root of the share.
    AttachShare {
        /// The name in the root directory of the file system.
        name: ShareName,
        /// Refuse every change, as a read-only mount would.
        read_only: bool,
    },
    /// Take the share away. What the guest still holds open of it answers ESTALE from now on.
    DetachShare {
        /// The name given to `AttachShare`.
        name: ShareName,
    },
    /// Open a vsock stream to a port on which something in the guest listens. The reply carries the stream.
    Dial {
        /// Guest port.
        port: u32,
    },
}

/// The machine to build.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Boot {
    /// Number of virtual CPUs, 1 to 32.
    pub vcpus: u8,
    /// Guest memory in MiB, at least 64.
    pub memory_mib: u32,
    /// Appended to the command line that the VMM needs for itself.
    #[serde(default)]
    pub cmdline: String,
}

/// The answer to one request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "reply", rename_all = "snake_case")]
pub enum Reply {
    /// Done. The answer to `Dial` carries the stream as its one descriptor.
    Done,
    /// Not done; nothing has changed.
    Failed {
        /// Which rule was broken.
        failure: Failure,
        /// The whole story, for a person.
        message: String,
    },
}

/// Why a request was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Failure {
    /// The request is malformed or out of range.
    Invalid,
    /// The request is not legal in the present state.
    WrongState,
    /// No such share, or nobody listens on the port.
    NotFound,
    /// A share of this name is attached already.
    AlreadyExists,
    /// KVM is missing or refused.
    NoKvm,
    /// The kernel or the initramfs cannot be used.
    BadImage,
    /// The host refused something else.
    Internal,
}

/// What a VMM tells its owner unasked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// The VMM has left the host's files behind and is in a user namespace without ids. Its owner maps them
    /// ([`crate::map_ids`]), then sends the first request. The first event.
    Born,
    /// The first vCPU is about to enter the guest for the first time.
    Entered {
        /// CLOCK_MONOTONIC in nanoseconds.
        at_ns: u64,
        /// What the VMM has run on processors by then, all threads together, in nanoseconds.
        cpu_ns: u64,
    },
    /// Something in the guest opened a stream to this host port. One descriptor: our end of it.
    Connected {
        /// Host port.
        port: u32,
    },
    /// The machine has ended. The last event; the process ends after it.
    Exited {
        /// How.
        reason: ExitReason,
        /// The last console output, at most [`CONSOLE_TAIL_MAX`] bytes, printable ASCII and newlines only.
        console: String,
    },
}

/// How a machine ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum ExitReason {
    /// The agent asked for it.
    PowerOff,
    /// The guest kernel restarted the machine.
    Reset,
    /// The guest kernel panicked.
    Panic,
    /// A CPU faulted while it handled a double fault.
    TripleFault,
    /// KVM or the VMM gave up.
    Fault {
        /// What went wrong.
        message: String,
    },
}

impl fmt::Display for ExitReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::PowerOff => f.write_str("the guest powered off"),
            Self::Reset => f.write_str("the guest reset itself"),
            Self::Panic => f.write_str("the guest kernel panicked"),
            Self::TripleFault => f.write_str("a guest CPU triple-faulted"),
            Self::Fault { message } => write!(f, "the machine failed: {message}"),
        }
    }
}

/// The name of a share: one path component of 1 to 64 bytes of `[A-Za-z0-9._-]` that does not start with a dot.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ShareName(String);

/// A string that is not the name of a share.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("share name {0:?} is not 1 to 64 bytes of [A-Za-z0-9._-] that start with no dot")]
pub struct InvalidShareName(String);

impl ShareName {
    /// Checks a name.
    pub fn new(name: impl Into<String>) -> Result<Self, InvalidShareName> {
        let name = name.into();
        let legal = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-');
        let well_formed = (1..=64).contains(&name.len()) && !name.starts_with('.') && name.bytes().all(legal);
        if well_formed { Ok(Self(name)) } else { Err(InvalidShareName(name)) }
    }

    /// The name as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for ShareName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl TryFrom<String> for ShareName {
    type Error = InvalidShareName;
    fn try_from(name: String) -> Result<Self, Self::Error> {
        Self::new(name)
    }
}

impl From<ShareName> for String {
    fn from(name: ShareName) -> Self {
        name.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn share_name_is_one_plain_component() {
        for good in ["rootfs-1", "v0", "a.b_c"] {
            assert_eq!(ShareName::new(good).expect("legal").as_str(), good);
        }
        for bad in ["", ".", "..", ".hidden", "a/b", "a\0b", "é", &"x".repeat(65)] {
            assert!(ShareName::new(bad).is_err(), "{bad:?} must be refused");
        }
    }

    #[test]
    fn share_name_is_checked_when_parsed() {
        assert!(serde_json::from_str::<Request>(r#"{"op":"detach_share","name":"../x"}"#).is_err());
    }

    #[test]
    fn wire_form_of_boot_is_frozen() {
        let boot = Request::Boot(Boot { vcpus: 1, memory_mib: 256, cmdline: String::new() });
        let wire = r#"{"op":"boot","vcpus":1,"memory_mib":256,"cmdline":""}"#;
        assert_eq!(serde_json::to_string(&boot).expect("serialises"), wire);
        assert_eq!(serde_json::from_str::<Request>(wire).expect("parses"), boot);
    }
}
