//! The memory balloon (virtio 1.2 §5.5): pages that a guest does without go back to the host.
//!
//! | what | who decides |
//! |---|---|
//! | page reporting | the guest tells which pages are free at the moment; it may use them again at any time |
//! | inflation | the host asks for a number of pages; the guest gives up as many, and takes some back before it kills a program |
//! | statistics | the host asks, the guest tells |
//!
//! A worker's default is reporting and statistics without inflation: memory is never taken from a kubelet that counts on it.

pub mod bits;
pub mod metrics;
mod queue;
pub mod state;
pub mod statistics;
#[cfg(test)]
mod tests;

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::event::{EventfdFlags, eventfd};
use zerocopy::IntoBytes;

use self::bits::{ACTUAL_OFFSET, Config, PAGE_BYTES, feature};
use self::metrics::BalloonMetrics;
use self::queue::{Requests, Server};
use self::state::BalloonState;
use self::statistics::Latest;
use crate::thread::{ThreadRole, Threads};
use crate::virtio::queue::RING_FEATURES;
use crate::virtio::worker::{Scope, Session, Worker};
use crate::virtio::{
    ActivateError, Activation, ActiveQueue, DeviceType, Pending, VirtioDevice, VirtioInterrupt,
    read_config_bytes,
};

/// Entries of each queue.
const QUEUE_SIZES: [u16; 4] = [64; 4];

/// What a balloon offers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BalloonOptions {
    /// The guest tells which pages are free.
    pub reporting: bool,
    /// The guest tells statistics.
    pub statistics: bool,
}

/// A balloon.
pub struct Balloon {
    options: BalloonOptions,
    config: Config,
    interrupt: Option<Arc<dyn VirtioInterrupt>>,
    requests: Arc<Requests>,
    latest: Arc<Latest>,
    metrics: Arc<BalloonMetrics>,
    worker: Worker,
}

impl Balloon {
    /// A balloon with nothing in it.
    ///
    /// # Errors
    /// No descriptor or thread could be had.
    pub fn new(options: BalloonOptions, threads: &dyn Threads) -> io::Result<Self> {
        let requests = Arc::new(Requests {
            bell: eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?,
            statistics: AtomicBool::new(false),
        });
        let latest = Arc::new(Latest::default());
        let metrics = Arc::new(BalloonMetrics::default());
        let server = Server::new(
            Arc::clone(&requests),
            Arc::clone(&latest),
            Arc::clone(&metrics),
        );
        let worker = Worker::spawn(threads, "balloon", ThreadRole::Slow, Box::new(server))?;
        Ok(Self {
            options,
            config: Config::default(),
            interrupt: None,
            requests,
            latest,
            metrics,
            worker,
        })
    }

    /// Asks the guest to give up `bytes`, rounded down to pages; it gets there in its own time (see [`Balloon::actual_bytes`]).
    pub fn set_target(&mut self, bytes: u64) {
        let pages = u32::try_from(bytes / PAGE_BYTES).unwrap_or(u32::MAX);
        if self.config.num_pages.get() != pages {
            self.config.num_pages = pages.into();
            if let Some(interrupt) = &self.interrupt {
                interrupt.config();
            }
        }
    }

    /// What the guest has given up, in bytes.
    #[must_use]
    pub fn actual_bytes(&self) -> u64 {
        u64::from(self.config.actual.get()) * PAGE_BYTES
    }

    /// Asks for new statistics; they appear in [`Balloon::latest`].
    ///
    /// # Errors
    /// The device's thread cannot be told.
    pub fn request_statistics(&self) -> io::Result<()> {
        self.requests.statistics.store(true, Ordering::Release);
        rustix::io::write(&self.requests.bell, &1u64.to_ne_bytes())?;
        Ok(())
    }

    /// What the guest says of its memory.
    #[must_use]
    pub fn latest(&self) -> Arc<Latest> {
        Arc::clone(&self.latest)
    }

    /// Its counters.
    #[must_use]
    pub fn metrics(&self) -> Arc<BalloonMetrics> {
        Arc::clone(&self.metrics)
    }

    /// What a snapshot keeps of it.
    #[must_use]
    pub fn state(&self) -> BalloonState {
        BalloonState {
            num_pages: self.config.num_pages.get(),
            actual: self.config.actual.get(),
        }
    }

    /// Takes over a snapshot's state.
    pub fn restore(&mut self, state: &BalloonState) {
        self.config.num_pages = state.num_pages.into();
        self.config.actual = state.actual.into();
    }
}

impl VirtioDevice for Balloon {
    fn device_type(&self) -> DeviceType {
        DeviceType::Balloon
    }

    fn features(&self) -> u64 {
        let mut features = RING_FEATURES | feature::DEFLATE_ON_OOM;
        if self.options.reporting {
            features |= feature::PAGE_REPORTING;
        }
        if self.options.statistics {
            features |= feature::STATS_VQ;
        }
        features
    }

    fn queue_sizes(&self) -> &[u16] {
        let queues = 2 + usize::from(self.options.reporting) + usize::from(self.options.statistics);
        QUEUE_SIZES.get(..queues).unwrap_or(&QUEUE_SIZES)
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        read_config_bytes(self.config.as_bytes(), offset, data);
    }

    fn write_config(&mut self, offset: u64, data: &[u8]) {
        if let (ACTUAL_OFFSET, Ok(actual)) = (offset, <[u8; 4]>::try_from(data)) {
            self.config.actual = u32::from_le_bytes(actual).into();
        }
    }

    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
        let Activation {
            memory,
            features,
            queues,
            interrupt,
        } = activation;
        self.interrupt = Some(Arc::clone(&interrupt));
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
        self.interrupt = None;
        // The next driver begins with all of its memory.
        self.config.actual = 0.into();
        Box::new(self.worker.reset(Scope::All))
    }

    fn reset_queue(&mut self, index: u16) -> Box<dyn Pending> {
        Box::new(self.worker.reset(Scope::Queue(index)))
    }

    fn enable_queue(&mut self, queue: ActiveQueue) -> Result<(), ActivateError> {
        self.worker.enable_queue(queue)
    }
}
