//! A record of the requests under way, in memory that outlives this process: who serves the queue next finishes them.
//!
//! The layout is that of the vhost-user protocol for split rings; one region a queue, little-endian on the machines there are:
//!
//! ```text
//!   0  features u64   8  version u16   10  desc_num u16   12  last_batch_head u16   14  used_idx u16
//!   16 + 16 i         inflight u8, 5 bytes of nothing, next u16, counter u64        of the chain whose head is descriptor i
//! ```
//!
//! The order of stores is what makes it right at any moment: a chain is noted before it is begun, and noted as answered only after the
//! driver can see its answer. In between, the batch that starts at `last_batch_head` tells what the used ring's index already covers.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use virtio_queue::Queue;
use vm_memory::{Bytes, GuestAddress, GuestMemoryError, GuestMemoryMmap};

/// The only version of the layout.
const VERSION: u16 = 1;

const VERSION_OFFSET: u64 = 8;
const DESC_NUM_OFFSET: u64 = 10;
const LAST_BATCH_HEAD_OFFSET: u64 = 12;
const USED_IDX_OFFSET: u64 = 14;
const HEADER_BYTES: u64 = 16;
const ENTRY_BYTES: u64 = 16;
const NEXT_OFFSET: u64 = 6;
const COUNTER_OFFSET: u64 = 8;

/// Regions start at multiples of this, so that no two queues share a cache line.
pub const ALIGNMENT: u64 = 64;

/// Bytes of the region of a queue.
#[must_use]
pub fn region_bytes(queue_size: u16) -> u64 {
    (HEADER_BYTES + u64::from(queue_size) * ENTRY_BYTES).next_multiple_of(ALIGNMENT)
}

/// Why a record cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// Its memory is smaller than it should be.
    #[error("the record of requests: {0}")]
    Memory(#[from] GuestMemoryError),
    /// Somebody wrote it who knows more.
    #[error("the record of requests has version {0}, not {VERSION}")]
    Version(u16),
}

/// The record of one queue, kept by whoever serves it.
pub struct Journal {
    memory: Arc<GuestMemoryMmap<()>>,
    start: u64,
    size: u16,
    counter: u64,
    /// Heads answered but not published.
    batch: Vec<u16>,
}

/// What a queue needs to be served with a record.
pub struct Tracking {
    /// The record.
    pub journal: Journal,
    /// The chains that were under way when the last server ended, as a queue of their own.
    pub again: Option<Queue>,
}

impl Journal {
    /// The record of a queue of `size` entries whose region starts at `start` of `memory`.
    ///
    /// # Errors
    /// The region is not all there, or of another version.
    pub fn open(
        memory: Arc<GuestMemoryMmap<()>>,
        start: u64,
        size: u16,
    ) -> Result<Self, JournalError> {
        let journal = Self {
            memory,
            start,
            size,
            counter: 0,
            batch: Vec::new(),
        };
        // Touches the last entry, so that no later access can fail.
        journal.load_u64(journal.entry(size.saturating_sub(1)) + COUNTER_OFFSET)?;
        match journal.load_u16(start + VERSION_OFFSET)? {
            0 => journal.store_u16(start + VERSION_OFFSET, VERSION)?,
            VERSION => {}
            other => return Err(JournalError::Version(other)),
        }
        journal.store_u16(start + DESC_NUM_OFFSET, size)?;
        Ok(journal)
    }

    /// The heads that were under way when the used ring stood at `used`, in the order in which they were begun.
    ///
    /// # Errors
    /// The memory is gone.
    pub fn recover(&mut self, used: u16) -> Result<Vec<u16>, JournalError> {
        let noted = self.load_u16(self.start + USED_IDX_OFFSET)?;
        // The driver saw these answers, but they were not noted.
        let mut head = self.load_u16(self.start + LAST_BATCH_HEAD_OFFSET)?;
        for _ in 0..used.wrapping_sub(noted).min(self.size) {
            if head >= self.size {
                break;
            }
            self.store_inflight(head, 0)?;
            head = self.load_u16(self.entry(head) + NEXT_OFFSET)?;
        }
        self.store_u16(self.start + USED_IDX_OFFSET, used)?;
        let mut found = Vec::new();
        for head in 0..self.size {
            let inflight: u8 = self.memory.read_obj(GuestAddress(self.entry(head)))?;
            if inflight == 1 {
                found.push((self.load_u64(self.entry(head) + COUNTER_OFFSET)?, head));
            }
        }
        found.sort_unstable();
        self.counter = found.last().map_or(0, |(last, _)| last.wrapping_add(1));
        Ok(found.into_iter().map(|(_, head)| head).collect())
    }

    /// Notes that the chain of `head` is about to be begun.
    pub(super) fn taken(&mut self, head: u16) -> Result<(), JournalError> {
        if head >= self.size {
            return Ok(());
        }
        let entry = self.entry(head);
        self.memory.store(
            self.counter,
            GuestAddress(entry + COUNTER_OFFSET),
            Ordering::Release,
        )?;
        self.counter = self.counter.wrapping_add(1);
        self.store_inflight(head, 1)
    }

    /// Notes that the answer to `head` is in the used ring, where the driver does not look yet.
    pub(super) fn answered(&mut self, head: u16) -> Result<(), JournalError> {
        if head >= self.size {
            return Ok(());
        }
        let last = self.load_u16(self.start + LAST_BATCH_HEAD_OFFSET)?;
        self.store_u16(self.entry(head) + NEXT_OFFSET, last)?;
        self.store_u16(self.start + LAST_BATCH_HEAD_OFFSET, head)?;
        self.batch.push(head);
        Ok(())
    }

    /// Notes that the driver sees the answers up to `used`.
    pub(super) fn published(&mut self, used: u16) -> Result<(), JournalError> {
        let mut batch = std::mem::take(&mut self.batch);
        for head in batch.drain(..) {
            self.store_inflight(head, 0)?;
        }
        self.batch = batch;
        self.store_u16(self.start + USED_IDX_OFFSET, used)
    }

    fn entry(&self, head: u16) -> u64 {
        self.start + HEADER_BYTES + u64::from(head) * ENTRY_BYTES
    }

    fn store_inflight(&self, head: u16, inflight: u8) -> Result<(), JournalError> {
        let at = GuestAddress(self.entry(head));
        Ok(self.memory.store(inflight, at, Ordering::Release)?)
    }

    fn load_u16(&self, at: u64) -> Result<u16, JournalError> {
        Ok(self.memory.load(GuestAddress(at), Ordering::Acquire)?)
    }

    fn load_u64(&self, at: u64) -> Result<u64, JournalError> {
        Ok(self.memory.load(GuestAddress(at), Ordering::Acquire)?)
    }

    fn store_u16(&self, at: u64, value: u16) -> Result<(), JournalError> {
        Ok(self
            .memory
            .store(value, GuestAddress(at), Ordering::Release)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE: u16 = 8;

    fn memory() -> Arc<GuestMemoryMmap<()>> {
        Arc::new(GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 4096)]).unwrap())
    }

    fn open(memory: &Arc<GuestMemoryMmap<()>>) -> Journal {
        Journal::open(Arc::clone(memory), 256, SIZE).unwrap()
    }

    #[test]
    fn what_was_begun_and_not_answered_is_found_in_its_order() {
        let memory = memory();
        let mut journal = open(&memory);
        assert_eq!(journal.recover(0).unwrap(), [] as [u16; 0]);
        for head in [5, 2, 7, 0] {
            journal.taken(head).unwrap();
        }
        journal.answered(2).unwrap();
        journal.published(1).unwrap();
        drop(journal);
        let mut journal = open(&memory);
        assert_eq!(journal.recover(1).unwrap(), [5, 7, 0]);
        // The order goes on after a recovery.
        journal.taken(1).unwrap();
        drop(journal);
        assert_eq!(open(&memory).recover(1).unwrap(), [5, 7, 0, 1]);
    }

    #[test]
    fn an_end_between_showing_answers_and_noting_them_repeats_none() {
        let memory = memory();
        let mut journal = open(&memory);
        journal.recover(0).unwrap();
        for head in [1, 2, 3, 4] {
            journal.taken(head).unwrap();
        }
        journal.answered(4).unwrap();
        journal.published(1).unwrap();
        journal.answered(1).unwrap();
        journal.answered(3).unwrap();
        // The used ring's index went from 1 to 3, and then the process ended.
        drop(journal);
        assert_eq!(open(&memory).recover(3).unwrap(), [2]);
        assert_eq!(open(&memory).recover(3).unwrap(), [2]);
    }

    #[test]
    fn an_end_before_answers_are_shown_repeats_them() {
        let memory = memory();
        let mut journal = open(&memory);
        journal.recover(0).unwrap();
        journal.taken(6).unwrap();
        journal.answered(6).unwrap();
        drop(journal);
        assert_eq!(open(&memory).recover(0).unwrap(), [6]);
    }

    #[test]
    fn nonsense_in_the_record_is_bounded_and_another_version_is_refused() {
        let memory = memory();
        drop(open(&memory));
        memory
            .write_slice(&[0xff; 64], GuestAddress(256 + 12))
            .unwrap();
        assert!(open(&memory).recover(9).unwrap().len() <= usize::from(SIZE));
        memory.write_obj(7_u16, GuestAddress(256 + 8)).unwrap();
        let error = Journal::open(Arc::clone(&memory), 256, SIZE).err().unwrap();
        assert!(matches!(error, JournalError::Version(7)), "{error}");
        assert!(Journal::open(memory, 4096 - 32, SIZE).is_err());
    }
}
