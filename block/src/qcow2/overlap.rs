//! Which clusters of the file hold metadata, so that nothing else is ever written there.
//!
//! A damaged or hostile image can point a guest's cluster at the header or at a table. Every host range is looked up here
//! before guest data goes to it or the allocator gives it out; on a hit the image is marked corrupt and writing stops.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use super::spec::Geometry;

/// Ranges of clusters with metadata and what it is: one entry a structure, so that no header can make it large, and eight bytes for
/// each table of one cluster that is there when the image is opened.
#[derive(Default)]
pub(super) struct Overlap {
    /// First cluster -> end, what.
    ranges: BTreeMap<u64, (u64, &'static str)>,
    /// Clusters of [`Overlap::set_tables`], in order.
    tables: Vec<u64>,
    /// Those of them that were released.
    released: BTreeSet<u64>,
}

/// What [`Overlap::set_tables`] holds; which of the two nobody needs to know.
const TABLE: &str = "an L2 table or refcount block";

impl Overlap {
    /// Claims tables of one cluster each, by their host offsets; the error is the offset and what already lies there.
    pub(super) fn set_tables(
        &mut self,
        geometry: Geometry,
        hosts: impl Iterator<Item = u64>,
    ) -> Result<(), (u64, &'static str)> {
        let mut tables: Vec<u64> = hosts.map(|host| geometry.cluster(host)).collect();
        tables.sort_unstable();
        let host = |cluster: u64| cluster << geometry.cluster_bits;
        let twice = tables.windows(2).find(|pair| pair.first() == pair.last());
        if let Some([first, ..]) = twice {
            return Err((host(*first), TABLE));
        }
        // The ranges are few, so they are looked up among the tables.
        for (first, (end, what)) in &self.ranges {
            let next = tables.partition_point(|table| table < first);
            if let Some(table) = tables.get(next)
                && table < end
            {
                return Err((host(*table), what));
            }
        }
        self.tables = tables;
        Ok(())
    }

    /// Claims `bytes` bytes at `host`; the error is what already lies there.
    pub(super) fn claim(
        &mut self,
        geometry: Geometry,
        host: u64,
        bytes: u64,
        what: &'static str,
    ) -> Result<(), &'static str> {
        if let Some(other) = self.hit(geometry, host, bytes) {
            return Err(other);
        }
        let range = clusters(geometry, host, bytes);
        self.ranges.insert(range.start, (range.end, what));
        Ok(())
    }

    /// Forgets a structure that was claimed, because it moved away or was freed.
    pub(super) fn release(&mut self, geometry: Geometry, host: u64) {
        let cluster = geometry.cluster(host);
        if self.ranges.remove(&cluster).is_none() && self.tables.binary_search(&cluster).is_ok() {
            self.released.insert(cluster);
        }
    }

    /// What metadata a range of the file would overwrite, if any.
    pub(super) fn hit(&self, geometry: Geometry, host: u64, bytes: u64) -> Option<&'static str> {
        let range = clusters(geometry, host, bytes);
        let from = self.tables.partition_point(|table| *table < range.start);
        let mut near = self.tables.get(from..).unwrap_or_default().iter();
        let table = near
            .by_ref()
            .take_while(|table| **table < range.end)
            .find(|table| !self.released.contains(table));
        if table.is_some() {
            return Some(TABLE);
        }
        // Claims do not overlap, so the last one to begin before the range's end is the one that reaches furthest into it.
        let (_, (end, what)) = self.ranges.range(..range.end).next_back()?;
        (*end > range.start).then_some(*what)
    }
}

fn clusters(geometry: Geometry, host: u64, bytes: u64) -> Range<u64> {
    let end = host.saturating_add(bytes.max(1) - 1);
    geometry.cluster(host)..geometry.cluster(end) + 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_touches_a_claimed_cluster_is_a_hit() {
        let geometry = Geometry {
            cluster_bits: 9,
            refcount_order: 4,
            extended_l2: false,
        };
        let mut overlap = Overlap::default();
        overlap.claim(geometry, 1024, 513, "a table").unwrap();
        overlap.claim(geometry, 4096, 1, "a block").unwrap();
        assert_eq!(overlap.claim(geometry, 1536, 512, "x"), Err("a table"));
        assert_eq!(overlap.hit(geometry, 0, 1024), None);
        assert_eq!(overlap.hit(geometry, 0, 1025), Some("a table"));
        assert_eq!(overlap.hit(geometry, 2047, 1), Some("a table"));
        assert_eq!(overlap.hit(geometry, 2048, 2048), None);
        assert_eq!(overlap.hit(geometry, 0, 1 << 20), Some("a block"));
        overlap.release(geometry, 1024);
        assert_eq!(overlap.hit(geometry, 0, 4096), None);
    }

    #[test]
    fn tables_that_were_there_are_a_hit_until_they_are_released_and_may_be_claimed_again() {
        let geometry = Geometry {
            cluster_bits: 9,
            refcount_order: 4,
            extended_l2: false,
        };
        let mut overlap = Overlap::default();
        overlap.claim(geometry, 1024, 1024, "the L1 table").unwrap();
        let mut set = |hosts: &[u64]| overlap.set_tables(geometry, hosts.iter().copied());
        assert_eq!(set(&[4096, 512, 4096]), Err((4096, TABLE)));
        assert_eq!(set(&[4096, 1536]), Err((1536, "the L1 table")));
        set(&[4096, 512, 2048]).unwrap();
        assert_eq!(overlap.hit(geometry, 2560, 1536), None);
        assert_eq!(overlap.hit(geometry, 2560, 1537), Some(TABLE));
        assert_eq!(overlap.claim(geometry, 4096, 1, "x"), Err(TABLE));
        overlap.release(geometry, 4096);
        assert_eq!(overlap.hit(geometry, 2560, 1 << 20), None);
        overlap.claim(geometry, 4096, 1, "x").unwrap();
        assert_eq!(overlap.hit(geometry, 4096, 1), Some("x"));
        overlap.release(geometry, 4096);
        assert_eq!(overlap.hit(geometry, 4096, 1), None);
        assert_eq!(overlap.hit(geometry, 1024, 1024), Some("the L1 table"));
    }
}
