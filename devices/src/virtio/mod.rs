//! virtio 1.2 devices and their PCI transport.
//!
//! ```text
//!  vCPU ── config/common-cfg exits ──> transport (one register file) ── activate/reset ──> device ── messages ──> its thread(s)
//!  guest doorbell ── ioeventfd ────────────────────────────────────────────────────────────────────────────────> its thread(s)
//!  guest <── MSI-X irqfd ── QueueInterrupt::signal ────────────────────────────────────────────────────────────── its thread(s)
//! ```
//!
//! The transport owns feature negotiation, queue addresses and vectors; a device owns its configuration space and serves queues.
//! Reset and re-activation, and drivers that enable n of N queues, are ordinary paths: nothing is sized by what could be enabled.
//!
//! | module | what |
//! |---|---|
//! | [`pci`] | the transport |
//! | [`worker`] | the thread of a device: one wait point, reset and activation as messages |
//! | [`queue`] | a virtqueue as the thread that serves it sees it |
//! | [`journal`] | which requests are under way, noted in memory that outlives the process |
//! | [`memory`] | checked pieces of guest memory and the system calls on them; with `net::sys`, all the `unsafe` there is |
//! | [`balloon`], [`block`], [`console`], [`net`], [`rng`], [`vsock`] | the devices, each with configuration space (`mod`), `queue`, `state` and `metrics` |
//! | [`vhost_user_blk`] | a disk whose queues another process serves |
#![deny(unsafe_code)]

pub mod balloon;
pub mod block;
pub mod console;
pub mod journal;
pub mod memory;
pub mod net;
pub mod pci;
pub mod queue;
pub mod rng;
#[cfg(test)]
mod testing;
pub mod vhost_user_blk;
pub mod vsock;
pub mod worker;

use std::sync::Arc;

use virtio_queue::Queue;
use vmm_sys_util::eventfd::EventFd;

use crate::GuestMemory;

/// Device ids of virtio 1.2 §5.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum DeviceType {
    /// Network card, §5.1.
    Net = 1,
    /// Block device, §5.2.
    Block = 2,
    /// Console and ports, §5.3.
    Console = 3,
    /// Entropy device, §5.4.
    Rng = 4,
    /// Memory balloon, §5.5.
    Balloon = 5,
    /// Socket device, §5.10.
    Vsock = 19,
}

/// Tells the driver that a queue has used buffers, or that the configuration changed. Cheap; callable from any thread.
pub trait VirtioInterrupt: Send + Sync {
    /// Signals used buffers on queue `index`.
    fn queue(&self, index: u16);

    /// Signals a configuration change.
    fn config(&self);

    /// Says that the device met something only a reset can cure: sets DEVICE_NEEDS_RESET (§2.1.2) and signals it.
    fn needs_reset(&self);
}

/// A queue that the driver has enabled, ready to be served. It belongs to the device until reset.
pub struct ActiveQueue {
    /// Its number, 0-based, as the driver knows it.
    pub index: u16,
    /// Addresses, size and positions; checked by the transport to lie in guest memory.
    pub queue: Queue,
    /// Readable when the driver notified the queue.
    pub doorbell: EventFd,
    /// A record of what is under way, for queues that another process may have to go on with.
    pub tracking: Option<journal::Tracking>,
}

/// All that a device gets when the driver sets DRIVER_OK.
pub struct Activation {
    /// The guest's RAM.
    pub memory: GuestMemory,
    /// Features that both sides accepted.
    pub features: u64,
    /// The queues that the driver enabled, ascending; fewer than the device offers is normal.
    pub queues: Vec<ActiveQueue>,
    /// How to signal the driver.
    pub interrupt: Arc<dyn VirtioInterrupt>,
}

/// Why a device could not start serving its queues.
#[derive(Debug, thiserror::Error)]
pub enum ActivateError {
    /// The driver left out a queue that the device cannot work without.
    #[error("queue {0} is needed but was not enabled")]
    MissingQueue(u16),
    /// The device's thread is gone.
    #[error("the device's thread has ended")]
    ThreadGone,
    /// The host refused something.
    #[error("{0}: {1}")]
    Host(&'static str, #[source] std::io::Error),
}

/// A request to a device's thread(s) that ends some time later. The transport polls it from the driver's own polling of the status
/// register, so that no vCPU waits for another thread while it holds a lock. Several may wait at once.
pub trait Pending: Send + Sync {
    /// Whether the device has let go of all queues concerned: no further guest memory access will come from them.
    fn is_done(&self) -> bool;

    /// Waits until [`Pending::is_done`], at most `timeout`; false if time ran out.
    fn wait(&self, timeout: std::time::Duration) -> bool;
}

/// A virtio device behind a transport. Called under the transport's register lock, so every method returns at once.
pub trait VirtioDevice: Send {
    /// Its device id.
    fn device_type(&self) -> DeviceType;

    /// Features the device offers; the transport adds VIRTIO_F_VERSION_1 and VIRTIO_F_RING_RESET and nothing else.
    fn features(&self) -> u64;

    /// The greatest size of each queue, a power of two of at most 32768; its length is the number of queues.
    fn queue_sizes(&self) -> &[u16];

    /// Reads device-specific configuration (§4.1.4.6); bytes past its end read as zero.
    fn read_config(&self, offset: u64, data: &mut [u8]);

    /// Writes device-specific configuration; what is not writable is ignored.
    fn write_config(&mut self, offset: u64, data: &[u8]) {
        let _ = (offset, data);
    }

    /// Starts serving. Called once after each reset at most.
    ///
    /// # Errors
    /// The device cannot serve these queues; the transport then sets DEVICE_NEEDS_RESET.
    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError>;

    /// Stops serving all queues; requests under way are finished or dropped, their memory no longer touched once the answer is done.
    fn reset(&mut self) -> Box<dyn Pending>;

    /// Stops serving one queue (VIRTIO_F_RING_RESET, §2.6.1).
    fn reset_queue(&mut self, index: u16) -> Box<dyn Pending>;

    /// Serves a queue again after [`VirtioDevice::reset_queue`] and re-enabling.
    ///
    /// # Errors
    /// As [`VirtioDevice::activate`].
    fn enable_queue(&mut self, queue: ActiveQueue) -> Result<(), ActivateError>;
}

/// Reads from the bytes of a configuration space; zeros past its end.
fn read_config_bytes(config: &[u8], offset: u64, data: &mut [u8]) {
    let offset = usize::try_from(offset).unwrap_or(usize::MAX);
    let rest = config.get(offset..).unwrap_or_default();
    let (from_config, past) = data.split_at_mut(rest.len().min(data.len()));
    let (bytes, _) = rest.split_at(from_config.len());
    from_config.copy_from_slice(bytes);
    past.fill(0);
}
