//! What the entropy device counts.

use std::sync::atomic::AtomicU64;

/// Counters of the entropy device, since it was made; written by its thread, readable by any.
#[derive(Debug, Default)]
pub struct RngMetrics {
    /// Requests answered.
    pub requests: AtomicU64,
    /// Bytes of entropy handed to the guest.
    pub bytes: AtomicU64,
    /// Requests that had to wait for the rate limit.
    pub delayed: AtomicU64,
    /// Requests that the host's source failed.
    pub failed: AtomicU64,
}
