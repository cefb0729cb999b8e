//! The virtio devices that the definition names, opened and put on the PCI bus: disks, network cards, entropy, in this order from
//! slot 1 on.

use std::error::Error;
use std::fs::File;
use std::sync::Arc;

use drover_api::definition::{NetConfig, TapConfig, VmConfig};
use drover_block::{Disk, DiskOptions};
use drover_devices::GuestMemory;
use drover_devices::bus::Doorbells;
use drover_devices::interrupt::InterruptController;
use drover_devices::pci::{BusDeviceFunction, PciBus};
use drover_devices::thread::Threads;
use drover_devices::virtio::VirtioDevice;
use drover_devices::virtio::block::metrics::BlockMetrics;
use drover_devices::virtio::block::{Block, BlockOptions};
use drover_devices::virtio::net::metrics::NetMetrics;
use drover_devices::virtio::net::tap::Tap;
use drover_devices::virtio::net::{Net, NetOptions};
use drover_devices::virtio::pci::VirtioPciMetrics;
use drover_devices::virtio::pci::{VirtioPci, Wiring};
use drover_devices::virtio::rng::Rng;
use drover_devices::virtio::rng::metrics::RngMetrics;
use drover_devices::virtio::vhost_user_blk::{VhostUserBlk, VhostUserBlkOptions, VhostUserMetrics};

use super::BuildError;
use super::disks::{self, LiveDisk, Opener};
use crate::process::duplicate_inherited;

/// Slot of the first virtio device.
const FIRST_SLOT: u8 = 1;
/// Slot of the LPC bridge, which ends the row.
const LPC_SLOT: u8 = 0x1f;

/// What a device counts.
pub enum DeviceMetrics {
    /// A disk.
    Block(Arc<BlockMetrics>),
    /// A network card.
    Net(Arc<NetMetrics>),
    /// The entropy device.
    Rng(Arc<RngMetrics>),
    /// A disk that another process serves.
    VhostUser(Arc<VhostUserMetrics>),
}

/// A device on the bus, as far as reports need it.
pub struct Device {
    /// Its id in the definition.
    pub id: String,
    /// What it counts.
    pub metrics: DeviceMetrics,
    /// What its transport counts.
    pub transport: Arc<VirtioPciMetrics>,
}

/// What devices are connected to.
pub(super) struct Connections<'a> {
    pub(super) pci: &'a PciBus,
    pub(super) memory: &'a GuestMemory,
    pub(super) interrupts: &'a dyn InterruptController,
    pub(super) doorbells: &'a Arc<dyn Doorbells>,
    pub(super) threads: &'a dyn Threads,
}

/// Devices that are on the bus.
pub(super) struct Connected {
    /// What reports need of them.
    pub(super) devices: Vec<Device>,
    /// The disks, in the definition's order.
    pub(super) disks: Vec<LiveDisk>,
    /// The slots that they take.
    pub(super) slots: Vec<u8>,
}

/// The files behind a definition's devices. Opening them comes first: it is where most definitions fail, and it needs no VM.
pub(super) struct Opened {
    disks: Vec<(Disk, DiskOptions)>,
    served: Vec<VhostUserBlk>,
    nets: Vec<Vec<Tap>>,
    rng: Option<File>,
}

impl Opened {
    pub(super) fn open(
        config: &VmConfig,
        opener: &mut Opener,
        threads: &dyn Threads,
    ) -> Result<Self, BuildError> {
        let disks = config.disks.len() + config.vhost_user_disks.len();
        let wanted = disks + config.nets.len() + usize::from(config.rng);
        let slots = usize::from(LPC_SLOT - FIRST_SLOT);
        if wanted > slots {
            return Err(BuildError::host(format!(
                "disks, nets and rng need {wanted} PCI slots, but there are {slots}"
            )));
        }
        let disks = config.disks.iter().enumerate().map(|(index, disk)| {
            let options = opener
                .options(disk)
                .map_err(|error| BuildError::of(format!("disks[{index}].limits"))(error.into()))?;
            let source = disks::open(disk, options.clone());
            source
                .map(|disk| (disk, options))
                .map_err(BuildError::of(format!("disks[{index}]")))
        });
        let served = config.vhost_user_disks.iter().enumerate();
        let served = served.map(|(index, disk)| {
            let options = VhostUserBlkOptions {
                id: disk.id.clone(),
                socket: disk.socket.clone(),
                queues: disk.queues,
                queue_size: disk.queue_size,
            };
            VhostUserBlk::connect(&options, threads).map_err(|error| {
                BuildError::of(format!("vhost_user_disks[{index}].socket"))(error.into())
            })
        });
        let nets = config.nets.iter().enumerate().map(|(index, net)| {
            open_taps(net).map_err(BuildError::of(format!("nets[{index}].tap")))
        });
        let rng = config.rng.then(|| File::open("/dev/urandom")).transpose();
        Ok(Self {
            disks: disks.collect::<Result<_, _>>()?,
            served: served.collect::<Result<_, _>>()?,
            nets: nets.collect::<Result<_, _>>()?,
            rng: rng
                .map_err(|error| BuildError::of("rng")(format!("/dev/urandom: {error}").into()))?,
        })
    }

    /// Puts all of them on the bus.
    pub(super) fn connect(
        self,
        config: &VmConfig,
        to: &Connections<'_>,
    ) -> Result<Connected, BuildError> {
        let mut devices = Vec::new();
        let mut slots = FIRST_SLOT..LPC_SLOT;
        let mut taken = Vec::new();
        let mut live = Vec::new();
        let mut connect = |id: &str, device: Box<dyn VirtioDevice>, metrics| {
            let slot = slots
                .next()
                .ok_or_else(|| BuildError::host("no PCI slot is left"))?;
            let transport = to.plug(slot, device)?;
            taken.push(slot);
            devices.push(Device {
                id: id.to_owned(),
                metrics,
                transport,
            });
            Ok::<(), BuildError>(())
        };
        for (index, ((disk, disk_options), config)) in
            self.disks.into_iter().zip(&config.disks).enumerate()
        {
            let field = format!("disks[{index}]");
            let options = BlockOptions {
                id: config.id.clone(),
                serial: config.serial.clone().unwrap_or_else(|| config.id.clone()),
                queues: config.queues,
                // At most a cluster of 2 MiB.
                discard_granularity: disk.discard_granularity() as u32,
                queue_size: config.queue_size,
            };
            let size_bytes = disk.size_bytes();
            let block = Block::new(disk, &options, to.threads)
                .map_err(|error| BuildError::of(field)(error.into()))?;
            let metrics = DeviceMetrics::Block(block.metrics());
            live.push(LiveDisk {
                handle: block.handle(),
                options: disk_options,
                metrics: block.metrics(),
                size_bytes,
                stopped: None,
                missing: None,
            });
            connect(&config.id, Box::new(block), metrics)?;
        }
        for (disk, config) in self.served.into_iter().zip(&config.vhost_user_disks) {
            let metrics = DeviceMetrics::VhostUser(disk.metrics());
            connect(&config.id, Box::new(disk), metrics)?;
        }
        for (index, (taps, net)) in self.nets.into_iter().zip(&config.nets).enumerate() {
            let field = format!("nets[{index}]");
            let options = NetOptions {
                id: net.id.clone(),
                mac: config.mac_of(net).octets(),
                mtu: net.mtu,
                queue_size: net.queue_size,
                offloads: net.offloads,
            };
            let card = Net::new(taps, options, to.threads)
                .map_err(|error| BuildError::of(field)(error.into()))?;
            let metrics = DeviceMetrics::Net(card.metrics());
            connect(&net.id, Box::new(card), metrics)?;
        }
        if let Some(source) = self.rng {
            let rng = Rng::new(source, to.threads)
                .map_err(|error| BuildError::of("rng")(error.into()))?;
            let metrics = DeviceMetrics::Rng(rng.metrics());
            connect("rng", Box::new(rng), metrics)?;
        }
        Ok(Connected {
            devices,
            disks: live,
            slots: taken,
        })
    }
}

impl Connections<'_> {
    fn plug(
        &self,
        slot: u8,
        device: Box<dyn VirtioDevice>,
    ) -> Result<Arc<VirtioPciMetrics>, BuildError> {
        let at = BusDeviceFunction::new(0, slot, 0)
            .ok_or_else(|| BuildError::host("no PCI slot is left"))?;
        let wiring = Wiring {
            at,
            memory: self.memory.clone(),
            interrupts: self.interrupts,
            doorbells: self.doorbells.clone(),
        };
        let function = VirtioPci::new(device, wiring).map_err(BuildError::host)?;
        let metrics = function.metrics();
        self.pci.add(at, function).map_err(BuildError::host)?;
        Ok(metrics)
    }
}

fn open_taps(net: &NetConfig) -> Result<Vec<Tap>, Box<dyn Error + Send + Sync>> {
    Ok(match &net.tap {
        TapConfig::Name(name) => Tap::open_named(name, net.queue_pairs)?,
        TapConfig::Create(name) => Tap::create(name, net.queue_pairs, net.mtu)?,
        TapConfig::Fds(fds) => {
            let open = |fd: &i32| {
                let file = duplicate_inherited(*fd)
                    .map_err(|error| format!("descriptor {fd}: {error}"))?;
                Tap::from_fd(file).map_err(Box::<dyn Error + Send + Sync>::from)
            };
            fds.iter().map(open).collect::<Result<_, _>>()?
        }
    })
}
