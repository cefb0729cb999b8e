//! The last bytes of an endless stream. Positions count from the stream's first byte, so that a reader knows what it missed.

use std::collections::VecDeque;

/// Grows up to its capacity with what is written; then the oldest bytes make room.
pub(super) struct Backlog {
    bytes: VecDeque<u8>,
    capacity: usize,
    /// Position after the newest byte.
    end: u64,
}

impl Backlog {
    /// `capacity` is at least 1.
    pub(super) fn new(capacity: usize) -> Self {
        Self {
            bytes: VecDeque::new(),
            capacity: capacity.max(1),
            end: 0,
        }
    }

    pub(super) fn capacity(&self) -> usize {
        self.capacity
    }

    /// Position after the newest byte.
    pub(super) fn end(&self) -> u64 {
        self.end
    }

    /// Position of the oldest byte that is kept.
    pub(super) fn start(&self) -> u64 {
        self.end - self.bytes.len() as u64
    }

    pub(super) fn push(&mut self, bytes: &[u8]) {
        let kept = &bytes[bytes.len().saturating_sub(self.capacity)..];
        let excess = (self.bytes.len() + kept.len()).saturating_sub(self.capacity);
        self.bytes.drain(..excess);
        self.bytes.extend(kept);
        self.end += bytes.len() as u64;
    }

    /// What follows `position` in one piece; empty only if nothing does. A position that is no longer kept counts as the oldest.
    pub(super) fn piece(&self, position: u64) -> &[u8] {
        let skip = position.saturating_sub(self.start());
        let skip = usize::try_from(skip).unwrap_or(usize::MAX);
        let (front, back) = self.bytes.as_slices();
        match skip.checked_sub(front.len()) {
            None => &front[skip..],
            Some(skip) => back.get(skip..).unwrap_or_default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn all(backlog: &Backlog, mut position: u64) -> Vec<u8> {
        let mut seen = Vec::new();
        loop {
            let piece = backlog.piece(position);
            if piece.is_empty() {
                return seen;
            }
            position = position.max(backlog.start()) + piece.len() as u64;
            seen.extend_from_slice(piece);
        }
    }

    proptest! {
        #[test]
        fn the_newest_bytes_are_kept_in_order(
            writes in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..40), 0..20),
            capacity in 1_usize..50,
        ) {
            let mut backlog = Backlog::new(capacity);
            let mut stream = Vec::new();
            for bytes in &writes {
                backlog.push(bytes);
                stream.extend_from_slice(bytes);
                let kept = &stream[stream.len().saturating_sub(capacity)..];
                prop_assert_eq!(all(&backlog, 0), kept);
                prop_assert_eq!(backlog.end(), stream.len() as u64);
                let middle = backlog.start() + kept.len() as u64 / 2;
                prop_assert_eq!(all(&backlog, middle), &kept[kept.len() / 2..]);
            }
        }
    }
}
