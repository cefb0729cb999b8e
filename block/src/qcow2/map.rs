//! From a guest offset to where its bytes are.

use super::spec::{self, L2Entry};
use super::{Qcow2, be_entries};
use crate::error::IoError;

/// Where guest bytes are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mapping {
    /// In the layer below; zero if there is none.
    Below,
    /// Nowhere: they are zero.
    Zero,
    /// They are zero, but the cluster at `host` is kept for them.
    ZeroKept { host: u64, copied: bool },
    /// In the file at `host`; `copied`: nobody else uses that cluster.
    Data { host: u64, copied: bool },
    /// In what inflates from at most `bytes` bytes at `host`.
    Compressed { host: u64, bytes: u64 },
}

/// A run of guest bytes that are mapped alike; host offsets belong to its first byte, except of compressed clusters, where
/// they are those of the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Extent {
    pub(crate) mapping: Mapping,
    /// At least 1.
    pub(crate) length: u64,
}

/// Answer from what is in the cache.
enum Lookup {
    /// Known.
    Found(Extent),
    /// Only after this piece of a table has been loaded.
    Missing(u64),
}

impl Qcow2 {
    /// Where the first bytes of a range are; the extent is at most `length` (not 0) bytes long.
    pub(crate) async fn map(&self, offset: u64, length: u64) -> Result<Extent, IoError> {
        loop {
            match self.lookup(offset, length)? {
                Lookup::Found(extent) => return Ok(extent),
                Lookup::Missing(piece) => self.load_piece(piece).await?,
            }
        }
    }

    /// [`Qcow2::map`] without waiting.
    fn lookup(&self, offset: u64, length: u64) -> Result<Lookup, IoError> {
        let geometry = self.geometry();
        let l1_span = geometry.l1_span();
        let in_table = offset % l1_span;
        let length = length.min(l1_span - in_table);
        let Some(table) = self.l2_table(offset)? else {
            return Ok(Lookup::Found(Extent {
                mapping: Mapping::Below,
                length,
            }));
        };
        let (piece, position) = self.tables.locate(table + geometry.cluster(in_table) * 8);
        let version = self.header.version;
        let skip = geometry.in_cluster(offset);
        let found = self.tables.get(piece, |bytes| {
            let mut entries = be_entries(bytes.get(position..).unwrap_or_default());
            let first = entries.next().unwrap_or(0);
            let first = L2Entry::decode(first, geometry, version)
                .map_err(|r| IoError::corrupt(piece, r))?;
            let mut clusters = 1;
            let wanted = (skip + length).div_ceil(geometry.cluster_size());
            for raw in entries {
                let same = clusters < wanted
                    && L2Entry::decode(raw, geometry, version).is_ok_and(|next| {
                        continues(first, next, clusters << geometry.cluster_bits)
                    });
                if !same {
                    break;
                }
                clusters += 1;
            }
            Ok::<_, IoError>((first, clusters))
        });
        let Some(found) = found else {
            return Ok(Lookup::Missing(piece));
        };
        let (entry, clusters) = found?;
        let mut length = length.min((clusters << geometry.cluster_bits) - skip);
        if let L2Entry::Data { host, .. } = entry {
            // The file may end inside its last cluster, not before one that is referred to.
            let reach = self
                .file
                .end()
                .saturating_sub(host)
                .div_ceil(geometry.cluster_size());
            let readable = (reach << geometry.cluster_bits).saturating_sub(skip);
            if readable == 0 {
                return Err(IoError::corrupt(
                    host,
                    "an L2 entry points past the end of the file",
                ));
            }
            length = length.min(readable);
        }
        let mapping = match entry {
            L2Entry::Unallocated => Mapping::Below,
            L2Entry::Zero { host: None, .. } => Mapping::Zero,
            L2Entry::Zero {
                host: Some(host),
                copied,
            } => Mapping::ZeroKept {
                host: host + skip,
                copied,
            },
            L2Entry::Data { host, copied } => Mapping::Data {
                host: host + skip,
                copied,
            },
            L2Entry::Compressed { host, bytes } => Mapping::Compressed { host, bytes },
        };
        Ok(Lookup::Found(Extent { mapping, length }))
    }

    /// The L2 table for a guest offset, if there is one.
    pub(super) fn l2_table(&self, offset: u64) -> Result<Option<u64>, IoError> {
        let geometry = self.geometry();
        let index = usize::try_from(offset / geometry.l1_span()).unwrap_or(usize::MAX);
        let l1 = self.l1.borrow();
        let entry = l1.entries.get(index).copied().unwrap_or(0);
        let table = entry & spec::OFFSET_MASK;
        if table == 0 {
            return Ok(None);
        }
        if geometry.in_cluster(table) != 0 {
            return Err(IoError::corrupt(
                table,
                "an L1 entry's offset is not at a cluster's start",
            ));
        }
        if table >= self.file.end() {
            return Err(IoError::corrupt(
                table,
                "an L1 entry points past the end of the file",
            ));
        }
        Ok(Some(table))
    }
}

/// Whether `next`, `distance` bytes further on in the guest, goes on where `first` began.
fn continues(first: L2Entry, next: L2Entry, distance: u64) -> bool {
    match (first, next) {
        (L2Entry::Unallocated, L2Entry::Unallocated)
        | (L2Entry::Zero { host: None, .. }, L2Entry::Zero { host: None, .. }) => true,
        (L2Entry::Data { host: a, copied: x }, L2Entry::Data { host: b, copied: y })
        | (
            L2Entry::Zero {
                host: Some(a),
                copied: x,
            },
            L2Entry::Zero {
                host: Some(b),
                copied: y,
            },
        ) => a.checked_add(distance) == Some(b) && x == y,
        _ => false,
    }
}
