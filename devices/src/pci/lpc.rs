//! The ICH9 LPC bridge at 00:1f.0 (Intel I/O Controller Hub 9 data sheet, 316972, §13.1): the configuration registers by which
//! firmware and operating systems find the power management block, the interrupt router and the root complex registers.
//!
//! | offset | register | what it does here |
//! |---|---|---|
//! | 0x40 | PMBASE | moves the 128-byte power management block in I/O space |
//! | 0x44 | ACPI_CNTL | bit 7 enables that block |
//! | 0x60–63, 0x68–6b | PIRQ[A–H]_ROUT | stored: interrupts go to the I/O APIC, the PIC routing is for firmware to read back |
//! | 0xf0 | RCBA | stored: no root complex register is implemented, the range reads all ones |

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::config::{ConfigSpace, ConfigSpaceState, ConfigStateError, Identity};
use super::{BusDeviceFunction, ConfigWrite, PciBus, PciDevice, PciError, Region, Space};
use crate::bus::BusDevice;
use crate::virtio::Pending;
use drover_arch::layout;

/// Where the LPC bridge sits.
pub const LPC: BusDeviceFunction = BusDeviceFunction::from_routing_id(0x1f << 3);

/// The number of the power management block among the LPC bridge's regions.
pub const PM_REGION: u8 = 0;

mod spec {
    pub(super) const PMBASE: u8 = 0x40;
    pub(super) const PMBASE_IO: u32 = 1;
    pub(super) const PMBASE_ADDRESS: u32 = 0xff80;
    pub(super) const PM_SIZE: u64 = 128;
    pub(super) const ACPI_CNTL: u8 = 0x44;
    pub(super) const ACPI_EN: u8 = 1 << 7;
    pub(super) const SCI_IRQ_SEL: u8 = 0b111;
    pub(super) const PIRQ_ROUT: [u8; 2] = [0x60, 0x68];
    /// Bit 7: not routed to the PIC.
    pub(super) const PIRQ_OFF: [u8; 4] = [0x80; 4];
    pub(super) const PIRQ_WRITABLE: [u8; 4] = [0x8f; 4];
    pub(super) const RCBA: u8 = 0xf0;
    pub(super) const RCBA_WRITABLE: u32 = 0xffff_c001;
}

/// The LPC bridge.
pub struct Lpc {
    config: Mutex<ConfigSpace>,
    pm: Arc<dyn BusDevice>,
}

impl Lpc {
    /// Puts an LPC bridge on `bus` that maps `pm`, the 128-byte power management block, wherever PMBASE says; at first enabled at the
    /// layout's default port.
    ///
    /// # Errors
    /// 00:1f.0 is occupied.
    pub fn attach(bus: &PciBus, pm: Arc<dyn BusDevice>) -> Result<Arc<Lpc>, PciError> {
        let mut config = ConfigSpace::new(Identity {
            vendor: 0x8086,
            device: 0x2918,
            revision: 2,
            class: 0x06_01_00,
            subsystem_vendor: 0,
            subsystem: 0,
        });
        let pmbase = u32::from(layout::ports::PM_BASE) | spec::PMBASE_IO;
        config.define(spec::PMBASE, &pmbase.to_le_bytes());
        config.make_writable(spec::PMBASE, &spec::PMBASE_ADDRESS.to_le_bytes());
        config.define(spec::ACPI_CNTL, &[spec::ACPI_EN]);
        config.make_writable(spec::ACPI_CNTL, &[spec::ACPI_EN | spec::SCI_IRQ_SEL]);
        for offset in spec::PIRQ_ROUT {
            config.define(offset, &spec::PIRQ_OFF);
            config.make_writable(offset, &spec::PIRQ_WRITABLE);
        }
        config.make_writable(spec::RCBA, &spec::RCBA_WRITABLE.to_le_bytes());
        let lpc = Arc::new(Lpc {
            config: Mutex::new(config),
            pm,
        });
        let device: Arc<dyn PciDevice> = Arc::clone(&lpc) as _;
        bus.add(LPC, device)?;
        Ok(lpc)
    }

    /// Where the power management block is now, or would be if it were enabled. This is what the FADT must tell.
    #[must_use]
    pub fn pm_base(&self) -> u16 {
        let config = self.config();
        (config.u32_at(spec::PMBASE) & spec::PMBASE_ADDRESS) as u16
    }

    /// The present configuration space.
    #[must_use]
    pub fn save(&self) -> ConfigSpaceState {
        self.config().save()
    }

    /// Takes a saved configuration space. The power management block moves with the next change on the bus.
    ///
    /// # Errors
    /// It is another function's.
    pub fn restore(&self, state: &ConfigSpaceState) -> Result<(), ConfigStateError> {
        self.config().restore(state)
    }

    fn config(&self) -> MutexGuard<'_, ConfigSpace> {
        self.config.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl PciDevice for Lpc {
    fn config_read(&self, offset: u16, data: &mut [u8]) {
        self.config().read(offset, data);
    }

    fn config_write(&self, offset: u16, data: &[u8]) -> ConfigWrite {
        self.config().write(offset, data);
        let pm = u16::from(spec::PMBASE)..=u16::from(spec::ACPI_CNTL);
        if pm.contains(&offset) {
            ConfigWrite::RegionsChanged
        } else {
            ConfigWrite::Stored
        }
    }

    fn regions(&self) -> Vec<Region> {
        let config = self.config();
        let base = u64::from(config.u32_at(spec::PMBASE) & spec::PMBASE_ADDRESS);
        let enabled = config.u32_at(spec::ACPI_CNTL) & u32::from(spec::ACPI_EN) != 0;
        let pm = Region {
            number: PM_REGION,
            space: Space::Io,
            base,
            size: spec::PM_SIZE,
        };
        (enabled && base != 0).then_some(pm).into_iter().collect()
    }

    fn region_read(&self, _number: u8, offset: u64, data: &mut [u8]) {
        self.pm.read(offset, data);
    }

    fn region_write(&self, _number: u8, offset: u64, data: &[u8]) {
        self.pm.write(offset, data);
    }

    fn reset(&self) -> Option<Box<dyn Pending>> {
        self.config().reset();
        None
    }
}
