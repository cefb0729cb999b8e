//! The port and memory-mapped address spaces, and how a vCPU exit finds its device.

use std::io;

use vmm_sys_util::eventfd::EventFd;

/// A device's registers as a vCPU reaches them. `offset` counts from the start of the range the device was inserted at.
///
/// Called on vCPU threads, several at once: a device keeps its register file behind a lock of its own, held for nanoseconds.
pub trait BusDevice: Send + Sync {
    /// Reads `data.len()` bytes (1, 2, 4 or 8) at `offset`.
    fn read(&self, offset: u64, data: &mut [u8]);

    /// Writes `data` at `offset`.
    fn write(&self, offset: u64, data: &[u8]);
}

/// Connects guest writes at an address to an event descriptor inside the kernel (ioeventfd); any width, any value.
pub trait Doorbells: Send + Sync {
    /// Signals `event` on every guest write at `address` (guest physical).
    ///
    /// # Errors
    /// The hypervisor refused.
    fn attach(&self, address: u64, event: &EventFd) -> io::Result<()>;

    /// Undoes [`Doorbells::attach`] with the same arguments.
    ///
    /// # Errors
    /// The hypervisor refused.
    fn detach(&self, address: u64, event: &EventFd) -> io::Result<()>;
}
