//! What a disk asks of the host.

use std::sync::atomic::{AtomicU64, Ordering};

/// Calls that a disk made on its files, and bytes that they were asked to move. Read from any thread.
#[derive(Debug, Default)]
pub struct HostCounts {
    reads: AtomicU64,
    bytes_read: AtomicU64,
    writes: AtomicU64,
    bytes_written: AtomicU64,
    syncs: AtomicU64,
    allocations: AtomicU64,
}

impl HostCounts {
    /// `preadv` calls.
    #[must_use]
    pub fn reads(&self) -> u64 {
        self.reads.load(Ordering::Relaxed)
    }

    /// Bytes they asked for.
    #[must_use]
    pub fn bytes_read(&self) -> u64 {
        self.bytes_read.load(Ordering::Relaxed)
    }

    /// `pwritev` calls.
    #[must_use]
    pub fn writes(&self) -> u64 {
        self.writes.load(Ordering::Relaxed)
    }

    /// Bytes they were given.
    #[must_use]
    pub fn bytes_written(&self) -> u64 {
        self.bytes_written.load(Ordering::Relaxed)
    }

    /// `fdatasync` calls.
    #[must_use]
    pub fn syncs(&self) -> u64 {
        self.syncs.load(Ordering::Relaxed)
    }

    /// `fallocate` calls: holes punched, ranges zeroed.
    #[must_use]
    pub fn allocations(&self) -> u64 {
        self.allocations.load(Ordering::Relaxed)
    }

    pub(super) fn read(&self, bytes: usize) {
        add(&self.reads, 1);
        add(&self.bytes_read, bytes as u64);
    }

    pub(super) fn write(&self, bytes: usize) {
        add(&self.writes, 1);
        add(&self.bytes_written, bytes as u64);
    }

    pub(super) fn sync(&self) {
        add(&self.syncs, 1);
    }

    pub(super) fn allocate(&self) {
        add(&self.allocations, 1);
    }
}

/// Only the thread that owns the disk counts, so nothing is lost between reading and writing.
fn add(counter: &AtomicU64, value: u64) {
    let sum = counter.load(Ordering::Relaxed).wrapping_add(value);
    counter.store(sum, Ordering::Relaxed);
}
