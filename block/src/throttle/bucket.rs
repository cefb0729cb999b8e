//! A bucket of tokens, in whole numbers: a token is 10⁹ grains and a rate of *r* a second is *r* grains a nanosecond, so nothing is
//! ever rounded.

const GRAINS: i128 = 1_000_000_000;

/// Tokens that fill up at a steady rate and are taken by requests.
#[derive(Debug)]
pub(super) struct Bucket {
    /// Tokens a second.
    rate: u64,
    /// Grains that it holds.
    capacity: i128,
    /// Grains in it; below zero after a request that wanted more than it holds.
    level: i128,
}

impl Bucket {
    /// A full bucket. Neither number is 0.
    pub(super) fn new(rate: u64, capacity: u64) -> Self {
        let capacity = i128::from(capacity) * GRAINS;
        Self {
            rate,
            capacity,
            level: capacity,
        }
    }

    /// Takes over the level of the bucket that this one replaces. A debt stays as long in time as it was.
    pub(super) fn continue_from(&mut self, old: &Self) {
        self.level = match old.level {
            level if level < 0 => level / i128::from(old.rate) * i128::from(self.rate),
            level => level.min(self.capacity),
        };
    }

    /// Lets time pass. While somebody waits it holds twice as much: what a waiter that was woken late did not take is not lost.
    pub(super) fn fill(&mut self, nanos: u64, awaited: bool) {
        let full = self.capacity * if awaited { 2 } else { 1 };
        let gain = i128::from(self.rate) * i128::from(nanos);
        self.level = self.level.saturating_add(gain).min(full);
    }

    /// Grains that must be there before a request for `cost` tokens begins: a request that wants more than the bucket holds begins
    /// when it is full, and leaves a debt.
    fn wanted(&self, cost: u64) -> i128 {
        (i128::from(cost) * GRAINS).min(self.capacity)
    }

    pub(super) fn is_ready(&self, cost: u64) -> bool {
        self.level >= self.wanted(cost)
    }

    /// Nanoseconds until it is ready for `cost`.
    pub(super) fn nanos_until_ready(&self, cost: u64) -> u64 {
        let missing = self.wanted(cost).saturating_sub(self.level).max(0);
        let rate = i128::from(self.rate);
        u64::try_from((missing + rate - 1) / rate).unwrap_or(u64::MAX)
    }

    pub(super) fn take(&mut self, cost: u64) {
        self.level = self.level.saturating_sub(i128::from(cost) * GRAINS);
    }

    /// Nanoseconds that `cost` tokens take to flow in.
    pub(super) fn nanos_of(&self, cost: u64) -> u128 {
        (u128::from(cost) * GRAINS.unsigned_abs()) / u128::from(self.rate)
    }
}
