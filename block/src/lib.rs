//! Disk images: raw files and qcow2 chains behind one engine a disk, and the jobs on them.
//!
//! | module | what |
//! |---|---|
//! | [`disk`](Disk) | requests in, completions out |
//! | `options` | how a disk works, beside which files it is made of |
//! | `statistics` | what a disk counts |
//! | `throttle` | limits on what a disk or a group uses |
//! | `chain` | which files make up a disk; reading through them |
//! | `raw`, `qcow2` | the formats |
//! | `io` | transfers at any alignment, buffered or direct |
//! | `zeroes` | zeros in what a guest writes |
//! | `budget`, `lru` | what caches may take; who goes first |
//! | `task` | futures and holds by which requests keep out of each other's way |
//! | `lock` | who may use an image at the same time |
//! | `online` | jobs on an open disk, beside its guest's requests: flatten, commit |
//! | [`lease`] | who owns an image, over hosts and deaths |
//! | [`image`] | jobs on images: create, resize, info, check |
//!
//! Nothing here knows virtio or a guest's memory, and no byte of an image decides what is opened: formats and chains are stated
//! by the caller. `unsafe` lives in `buffers`, `task::executor`, `io::sys`, `io::queue` and `io::ring`.
#![deny(unsafe_code)]

mod budget;
mod buffers;
mod chain;
mod disk;
mod error;
pub mod image;
mod io;
pub mod lease;
mod lock;
mod lru;
mod online;
mod options;
mod qcow2;
mod raw;
mod statistics;
mod sync;
mod task;
mod throttle;
mod timer;
#[cfg(test)]
mod timer_tests;
mod zeroes;

#[cfg(test)]
mod model;
#[cfg(test)]
mod power_cut;

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

pub use budget::{CacheBudget, CacheCounts};
pub use buffers::{Buffers, RawSlice, SharedBuffer};
pub use chain::MAX_LAYERS;
pub use disk::{Completion, Disk, Op, Request};
pub use error::{Error, ErrorClass, ErrorKind, IoError};
pub use io::HostCounts;
pub use online::{Job, JobError, JobHandle, JobProgress, JobState};
pub use options::{DetectZeroes, DiskOptions, IoEngine, Losses, ThreadStart};
pub use statistics::{DiskStatistics, KindTotals, RequestKind, render_prometheus};
pub use throttle::{
    Burst, Directions, Limit, Limits, LimitsError, MAX_BURST_SECONDS, MAX_RATE, Throttle,
};

/// The format of an image; always stated, never guessed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    /// The file's bytes are the disk's.
    Raw,
    /// QEMU's copy-on-write format, versions 2 and 3.
    Qcow2,
}

/// How a file is cached on the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Cache {
    /// Past the host's page cache (O_DIRECT).
    Direct,
    /// Through the host's page cache.
    Buffered,
}

/// One image of a chain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layer {
    /// A regular file or block device.
    pub path: PathBuf,
    /// What it is.
    pub format: Format,
    /// How it is cached.
    pub cache: Cache,
}

/// What lies under the top image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Backing {
    /// These layers, nearest first, whatever any header says. A header of the lowest that names another is an error.
    Explicit(Vec<Layer>),
    /// What headers name: plain paths beneath the folder of the top image, with their format stated in the header.
    FromHeader {
        /// How those files are cached.
        cache: Cache,
    },
}

/// A disk to open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskSpec {
    /// The image that is written.
    pub top: Layer,
    /// What lies below it.
    pub backing: Backing,
    /// Refuse writes; then others may read the same image.
    pub read_only: bool,
    /// Let discards give space back.
    pub discard: bool,
}
