//! The block device (virtio 1.2 §5.2) over a disk of `drover-block`.
//!
//! | file | what |
//! |---|---|
//! | [`bits`] | features, configuration space, request layout |
//! | [`request`] | from a descriptor chain to a typed request |
//! | `queue` | all queues on the disk's one thread |
//! | [`handle`] | how the disk's owner takes it, gives it back, and decides about failures |
//!
//! Written data is volatile until flushed (writeback), for drivers that negotiate FLUSH; for others each write is durable when answered.

pub mod bits;
pub mod handle;
pub mod metrics;
mod queue;
pub mod request;
pub mod state;
#[cfg(test)]
mod tests;

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};

use drover_block::Disk;
use zerocopy::IntoBytes;

use crate::thread::{ThreadRole, Threads};
use crate::virtio::block::bits::{Config, ID_BYTES, SECTOR_BYTES, feature};
use crate::virtio::block::handle::{Capacity, DiskHandle};
use crate::virtio::block::metrics::BlockMetrics;
use crate::virtio::block::queue::{Engine, Server};
use crate::virtio::block::request::{Limits, MAX_DISCARD_SECTORS, MAX_DISCARD_SEGMENTS, Parser};
use crate::virtio::block::state::BlockState;
use crate::virtio::net::thread_name;
use crate::virtio::queue::RING_FEATURES;
use crate::virtio::worker::{HandedBack, Scope, Session, Worker};
use crate::virtio::{
    ActivateError, Activation, ActiveQueue, DeviceType, Pending, VirtioDevice, read_config_bytes,
};

/// The most request queues of a disk.
pub const MAX_QUEUES: u16 = 64;

/// Bytes of a physical block as told to the driver: a page, which any host does in one piece.
const PHYSICAL_BLOCK_BYTES: u64 = 4096;

/// What a disk looks like to the driver.
#[derive(Clone, Debug)]
pub struct BlockOptions {
    /// Its name in thread names and messages.
    pub id: String,
    /// Serial number; the driver sees its first 20 bytes.
    pub serial: String,
    /// Request queues, 1 to [`MAX_QUEUES`].
    pub queues: u16,
    /// Entries of each queue: a power of two, 2 to 1024.
    pub queue_size: u16,
    /// What a discard should be aligned to, to give space back: the cluster of a qcow2 image, the block of a file system. A multiple of
    /// 512 bytes.
    pub discard_granularity: u32,
}

/// A disk as the driver sees it.
pub struct Block {
    config: Config,
    offered: u64,
    serial: String,
    queue_sizes: Vec<u16>,
    metrics: Arc<BlockMetrics>,
    capacity: Capacity,
    handle: DiskHandle,
    worker: Worker,
}

/// What the device needs to know of its disk.
struct DiskFacts {
    size_bytes: u64,
    read_only: bool,
    discard: bool,
}

impl Block {
    /// A device for `disk`, which is closed (and flushed) on the device's thread when the device is dropped.
    ///
    /// # Errors
    /// The number of queues or their size is out of range, or no thread could be had.
    pub fn new(disk: Disk, options: &BlockOptions, threads: &dyn Threads) -> io::Result<Self> {
        let facts = DiskFacts {
            size_bytes: disk.size_bytes(),
            read_only: disk.read_only(),
            discard: disk.supports_discard(),
        };
        Self::with_engine(Box::new(disk), &facts, options, threads)
    }

    fn with_engine(
        engine: Box<dyn Engine>,
        disk: &DiskFacts,
        options: &BlockOptions,
        threads: &dyn Threads,
    ) -> io::Result<Self> {
        let size = options.queue_size;
        if !(1..=MAX_QUEUES).contains(&options.queues)
            || !(2..=1024).contains(&size)
            || !size.is_power_of_two()
        {
            let why = format!("a disk has 1 to {MAX_QUEUES} queues of 2 to 1024 (2^n) entries");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        }
        let limits = Limits {
            capacity_sectors: disk.size_bytes / SECTOR_BYTES,
            read_only: disk.read_only,
            discard: disk.discard && !disk.read_only,
        };
        let mut id = [0; ID_BYTES];
        for (to, from) in id.iter_mut().zip(options.serial.bytes()) {
            *to = from;
        }
        let metrics = Arc::new(BlockMetrics::default());
        let capacity = Capacity::new(disk.size_bytes);
        let (calls, inbox) = channel();
        let server = Server::new(
            engine,
            inbox,
            (Parser::new(limits), capacity.clone()),
            id,
            options.queues,
            Arc::clone(&metrics),
        );
        let name = thread_name("disk", &options.id, "");
        let worker = Worker::spawn(threads, &name, ThreadRole::Disk, Box::new(server))?;
        Ok(Self {
            config: config(&limits, options),
            offered: offered(&limits, options),
            serial: options.serial.clone(),
            queue_sizes: vec![size; options.queues.into()],
            metrics,
            capacity,
            handle: DiskHandle {
                calls,
                caller: worker.caller(),
            },
            worker,
        })
    }

    /// Stops serving queues and answers what is under way in them; then they come through the channel as they stand.
    #[must_use]
    pub fn halt(&self, scope: Scope) -> Receiver<HandedBack> {
        self.worker.halt(scope)
    }

    /// The way to its disk.
    #[must_use]
    pub fn handle(&self) -> DiskHandle {
        self.handle.clone()
    }

    /// Its counters.
    #[must_use]
    pub fn metrics(&self) -> Arc<BlockMetrics> {
        Arc::clone(&self.metrics)
    }

    /// What a snapshot keeps of it.
    #[must_use]
    pub fn state(&self) -> BlockState {
        BlockState {
            capacity_sectors: self.capacity.sectors(),
            serial: self.serial.clone(),
            offered_features: self.offered,
        }
    }
}

fn offered(limits: &Limits, options: &BlockOptions) -> u64 {
    let mut features =
        RING_FEATURES | feature::SEG_MAX | feature::BLK_SIZE | feature::TOPOLOGY | feature::FLUSH;
    if options.queues > 1 {
        features |= feature::MQ;
    }
    if limits.read_only {
        features |= feature::RO;
    } else {
        features |= feature::WRITE_ZEROES;
    }
    if limits.discard {
        features |= feature::DISCARD;
    }
    features
}

/// The configuration space; limits of what is not offered stay 0.
fn config(limits: &Limits, options: &BlockOptions) -> Config {
    let segments = u32::try_from(MAX_DISCARD_SEGMENTS).unwrap_or(1);
    let blocks = PHYSICAL_BLOCK_BYTES / SECTOR_BYTES;
    let granularity = options.discard_granularity / u32::try_from(SECTOR_BYTES).unwrap_or(1);
    let mut config = Config {
        capacity: limits.capacity_sectors.to_le_bytes(),
        // A request takes two descriptors more than its data.
        seg_max: u32::from(options.queue_size)
            .saturating_sub(2)
            .max(1)
            .to_le_bytes(),
        blk_size: u32::try_from(SECTOR_BYTES).unwrap_or(512).to_le_bytes(),
        physical_block_exp: u8::try_from(blocks.ilog2()).unwrap_or(0),
        min_io_size: u16::try_from(blocks).unwrap_or(1).to_le_bytes(),
        writeback: 1,
        num_queues: options.queues.to_le_bytes(),
        ..Config::default()
    };
    if limits.discard {
        config.max_discard_sectors = MAX_DISCARD_SECTORS.to_le_bytes();
        config.max_discard_seg = segments.to_le_bytes();
        config.discard_sector_alignment = granularity.max(1).to_le_bytes();
    }
    if !limits.read_only {
        config.max_write_zeroes_sectors = MAX_DISCARD_SECTORS.to_le_bytes();
        config.max_write_zeroes_seg = segments.to_le_bytes();
        config.write_zeroes_may_unmap = u8::from(limits.discard);
    }
    config
}

impl VirtioDevice for Block {
    fn device_type(&self) -> DeviceType {
        DeviceType::Block
    }

    fn features(&self) -> u64 {
        self.offered
    }

    fn queue_sizes(&self) -> &[u16] {
        &self.queue_sizes
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        let config = Config {
            capacity: self.capacity.sectors().to_le_bytes(),
            ..self.config
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
