//! The network device (virtio 1.2 §5.1) on a tap of the host.
//!
//! ```text
//!   queue 0, 1      pair 0   thread net-ID-0 <──> tap queue 0       control queue: on net-ID-0
//!   queue 2, 3      pair 1   thread net-ID-1 <──> tap queue 1       (queue 2 N with MQ, queue 2 without)
//! ```
//!
//! | file | what |
//! |---|---|
//! | [`bits`] | features, configuration space, packet header, commands |
//! | [`tap`] | the host's side; its system calls are in `sys` |
//! | `queue` | one pair on its thread: [`tx`], `rx`, and [`control`] |
//!
//! Only the first pair is in use until the driver says how many it wants; the others' taps are detached, so that the host sends no flow
//! to a queue that nobody serves.

pub mod bits;
pub mod control;
pub mod metrics;
mod queue;
mod rx;
pub mod state;
mod sys;
pub mod tap;
#[cfg(test)]
mod tests;
pub mod tx;

use std::io;
use std::sync::Arc;

use zerocopy::IntoBytes;

use crate::thread::{ThreadRole, Threads};
use crate::virtio::net::bits::{Config, LINK_UP, feature};
use crate::virtio::net::control::{Control, Shared};
use crate::virtio::net::metrics::NetMetrics;
use crate::virtio::net::queue::Pair;
use crate::virtio::net::state::NetState;
use crate::virtio::net::tap::Tap;
use crate::virtio::queue::RING_FEATURES;
use crate::virtio::worker::{Answers, Scope, Session, Worker};
use crate::virtio::{
    ActivateError, Activation, ActiveQueue, DeviceType, Pending, VirtioDevice, read_config_bytes,
};

/// The most queue pairs of a card.
pub const MAX_QUEUE_PAIRS: u16 = 16;

/// What a network card looks like.
#[derive(Clone, Debug)]
pub struct NetOptions {
    /// Its name in thread names and messages.
    pub id: String,
    /// Its MAC address.
    pub mac: [u8; 6],
    /// The MTU told to the driver, if any.
    pub mtu: Option<u16>,
    /// Entries of each queue, a power of two.
    pub queue_size: u16,
    /// Whether checksum and segmentation offloads are offered, as far as the host has them.
    pub offloads: bool,
}

/// What a queue is for (§5.1.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum QueueRole {
    Receive(u16),
    Transmit(u16),
    Control,
}

impl QueueRole {
    /// The role of queue `index`, if the negotiated features give it one.
    fn of(index: u16, features: u64, pairs: u16) -> Option<Self> {
        let pairs = if features & feature::MQ == 0 {
            1
        } else {
            pairs
        };
        match (index / 2, index % 2) {
            (pair, 0) if pair < pairs => Some(Self::Receive(pair)),
            (pair, _) if pair < pairs => Some(Self::Transmit(pair)),
            (pair, 0) if pair == pairs && features & feature::CTRL_VQ != 0 => Some(Self::Control),
            _ => None,
        }
    }

    /// The pair on whose thread the queue is served.
    fn pair(self) -> u16 {
        match self {
            Self::Receive(pair) | Self::Transmit(pair) => pair,
            Self::Control => 0,
        }
    }
}

/// A network card.
pub struct Net {
    options: NetOptions,
    offered: u64,
    /// Features negotiated by the last activation.
    negotiated: u64,
    pairs: u16,
    queue_sizes: Vec<u16>,
    shared: Arc<Shared>,
    metrics: Arc<NetMetrics>,
    workers: Vec<Worker>,
}

impl Net {
    /// A card with one queue pair for each of `taps`, which are queues of one interface.
    ///
    /// # Errors
    /// There are no taps or too many, a queue of the tap cannot be detached, or no threads could be had.
    pub fn new(taps: Vec<Tap>, options: NetOptions, threads: &dyn Threads) -> io::Result<Self> {
        let pairs = u16::try_from(taps.len())
            .ok()
            .filter(|pairs| (1..=MAX_QUEUE_PAIRS).contains(pairs))
            .ok_or_else(|| {
                let why = format!("a network card has 1 to {MAX_QUEUE_PAIRS} queue pairs");
                io::Error::new(io::ErrorKind::InvalidInput, why)
            })?;
        let taps: Vec<Arc<Tap>> = taps.into_iter().map(Arc::new).collect();
        let mut offered = RING_FEATURES
            | feature::MAC
            | feature::STATUS
            | feature::MRG_RXBUF
            | feature::CTRL_VQ
            | feature::CTRL_RX
            | feature::CTRL_MAC_ADDR;
        if let (true, Some(tap)) = (options.offloads, taps.first()) {
            offered |= tap.supported_offloads() | feature::CTRL_GUEST_OFFLOADS;
        }
        if options.mtu.is_some() {
            offered |= feature::MTU;
        }
        if pairs > 1 {
            offered |= feature::MQ;
        }
        // The kernel lets nobody wait for a queue that is detached, but one who waited before is not forgotten: the threads start
        // while all queues are attached.
        for tap in &taps {
            tap.set_attached(true)?;
        }
        let shared = Arc::new(Shared::new(options.mac));
        let metrics = Arc::new(NetMetrics::default());
        let workers = (0..pairs)
            .zip(&taps)
            .map(|(number, tap)| {
                let control =
                    (number == 0).then(|| Control::new(taps.clone(), Arc::clone(&shared)));
                let pair = Pair::new(pairs, Arc::clone(tap), control, Arc::clone(&metrics));
                let name = thread_name("net", &options.id, &format!("-{number}"));
                Worker::spawn(threads, &name, ThreadRole::Net, Box::new(pair))
            })
            .collect::<io::Result<_>>()?;
        for tap in taps.iter().skip(1) {
            tap.set_attached(false)?;
        }
        let queue_sizes = vec![options.queue_size; usize::from(pairs) * 2 + 1];
        Ok(Self {
            options,
            offered,
            negotiated: 0,
            pairs,
            queue_sizes,
            shared,
            metrics,
            workers,
        })
    }

    /// Its counters.
    #[must_use]
    pub fn metrics(&self) -> Arc<NetMetrics> {
        Arc::clone(&self.metrics)
    }

    /// What a snapshot keeps of it.
    #[must_use]
    pub fn state(&self) -> NetState {
        NetState {
            mac: self.shared.mac(),
            active_pairs: self.shared.active_pairs(),
            guest_offloads: self.shared.guest_offloads(),
        }
    }

    /// The thread that serves queue `index`.
    fn worker_of(&self, index: u16) -> Option<&Worker> {
        let role = QueueRole::of(index, self.negotiated, self.pairs)?;
        self.workers.get(usize::from(role.pair()))
    }
}

/// A thread's name of at most 15 bytes: the id gives way.
pub(super) fn thread_name(kind: &str, id: &str, suffix: &str) -> String {
    let room = 15_usize.saturating_sub(kind.len() + 1 + suffix.len());
    let id: String = id
        .chars()
        .filter(char::is_ascii_graphic)
        .take(room)
        .collect();
    format!("{kind}-{id}{suffix}")
}

impl VirtioDevice for Net {
    fn device_type(&self) -> DeviceType {
        DeviceType::Net
    }

    fn features(&self) -> u64 {
        self.offered
    }

    fn queue_sizes(&self) -> &[u16] {
        &self.queue_sizes
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        let config = Config {
            mac: self.shared.mac(),
            status: LINK_UP.to_le_bytes(),
            max_virtqueue_pairs: self.pairs.to_le_bytes(),
            mtu: self.options.mtu.unwrap_or_default().to_le_bytes(),
        };
        read_config_bytes(config.as_bytes(), offset, data);
    }

    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
        let Activation {
            memory,
            features,
            queues,
            interrupt,
        } = activation;
        for needed in 0..2 {
            if !queues.iter().any(|queue| queue.index == needed) {
                return Err(ActivateError::MissingQueue(needed));
            }
        }
        self.negotiated = features;
        let session = Session {
            memory,
            features,
            interrupt,
        };
        let mut shares: Vec<Vec<ActiveQueue>> = self.workers.iter().map(|_| Vec::new()).collect();
        for queue in queues {
            let role = QueueRole::of(queue.index, features, self.pairs);
            if let Some(share) = role.and_then(|role| shares.get_mut(usize::from(role.pair()))) {
                share.push(queue);
            }
        }
        // A thread without queues still learns of the session: the driver may enable some later.
        let started = self
            .workers
            .iter()
            .zip(shares)
            .try_for_each(|(worker, share)| worker.activate(session.clone(), share));
        if started.is_err() {
            // Those that did start must not go on alone.
            let _ = self.reset();
        }
        started
    }

    fn reset(&mut self) -> Box<dyn Pending> {
        let mut answers = Answers::default();
        for worker in &self.workers {
            answers.join(worker.reset(Scope::All));
        }
        Box::new(answers)
    }

    fn reset_queue(&mut self, index: u16) -> Box<dyn Pending> {
        let answers = self
            .worker_of(index)
            .map(|worker| worker.reset(Scope::Queue(index)));
        Box::new(answers.unwrap_or_default())
    }

    fn enable_queue(&mut self, queue: ActiveQueue) -> Result<(), ActivateError> {
        // A queue without a role is of no use to either side.
        self.worker_of(queue.index)
            .map_or(Ok(()), |worker| worker.enable_queue(queue))
    }
}
