//! What a balloon counts.

use std::sync::atomic::AtomicU64;

/// Counters since the device was made; written by its thread, readable by any.
#[derive(Debug, Default)]
pub struct BalloonMetrics {
    /// Bytes given back to the host because the driver gave up pages.
    pub inflated_bytes: AtomicU64,
    /// Bytes that the driver took back.
    pub deflated_bytes: AtomicU64,
    /// Bytes given back because the driver reported them free.
    pub reported_bytes: AtomicU64,
    /// Ranges that the host would not take back.
    pub failed: AtomicU64,
}
