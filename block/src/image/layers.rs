//! Merging the layers of a disk: down into the layer below, or up into the top.
//!
//! ```text
//!  commit    top ■□■   ─>  below ▣▨▣   the top then has nothing that the layer below has not
//!  flatten   top ■□■, below ▨▨▨  ─>  top ■▨■ without a backing file
//! ```
//!
//! Both leave what a guest of the top reads as it is, at every moment; a job that was stopped or died is just done again.

use super::job::{Monitor, Way};
use crate::error::{Error, ErrorKind};
use crate::qcow2::Mapping;
use crate::{Backing, Disk, DiskSpec, Format, Op};

/// Bytes moved at a time.
const CHUNK: u64 = 1 << 20;

/// Writes what the top image of a disk has into the layer below it, which grows where it is shorter. Afterwards the top is as it was,
/// and may be deleted: the layer below reads the same.
///
/// # Errors
/// The disk has no layer below that is listed by the caller, somebody uses one of the two, or an image is damaged or full.
pub fn commit(spec: &DiskSpec, monitor: &mut dyn Monitor) -> Result<(), Error> {
    let path = &spec.top.path;
    let Backing::Explicit(layers) = &spec.backing else {
        let reason = "a commit needs the layers below to be listed, the nearest is written to";
        return Err(Error::new(path, ErrorKind::Backing(reason.into())));
    };
    let Some((below, rest)) = layers.split_first() else {
        let reason = "has no layer below to be committed to";
        return Err(Error::new(path, ErrorKind::Backing(reason.into())));
    };
    let base_spec = DiskSpec {
        top: below.clone(),
        backing: Backing::Explicit(rest.to_vec()),
        read_only: false,
        discard: spec.discard,
    };
    // What is stated has to fit what the headers say, as for any use of the chain.
    drop(super::map::open(spec)?);
    let mut top = Disk::open_over(spec, None)?;
    let mut base = Disk::open(&base_spec)?;
    let size = top.size_bytes();
    if base.size_bytes() < size {
        base.resize(size)
            .map_err(|kind| Error::new(&below.path, kind))?;
    }
    let mut way = Way::new(monitor, size);
    let mut at = 0;
    while at < size {
        let located = top.locate(at, (size - at).min(CHUNK));
        let located = located.map_err(|e| Error::new(path, e.into()))?;
        let length = located.length;
        let written = match located.mapping {
            Mapping::Below | Mapping::BelowKept { .. } => Ok(0),
            Mapping::Zero | Mapping::ZeroKept { .. } => {
                let zeroes = Op::WriteZeroes {
                    offset: at,
                    length,
                    unmap: true,
                };
                base.execute(&zeroes).map(|()| 0)
            }
            Mapping::Data { .. } | Mapping::Compressed { .. } => {
                let bytes = top.read(at, length as usize);
                let bytes = bytes.map_err(|e| Error::new(path, e.into()))?;
                base.write(at, bytes).map(|()| length)
            }
        };
        let written = written.map_err(|e| Error::new(&below.path, e.into()))?;
        at += length;
        way.at(path, at, written)?;
    }
    base.close()?;
    top.close()
}

/// Copies what the layers below have, and the top does not hide, into the top image, which then needs no backing file.
///
/// # Errors
/// The top is not qcow2, somebody uses it, or an image is damaged or full.
pub fn flatten(spec: &DiskSpec, monitor: &mut dyn Monitor) -> Result<(), Error> {
    let path = &spec.top.path;
    if spec.top.format != Format::Qcow2 {
        let reason = "a raw image has no backing files";
        return Err(Error::new(path, ErrorKind::Backing(reason.into())));
    }
    let failed = |error| Error::new(path, ErrorKind::Request(error));
    let mut disk = Disk::open(&DiskSpec {
        read_only: false,
        ..spec.clone()
    })?;
    let size = disk.size_bytes();
    let mut way = Way::new(monitor, size);
    let mut at = 0;
    while at < size {
        let located = disk.locate(at, (size - at).min(CHUNK)).map_err(failed)?;
        let length = located.length;
        let has_data = matches!(
            located.mapping,
            Mapping::Data { .. } | Mapping::Compressed { .. }
        );
        let mut moved = 0;
        if located.depth > 0 && has_data {
            let bytes = disk.read(at, length as usize).map_err(failed)?;
            // Zeros need no space once nothing is below.
            if bytes.iter().any(|byte| *byte != 0) {
                disk.write(at, bytes).map_err(failed)?;
            }
            moved = length;
        }
        at += length;
        way.at(path, at, moved)?;
    }
    disk.forget_backing().map_err(failed)?;
    disk.close()
}
