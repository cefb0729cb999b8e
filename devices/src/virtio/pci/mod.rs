//! The virtio PCI transport (virtio 1.2 §4.1): a PCI function in front of any [`VirtioDevice`].
//!
//! ```text
//!  file          what                                               specification
//!  layout.rs     configuration space, BAR, capabilities             §4.1.2, §4.1.4
//!  common.rs     common configuration registers, negotiation        §4.1.4.3, §2.1, §2.2
//!  interrupts.rs ISR, INTx, vectors                                 §4.1.4.5, §4.1.5
//!  notify.rs     doorbells                                          §4.1.4.4
//!  lifecycle.rs  activation, reset, queue reset                     §2.4, §2.6.1, §3.1
//!  state.rs      what is saved
//! ```
//!
//! One register file behind one lock, held while registers change and never while waiting for the device's thread. Two things outlast
//! a register write: a device reset and a queue reset. The driver sees them end by polling (`device_status`, `queue_reset`); a driver
//! that does not poll but goes on writing waits, outside the lock, until the reset has ended.

mod common;
mod interrupts;
mod layout;
mod lifecycle;
mod metrics;
mod notify;
mod spec;
mod state;
#[cfg(test)]
mod tests;

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use self::common::Effect;
use self::interrupts::Interrupts;
use self::lifecycle::Registers;
pub use self::metrics::VirtioPciMetrics;
use self::metrics::count;
use self::notify::DoorbellSet;
use self::spec::{MAX_QUEUES, bar, capability};
pub use self::state::{
    CommonConfigState, QueuePosition, QueueRegistersState, RestoreError, VirtioPciState,
};
use crate::GuestMemory;
use crate::bus::Doorbells;
use crate::interrupt::InterruptController;
use crate::pci::bits::{BAR0, COMMAND, Command, HEADER_END};
use crate::pci::config::LayoutError;
use crate::pci::msix::{MessageControl, Msix};
use crate::pci::{BusDeviceFunction, ConfigWrite, IntxPin, PciDevice, Region, intx_gsi};
use crate::virtio::{Pending, VirtioDevice};

/// How long a driver that does not poll may be held up by a reset that it asked for.
const RESET_PATIENCE: Duration = Duration::from_secs(2);
/// How long a poll of a reset waits: drivers sleep a scheduler tick between polls, and a reset is mostly done much sooner.
const POLL_PATIENCE: Duration = Duration::from_millis(1);

/// What connects a function to its VM.
#[derive(Clone)]
pub struct Wiring<'a> {
    /// Where the function will sit; decides its interrupt line.
    pub at: BusDeviceFunction,
    /// The guest's RAM.
    pub memory: GuestMemory,
    /// Where interrupts go.
    pub interrupts: &'a dyn InterruptController,
    /// What turns notifications into events.
    pub doorbells: Arc<dyn Doorbells>,
}

/// Why a transport could not be made.
#[derive(Debug, thiserror::Error)]
pub enum VirtioPciError {
    /// The device has no queue, or more than the notification page has room for.
    #[error("a virtio device has 1 to {MAX_QUEUES} queues, not {0}")]
    Queues(usize),
    /// A queue size is no power of two of at most 32768.
    #[error("queue {index} cannot have {size} entries")]
    QueueSize {
        /// Which queue.
        index: usize,
        /// The size the device asked for.
        size: u16,
    },
    /// Configuration space cannot be laid out.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// No vectors or event descriptors are left.
    #[error("{0}")]
    Host(&'static str, #[source] io::Error),
}

/// A virtio device as a PCI function.
pub struct VirtioPci {
    registers: Mutex<Registers>,
    interrupts: Arc<Interrupts>,
    doorbells: Arc<DoorbellSet>,
    metrics: Arc<VirtioPciMetrics>,
    /// Offsets in configuration space.
    message_control: u8,
    config_access: u8,
}

impl VirtioPci {
    /// Puts a transport in front of `device`. It is then added to the bus at `wiring.at`.
    ///
    /// # Errors
    /// The device asks for impossible queues, or the host has no vectors or descriptors left.
    pub fn new(
        device: Box<dyn VirtioDevice>,
        wiring: Wiring<'_>,
    ) -> Result<Arc<VirtioPci>, VirtioPciError> {
        let sizes = device.queue_sizes();
        let queues = sizes.len();
        if !(1..=MAX_QUEUES).contains(&queues) {
            return Err(VirtioPciError::Queues(queues));
        }
        let impossible = |size: u16| !size.is_power_of_two() || size > 32768;
        if let Some(index) = sizes.iter().position(|size| impossible(*size)) {
            let size = sizes[index];
            return Err(VirtioPciError::QueueSize { index, size });
        }
        let layout = layout::build(device.device_type(), queues)?;
        let vectors = wiring
            .interrupts
            .msi_vectors(layout::vectors(queues))
            .map_err(|error| VirtioPciError::Host("MSI-X vectors", error))?;
        let line = wiring.interrupts.line(intx_gsi(wiring.at, IntxPin::A));
        let interrupts = Arc::new(Interrupts::new(Msix::new(vectors), queues, line));
        let doorbells = DoorbellSet::new(queues, wiring.doorbells)
            .map_err(|error| VirtioPciError::Host("doorbell descriptors", error))?;
        let doorbells = Arc::new(doorbells);
        let metrics = Arc::new(VirtioPciMetrics::default());
        let registers = Registers::new(
            layout.config,
            device,
            wiring.memory,
            Arc::clone(&interrupts),
            Arc::clone(&doorbells),
            Arc::clone(&metrics),
        );
        Ok(Arc::new(VirtioPci {
            registers: Mutex::new(registers),
            interrupts,
            doorbells,
            metrics,
            message_control: layout.message_control,
            config_access: layout.config_access,
        }))
    }

    /// What this function counts.
    #[must_use]
    pub fn metrics(&self) -> Arc<VirtioPciMetrics> {
        Arc::clone(&self.metrics)
    }

    /// Sets the function's state apart, while no vCPU runs.
    #[must_use]
    pub fn save(&self) -> VirtioPciState {
        let registers = self.registers();
        let queues = 0..registers.common.queues().len() as u16;
        VirtioPciState {
            config: registers.config.save(),
            msix: self.interrupts.msix.save(),
            common: registers.common.save(),
            config_vector: self.interrupts.config_vector(),
            queue_vectors: queues.map(|q| self.interrupts.queue_vector(q)).collect(),
            isr: self.interrupts.isr(),
            needs_reset: self.interrupts.device_needs_reset(),
            config_generation: self.interrupts.generation(),
        }
    }

    /// Takes up a saved state, and starts the device if it was running, its queues at `positions` (0 for a queue not named). For a
    /// function in its power-on state, before vCPUs run; the bus maps its BAR at the next
    /// [`crate::pci::PciBus::update_mappings`].
    ///
    /// # Errors
    /// The state is another function's, or the device did not start.
    pub fn restore(
        &self,
        state: &VirtioPciState,
        positions: &[QueuePosition],
    ) -> Result<(), RestoreError> {
        let mut registers = self.registers();
        if !registers.is_inactive() {
            return Err(RestoreError::InUse);
        }
        let mut config = registers.config.clone();
        config.restore(&state.config)?;
        let mut common = registers.common.clone();
        common
            .restore(&state.common)
            .map_err(RestoreError::Common)?;
        let control = MessageControl::from_register(config.u16_at(self.message_control));
        self.interrupts.msix.restore(&state.msix, control)?;
        registers.config = config;
        registers.common = common;
        self.interrupts.set_config_vector(state.config_vector);
        for (queue, vector) in (0..).zip(&state.queue_vectors) {
            self.interrupts.set_queue_vector(queue, *vector);
        }
        self.interrupts.set_generation(state.config_generation);
        self.apply_control(&registers);
        self.interrupts.restore(state.isr, state.needs_reset);
        let started = registers.resume(positions);
        drop(registers);
        self.update_doorbells();
        if started {
            Ok(())
        } else {
            Err(RestoreError::NotStarted)
        }
    }

    fn registers(&self) -> MutexGuard<'_, Registers> {
        self.registers
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// The registers, after waiting without the lock for a reset that has not ended; at most `patience`.
    fn registers_after_reset(&self, patience: Duration) -> MutexGuard<'_, Registers> {
        let mut registers = self.registers();
        let Some(pending) = registers.poll_reset() else {
            return registers;
        };
        drop(registers);
        pending.wait(patience);
        registers = self.registers();
        registers.poll_reset();
        registers
    }

    fn update_doorbells(&self) {
        let refused = self.doorbells.update(|| self.registers().served_queues());
        self.metrics
            .host_errors
            .fetch_add(refused, std::sync::atomic::Ordering::Relaxed);
    }

    /// Hands COMMAND and Message Control to the interrupts.
    fn apply_control(&self, registers: &Registers) {
        let command = registers.config.command();
        let control = registers.config.u16_at(self.message_control);
        self.interrupts.set_control(
            MessageControl::from_register(control),
            command.contains(Command::BUS_MASTER),
            command.contains(Command::INTERRUPT_DISABLE),
        );
    }

    fn read_common(&self, offset: u64, data: &mut [u8]) {
        let covers = |field: usize| {
            let field = field as u64;
            (offset..offset.saturating_add(data.len() as u64)).contains(&field)
        };
        let polls = covers(spec::common::DEVICE_STATUS) || covers(spec::common::QUEUE_RESET);
        let mut registers = if polls {
            self.registers_after_reset(POLL_PATIENCE)
        } else {
            self.registers()
        };
        registers.poll_queue_resets();
        registers.read_common(offset, data);
    }

    fn write_common(&self, offset: u64, data: &[u8]) {
        let mut registers = self.registers_after_reset(RESET_PATIENCE);
        let served = registers.served_queues();
        registers.poll_queue_resets();
        let effect = registers.write_common(offset, data);
        let changed = effect != Effect::None && served != registers.served_queues();
        drop(registers);
        if changed {
            self.update_doorbells();
        }
    }

    fn write_notify(&self, offset: u64) {
        count(&self.metrics.notify_exits);
        let queue = u16::try_from(offset / u64::from(bar::NOTIFY_MULTIPLIER)).ok();
        if !queue.is_some_and(|queue| self.doorbells.ring(queue)) {
            count(&self.metrics.driver_errors);
        }
    }

    /// The register access that the driver describes in the configuration access capability (§4.1.4.9), if `offset..` touches its data
    /// and the description is one the driver may give.
    fn config_access(&self, offset: u16, length: usize) -> Option<(u64, usize)> {
        let data = u16::from(self.config_access + capability::PCI_CONFIG_DATA);
        let end = usize::from(offset).checked_add(length)?;
        if offset >= data + 4 || end <= usize::from(data) {
            return None;
        }
        let registers = self.registers();
        let at = |field: u8| registers.config.u32_at(self.config_access + field);
        let number = at(capability::BAR) as u8;
        let offset = u64::from(at(capability::OFFSET));
        let length = u64::from(at(capability::REGION_LENGTH));
        let valid = number == bar::NUMBER
            && matches!(length, 1 | 2 | 4)
            && offset.is_multiple_of(length)
            && offset + length <= bar::SIZE;
        valid.then_some((offset, length as usize))
    }
}

/// Which structure of the BAR an access is for, and where in it.
enum Target {
    Common(u64),
    Isr,
    Device(u64),
    Notify(u64),
    MsixTable(u64),
    MsixPba(u64),
}

impl Target {
    fn of(offset: u64) -> Target {
        let from = |base: u32| offset - u64::from(base);
        match u32::try_from(offset).unwrap_or(u32::MAX) {
            bar::MSIX_PBA.. => Target::MsixPba(from(bar::MSIX_PBA)),
            bar::MSIX_TABLE.. => Target::MsixTable(from(bar::MSIX_TABLE)),
            bar::NOTIFY.. => Target::Notify(from(bar::NOTIFY)),
            bar::DEVICE.. => Target::Device(from(bar::DEVICE)),
            bar::ISR => Target::Isr,
            // The rest of the ISR page is like the rest of the common page: nothing.
            _ => Target::Common(offset),
        }
    }
}

impl PciDevice for VirtioPci {
    fn config_read(&self, offset: u16, data: &mut [u8]) {
        if let Some((target, length)) = self.config_access(offset, data.len()) {
            let mut window = [0; 4];
            self.region_read(bar::NUMBER, target, &mut window[..length]);
            let field = self.config_access + capability::PCI_CONFIG_DATA;
            self.registers().config.set(field, &window);
        }
        let mut registers = self.registers();
        let wanted = self.interrupts.intx_wanted();
        registers.config.set_interrupt_status(wanted);
        registers.config.read(offset, data);
    }

    fn config_write(&self, offset: u16, data: &[u8]) -> ConfigWrite {
        let mut registers = self.registers();
        let served = registers.served_queues();
        registers.config.write(offset, data);
        self.apply_control(&registers);
        registers.bus_mastering_changed();
        let changed = served != registers.served_queues();
        drop(registers);
        if let Some((target, length)) = self.config_access(offset, data.len()) {
            let field = self.config_access + capability::PCI_CONFIG_DATA;
            let window = self.registers().config.u32_at(field).to_le_bytes();
            self.region_write(bar::NUMBER, target, &window[..length]);
        }
        if changed {
            self.update_doorbells();
        }
        let end = usize::from(offset) + data.len();
        let command = offset <= u16::from(COMMAND) + 1 && end > usize::from(COMMAND);
        let bars = offset < u16::from(HEADER_END) && end > usize::from(BAR0);
        if command || bars {
            ConfigWrite::RegionsChanged
        } else {
            ConfigWrite::Stored
        }
    }

    fn regions(&self) -> Vec<Region> {
        self.registers().config.decoded_bars()
    }

    fn region_read(&self, _number: u8, offset: u64, data: &mut [u8]) {
        data.fill(0);
        let counter = match Target::of(offset) {
            Target::MsixTable(_) | Target::MsixPba(_) => &self.metrics.msix_accesses,
            Target::Common(_) | Target::Isr | Target::Device(_) | Target::Notify(_) => {
                &self.metrics.register_reads
            }
        };
        count(counter);
        match Target::of(offset) {
            Target::Common(offset) => self.read_common(offset, data),
            Target::Isr => {
                if let Some(first) = data.first_mut() {
                    *first = self.interrupts.take_isr();
                }
            }
            Target::Device(offset) => self.registers().device.read_config(offset, data),
            Target::Notify(_) => {}
            Target::MsixTable(offset) => self.interrupts.msix.read_table(offset, data),
            Target::MsixPba(offset) => self.interrupts.msix.read_pba(offset, data),
        }
    }

    fn region_write(&self, _number: u8, offset: u64, data: &[u8]) {
        match Target::of(offset) {
            Target::Common(offset) => {
                count(&self.metrics.register_writes);
                self.write_common(offset, data);
            }
            Target::Device(offset) => {
                count(&self.metrics.register_writes);
                self.registers().device.write_config(offset, data);
            }
            Target::Notify(offset) => self.write_notify(offset),
            Target::MsixTable(offset) => {
                count(&self.metrics.msix_accesses);
                self.interrupts.msix.write_table(offset, data);
            }
            Target::Isr | Target::MsixPba(_) => count(&self.metrics.driver_errors),
        }
    }

    fn region_moved(&self, _number: u8, base: Option<u64>) {
        self.doorbells.place(base);
        self.update_doorbells();
    }

    fn reset(&self) -> Option<Box<dyn Pending>> {
        let mut registers = self.registers();
        registers.config.reset();
        self.interrupts.msix.reset();
        self.apply_control(&registers);
        registers.start_reset();
        let pending = registers.poll_reset();
        drop(registers);
        self.update_doorbells();
        pending.map(|pending| Box::new(pending) as Box<dyn Pending>)
    }
}
