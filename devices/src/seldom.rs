//! Log lines that a guest can cause: the 1st, 2nd, 4th, 8th … time, so that a guest that does nothing else all day cannot fill the
//! host's log, while a fault that goes on is still seen to go on.

use std::sync::atomic::{AtomicU64, Ordering};

/// Counts an event and says when it is worth a line.
#[derive(Debug, Default)]
pub struct Seldom(AtomicU64);

impl Seldom {
    /// Nothing has happened yet.
    #[must_use]
    pub const fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// Counts one more. How often it has happened, where that is a power of two and so worth telling.
    pub fn again(&self) -> Option<u64> {
        let times = self.0.fetch_add(1, Ordering::Relaxed).wrapping_add(1);
        times.is_power_of_two().then_some(times)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_million_events_are_twenty_lines() {
        let events = Seldom::new();
        let told: Vec<u64> = (0..1_000_000).filter_map(|_| events.again()).collect();
        assert_eq!(told.len(), 20);
        assert_eq!(told[..4], [1, 2, 4, 8]);
    }
}
