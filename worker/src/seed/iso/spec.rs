//! Layouts of ECMA-119 (ISO 9660), the Joliet supplement, SUSP 1.09 and RRIP 1.09, and how their numbers are written.

/// Bytes of a logical sector and of a logical block (ECMA-119 6.1.2, 6.2.2).
pub(super) const SECTOR: usize = 2048;
/// The first volume descriptor; the sectors before it are the system area (6.2.1).
pub(super) const FIRST_DESCRIPTOR: u32 = 16;

/// Volume descriptor types (8.1.1).
pub(super) const PRIMARY: u8 = 1;
pub(super) const SUPPLEMENTARY: u8 = 2;
pub(super) const TERMINATOR: u8 = 255;
/// Standard identifier and version at byte 1 of every volume descriptor (8.1.2).
pub(super) const STANDARD_ID: &[u8; 5] = b"CD001";
/// Joliet's escape sequence for UCS-2 level 3, at byte 88 of the supplementary descriptor.
pub(super) const UCS2_LEVEL_3: &[u8; 3] = b"%/E";

/// Offsets in primary and supplementary volume descriptors (8.4, 8.5).
pub(super) mod descriptor {
    pub(in super::super) const SYSTEM_ID: usize = 8;
    pub(in super::super) const VOLUME_ID: usize = 40;
    pub(in super::super) const VOLUME_SPACE_SIZE: usize = 80;
    pub(in super::super) const ESCAPE_SEQUENCES: usize = 88;
    pub(in super::super) const VOLUME_SET_SIZE: usize = 120;
    pub(in super::super) const VOLUME_SEQUENCE_NUMBER: usize = 124;
    pub(in super::super) const LOGICAL_BLOCK_SIZE: usize = 128;
    pub(in super::super) const PATH_TABLE_SIZE: usize = 132;
    pub(in super::super) const TYPE_L_PATH_TABLE: usize = 140;
    pub(in super::super) const TYPE_M_PATH_TABLE: usize = 148;
    pub(in super::super) const ROOT_DIRECTORY_RECORD: usize = 156;
    /// Volume set, publisher, preparer, application, copyright, abstract and bibliographic identifiers.
    pub(in super::super) const IDENTIFIERS: core::ops::Range<usize> = 190..813;
    pub(in super::super) const VOLUME_SET_ID: usize = 190;
    pub(in super::super) const APPLICATION_ID: usize = 574;
    /// Creation, modification, expiration and effective date, 17 bytes each.
    pub(in super::super) const DATES: [usize; 4] = [813, 830, 847, 864];
    pub(in super::super) const FILE_STRUCTURE_VERSION: usize = 881;
    pub(in super::super) const ID_BYTES: usize = 32;
    pub(in super::super) const LONG_ID_BYTES: usize = 128;
}

/// File flag of a directory (9.1.6).
pub(super) const FLAG_DIRECTORY: u8 = 2;
/// Fixed part of a directory record (9.1).
pub(super) const RECORD_FIXED: usize = 33;
/// Length of a directory record is one byte; records have even lengths (9.1.1, 9.1.13).
pub(super) const RECORD_MAX: usize = 254;
/// The path table of a volume with only a root directory (9.4).
pub(super) const PATH_TABLE_BYTES: usize = 10;
/// Names of the records for the directory itself and for its parent (6.8.2.2).
pub(super) const SELF_ID: &[u8] = &[0];
pub(super) const PARENT_ID: &[u8] = &[1];

/// Every time in the image: 2024-01-01 00:00:00 UTC, so that equal input gives equal bytes.
/// As recorded in directory records and TF entries (9.1.5): years since 1900, month, day, h, m, s, quarter hours from UTC.
pub(super) const RECORD_TIME: [u8; 7] = [124, 1, 1, 0, 0, 0, 0];
/// The same as recorded in volume descriptors (8.4.26.1).
pub(super) const DESCRIPTOR_TIME: &[u8; 17] = b"2024010100000000\0";
/// "Not specified" in that form.
pub(super) const NO_DESCRIPTOR_TIME: &[u8; 17] = b"0000000000000000\0";

/// RRIP's extension record: identifier, description and source as RRIP 4.3 words them.
pub(super) const RRIP_ID: &[u8] = b"RRIP_1991A";
pub(super) const RRIP_DESCRIPTION: &[u8] =
    b"THE ROCK RIDGE INTERCHANGE PROTOCOL PROVIDES SUPPORT FOR POSIX FILE SYSTEM SEMANTICS";
pub(super) const RRIP_SOURCE: &[u8] = b"PLEASE CONTACT DISC PUBLISHER FOR SPECIFICATION SOURCE.  SEE PUBLISHER IDENTIFIER IN PRIMARY VOLUME DESCRIPTOR FOR CONTACT INFORMATION.";

/// A 32-bit number in both byte orders (7.3.3).
pub(super) fn both_u32(value: u32) -> [u8; 8] {
    let mut bytes = [0; 8];
    bytes[..4].copy_from_slice(&value.to_le_bytes());
    bytes[4..].copy_from_slice(&value.to_be_bytes());
    bytes
}

/// A 16-bit number in both byte orders (7.2.3).
pub(super) fn both_u16(value: u16) -> [u8; 4] {
    let mut bytes = [0; 4];
    bytes[..2].copy_from_slice(&value.to_le_bytes());
    bytes[2..].copy_from_slice(&value.to_be_bytes());
    bytes
}

/// Big-endian UCS-2 (Joliet).
pub(super) fn ucs2(text: &str) -> Vec<u8> {
    text.encode_utf16().flat_map(u16::to_be_bytes).collect()
}
