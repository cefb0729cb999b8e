//! Configuration mechanism #1 (PCI Local Bus 3.0 §3.2.2.3.2): the address port 0xcf8 and the data port 0xcfc.
//!
//! ```text
//! CONFIG_ADDRESS  [31] enable  [23:8] bus, device, function  [7:2] register     only as one 32-bit access at 0xcf8
//! CONFIG_DATA     four bytes at 0xcfc that are the register addressed           1, 2 or 4 bytes
//! ```
//!
//! Narrower accesses below 0xcfc are not configuration accesses: the byte at 0xcf9 is the chipset's reset control register, which is
//! passed on.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Weak};

use super::{BusDeviceFunction, PciBus};
use crate::bus::{Bus, BusDevice, BusError};

/// First of the eight ports.
pub const CONFIG_ADDRESS_PORT: u64 = 0xcf8;
const PORTS: u64 = 8;
const RESET_CONTROL: u64 = 1;
const CONFIG_DATA: u64 = 4;
const ENABLE: u32 = 1 << 31;
/// All but the reserved bits 30:24 and 1:0.
const ADDRESS_WRITABLE: u32 = 0x80ff_fffc;

/// The two configuration ports.
pub struct ConfigPorts {
    /// The bus holds the port space, and with it this.
    bus: Weak<PciBus>,
    address: AtomicU32,
    reset_control: Arc<dyn BusDevice>,
}

impl ConfigPorts {
    /// Inserts the ports at 0xcf8..=0xcff of `io`. Byte accesses to port 0xcf9 go to `reset_control`, at offset 0.
    ///
    /// # Errors
    /// Something else has one of these ports.
    pub fn attach(
        bus: &Arc<PciBus>,
        io: &Bus,
        reset_control: Arc<dyn BusDevice>,
    ) -> Result<Arc<ConfigPorts>, BusError> {
        let ports = Arc::new(ConfigPorts {
            bus: Arc::downgrade(bus),
            address: AtomicU32::new(0),
            reset_control,
        });
        let device: Arc<dyn BusDevice> = Arc::clone(&ports) as _;
        io.insert(CONFIG_ADDRESS_PORT, PORTS, device)?;
        Ok(ports)
    }

    /// CONFIG_ADDRESS, to be saved.
    #[must_use]
    pub fn address(&self) -> u32 {
        self.address.load(Ordering::Relaxed)
    }

    /// Stores CONFIG_ADDRESS, as the guest's write would; 0 is its power-on value.
    pub fn set_address(&self, address: u32) {
        self.address
            .store(address & ADDRESS_WRITABLE, Ordering::Relaxed);
    }

    /// The register that a data access of `length` bytes at port offset `offset` means.
    fn target(&self, offset: u64, length: usize) -> Option<(Arc<PciBus>, BusDeviceFunction, u16)> {
        let address = self.address();
        let byte = offset.checked_sub(CONFIG_DATA)?;
        let within = matches!(length, 1 | 2 | 4) && byte.checked_add(length as u64)? <= 4;
        if address & ENABLE == 0 || !within {
            return None;
        }
        let at = BusDeviceFunction::from_routing_id((address >> 8 & 0xffff) as u16);
        Some((
            self.bus.upgrade()?,
            at,
            (address & 0xfc) as u16 + byte as u16,
        ))
    }
}

impl BusDevice for ConfigPorts {
    fn read(&self, offset: u64, data: &mut [u8]) {
        if let (0, Ok(word)) = (offset, <&mut [u8; 4]>::try_from(&mut *data)) {
            *word = self.address().to_le_bytes();
        } else if let (RESET_CONTROL, 1) = (offset, data.len()) {
            self.reset_control.read(0, data);
        } else if let Some((bus, at, register)) = self.target(offset, data.len()) {
            bus.config_read(at, register, data);
        } else {
            data.fill(0xff);
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        if let (0, Ok(word)) = (offset, <[u8; 4]>::try_from(data)) {
            self.set_address(u32::from_le_bytes(word));
        } else if let (RESET_CONTROL, 1) = (offset, data.len()) {
            self.reset_control.write(0, data);
        } else if let Some((bus, at, register)) = self.target(offset, data.len()) {
            bus.config_write(at, register, data);
        }
    }
}
