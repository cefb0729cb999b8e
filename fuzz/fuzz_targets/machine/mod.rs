//! A PCI bus with one virtio function and a host that accepts everything, and the accesses that a fuzzer's bytes stand for.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use drover_devices::GuestMemory;
use drover_devices::bus::{Bus, BusDevice, Doorbells};
use drover_devices::interrupt::{InterruptController, IrqLine, MsiMessage, MsiVector};
use drover_devices::pci::assign::{BarWindows, assign_bars};
use drover_devices::pci::host::HostBridge;
use drover_devices::pci::lpc::Lpc;
use drover_devices::pci::ports::ConfigPorts;
use drover_devices::pci::{BusDeviceFunction, PciBus, PciDevice};
use drover_devices::virtio::pci::{VirtioPci, Wiring};
use drover_devices::virtio::{
    ActivateError, Activation, ActiveQueue, DeviceType, Pending, VirtioDevice, VirtioInterrupt,
};
use vm_memory::{GuestAddress, GuestMemoryMmap};
use vmm_sys_util::eventfd::EventFd;

/// Where the virtio function sits.
pub const VIRTIO: BusDeviceFunction = BusDeviceFunction::from_routing_id(1 << 3);

/// The machine.
pub struct Machine {
    pub memory: Arc<Bus>,
    pub io: Arc<Bus>,
    pub bus: Arc<PciBus>,
    pub virtio: Arc<VirtioPci>,
}

/// One access: which register space, where, how wide, and the bytes for a write.
pub struct Access<'a> {
    pub kind: u8,
    pub offset: u16,
    pub data: &'a [u8],
}

/// Reads accesses of 12 bytes each: kind, width, offset, data.
pub fn accesses(input: &[u8]) -> impl Iterator<Item = Access<'_>> {
    input.chunks_exact(12).map(|chunk| Access {
        kind: chunk[0],
        offset: u16::from_le_bytes([chunk[2], chunk[3]]),
        data: &chunk[4..4 + [1, 2, 4, 8][usize::from(chunk[1] % 4)]],
    })
}

pub fn machine() -> Machine {
    let (memory, io) = (Arc::new(Bus::new()), Arc::new(Bus::new()));
    let bus = PciBus::new(Arc::clone(&memory), Arc::clone(&io));
    HostBridge::attach(&bus).expect("an empty bus has room");
    Lpc::attach(&bus, Arc::new(Nothing)).expect("the slot is free");
    ConfigPorts::attach(&bus, &io, Arc::new(Nothing)).expect("the ports are free");
    let regions = [(GuestAddress(0), 1 << 20)];
    let guest: GuestMemory = Arc::new(GuestMemoryMmap::from_ranges(&regions).expect("1 MiB"));
    let wiring = Wiring {
        at: VIRTIO,
        memory: guest,
        interrupts: &Host,
        doorbells: Arc::new(Host),
    };
    let device = Box::new(Device::default());
    let virtio = VirtioPci::new(device, wiring).expect("three queues fit");
    let function: Arc<dyn PciDevice> = Arc::clone(&virtio) as _;
    bus.add(VIRTIO, function).expect("the slot is free");
    assign_bars(&bus, &BarWindows::from_layout(40)).expect("the windows are large");
    Machine {
        memory,
        io,
        bus,
        virtio,
    }
}

struct Nothing;

impl BusDevice for Nothing {
    fn read(&self, _offset: u64, data: &mut [u8]) {
        data.fill(0);
    }

    fn write(&self, _offset: u64, _data: &[u8]) {}
}

struct Host;

impl Doorbells for Host {
    fn attach(&self, _address: u64, _event: &EventFd) -> io::Result<()> {
        Ok(())
    }

    fn detach(&self, _address: u64, _event: &EventFd) -> io::Result<()> {
        Ok(())
    }
}

impl IrqLine for Host {
    fn set(&self, _asserted: bool) {}
}

impl MsiVector for Host {
    fn route(&self, _message: MsiMessage) -> io::Result<()> {
        Ok(())
    }

    fn trigger(&self) -> io::Result<()> {
        Ok(())
    }
}

impl InterruptController for Host {
    fn line(&self, _gsi: u32) -> Arc<dyn IrqLine> {
        Arc::new(Host)
    }

    fn msi_vectors(&self, count: u16) -> io::Result<Vec<Arc<dyn MsiVector>>> {
        Ok((0..count)
            .map(|_| Arc::new(Host) as Arc<dyn MsiVector>)
            .collect())
    }
}

/// Checks the promises a transport makes to a device: queues come once, at a valid size, and never to a device that has them.
#[derive(Default)]
struct Device {
    active: Option<Arc<dyn VirtioInterrupt>>,
    serving: [bool; 3],
    /// Toggles whether resets are done at once or at the second poll.
    late: bool,
}

struct Late(AtomicBool);

impl Pending for Late {
    fn is_done(&self) -> bool {
        self.0.swap(true, Ordering::Relaxed)
    }

    fn wait(&self, _timeout: Duration) -> bool {
        self.0.store(true, Ordering::Relaxed);
        true
    }
}

impl Device {
    fn serve(&mut self, queue: &ActiveQueue) {
        let serving = &mut self.serving[usize::from(queue.index)];
        assert!(!*serving, "queue {} was given twice", queue.index);
        *serving = true;
    }

    fn answer(&mut self) -> Box<dyn Pending> {
        self.late = !self.late;
        Box::new(Late(AtomicBool::new(!self.late)))
    }
}

impl VirtioDevice for Device {
    fn device_type(&self) -> DeviceType {
        DeviceType::Net
    }

    fn features(&self) -> u64 {
        1 << 29 | 1 << 5
    }

    fn queue_sizes(&self) -> &[u16] {
        &[16, 256, 64]
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        assert!(offset + data.len() as u64 <= 1 << 16);
        data.fill(0x5a);
    }

    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
        assert!(self.active.is_none(), "activated twice");
        assert_ne!(activation.features & 1 << 32, 0);
        for queue in &activation.queues {
            self.serve(queue);
        }
        activation.interrupt.queue(0);
        activation.interrupt.config();
        self.active = Some(activation.interrupt);
        Ok(())
    }

    fn reset(&mut self) -> Box<dyn Pending> {
        assert!(self.active.take().is_some(), "reset without being active");
        self.serving = [false; 3];
        self.answer()
    }

    fn reset_queue(&mut self, index: u16) -> Box<dyn Pending> {
        assert!(self.active.is_some());
        let was = std::mem::replace(&mut self.serving[usize::from(index)], false);
        assert!(was, "queue {index} was not being served");
        self.answer()
    }

    fn enable_queue(&mut self, queue: ActiveQueue) -> Result<(), ActivateError> {
        assert!(self.active.is_some());
        self.serve(&queue);
        Ok(())
    }
}
