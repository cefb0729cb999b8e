//! What the front end of a disk counts; requests themselves are the back end's to count.

use std::sync::atomic::AtomicU64;

/// Counters of one disk, since it was made; written by its thread, readable by any.
#[derive(Debug, Default)]
pub struct VhostUserMetrics {
    /// Calls of the back end handed on to the guest.
    pub calls: AtomicU64,
    /// Times a back end was found, the first included.
    pub connections: AtomicU64,
    /// Times the back end went away.
    pub losses: AtomicU64,
}
