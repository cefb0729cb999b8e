//! A disk in another form: raw, qcow2, or qcow2 with compressed clusters.
//!
//! ```text
//!  source chain ──read what is not zero──> TARGET.partial ──durable──> rename ──> TARGET
//! ```
//!
//! The target is there whole or not at all. What a conversion that died left behind is replaced by the next one.

use std::ffi::OsString;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use flate2::{Compress, FlushCompress, Status};

use super::create::{CreateOptions, create_qcow2, create_raw};
use super::job::{Monitor, Way};
use crate::error::{Error, ErrorKind};
use crate::io::BlockFile;
use crate::lock::Access;
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
}

impl ConvertOptions {
    /// A target of `format`, not compressed, with clusters of 64 KiB.
    #[must_use]
    pub fn new(format: Format) -> Self {
        Self {
            format,
            cluster_size: 64 * 1024,
            compression: None,
        }
    }
}

/// Bytes read at a time; at least a cluster.
const CHUNK: u64 = 2 << 20;
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
    if target.symlink_metadata().is_ok() {
        let exists = std::io::Error::from(std::io::ErrorKind::AlreadyExists);
        return Err(Error::io(target, "create it", exists));
    }
    let partial = partial_name(target);
    remove_leftover(&partial)?;
    let size = disk.size_bytes();
    match options.format {
        Format::Raw => create_raw(&partial, size)?,
        Format::Qcow2 => {
            let create = CreateOptions {
                cluster_size: options.cluster_size,
                compression: options.compression.unwrap_or(Compression::Zlib),
                ..CreateOptions::new(size)
            };
            create_qcow2(&partial, &create)?;
        }
    }
    let way = Way::new(monitor, size);
    let finish = copy(&mut disk, source, &partial, options, way).and_then(|()| {
        std::fs::rename(&partial, target).map_err(|e| Error::io(target, "give it its name", e))?;
        sync_folder(target)
    });
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
    let size = disk.size_bytes();
    let mut at = 0;
    while at < size {
        // Whole units of the target, except at the end of the disk.
        let end = (at + CHUNK.max(unit)).min(size);
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
                for (n, cluster) in (0..).zip(bytes.chunks(unit as usize)) {
                    let offset = at + n * unit;
                    if is_zero(cluster) {
                        continue;
                    }
                    let mut whole = cluster.to_vec();
                    whole.resize(unit as usize, 0);
                    match pack(kind, &whole) {
                        Some(packed) => target.write_packed(offset, &packed).map_err(write)?,
                        None => target.write(offset, cluster.to_vec()).map_err(write)?,
                    }
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

fn partial_name(target: &Path) -> PathBuf {
    let mut name = OsString::from(target);
    name.push(".partial");
    name.into()
}

/// Removes what a conversion that died left behind; one that still runs holds its file.
fn remove_leftover(partial: &Path) -> Result<(), Error> {
    if partial.symlink_metadata().is_err() {
        return Ok(());
    }
    BlockFile::open(partial, Cache::Buffered, true)?.lock(Access::Write)?;
    std::fs::remove_file(partial).map_err(|e| Error::io(partial, "remove it", e))
}

fn sync_folder(path: &Path) -> Result<(), Error> {
    let parent = path.parent().filter(|p| !p.as_os_str().is_empty());
    let folder = parent.unwrap_or(Path::new("."));
    std::fs::File::open(folder)
        .and_then(|file| Ok(rustix::fs::fsync(file.as_fd())?))
        .map_err(|e| Error::io(folder, "make its entries durable", e))
}
