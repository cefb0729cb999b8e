//! From a guest offset to where its bytes are.

use super::Qcow2;
use super::spec::{self, L2Entry, RawEntry};
use crate::error::IoError;

/// Where guest bytes are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mapping {
    /// In the layer below; zero if there is none.
    Below,
    /// In the layer below, but the cluster at `host` is kept for them.
    BelowKept { host: u64, copied: bool },
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
        let size = geometry.l2_entry_bytes();
        let (piece, position) = self
            .tables
            .locate(table + geometry.cluster(in_table) * size);
        let version = self.header.version;
        let skip = geometry.in_cluster(offset);
        // What is mapped as one: subclusters or clusters.
        let unit_bits = geometry.unit_bits();
        let in_unit = offset & ((1 << unit_bits) - 1);
        let found = self.tables.get(piece, |bytes| {
            let wanted = (in_unit + length).div_ceil(1 << unit_bits);
            // The entry of the unit `n` after the first one, where it is in this piece.
            let decode = |n: u64| {
                let at = skip + (n << unit_bits);
                let index = geometry.cluster(at) * size;
                let bytes = bytes
                    .get(position + index as usize..)?
                    .get(..size as usize)?;
                let raw = RawEntry::read(bytes, geometry);
                let subcluster = geometry.subcluster(at);
                Some(L2Entry::decode(raw, subcluster, geometry, version))
            };
            let first = decode(0).unwrap_or(Err("an L2 entry is cut off"));
            let first = first.map_err(|r| IoError::corrupt(piece, r))?;
            let mut units = 1;
            while units < wanted {
                let distance = geometry.down(skip + (units << unit_bits));
                match decode(units) {
                    Some(Ok(next)) if continues(first, next, distance) => units += 1,
                    _ => break,
                }
            }
            Ok::<_, IoError>((first, units))
        });
        let Some(found) = found else {
            return Ok(Lookup::Missing(piece));
        };
        let (entry, units) = found?;
        let mut length = length.min((units << unit_bits) - in_unit);
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
            L2Entry::Unallocated { kept: None, .. } => Mapping::Below,
            L2Entry::Unallocated {
                kept: Some(host),
                copied,
            } => Mapping::BelowKept {
                host: host + skip,
                copied,
            },
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

/// Whether `next`, whose cluster begins `distance` bytes after that of `first` in the guest, goes on where `first` began. A compressed
/// cluster is an extent of its own, all of it.
fn continues(first: L2Entry, next: L2Entry, distance: u64) -> bool {
    use L2Entry::{Compressed, Data, Unallocated, Zero};
    let follows = |a: u64, b: u64| a.checked_add(distance) == Some(b);
    match (first, next) {
        (Unallocated { kept: None, .. }, Unallocated { kept: None, .. })
        | (Zero { host: None, .. }, Zero { host: None, .. }) => true,
        (Data { host: a, copied: x }, Data { host: b, copied: y })
        | (
            Unallocated {
                kept: Some(a),
                copied: x,
            },
            Unallocated {
                kept: Some(b),
                copied: y,
            },
        )
        | (
            Zero {
                host: Some(a),
                copied: x,
            },
            Zero {
                host: Some(b),
                copied: y,
            },
        ) => follows(a, b) && x == y,
        (Compressed { .. }, Compressed { .. }) => distance == 0,
        _ => false,
    }
}
