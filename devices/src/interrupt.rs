//! What a device needs to interrupt the guest, without knowing who delivers it.

use std::io;
use std::sync::Arc;

/// A message-signalled interrupt as the guest programmed it (PCI 3.0 §6.8): an address/data pair.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MsiMessage {
    /// Where the message is written.
    pub address: u64,
    /// What is written there.
    pub data: u32,
}

/// One level-triggered, shareable interrupt line (an I/O APIC input).
pub trait IrqLine: Send + Sync {
    /// Asserts or releases this device's share of the line.
    fn set(&self, asserted: bool);
}

/// One message-signalled vector, delivered without a userspace exit once routed (irqfd).
pub trait MsiVector: Send + Sync {
    /// Programs where the vector goes. Called when the guest unmasks or rewrites the entry.
    ///
    /// # Errors
    /// The hypervisor refused the route.
    fn route(&self, message: MsiMessage) -> io::Result<()>;

    /// Fires the vector; safe from any thread, never blocks.
    ///
    /// # Errors
    /// The hypervisor refused the signal.
    fn trigger(&self) -> io::Result<()>;
}

/// Hands out interrupt resources; implemented by the VMM over KVM, and by tests.
pub trait InterruptController: Send + Sync {
    /// A device's share of the I/O APIC input `gsi`.
    fn line(&self, gsi: u32) -> Arc<dyn IrqLine>;

    /// `count` vectors for one device's MSI-X table.
    ///
    /// # Errors
    /// No routes are left.
    fn msi_vectors(&self, count: u16) -> io::Result<Vec<Arc<dyn MsiVector>>>;
}
