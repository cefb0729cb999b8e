//! MSI-X: message table, pending bits, masks (PCI Local Bus 3.0 §6.8.2).
//!
//! ```text
//! trigger(i) ── blocked? ──no──> vector i fires (irqfd; no lock taken)
//!                  │yes
//!                  └──> pending bit i ── unblocked by the guest ──> vector i fires
//! ```
//!
//! A vector is *blocked* while MSI-X is off, the function mask is set, its own mask bit is set, or the hypervisor has not accepted
//! its route. Device threads trigger while vCPU threads mask. Both sides go by `blocked` and `pending` in one total order (`SeqCst`):
//! trigger sets `pending` and looks at `blocked` again, unblocking clears `blocked` and then takes `pending`; whichever comes second
//! sees the other, and no interrupt is lost or sent twice.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Once, PoisonError};

use serde::{Deserialize, Serialize};

use super::bits::{
    CAPABILITY_MSIX, MSIX_ENABLE, MSIX_ENTRY_SIZE, MSIX_FUNCTION_MASK, MSIX_MESSAGE_CONTROL,
    MSIX_VECTOR_MASKED,
};
use super::config::{ConfigSpace, LayoutError};
use crate::interrupt::{MsiMessage, MsiVector};

/// Whether MSI-X is on and whether all its vectors are masked: the guest's part of Message Control.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MessageControl {
    /// MSI-X Enable.
    pub enabled: bool,
    /// Function Mask.
    pub function_masked: bool,
}

impl MessageControl {
    /// Decodes the register.
    #[must_use]
    pub fn from_register(value: u16) -> MessageControl {
        MessageControl {
            enabled: value & MSIX_ENABLE != 0,
            function_masked: value & MSIX_FUNCTION_MASK != 0,
        }
    }
}

/// Where table and pending bits lie.
#[derive(Clone, Copy, Debug)]
pub struct MsixLayout {
    /// The BAR both are in.
    pub bar: u8,
    /// Offset of the table, a multiple of 8.
    pub table_offset: u32,
    /// Offset of the pending bit array, a multiple of 8.
    pub pba_offset: u32,
}

/// Appends the MSI-X capability for `vectors` (1..=2048) vectors; returns the offset of Message Control.
///
/// # Errors
/// No room, or a number out of range.
pub fn add_capability(
    config: &mut ConfigSpace,
    layout: MsixLayout,
    vectors: u16,
) -> Result<u8, LayoutError> {
    let in_range = (1..=super::bits::MSIX_MAX_VECTORS).contains(&vectors)
        && layout.bar < 6
        && layout.table_offset.is_multiple_of(8)
        && layout.pba_offset.is_multiple_of(8);
    if !in_range {
        return Err(LayoutError::Capability {
            id: CAPABILITY_MSIX,
            length: 12,
        });
    }
    let mut body = [0; 10];
    body[..2].copy_from_slice(&(vectors - 1).to_le_bytes());
    body[2..6].copy_from_slice(&(layout.table_offset | u32::from(layout.bar)).to_le_bytes());
    body[6..].copy_from_slice(&(layout.pba_offset | u32::from(layout.bar)).to_le_bytes());
    let writable = (MSIX_ENABLE | MSIX_FUNCTION_MASK).to_le_bytes();
    let offset = config.add_capability(CAPABILITY_MSIX, &body, &writable)?;
    Ok(offset + MSIX_MESSAGE_CONTROL)
}

/// One entry as it is saved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MsixEntryState {
    /// Message Address.
    pub address: u64,
    /// Message Data.
    pub data: u32,
    /// Vector Control.
    pub control: u32,
    /// Its pending bit.
    pub pending: bool,
}

/// Table and pending bits as they are saved; Message Control is part of the configuration space.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MsixState {
    /// One for each vector.
    pub entries: Vec<MsixEntryState>,
}

/// The saved table has another number of vectors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the saved MSI-X table has {saved} vectors, this function has {present}")]
pub struct MsixStateError {
    /// Vectors saved.
    pub saved: usize,
    /// Vectors of this function.
    pub present: usize,
}

/// The MSI-X table of one function.
pub struct Msix {
    vectors: Box<[Vector]>,
    table: Mutex<Table>,
    /// The guest decides how often the hypervisor is asked, so only its first refusal is logged.
    refusal: Once,
}

struct Vector {
    target: Arc<dyn MsiVector>,
    blocked: AtomicBool,
    pending: AtomicBool,
}

struct Table {
    control: MessageControl,
    entries: Box<[Entry]>,
}

#[derive(Clone, Copy)]
struct Entry {
    message: MsiMessage,
    control: u32,
    /// What the hypervisor was last told, so that masking and unmasking costs no routing update.
    routed: Option<MsiMessage>,
}

impl Entry {
    const POWER_ON: Entry = Entry {
        message: MsiMessage {
            address: 0,
            data: 0,
        },
        control: MSIX_VECTOR_MASKED,
        routed: None,
    };
}

impl Msix {
    /// A table with one entry for each vector, all masked.
    #[must_use]
    pub fn new(vectors: Vec<Arc<dyn MsiVector>>) -> Msix {
        let entries = vec![Entry::POWER_ON; vectors.len()].into_boxed_slice();
        let vectors = vectors
            .into_iter()
            .map(|target| Vector {
                target,
                blocked: AtomicBool::new(true),
                pending: AtomicBool::new(false),
            })
            .collect();
        Msix {
            vectors,
            table: Mutex::new(Table {
                control: MessageControl::default(),
                entries,
            }),
            refusal: Once::new(),
        }
    }

    /// Number of vectors.
    #[must_use]
    pub fn len(&self) -> usize {
        self.vectors.len()
    }

    /// Whether there are no vectors.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.vectors.is_empty()
    }

    /// Fires vector `index`, or remembers it while it is blocked. Without effect if there is no such vector.
    pub fn trigger(&self, index: u16) {
        let Some(vector) = self.vectors.get(usize::from(index)) else {
            return;
        };
        if vector.blocked.load(Ordering::SeqCst) {
            vector.pending.store(true, Ordering::SeqCst);
            if vector.blocked.load(Ordering::SeqCst) {
                return;
            }
            if !vector.pending.swap(false, Ordering::SeqCst) {
                return;
            }
        }
        self.fire(vector);
    }

    /// Applies what the guest wrote to Message Control.
    pub fn set_control(&self, control: MessageControl) {
        let mut table = self.table();
        if table.control == control {
            return;
        }
        table.control = control;
        if !control.enabled {
            for vector in &self.vectors {
                vector.pending.store(false, Ordering::SeqCst);
            }
        }
        for index in 0..self.vectors.len() {
            self.update(&mut table, index);
        }
    }

    /// Reads from the table; zero past its end.
    pub fn read_table(&self, offset: u64, data: &mut [u8]) {
        let table = self.table();
        for (byte, address) in data.iter_mut().zip(offset..) {
            *byte = split(address)
                .and_then(|(index, at)| Some(table.entries.get(index)?.to_bytes()[at]))
                .unwrap_or(0);
        }
    }

    /// Writes to the table. Aligned 4- and 8-byte writes are what §6.8.2 allows; any other is ignored.
    pub fn write_table(&self, offset: u64, data: &[u8]) {
        let aligned = matches!(data.len(), 4 | 8) && offset.is_multiple_of(data.len() as u64);
        let Some((index, at)) = split(offset).filter(|_| aligned) else {
            return;
        };
        let mut table = self.table();
        let Some(entry) = table.entries.get_mut(index) else {
            return;
        };
        let mut bytes = entry.to_bytes();
        bytes[at..at + data.len()].copy_from_slice(data);
        entry.set_bytes(bytes);
        self.update(&mut table, index);
    }

    /// Reads from the pending bit array; zero past its end.
    pub fn read_pba(&self, offset: u64, data: &mut [u8]) {
        for (byte, address) in data.iter_mut().zip(offset..) {
            let first = usize::try_from(address).map_or(usize::MAX, |at| at.saturating_mul(8));
            *byte = (0..8).fold(0, |bits, bit| {
                let vector = self.vectors.get(first.saturating_add(bit));
                let pending = vector.is_some_and(|v| v.pending.load(Ordering::SeqCst));
                bits | u8::from(pending) << bit
            });
        }
    }

    /// Masks everything and forgets messages and pending bits.
    pub fn reset(&self) {
        let mut table = self.table();
        table.control = MessageControl::default();
        for (index, vector) in self.vectors.iter().enumerate() {
            // What was routed stays known: the hypervisor still has it.
            let routed = table.entries[index].routed;
            table.entries[index] = Entry {
                routed,
                ..Entry::POWER_ON
            };
            vector.blocked.store(true, Ordering::SeqCst);
            vector.pending.store(false, Ordering::SeqCst);
        }
    }

    /// The present table.
    #[must_use]
    pub fn save(&self) -> MsixState {
        let table = self.table();
        let entries = table.entries.iter().zip(&self.vectors);
        MsixState {
            entries: entries
                .map(|(entry, vector)| MsixEntryState {
                    address: entry.message.address,
                    data: entry.message.data,
                    control: entry.control,
                    pending: vector.pending.load(Ordering::SeqCst),
                })
                .collect(),
        }
    }

    /// Takes a saved table under the given Message Control. Pending vectors that are not blocked fire.
    ///
    /// # Errors
    /// The number of vectors differs: nothing is changed.
    pub fn restore(
        &self,
        state: &MsixState,
        control: MessageControl,
    ) -> Result<(), MsixStateError> {
        if state.entries.len() != self.vectors.len() {
            return Err(MsixStateError {
                saved: state.entries.len(),
                present: self.vectors.len(),
            });
        }
        let mut table = self.table();
        table.control = control;
        for (index, saved) in state.entries.iter().enumerate() {
            table.entries[index].message = MsiMessage {
                address: saved.address,
                data: saved.data,
            };
            table.entries[index].control = saved.control;
            let pending = saved.pending && control.enabled;
            self.vectors[index].pending.store(pending, Ordering::SeqCst);
            self.update(&mut table, index);
        }
        Ok(())
    }

    /// Brings one vector in line with its entry and Message Control.
    fn update(&self, table: &mut Table, index: usize) {
        let control = table.control;
        let (vector, entry) = (&self.vectors[index], &mut table.entries[index]);
        let masked =
            !control.enabled || control.function_masked || entry.control & MSIX_VECTOR_MASKED != 0;
        if masked {
            vector.blocked.store(true, Ordering::SeqCst);
            return;
        }
        if entry.routed != Some(entry.message) {
            // Software may not change an entry while it is unmasked, but a message must never go half to the old address.
            vector.blocked.store(true, Ordering::SeqCst);
            if let Err(error) = vector.target.route(entry.message) {
                self.refused(&error);
                entry.routed = None;
                return;
            }
            entry.routed = Some(entry.message);
        }
        vector.blocked.store(false, Ordering::SeqCst);
        if vector.pending.swap(false, Ordering::SeqCst) {
            self.fire(vector);
        }
    }

    fn fire(&self, vector: &Vector) {
        if let Err(error) = vector.target.trigger() {
            self.refused(&error);
        }
    }

    fn refused(&self, error: &std::io::Error) {
        self.refusal.call_once(|| {
            tracing::warn!(%error, "an MSI-X vector could not be routed or signalled");
        });
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Entry {
    fn to_bytes(self) -> [u8; MSIX_ENTRY_SIZE as usize] {
        let mut bytes = [0; MSIX_ENTRY_SIZE as usize];
        bytes[..8].copy_from_slice(&self.message.address.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.message.data.to_le_bytes());
        bytes[12..].copy_from_slice(&self.control.to_le_bytes());
        bytes
    }

    fn set_bytes(&mut self, bytes: [u8; MSIX_ENTRY_SIZE as usize]) {
        let word = |at: usize| {
            u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        // A message address is a multiple of 4: its low bits are hard-wired.
        let low = u64::from(word(0) & !0b11);
        self.message.address = u64::from(word(4)) << 32 | low;
        self.message.data = word(8);
        self.control = word(12) & MSIX_VECTOR_MASKED;
    }
}

/// Table offset -> entry and byte within it.
fn split(offset: u64) -> Option<(usize, usize)> {
    let index = usize::try_from(offset / MSIX_ENTRY_SIZE).ok()?;
    let at = usize::try_from(offset % MSIX_ENTRY_SIZE).ok()?;
    Some((index, at))
}
