//! Layouts of the qcow2 format (QEMU, docs/interop/qcow2), and nothing else. Everything on disk is big endian.
//!
//! ```text
//!  guest offset  | L1 index          | L2 index       | offset in cluster |
//!                   header.l1_table     l2 table          host cluster
//!                └── size - l2_bits ─┘└─ cluster_bits-3 ─┘└─ cluster_bits ─┘
//! ```
//!
//! With extended L2 entries there are half as many in a table, and each says of 32 subclusters where they are.

use bitflags::bitflags;
use zerocopy::byteorder::big_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// `QFI\xfb`.
pub(crate) const MAGIC: u32 = 0x5146_49fb;
/// Bytes of a version 2 header.
pub(crate) const HEADER_V2: usize = 72;
/// Bytes of the smallest version 3 header.
pub(crate) const HEADER_V3: usize = 104;

pub(crate) const CLUSTER_BITS: std::ops::RangeInclusive<u32> = 9..=21;
/// 64-bit refcounts.
pub(crate) const MAX_REFCOUNT_ORDER: u32 = 6;

/// Caps that QEMU puts on what it loads, in bytes or entries.
pub(crate) const MAX_L1_BYTES: u64 = 32 << 20;
pub(crate) const MAX_REFCOUNT_TABLE_BYTES: u64 = 8 << 20;
pub(crate) const MAX_SNAPSHOTS: u32 = 65536;
pub(crate) const MAX_BACKING_NAME: u32 = 1023;
pub(crate) const MAX_SNAPSHOT_EXTRA: u32 = 1024;
pub(crate) const MAX_SNAPSHOT_TABLE_BYTES: u64 = 64 << 20;

/// The header up to `snapshots_offset`, the same in both versions.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct HeaderV2 {
    pub(crate) magic: U32,
    pub(crate) version: U32,
    pub(crate) backing_file_offset: U64,
    pub(crate) backing_file_size: U32,
    pub(crate) cluster_bits: U32,
    pub(crate) size: U64,
    pub(crate) crypt_method: U32,
    pub(crate) l1_size: U32,
    pub(crate) l1_table_offset: U64,
    pub(crate) refcount_table_offset: U64,
    pub(crate) refcount_table_clusters: U32,
    pub(crate) nb_snapshots: U32,
    pub(crate) snapshots_offset: U64,
}

/// What version 3 adds.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct HeaderV3Tail {
    pub(crate) incompatible_features: U64,
    pub(crate) compatible_features: U64,
    pub(crate) autoclear_features: U64,
    pub(crate) refcount_order: U32,
    pub(crate) header_length: U32,
}

/// Where single fields lie that are rewritten alone.
pub(crate) mod field {
    pub(crate) const SIZE: u64 = 24;
    pub(crate) const L1_SIZE: u64 = 36;
    pub(crate) const REFCOUNT_TABLE_OFFSET: u64 = 48;
    pub(crate) const INCOMPATIBLE_FEATURES: u64 = 72;
    pub(crate) const AUTOCLEAR_FEATURES: u64 = 88;
    pub(crate) const COMPRESSION_TYPE: usize = 104;
}

bitflags! {
    /// Incompatible features: an image with one that is not known must not be opened.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(crate) struct Incompatible: u64 {
        /// Refcounts may be wrong (lazy refcounts and no clean end).
        const DIRTY = 1 << 0;
        /// Some structure may be corrupt: no writing.
        const CORRUPT = 1 << 1;
        /// Guest data lies in another file.
        const EXTERNAL_DATA_FILE = 1 << 2;
        /// The compression type field is not zero.
        const COMPRESSION_TYPE = 1 << 3;
        /// L2 entries of 128 bits with subclusters.
        const EXTENDED_L2 = 1 << 4;
    }
}

/// Header extension types.
pub(crate) mod extension {
    pub(crate) const END: u32 = 0;
    pub(crate) const BACKING_FORMAT: u32 = 0xe279_2aca;
    pub(crate) const FEATURE_NAMES: u32 = 0x6803_f857;
    pub(crate) const BITMAPS: u32 = 0x2385_2875;
}

/// Head of a header extension; its data follows, padded to a multiple of 8.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct ExtensionHead {
    pub(crate) kind: U32,
    pub(crate) length: U32,
}

/// Head of a snapshot table entry; extra data, id and name follow, padded to a multiple of 8.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct SnapshotHead {
    pub(crate) l1_table_offset: U64,
    pub(crate) l1_size: U32,
    pub(crate) id_size: U16,
    pub(crate) name_size: U16,
    pub(crate) date_seconds: U32,
    pub(crate) date_nanoseconds: U32,
    pub(crate) vm_clock: U64,
    pub(crate) vm_state_size: U32,
    pub(crate) extra_data_size: U32,
}

/// The bitmaps extension.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct BitmapsExtension {
    pub(crate) nb_bitmaps: U32,
    pub(crate) reserved: U32,
    pub(crate) directory_size: U64,
    pub(crate) directory_offset: U64,
}

/// Head of a bitmap directory entry; extra data and name follow, padded to a multiple of 8.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct BitmapHead {
    pub(crate) table_offset: U64,
    pub(crate) table_size: U32,
    pub(crate) flags: U32,
    pub(crate) kind: u8,
    pub(crate) granularity_bits: u8,
    pub(crate) name_size: U16,
    pub(crate) extra_data_size: U32,
}

/// Bits 9..=55: a host offset in an L1 or L2 entry.
pub(crate) const OFFSET_MASK: u64 = 0x00ff_ffff_ffff_fe00;
/// Bit 63: the refcount is exactly one, so that writing in place is right. Exact in the active tables only.
pub(crate) const COPIED: u64 = 1 << 63;
/// Bit 62 of an L2 entry.
pub(crate) const COMPRESSED: u64 = 1 << 62;
/// Bit 0 of an L2 entry (version 3): reads as zero, whatever lies at the host offset or below.
pub(crate) const ZERO: u64 = 1;
/// Bits of an L1 entry that must be zero.
pub(crate) const L1_RESERVED: u64 = 0x7f00_0000_0000_01ff;
/// Bits of an L2 entry, other than that of a compressed cluster, that must be zero.
pub(crate) const L2_RESERVED: u64 = 0x3f00_0000_0000_01fe;
/// Bits of a refcount table entry that hold the offset.
pub(crate) const REFCOUNT_OFFSET_MASK: u64 = 0xffff_ffff_ffff_fe00;
/// No host offset reaches this.
pub(crate) const HOST_LIMIT: u64 = 1 << 56;

/// Sizes that follow from two numbers of the header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Geometry {
    pub(crate) cluster_bits: u32,
    pub(crate) refcount_order: u32,
    /// L2 entries have 16 bytes and clusters 32 subclusters.
    pub(crate) extended_l2: bool,
}

/// log2 of the subclusters of a cluster with extended L2 entries.
const SUBCLUSTERS_BITS: u32 = 5;
/// The smallest clusters with extended L2 entries: their subclusters have 512 bytes.
pub(crate) const MIN_EXTENDED_CLUSTER_BITS: u32 = 14;

impl Geometry {
    pub(crate) fn cluster_size(self) -> u64 {
        1 << self.cluster_bits
    }

    /// Entries of 8 bytes that fit a cluster.
    pub(crate) fn table_entries(self) -> u64 {
        1 << (self.cluster_bits - 3)
    }

    /// Bytes of an L2 entry.
    pub(crate) fn l2_entry_bytes(self) -> u64 {
        8 << u32::from(self.extended_l2)
    }

    /// Entries of an L2 table.
    pub(crate) fn l2_entries(self) -> u64 {
        self.cluster_size() / self.l2_entry_bytes()
    }

    /// Guest bytes that one L1 entry maps.
    pub(crate) fn l1_span(self) -> u64 {
        self.l2_entries() << self.cluster_bits
    }

    /// log2 of the bytes that are mapped as one: a subcluster, or a cluster where there are none.
    pub(crate) fn unit_bits(self) -> u32 {
        if self.extended_l2 {
            self.cluster_bits - SUBCLUSTERS_BITS
        } else {
            self.cluster_bits
        }
    }

    /// Number of the subcluster at `offset` in its cluster; 0 where there are none.
    pub(crate) fn subcluster(self, offset: u64) -> u32 {
        (self.in_cluster(offset) >> self.unit_bits()) as u32
    }

    /// log2 of the entries of a refcount block.
    pub(crate) fn refcount_block_bits(self) -> u32 {
        self.cluster_bits + 3 - self.refcount_order
    }

    /// Rounds down to a cluster.
    pub(crate) fn down(self, offset: u64) -> u64 {
        offset & !(self.cluster_size() - 1)
    }

    /// Rounds up to a cluster; `None` on overflow.
    pub(crate) fn up(self, offset: u64) -> Option<u64> {
        Some(self.down(offset.checked_add(self.cluster_size() - 1)?))
    }

    pub(crate) fn in_cluster(self, offset: u64) -> u64 {
        offset & (self.cluster_size() - 1)
    }

    /// Number of the cluster at `offset`.
    pub(crate) fn cluster(self, offset: u64) -> u64 {
        offset >> self.cluster_bits
    }

    /// L1 entries needed for a disk of `size` bytes.
    pub(crate) fn l1_entries(self, size: u64) -> u64 {
        size.div_ceil(self.l1_span())
    }
}

/// An L2 entry as it is stored. The bitmap is there with extended entries only: bit `n` says that subcluster `n` lies in the host
/// cluster, bit `32 + n` that it reads as zero.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct RawEntry {
    pub(crate) entry: u64,
    pub(crate) bitmap: u64,
}

/// Every subcluster lies in the host cluster.
pub(crate) const ALL_ALLOCATED: u64 = 0xffff_ffff;
/// Every subcluster reads as zero.
pub(crate) const ALL_ZERO: u64 = ALL_ALLOCATED << 32;

/// What host space an L2 entry refers to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reference {
    Nothing,
    /// A cluster, for data now or later.
    Cluster {
        host: u64,
        copied: bool,
    },
    /// See [`L2Entry::Compressed`].
    Compressed {
        host: u64,
        bytes: u64,
    },
}

impl RawEntry {
    /// The entry at the beginning of `bytes`; what is missing is zero.
    pub(crate) fn read(bytes: &[u8], geometry: Geometry) -> Self {
        let word = |at: usize| {
            let bytes = bytes.get(at..).and_then(|rest| rest.first_chunk());
            bytes.map_or(0, |bytes| u64::from_be_bytes(*bytes))
        };
        Self {
            entry: word(0),
            bitmap: if geometry.extended_l2 { word(8) } else { 0 },
        }
    }

    /// Stores the entry in bytes of its size.
    pub(crate) fn write(self, bytes: &mut [u8]) {
        let words = [self.entry, self.bitmap];
        for (bytes, word) in bytes.chunks_exact_mut(8).zip(words) {
            bytes.copy_from_slice(&word.to_be_bytes());
        }
    }

    /// The same, reading as zero with its host cluster kept.
    pub(crate) fn zeroed(self, geometry: Geometry) -> Self {
        if geometry.extended_l2 {
            return Self {
                entry: self.entry,
                bitmap: ALL_ZERO,
            };
        }
        Self {
            entry: self.entry | ZERO,
            bitmap: 0,
        }
    }

    /// What the entry refers to; the error says what is wrong with it.
    pub(crate) fn reference(
        self,
        geometry: Geometry,
        version: u32,
    ) -> Result<Reference, &'static str> {
        if self.entry & COMPRESSED != 0 {
            if self.bitmap != 0 {
                return Err("the L2 entry of a compressed cluster has a bitmap");
            }
            let offset_bits = 62 - (geometry.cluster_bits - 8);
            let descriptor = self.entry & (COMPRESSED - 1);
            let host = descriptor & ((1 << offset_bits) - 1);
            if host >= HOST_LIMIT {
                return Err("an L2 entry's compressed data is out of reach");
            }
            let sectors = (descriptor >> offset_bits) + 1;
            return Ok(Reference::Compressed {
                host,
                bytes: sectors * 512 - (host & 511),
            });
        }
        let host = self.entry & OFFSET_MASK;
        if geometry.in_cluster(host) != 0 {
            return Err("an L2 entry's host offset is not at a cluster's start");
        }
        if version < 3 && self.entry & ZERO != 0 {
            return Err("an L2 entry of a version 2 image has the zero flag");
        }
        let allocated = self.bitmap & ALL_ALLOCATED;
        if allocated & (self.bitmap >> 32) != 0 || (host == 0 && allocated != 0) {
            return Err("an L2 entry's bitmap contradicts itself");
        }
        Ok(if host == 0 {
            Reference::Nothing
        } else {
            Reference::Cluster {
                host,
                copied: self.entry & COPIED != 0,
            }
        })
    }
}

/// An L2 entry, or what it says of one subcluster, told apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum L2Entry {
    /// Reads what lies below; a host cluster may be kept for later (extended entries only).
    Unallocated { kept: Option<u64>, copied: bool },
    /// Reads zero; a host cluster may be kept for later.
    Zero { host: Option<u64>, copied: bool },
    /// Reads the host cluster.
    Data { host: u64, copied: bool },
    /// Reads what inflates from `bytes` bytes (sector-rounded, so an upper bound) at `host`.
    Compressed { host: u64, bytes: u64 },
}

impl L2Entry {
    /// Decodes an entry for subcluster `n` (0 where there are none); the error says what is wrong with it. Host offsets are those
    /// of the cluster.
    pub(crate) fn decode(
        raw: RawEntry,
        n: u32,
        geometry: Geometry,
        version: u32,
    ) -> Result<Self, &'static str> {
        let (host, copied) = match raw.reference(geometry, version)? {
            Reference::Compressed { host, bytes } => return Ok(Self::Compressed { host, bytes }),
            Reference::Nothing => (None, false),
            Reference::Cluster { host, copied } => (Some(host), copied),
        };
        let (allocated, zero) = if geometry.extended_l2 {
            (raw.bitmap >> n & 1 != 0, raw.bitmap >> (32 + n) & 1 != 0)
        } else {
            (host.is_some(), raw.entry & ZERO != 0)
        };
        Ok(match (host, allocated) {
            _ if zero => Self::Zero { host, copied },
            (Some(host), true) => Self::Data { host, copied },
            (kept, _) => Self::Unallocated { kept, copied },
        })
    }
}

/// Reads entry `index` of a refcount block (`refcount_bits = 1 << order`); entries under a byte go from the least significant
/// bit up. `None` past the block's end.
pub(crate) fn get_refcount(block: &[u8], order: u32, index: usize) -> Option<u64> {
    if order < 3 {
        let bits = 1usize << order;
        let per_byte = 8 / bits;
        let byte = u64::from(*block.get(index / per_byte)?);
        return Some((byte >> (index % per_byte * bits)) & ((1 << bits) - 1));
    }
    let width = 1usize << (order - 3);
    let bytes = block.get(index.checked_mul(width)?..)?.get(..width)?;
    Some(
        bytes
            .iter()
            .fold(0, |value, byte| (value << 8) | u64::from(*byte)),
    )
}

/// Writes an entry of a refcount block; what lies past its end or does not fit its width is not written.
pub(crate) fn put_refcount(block: &mut [u8], order: u32, index: usize, value: u64) {
    if order < 3 {
        let bits = 1usize << order;
        let per_byte = 8 / bits;
        let shift = index % per_byte * bits;
        let mask = ((1u16 << bits) - 1) as u8;
        if let Some(byte) = block.get_mut(index / per_byte) {
            *byte = (*byte & !(mask << shift)) | ((value as u8 & mask) << shift);
        }
        return;
    }
    let width = 1usize << (order - 3);
    if let Some(bytes) = block
        .get_mut(index * width..)
        .and_then(|rest| rest.get_mut(..width))
    {
        bytes.copy_from_slice(value.to_be_bytes().get(8 - width..).unwrap_or_default());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn narrow_refcounts_start_at_the_least_significant_bit() {
        assert_eq!(get_refcount(&[0b0000_0010], 0, 1), Some(1));
        assert_eq!(get_refcount(&[0b0011_0000], 1, 2), Some(3));
        assert_eq!(get_refcount(&[0x5a], 2, 1), Some(5));
        assert_eq!(get_refcount(&[1, 2, 3, 4], 4, 1), Some(0x0304));
        assert_eq!(get_refcount(&[1, 2, 3, 4], 4, 2), None);
    }

    #[test]
    fn a_compressed_entry_counts_additional_sectors() {
        let geometry = Geometry {
            cluster_bits: 16,
            refcount_order: 4,
            extended_l2: false,
        };
        let raw = RawEntry {
            entry: COMPRESSED | (2 << 54) | 0x5_0123,
            bitmap: 0,
        };
        let expected = L2Entry::Compressed {
            host: 0x5_0123,
            bytes: 3 * 512 - 0x123,
        };
        assert_eq!(L2Entry::decode(raw, 0, geometry, 3), Ok(expected));
    }

    proptest! {
        #[test]
        fn a_refcount_is_read_as_written_and_its_neighbours_stay(order in 0u32..=6, index in 0usize..64, value: u64) {
            let value = value & (u64::MAX >> (64 - (1 << order)));
            let mut block = [0xa5; 512];
            let before: Vec<_> = (0..64).map(|i| get_refcount(&block, order, i)).collect();
            put_refcount(&mut block, order, index, value);
            for (i, old) in before.iter().enumerate() {
                let expected = if i == index { Some(value) } else { *old };
                prop_assert_eq!(get_refcount(&block, order, i), expected);
            }
        }

        #[test]
        fn no_entry_decodes_to_a_host_offset_out_of_reach(entry: u64, bitmap: u64, n in 0u32..32, extended_l2: bool, cluster_bits in 9u32..=21, version in 2u32..=3) {
            let geometry = Geometry { cluster_bits, refcount_order: 4, extended_l2 };
            let raw = RawEntry { entry, bitmap };
            if let Ok(L2Entry::Data { host, .. } | L2Entry::Compressed { host, .. }) = L2Entry::decode(raw, n, geometry, version) {
                prop_assert!(host < HOST_LIMIT);
            }
        }
    }
}
