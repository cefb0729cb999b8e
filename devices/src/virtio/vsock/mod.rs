//! The socket device (virtio 1.2 §5.10) in user space: the guest's AF_VSOCK streams end in unix sockets of the host.
//!
//! | who asks | how |
//! |---|---|
//! | a program of the host for port P of the guest | connects to PATH, says `CONNECT P\n`, is told `OK N\n` |
//! | a program of the guest for port P of the host (CID 2) | the device connects to `PATH_P` |
//!
//! | file | what |
//! |---|---|
//! | [`bits`] | configuration space, packets |
//! | `connection` | one connection: stages, credit, half-closing |
//! | `handshake` | a program of the host that has not said yet what it wants |
//! | `queue` | all of it on the device's one thread |

pub mod bits;
mod connection;
mod handshake;
pub mod metrics;
mod queue;
#[cfg(test)]
mod tests;

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::Arc;

use rustix::event::{EventfdFlags, eventfd};

use self::bits::MIN_GUEST_CID;
use self::metrics::VsockMetrics;
use self::queue::Server;
use crate::thread::{ThreadRole, Threads};
use crate::virtio::queue::RING_FEATURES;
use crate::virtio::worker::{Scope, Session, Worker};
use crate::virtio::{
    ActivateError, Activation, ActiveQueue, DeviceType, Pending, VirtioDevice, read_config_bytes,
};

/// Entries of each queue.
const QUEUE_SIZES: [u16; 3] = [256, 256, 16];

/// A socket device.
pub struct Vsock {
    guest_cid: u64,
    bell: Arc<OwnedFd>,
    metrics: Arc<VsockMetrics>,
    worker: Worker,
}

impl Vsock {
    /// A device for the guest with this context id. `listener` listens at `path`, which is also how the sockets of the guest's own
    /// requests begin.
    ///
    /// # Errors
    /// The context id is reserved, or no descriptors or thread could be had.
    pub fn new(
        guest_cid: u64,
        path: PathBuf,
        listener: UnixListener,
        threads: &dyn Threads,
    ) -> io::Result<Self> {
        if guest_cid < MIN_GUEST_CID || guest_cid > u64::from(u32::MAX - 1) {
            let why = format!(
                "a guest's context id is {MIN_GUEST_CID} to {}",
                u32::MAX - 1
            );
            return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        }
        let metrics = Arc::new(VsockMetrics::default());
        let bell = Arc::new(eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?);
        let server = Server::new(
            guest_cid,
            path,
            listener,
            Arc::clone(&bell),
            Arc::clone(&metrics),
        )?;
        let worker = Worker::spawn(threads, "vsock", ThreadRole::Vsock, Box::new(server))?;
        Ok(Self {
            guest_cid,
            bell,
            metrics,
            worker,
        })
    }

    /// Its counters.
    #[must_use]
    pub fn metrics(&self) -> Arc<VsockMetrics> {
        Arc::clone(&self.metrics)
    }

    /// Ends all connections and tells the guest so: after a restore, whoever was at the other ends is not there any more.
    ///
    /// # Errors
    /// The device's thread cannot be told.
    pub fn reset_connections(&self) -> io::Result<()> {
        rustix::io::write(&self.bell, &1u64.to_ne_bytes())?;
        Ok(())
    }
}

impl VirtioDevice for Vsock {
    fn device_type(&self) -> DeviceType {
        DeviceType::Vsock
    }

    fn features(&self) -> u64 {
        RING_FEATURES
    }

    fn queue_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        read_config_bytes(&self.guest_cid.to_le_bytes(), offset, data);
    }

    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
        let Activation {
            memory,
            features,
            queues,
            interrupt,
        } = activation;
        self.worker.activate(
            Session {
                memory,
                features,
                interrupt,
            },
            queues,
        )
    }

    fn reset(&mut self) -> Box<dyn Pending> {
        Box::new(self.worker.reset(Scope::All))
    }

    fn reset_queue(&mut self, index: u16) -> Box<dyn Pending> {
        Box::new(self.worker.reset(Scope::Queue(index)))
    }

    fn enable_queue(&mut self, queue: ActiveQueue) -> Result<(), ActivateError> {
        self.worker.enable_queue(queue)
    }
}
