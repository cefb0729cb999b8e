//! For tests: a back end that performs one call at a time, in an order that random numbers choose, so that every interleaving of
//! requests that threads could produce can be had again from its seed.

use std::cell::Cell;

use super::sys::{Action, Call, perform};

thread_local! {
    /// Whether `fallocate` calls of this thread's disks wait.
    pub(crate) static HOLDS_PUNCHES: Cell<bool> = const { Cell::new(false) };
}

pub(super) struct Shuffle {
    random: u64,
    waiting: Vec<(u64, Call)>,
}

impl Shuffle {
    pub(super) fn new(seed: u64) -> Self {
        Self {
            random: seed.wrapping_mul(2).wrapping_add(0x9e37_79b9_7f4a_7c15) | 1,
            waiting: Vec::new(),
        }
    }

    pub(super) fn push(&mut self, token: u64, call: Call) {
        self.waiting.push((token, call));
    }

    pub(super) fn collect(&mut self, results: &mut Vec<(u64, i32)>) {
        let held = |(_, call): &(u64, Call)| {
            HOLDS_PUNCHES.get() && matches!(call.action(), Action::Allocate { .. })
        };
        let free: Vec<usize> = (0..self.waiting.len())
            .filter(|n| !self.waiting.get(*n).is_some_and(held))
            .collect();
        if free.is_empty() {
            return;
        }
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        let at = (self.random >> 16) as usize % free.len();
        let at = free.get(at).copied().unwrap_or(0);
        let (token, call) = self.waiting.swap_remove(at);
        results.push((token, perform(&call)));
    }
}
