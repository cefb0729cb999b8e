//! A transport as it is saved. The device behind it saves its own state, queue positions included.

use serde::{Deserialize, Serialize};

pub use super::common::{CommonConfigState, QueueRegistersState};
use crate::pci::config::{ConfigSpaceState, ConfigStateError};
use crate::pci::msix::{MsixState, MsixStateError};

/// All that a virtio PCI function holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VirtioPciState {
    /// Configuration space.
    pub config: ConfigSpaceState,
    /// MSI-X table and pending bits.
    pub msix: MsixState,
    /// Common configuration registers.
    pub common: CommonConfigState,
    /// `config_msix_vector`
    pub config_vector: u16,
    /// `queue_msix_vector` of each queue.
    pub queue_vectors: Vec<u16>,
    /// ISR status.
    pub isr: u8,
    /// DEVICE_NEEDS_RESET
    pub needs_reset: bool,
    /// `config_generation`
    pub config_generation: u8,
}

/// How far a queue had been served: the device's part of a saved queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueuePosition {
    /// Which queue.
    pub index: u16,
    /// Next entry of the available ring to take.
    pub next_avail: u16,
    /// Next entry of the used ring to fill.
    pub next_used: u16,
}

/// A saved transport cannot be taken up here. Nothing was changed, unless the device failed to start.
#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    /// The transport is in use.
    #[error("the function is not in its power-on state")]
    InUse,
    /// Configuration space of another function.
    #[error(transparent)]
    Config(#[from] ConfigStateError),
    /// MSI-X table of another function.
    #[error(transparent)]
    Msix(#[from] MsixStateError),
    /// Common configuration that this device cannot have.
    #[error("saved virtio registers: {0}")]
    Common(&'static str),
    /// The device did not start.
    #[error("the device did not start on the saved queues")]
    NotStarted,
}
