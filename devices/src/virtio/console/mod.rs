//! The console device (virtio 1.2 §5.3) with several ports: a console, and channels such as the guest agent's.
//!
//! | file | what |
//! |---|---|
//! | [`bits`] | features, configuration space, control messages, numbers of queues |
//! | [`port`] | a port and its socket on the host |
//! | `queue` | all queues on the device's one thread |
//!
//! A port is a pair of queues and a stream socket; who holds the socket's other end decides what the port is for.

pub mod bits;
pub mod metrics;
pub mod port;
mod queue;
pub mod state;
#[cfg(test)]
mod tests;

use std::io;
use std::sync::Arc;

use zerocopy::IntoBytes;
use zerocopy::little_endian::{U16, U32};

use self::bits::{Config, feature};
use self::metrics::ConsoleMetrics;
use self::port::{GuestOpen, Port, PortOptions};
use self::queue::Server;
use self::state::ConsoleState;
use crate::thread::{ThreadRole, Threads};
use crate::virtio::queue::RING_FEATURES;
use crate::virtio::worker::{Scope, Session, Worker};
use crate::virtio::{
    ActivateError, Activation, ActiveQueue, DeviceType, Pending, VirtioDevice, read_config_bytes,
};

/// The most ports of a device.
pub const MAX_PORTS: usize = 31;
/// The longest name of a port, in bytes.
pub const MAX_NAME: usize = 127;
/// Entries of each queue.
const QUEUE_SIZE: u16 = 64;

/// A console device.
pub struct Console {
    config: Config,
    queue_sizes: Vec<u16>,
    open: Vec<GuestOpen>,
    metrics: Arc<ConsoleMetrics>,
    worker: Worker,
}

impl Console {
    /// A device with `ports`, of which the first is the one of drivers that know no others.
    ///
    /// # Errors
    /// There are no ports or too many, a name is empty or too long, or no thread could be had.
    pub fn new(ports: Vec<PortOptions>, threads: &dyn Threads) -> io::Result<Self> {
        if ports.is_empty() || ports.len() > MAX_PORTS {
            let why = format!("a console device has 1 to {MAX_PORTS} ports");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        }
        if ports
            .iter()
            .any(|port| port.name.is_empty() || port.name.len() > MAX_NAME)
        {
            let why = format!("the name of a console port has 1 to {MAX_NAME} bytes");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        }
        let ports: Vec<Port> = ports.into_iter().map(Port::new).collect::<Result<_, _>>()?;
        let open = ports.iter().map(|port| port.guest_open.clone()).collect();
        let config = Config {
            columns: U16::new(0),
            rows: U16::new(0),
            max_nr_ports: U32::new(ports.len() as u32),
            emergency_write: U32::new(0),
        };
        let queue_sizes = vec![QUEUE_SIZE; 2 * (ports.len() + 1)];
        let metrics = Arc::new(ConsoleMetrics::default());
        let server = Server::new(ports, Arc::clone(&metrics))?;
        let worker = Worker::spawn(threads, "console", ThreadRole::Slow, Box::new(server))?;
        Ok(Self {
            config,
            queue_sizes,
            open,
            metrics,
            worker,
        })
    }

    /// Its counters.
    #[must_use]
    pub fn metrics(&self) -> Arc<ConsoleMetrics> {
        Arc::clone(&self.metrics)
    }

    /// Whether the guest has the ports open, in their order.
    #[must_use]
    pub fn open_ports(&self) -> &[GuestOpen] {
        &self.open
    }

    /// What a snapshot keeps of it.
    #[must_use]
    pub fn state(&self) -> ConsoleState {
        ConsoleState {
            guest_open: self.open.iter().map(GuestOpen::get).collect(),
        }
    }
}

impl VirtioDevice for Console {
    fn device_type(&self) -> DeviceType {
        DeviceType::Console
    }

    fn features(&self) -> u64 {
        RING_FEATURES | feature::MULTIPORT
    }

    fn queue_sizes(&self) -> &[u16] {
        &self.queue_sizes
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        read_config_bytes(self.config.as_bytes(), offset, data);
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
