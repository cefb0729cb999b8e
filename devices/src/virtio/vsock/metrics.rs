//! What a vsock device counts.

use std::sync::atomic::AtomicU64;

/// Counters since the device was made; written by its thread, readable by any.
#[derive(Debug, Default)]
pub struct VsockMetrics {
    /// Connections at the moment.
    pub connections: AtomicU64,
    /// Connections opened or asked for.
    pub opened: AtomicU64,
    /// Packets of the guest's that were refused.
    pub refused: AtomicU64,
    /// Bytes handed to the guest.
    pub received_bytes: AtomicU64,
    /// Bytes taken from the guest.
    pub sent_bytes: AtomicU64,
}
