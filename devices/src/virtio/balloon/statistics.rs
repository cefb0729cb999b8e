//! What the guest says of its memory.

use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use serde::Serialize;
use zerocopy::FromBytes;

use super::bits::Statistic;

/// The guest's memory in its own words; `None` where its kernel does not say. Bytes, but for the counts.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct MemoryStatistics {
    /// Read from swap, in bytes.
    pub swap_in: Option<u64>,
    /// Written to swap, in bytes.
    pub swap_out: Option<u64>,
    /// Major page faults, a count.
    pub major_faults: Option<u64>,
    /// Minor page faults, a count.
    pub minor_faults: Option<u64>,
    /// Unused.
    pub free: Option<u64>,
    /// Managed by the kernel in all.
    pub total: Option<u64>,
    /// What a new program could get without swapping.
    pub available: Option<u64>,
    /// Caches of files.
    pub disk_caches: Option<u64>,
    /// Invocations of the out-of-memory killer, a count.
    pub oom_kills: Option<u64>,
}

impl MemoryStatistics {
    /// Reads a buffer of the statistics queue; tags that are not known are passed over.
    #[must_use]
    pub fn parse(bytes: &[u8]) -> Self {
        let mut statistics = Self::default();
        for entry in bytes.chunks_exact(size_of::<Statistic>()) {
            let Ok(entry) = Statistic::read_from_bytes(entry) else {
                continue;
            };
            let (tag, value) = (entry.tag, entry.value);
            let place = match tag.get() {
                0 => &mut statistics.swap_in,
                1 => &mut statistics.swap_out,
                2 => &mut statistics.major_faults,
                3 => &mut statistics.minor_faults,
                4 => &mut statistics.free,
                5 => &mut statistics.total,
                6 => &mut statistics.available,
                7 => &mut statistics.disk_caches,
                10 => &mut statistics.oom_kills,
                _ => continue,
            };
            // All ones is a driver's way of not knowing.
            *place = Some(value.get()).filter(|value| *value != u64::MAX);
        }
        statistics
    }
}

/// The last statistics and when they came.
#[derive(Debug, Default)]
pub struct Latest(Mutex<Option<(Instant, MemoryStatistics)>>);

impl Latest {
    /// What the guest said last, and when.
    #[must_use]
    pub fn get(&self) -> Option<(Instant, MemoryStatistics)> {
        let latest = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        latest.clone()
    }

    pub(super) fn set(&self, statistics: Option<MemoryStatistics>) {
        let mut latest = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *latest = statistics.map(|statistics| (Instant::now(), statistics));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_find_their_fields_and_strangers_are_passed_over() {
        let mut bytes = Vec::new();
        for (tag, value) in [(4u16, 1000u64), (5, 4000), (6, u64::MAX), (99, 7)] {
            bytes.extend(tag.to_le_bytes());
            bytes.extend(value.to_le_bytes());
        }
        bytes.extend([4, 0, 1]);
        let expected = MemoryStatistics {
            free: Some(1000),
            total: Some(4000),
            ..MemoryStatistics::default()
        };
        assert_eq!(MemoryStatistics::parse(&bytes), expected);
    }
}
