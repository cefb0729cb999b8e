//! What an image is, as its header says. Reads only; locks like any reader.

use std::path::{Path, PathBuf};

use serde::Serialize;
use zerocopy::FromBytes;

use crate::buffers::Pages;
use crate::error::Error;
use crate::io::BlockFile;
use crate::lock::Access;
use crate::qcow2::header::{Compression, Header};
use crate::qcow2::spec::{self, BitmapHead, Incompatible};
use crate::qcow2::{load_snapshots, read_header};
use crate::{Cache, DiskSpec, Format, task};

/// What an image is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ImageInfo {
    /// The format it was read as.
    pub format: Format,
    /// Size of the disk in bytes.
    pub size_bytes: u64,
    /// Bytes that the file takes on the host.
    pub allocated_bytes: u64,
    /// What only qcow2 has.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub qcow2: Option<Qcow2Info>,
}

/// What a qcow2 header says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Qcow2Info {
    /// Version of the format: 2 or 3.
    pub version: u32,
    /// Bytes of a cluster.
    pub cluster_size_bytes: u64,
    /// Bits of a refcount.
    pub refcount_bits: u32,
    /// L2 entries are extended: clusters have subclusters.
    pub extended_l2: bool,
    /// How compressed clusters are compressed.
    pub compression: &'static str,
    /// The backing file as the header names it; nobody has opened it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub backing_file: Option<String>,
    /// The backing file's format as the header gives it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub backing_format: Option<String>,
    /// The internal snapshots.
    pub snapshots: Vec<SnapshotInfo>,
    /// The bitmaps, which tell backup tools what has changed.
    pub bitmaps: Vec<BitmapInfo>,
    /// Refcounts may be out of date; the next writer, or a repair, mends that.
    pub dirty: bool,
    /// The image is marked corrupt.
    pub corrupt: bool,
    /// Refcounts are kept lazily by writers that support it; Drover does not.
    pub lazy_refcounts: bool,
}

/// An internal snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SnapshotInfo {
    /// What tells it from others: a number, as a rule.
    pub id: String,
    /// Its name.
    pub name: String,
    /// When it was taken, in seconds since 1970.
    pub date_seconds: u32,
    /// Size of the disk then, in bytes.
    pub size_bytes: u64,
    /// Bytes of a machine's state that was saved with it.
    pub vm_state_bytes: u64,
}

/// A persistent bitmap.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct BitmapInfo {
    /// Its name.
    pub name: String,
    /// Bytes of the disk that one bit stands for.
    pub granularity_bytes: u64,
    /// It is kept up to date by those who know it.
    pub recording: bool,
    /// It may not tell the truth: somebody died while using it, or wrote the image without knowing it.
    pub inconsistent: bool,
}

/// Describes the image at `path`, which is stated to be of `format`.
///
/// # Errors
/// The file cannot be read, is being written by someone else, or is not of that format.
pub fn info(path: &Path, format: Format) -> Result<ImageInfo, Error> {
    let file = BlockFile::open(path, Cache::Buffered, false)?;
    file.lock(Access::Read)?;
    let stat = rustix::fs::fstat(file.fd()).map_err(|e| Error::io(path, "examine it", e))?;
    // st_blocks counts in units of 512 bytes, whatever the file system's are.
    let allocated_bytes = u64::try_from(stat.st_blocks)
        .unwrap_or(0)
        .saturating_mul(512);
    if format == Format::Raw {
        return Ok(ImageInfo {
            format,
            size_bytes: file.end(),
            allocated_bytes,
            qcow2: None,
        });
    }
    let header = read_header(&file)?;
    let (snapshots, _) = load_snapshots(&file, &header)?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let qcow2 = Qcow2Info {
        version: header.version,
        cluster_size_bytes: header.geometry.cluster_size(),
        refcount_bits: 1 << header.geometry.refcount_order,
        extended_l2: header.geometry.extended_l2,
        compression: match header.compression {
            Compression::Zlib => "zlib",
            Compression::Zstd => "zstd",
        },
        backing_file: header.backing.as_ref().map(|backing| text(&backing.name)),
        backing_format: header
            .backing
            .as_ref()
            .and_then(|backing| backing.format.clone()),
        snapshots: snapshots
            .into_iter()
            .map(|snapshot| SnapshotInfo {
                id: snapshot.id,
                name: snapshot.name,
                date_seconds: snapshot.date_seconds,
                size_bytes: snapshot.size.unwrap_or(header.size),
                vm_state_bytes: snapshot.vm_state_bytes,
            })
            .collect(),
        bitmaps: bitmaps(&file, &header)?,
        dirty: header.incompatible.contains(Incompatible::DIRTY),
        corrupt: header.incompatible.contains(Incompatible::CORRUPT),
        lazy_refcounts: header.compatible & 1 != 0,
    };
    Ok(ImageInfo {
        format,
        size_bytes: header.size,
        allocated_bytes,
        qcow2: Some(qcow2),
    })
}

/// One image of a chain.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LayerInfo {
    /// The file.
    pub path: PathBuf,
    /// What it is.
    #[serde(flatten)]
    pub info: ImageInfo,
}

/// Describes every image of a disk, the top one first.
///
/// # Errors
/// An image cannot be read, is being written by someone else, is not of the format stated, or names one below that nothing permits.
pub fn info_chain(spec: &DiskSpec) -> Result<Vec<LayerInfo>, Error> {
    let disk = super::map::open(spec)?;
    let layers = disk.layers().into_iter();
    layers
        .map(|(path, format)| {
            let info = info(&path, format)?;
            Ok(LayerInfo { path, info })
        })
        .collect()
}

/// The bitmaps that the header's extension lists.
fn bitmaps(file: &BlockFile, header: &Header) -> Result<Vec<BitmapInfo>, Error> {
    const IN_USE: u32 = 1;
    const AUTO: u32 = 2;
    let Some(extension) = header.bitmaps else {
        return Ok(Vec::new());
    };
    let at = extension.directory_offset.get();
    let available = file.end().saturating_sub(at);
    let size = extension.directory_size.get();
    let size = size.min(available).min(spec::MAX_SNAPSHOT_TABLE_BYTES);
    let mut directory = Pages::zeroed(usize::try_from(size).unwrap_or(0));
    task::complete(file.read(at, directory.span()))
        .map_err(|e| Error::io(file.path(), "read its bitmap directory", e))?;
    let mut rest = directory.bytes();
    let mut found = Vec::new();
    for _ in 0..extension.nb_bitmaps.get() {
        let Ok((head, tail)) = BitmapHead::read_from_prefix(rest) else {
            break;
        };
        let extra = head.extra_data_size.get() as usize;
        let name_size = usize::from(head.name_size.get());
        let name = tail.get(extra..).and_then(|rest| rest.get(..name_size));
        let flags = head.flags.get();
        found.push(BitmapInfo {
            name: String::from_utf8_lossy(name.unwrap_or_default()).into_owned(),
            granularity_bytes: 1u64.checked_shl(head.granularity_bits.into()).unwrap_or(0),
            recording: flags & AUTO != 0,
            inconsistent: flags & IN_USE != 0 || header.autoclear & 1 == 0,
        });
        let whole = (size_of::<BitmapHead>() + extra + name_size).next_multiple_of(8);
        rest = tail
            .get(whole - size_of::<BitmapHead>()..)
            .unwrap_or_default();
    }
    Ok(found)
}
