//! What a network card counts.

use std::sync::atomic::{AtomicU64, Ordering};

/// Counters of one network card, since it was made; written by its threads, readable by any.
#[derive(Debug, Default)]
pub struct NetMetrics {
    /// Frames handed to the guest.
    pub rx_frames: AtomicU64,
    /// Their bytes, without virtio headers.
    pub rx_bytes: AtomicU64,
    /// Frames from the host that the guest had no fitting buffer for.
    pub rx_dropped: AtomicU64,
    /// Times that the host had frames and the guest no buffers.
    pub rx_starved: AtomicU64,
    /// Frames taken from the guest and given to the host.
    pub tx_frames: AtomicU64,
    /// Their bytes, without virtio headers.
    pub tx_bytes: AtomicU64,
    /// Frames of the guest that were malformed.
    pub tx_malformed: AtomicU64,
    /// Frames of the guest that the host refused (the interface is down or gone).
    pub tx_refused: AtomicU64,
    /// Times that the host could take no more for a while.
    pub tx_blocked: AtomicU64,
    /// Control commands carried out.
    pub control_ok: AtomicU64,
    /// Control commands refused.
    pub control_refused: AtomicU64,
}

/// Adds to a counter. Counters order nothing.
pub(super) fn count(counter: &AtomicU64, more: u64) {
    counter.fetch_add(more, Ordering::Relaxed);
}
