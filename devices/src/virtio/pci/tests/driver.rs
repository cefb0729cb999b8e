//! A driver in miniature: finds the device through configuration space and works its registers as a guest does.

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use virtio_queue::QueueT;
use vm_memory::{GuestAddress, GuestMemoryMmap};
use vmm_sys_util::eventfd::EventFd;

use super::super::{VirtioPci, Wiring};
use crate::GuestMemory;
use crate::bus::{Bus, Doorbells};
use crate::interrupt::{InterruptController, IrqLine, MsiMessage, MsiVector};
use crate::pci::assign::{BarWindows, assign_bars};
use crate::pci::{BusDeviceFunction, PciBus, PciDevice};
use crate::virtio::{
    ActivateError, Activation, ActiveQueue, DeviceType, Pending, VirtioDevice, VirtioInterrupt,
};

pub(super) const AT: BusDeviceFunction = BusDeviceFunction::from_routing_id(1 << 3);
pub(super) const MEMORY_SIZE: u64 = 1 << 20;
pub(super) const VERSION_1: u64 = 1 << 32;
pub(super) const RING_RESET: u64 = 1 << 40;
pub(super) const DEVICE_FEATURE: u64 = 1 << 5;

/// What the device was told, and how it answers.
#[derive(Default)]
pub(super) struct Script {
    pub(super) events: Mutex<Vec<String>>,
    pub(super) queues: Mutex<BTreeMap<u16, ActiveQueue>>,
    pub(super) features: AtomicU64,
    pub(super) interrupt: Mutex<Option<Arc<dyn VirtioInterrupt>>>,
    pub(super) refuse: AtomicBool,
    /// While set, resets do not end.
    pub(super) slow: Arc<AtomicBool>,
}

impl Script {
    pub(super) fn take_events(&self) -> Vec<String> {
        std::mem::take(&mut self.events.lock().unwrap())
    }

    pub(super) fn interrupt(&self) -> Arc<dyn VirtioInterrupt> {
        self.interrupt.lock().unwrap().clone().unwrap()
    }

    fn note(&self, event: String) {
        self.events.lock().unwrap().push(event);
    }
}

/// A device with a configuration space of eight bytes that follows its [`Script`].
struct ScriptedDevice {
    script: Arc<Script>,
    sizes: Vec<u16>,
    config: [u8; 8],
}

struct WhileSlow(Arc<AtomicBool>);

impl Pending for WhileSlow {
    fn is_done(&self) -> bool {
        !self.0.load(Ordering::SeqCst)
    }

    fn wait(&self, timeout: Duration) -> bool {
        let end = Instant::now() + timeout;
        while !self.is_done() && Instant::now() < end {
            std::thread::yield_now();
        }
        self.is_done()
    }
}

impl VirtioDevice for ScriptedDevice {
    fn device_type(&self) -> DeviceType {
        DeviceType::Block
    }

    fn features(&self) -> u64 {
        DEVICE_FEATURE | 1 << 29
    }

    fn queue_sizes(&self) -> &[u16] {
        &self.sizes
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        for (at, byte) in (offset..).zip(data) {
            *byte = self.config.get(at as usize).copied().unwrap_or(0);
        }
    }

    fn write_config(&mut self, offset: u64, data: &[u8]) {
        for (at, byte) in (offset..).zip(data) {
            if let Some(register) = self.config.get_mut(at as usize) {
                *register = *byte;
            }
        }
    }

    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
        if self.script.refuse.load(Ordering::SeqCst) {
            return Err(ActivateError::ThreadGone);
        }
        let indices: Vec<_> = activation.queues.iter().map(|queue| queue.index).collect();
        self.script.note(format!("activate {indices:?}"));
        let features = activation.features;
        self.script.features.store(features, Ordering::SeqCst);
        *self.script.interrupt.lock().unwrap() = Some(activation.interrupt);
        let mut queues = self.script.queues.lock().unwrap();
        queues.extend(activation.queues.into_iter().map(|q| (q.index, q)));
        Ok(())
    }

    fn reset(&mut self) -> Box<dyn Pending> {
        self.script.note("reset".into());
        self.script.queues.lock().unwrap().clear();
        Box::new(WhileSlow(Arc::clone(&self.script.slow)))
    }

    fn reset_queue(&mut self, index: u16) -> Box<dyn Pending> {
        self.script.note(format!("reset queue {index}"));
        self.script.queues.lock().unwrap().remove(&index);
        Box::new(WhileSlow(Arc::clone(&self.script.slow)))
    }

    fn enable_queue(&mut self, queue: ActiveQueue) -> Result<(), ActivateError> {
        let size = queue.queue.size();
        self.script
            .note(format!("enable queue {} of {size}", queue.index));
        self.script
            .queues
            .lock()
            .unwrap()
            .insert(queue.index, queue);
        Ok(())
    }
}

/// An interrupt controller and doorbells that remember.
#[derive(Default)]
pub(super) struct Host {
    pub(super) line: AtomicBool,
    pub(super) gsi: AtomicU64,
    pub(super) vectors: Mutex<Vec<Arc<Vector>>>,
    pub(super) doorbells: Mutex<Vec<u64>>,
    pub(super) refuse_doorbells: AtomicBool,
}

#[derive(Default)]
pub(super) struct Vector {
    pub(super) fired: AtomicU64,
    pub(super) message: Mutex<Option<MsiMessage>>,
}

impl MsiVector for Vector {
    fn route(&self, message: MsiMessage) -> io::Result<()> {
        *self.message.lock().unwrap() = Some(message);
        Ok(())
    }

    fn trigger(&self) -> io::Result<()> {
        self.fired.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }
}

struct Line(Arc<Host>);

impl IrqLine for Line {
    fn set(&self, asserted: bool) {
        self.0.line.store(asserted, Ordering::SeqCst);
    }
}

struct Controller(Arc<Host>);

impl InterruptController for Controller {
    fn line(&self, gsi: u32) -> Arc<dyn IrqLine> {
        self.0.gsi.store(gsi.into(), Ordering::SeqCst);
        Arc::new(Line(Arc::clone(&self.0)))
    }

    fn msi_vectors(&self, count: u16) -> io::Result<Vec<Arc<dyn MsiVector>>> {
        let vectors: Vec<_> = (0..count).map(|_| Arc::new(Vector::default())).collect();
        *self.0.vectors.lock().unwrap() = vectors.clone();
        Ok(vectors
            .into_iter()
            .map(|v| v as Arc<dyn MsiVector>)
            .collect())
    }
}

impl Doorbells for Host {
    fn attach(&self, address: u64, _event: &EventFd) -> io::Result<()> {
        if self.refuse_doorbells.load(Ordering::SeqCst) {
            return Err(io::ErrorKind::OutOfMemory.into());
        }
        let mut doorbells = self.doorbells.lock().unwrap();
        assert!(!doorbells.contains(&address));
        doorbells.push(address);
        Ok(())
    }

    fn detach(&self, address: u64, _event: &EventFd) -> io::Result<()> {
        let mut doorbells = self.doorbells.lock().unwrap();
        let at = doorbells.iter().position(|other| *other == address);
        doorbells.remove(at.expect("only what is attached is detached"));
        Ok(())
    }
}

/// Where a structure is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Structure {
    pub(super) capability: u16,
    pub(super) offset: u64,
    pub(super) length: u64,
}

/// The machine and the driver's view of its one device.
pub(super) struct Driver {
    pub(super) memory_bus: Arc<Bus>,
    pub(super) bus: Arc<PciBus>,
    pub(super) function: Arc<VirtioPci>,
    pub(super) script: Arc<Script>,
    pub(super) host: Arc<Host>,
    pub(super) bar: u64,
    pub(super) structures: BTreeMap<u8, Structure>,
    pub(super) msix: u16,
    pub(super) notify_multiplier: u64,
}

/// Finds a device with queues of these sizes, its BAR assigned, memory decoding and bus mastering on.
pub(super) fn probe(sizes: &[u16]) -> Driver {
    let mut driver = plug(sizes);
    driver.write_config(0x04, &0x0006_u16.to_le_bytes());
    driver.find_structures();
    driver
}

/// A device that nobody has looked at yet.
pub(super) fn plug(sizes: &[u16]) -> Driver {
    let regions = [(GuestAddress(0), MEMORY_SIZE as usize)];
    let memory: GuestMemory = Arc::new(GuestMemoryMmap::from_ranges(&regions).unwrap());
    let (memory_bus, io_bus) = (Arc::new(Bus::new()), Arc::new(Bus::new()));
    let bus = PciBus::new(Arc::clone(&memory_bus), io_bus);
    let (script, host) = (Arc::new(Script::default()), Arc::new(Host::default()));
    let device = ScriptedDevice {
        script: Arc::clone(&script),
        sizes: sizes.to_vec(),
        config: [1, 2, 3, 4, 5, 6, 7, 8],
    };
    let wiring = Wiring {
        at: AT,
        memory,
        interrupts: &Controller(Arc::clone(&host)),
        doorbells: Arc::clone(&host) as Arc<dyn Doorbells>,
    };
    let function = VirtioPci::new(Box::new(device), wiring).unwrap();
    bus.add(AT, Arc::clone(&function) as Arc<dyn PciDevice>)
        .unwrap();
    assign_bars(&bus, &BarWindows::from_layout(40)).unwrap();
    Driver {
        memory_bus,
        bus,
        function,
        script,
        host,
        bar: 0,
        structures: BTreeMap::new(),
        msix: 0,
        notify_multiplier: 0,
    }
}

impl Driver {
    pub(super) fn read_config(&self, offset: u16, length: usize) -> u64 {
        let mut data = [0; 8];
        self.bus.config_read(AT, offset, &mut data[..length]);
        u64::from_le_bytes(data)
    }

    pub(super) fn write_config(&self, offset: u16, data: &[u8]) {
        self.bus.config_write(AT, offset, data);
    }

    pub(super) fn find_structures(&mut self) {
        self.bar = self.read_config(0x10, 4) & !0xf | self.read_config(0x14, 4) << 32;
        let mut at = self.read_config(0x34, 1) as u16;
        while at != 0 {
            match self.read_config(at, 1) {
                0x11 => self.msix = at,
                0x09 => {
                    let kind = self.read_config(at + 3, 1) as u8;
                    let structure = Structure {
                        capability: at,
                        offset: self.read_config(at + 8, 4),
                        length: self.read_config(at + 12, 4),
                    };
                    self.structures.insert(kind, structure);
                    if kind == 2 {
                        self.notify_multiplier = self.read_config(at + 16, 4);
                    }
                }
                other => panic!("unexpected capability {other:#x}"),
            }
            at = self.read_config(at + 1, 1) as u16;
        }
    }

    pub(super) fn read(&self, kind: u8, offset: u64, length: usize) -> u64 {
        let mut data = [0; 8];
        let address = self.bar + self.structures[&kind].offset + offset;
        self.memory_bus.read(address, &mut data[..length]);
        u64::from_le_bytes(data)
    }

    pub(super) fn write(&self, kind: u8, offset: u64, data: &[u8]) {
        let address = self.bar + self.structures[&kind].offset + offset;
        self.memory_bus.write(address, data);
    }

    pub(super) fn write16(&self, offset: u64, value: u16) {
        self.write(1, offset, &value.to_le_bytes());
    }

    pub(super) fn write32(&self, offset: u64, value: u32) {
        self.write(1, offset, &value.to_le_bytes());
    }

    pub(super) fn status(&self) -> u8 {
        self.read(1, 20, 1) as u8
    }

    pub(super) fn set_status(&self, status: u8) {
        self.write(1, 20, &[status]);
    }

    pub(super) fn offered(&self) -> u64 {
        self.write32(0, 1);
        let high = self.read(1, 4, 4);
        self.write32(0, 0);
        high << 32 | self.read(1, 4, 4)
    }

    pub(super) fn accept(&self, features: u64) {
        for (select, bits) in [(0, features as u32), (1, (features >> 32) as u32)] {
            self.write32(8, select);
            self.write32(12, bits);
        }
    }

    /// Up to FEATURES_OK.
    pub(super) fn negotiate(&self, features: u64) {
        self.set_status(1);
        self.set_status(3);
        self.accept(features);
        self.set_status(11);
    }

    /// Places a queue's rings where they do not overlap others' and enables it.
    pub(super) fn enable_queue(&self, index: u16, size: u16) {
        self.set_queue(index, size);
        self.write16(28, 1);
    }

    pub(super) fn set_queue(&self, index: u16, size: u16) {
        self.write16(22, index);
        self.write16(24, size);
        let base = 0x1_0000 + 0x4000 * u64::from(index);
        for (register, address) in [(32, base), (40, base + 0x2000), (48, base + 0x3000)] {
            self.write32(register, address as u32);
            self.write32(register + 4, (address >> 32) as u32);
        }
    }

    /// The whole way to DRIVER_OK.
    pub(super) fn start(&self, features: u64, queues: &[u16]) {
        self.negotiate(features);
        for queue in queues {
            self.enable_queue(*queue, 16);
        }
        self.set_status(15);
    }

    pub(super) fn doorbell(&self, queue: u64) -> u64 {
        self.bar + self.structures[&2].offset + queue * self.notify_multiplier
    }

    /// Enables MSI-X with every vector unmasked, and gives queue i vector i + 1 and configuration changes vector 0.
    pub(super) fn enable_msix(&self, queues: u16) {
        let table = self.bar + (self.read_config(self.msix + 4, 4) & !7);
        for vector in 0..=u64::from(queues) {
            let entry = table + 16 * vector;
            self.memory_bus.write(entry, &0xfee0_0000_u64.to_le_bytes());
            self.memory_bus
                .write(entry + 8, &(0x40 + vector).to_le_bytes());
        }
        self.write_config(self.msix + 2, &0x8000_u16.to_le_bytes());
        self.write16(16, 0);
        for queue in 0..queues {
            self.write16(22, queue);
            self.write16(26, queue + 1);
        }
    }

    pub(super) fn fired(&self) -> Vec<u64> {
        let vectors = self.host.vectors.lock().unwrap();
        vectors
            .iter()
            .map(|v| v.fired.load(Ordering::SeqCst))
            .collect()
    }

    pub(super) fn line(&self) -> bool {
        self.host.line.load(Ordering::SeqCst)
    }

    pub(super) fn attached(&self) -> Vec<u64> {
        let mut doorbells = self.host.doorbells.lock().unwrap().clone();
        doorbells.sort_unstable();
        doorbells
    }

    pub(super) fn driver_errors(&self) -> u64 {
        self.function
            .metrics()
            .driver_errors
            .load(Ordering::Relaxed)
    }
}
