//! The 256 bytes of configuration space of one function (PCI Local Bus 3.0 §6.1, header type 0).
//!
//! ```text
//! 00  identity, COMMAND, STATUS, class      which bits software can change is said by one mask a byte; everything else is
//! 10  BAR0 … BAR5                           read-only. Sizing a BAR needs no code: its low address bits are not writable.
//! 34  capabilities pointer ──┐
//! 3c  interrupt line, pin    │
//! 40  capability ── next ──> capability …   laid out by [`ConfigSpace::add_capability`], each at a multiple of 4
//! ```
//!
//! The file has no side effects: its owner compares registers before and after a write and acts on what changed.

use serde::{Deserialize, Serialize};

use super::bits::{
    BAR_COUNT, BAR_IO, BAR_IO_ADDRESS, BAR_MEMORY_64, BAR_MEMORY_ADDRESS, BAR_PREFETCHABLE, BAR0,
    CAPABILITIES_POINTER, CLASS_CODE, COMMAND, CONFIG_SPACE_SIZE, Command, DEVICE_ID, HEADER_END,
    INTERRUPT_LINE, INTERRUPT_PIN, REVISION_ID, STATUS, SUBSYSTEM_ID, SUBSYSTEM_VENDOR_ID, Status,
    VENDOR_ID,
};
use super::{IntxPin, Region, Space};

/// Who the function is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Vendor ID.
    pub vendor: u16,
    /// Device ID.
    pub device: u16,
    /// Revision ID.
    pub revision: u8,
    /// Class, sub-class and programming interface, as `0xCCSSPP`.
    pub class: u32,
    /// Subsystem vendor ID.
    pub subsystem_vendor: u16,
    /// Subsystem ID.
    pub subsystem: u16,
}

/// What kind of range a BAR asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BarKind {
    /// I/O ports.
    Io,
    /// Memory below 4 GiB.
    Memory32,
    /// Memory anywhere; takes two registers.
    Memory64,
    /// Memory anywhere without read side effects; takes two registers.
    Memory64Prefetchable,
}

/// A mistake of the device model in laying out its configuration space.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    /// The BAR does not exist, is taken, or its size is no power of two in range.
    #[error("BAR {index} of {size:#x} bytes cannot be laid out")]
    Bar {
        /// Which BAR.
        index: u8,
        /// Its size in bytes.
        size: u64,
    },
    /// The capabilities do not fit into 256 bytes, or a mask is longer than its capability.
    #[error("capability {id:#04x} of {length} bytes cannot be laid out")]
    Capability {
        /// Capability ID.
        id: u8,
        /// Its bytes, with ID and next pointer.
        length: usize,
    },
}

/// A saved configuration space does not belong to this function.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigStateError {
    /// It is not 256 bytes long.
    #[error("the saved configuration space has {0} bytes instead of {CONFIG_SPACE_SIZE}")]
    Length(usize),
    /// A read-only bit differs.
    #[error("the saved configuration space is another function's: read-only bits differ at {0:#x}")]
    OtherFunction(u8),
}

/// Configuration space as it is saved: all 256 bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConfigSpaceState {
    /// The bytes as the guest would read them.
    pub bytes: Vec<u8>,
}

/// Configuration space of one function.
#[derive(Clone, Debug)]
pub struct ConfigSpace {
    bytes: [u8; CONFIG_SPACE_SIZE],
    /// One bit for each that software can change.
    writable: [u8; CONFIG_SPACE_SIZE],
    /// What [`ConfigSpace::reset`] returns to.
    power_on: [u8; CONFIG_SPACE_SIZE],
    bars: [Option<Bar>; BAR_COUNT],
    /// Where the pointer to the next capability is to be written.
    link: u8,
    /// First free byte for capabilities.
    free: usize,
}

#[derive(Clone, Copy, Debug)]
struct Bar {
    kind: BarKind,
    size: u64,
}

impl ConfigSpace {
    /// A function without BARs, capabilities and interrupt pin.
    #[must_use]
    pub fn new(identity: Identity) -> ConfigSpace {
        let mut config = ConfigSpace {
            bytes: [0; CONFIG_SPACE_SIZE],
            writable: [0; CONFIG_SPACE_SIZE],
            power_on: [0; CONFIG_SPACE_SIZE],
            bars: [None; BAR_COUNT],
            link: CAPABILITIES_POINTER,
            free: usize::from(HEADER_END),
        };
        config.define(VENDOR_ID, &identity.vendor.to_le_bytes());
        config.define(DEVICE_ID, &identity.device.to_le_bytes());
        config.define(REVISION_ID, &[identity.revision]);
        config.define(CLASS_CODE, &identity.class.to_le_bytes()[..3]);
        config.define(
            SUBSYSTEM_VENDOR_ID,
            &identity.subsystem_vendor.to_le_bytes(),
        );
        config.define(SUBSYSTEM_ID, &identity.subsystem.to_le_bytes());
        // Space enables become writable with the first BAR that needs them.
        let command = Command::all() - Command::IO - Command::MEMORY;
        config.make_writable(COMMAND, &command.bits().to_le_bytes());
        config.make_writable(INTERRUPT_LINE, &[0xff]);
        config
    }

    /// Gives the function an interrupt pin.
    pub fn set_interrupt_pin(&mut self, pin: IntxPin) {
        self.define(INTERRUPT_PIN, &[pin.register()]);
    }

    /// Sets register bytes as they are after power-on. They stay read-only unless [`ConfigSpace::make_writable`] says otherwise.
    pub fn define(&mut self, offset: u8, value: &[u8]) {
        copy_in(&mut self.bytes, offset, value);
        copy_in(&mut self.power_on, offset, value);
    }

    /// Lets software change the bits of `mask` at `offset`.
    pub fn make_writable(&mut self, offset: u8, mask: &[u8]) {
        for (writable, mask) in self.writable.iter_mut().skip(offset.into()).zip(mask) {
            *writable |= mask;
        }
    }

    /// Adds a base address register of `size` bytes, a power of two.
    ///
    /// # Errors
    /// The register does not exist or is in use, or the size is not possible for the kind.
    pub fn add_bar(&mut self, index: u8, kind: BarKind, size: u64) -> Result<(), LayoutError> {
        let wide = matches!(kind, BarKind::Memory64 | BarKind::Memory64Prefetchable);
        let (least, most) = match kind {
            BarKind::Io => (4, 256),
            BarKind::Memory32 => (16, 1 << 31),
            BarKind::Memory64 | BarKind::Memory64Prefetchable => (16, 1 << 62),
        };
        let registers = usize::from(index)..usize::from(index) + if wide { 2 } else { 1 };
        let free = registers.end <= BAR_COUNT
            && !registers
                .clone()
                .any(|register| self.register_is_used(register));
        if !free || !size.is_power_of_two() || !(least..=most).contains(&size) {
            return Err(LayoutError::Bar { index, size });
        }
        let (flags, address, enable) = match kind {
            BarKind::Io => (BAR_IO, BAR_IO_ADDRESS, Command::IO),
            BarKind::Memory32 => (0, BAR_MEMORY_ADDRESS, Command::MEMORY),
            BarKind::Memory64 => (BAR_MEMORY_64, BAR_MEMORY_ADDRESS, Command::MEMORY),
            BarKind::Memory64Prefetchable => {
                let flags = BAR_MEMORY_64 | BAR_PREFETCHABLE;
                (flags, BAR_MEMORY_ADDRESS, Command::MEMORY)
            }
        };
        let mask = !(size - 1) & (u64::from(u32::MAX) << 32 | u64::from(address));
        let offset = BAR0 + 4 * index;
        self.define(offset, &flags.to_le_bytes());
        self.make_writable(offset, &mask.to_le_bytes()[..4 * registers.len()]);
        self.make_writable(COMMAND, &enable.bits().to_le_bytes());
        self.bars[registers.start] = Some(Bar { kind, size });
        Ok(())
    }

    /// Appends a capability and returns its offset. `body` follows ID and next pointer; `writable` is a mask over `body` and may be
    /// shorter.
    ///
    /// # Errors
    /// It does not fit.
    pub fn add_capability(
        &mut self,
        id: u8,
        body: &[u8],
        writable: &[u8],
    ) -> Result<u8, LayoutError> {
        let length = body.len().saturating_add(2);
        let end = self.free.saturating_add(length);
        let offset = u8::try_from(self.free).ok();
        let (Some(offset), true) = (
            offset,
            end <= CONFIG_SPACE_SIZE && writable.len() <= body.len(),
        ) else {
            return Err(LayoutError::Capability { id, length });
        };
        self.define(self.link, &[offset]);
        self.define(offset, &[id, 0]);
        self.define(offset + 2, body);
        self.make_writable(offset + 2, writable);
        self.define(STATUS, &Status::CAPABILITIES_LIST.bits().to_le_bytes());
        self.link = offset + 1;
        self.free = end.next_multiple_of(4);
        Ok(offset)
    }

    /// Reads `data.len()` bytes; all ones past the end.
    pub fn read(&self, offset: u16, data: &mut [u8]) {
        let from = usize::from(offset);
        for (at, byte) in data.iter_mut().enumerate() {
            *byte = self.bytes.get(from + at).copied().unwrap_or(0xff);
        }
    }

    /// Changes the writable bits among `data`.
    pub fn write(&mut self, offset: u16, data: &[u8]) {
        let registers = self.bytes.iter_mut().zip(&self.writable);
        for ((byte, writable), new) in registers.skip(offset.into()).zip(data) {
            *byte = (*byte & !writable) | (new & writable);
        }
    }

    /// A 16-bit register.
    #[must_use]
    pub fn u16_at(&self, offset: u8) -> u16 {
        let mut bytes = [0; 2];
        self.read(offset.into(), &mut bytes);
        u16::from_le_bytes(bytes)
    }

    /// A 32-bit register.
    #[must_use]
    pub fn u32_at(&self, offset: u8) -> u32 {
        let mut bytes = [0; 4];
        self.read(offset.into(), &mut bytes);
        u32::from_le_bytes(bytes)
    }

    /// Stores into a register whatever its mask; for what the function itself reports.
    pub fn set(&mut self, offset: u8, value: &[u8]) {
        copy_in(&mut self.bytes, offset, value);
    }

    /// The COMMAND register.
    #[must_use]
    pub fn command(&self) -> Command {
        Command::from_bits_truncate(self.u16_at(COMMAND))
    }

    /// Shows in STATUS whether the function wants its interrupt pin asserted.
    pub fn set_interrupt_status(&mut self, asserted: bool) {
        let mut status = Status::from_bits_retain(self.u16_at(STATUS));
        status.set(Status::INTERRUPT, asserted);
        self.set(STATUS, &status.bits().to_le_bytes());
    }

    /// The BARs that decode now, with their index as region number. A BAR at 0, as after reset, or one that would wrap around does not
    /// decode.
    #[must_use]
    pub fn decoded_bars(&self) -> Vec<Region> {
        let command = self.command();
        let mut regions = Vec::new();
        for (index, bar) in (0_u8..).zip(&self.bars) {
            let Some(Bar { kind, size }) = *bar else {
                continue;
            };
            let offset = BAR0 + 4 * index;
            let low = self.u32_at(offset);
            let (space, enable, base) = match kind {
                BarKind::Io => (Space::Io, Command::IO, u64::from(low & BAR_IO_ADDRESS)),
                BarKind::Memory32 => {
                    let base = u64::from(low & BAR_MEMORY_ADDRESS);
                    (Space::Memory, Command::MEMORY, base)
                }
                BarKind::Memory64 | BarKind::Memory64Prefetchable => {
                    let high = u64::from(self.u32_at(offset + 4)) << 32;
                    let base = high | u64::from(low & BAR_MEMORY_ADDRESS);
                    (Space::Memory, Command::MEMORY, base)
                }
            };
            if command.contains(enable) && base != 0 && base.checked_add(size - 1).is_some() {
                regions.push(Region {
                    number: index,
                    space,
                    base,
                    size,
                });
            }
        }
        regions
    }

    /// Returns every register to its power-on value.
    pub fn reset(&mut self) {
        self.bytes = self.power_on;
    }

    /// The present contents.
    #[must_use]
    pub fn save(&self) -> ConfigSpaceState {
        ConfigSpaceState {
            bytes: self.bytes.to_vec(),
        }
    }

    /// Takes the writable bits of a saved space.
    ///
    /// # Errors
    /// The saved space belongs to another function: nothing is changed.
    pub fn restore(&mut self, state: &ConfigSpaceState) -> Result<(), ConfigStateError> {
        let length = state.bytes.len();
        let saved: &[u8; CONFIG_SPACE_SIZE] = state
            .bytes
            .as_slice()
            .try_into()
            .map_err(|_| ConfigStateError::Length(length))?;
        let mut status = [0; CONFIG_SPACE_SIZE];
        copy_in(&mut status, STATUS, &Status::INTERRUPT.bits().to_le_bytes());
        for (offset, (saved, power_on)) in (0..=u8::MAX).zip(saved.iter().zip(&self.power_on)) {
            let at = usize::from(offset);
            // Reported by the function, so neither writable nor constant.
            let may_differ = self.writable[at] | status[at];
            if (saved ^ power_on) & !may_differ != 0 {
                return Err(ConfigStateError::OtherFunction(offset));
            }
        }
        self.bytes = *saved;
        Ok(())
    }

    fn register_is_used(&self, register: usize) -> bool {
        let upper_half = register.checked_sub(1).is_some_and(|below| {
            matches!(
                self.bars[below],
                Some(Bar {
                    kind: BarKind::Memory64 | BarKind::Memory64Prefetchable,
                    ..
                })
            )
        });
        upper_half || self.bars[register].is_some()
    }
}

fn copy_in(bytes: &mut [u8; CONFIG_SPACE_SIZE], offset: u8, value: &[u8]) {
    for (byte, value) in bytes.iter_mut().skip(offset.into()).zip(value) {
        *byte = *value;
    }
}
