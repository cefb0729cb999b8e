//! Registers, keys and layouts of the firmware configuration device (QEMU `docs/specs/fw_cfg`, version 10).

use zerocopy::byteorder::big_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// The first port: selector (2 bytes, little-endian), data (1 byte at +1), DMA address (8 bytes at +4, big-endian).
pub(super) const PORT: u16 = 0x510;
/// Ports in the range.
pub(super) const PORTS: u16 = 12;
pub(super) const DATA: u64 = 1;
pub(super) const DMA_HIGH: u64 = 4;
pub(super) const DMA_LOW: u64 = 8;

/// What the DMA address register reads as.
pub(super) const DMA_SIGNATURE: [u8; 8] = *b"QEMU CFG";

/// Keys that are not files.
pub(super) mod key {
    pub(in super::super) const SIGNATURE: u16 = 0x00;
    pub(in super::super) const ID: u16 = 0x01;
    pub(in super::super) const FILE_DIRECTORY: u16 = 0x19;
    /// The first file; the others follow.
    pub(in super::super) const FIRST_FILE: u16 = 0x20;
    /// Bit 14 asks to write, which no item but by DMA allows.
    pub(in super::super) const WRITE_CHANNEL: u16 = 1 << 14;
}

pub(super) const SIGNATURE: [u8; 4] = *b"QEMU";
/// The traditional interface, and DMA.
pub(super) const ID: u32 = 0b11;
/// The longest name of a file, its final NUL included.
pub(super) const NAME_BYTES: usize = 56;

/// An entry of the directory of files.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct FileEntry {
    pub(super) size: U32,
    pub(super) select: U16,
    pub(super) reserved: U16,
    pub(super) name: [u8; NAME_BYTES],
}

/// What the guest leaves in its memory for a DMA transfer.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct DmaAccess {
    pub(super) control: U32,
    pub(super) length: U32,
    pub(super) address: U64,
}

/// Bits of [`DmaAccess::control`]; the upper half is a key where [`control::SELECT`] is set.
pub(super) mod control {
    pub(in super::super) const ERROR: u32 = 1 << 0;
    pub(in super::super) const READ: u32 = 1 << 1;
    pub(in super::super) const SKIP: u32 = 1 << 2;
    pub(in super::super) const SELECT: u32 = 1 << 3;
    pub(in super::super) const WRITE: u32 = 1 << 4;
}
