//! What a console device counts.

use std::sync::atomic::AtomicU64;

/// Counters since the device was made; written by its thread, readable by any.
#[derive(Debug, Default)]
pub struct ConsoleMetrics {
    /// Bytes handed to the guest.
    pub received_bytes: AtomicU64,
    /// Bytes taken from the guest.
    pub sent_bytes: AtomicU64,
    /// Bytes from the guest that nobody on the host took.
    pub dropped_bytes: AtomicU64,
    /// Control messages that made no sense.
    pub bad_messages: AtomicU64,
}
