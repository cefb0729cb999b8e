//! The Q35 host bridge at 00:00.0 (Intel 3 Series Express Chipset data sheet, 316966, §5.1) and the ECAM window it decodes.
//!
//! PCIEXBAR decides where the enhanced configuration access mechanism lies (PCI Express 4.0 §7.2.2); firmware may move it:
//!
//! ```text
//! PCIEXBAR  [35:26] base, aligned to the length   [2:1] length: 0 = 256 MiB, 1 = 128 MiB, 2 = 64 MiB   [0] enable
//! address   base + bus << 20 + device << 15 + function << 12 + register
//! ```

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use drover_arch::layout;

use super::bits::{COMMAND, EXTENDED_CONFIG_SPACE_SIZE};
use super::config::{ConfigSpace, ConfigSpaceState, ConfigStateError, Identity};
use super::{BusDeviceFunction, ConfigWrite, PciBus, PciDevice, PciError, Region, Space};
use crate::virtio::Pending;

/// Where the host bridge sits.
pub const HOST_BRIDGE: BusDeviceFunction = BusDeviceFunction::from_routing_id(0);

/// The number of the ECAM window among the host bridge's regions.
pub const ECAM_REGION: u8 = 0;

mod spec {
    pub(super) const PCIEXBAR: u8 = 0x60;
    pub(super) const PCIEXBAR_ENABLE: u64 = 1;
    pub(super) const PCIEXBAR_LENGTH_SHIFT: u32 = 1;
    pub(super) const PCIEXBAR_LENGTH: u64 = 0b11;
    pub(super) const PCIEXBAR_LONGEST: u64 = 256 << 20;
    /// Enable, length, and base down to the alignment of the shortest window.
    pub(super) const PCIEXBAR_WRITABLE: u64 = 0x0000_000f_fc00_0007;
}

/// The host bridge.
pub struct HostBridge {
    bus: Weak<PciBus>,
    config: Mutex<ConfigSpace>,
}

impl HostBridge {
    /// Puts a host bridge on `bus`, its ECAM window at the layout's default address.
    ///
    /// # Errors
    /// 00:00.0 is occupied.
    pub fn attach(bus: &Arc<PciBus>) -> Result<Arc<HostBridge>, PciError> {
        let mut config = ConfigSpace::new(Identity {
            vendor: 0x8086,
            device: 0x29c0,
            revision: 0,
            class: 0x06_00_00,
            subsystem_vendor: 0,
            subsystem: 0,
        });
        let pciexbar = layout::ECAM_START | spec::PCIEXBAR_ENABLE;
        config.define(spec::PCIEXBAR, &pciexbar.to_le_bytes());
        config.make_writable(spec::PCIEXBAR, &spec::PCIEXBAR_WRITABLE.to_le_bytes());
        let bridge = Arc::new(HostBridge {
            bus: Arc::downgrade(bus),
            config: Mutex::new(config),
        });
        let device: Arc<dyn PciDevice> = Arc::clone(&bridge) as _;
        bus.add(HOST_BRIDGE, device)?;
        Ok(bridge)
    }

    /// The ECAM window as PCIEXBAR says now; `None` while it is disabled. This is what MCFG must tell.
    #[must_use]
    pub fn ecam(&self) -> Option<Region> {
        let config = self.config();
        let low = config.u32_at(spec::PCIEXBAR);
        let high = config.u32_at(spec::PCIEXBAR + 4);
        let pciexbar = u64::from(high) << 32 | u64::from(low);
        let length = pciexbar >> spec::PCIEXBAR_LENGTH_SHIFT & spec::PCIEXBAR_LENGTH;
        if pciexbar & spec::PCIEXBAR_ENABLE == 0 || length == spec::PCIEXBAR_LENGTH {
            return None;
        }
        let size = spec::PCIEXBAR_LONGEST >> length;
        Some(Region {
            number: ECAM_REGION,
            space: Space::Memory,
            base: pciexbar & !(size - 1),
            size,
        })
    }

    /// The present configuration space.
    #[must_use]
    pub fn save(&self) -> ConfigSpaceState {
        self.config().save()
    }

    /// Takes a saved configuration space. The ECAM window moves with the next change on the bus.
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

impl PciDevice for HostBridge {
    fn config_read(&self, offset: u16, data: &mut [u8]) {
        self.config().read(offset, data);
    }

    fn config_write(&self, offset: u16, data: &[u8]) -> ConfigWrite {
        self.config().write(offset, data);
        if offset > u16::from(COMMAND) {
            ConfigWrite::RegionsChanged
        } else {
            ConfigWrite::Stored
        }
    }

    fn regions(&self) -> Vec<Region> {
        self.ecam().into_iter().collect()
    }

    fn region_read(&self, _number: u8, offset: u64, data: &mut [u8]) {
        match (self.bus.upgrade(), ecam_target(offset, data.len())) {
            (Some(bus), Some((at, register))) => bus.config_read(at, register, data),
            _ => data.fill(0xff),
        }
    }

    fn region_write(&self, _number: u8, offset: u64, data: &[u8]) {
        if let (Some(bus), Some((at, register))) =
            (self.bus.upgrade(), ecam_target(offset, data.len()))
        {
            bus.config_write(at, register, data);
        }
    }

    fn reset(&self) -> Option<Box<dyn Pending>> {
        self.config().reset();
        None
    }
}

/// Decodes an ECAM access; `None` if it leaves its function.
fn ecam_target(offset: u64, length: usize) -> Option<(BusDeviceFunction, u16)> {
    let function = u16::try_from(offset >> 12).ok()?;
    let register = (offset & u64::from(EXTENDED_CONFIG_SPACE_SIZE - 1)) as u16;
    let end = usize::from(register).checked_add(length)?;
    (end <= usize::from(EXTENDED_CONFIG_SPACE_SIZE))
        .then_some((BusDeviceFunction::from_routing_id(function), register))
}
