//! An overlay put over another layer.
//!
//! ```text
//!  top    ■ □ □ ■        top    ■ ▨ □ ■      what the old layers have and the new ones have not is copied up first,
//!  old    ▨ ▨ a  ─>      new    x y a        then the header names the new layer
//! ```
//!
//! Whole clusters are copied, which read the same over the old layers as over the new ones: so the image is whole at every moment,
//! over the old layers until the header changes, over the new ones from then on. A job that died is just done again.

use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use super::job::{Monitor, Way};
use crate::error::{Error, ErrorKind, IoError};
use crate::qcow2::Mapping;
use crate::qcow2::relabel::Label;
use crate::{Disk, DiskSpec, Format, Op};

/// The layers that an overlay comes to lie over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewBacking {
    /// The disk that they make up; opened for reading whatever it says.
    pub disk: DiskSpec,
    /// What the overlay's header is to say: relative paths are relative to the overlay.
    pub name: PathBuf,
}

impl NewBacking {
    fn label(&self) -> Label<'_> {
        Label {
            name: self.name.as_os_str().as_bytes(),
            format: self.disk.top.format,
        }
    }
}

/// Bytes compared at a time; at least a cluster.
const CHUNK: u64 = 1 << 20;

/// Puts the top image of a disk over other layers, or over none, so that a guest reads what it read before.
///
/// # Errors
/// The top is not qcow2, an image is in use, damaged or full, or the header has no room for the new name; then the image is as it
/// was, though some more may have been copied into it.
pub fn rebase(
    spec: &DiskSpec,
    new: Option<&NewBacking>,
    monitor: &mut dyn Monitor,
) -> Result<(), Error> {
    let path = &spec.top.path;
    only_qcow2(spec)?;
    let mut top = Disk::open_over(spec, new.map(|new| &new.disk))?;
    let mut old = Disk::open_locked(&DiskSpec {
        read_only: true,
        ..spec.clone()
    })?;
    copy_differences(path, &mut old, &mut top, monitor)?;
    drop(old);
    top.relabel(new.map(NewBacking::label))
        .map_err(|kind| Error::new(path, kind))?;
    top.close()
}

/// Makes the header of an image name another layer below, or none, whatever either of them has: for a layer that has moved, or
/// whose bytes are known to be the same. Opens neither.
///
/// # Errors
/// The image is not qcow2, is in use or damaged, or its header has no room for the name.
pub fn rename_backing(spec: &DiskSpec, new: Option<(&Path, Format)>) -> Result<(), Error> {
    let path = &spec.top.path;
    only_qcow2(spec)?;
    let mut top = Disk::open_over(spec, None)?;
    let label = new.map(|(name, format)| Label {
        name: name.as_os_str().as_bytes(),
        format,
    });
    top.relabel(label).map_err(|kind| Error::new(path, kind))?;
    top.close()
}

fn only_qcow2(spec: &DiskSpec) -> Result<(), Error> {
    if spec.top.format == Format::Qcow2 {
        return Ok(());
    }
    let reason = "a raw image has no backing files";
    Err(Error::new(
        &spec.top.path,
        ErrorKind::Backing(reason.into()),
    ))
}

/// Whether a part of a disk is known to read as zero without looking.
fn is_hole(mapping: Mapping) -> bool {
    !matches!(mapping, Mapping::Data { .. } | Mapping::Compressed { .. })
}

/// Writes to `top`, which lies over the new layers, what it does not have and reads otherwise in `old`.
fn copy_differences(
    path: &Path,
    old: &mut Disk,
    top: &mut Disk,
    monitor: &mut dyn Monitor,
) -> Result<(), Error> {
    let failed = |error: IoError| Error::new(path, ErrorKind::Request(error));
    let (unit, version) = top.cluster_size().unwrap_or((CHUNK, 3));
    let size = old.size_bytes();
    let mut way = Way::new(monitor, size);
    let mut at = 0;
    while at < size {
        let before = old.locate(at, size - at).map_err(failed)?;
        let own = before.depth == 0 && before.mapping != Mapping::Below;
        let mut alike = if own { before.length } else { 0 };
        if !own && is_hole(before.mapping) {
            let after = top.locate(at, before.length).map_err(failed)?;
            if is_hole(after.mapping) {
                alike = after.length;
            }
        }
        // Whole clusters only, except at the end of the disk.
        if at + alike < size {
            alike = alike / unit * unit;
        }
        if alike > 0 {
            at += alike;
            way.at(path, at, 0)?;
            continue;
        }
        // As much as comes from below in one run, so that nothing is read in vain behind it.
        let most = CHUNK.max(unit);
        let run = before.length.next_multiple_of(unit).min(most);
        let length = run.min(size - at);
        let wanted = old.read(at, length as usize).map_err(failed)?;
        let seen = top.read(at, length as usize).map_err(failed)?;
        let mut moved = 0;
        for (n, (wanted, seen)) in (0u64..).zip(units(&wanted, &seen, unit)) {
            if wanted == seen {
                continue;
            }
            let offset = at + n * unit;
            let zero = version >= 3 && wanted.iter().all(|byte| *byte == 0);
            let written = if zero {
                top.execute(&Op::WriteZeroes {
                    offset,
                    length: wanted.len() as u64,
                    unmap: true,
                })
            } else {
                top.write(offset, wanted.to_vec())
            };
            written.map_err(failed)?;
            moved += wanted.len() as u64;
        }
        at += length;
        way.at(path, at, moved)?;
    }
    Ok(())
}

fn units<'a>(
    one: &'a [u8],
    two: &'a [u8],
    unit: u64,
) -> impl Iterator<Item = (&'a [u8], &'a [u8])> {
    let unit = usize::try_from(unit).unwrap_or(usize::MAX);
    one.chunks(unit).zip(two.chunks(unit))
}
