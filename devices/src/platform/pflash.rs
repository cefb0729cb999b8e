//! Parallel NOR flash, eight bits wide, with the Intel command set (Common Flash Interface, primary command set 0001h): where stock
//! firmware keeps its variables.
//!
//! ```text
//!            any write                    0xff
//!   array ─────────────> command mode ───────────> array
//!   (memory: reads do      (every access is an exit: reads give status,
//!    not leave the guest)   identification, query or the array)
//!
//!   0x10/0x40 byte            program: bits go from 1 to 0
//!   0x20 … 0xd0               erase a block: every bit becomes 1
//!   0xe8 count bytes… 0xd0    program up to a buffer of bytes
//!   0x50  0x70  0x90  0x98    clear status, read status, read identification, query
//! ```
//!
//! The switch between the two is a [`Window`], so that the state machine needs no hypervisor. What is programmed or erased is in the
//! [`Store`] when the write returns, and durable when the driver returns to the array: a power cut loses at most what the driver has
//! not read back, as with a chip.

use std::io;
use std::sync::{Arc, Mutex};

use serde::{Deserialize, Serialize};

use super::lock;
use crate::bus::BusDevice;

/// Commands and answers (Intel StrataFlash 28F128J3 data sheet; JESD68.01 for the query).
mod spec {
    pub(super) const PROGRAM: u8 = 0x10;
    pub(super) const PROGRAM_ALTERNATE: u8 = 0x40;
    pub(super) const ERASE: u8 = 0x20;
    pub(super) const CLEAR_STATUS: u8 = 0x50;
    pub(super) const READ_STATUS: u8 = 0x70;
    pub(super) const READ_ID: u8 = 0x90;
    pub(super) const QUERY: u8 = 0x98;
    pub(super) const BUFFERED: u8 = 0xe8;
    pub(super) const CONFIRM: u8 = 0xd0;
    pub(super) const READ_ARRAY: u8 = 0xff;

    /// Status: nothing is under way. Clearing the status clears it too, until the next operation; firmware tells a flash from RAM and
    /// from ROM by that.
    pub(super) const READY: u8 = 1 << 7;
    /// Status: an erase failed.
    pub(super) const ERASE_ERROR: u8 = 1 << 5;
    /// Status: programming failed. With [`ERASE_ERROR`]: a wrong sequence of commands.
    pub(super) const PROGRAM_ERROR: u8 = 1 << 4;

    /// Intel's manufacturer code and the device code of a 28F128J3.
    pub(super) const ID: [u8; 2] = [0x89, 0x18];
    /// log2 of the write buffer's bytes.
    pub(super) const BUFFER_BITS: u8 = 5;
}

/// Bytes of a block, the unit of erasing.
pub const BLOCK_BYTES: u64 = 4096;
/// Bytes of the write buffer.
const BUFFER_BYTES: usize = 1 << spec::BUFFER_BITS;

/// What the flash's bytes are kept in.
pub trait Store: Send {
    /// Bytes in total; a multiple of [`BLOCK_BYTES`].
    fn len(&self) -> u64;
    /// Reads bytes inside the store.
    fn read(&self, at: u64, bytes: &mut [u8]);
    /// Replaces bytes inside the store, so that the end of this process does not lose them.
    ///
    /// # Errors
    /// The host failed; the old bytes are still there.
    fn write(&mut self, at: u64, bytes: &[u8]) -> io::Result<()>;
    /// Makes what was written durable.
    ///
    /// # Errors
    /// The host failed.
    fn sync(&mut self) -> io::Result<()>;
    /// Whether there are no bytes.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Where the guest sees the flash.
pub trait Window: Send {
    /// Serves reads from memory (`true`) or as exits to [`BusDevice::read`]. Writes are always exits.
    ///
    /// # Errors
    /// The hypervisor refused; nothing has changed.
    fn as_memory(&mut self, memory: bool) -> io::Result<()>;
}

/// What the next access means.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Mode {
    /// Reads give the array.
    Array,
    /// Reads give the status.
    Status,
    /// Reads give manufacturer and device.
    Identification,
    /// Reads give the query table.
    Query,
    /// The next write is a byte to program.
    Program,
    /// The next write confirms the erasing of the block that it addresses.
    Erase,
    /// The next write is the number of bytes less one.
    BufferCount,
    /// So many writes are bytes to program, in the block at `block`.
    Buffer {
        /// First byte of the block.
        block: u64,
        /// Writes still to come.
        left: usize,
        /// Where each byte goes.
        bytes: Vec<(u64, u8)>,
    },
}

/// What survives a snapshot, beside the store's bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FlashState {
    /// What the next access means.
    pub mode: Mode,
    /// The status register.
    pub status: u8,
}

struct Chip {
    store: Box<dyn Store>,
    window: Box<dyn Window>,
    query: Vec<u8>,
    mode: Mode,
    status: u8,
    unsynced: bool,
}

/// A flash chip.
pub struct Flash {
    chip: Mutex<Chip>,
}

impl Flash {
    /// A chip that shows its array.
    ///
    /// # Errors
    /// The store is empty or no multiple of [`BLOCK_BYTES`], or the hypervisor refuses to show it.
    pub fn new(store: Box<dyn Store>, mut window: Box<dyn Window>) -> io::Result<Arc<Self>> {
        let length = store.len();
        if length == 0 || !length.is_multiple_of(BLOCK_BYTES) {
            let why = format!("a flash of {length} bytes: not a multiple of {BLOCK_BYTES}");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        }
        window.as_memory(true)?;
        Ok(Arc::new(Self {
            chip: Mutex::new(Chip {
                query: query_table(length),
                store,
                window,
                mode: Mode::Array,
                status: spec::READY,
                unsynced: false,
            }),
        }))
    }

    /// Returns to the power-on state; the array stays.
    ///
    /// # Errors
    /// The hypervisor refused to show the array.
    pub fn reset(&self) -> io::Result<()> {
        let mut chip = lock(&self.chip);
        chip.status = spec::READY;
        chip.show_array()
    }

    /// What a snapshot keeps.
    #[must_use]
    pub fn state(&self) -> FlashState {
        let chip = lock(&self.chip);
        FlashState {
            mode: chip.mode.clone(),
            status: chip.status,
        }
    }

    /// Takes over a snapshot's state.
    ///
    /// # Errors
    /// It names bytes outside the chip, or the hypervisor refused.
    pub fn restore(&self, state: &FlashState) -> io::Result<()> {
        let mut chip = lock(&self.chip);
        if let Mode::Buffer { block, left, bytes } = &state.mode {
            let inside = |at: u64| at / BLOCK_BYTES == block / BLOCK_BYTES;
            let fits = block % BLOCK_BYTES == 0
                && *block < chip.store.len()
                && left.saturating_add(bytes.len()) <= BUFFER_BYTES
                && bytes.iter().all(|(at, _)| inside(*at));
            if !fits {
                let why = "a flash's write buffer lies outside of its block";
                return Err(io::Error::new(io::ErrorKind::InvalidData, why));
            }
        }
        chip.window.as_memory(state.mode == Mode::Array)?;
        chip.mode = state.mode.clone();
        chip.status = state.status;
        Ok(())
    }
}

impl Chip {
    fn show_array(&mut self) -> io::Result<()> {
        if self.unsynced {
            // The driver is done with a change: what it reads from now on is there after a power cut too.
            match self.store.sync() {
                Ok(()) => self.unsynced = false,
                Err(error) => {
                    tracing::error!(%error, "firmware variables may not survive a power cut");
                }
            }
        }
        if self.mode != Mode::Array {
            self.window.as_memory(true)?;
            self.mode = Mode::Array;
        }
        Ok(())
    }

    fn read(&self, at: u64, data: &mut [u8]) {
        match self.mode {
            Mode::Array => self.read_array(at, data),
            Mode::Identification => {
                for (n, byte) in (at..).zip(data) {
                    *byte = spec::ID.get((n & 0xff) as usize).copied().unwrap_or(0);
                }
            }
            Mode::Query => {
                for (n, byte) in (at..).zip(data) {
                    *byte = self.query.get((n & 0xff) as usize).copied().unwrap_or(0);
                }
            }
            _ => data.fill(self.status),
        }
    }

    fn read_array(&self, at: u64, data: &mut [u8]) {
        data.fill(0xff);
        let inside = self.store.len().saturating_sub(at);
        let inside = usize::try_from(inside).unwrap_or(usize::MAX);
        let length = data.len().min(inside);
        if let Some(data) = data.get_mut(..length) {
            self.store.read(at, data);
        }
    }

    /// One write of one byte: the chip is eight bits wide.
    fn write(&mut self, at: u64, byte: u8) {
        if at >= self.store.len() {
            return;
        }
        self.mode = match std::mem::replace(&mut self.mode, Mode::Status) {
            Mode::Program => {
                self.program(&[(at, byte)]);
                Mode::Status
            }
            Mode::Erase if byte == spec::CONFIRM => {
                self.erase(at - at % BLOCK_BYTES);
                Mode::Status
            }
            Mode::BufferCount if usize::from(byte) < BUFFER_BYTES => Mode::Buffer {
                block: at - at % BLOCK_BYTES,
                left: usize::from(byte) + 1,
                bytes: Vec::with_capacity(BUFFER_BYTES),
            },
            Mode::Buffer {
                block,
                left,
                mut bytes,
            } if left > 0 && at - at % BLOCK_BYTES == block => {
                bytes.push((at, byte));
                Mode::Buffer {
                    block,
                    left: left - 1,
                    bytes,
                }
            }
            Mode::Buffer { left: 0, bytes, .. } if byte == spec::CONFIRM => {
                self.program(&bytes);
                Mode::Status
            }
            Mode::Erase | Mode::BufferCount | Mode::Buffer { .. } => {
                // A wrong sequence (data sheet, table "status register definitions").
                self.status |= spec::READY | spec::ERASE_ERROR | spec::PROGRAM_ERROR;
                Mode::Status
            }
            before @ (Mode::Array | Mode::Status | Mode::Identification | Mode::Query) => {
                self.command(byte, before)
            }
        };
    }

    fn command(&mut self, byte: u8, before: Mode) -> Mode {
        match byte {
            spec::PROGRAM | spec::PROGRAM_ALTERNATE => Mode::Program,
            spec::ERASE => Mode::Erase,
            spec::BUFFERED => {
                self.status |= spec::READY;
                Mode::BufferCount
            }
            spec::CLEAR_STATUS => {
                self.status = 0;
                Mode::Status
            }
            spec::READ_STATUS => Mode::Status,
            spec::READ_ID => Mode::Identification,
            spec::QUERY => Mode::Query,
            spec::READ_ARRAY => Mode::Array,
            // Nothing that this chip knows: it stays as it was.
            _ => before,
        }
    }

    /// Programming only clears bits.
    fn program(&mut self, bytes: &[(u64, u8)]) {
        self.status |= spec::READY;
        for (at, byte) in bytes {
            let mut old = [0xff];
            self.read_array(*at, &mut old);
            let [old] = old;
            if let Err(error) = self.store.write(*at, &[old & byte]) {
                tracing::error!(%error, "cannot keep a firmware variable");
                self.status |= spec::PROGRAM_ERROR;
                return;
            }
        }
        self.unsynced = true;
    }

    fn erase(&mut self, block: u64) {
        self.status |= spec::READY;
        match self.store.write(block, &[0xff; BLOCK_BYTES as usize]) {
            Ok(()) => self.unsynced = true,
            Err(error) => {
                tracing::error!(%error, "cannot erase a block of firmware variables");
                self.status |= spec::ERASE_ERROR;
            }
        }
    }
}

impl BusDevice for Flash {
    fn read(&self, offset: u64, data: &mut [u8]) {
        lock(&self.chip).read(offset, data);
    }

    fn write(&self, offset: u64, data: &[u8]) {
        let mut chip = lock(&self.chip);
        for (n, byte) in (0..).zip(data) {
            let at = offset.saturating_add(n);
            let before = chip.mode == Mode::Array;
            chip.write(at, *byte);
            let now = chip.mode == Mode::Array;
            let shown = match (before, now) {
                (true, false) => chip.window.as_memory(false),
                (false, true) => {
                    // Marked as not there yet, so that `show_array` goes all the way.
                    chip.mode = Mode::Status;
                    chip.show_array()
                }
                _ => Ok(()),
            };
            if let Err(error) = shown {
                // Reads go on as they did: the driver sees the wrong thing and gives up, and nothing is lost.
                tracing::error!(%error, "cannot switch the flash between array and commands");
            }
        }
    }
}

/// The answers to a query (JESD68.01 §4), one byte an address.
fn query_table(length: u64) -> Vec<u8> {
    let mut table = vec![0; 0x40];
    let blocks = (length / BLOCK_BYTES).saturating_sub(1).min(0xffff) as u16;
    let [blocks_low, blocks_high] = blocks.to_le_bytes();
    let [units_low, units_high] = ((BLOCK_BYTES / 256) as u16).to_le_bytes();
    let size_bits = length.next_power_of_two().trailing_zeros() as u8;
    let fields: [(usize, &[u8]); 8] = [
        (0x10, b"QRY"),
        // Primary command set 0001h, its table at 0x31.
        (0x13, &[0x01, 0x00, 0x31, 0x00]),
        // Supply voltages 4.5 to 5.5 V.
        (0x1b, &[0x45, 0x55, 0x00, 0x00]),
        // Typical times, log2: byte, buffer (µs), block (ms); longest as multiples.
        (0x1f, &[0x07, 0x07, 0x0a, 0x00, 0x04, 0x04, 0x04, 0x00]),
        // Size, width x8, write buffer, one kind of block.
        (
            0x27,
            &[size_bits, 0x00, 0x00, spec::BUFFER_BITS, 0x00, 0x01],
        ),
        (0x2d, &[blocks_low, blocks_high, units_low, units_high]),
        (0x31, b"PRI10"),
        (0x36, &[0; 10]),
    ];
    for (at, bytes) in fields {
        if let Some(place) = table.get_mut(at..at + bytes.len()) {
            place.copy_from_slice(bytes);
        }
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Clone, Default)]
    struct Memory(Arc<Mutex<Contents>>);

    #[derive(Default)]
    struct Contents {
        bytes: Vec<u8>,
        synced: Vec<u8>,
        memory: bool,
        switches: usize,
        fails: bool,
    }

    impl Store for Memory {
        fn len(&self) -> u64 {
            lock(&self.0).bytes.len() as u64
        }
        fn read(&self, at: u64, bytes: &mut [u8]) {
            bytes.copy_from_slice(&lock(&self.0).bytes[at as usize..][..bytes.len()]);
        }
        fn write(&mut self, at: u64, bytes: &[u8]) -> io::Result<()> {
            let mut contents = lock(&self.0);
            if contents.fails {
                return Err(io::ErrorKind::StorageFull.into());
            }
            contents.bytes[at as usize..][..bytes.len()].copy_from_slice(bytes);
            Ok(())
        }
        fn sync(&mut self) -> io::Result<()> {
            let mut contents = lock(&self.0);
            contents.synced = contents.bytes.clone();
            Ok(())
        }
    }

    impl Window for Memory {
        fn as_memory(&mut self, memory: bool) -> io::Result<()> {
            let mut contents = lock(&self.0);
            contents.memory = memory;
            contents.switches += 1;
            Ok(())
        }
    }

    fn chip() -> (Memory, Arc<Flash>) {
        let memory = Memory::default();
        lock(&memory.0).bytes = vec![0xff; 4 * BLOCK_BYTES as usize];
        let flash = Flash::new(Box::new(memory.clone()), Box::new(memory.clone())).unwrap();
        (memory, flash)
    }

    fn read(flash: &Flash, at: u64) -> u8 {
        let mut byte = [0];
        flash.read(at, &mut byte);
        byte[0]
    }

    #[test]
    fn firmware_tells_it_from_ram_and_from_rom() {
        let (memory, flash) = chip();
        assert!(lock(&memory.0).memory);
        flash.write(8, &[spec::CLEAR_STATUS]);
        assert!(!lock(&memory.0).memory, "commands are exits");
        assert_ne!(read(&flash, 8), spec::CLEAR_STATUS, "not RAM");
        flash.write(8, &[spec::READ_STATUS]);
        assert_eq!(read(&flash, 8), 0, "a flash with its status cleared");
        flash.write(8, &[spec::READ_ARRAY]);
        assert!(lock(&memory.0).memory);
        assert_eq!(read(&flash, 8), 0xff);
    }

    #[test]
    fn programming_clears_bits_and_erasing_sets_those_of_one_block() {
        let (memory, flash) = chip();
        for byte in [0x3c, 0xf0] {
            flash.write(4097, &[spec::PROGRAM]);
            flash.write(4097, &[byte]);
        }
        assert_eq!(read(&flash, 0), spec::READY);
        flash.write(0, &[spec::PROGRAM]);
        flash.write(0, &[0]);
        flash.write(0, &[spec::READ_ARRAY]);
        assert_eq!((read(&flash, 4097), read(&flash, 0)), (0x30, 0));
        assert_eq!(lock(&memory.0).synced[4097], 0x30, "durable");
        flash.write(5000, &[spec::ERASE]);
        flash.write(5000, &[spec::CONFIRM]);
        flash.write(0, &[spec::READ_ARRAY]);
        assert_eq!((read(&flash, 4097), read(&flash, 0)), (0xff, 0));
        assert_eq!(lock(&memory.0).switches, 5, "one switch each way a change");
    }

    #[test]
    fn a_buffer_is_programmed_when_it_is_confirmed() {
        let (_, flash) = chip();
        flash.write(64, &[spec::BUFFERED]);
        flash.write(64, &[2]);
        for (at, byte) in (64..).zip(*b"abc") {
            flash.write(at, &[byte]);
        }
        flash.write(64, &[spec::CONFIRM]);
        assert_eq!(read(&flash, 64), spec::READY);
        flash.write(0, &[spec::READ_ARRAY]);
        let mut seen = [0; 4];
        flash.read(64, &mut seen);
        assert_eq!(&seen, b"abc\xff");
    }

    #[test]
    fn wrong_sequences_say_so_and_change_nothing() {
        let wrong: [&[(u64, u8)]; 4] = [
            &[(0, spec::ERASE), (0, 0x11)],
            &[(0, spec::BUFFERED), (0, 200)],
            &[(0, spec::BUFFERED), (0, 0), (0, 1), (0, 2)],
            &[(0, spec::BUFFERED), (0, 1), (9000, 1)],
        ];
        for sequence in wrong {
            let (memory, flash) = chip();
            for (at, byte) in sequence {
                flash.write(*at, &[*byte]);
            }
            let error = spec::ERASE_ERROR | spec::PROGRAM_ERROR;
            assert_eq!(read(&flash, 0) & error, error, "{sequence:?}");
            assert!(lock(&memory.0).bytes.iter().all(|b| *b == 0xff));
        }
    }

    #[test]
    fn a_host_that_cannot_keep_a_byte_is_an_error_in_the_status() {
        let (memory, flash) = chip();
        lock(&memory.0).fails = true;
        flash.write(0, &[spec::PROGRAM]);
        flash.write(0, &[0]);
        assert_eq!(read(&flash, 0), spec::READY | spec::PROGRAM_ERROR);
        flash.write(0, &[spec::CLEAR_STATUS]);
        flash.write(0, &[spec::ERASE]);
        flash.write(0, &[spec::CONFIRM]);
        assert_eq!(read(&flash, 0), spec::READY | spec::ERASE_ERROR);
    }

    #[test]
    fn the_query_tells_size_and_blocks() {
        let (_, flash) = chip();
        flash.write(0x55, &[spec::QUERY]);
        let mut answer = [0; 3];
        flash.read(0x10, &mut answer);
        assert_eq!(&answer, b"QRY");
        assert_eq!(read(&flash, 0x27), 14, "16 KiB");
        assert_eq!((read(&flash, 0x2d), read(&flash, 0x2f)), (3, 16));
        flash.write(0, &[spec::READ_ID]);
        assert_eq!((read(&flash, 0), read(&flash, 1)), (0x89, 0x18));
    }

    #[test]
    fn a_state_comes_back_and_a_wrong_one_is_refused() {
        let (_, flash) = chip();
        flash.write(64, &[spec::BUFFERED]);
        flash.write(64, &[1]);
        flash.write(64, &[7]);
        let state = flash.state();
        let (memory, other) = chip();
        other.restore(&state).unwrap();
        assert_eq!(other.state(), state);
        assert!(!lock(&memory.0).memory);
        other.write(65, &[8]);
        other.write(64, &[spec::CONFIRM]);
        assert_eq!(lock(&memory.0).bytes[64..66], [7, 8]);
        let wrong = FlashState {
            mode: Mode::Buffer {
                block: 0,
                left: 1,
                bytes: vec![(9000, 1)],
            },
            status: 0,
        };
        assert!(other.restore(&wrong).is_err());
    }

    #[test]
    fn accesses_past_its_end_are_harmless() {
        let (memory, flash) = chip();
        let end = lock(&memory.0).bytes.len() as u64;
        flash.write(end, &[spec::ERASE]);
        flash.write(u64::MAX, &[0, 1]);
        let mut seen = [0; 8];
        flash.read(end - 4, &mut seen);
        assert_eq!(seen, [0xff; 8]);
        assert_eq!(flash.state().mode, Mode::Array);
    }
}
