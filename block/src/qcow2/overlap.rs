//! Which clusters of the file hold metadata, so that nothing else is ever written there.
//!
//! A damaged or hostile image can point a guest's cluster at the header or at a table. Every host cluster is looked up here
//! before guest data goes to it or the allocator gives it out; on a hit the image is marked corrupt and writing stops.

use std::collections::HashMap;
use std::ops::Range;

use super::spec::Geometry;

/// Clusters with metadata and what it is.
#[derive(Default)]
pub(super) struct Overlap(HashMap<u64, &'static str>);

impl Overlap {
    /// Claims `bytes` bytes at `host`; the error is what already lies there.
    pub(super) fn claim(
        &mut self,
        geometry: Geometry,
        host: u64,
        bytes: u64,
        what: &'static str,
    ) -> Result<(), &'static str> {
        for cluster in clusters(geometry, host, bytes) {
            if let Some(other) = self.0.insert(cluster, what) {
                return Err(other);
            }
        }
        Ok(())
    }

    /// Forgets metadata that moved away or was freed.
    pub(super) fn release(&mut self, geometry: Geometry, host: u64, bytes: u64) {
        for cluster in clusters(geometry, host, bytes) {
            self.0.remove(&cluster);
        }
    }

    /// What metadata a range of the file would overwrite, if any.
    pub(super) fn hit(&self, geometry: Geometry, host: u64, bytes: u64) -> Option<&'static str> {
        clusters(geometry, host, bytes).find_map(|cluster| self.0.get(&cluster).copied())
    }
}

fn clusters(geometry: Geometry, host: u64, bytes: u64) -> Range<u64> {
    let end = host.saturating_add(bytes.max(1) - 1);
    geometry.cluster(host)..geometry.cluster(end) + 1
}
