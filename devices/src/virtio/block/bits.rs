//! Register and wire layouts of the block device: virtio 1.2 §5.2.3 (features), §5.2.4 (configuration), §5.2.6 (requests).

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Bytes of a sector, whatever `blk_size` says.
pub const SECTOR_BYTES: u64 = 512;

/// Feature bits (§5.2.3).
pub mod feature {
    /// `seg_max` holds.
    pub const SEG_MAX: u64 = 1 << 2;
    /// The disk is read-only.
    pub const RO: u64 = 1 << 5;
    /// `blk_size` holds.
    pub const BLK_SIZE: u64 = 1 << 6;
    /// Flush requests are understood.
    pub const FLUSH: u64 = 1 << 9;
    /// The topology fields hold.
    pub const TOPOLOGY: u64 = 1 << 10;
    /// `num_queues` holds.
    pub const MQ: u64 = 1 << 12;
    /// Discard requests are understood.
    pub const DISCARD: u64 = 1 << 13;
    /// Write-zeroes requests are understood.
    pub const WRITE_ZEROES: u64 = 1 << 14;
}

/// `struct virtio_blk_config` up to the write-zeroes limits (§5.2.4); little-endian.
#[derive(Clone, Copy, Debug, Default, FromBytes, Immutable, IntoBytes, KnownLayout)]
#[repr(C)]
pub struct Config {
    /// Size in sectors.
    pub capacity: [u8; 8],
    /// Not offered.
    pub size_max: [u8; 4],
    /// The most data segments of a request.
    pub seg_max: [u8; 4],
    /// Not offered.
    pub geometry: [u8; 4],
    /// Bytes of a logical block.
    pub blk_size: [u8; 4],
    /// Logical blocks of a physical one, as a power of two.
    pub physical_block_exp: u8,
    /// Offset of the first aligned logical block.
    pub alignment_offset: u8,
    /// The least I/O that makes sense, in logical blocks.
    pub min_io_size: [u8; 2],
    /// The best I/O, in logical blocks.
    pub opt_io_size: [u8; 4],
    /// 1: written data is volatile until flushed. Not writable, since VIRTIO_BLK_F_CONFIG_WCE is not offered.
    pub writeback: u8,
    /// Reserved.
    pub unused0: u8,
    /// Request queues.
    pub num_queues: [u8; 2],
    /// The most sectors of a discard segment.
    pub max_discard_sectors: [u8; 4],
    /// The most segments of a discard request.
    pub max_discard_seg: [u8; 4],
    /// What discards should be aligned to, in sectors.
    pub discard_sector_alignment: [u8; 4],
    /// The most sectors of a write-zeroes segment.
    pub max_write_zeroes_sectors: [u8; 4],
    /// The most segments of a write-zeroes request.
    pub max_write_zeroes_seg: [u8; 4],
    /// Whether write-zeroes requests may give space back.
    pub write_zeroes_may_unmap: u8,
    /// Reserved.
    pub unused1: [u8; 3],
}

/// The readable head of each request (§5.2.6); little-endian.
#[derive(Clone, Copy, Debug, Default, FromBytes, Immutable, IntoBytes, KnownLayout)]
#[repr(C)]
pub struct Header {
    /// See [`kind`].
    pub kind: [u8; 4],
    /// Ignored.
    pub reserved: [u8; 4],
    /// First sector of a read or write.
    pub sector: [u8; 8],
}

/// Request types.
pub mod kind {
    /// Read.
    pub const IN: u32 = 0;
    /// Write.
    pub const OUT: u32 = 1;
    /// Make durable what was written.
    pub const FLUSH: u32 = 4;
    /// Tell the serial number.
    pub const GET_ID: u32 = 8;
    /// Forget contents.
    pub const DISCARD: u32 = 11;
    /// Make contents zero.
    pub const WRITE_ZEROES: u32 = 13;
}

/// `struct virtio_blk_discard_write_zeroes`; little-endian.
#[derive(Clone, Copy, Debug, Default, FromBytes, Immutable, IntoBytes, KnownLayout)]
#[repr(C)]
pub struct DiscardSegment {
    /// First sector.
    pub sector: [u8; 8],
    /// How many.
    pub num_sectors: [u8; 4],
    /// See [`DISCARD_FLAG_UNMAP`].
    pub flags: [u8; 4],
}

/// The space of a write-zeroes segment may be given back.
pub const DISCARD_FLAG_UNMAP: u32 = 1;

/// Bytes of the answer to GET_ID.
pub const ID_BYTES: usize = 20;

/// Values of the status byte.
pub mod status {
    /// Done.
    pub const OK: u8 = 0;
    /// Failed.
    pub const IOERR: u8 = 1;
    /// Not understood.
    pub const UNSUPP: u8 = 2;
}
