//! Which clusters of the file hold metadata, so that nothing else is ever written there.
//!
//! A damaged or hostile image can point a guest's cluster at the header or at a table. Every host range is looked up here
//! before guest data goes to it or the allocator gives it out; on a hit the image is marked corrupt and writing stops.

use std::collections::BTreeMap;
use std::ops::Range;

use super::spec::Geometry;

/// Ranges of clusters with metadata and what it is. One entry a structure, so that no header can make it large.
#[derive(Default)]
pub(super) struct Overlap(BTreeMap<u64, (u64, &'static str)>);

impl Overlap {
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
        self.0.insert(range.start, (range.end, what));
        Ok(())
    }

    /// Forgets a structure that was claimed, because it moved away or was freed.
    pub(super) fn release(&mut self, geometry: Geometry, host: u64) {
        self.0.remove(&geometry.cluster(host));
    }

    /// What metadata a range of the file would overwrite, if any.
    pub(super) fn hit(&self, geometry: Geometry, host: u64, bytes: u64) -> Option<&'static str> {
        let range = clusters(geometry, host, bytes);
        // Claims do not overlap, so the last one to begin before the range's end is the one that reaches furthest into it.
        let (_, (end, what)) = self.0.range(..range.end).next_back()?;
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
}
