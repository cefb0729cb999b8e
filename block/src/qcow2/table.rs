//! A cache of the tables of an image: L2 tables and refcount blocks, in pieces of at most 4 KiB, under a byte budget.
//!
//! Changes stay here until a flush writes them in place, first refcounts, then L2 ([`super::flush`]). Only clean pieces are
//! evicted, the least recently used first; the engine flushes before there are many dirty ones. What all caches of a process
//! take together is limited by a [`CacheBudget`].

use std::cell::{Cell, RefCell};
use std::io;
use std::ops::Range;
use std::sync::Arc;

use crate::budget::{Account, CacheBudget, CacheCounts};
use crate::buffers::{PAGE, Pages};
use crate::io::BlockFile;
use crate::lru::Lru;
use crate::task::{Kind, RangeLock};

/// What a table is; decides when its changes may reach the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    Refcount,
    L2,
}

impl Role {
    /// The list of the dirty pieces of this role.
    fn list(self) -> usize {
        match self {
            Self::Refcount => 1,
            Self::L2 => 2,
        }
    }
}

/// The list of what can be evicted.
const CLEAN: usize = 0;
/// The longest run of dirty pieces that is written at once, in bytes.
const WRITE_RUN: usize = 64 * 1024;
/// The largest piece, in bytes; smaller clusters are cached whole.
const PIECE: u64 = 4096;
/// Pieces that an image may have whatever others have, where it is only read and where it is written.
const FLOOR: usize = 4;
const FLOOR_WRITTEN: usize = 16;
/// So many dirty pieces are written before there are more of them.
const MOST_DIRTY: usize = 192;

/// The cache of one image.
pub(super) struct TableCache {
    piece: u64,
    pieces: RefCell<Lru<Pages>>,
    account: Account,
    counts: Arc<CacheCounts>,
    /// Pieces that are being read, by where they begin.
    loading: RangeLock,
    /// Counts what was purged, so that a load can tell whether what it read has a new meaning.
    purges: Cell<u64>,
}

impl TableCache {
    pub(super) fn new(
        cluster_size: u64,
        writable: bool,
        budget: &CacheBudget,
        counts: &Arc<CacheCounts>,
    ) -> Self {
        let floor = if writable { FLOOR_WRITTEN } else { FLOOR };
        Self {
            piece: cluster_size.min(PIECE),
            pieces: RefCell::default(),
            account: Account::new(budget, floor * PAGE),
            counts: Arc::clone(counts),
            loading: RangeLock::default(),
            purges: Cell::new(0),
        }
    }

    /// Bytes of a piece; a power of two.
    pub(super) fn piece_size(&self) -> u64 {
        self.piece
    }

    /// The piece that holds the byte at `host`, and where in it.
    pub(super) fn locate(&self, host: u64) -> (u64, usize) {
        let inside = host & (self.piece - 1);
        (host - inside, inside as usize)
    }

    /// Looks into a cached piece; `None` if it has to be loaded first.
    pub(super) fn get<T>(&self, piece: u64, look: impl FnOnce(&[u8]) -> T) -> Option<T> {
        let mut pieces = self.pieces.borrow_mut();
        let found = pieces.get(piece)?;
        self.counts.hit();
        Some(look(found.bytes()))
    }

    /// Changes a cached piece; `None` if it has to be loaded first.
    pub(super) fn update<T>(
        &self,
        piece: u64,
        role: Role,
        change: impl FnOnce(&mut [u8]) -> T,
    ) -> Option<T> {
        let mut pieces = self.pieces.borrow_mut();
        let found = pieces.get_into(piece, role.list())?;
        Some(change(found.bytes_mut()))
    }

    /// Whether a piece is in the cache.
    pub(super) fn contains(&self, piece: u64) -> bool {
        self.pieces.borrow().contains(piece)
    }

    /// Reads a piece into the cache.
    pub(super) async fn load(&self, file: &BlockFile, piece: u64) -> io::Result<()> {
        // Whoever wants the same piece waits for it.
        let _turn = self.loading.hold(piece..piece + 1, Kind::Exclusive).await;
        loop {
            if self.pieces.borrow().contains(piece) {
                return Ok(());
            }
            let purges = self.purges.get();
            let mut bytes = Pages::used(usize::try_from(self.piece).unwrap_or(PAGE));
            file.read(piece, bytes.span()).await?;
            if self.purges.get() != purges {
                continue;
            }
            self.counts.miss();
            let mut pieces = self.pieces.borrow_mut();
            self.make_room(&mut pieces);
            pieces.insert(piece, bytes, CLEAN);
            return Ok(());
        }
    }

    /// Evicts as much as has to go for one more piece, and one beyond that while others have less than their due.
    fn make_room(&self, pieces: &mut Lru<Pages>) {
        for _ in 0..2 {
            if self.account.admits(PAGE) {
                break;
            }
            let Some(oldest) = pieces.oldest(CLEAN) else {
                break;
            };
            pieces.remove(oldest);
            self.account.give(PAGE);
        }
        // Where nothing is clean the budget is exceeded until the dirty ones are written.
        self.account.take(PAGE);
    }

    /// Forgets what is cached of a range of the file, changes included: its clusters begin a new life.
    pub(super) fn purge(&self, range: Range<u64>) {
        self.purges.set(self.purges.get() + 1);
        let mut pieces = self.pieces.borrow_mut();
        let mut at = range.start;
        while at < range.end {
            if pieces.remove(at).is_some() {
                self.account.give(PAGE);
            }
            at += self.piece;
        }
    }

    /// Whether the dirty pieces should be written before more are made dirty.
    pub(super) fn is_under_pressure(&self) -> bool {
        let pieces = self.pieces.borrow();
        let dirty = pieces.length(Role::Refcount.list()) + pieces.length(Role::L2.list());
        let cramped = dirty >= FLOOR_WRITTEN / 4 * 3
            && pieces.length(CLEAN) < FLOOR
            && !self.account.admits(PAGE);
        dirty >= MOST_DIRTY || cramped
    }

    /// Whether any piece waits to be written.
    pub(super) fn is_dirty(&self) -> bool {
        self.has_dirty(Role::Refcount) || self.has_dirty(Role::L2)
    }

    /// Whether a piece of this role waits to be written.
    pub(super) fn has_dirty(&self, role: Role) -> bool {
        self.pieces.borrow().length(role.list()) > 0
    }

    /// Writes the dirty pieces of a role in place. The caller keeps others from changing tables meanwhile. What could not be
    /// written stays dirty.
    pub(super) async fn write_dirty(&self, file: &BlockFile, role: Role) -> io::Result<()> {
        let mut dirty: Vec<u64> = self.pieces.borrow().keys(role.list()).collect();
        dirty.sort_unstable();
        let piece = usize::try_from(self.piece).unwrap_or(PIECE as usize);
        let most = WRITE_RUN / piece;
        let mut rest = dirty.as_slice();
        while let Some(first) = rest.first().copied() {
            let run = rest
                .iter()
                .zip(0u64..)
                .take(most)
                .take_while(|(at, n)| **at == first + n * self.piece)
                .count();
            let (now, later) = rest.split_at(run);
            rest = later;
            let mut bytes = Pages::zeroed(run * piece);
            {
                let pieces = self.pieces.borrow();
                for (target, at) in bytes.bytes_mut().chunks_exact_mut(piece).zip(now) {
                    if let Some(source) = pieces.peek(*at) {
                        target.copy_from_slice(source.bytes());
                    }
                }
            }
            file.write(first, bytes.span()).await?;
            let mut pieces = self.pieces.borrow_mut();
            for at in now {
                pieces.get_into(*at, CLEAN);
            }
        }
        Ok(())
    }
}
