//! Register and wire layouts of the network device: virtio 1.2 §5.1.3 (features), §5.1.4 (configuration), §5.1.6 (packets, commands).

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Feature bits (§5.1.3).
pub mod feature {
    /// The device takes packets with partial checksums.
    pub const CSUM: u64 = 1 << 0;
    /// The driver takes packets with partial checksums.
    pub const GUEST_CSUM: u64 = 1 << 1;
    /// Offloads can be reconfigured at run time.
    pub const CTRL_GUEST_OFFLOADS: u64 = 1 << 2;
    /// The configuration names an MTU.
    pub const MTU: u64 = 1 << 3;
    /// The configuration names a MAC address.
    pub const MAC: u64 = 1 << 5;
    /// The driver takes TSOv4.
    pub const GUEST_TSO4: u64 = 1 << 7;
    /// The driver takes TSOv6.
    pub const GUEST_TSO6: u64 = 1 << 8;
    /// The driver takes TSO with ECN.
    pub const GUEST_ECN: u64 = 1 << 9;
    /// The driver takes UFO.
    pub const GUEST_UFO: u64 = 1 << 10;
    /// The device takes TSOv4.
    pub const HOST_TSO4: u64 = 1 << 11;
    /// The device takes TSOv6.
    pub const HOST_TSO6: u64 = 1 << 12;
    /// The device takes TSO with ECN.
    pub const HOST_ECN: u64 = 1 << 13;
    /// The device takes UFO.
    pub const HOST_UFO: u64 = 1 << 14;
    /// The driver can merge receive buffers.
    pub const MRG_RXBUF: u64 = 1 << 15;
    /// The configuration has a status field.
    pub const STATUS: u64 = 1 << 16;
    /// There is a control queue.
    pub const CTRL_VQ: u64 = 1 << 17;
    /// Receive modes can be set.
    pub const CTRL_RX: u64 = 1 << 18;
    /// There are several queue pairs.
    pub const MQ: u64 = 1 << 22;
    /// The MAC address can be set by command.
    pub const CTRL_MAC_ADDR: u64 = 1 << 23;
    /// The driver takes USO over IPv4.
    pub const GUEST_USO4: u64 = 1 << 54;
    /// The driver takes USO over IPv6.
    pub const GUEST_USO6: u64 = 1 << 55;
    /// The device takes USO.
    pub const HOST_USO: u64 = 1 << 56;

    /// What a driver may switch by VIRTIO_NET_CTRL_GUEST_OFFLOADS_SET (§5.1.6.5.6).
    pub const GUEST_OFFLOADS: u64 =
        GUEST_CSUM | GUEST_TSO4 | GUEST_TSO6 | GUEST_ECN | GUEST_UFO | GUEST_USO4 | GUEST_USO6;
}

/// VIRTIO_NET_S_LINK_UP.
pub const LINK_UP: u16 = 1;

/// `struct virtio_net_config` as far as the offered features define it (§5.1.4).
#[derive(Clone, Copy, Debug, FromBytes, Immutable, IntoBytes, KnownLayout)]
#[repr(C)]
pub struct Config {
    /// MAC address.
    pub mac: [u8; 6],
    /// Link status.
    pub status: [u8; 2],
    /// Queue pairs that the device has.
    pub max_virtqueue_pairs: [u8; 2],
    /// MTU.
    pub mtu: [u8; 2],
}

/// `struct virtio_net_hdr` with `num_buffers`, the one form of virtio 1.x (§5.1.6); little-endian.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, Immutable, IntoBytes, KnownLayout,
)]
#[repr(C)]
pub struct Header {
    /// See [`header_flag`].
    pub flags: u8,
    /// See [`gso`].
    pub gso_type: u8,
    /// Bytes of headers before the segmented payload; a hint.
    pub hdr_len: [u8; 2],
    /// Payload bytes of each segment.
    pub gso_size: [u8; 2],
    /// Where checksumming starts.
    pub csum_start: [u8; 2],
    /// Where the checksum goes, counted from `csum_start`.
    pub csum_offset: [u8; 2],
    /// Receive chains that the packet takes; receive only.
    pub num_buffers: [u8; 2],
}

/// Bytes of a [`Header`].
pub const HEADER_BYTES: usize = size_of::<Header>();

/// Where `num_buffers` lies in a header.
pub const NUM_BUFFERS_OFFSET: usize = 10;

/// Bits of [`Header::flags`].
pub mod header_flag {
    /// The checksum is partial: `csum_start` and `csum_offset` say where to complete it.
    pub const NEEDS_CSUM: u8 = 1;
    /// The checksum was verified; receive only.
    pub const DATA_VALID: u8 = 2;
}

/// Values of [`Header::gso_type`].
pub mod gso {
    /// Not segmented.
    pub const NONE: u8 = 0;
    /// TCP over IPv4.
    pub const TCPV4: u8 = 1;
    /// UDP fragmentation.
    pub const UDP: u8 = 3;
    /// TCP over IPv6.
    pub const TCPV6: u8 = 4;
    /// UDP segmentation.
    pub const UDP_L4: u8 = 5;
    /// Flag: the TCP segments carry ECN.
    pub const ECN: u8 = 0x80;
}

/// The greatest frame with its header: a 64 KiB segment, an Ethernet header with VLAN tag, and ours.
pub const MAX_FRAME_BYTES: usize = 65_536 + 18 + HEADER_BYTES;

/// Control commands (§5.1.6.5): class, then command.
pub mod control {
    /// Class: receive modes; the data is one byte, on or off.
    pub const RX: u8 = 0;
    /// The last of the receive modes that VIRTIO_NET_F_CTRL_RX alone allows.
    pub const RX_ALLMULTI: u8 = 1;
    /// Class: MAC filtering.
    pub const MAC: u8 = 1;
    /// Filter tables of unicast and multicast addresses.
    pub const MAC_TABLE_SET: u8 = 0;
    /// The device's own address.
    pub const MAC_ADDR_SET: u8 = 1;
    /// Class: multi-queue.
    pub const MQ: u8 = 4;
    /// How many queue pairs are in use.
    pub const MQ_VQ_PAIRS_SET: u8 = 0;
    /// Class: offloads of the receive side.
    pub const GUEST_OFFLOADS: u8 = 5;
    /// Which offloads are on.
    pub const GUEST_OFFLOADS_SET: u8 = 0;
    /// The command was carried out.
    pub const OK: u8 = 0;
    /// It was not.
    pub const ERR: u8 = 1;
}
