//! Where the bytes of a disk come from, and whether two disks are the same.

use serde::Serialize;

use crate::error::{Error, ErrorKind, IoError};
use crate::qcow2::Mapping;
use crate::{Disk, DiskSpec};

/// A run of bytes of a disk that come from the same place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct MapEntry {
    /// First byte.
    pub start: u64,
    /// Number of bytes.
    pub length: u64,
    /// Which layer answers: 0 for the top.
    pub depth: usize,
    /// Some layer has these bytes or says that they are zero.
    pub present: bool,
    /// They are known to be zero without looking.
    pub zero: bool,
    /// They are compressed.
    pub compressed: bool,
    /// Where in the layer's file they are, if they are there as they are.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub offset: Option<u64>,
}

impl MapEntry {
    /// Whether `next` only goes on with this.
    fn continues(&self, next: &Self) -> bool {
        let offsets = match (self.offset, next.offset) {
            (Some(a), Some(b)) => a.checked_add(self.length) == Some(b),
            (a, b) => a == b,
        };
        offsets
            && (self.depth, self.present, self.zero, self.compressed)
                == (next.depth, next.present, next.zero, next.compressed)
    }
}

/// Lists where the bytes of a disk come from, in order and without gaps.
///
/// # Errors
/// The disk cannot be opened for reading, or an image is damaged.
pub fn map(spec: &DiskSpec) -> Result<Vec<MapEntry>, Error> {
    let mut disk = open(spec)?;
    let failed = |error: IoError| Error::new(&spec.top.path, ErrorKind::Request(error));
    let mut entries: Vec<MapEntry> = Vec::new();
    let size = disk.size_bytes();
    let mut start = 0;
    while start < size {
        let located = disk.locate(start, size - start).map_err(failed)?;
        let next = MapEntry {
            start,
            length: located.length,
            depth: located.depth,
            present: located.mapping != Mapping::Below,
            zero: !matches!(
                located.mapping,
                Mapping::Data { .. } | Mapping::Compressed { .. }
            ),
            compressed: matches!(located.mapping, Mapping::Compressed { .. }),
            offset: match located.mapping {
                Mapping::Data { host, .. } => Some(host),
                _ => None,
            },
        };
        start += next.length;
        match entries.last_mut() {
            Some(last) if last.continues(&next) => last.length += next.length,
            _ => entries.push(next),
        }
    }
    Ok(entries)
}

/// How two disks compare. The shorter one counts as followed by zeros.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Comparison {
    /// Size of the first disk in bytes.
    pub first_size_bytes: u64,
    /// Size of the second disk in bytes.
    pub second_size_bytes: u64,
    /// The first byte that differs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub differs_at: Option<u64>,
}

/// Compares what guests of two disks would read.
///
/// # Errors
/// A disk cannot be opened for reading, or an image is damaged.
pub fn compare(first: &DiskSpec, second: &DiskSpec) -> Result<Comparison, Error> {
    const CHUNK: u64 = 1 << 20;
    let mut disks = [open(first)?, open(second)?];
    let sizes = [disks[0].size_bytes(), disks[1].size_bytes()];
    let size = sizes[0].max(sizes[1]);
    let mut at = 0;
    let mut differs_at = None;
    while at < size && differs_at.is_none() {
        let mut length = (size - at).min(CHUNK);
        let mut zero = [true; 2];
        // Where both are known to be zero nothing has to be read.
        for ((disk, own), zero) in disks.iter_mut().zip(sizes).zip(&mut zero) {
            if at < own {
                let located = disk.locate(at, length.min(own - at));
                let located = located.map_err(|e| Error::new(&first.top.path, e.into()))?;
                length = located.length;
                *zero = !matches!(
                    located.mapping,
                    Mapping::Data { .. } | Mapping::Compressed { .. }
                );
            }
        }
        if zero != [true; 2] {
            let mut seen = [Vec::new(), Vec::new()];
            let specs = [first, second];
            for n in 0..2 {
                let own = sizes[n].saturating_sub(at).min(length) as usize;
                let read = disks[n].read(at, own);
                seen[n] = read.map_err(|e| Error::new(&specs[n].top.path, e.into()))?;
                seen[n].resize(length as usize, 0);
            }
            let mut pairs = seen[0].iter().zip(&seen[1]);
            differs_at = pairs.position(|(a, b)| a != b).map(|n| at + n as u64);
        }
        at += length;
    }
    Ok(Comparison {
        first_size_bytes: sizes[0],
        second_size_bytes: sizes[1],
        differs_at,
    })
}

pub(super) fn open(spec: &DiskSpec) -> Result<Disk, Error> {
    Disk::open(&DiskSpec {
        read_only: true,
        ..spec.clone()
    })
}
