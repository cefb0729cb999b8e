//! Configuration space, packet header and constants (virtio 1.2 §5.10).

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// The host's context id.
pub const HOST_CID: u64 = 2;
/// The least context id of a guest (0 to 2 are taken).
pub const MIN_GUEST_CID: u64 = 3;

/// Queue of packets to the guest.
pub const RECEIVE: u16 = 0;
/// Queue of packets from the guest.
pub const TRANSMIT: u16 = 1;
/// Queue of events to the guest.
pub const EVENT: u16 = 2;

/// `virtio_vsock_event_id`: all connections are gone.
pub const EVENT_TRANSPORT_RESET: u32 = 0;

/// Socket type: a stream.
pub const TYPE_STREAM: u16 = 1;

/// What a packet is for.
pub mod op {
    /// Asks for a connection.
    pub const REQUEST: u16 = 1;
    /// Grants it.
    pub const RESPONSE: u16 = 2;
    /// Refuses or ends it.
    pub const RST: u16 = 3;
    /// Will receive or send no more (see [`super::shutdown`]).
    pub const SHUTDOWN: u16 = 4;
    /// Carries bytes.
    pub const RW: u16 = 5;
    /// Tells how much room there is.
    pub const CREDIT_UPDATE: u16 = 6;
    /// Asks for that.
    pub const CREDIT_REQUEST: u16 = 7;
}

/// Flags of [`op::SHUTDOWN`].
pub mod shutdown {
    /// The sender receives no more.
    pub const RECEIVE: u32 = 1 << 0;
    /// The sender sends no more.
    pub const SEND: u32 = 1 << 1;
    /// Neither.
    pub const BOTH: u32 = RECEIVE | SEND;
}

/// `struct virtio_vsock_hdr`.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct Header {
    /// Context id of the sender.
    pub src_cid: U64,
    /// Context id of the receiver.
    pub dst_cid: U64,
    /// Port of the sender.
    pub src_port: U32,
    /// Port of the receiver.
    pub dst_port: U32,
    /// Bytes that follow.
    pub len: U32,
    /// Kind of socket.
    pub kind: U16,
    /// What the packet is for.
    pub op: U16,
    /// More about that.
    pub flags: U32,
    /// Bytes of the sender's receive buffer.
    pub buf_alloc: U32,
    /// Bytes that the sender has taken from that buffer so far, modulo 2^32.
    pub fwd_cnt: U32,
}

/// Bytes of a header.
pub const HEADER_BYTES: usize = size_of::<Header>();

const _: () = assert!(HEADER_BYTES == 44);
