//! What one transport counts. Relaxed: a reader sees each counter grow, not all of them at one instant.

use std::sync::atomic::{AtomicU64, Ordering};

/// Counters of one virtio PCI function, readable by anyone at any time.
#[derive(Debug, Default)]
pub struct VirtioPciMetrics {
    /// Reads of common, device and ISR registers: a vCPU exit each.
    pub register_reads: AtomicU64,
    /// Writes of common and device registers: a vCPU exit each.
    pub register_writes: AtomicU64,
    /// Accesses of MSI-X table and pending bits: a vCPU exit each.
    pub msix_accesses: AtomicU64,
    /// Notifications that came as a vCPU exit instead of through an ioeventfd.
    pub notify_exits: AtomicU64,
    /// Times the driver set DRIVER_OK and the device started.
    pub activations: AtomicU64,
    /// Device resets, by the driver or with the machine.
    pub resets: AtomicU64,
    /// Single queues reset.
    pub queue_resets: AtomicU64,
    /// Things a driver must not do, and that were ignored or answered by DEVICE_NEEDS_RESET.
    pub driver_errors: AtomicU64,
    /// Doorbells or vectors that the hypervisor refused to connect; notifications still work, by exits.
    pub host_errors: AtomicU64,
}

pub(super) fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}
