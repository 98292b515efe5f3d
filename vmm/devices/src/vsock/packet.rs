//! The fields of a packet that the rest of the device works with (virtio 1.2, 5.10.6).

use virtio_vsock::packet::VsockPacket;

/// Well-known context ids.
pub const HOST_CID: u64 = 2;

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

/// A header as the guest sent it, read once.
#[derive(Debug, Clone, Copy)]
pub struct Header {
    pub key: Key,
    pub operation: u16,
    pub flags: u32,
    /// The guest's receive window of this stream.
    pub window: u32,
    /// Bytes of this stream that the guest has taken, modulo 2^32.
    pub taken: u32,
}

impl Header {
    /// Reads the header of a packet from guest `cid`; `None` if it is not for us or of another socket type.
    pub fn of(packet: &VsockPacket<'_, ()>, cid: u64) -> Option<Self> {
        let ours = packet.src_cid() == cid && packet.dst_cid() == HOST_CID && packet.type_() == TYPE_STREAM;
        ours.then(|| Self {
            key: Key { guest_port: packet.src_port(), host_port: packet.dst_port() },
            operation: packet.op(),
            flags: packet.flags(),
            window: packet.buf_alloc(),
            taken: packet.fwd_cnt(),
        })
    }
}

/// A packet that we send, without its payload.
#[derive(Debug, Clone, Copy)]
pub struct Outgoing {
    pub key: Key,
    pub operation: u16,
    pub flags: u32,
    /// Bytes of payload, already in place.
    pub length: u32,
    /// Our receive window of this stream.
    pub window: u32,
    /// Bytes of this stream that our side has taken, modulo 2^32.
    pub taken: u32,
}

impl Outgoing {
    /// Writes the header towards guest `cid`.
    pub fn write_to(self, packet: &mut VsockPacket<'_, ()>, cid: u64) {
        packet
            .set_src_cid(HOST_CID)
            .set_dst_cid(cid)
            .set_src_port(self.key.host_port)
            .set_dst_port(self.key.guest_port)
            .set_len(self.length)
            .set_type(TYPE_STREAM)
            .set_op(self.operation)
            .set_flags(self.flags)
            .set_buf_alloc(self.window)
            .set_fwd_cnt(self.taken);
    }
}
