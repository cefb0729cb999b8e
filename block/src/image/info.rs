//! What an image is, as its header says. Reads only; locks like any reader.

use std::path::Path;

use serde::Serialize;

use crate::error::Error;
use crate::io::BlockFile;
use crate::lock::Access;
use crate::qcow2::header::Compression;
use crate::qcow2::spec::Incompatible;
use crate::qcow2::{load_snapshots, read_header};
use crate::{Cache, Format};

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
    /// Names of the internal snapshots.
    pub snapshots: Vec<String>,
    /// Refcounts may be out of date: `qemu-img check -r all` mends that.
    pub dirty: bool,
    /// The image is marked corrupt.
    pub corrupt: bool,
    /// Refcounts are kept lazily by writers that support it; Drover does not.
    pub lazy_refcounts: bool,
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
        backing_format: header.backing.and_then(|backing| backing.format),
        snapshots: snapshots
            .into_iter()
            .map(|snapshot| snapshot.name)
            .collect(),
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
