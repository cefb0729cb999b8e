//! How a disk works, beside which files it is made of: what moves its bytes, what it spares, what it may use.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use serde::{Deserialize, Serialize};

use crate::budget::CacheBudget;
use crate::io::queue::Queue;
use crate::lease::LeaseRequest;
use crate::statistics::DiskStatistics;
use crate::throttle::Throttle;

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
    /// Limits to keep to, alone or with the other disks that were given the same ones.
    pub throttle: Option<Arc<Throttle>>,
    /// Own the top image by a lease beside it while the disk is open, and over the death of this process. Without one the disk still
    /// respects the lease of another. Nothing for a disk that is read only, or on a block device.
    pub lease: Option<LeaseRequest>,
    /// What a disk that was opened with these options, or with a clone of them, could not make durable before it was closed. The next
    /// one tells its guest by failing its first flush.
    pub losses: Losses,
    /// Counters to go on with; new ones unless given. Only those that are given tell the allocated bytes.
    pub statistics: Option<Arc<DiskStatistics>>,
    /// What the caches of tables may take, together with those of other disks.
    pub cache: CacheBudget,
    /// The layer below the top is written, too, so that the top can be committed to it ([`Job::Commit`](crate::Job::Commit)). It is
    /// made as large as the top when the disk is opened, and has to be listed in the definition.
    pub commit_below: bool,
    /// Run first by each thread of [`IoEngine::Threads`]: a sandbox narrows itself there.
    pub thread_start: Option<ThreadStart>,
}

/// Whether completed writes were lost of which the guest has not heard.
#[derive(Clone, Debug, Default)]
pub struct Losses(Arc<AtomicBool>);

impl Losses {
    pub(crate) fn note(&self) {
        self.0.store(true, Ordering::Release);
    }

    pub(crate) fn take(&self) -> bool {
        self.0.swap(false, Ordering::AcqRel)
    }
}

/// What a thread does first.
#[derive(Clone)]
pub struct ThreadStart(Arc<dyn Fn() + Send + Sync>);

impl ThreadStart {
    /// `start` runs on each new thread, before anything else.
    #[must_use]
    pub fn new(start: impl Fn() + Send + Sync + 'static) -> Self {
        Self(Arc::new(start))
    }

    pub(crate) fn run(&self) {
        (self.0)();
    }
}

impl std::fmt::Debug for ThreadStart {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ThreadStart")
    }
}

impl From<IoEngine> for DiskOptions {
    fn from(engine: IoEngine) -> Self {
        Self {
            engine,
            ..Self::default()
        }
    }
}
