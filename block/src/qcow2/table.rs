//! A cache of the tables of an image: L2 tables and refcount blocks, in pieces of at most 4 KiB, under a byte budget.
//!
//! Changes stay here until a flush writes them in place, first refcounts, then L2 ([`super::flush`]). Only clean pieces are
//! evicted, the least recently used first; the engine flushes before the dirty ones fill the budget.

use std::cell::RefCell;
use std::collections::HashMap;
use std::io;
use std::ops::Range;

use crate::buffers::Pages;
use crate::io::BlockFile;

/// What a table is; decides when its changes may reach the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    Refcount,
    L2,
}

/// The most that a cache holds, in bytes; more only while all of it is dirty.
const BUDGET: usize = 1024 * 1024;
/// The longest run of dirty pieces that is written at once, in bytes.
const WRITE_RUN: usize = 64 * 1024;
/// The largest piece, in bytes; smaller clusters are cached whole.
const PIECE: u64 = 4096;

struct Piece {
    bytes: Pages,
    dirty: Option<Role>,
    used: u64,
}

#[derive(Default)]
struct State {
    pieces: HashMap<u64, Piece>,
    clock: u64,
    /// Counts evictions, so that a load can tell whether what it read may have been changed, written and dropped meanwhile.
    generation: u64,
    dirty: usize,
}

/// The cache of one image.
pub(super) struct TableCache {
    piece: u64,
    most: usize,
    state: RefCell<State>,
}

impl TableCache {
    pub(super) fn new(cluster_size: u64) -> Self {
        let piece = cluster_size.min(PIECE);
        // A piece takes whole pages of memory.
        Self {
            piece,
            most: BUDGET / PIECE as usize,
            state: RefCell::default(),
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
        let mut state = self.state.borrow_mut();
        state.clock += 1;
        let now = state.clock;
        let found = state.pieces.get_mut(&piece)?;
        found.used = now;
        Some(look(found.bytes.bytes()))
    }

    /// Changes a cached piece; `None` if it has to be loaded first.
    pub(super) fn update<T>(
        &self,
        piece: u64,
        role: Role,
        change: impl FnOnce(&mut [u8]) -> T,
    ) -> Option<T> {
        let mut state = self.state.borrow_mut();
        state.clock += 1;
        let now = state.clock;
        let found = state.pieces.get_mut(&piece)?;
        found.used = now;
        let result = change(found.bytes.bytes_mut());
        if found.dirty.replace(role).is_none() {
            state.dirty += 1;
        }
        Some(result)
    }

    /// Reads a piece into the cache.
    pub(super) async fn load(&self, file: &BlockFile, piece: u64) -> io::Result<()> {
        loop {
            let generation = self.state.borrow().generation;
            let mut bytes = Pages::zeroed(usize::try_from(self.piece).unwrap_or(PIECE as usize));
            file.read(piece, bytes.span()).await?;
            let mut state = self.state.borrow_mut();
            if state.pieces.contains_key(&piece) {
                return Ok(());
            }
            if state.generation != generation {
                continue;
            }
            if state.pieces.len() >= self.most {
                state.evict();
            }
            state.clock += 1;
            let used = state.clock;
            state.pieces.insert(
                piece,
                Piece {
                    bytes,
                    dirty: None,
                    used,
                },
            );
            return Ok(());
        }
    }

    /// Forgets what is cached of a range of the file, changes included: its clusters begin a new life.
    pub(super) fn purge(&self, range: Range<u64>) {
        let mut state = self.state.borrow_mut();
        state.generation += 1;
        let mut at = range.start;
        while at < range.end {
            if state
                .pieces
                .remove(&at)
                .is_some_and(|piece| piece.dirty.is_some())
            {
                state.dirty -= 1;
            }
            at += self.piece;
        }
    }

    /// Whether the dirty pieces should be written before more are made dirty.
    pub(super) fn is_under_pressure(&self) -> bool {
        self.state.borrow().dirty >= self.most / 4 * 3
    }

    /// Whether any piece waits to be written.
    pub(super) fn is_dirty(&self) -> bool {
        self.state.borrow().dirty > 0
    }

    /// Whether a piece of this role waits to be written.
    pub(super) fn has_dirty(&self, role: Role) -> bool {
        let state = self.state.borrow();
        state.dirty > 0 && state.pieces.values().any(|piece| piece.dirty == Some(role))
    }

    /// Writes the dirty pieces of a role in place. The caller keeps others from changing tables meanwhile. What could not be
    /// written stays dirty.
    pub(super) async fn write_dirty(&self, file: &BlockFile, role: Role) -> io::Result<()> {
        let mut dirty: Vec<u64> = {
            let state = self.state.borrow();
            let pieces = state
                .pieces
                .iter()
                .filter(|(_, piece)| piece.dirty == Some(role));
            pieces.map(|(at, _)| *at).collect()
        };
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
                let state = self.state.borrow();
                for (target, at) in bytes.bytes_mut().chunks_exact_mut(piece).zip(now) {
                    if let Some(source) = state.pieces.get(at) {
                        target.copy_from_slice(source.bytes.bytes());
                    }
                }
            }
            file.write(first, bytes.span()).await?;
            let mut state = self.state.borrow_mut();
            for at in now {
                if state
                    .pieces
                    .get_mut(at)
                    .is_some_and(|piece| piece.dirty.take().is_some())
                {
                    state.dirty -= 1;
                }
            }
        }
        Ok(())
    }
}

impl State {
    fn evict(&mut self) {
        let clean = self
            .pieces
            .iter()
            .filter(|(_, piece)| piece.dirty.is_none());
        if let Some(oldest) = clean.min_by_key(|(_, piece)| piece.used).map(|(at, _)| *at) {
            self.pieces.remove(&oldest);
            self.generation += 1;
        }
    }
}
