//! How a disk works, beside which files it is made of: what moves its bytes, what it spares, what it may use.

use serde::{Deserialize, Serialize};

use crate::io::queue::Queue;

/// What performs the transfers of a disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum IoEngine {
    /// System calls on the thread that submits: for jobs, and where nobody else waits for that thread.
    #[default]
    Inline,
    /// An io_uring. It is made, restricted and enabled when the disk is opened; afterwards the thread that owns the disk needs
    /// `io_uring_enter` only.
    IoUring,
    /// A pool of threads, made when the disk is opened.
    Threads,
}

impl IoEngine {
    /// The better of the two asynchronous engines that this host allows: [`IoEngine::IoUring`] where a ring can be made,
    /// else [`IoEngine::Threads`].
    #[must_use]
    pub fn asynchronous() -> Self {
        match Queue::ring(&[]) {
            Ok(_) => Self::IoUring,
            Err(_) => Self::Threads,
        }
    }
}

/// What becomes of zeros that a guest writes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DetectZeroes {
    /// They are written like anything else.
    #[default]
    Off,
    /// Whole clusters of them become zero clusters that keep their space.
    On,
    /// Whole clusters of them become zero clusters and give their space back, where the disk lets discards do that.
    Unmap,
}

/// Choices of how a disk works. `DiskOptions { engine, ..Default::default() }` names only what matters; an [`IoEngine`] alone will
/// do where options are wanted.
#[derive(Clone, Debug, Default)]
pub struct DiskOptions {
    /// What performs transfers.
    pub engine: IoEngine,
    /// What becomes of zeros that a guest writes.
    pub detect_zeroes: DetectZeroes,
}

impl From<IoEngine> for DiskOptions {
    fn from(engine: IoEngine) -> Self {
        Self {
            engine,
            ..Self::default()
        }
    }
}
