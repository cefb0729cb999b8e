//! PCI: the root bus, its functions' configuration space and the address ranges they decode.
//!
//! Follows PCI Local Bus 3.0 and, for ECAM, PCI Express Base 4.0 §7.2.2.
//!
//! ```text
//!  0xcf8/0xcfc ──> ConfigPorts ─┐                          ┌─> HostBridge   00:00.0   its region: ECAM
//!  ECAM ────────> HostBridge ───┴─> PciBus ──> PciDevice ──┼─> Lpc          00:1f.0   its region: PM block
//!                                     │                    └─> VirtioPci    00:01.0 … its region: BAR 0
//!                                     │ regions() changed?
//!                                     └──> Bus (memory, I/O): removed at the old address, inserted at the new one
//! ```
//!
//! A function says which [`Region`]s it decodes now; the bus compares that with what is mapped whenever a configuration write may have
//! changed it. BARs, the movable ECAM and PMBASE are all handled by this one mechanism. A region that would overlap another's stays
//! unmapped until that one moves away.

pub mod assign;
pub mod bits;
pub mod config;
pub mod host;
pub mod lpc;
pub mod msix;
pub mod ports;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant};

use drover_arch::layout;

use crate::bus::{Bus, BusDevice};
use crate::virtio::Pending;

/// Where a function sits: its 16-bit routing ID (bus 8, device 5, function 3 bits).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BusDeviceFunction(u16);

impl BusDeviceFunction {
    /// Function `function` (0..=7) of device `device` (0..=31) on bus `bus`.
    #[must_use]
    pub const fn new(bus: u8, device: u8, function: u8) -> Option<BusDeviceFunction> {
        if device > 31 || function > 7 {
            return None;
        }
        Some(BusDeviceFunction(
            (bus as u16) << 8 | (device as u16) << 3 | function as u16,
        ))
    }

    /// From a routing ID, as configuration addresses carry it.
    #[must_use]
    pub const fn from_routing_id(id: u16) -> BusDeviceFunction {
        BusDeviceFunction(id)
    }

    /// The routing ID.
    #[must_use]
    pub const fn routing_id(self) -> u16 {
        self.0
    }

    /// Bus number.
    #[must_use]
    pub const fn bus(self) -> u8 {
        (self.0 >> 8) as u8
    }

    /// Device number, 0..=31.
    #[must_use]
    pub const fn device(self) -> u8 {
        (self.0 >> 3 & 0x1f) as u8
    }

    /// Function number, 0..=7.
    #[must_use]
    pub const fn function(self) -> u8 {
        (self.0 & 7) as u8
    }
}

impl fmt::Display for BusDeviceFunction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (bus, device, function) = (self.bus(), self.device(), self.function());
        write!(f, "{bus:02x}:{device:02x}.{function}")
    }
}

impl fmt::Debug for BusDeviceFunction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A function's interrupt pin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IntxPin {
    /// INTA#
    A,
    /// INTB#
    B,
    /// INTC#
    C,
    /// INTD#
    D,
}

impl IntxPin {
    /// The value of the Interrupt Pin register.
    #[must_use]
    pub const fn register(self) -> u8 {
        self as u8 + 1
    }
}

/// The I/O APIC input that `pin` of a function on the root bus is wired to: 16..=23, as the DSDT's `_PRT` says.
#[must_use]
pub fn intx_gsi(at: BusDeviceFunction, pin: IntxPin) -> u32 {
    layout::gsi::pci_intx(at.device(), pin as u8)
}

/// Which address space a region is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Space {
    /// I/O ports.
    Io,
    /// Memory.
    Memory,
}

/// A range of addresses that a function decodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Region {
    /// Which of the function's ranges: the BAR's number, or a number of the function's choice.
    pub number: u8,
    /// Its address space.
    pub space: Space,
    /// First address.
    pub base: u64,
    /// Bytes.
    pub size: u64,
}

/// What a configuration write did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum ConfigWrite {
    /// [`PciDevice::regions`] is as before.
    Stored,
    /// [`PciDevice::regions`] may have changed.
    RegionsChanged,
}

/// A PCI function. Called on vCPU threads, several at once.
pub trait PciDevice: Send + Sync {
    /// Reads configuration space at `offset` (below 4096); all ones past its end.
    fn config_read(&self, offset: u16, data: &mut [u8]);

    /// Writes configuration space at `offset` (below 4096).
    fn config_write(&self, offset: u16, data: &[u8]) -> ConfigWrite;

    /// The ranges decoded now.
    fn regions(&self) -> Vec<Region>;

    /// Reads at `offset` of a region.
    fn region_read(&self, number: u8, offset: u64, data: &mut [u8]);

    /// Writes at `offset` of a region.
    fn region_write(&self, number: u8, offset: u64, data: &[u8]);

    /// Says where a region is reachable, just after it was mapped or just before it is unmapped (`None`).
    fn region_moved(&self, number: u8, base: Option<u64>) {
        let _ = (number, base);
    }

    /// Returns the function to its power-on state. What ends later than this call is in the answer.
    fn reset(&self) -> Option<Box<dyn Pending>>;
}

/// Why a function could not be put on the bus, or the bus not be reset.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PciError {
    /// There is a function already.
    #[error("{0} is occupied")]
    Occupied(BusDeviceFunction),
    /// Only bus 0 exists.
    #[error("{0} is not on the root bus")]
    NotOnRootBus(BusDeviceFunction),
    /// There is no function.
    #[error("{0} is empty")]
    Empty(BusDeviceFunction),
    /// Devices did not let go of their queues in time.
    #[error("still busy after a reset: {0:?}")]
    ResetTimedOut(Vec<BusDeviceFunction>),
    /// The windows are too small.
    #[error("{at}: no room for BAR {bar} of {size:#x} bytes in the PCI windows")]
    NoRoom {
        /// Which function.
        at: BusDeviceFunction,
        /// Which BAR.
        bar: u8,
        /// Its size in bytes.
        size: u64,
    },
}

/// The root bus: its functions, and the mapping of their regions into the address spaces.
pub struct PciBus {
    memory: Arc<Bus>,
    io: Arc<Bus>,
    functions: RwLock<BTreeMap<BusDeviceFunction, Arc<dyn PciDevice>>>,
    /// What is mapped. Held while mappings change, never during a function's register access.
    mapped: Mutex<BTreeMap<BusDeviceFunction, Vec<Region>>>,
}

impl PciBus {
    /// A bus without functions, whose functions' regions appear in the spaces given.
    #[must_use]
    pub fn new(memory: Arc<Bus>, io: Arc<Bus>) -> Arc<PciBus> {
        Arc::new(PciBus {
            memory,
            io,
            functions: RwLock::default(),
            mapped: Mutex::default(),
        })
    }

    /// Puts a function on the bus; the guest can see it from now on.
    ///
    /// # Errors
    /// The place is taken or not on bus 0.
    pub fn add(&self, at: BusDeviceFunction, device: Arc<dyn PciDevice>) -> Result<(), PciError> {
        if at.bus() != 0 {
            return Err(PciError::NotOnRootBus(at));
        }
        {
            let mut functions = self
                .functions
                .write()
                .unwrap_or_else(PoisonError::into_inner);
            if functions.contains_key(&at) {
                return Err(PciError::Occupied(at));
            }
            functions.insert(at, device);
        }
        self.update_mappings();
        Ok(())
    }

    /// Takes a function off the bus and unmaps what it decoded.
    ///
    /// # Errors
    /// There is none.
    pub fn remove(&self, at: BusDeviceFunction) -> Result<Arc<dyn PciDevice>, PciError> {
        let removed = self
            .functions
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .remove(&at)
            .ok_or(PciError::Empty(at))?;
        let mut mapped = self.mapped();
        for region in mapped.remove(&at).unwrap_or_default() {
            self.unmap(removed.as_ref(), region);
        }
        drop(mapped);
        self.update_mappings();
        Ok(removed)
    }

    /// The functions, ascending.
    #[must_use]
    pub fn functions(&self) -> Vec<(BusDeviceFunction, Arc<dyn PciDevice>)> {
        let functions = self
            .functions
            .read()
            .unwrap_or_else(PoisonError::into_inner);
        functions
            .iter()
            .map(|(at, device)| (*at, Arc::clone(device)))
            .collect()
    }

    /// Reads configuration space; all ones where no function is.
    pub fn config_read(&self, at: BusDeviceFunction, offset: u16, data: &mut [u8]) {
        match self.function(at) {
            Some(device) => device.config_read(offset, data),
            None => data.fill(0xff),
        }
    }

    /// Writes configuration space and moves regions accordingly.
    pub fn config_write(&self, at: BusDeviceFunction, offset: u16, data: &[u8]) {
        let Some(device) = self.function(at) else {
            return;
        };
        match device.config_write(offset, data) {
            ConfigWrite::Stored => {}
            ConfigWrite::RegionsChanged => self.update_mappings(),
        }
    }

    /// Returns every function to its power-on state and waits at most `timeout` for all of them together. For the VMM, while no vCPU
    /// runs. BARs are unassigned afterwards.
    ///
    /// # Errors
    /// Some device was still using guest memory when time ran out.
    pub fn reset_all(&self, timeout: Duration) -> Result<(), PciError> {
        let deadline = Instant::now() + timeout;
        let resets: Vec<_> = self
            .functions()
            .into_iter()
            .filter_map(|(at, device)| Some((at, device.reset()?)))
            .collect();
        self.update_mappings();
        let late: Vec<_> = resets
            .into_iter()
            .filter(|(_, pending)| {
                !pending.wait(deadline.saturating_duration_since(Instant::now()))
            })
            .map(|(at, _)| at)
            .collect();
        if late.is_empty() {
            Ok(())
        } else {
            Err(PciError::ResetTimedOut(late))
        }
    }

    /// Where a function's region is mapped now; `None` if it does not decode or something is in its way.
    #[must_use]
    pub fn mapped_region(&self, at: BusDeviceFunction, number: u8) -> Option<Region> {
        let mapped = self.mapped();
        let regions = mapped.get(&at)?;
        regions.iter().find(|r| r.number == number).copied()
    }

    fn function(&self, at: BusDeviceFunction) -> Option<Arc<dyn PciDevice>> {
        let functions = self
            .functions
            .read()
            .unwrap_or_else(PoisonError::into_inner);
        functions.get(&at).cloned()
    }

    /// Brings the address spaces in line with what all functions decode: first everything goes that is no longer decoded, then
    /// everything comes that is. That frees an address before its next owner asks for it.
    pub fn update_mappings(&self) {
        // Taken before the functions are asked, so that of two concurrent changes the later one sees both.
        let mut mapped = self.mapped();
        let wanted: Vec<_> = self
            .functions()
            .into_iter()
            .map(|(at, device)| {
                let regions = device.regions();
                (at, device, regions)
            })
            .collect();
        for (at, device, wanted) in &wanted {
            let present = mapped.entry(*at).or_default();
            present.retain(|region| {
                let stays = wanted.contains(region);
                if !stays {
                    self.unmap(device.as_ref(), *region);
                }
                stays
            });
        }
        for (at, device, wanted) in wanted {
            let present = mapped.entry(at).or_default();
            for region in wanted {
                if !present.contains(&region) && self.map(at, &device, region) {
                    present.push(region);
                }
            }
        }
    }

    fn map(&self, at: BusDeviceFunction, device: &Arc<dyn PciDevice>, region: Region) -> bool {
        let access = RegionAccess {
            device: Arc::clone(device),
            number: region.number,
        };
        let bus = self.space(region.space);
        match bus.insert(region.base, region.size, Arc::new(access)) {
            Ok(()) => {
                device.region_moved(region.number, Some(region.base));
                true
            }
            Err(error) => {
                tracing::debug!(function = %at, %error, "a region is not reachable where it was put");
                false
            }
        }
    }

    fn unmap(&self, device: &dyn PciDevice, region: Region) {
        device.region_moved(region.number, None);
        if let Err(error) = self.space(region.space).remove(region.base) {
            tracing::error!(%error, "a mapped region was not on the bus");
        }
    }

    fn space(&self, space: Space) -> &Bus {
        match space {
            Space::Io => &self.io,
            Space::Memory => &self.memory,
        }
    }

    fn mapped(&self) -> MutexGuard<'_, BTreeMap<BusDeviceFunction, Vec<Region>>> {
        self.mapped.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Turns accesses at a mapped region into accesses of its function.
struct RegionAccess {
    device: Arc<dyn PciDevice>,
    number: u8,
}

impl BusDevice for RegionAccess {
    fn read(&self, offset: u64, data: &mut [u8]) {
        self.device.region_read(self.number, offset, data);
    }

    fn write(&self, offset: u64, data: &[u8]) {
        self.device.region_write(self.number, offset, data);
    }
}
