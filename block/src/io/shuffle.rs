//! For tests: a back end that performs one call at a time, in an order that random numbers choose, so that every interleaving of
//! requests that threads could produce can be had again from its seed.

use super::sys::{Call, perform};

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
        if self.waiting.is_empty() {
            return;
        }
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        let at = (self.random >> 16) as usize % self.waiting.len();
        let (token, call) = self.waiting.swap_remove(at);
        results.push((token, perform(&call)));
    }
}
