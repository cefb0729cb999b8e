//! A disk in another form: raw, qcow2, or qcow2 with compressed clusters.
//!
//! ```text
//!  source chain ──read what is not zero──> TARGET.partial ──durable──> rename ──> TARGET
//! ```
//!
//! The target is there whole or not at all. What a conversion that died left behind is replaced by the next one.

use std::path::Path;

use flate2::{Compress, FlushCompress, Status};

use super::create::{Compat, CreateOptions, create_qcow2, create_raw};
use super::fresh;
use super::job::{Monitor, Way};
use crate::error::{Error, ErrorKind};
use crate::qcow2::Mapping;
use crate::qcow2::header::Compression;
use crate::{Backing, Cache, Disk, DiskSpec, Format, Layer};

/// What a disk is converted to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConvertOptions {
    /// The target's format.
    pub format: Format,
    /// Bytes of a cluster of a qcow2 target.
    pub cluster_size: u64,
    /// Compress the clusters of a qcow2 target.
    pub compression: Option<Compression>,
    /// Bits of a refcount of a qcow2 target.
    pub refcount_bits: u32,
    /// The version of a qcow2 target.
    pub compat: Compat,
    /// Give the clusters of a qcow2 target subclusters.
    pub extended_l2: bool,
}

impl ConvertOptions {
    /// A target of `format`, not compressed, with clusters of 64 KiB.
    #[must_use]
    pub fn new(format: Format) -> Self {
        Self {
            format,
            cluster_size: 64 * 1024,
            compression: None,
            refcount_bits: 16,
            compat: Compat::V3,
            extended_l2: false,
        }
    }
}

/// Bytes read at a time; at least a cluster.
const CHUNK: u64 = 2 << 20;
/// The same where clusters are compressed, by several threads at a time.
const PACKED_CHUNK: u64 = 16 << 20;
/// The most threads that compress.
const PACKERS: usize = 8;
/// Bytes in which zeros are looked for in a raw target, a block of most file systems.
const BLOCK: u64 = 4096;
/// log2 of the window with which QEMU inflates: farther back a compressor must not refer.
const WINDOW_BITS: u8 = 12;
const DEFLATE_LEVEL: u32 = 6;

/// Writes what a guest of a disk reads to a new image without a backing file. Zeros take no space in it.
///
/// # Errors
/// The disk cannot be read, the target exists already or cannot be written, or the job was cancelled; then no target is there.
pub fn convert(
    source: &DiskSpec,
    target: &Path,
    options: &ConvertOptions,
    monitor: &mut dyn Monitor,
) -> Result<(), Error> {
    if options.format == Format::Raw && options.compression.is_some() {
        let what = "compression in a raw image";
        return Err(Error::new(target, ErrorKind::Unsupported(what.into())));
    }
    let mut disk = super::map::open(source)?;
    fresh::must_be_absent(target)?;
    let partial = fresh::beside(target, ".partial");
    fresh::remove_leftover(&partial)?;
    // A raw source may end inside a sector; what is missing of it is zero.
    let size = disk.size_bytes().next_multiple_of(512);
    match options.format {
        Format::Raw => create_raw(&partial, size)?,
        Format::Qcow2 => {
            let create = CreateOptions {
                cluster_size: options.cluster_size,
                compression: options.compression.unwrap_or(Compression::Zlib),
                refcount_bits: options.refcount_bits,
                compat: options.compat,
                extended_l2: options.extended_l2,
                ..CreateOptions::new(size)
            };
            create_qcow2(&partial, &create)?;
        }
    }
    let way = Way::new(monitor, size);
    let finish = copy(&mut disk, source, &partial, options, way)
        .and_then(|()| fresh::publish(&partial, target));
    finish.inspect_err(|_| {
        // The error that matters is the first one.
        let _ = std::fs::remove_file(&partial);
    })
}

fn copy(
    disk: &mut Disk,
    source: &DiskSpec,
    partial: &Path,
    options: &ConvertOptions,
    mut way: Way<'_>,
) -> Result<(), Error> {
    let mut target = Disk::open(&DiskSpec {
        top: Layer {
            path: partial.to_owned(),
            format: options.format,
            cache: Cache::Buffered,
        },
        backing: Backing::Explicit(Vec::new()),
        read_only: false,
        discard: false,
    })?;
    let unit = match options.format {
        Format::Raw => BLOCK,
        Format::Qcow2 => options.cluster_size,
    };
    let read = |error| Error::new(&source.top.path, ErrorKind::Request(error));
    let write = |error| Error::new(partial, ErrorKind::Request(error));
    let chunk = match options.compression {
        Some(_) => PACKED_CHUNK,
        None => CHUNK,
    };
    let size = disk.size_bytes();
    let mut at = 0;
    while at < size {
        // Whole units of the target, except at the end of the disk.
        let end = (at + chunk.max(unit)).min(size);
        let located = disk.locate(at, size - at).map_err(read)?;
        let zero = !matches!(
            located.mapping,
            Mapping::Data { .. } | Mapping::Compressed { .. }
        );
        let zeros = located.length / unit * unit;
        if zero && (zeros > 0 || at + located.length == size) {
            at = if zeros > 0 { at + zeros } else { size };
            way.at(partial, at, 0)?;
            continue;
        }
        let bytes = disk.read(at, (end - at) as usize).map_err(read)?;
        match options.compression {
            Some(kind) => {
                for (offset, cluster) in pack_all(kind, at, &bytes, unit as usize) {
                    let stored = match cluster {
                        Packed::Smaller(packed) => target.write_packed(offset, &packed),
                        Packed::NoSmaller(cluster) => target.write(offset, cluster.to_vec()),
                    };
                    stored.map_err(write)?;
                }
            }
            None => {
                for (offset, run) in runs(at, &bytes, unit as usize) {
                    target.write(offset, run.to_vec()).map_err(write)?;
                }
            }
        }
        way.at(partial, end, end - at)?;
        at = end;
    }
    target.close()
}

/// The runs of units of `bytes` that are not all zero, with the offset of each; the first byte lies at `at`.
fn runs(at: u64, bytes: &[u8], unit: usize) -> Vec<(u64, &[u8])> {
    let mut runs = Vec::new();
    let mut start = None;
    for from in (0..bytes.len()).step_by(unit) {
        let piece = bytes.get(from..bytes.len().min(from + unit));
        match (start, is_zero(piece.unwrap_or_default())) {
            (None, false) => start = Some(from),
            (Some(first), true) => {
                runs.push((
                    at + first as u64,
                    bytes.get(first..from).unwrap_or_default(),
                ));
                start = None;
            }
            _ => {}
        }
    }
    if let Some(first) = start {
        runs.push((at + first as u64, bytes.get(first..).unwrap_or_default()));
    }
    runs
}

fn is_zero(bytes: &[u8]) -> bool {
    bytes.iter().all(|byte| *byte == 0)
}

/// A cluster that is not all zero.
enum Packed<'a> {
    Smaller(Vec<u8>),
    NoSmaller(&'a [u8]),
}

/// Compresses the clusters of `bytes`, the first of which lies at `at`, on as many threads as the host has processors. Clusters that
/// are all zero are left out.
fn pack_all(kind: Compression, at: u64, bytes: &[u8], unit: usize) -> Vec<(u64, Packed<'_>)> {
    let packers = std::thread::available_parallelism().map_or(1, |n| n.get().min(PACKERS));
    let clusters: Vec<(u64, &[u8])> = (0..)
        .map(|n| at + n * unit as u64)
        .zip(bytes.chunks(unit))
        .collect();
    let share = clusters.len().div_ceil(packers).max(1);
    let work = |clusters: &[(u64, &'_ [u8])]| -> Vec<(u64, Option<Vec<u8>>)> {
        let wanted = clusters.iter().filter(|(_, cluster)| !is_zero(cluster));
        wanted
            .map(|(offset, cluster)| {
                let mut whole = cluster.to_vec();
                whole.resize(unit, 0);
                (*offset, pack(kind, &whole))
            })
            .collect()
    };
    let packed = std::thread::scope(|scope| {
        let threads: Vec<_> = clusters
            .chunks(share)
            .map(|clusters| scope.spawn(move || work(clusters)))
            .collect();
        threads
            .into_iter()
            .flat_map(|thread| {
                thread
                    .join()
                    .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            })
            .collect::<Vec<_>>()
    });
    let found = packed
        .into_iter()
        .filter_map(|(offset, packed)| match packed {
            Some(packed) => Some((offset, Packed::Smaller(packed))),
            None => {
                let from = usize::try_from(offset - at).ok()?;
                let cluster = bytes.get(from..bytes.len().min(from + unit))?;
                Some((offset, Packed::NoSmaller(cluster)))
            }
        });
    found.collect()
}

/// Compresses a cluster; `None` if that does not make it shorter.
fn pack(kind: Compression, cluster: &[u8]) -> Option<Vec<u8>> {
    let packed = match kind {
        Compression::Zlib => {
            let level = flate2::Compression::new(DEFLATE_LEVEL);
            let mut compress = Compress::new_with_window_bits(level, false, WINDOW_BITS);
            let mut packed = Vec::with_capacity(cluster.len());
            let status = compress.compress_vec(cluster, &mut packed, FlushCompress::Finish);
            (status.ok()? == Status::StreamEnd).then_some(packed)?
        }
        Compression::Zstd => {
            let level = ruzstd::encoding::CompressionLevel::Fastest;
            ruzstd::encoding::compress_to_vec(cluster, level)
        }
    };
    (packed.len() < cluster.len()).then_some(packed)
}
