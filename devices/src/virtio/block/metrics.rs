//! What a disk counts.

use std::sync::atomic::{AtomicU64, Ordering};

/// Counters of one disk, since it was made; written by its thread, readable by any.
#[derive(Debug, Default)]
pub struct BlockMetrics {
    /// Reads done.
    pub reads: AtomicU64,
    /// Bytes read.
    pub read_bytes: AtomicU64,
    /// Writes done.
    pub writes: AtomicU64,
    /// Bytes written.
    pub written_bytes: AtomicU64,
    /// Flushes done.
    pub flushes: AtomicU64,
    /// Discards done.
    pub discards: AtomicU64,
    /// Write-zeroes requests done.
    pub write_zeroes: AtomicU64,
    /// Requests that the host or the image failed.
    pub failed: AtomicU64,
    /// Requests that failed and were kept, to be tried again.
    pub kept: AtomicU64,
    /// Requests refused as malformed, out of range or unknown.
    pub refused: AtomicU64,
}

/// Adds to a counter. Counters order nothing.
pub(super) fn count(counter: &AtomicU64, more: u64) {
    counter.fetch_add(more, Ordering::Relaxed);
}
