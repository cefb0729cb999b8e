//! The header: parsed once, checked in full, before anything it says is believed.
//!
//! ```text
//!  0     72                104          header_length                     backing_file_offset
//!  | v2   | v3: features … | unknown … | extensions: kind length data … |  backing file name |   one cluster
//! ```
//!
//! Changes are never a rewrite of the whole: single fields are updated in place, so that whatever is unknown here is kept.

use std::path::Path;

use zerocopy::FromBytes;

use super::spec::{
    self, BitmapsExtension, ExtensionHead, Geometry, HEADER_V2, HEADER_V3, HeaderV2, HeaderV3Tail,
    Incompatible, MAGIC,
};
use crate::error::{Error, ErrorKind};

/// How clusters are compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compression {
    /// Raw deflate.
    Zlib,
    /// Zstandard.
    Zstd,
}

/// What a header says about the layer below.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct BackingName {
    /// The file name as stored.
    pub(crate) name: Vec<u8>,
    /// The format of the extension, if there is one.
    pub(crate) format: Option<String>,
}

/// A table of 8-byte entries in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TableAt {
    /// Host offset, at a cluster's start.
    pub(crate) offset: u64,
    /// Number of entries.
    pub(crate) entries: u64,
}

/// A checked header.
#[derive(Clone, Debug)]
pub(crate) struct Header {
    pub(crate) version: u32,
    pub(crate) geometry: Geometry,
    /// Size of the disk in bytes.
    pub(crate) size: u64,
    pub(crate) l1: TableAt,
    pub(crate) refcount_table: TableAt,
    pub(crate) nb_snapshots: u32,
    pub(crate) snapshots_offset: u64,
    pub(crate) incompatible: Incompatible,
    pub(crate) compatible: u64,
    pub(crate) autoclear: u64,
    pub(crate) compression: Compression,
    pub(crate) backing: Option<BackingName>,
    pub(crate) bitmaps: Option<BitmapsExtension>,
}

impl Header {
    /// How many bytes [`Header::parse`] wants to see: the first cluster. `start` is the file's beginning.
    pub(crate) fn wanted(path: &Path, start: &[u8]) -> Result<usize, Error> {
        Ok(1 << fixed_part(path, start)?.1)
    }

    /// Checks and decodes a header from the first cluster of a file (shorter where the file is).
    pub(crate) fn parse(path: &Path, bytes: &[u8]) -> Result<Self, Error> {
        let (v2, cluster_bits) = fixed_part(path, bytes)?;
        let bad = |field, reason: String| Error::header(path, field, reason);
        let version = v2.version.get();
        let (tail, header_length) = version_part(path, bytes, version, 1 << cluster_bits)?;
        let incompatible = features(path, tail.incompatible_features.get(), bytes, header_length)?;
        let refcount_order = tail.refcount_order.get();
        if refcount_order > spec::MAX_REFCOUNT_ORDER {
            return Err(bad(
                "refcount_order",
                format!("is {refcount_order}, the greatest is 6"),
            ));
        }
        let geometry = Geometry {
            cluster_bits,
            refcount_order,
            extended_l2: incompatible.contains(Incompatible::EXTENDED_L2),
        };
        if geometry.extended_l2 && cluster_bits < spec::MIN_EXTENDED_CLUSTER_BITS {
            let reason = format!("is {cluster_bits}; extended L2 entries need at least 14");
            return Err(bad("cluster_bits", reason));
        }
        if v2.crypt_method.get() != 0 {
            return Err(Error::new(
                path,
                ErrorKind::Unsupported("encryption (crypt_method is not 0)".into()),
            ));
        }
        let compression = compression(path, bytes, header_length, incompatible)?;

        let size = v2.size.get();
        let l1 = TableAt {
            offset: v2.l1_table_offset.get(),
            entries: v2.l1_size.get().into(),
        };
        check_table(path, geometry, "l1_table_offset", l1, spec::MAX_L1_BYTES)?;
        let needed = geometry.l1_entries(size);
        if l1.entries < needed {
            let reason = format!("is {}, a disk of {size} bytes needs {needed}", l1.entries);
            return Err(bad("l1_size", reason));
        }
        let clusters = u64::from(v2.refcount_table_clusters.get());
        let refcount_table = TableAt {
            offset: v2.refcount_table_offset.get(),
            entries: clusters * geometry.table_entries(),
        };
        if clusters == 0 {
            return Err(bad("refcount_table_clusters", "is 0".into()));
        }
        let most = spec::MAX_REFCOUNT_TABLE_BYTES;
        check_table(
            path,
            geometry,
            "refcount_table_offset",
            refcount_table,
            most,
        )?;
        let nb_snapshots = v2.nb_snapshots.get();
        let snapshots_offset = v2.snapshots_offset.get();
        if nb_snapshots > spec::MAX_SNAPSHOTS {
            return Err(bad(
                "nb_snapshots",
                format!("is {nb_snapshots}, the most is 65536"),
            ));
        }
        if nb_snapshots > 0 && geometry.in_cluster(snapshots_offset) != 0 {
            return Err(bad(
                "snapshots_offset",
                "is not at a cluster's start".into(),
            ));
        }

        let name = backing_name(path, bytes, &v2, header_length)?;
        let name_start = v2.backing_file_offset.get();
        let extensions_end = if name.is_some() {
            name_start
        } else {
            bytes.len() as u64
        };
        let extensions = bytes
            .get(
                ..usize::try_from(extensions_end)
                    .unwrap_or(usize::MAX)
                    .min(bytes.len()),
            )
            .and_then(|b| b.get(header_length..))
            .unwrap_or_default();
        let (format, bitmaps) = extensions_of(path, extensions)?;
        Ok(Self {
            version,
            geometry,
            size,
            l1,
            refcount_table,
            nb_snapshots,
            snapshots_offset,
            incompatible,
            compatible: tail.compatible_features.get(),
            autoclear: tail.autoclear_features.get(),
            compression,
            backing: name.map(|name| BackingName { name, format }),
            bitmaps,
        })
    }
}

/// Magic, version and cluster size: what is needed before the rest can be read.
fn fixed_part(path: &Path, bytes: &[u8]) -> Result<(HeaderV2, u32), Error> {
    let magic = bytes
        .first_chunk()
        .map_or(0, |b: &[u8; 4]| u32::from_be_bytes(*b));
    if magic != MAGIC {
        return Err(Error::new(path, ErrorKind::Magic(magic)));
    }
    let Ok((v2, _)) = HeaderV2::read_from_prefix(bytes) else {
        return Err(Error::header(
            path,
            "header_length",
            "is more than the file has",
        ));
    };
    let version = v2.version.get();
    if !(2..=3).contains(&version) {
        let reason = format!("is {version}, known are 2 and 3");
        return Err(Error::header(path, "version", reason));
    }
    let cluster_bits = v2.cluster_bits.get();
    if !spec::CLUSTER_BITS.contains(&cluster_bits) {
        return Err(Error::header(
            path,
            "cluster_bits",
            format!("is {cluster_bits}, not in 9..=21"),
        ));
    }
    Ok((v2, cluster_bits))
}

fn version_part(
    path: &Path,
    bytes: &[u8],
    version: u32,
    cluster_size: usize,
) -> Result<(HeaderV3Tail, usize), Error> {
    if version == 2 {
        let tail = HeaderV3Tail {
            incompatible_features: 0.into(),
            compatible_features: 0.into(),
            autoclear_features: 0.into(),
            refcount_order: 4.into(),
            header_length: (HEADER_V2 as u32).into(),
        };
        return Ok((tail, HEADER_V2));
    }
    let bad = |reason| Error::header(path, "header_length", reason);
    let tail = bytes
        .get(HEADER_V2..)
        .and_then(|rest| HeaderV3Tail::read_from_prefix(rest).ok())
        .ok_or_else(|| bad("is more than the file has".to_owned()))?
        .0;
    let length = tail.header_length.get() as usize;
    if length < HEADER_V3
        || !length.is_multiple_of(8)
        || length > cluster_size
        || length > bytes.len()
    {
        return Err(bad(format!(
            "is {length}: not a multiple of 8 from 104 to the cluster's end"
        )));
    }
    Ok((tail, length))
}

fn features(
    path: &Path,
    bits: u64,
    bytes: &[u8],
    header_length: usize,
) -> Result<Incompatible, Error> {
    let known = Incompatible::from_bits_truncate(bits);
    let unsupported = |what: String| Err(Error::new(path, ErrorKind::Unsupported(what)));
    let unknown = bits & !Incompatible::all().bits();
    if unknown != 0 {
        let bit = unknown.trailing_zeros();
        let name =
            feature_name(bytes, header_length, bit).map_or(String::new(), |n| format!(" ({n})"));
        return unsupported(format!("incompatible feature bit {bit}{name}"));
    }
    if known.contains(Incompatible::EXTERNAL_DATA_FILE) {
        return unsupported("an external data file (incompatible feature bit 2)".into());
    }
    Ok(known)
}

/// The name that the image itself gives to an incompatible feature, printable characters only.
fn feature_name(bytes: &[u8], header_length: usize, bit: u32) -> Option<String> {
    let mut rest = bytes.get(header_length..)?;
    while let Ok((head, data)) = ExtensionHead::read_from_prefix(rest) {
        let length = head.length.get() as usize;
        if head.kind.get() == spec::extension::END {
            return None;
        }
        if head.kind.get() == spec::extension::FEATURE_NAMES {
            let entry = data.get(..length)?.chunks_exact(48).find(|entry| {
                entry.first() == Some(&0) && entry.get(1).is_some_and(|b| u32::from(*b) == bit)
            })?;
            let name = entry.get(2..)?.split(|b| *b == 0).next()?;
            return Some(
                name.iter()
                    .filter(|b| b.is_ascii_graphic() || **b == b' ')
                    .map(|b| char::from(*b))
                    .collect(),
            );
        }
        rest = data.get(length.checked_next_multiple_of(8)?..)?;
    }
    None
}

fn compression(
    path: &Path,
    bytes: &[u8],
    header_length: usize,
    incompatible: Incompatible,
) -> Result<Compression, Error> {
    let kind = if header_length > HEADER_V3 {
        bytes
            .get(spec::field::COMPRESSION_TYPE)
            .copied()
            .unwrap_or(0)
    } else {
        0
    };
    let flagged = incompatible.contains(Incompatible::COMPRESSION_TYPE);
    match (kind, flagged) {
        (0, false) => Ok(Compression::Zlib),
        (1, true) => Ok(Compression::Zstd),
        (0 | 1, _) => {
            let reason = format!("is {kind}, which contradicts incompatible feature bit 3");
            Err(Error::header(path, "compression_type", reason))
        }
        _ => Err(Error::new(
            path,
            ErrorKind::Unsupported(format!("compression type {kind}")),
        )),
    }
}

fn check_table(
    path: &Path,
    geometry: Geometry,
    field: &'static str,
    table: TableAt,
    most: u64,
) -> Result<(), Error> {
    let bytes = table.entries * 8;
    if bytes > most {
        let reason = format!(
            "table has {} entries, the most is {}",
            table.entries,
            most / 8
        );
        return Err(Error::header(path, field, reason));
    }
    if geometry.in_cluster(table.offset) != 0 {
        return Err(Error::header(path, field, "is not at a cluster's start"));
    }
    let end = table.offset.checked_add(bytes);
    if end.is_none_or(|end| end > spec::HOST_LIMIT) || (bytes > 0 && table.offset == 0) {
        return Err(Error::header(
            path,
            field,
            format!("{:#x} cannot be", table.offset),
        ));
    }
    Ok(())
}

fn backing_name(
    path: &Path,
    bytes: &[u8],
    v2: &HeaderV2,
    header_length: usize,
) -> Result<Option<Vec<u8>>, Error> {
    let offset = v2.backing_file_offset.get();
    if offset == 0 {
        return Ok(None);
    }
    let size = v2.backing_file_size.get();
    if size > spec::MAX_BACKING_NAME {
        let reason = format!("is {size}, the most is 1023");
        return Err(Error::header(path, "backing_file_size", reason));
    }
    let start = usize::try_from(offset).unwrap_or(usize::MAX);
    let name = bytes
        .get(start..)
        .and_then(|rest| rest.get(..size as usize))
        .filter(|_| start >= header_length)
        .ok_or_else(|| {
            Error::header(
                path,
                "backing_file_offset",
                format!("{offset:#x} is not in the first cluster"),
            )
        })?;
    Ok((size > 0).then(|| name.to_vec()))
}

fn extensions_of(
    path: &Path,
    bytes: &[u8],
) -> Result<(Option<String>, Option<BitmapsExtension>), Error> {
    let mut format = None;
    let mut bitmaps = None;
    let mut rest = bytes;
    while let Ok((head, data)) = ExtensionHead::read_from_prefix(rest) {
        let length = head.length.get() as usize;
        let kind = head.kind.get();
        if kind == spec::extension::END {
            break;
        }
        let Some(body) = data.get(..length) else {
            let reason = format!("{kind:#x} of {length} bytes does not fit");
            return Err(Error::header(path, "extension", reason));
        };
        match kind {
            spec::extension::BACKING_FORMAT => {
                format = Some(String::from_utf8_lossy(body).into_owned());
            }
            spec::extension::BITMAPS => bitmaps = BitmapsExtension::read_from_bytes(body).ok(),
            _ => {}
        }
        rest = data.get(length.next_multiple_of(8)..).unwrap_or_default();
    }
    Ok((format, bitmaps))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sample() -> Vec<u8> {
        let mut bytes = vec![0; 65536];
        bytes[..4].copy_from_slice(&MAGIC.to_be_bytes());
        bytes[7] = 3;
        bytes[23] = 16;
        bytes[24..32].copy_from_slice(&(1u64 << 30).to_be_bytes());
        bytes[39] = 2;
        bytes[40..48].copy_from_slice(&0x3_0000u64.to_be_bytes());
        bytes[48..56].copy_from_slice(&0x1_0000u64.to_be_bytes());
        bytes[59] = 1;
        bytes[99] = 4;
        bytes[103] = 104;
        bytes
    }

    fn message(bytes: &[u8]) -> String {
        Header::parse(Path::new("x.qcow2"), bytes)
            .unwrap_err()
            .to_string()
    }

    #[test]
    fn a_plain_header_parses() {
        let header = Header::parse(Path::new("x"), &sample()).unwrap();
        assert_eq!(
            (header.size, header.l1.entries, header.backing),
            (1 << 30, 2, None)
        );
    }

    #[test]
    fn a_hostile_field_is_refused_by_its_name() {
        let cases: [(usize, &[u8], &str); 11] = [
            (0, b"RAW!", "bad magic"),
            (4, &[0, 0, 0, 4], "version is 4"),
            (20, &[0, 0, 0, 63], "cluster_bits is 63"),
            (24, &[0xff; 8], "l1_size is 2"),
            (
                36,
                &[0xff; 4],
                "l1_table_offset table has 4294967295 entries",
            ),
            (
                40,
                &[0xff; 8],
                "l1_table_offset is not at a cluster's start",
            ),
            (56, &[0xff; 4], "refcount_table_offset table has"),
            (60, &[0xff; 4], "nb_snapshots"),
            (96, &[0, 0, 0, 7], "refcount_order is 7"),
            (100, &[0xff; 4], "header_length"),
            (
                72,
                &[0x80, 0, 0, 0, 0, 0, 0, 0],
                "incompatible feature bit 63",
            ),
        ];
        for (at, patch, expected) in cases {
            let mut bytes = sample();
            bytes[at..at + patch.len()].copy_from_slice(patch);
            let message = message(&bytes);
            assert!(
                message.contains(expected),
                "{message:?} does not say {expected:?}"
            );
            assert!(
                message.starts_with("x.qcow2: "),
                "{message:?} does not name the file"
            );
        }
    }

    #[test]
    fn a_backing_name_out_of_the_first_cluster_is_refused() {
        for (offset, size) in [(65530u64, 100u32), (8, 8), (u64::MAX, 1023), (200, 1024)] {
            let mut bytes = sample();
            bytes[8..16].copy_from_slice(&offset.to_be_bytes());
            bytes[16..20].copy_from_slice(&size.to_be_bytes());
            assert!(message(&bytes).contains("backing_file"), "{offset} {size}");
        }
    }

    proptest! {
        #[test]
        fn no_header_makes_the_parser_panic(patches in proptest::collection::vec((0usize..300, any::<u8>()), 0..12)) {
            let mut bytes = sample();
            for (at, value) in patches {
                bytes[at] = value;
            }
            let _ = Header::wanted(Path::new("x"), &bytes);
            let _ = Header::parse(Path::new("x"), &bytes);
        }
    }
}
