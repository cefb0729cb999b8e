//! New images, durable when the call returns.
//!
//! ```text
//!  cluster  0        1                2                     …
//!          | header | refcount table | refcount block(s)   | L1 table |
//! ```
//!
//! Only the bytes that are not zero are written; file and folder are synchronised once each, so that a node's overlay costs
//! milliseconds.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use zerocopy::IntoBytes;

use super::fresh;
use crate::Format;
use crate::error::{Error, ErrorKind};
use crate::qcow2::header::Compression;
use crate::qcow2::spec::{
    self, ExtensionHead, Geometry, HeaderV2, HeaderV3Tail, Incompatible, put_refcount,
};

/// The version of the qcow2 format, as QEMU calls it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Compat {
    /// Version 2 (`compat=0.10`).
    V2,
    /// Version 3 (`compat=1.1`).
    #[default]
    V3,
}

/// How a new qcow2 image looks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CreateOptions {
    /// Size of the disk in bytes, a multiple of 512.
    pub size: u64,
    /// Bytes of a cluster: a power of two from 512 to 2 MiB.
    pub cluster_size: u64,
    /// The layer below: its path, stored in the header as it is (relative paths are relative to the image), and its format.
    pub backing: Option<(PathBuf, Format)>,
    /// Bits of a refcount: a power of two from 1 to 64; 16 in version 2.
    pub refcount_bits: u32,
    /// The version of the format.
    pub compat: Compat,
    /// Subclusters: a 32nd of a cluster can be allocated alone. Clusters have at least 16 KiB then.
    pub extended_l2: bool,
    /// How clusters will be compressed, if any ever are.
    pub compression: Compression,
    /// Let writers that do so keep refcounts lazily, which makes allocating faster and a repair needful after a crash. Drover keeps
    /// them exact all the same. Not in version 2.
    pub lazy_refcounts: bool,
}

impl CreateOptions {
    /// A disk of `size` bytes with clusters of 64 KiB, nothing below.
    #[must_use]
    pub fn new(size: u64) -> Self {
        Self {
            size,
            cluster_size: 64 * 1024,
            backing: None,
            refcount_bits: 16,
            compat: Compat::V3,
            extended_l2: false,
            compression: Compression::Zlib,
            lazy_refcounts: false,
        }
    }
}

/// Creates a qcow2 image. File and folder entry are durable when this returns.
///
/// # Errors
/// The file exists already, an option is out of range, or the host refuses; then no file is left behind.
pub fn create_qcow2(path: &Path, options: &CreateOptions) -> Result<(), Error> {
    let plan = Plan::new(path, options)?;
    create(path, |file| {
        file.set_len(plan.end)?;
        file.write_all_at(&plan.header, 0)?;
        file.write_all_at(&plan.table, plan.table_offset)?;
        file.write_all_at(&plan.blocks, plan.blocks_offset)
    })
}

/// Creates a raw image of `size` bytes, all zero, without taking space for it. Durable when this returns.
///
/// # Errors
/// The file exists already, the size is not a multiple of 512, or the host refuses; then no file is left behind.
pub fn create_raw(path: &Path, size: u64) -> Result<(), Error> {
    check_size(path, size)?;
    create(path, |file| file.set_len(size))
}

fn check_size(path: &Path, size: u64) -> Result<(), Error> {
    if size.is_multiple_of(512) {
        return Ok(());
    }
    let reason = format!("{size} bytes: a disk's size is a multiple of 512");
    Err(Error::new(path, ErrorKind::Size(reason)))
}

/// Writes a file under another name and gives it its own when it is whole: what a creation that died left behind is replaced by the
/// next one.
fn create(path: &Path, write: impl FnOnce(&File) -> std::io::Result<()>) -> Result<(), Error> {
    fresh::must_be_absent(path)?;
    let partial = fresh::beside(path, ".partial");
    // Messages name the file that was wanted.
    let renamed = |error: Error| match error.path == partial {
        true => Error::new(path, error.kind),
        false => error,
    };
    let file = fresh::replace(&partial).map_err(renamed)?;
    let finish = || {
        write(&file).map_err(|e| Error::io(path, "write it", e))?;
        file.sync_all()
            .map_err(|e| Error::io(path, "make it durable", e))?;
        fresh::publish(&partial, path)
    };
    finish().inspect_err(|_| {
        // The error that matters is the first one.
        let _ = std::fs::remove_file(&partial);
    })
}

/// The bytes of a new image.
struct Plan {
    header: Vec<u8>,
    table: Vec<u8>,
    table_offset: u64,
    blocks: Vec<u8>,
    blocks_offset: u64,
    end: u64,
}

impl Plan {
    fn new(path: &Path, options: &CreateOptions) -> Result<Self, Error> {
        let bad = |reason: String| Error::new(path, ErrorKind::Size(reason));
        check_size(path, options.size)?;
        let cluster_bits = options.cluster_size.trailing_zeros();
        if !options.cluster_size.is_power_of_two() || !spec::CLUSTER_BITS.contains(&cluster_bits) {
            let size = options.cluster_size;
            return Err(bad(format!(
                "a cluster of {size} bytes is not a power of two from 512 to 2 MiB"
            )));
        }
        let order = options.refcount_bits.trailing_zeros();
        if !options.refcount_bits.is_power_of_two() || order > spec::MAX_REFCOUNT_ORDER {
            let bits = options.refcount_bits;
            return Err(bad(format!(
                "refcounts of {bits} bits are not a power of two from 1 to 64"
            )));
        }
        if options.compat == Compat::V2 && order != 4 {
            return Err(bad("version 2 has refcounts of 16 bits only".into()));
        }
        let geometry = Geometry {
            cluster_bits,
            refcount_order: order,
            extended_l2: options.extended_l2,
        };
        if options.extended_l2
            && (options.compat == Compat::V2 || cluster_bits < spec::MIN_EXTENDED_CLUSTER_BITS)
        {
            let reason = "extended L2 entries need version 3 and clusters of at least 16 KiB";
            return Err(bad(reason.into()));
        }
        if options.compression == Compression::Zstd && options.compat == Compat::V2 {
            return Err(bad("version 2 has no compression but zlib".into()));
        }
        if options.lazy_refcounts && options.compat == Compat::V2 {
            return Err(bad("version 2 has no lazy refcounts".into()));
        }
        let cluster = geometry.cluster_size();
        let l1_entries = geometry.l1_entries(options.size);
        if l1_entries * 8 > spec::MAX_L1_BYTES {
            let most = (spec::MAX_L1_BYTES / 8).saturating_mul(geometry.l1_span());
            return Err(bad(format!(
                "with clusters of {cluster} bytes a disk has at most {most} bytes"
            )));
        }
        let l1_clusters = (l1_entries * 8).div_ceil(cluster);
        // The refcount structures count themselves: go on until they are large enough for all.
        let (mut table_clusters, mut blocks) = (1, 1);
        let total = loop {
            let total = 1 + table_clusters + blocks + l1_clusters;
            let need_blocks = total.div_ceil(1 << geometry.refcount_block_bits());
            let need_table = (need_blocks * 8).div_ceil(cluster);
            if need_blocks <= blocks && need_table <= table_clusters {
                break total;
            }
            (table_clusters, blocks) = (need_table, need_blocks);
        };
        let table_offset = cluster;
        let blocks_offset = table_offset + table_clusters * cluster;
        let l1_offset = blocks_offset + blocks * cluster;
        let table = (0..blocks)
            .flat_map(|n| (blocks_offset + n * cluster).to_be_bytes())
            .collect();
        let mut counts = vec![0; (total << order).div_ceil(8) as usize];
        // Blocks lie one after another, so that their entries do as well.
        for index in 0..total as usize {
            put_refcount(&mut counts, order, index, 1);
        }
        let v2 = HeaderV2 {
            magic: spec::MAGIC.into(),
            version: match options.compat {
                Compat::V2 => 2.into(),
                Compat::V3 => 3.into(),
            },
            backing_file_offset: 0.into(),
            backing_file_size: 0.into(),
            cluster_bits: cluster_bits.into(),
            size: options.size.into(),
            crypt_method: 0.into(),
            l1_size: (l1_entries as u32).into(),
            l1_table_offset: l1_offset.into(),
            refcount_table_offset: table_offset.into(),
            refcount_table_clusters: (table_clusters as u32).into(),
            nb_snapshots: 0.into(),
            snapshots_offset: 0.into(),
        };
        let header = header(path, options, v2, order, cluster)?;
        let end = l1_offset + l1_clusters * cluster;
        Ok(Self {
            header,
            table,
            table_offset,
            blocks: counts,
            blocks_offset,
            end,
        })
    }
}

fn header(
    path: &Path,
    options: &CreateOptions,
    mut v2: HeaderV2,
    refcount_order: u32,
    cluster: u64,
) -> Result<Vec<u8>, Error> {
    use std::os::unix::ffi::OsStrExt;
    let mut rest = Vec::new();
    if options.compat == Compat::V3 {
        // One field more than the smallest, which makes 105 bytes, padded to 112.
        let length = 112;
        let mut incompatible = Incompatible::empty();
        incompatible.set(Incompatible::EXTENDED_L2, options.extended_l2);
        let zstd = options.compression == Compression::Zstd;
        incompatible.set(Incompatible::COMPRESSION_TYPE, zstd);
        let tail = HeaderV3Tail {
            incompatible_features: incompatible.bits().into(),
            compatible_features: u64::from(options.lazy_refcounts).into(),
            autoclear_features: 0.into(),
            refcount_order: refcount_order.into(),
            header_length: (length as u32).into(),
        };
        rest.extend_from_slice(tail.as_bytes());
        rest.push(u8::from(zstd));
        rest.resize(length - spec::HEADER_V2, 0);
    }
    let mut extension = |kind: u32, data: &[u8]| {
        let head = ExtensionHead {
            kind: kind.into(),
            length: (data.len() as u32).into(),
        };
        rest.extend_from_slice(head.as_bytes());
        rest.extend_from_slice(data);
        rest.resize(rest.len().next_multiple_of(8), 0);
    };
    if let Some((name, format)) = &options.backing {
        let format: &[u8] = match format {
            Format::Raw => b"raw",
            Format::Qcow2 => b"qcow2",
        };
        extension(spec::extension::BACKING_FORMAT, format);
        extension(spec::extension::END, &[]);
        let name = name.as_os_str().as_bytes();
        let offset = spec::HEADER_V2 + rest.len();
        let limit =
            (spec::MAX_BACKING_NAME as usize).min((cluster as usize).saturating_sub(offset));
        if name.is_empty() || name.len() > limit || name.contains(&0) {
            let reason = format!(
                "the backing file's name has {} bytes; 1 to {limit} fit",
                name.len()
            );
            return Err(Error::new(path, ErrorKind::Backing(reason)));
        }
        v2.backing_file_offset = (offset as u64).into();
        v2.backing_file_size = (name.len() as u32).into();
        rest.extend_from_slice(name);
    } else {
        extension(spec::extension::END, &[]);
    }
    let mut header = v2.as_bytes().to_vec();
    header.extend(rest);
    Ok(header)
}
