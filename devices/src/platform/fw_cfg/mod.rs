//! The firmware configuration device: how stock firmware learns what machine it is on, and gets its ACPI tables.
//!
//! ```text
//!  0x510  selector   a key; reading starts at the item's beginning
//!  0x511  data       its next byte
//!  0x514  DMA        guest address of a request {control, length, address}; its low half sets it off
//! ```
//!
//! Everything is either a numbered item or a file; key 0x19 lists the files. Firmware reads a table's size there long before it selects
//! the table, so tables that depend on what it does meanwhile are made on selection and padded ([`Item::Built`]).

mod item;
mod spec;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use serde::{Deserialize, Serialize};
use vm_memory::{Bytes, GuestAddress};
use zerocopy::byteorder::big_endian::{U16, U32};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

use self::spec::{DmaAccess, FileEntry, control, key};
use super::lock;
use crate::GuestMemory;
use crate::bus::BusDevice;

pub use self::item::{Build, Item, Written};

/// Numbered items (QEMU `include/standard-headers/linux/qemu_fw_cfg.h` lists all; these are those that firmware on this machine reads).
pub mod number {
    /// Number of processors that are running, 16 bits.
    pub const CPU_COUNT: u16 = 0x05;
    /// Bytes of the kernel behind its setup part, 32 bits.
    pub const KERNEL_SIZE: u16 = 0x08;
    /// Bytes of the initial RAM disk, 32 bits.
    pub const INITRD_SIZE: u16 = 0x0b;
    /// Whether to show a boot menu, 16 bits.
    pub const BOOT_MENU: u16 = 0x0e;
    /// Number of processors that there may be, 16 bits.
    pub const MAX_CPUS: u16 = 0x0f;
    /// The kernel behind its setup part.
    pub const KERNEL_DATA: u16 = 0x11;
    /// The initial RAM disk.
    pub const INITRD_DATA: u16 = 0x12;
    /// Bytes of the kernel command line, its NUL included, 32 bits.
    pub const COMMAND_LINE_SIZE: u16 = 0x14;
    /// The kernel command line and a NUL.
    pub const COMMAND_LINE: u16 = 0x15;
    /// Bytes of the kernel's setup part, 32 bits.
    pub const SETUP_SIZE: u16 = 0x17;
    /// The kernel's setup part.
    pub const SETUP_DATA: u16 = 0x18;
}

/// Bytes moved at a time by DMA.
const CHUNK: usize = 64 * 1024;
/// The most bytes of one DMA request, so that a vCPU is away for a bounded time; firmware asks for the rest again in no case that is
/// known, as no item is larger.
const MOST: u32 = 1 << 30;

/// A file could not be added.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FwCfgError {
    /// Its name is empty, longer than 55 bytes, or holds a NUL.
    #[error("`{0}` is no name for a firmware configuration file: 1 to 55 bytes without NUL")]
    Name(String),
    /// There is one of that name.
    #[error("there are two firmware configuration files `{0}`")]
    Twice(String),
    /// There are too many.
    #[error("more than {0} firmware configuration files")]
    TooMany(usize),
}

/// What the device is made of. Files keep the order in which they are added.
#[derive(Debug, Default)]
pub struct FwCfgItems {
    numbered: BTreeMap<u16, Item>,
    files: Vec<(String, Item)>,
}

impl FwCfgItems {
    /// The most files.
    pub const MAX_FILES: usize = 64;

    /// No items.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets a numbered item (see [`number`]).
    pub fn set(&mut self, number: u16, item: Item) {
        self.numbered.insert(number, item);
    }

    /// Adds a file.
    ///
    /// # Errors
    /// Its name is none or is there already, or there are too many.
    pub fn add_file(&mut self, name: &str, item: Item) -> Result<(), FwCfgError> {
        if name.is_empty() || name.len() >= spec::NAME_BYTES || name.contains('\0') {
            return Err(FwCfgError::Name(name.escape_debug().to_string()));
        }
        if self.files.iter().any(|(other, _)| other == name) {
            return Err(FwCfgError::Twice(name.to_owned()));
        }
        if self.files.len() >= Self::MAX_FILES {
            return Err(FwCfgError::TooMany(Self::MAX_FILES));
        }
        self.files.push((name.to_owned(), item));
        Ok(())
    }

    fn into_keyed(self) -> BTreeMap<u16, Item> {
        let mut items = self.numbered;
        let keys = key::FIRST_FILE..;
        let mut directory = U32::new(self.files.len() as u32).as_bytes().to_vec();
        for (select, (name, item)) in keys.zip(self.files) {
            let mut entry = FileEntry::new_zeroed();
            entry.size = U32::new(item.length());
            entry.select = U16::new(select);
            for (to, from) in entry.name.iter_mut().zip(name.bytes()) {
                *to = from;
            }
            directory.extend_from_slice(entry.as_bytes());
            items.insert(select, item);
        }
        items.insert(key::SIGNATURE, Item::Bytes(spec::SIGNATURE.to_vec()));
        items.insert(key::ID, Item::u32(spec::ID));
        items.insert(key::FILE_DIRECTORY, Item::Bytes(directory));
        items
    }
}

/// What survives a snapshot; the items come from the definition.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FwCfgState {
    /// The selected key.
    pub key: u16,
    /// The next byte of it.
    pub offset: u32,
    /// The DMA address as written so far.
    pub dma_address: u64,
}

struct Registers {
    items: BTreeMap<u16, Item>,
    state: FwCfgState,
}

/// The device.
pub struct FwCfg {
    registers: Mutex<Registers>,
    memory: GuestMemory,
}

impl FwCfg {
    /// Its first port.
    pub const PORT: u16 = spec::PORT;
    /// Ports in its range.
    pub const LEN: u16 = spec::PORTS;

    /// A device that serves `items`, by DMA to and from `memory`.
    #[must_use]
    pub fn new(items: FwCfgItems, memory: GuestMemory) -> Arc<Self> {
        Arc::new(Self {
            registers: Mutex::new(Registers {
                items: items.into_keyed(),
                state: FwCfgState::default(),
            }),
            memory,
        })
    }

    /// Returns to the power-on state.
    pub fn reset(&self) {
        lock(&self.registers).state = FwCfgState::default();
    }

    /// What a snapshot keeps.
    #[must_use]
    pub fn state(&self) -> FwCfgState {
        lock(&self.registers).state.clone()
    }

    /// Takes over a snapshot's state.
    pub fn restore(&self, state: &FwCfgState) {
        let mut registers = lock(&self.registers);
        registers.select(state.key);
        registers.state = state.clone();
    }
}

impl Registers {
    fn select(&mut self, key: u16) {
        self.state.key = key & !key::WRITE_CHANNEL;
        self.state.offset = 0;
        if let Some(item) = self.items.get_mut(&self.state.key) {
            item.select();
        }
    }

    /// The next bytes of the selected item; zero past its end.
    fn read(&mut self, data: &mut [u8]) {
        match self.items.get(&self.state.key) {
            Some(item) => item.read(self.state.offset, data),
            None => data.fill(0),
        }
        self.advance(data.len() as u32);
    }

    fn write(&mut self, data: &[u8]) -> bool {
        let offset = self.state.offset;
        let item = self.items.get_mut(&self.state.key);
        let written = item.is_some_and(|item| item.write(offset, data));
        self.advance(data.len() as u32);
        written
    }

    fn advance(&mut self, bytes: u32) {
        self.state.offset = self.state.offset.saturating_add(bytes);
    }

    /// Performs the request that the guest has put at `at`, and tells it the end.
    fn dma(&mut self, memory: &GuestMemory, at: GuestAddress) {
        let mut request = DmaAccess::new_zeroed();
        if memory.read_slice(request.as_mut_bytes(), at).is_err() {
            // There is no place for an answer either.
            return;
        }
        let done = self.perform(memory, &request);
        let answer = U32::new(if done { 0 } else { control::ERROR });
        // The request was read from there a moment ago.
        let _ = memory.write_slice(answer.as_bytes(), at);
    }

    fn perform(&mut self, memory: &GuestMemory, request: &DmaAccess) -> bool {
        let order = request.control.get();
        if order & control::SELECT != 0 {
            self.select((order >> 16) as u16);
        }
        let length = request.length.get();
        if length > MOST {
            return false;
        }
        if order & (control::READ | control::WRITE) == 0 {
            if order & control::SKIP != 0 {
                self.advance(length);
            }
            return true;
        }
        let reads = order & control::READ != 0;
        let mut chunk = vec![0; CHUNK.min(length as usize)];
        let mut done = 0;
        while done < length {
            let now = (length - done).min(CHUNK as u32);
            let Some(address) = request.address.get().checked_add(done.into()) else {
                return false;
            };
            let chunk = chunk.get_mut(..now as usize).unwrap_or_default();
            let moved = if reads {
                self.read(chunk);
                memory.write_slice(chunk, GuestAddress(address)).is_ok()
            } else {
                memory.read_slice(chunk, GuestAddress(address)).is_ok() && self.write(chunk)
            };
            if !moved {
                return false;
            }
            done += now;
        }
        true
    }
}

impl BusDevice for FwCfg {
    fn read(&self, offset: u64, data: &mut [u8]) {
        let mut registers = lock(&self.registers);
        match (offset, data.len()) {
            (spec::DATA, 1) => registers.read(data),
            (spec::DMA_HIGH..=0xb, _) => {
                for (n, byte) in (offset - spec::DMA_HIGH..).zip(data) {
                    let at = usize::try_from(n).unwrap_or(usize::MAX);
                    *byte = spec::DMA_SIGNATURE.get(at).copied().unwrap_or(0);
                }
            }
            _ => data.fill(0),
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        let mut registers = lock(&self.registers);
        match (offset, data.len()) {
            (0, 2) => {
                if let Ok(key) = <[u8; 2]>::try_from(data) {
                    registers.select(u16::from_le_bytes(key));
                }
            }
            (spec::DMA_HIGH, 4) => {
                if let Ok(high) = U32::read_from_bytes(data) {
                    registers.state.dma_address = u64::from(high.get()) << 32;
                }
            }
            (spec::DMA_LOW, 4) => {
                if let Ok(low) = U32::read_from_bytes(data) {
                    let high = registers.state.dma_address;
                    // The next request begins with a high half of zero (specification, "DMA interface").
                    registers.state.dma_address = 0;
                    registers.dma(&self.memory, GuestAddress(high | u64::from(low.get())));
                }
            }
            // Writing data byte by byte has ended with the interface's first version.
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests;
