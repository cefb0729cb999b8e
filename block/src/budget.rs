//! How much memory the caches of a process take together.
//!
//! ```text
//!  CacheBudget ── limit, used
//!     ├── Account of an image's tables ── own ≤ floor: always;  else  used < limit  and  own ≤ 4 · (limit - used)
//!     ├── Account of a chain's merged map
//!     └── …
//! ```
//!
//! Nobody can evict what another thread caches, so a cache that grows leaves room behind itself: one alone gets four fifths of the limit,
//! and however many there are, a part is always left for the next. A cache that has more than its due gives a little back
//! whenever it loads something.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

/// The limit of [`CacheBudget::process`], in bytes.
const PROCESS_LIMIT: usize = 32 * 1024 * 1024;
/// How many times what is left one cache may have.
const SHARE: usize = 4;

#[derive(Debug)]
struct Shared {
    limit: usize,
    used: AtomicUsize,
}

/// A limit for the memory of table caches and merged maps, shared by every disk that is given a clone of it.
///
/// Every image has a little that is guaranteed, 16 KiB (64 KiB where it is written), beside tables that were changed and wait to be
/// written; so the limit may be exceeded by that.
#[derive(Clone, Debug)]
pub struct CacheBudget(Arc<Shared>);

impl CacheBudget {
    /// A budget of its own, of `limit` bytes.
    #[must_use]
    pub fn new(limit: usize) -> Self {
        Self(Arc::new(Shared {
            limit,
            used: AtomicUsize::new(0),
        }))
    }

    /// The one that all disks of a process share unless told otherwise: 32 MiB.
    #[must_use]
    pub fn process() -> Self {
        static PROCESS: OnceLock<CacheBudget> = OnceLock::new();
        PROCESS.get_or_init(|| Self::new(PROCESS_LIMIT)).clone()
    }

    /// Bytes that may be used.
    #[must_use]
    pub fn limit(&self) -> usize {
        self.0.limit
    }

    /// Bytes that are used now.
    #[must_use]
    pub fn used(&self) -> usize {
        self.0.used.load(Ordering::Relaxed)
    }
}

impl Default for CacheBudget {
    fn default() -> Self {
        Self::process()
    }
}

/// What one cache takes of a budget; given back when it is dropped.
pub(crate) struct Account {
    budget: CacheBudget,
    own: Cell<usize>,
    floor: usize,
}

impl Account {
    /// An account that may always have `floor` bytes.
    pub(crate) fn new(budget: &CacheBudget, floor: usize) -> Self {
        Self {
            budget: budget.clone(),
            own: Cell::new(0),
            floor,
        }
    }

    /// Whether the cache may grow by `bytes` without evicting anything.
    pub(crate) fn admits(&self, bytes: usize) -> bool {
        let own = self.own.get().saturating_add(bytes);
        let used = self.budget.used().saturating_add(bytes);
        let left = self.budget.limit().saturating_sub(used);
        own <= self.floor || own <= left.saturating_mul(SHARE)
    }

    /// Books memory that the cache takes.
    pub(crate) fn take(&self, bytes: usize) {
        self.own.set(self.own.get() + bytes);
        self.budget.0.used.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Books memory that the cache gives back.
    pub(crate) fn give(&self, bytes: usize) {
        self.own.set(self.own.get() - bytes);
        self.budget.0.used.fetch_sub(bytes, Ordering::Relaxed);
    }
}

impl Drop for Account {
    fn drop(&mut self) {
        self.give(self.own.get());
    }
}

/// How often the caches of a disk had what was looked for. Read from any thread.
#[derive(Debug, Default)]
pub struct CacheCounts {
    hits: AtomicU64,
    misses: AtomicU64,
}

impl CacheCounts {
    /// Look-ups answered from memory.
    #[must_use]
    pub fn hits(&self) -> u64 {
        self.hits.load(Ordering::Relaxed)
    }

    /// Pieces of tables read from a file, and pieces of merged maps made.
    #[must_use]
    pub fn misses(&self) -> u64 {
        self.misses.load(Ordering::Relaxed)
    }

    pub(crate) fn hit(&self) {
        add_one(&self.hits);
    }

    pub(crate) fn miss(&self) {
        add_one(&self.misses);
    }
}

/// Only the thread that owns the disk counts, so nothing is lost between reading and writing.
fn add_one(counter: &AtomicU64) {
    counter.store(
        counter.load(Ordering::Relaxed).wrapping_add(1),
        Ordering::Relaxed,
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Takes pages until no more are admitted; their number.
    fn fill(account: &Account) -> usize {
        let mut pages = 0;
        while account.admits(4096) {
            account.take(4096);
            pages += 1;
        }
        pages
    }

    #[test]
    fn one_cache_gets_most_of_a_budget_and_the_next_ones_get_their_share_of_the_rest() {
        let budget = CacheBudget::new(1000 * 4096);
        let accounts: Vec<_> = (0..3).map(|_| Account::new(&budget, 0)).collect();
        assert_eq!(fill(&accounts[0]), 800);
        assert_eq!(fill(&accounts[1]), 160);
        assert_eq!(fill(&accounts[2]), 32);
        assert_eq!(budget.used(), 992 * 4096);
        drop(accounts);
        assert_eq!(budget.used(), 0);
    }

    #[test]
    fn the_floor_is_there_though_others_used_the_limit_up() {
        let budget = CacheBudget::new(10 * 4096);
        let greedy = Account::new(&budget, 10 * 4096);
        assert_eq!(fill(&greedy), 10);
        let modest = Account::new(&budget, 4 * 4096);
        assert_eq!(fill(&modest), 4);
    }
}
