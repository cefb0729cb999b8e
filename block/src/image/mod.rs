//! Jobs on images as a whole: making, converting and merging them, changing their size, saying what they are, where their bytes lie
//! and whether they are sound.
//!
//! Each takes the format from its caller; nothing is probed.

mod bench;
mod check;
mod convert;
mod create;
mod fresh;
#[cfg(feature = "import")]
mod import;
mod info;
mod job;
mod layers;
mod map;
mod rebase;
mod repair;

pub use crate::qcow2::header::Compression;
pub use bench::{BenchOptions, BenchReport, Pattern, bench};
pub(crate) use check::references;
pub use check::{CheckReport, check};
pub use convert::{ConvertOptions, convert};
pub use create::{Compat, CreateOptions, create_qcow2, create_raw};
#[cfg(feature = "import")]
pub use import::{ImportOptions, ImportSource, Packing, import};
pub use info::{BitmapInfo, ImageInfo, LayerInfo, Qcow2Info, SnapshotInfo, info, info_chain};
pub use job::{Monitor, Unwatched};
pub use layers::{commit, flatten};
pub use map::{Comparison, MapEntry, compare, map};
pub use rebase::{NewBacking, rebase, rename_backing};
pub use repair::{Repair, RepairReport, repair};

use crate::error::{Error, ErrorKind};
use crate::{Disk, DiskSpec};

/// Whether a disk may lose its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shrink {
    /// No: a smaller size is an error.
    Refuse,
    /// Yes: what lies past the new end is lost.
    Allow,
}

/// Changes the size of a disk to `size` bytes, durably. The disk is opened for writing, so nobody else may use it. What a longer
/// layer below has past the old end is never revealed.
///
/// # Errors
/// The disk cannot be opened, has no room for that size, or would shrink without leave.
pub fn resize(spec: &DiskSpec, size: u64, shrink: Shrink) -> Result<(), Error> {
    let path = &spec.top.path;
    let bad = |reason: String| Err(Error::new(path, ErrorKind::Size(reason)));
    if !size.is_multiple_of(512) {
        return bad(format!("{size} bytes: a disk's size is a multiple of 512"));
    }
    let mut disk = Disk::open(&DiskSpec {
        read_only: false,
        ..spec.clone()
    })?;
    let old = disk.size_bytes();
    if size < old && shrink == Shrink::Refuse {
        return bad(format!(
            "shrinking from {old} to {size} bytes loses what lies past the new end, and was not allowed"
        ));
    }
    if size != old {
        disk.resize(size).map_err(|kind| Error::new(path, kind))?;
    }
    disk.close()
}
