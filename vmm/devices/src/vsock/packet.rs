//! The wire: a header of 44 bytes, little-endian, before the payload (virtio 1.2, 5.10.6).
//!
//! ```text
//!   0        8        16       20       24     28    30   32      36          40        44
//!   │ src_cid │ dst_cid │ src_port │ dst_port │ len │ type │ op │ flags │ buf_alloc │ fwd_cnt │
//! ```

use super::span::Span;

/// Context id of the host.
pub const HOST_CID: u64 = 2;

/// Bytes of the header.
pub const HEADER_SIZE: usize = 44;

/// The one socket type that we speak.
pub const TYPE_STREAM: u16 = 1;

/// Operations.
pub const OP_REQUEST: u16 = 1;
pub const OP_RESPONSE: u16 = 2;
pub const OP_RST: u16 = 3;
pub const OP_SHUTDOWN: u16 = 4;
pub const OP_RW: u16 = 5;
pub const OP_CREDIT_UPDATE: u16 = 6;
pub const OP_CREDIT_REQUEST: u16 = 7;

/// Flags of SHUTDOWN: its sender will not receive, will not send.
pub const NO_RECEIVE: u32 = 1;
pub const NO_SEND: u32 = 2;
pub const CLOSED: u32 = NO_RECEIVE | NO_SEND;

/// Largest payload of one packet from the guest (VIRTIO_VSOCK_MAX_PKT_BUF_SIZE of Linux).
pub const MAX_PAYLOAD: u32 = 64 * 1024;

/// Which stream a packet belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Key {
    pub guest_port: u32,
    pub host_port: u32,
}

/// A header, the guest's or ours.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    pub key: Key,
    pub operation: u16,
    pub flags: u32,
    /// Bytes of payload.
    pub length: u32,
    /// The sender's receive window of this stream.
    pub window: u32,
    /// Bytes of this stream that the sender has taken, modulo 2^32.
    pub taken: u32,
}

/// Why a packet of the guest is dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// Not even a header.
    #[error("it is shorter than a header")]
    Short,
    /// Not from this guest to this host, or no stream.
    #[error("it is no stream packet from this guest to its host")]
    Foreign,
    /// More than a packet may carry, or more than is there.
    #[error("it promises {0} bytes of payload")]
    Length(u32),
}

impl Header {
    /// Takes the header off the front of a packet from guest `cid`, and leaves exactly its payload in `span`.
    pub fn take(span: &mut Span<'_>, cid: u64) -> Result<Self, Malformed> {
        let bytes = span.split_front(HEADER_SIZE).ok_or(Malformed::Short)?.to_vec();
        let bytes: [u8; HEADER_SIZE] = bytes.try_into().map_err(|_| Malformed::Short)?;
        let (from, to, kind) = (u64_at(&bytes, 0), u64_at(&bytes, 8), u16_at(&bytes, 28));
        if (from, to, kind) != (cid, HOST_CID, TYPE_STREAM) {
            return Err(Malformed::Foreign);
        }
        let length = u32_at(&bytes, 24);
        let payload = (length <= MAX_PAYLOAD).then(|| span.split_front(length as usize)).flatten();
        *span = payload.ok_or(Malformed::Length(length))?;
        Ok(Self {
            key: Key { guest_port: u32_at(&bytes, 16), host_port: u32_at(&bytes, 20) },
            operation: u16_at(&bytes, 30),
            flags: u32_at(&bytes, 32),
            length,
            window: u32_at(&bytes, 36),
            taken: u32_at(&bytes, 40),
        })
    }

    /// The bytes of a header towards guest `cid`.
    pub fn to_guest(self, cid: u64) -> [u8; HEADER_SIZE] {
        let mut bytes = [0; HEADER_SIZE];
        let mut put = |at: usize, field: &[u8]| bytes[at..at + field.len()].copy_from_slice(field);
        put(0, &HOST_CID.to_le_bytes());
        put(8, &cid.to_le_bytes());
        put(16, &self.key.host_port.to_le_bytes());
        put(20, &self.key.guest_port.to_le_bytes());
        put(24, &self.length.to_le_bytes());
        put(28, &TYPE_STREAM.to_le_bytes());
        put(30, &self.operation.to_le_bytes());
        put(32, &self.flags.to_le_bytes());
        put(36, &self.window.to_le_bytes());
        put(40, &self.taken.to_le_bytes());
        bytes
    }
}

fn u16_at(bytes: &[u8; HEADER_SIZE], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn u32_at(bytes: &[u8; HEADER_SIZE], at: usize) -> u32 {
    u32::from(u16_at(bytes, at)) | u32::from(u16_at(bytes, at + 2)) << 16
}

fn u64_at(bytes: &[u8; HEADER_SIZE], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}
