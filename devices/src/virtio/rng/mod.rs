//! The entropy device (virtio 1.2 §5.4): one queue of buffers to be filled with random bytes, no configuration.
//!
//! A request is given at most [`MAX_REQUEST_BYTES`], as the specification allows, and the device as a whole [`BYTES_PER_SECOND`], so that
//! a guest cannot occupy a host processor by asking.

pub mod metrics;
mod queue;
pub mod state;
#[cfg(test)]
mod tests;

use std::fs::File;
use std::io;
use std::sync::Arc;

use crate::thread::{ThreadRole, Threads};
use crate::virtio::queue::RING_FEATURES;
use crate::virtio::rng::metrics::RngMetrics;
use crate::virtio::rng::queue::Server;
use crate::virtio::rng::state::RngState;
use crate::virtio::worker::{Scope, Session, Worker};
use crate::virtio::{
    ActivateError, Activation, ActiveQueue, DeviceType, Pending, VirtioDevice, read_config_bytes,
};

/// The most bytes that answer one request.
pub const MAX_REQUEST_BYTES: usize = 4096;

/// The most bytes in a second, and at once.
pub const BYTES_PER_SECOND: u64 = 1 << 20;

/// Entries of the queue.
const QUEUE_SIZES: [u16; 1] = [64];

/// An entropy device.
pub struct Rng {
    metrics: Arc<RngMetrics>,
    worker: Worker,
}

impl Rng {
    /// A device that reads from `source`, a file that never ends (`/dev/urandom`).
    ///
    /// # Errors
    /// No thread could be had.
    pub fn new(source: File, threads: &dyn Threads) -> io::Result<Self> {
        let metrics = Arc::new(RngMetrics::default());
        let server = Server::new(source, Arc::clone(&metrics));
        let worker = Worker::spawn(threads, "rng", ThreadRole::Slow, Box::new(server))?;
        Ok(Self { metrics, worker })
    }

    /// Its counters.
    #[must_use]
    pub fn metrics(&self) -> Arc<RngMetrics> {
        Arc::clone(&self.metrics)
    }

    /// What a snapshot keeps of it.
    #[must_use]
    pub fn state(&self) -> RngState {
        RngState {}
    }
}

impl VirtioDevice for Rng {
    fn device_type(&self) -> DeviceType {
        DeviceType::Rng
    }

    fn features(&self) -> u64 {
        RING_FEATURES
    }

    fn queue_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        read_config_bytes(&[], offset, data);
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
