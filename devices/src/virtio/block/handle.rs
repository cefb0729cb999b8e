//! How a disk's owner reaches it while it is served on its own thread.
//!
//! ```text
//!  owner ── take ──> thread: takes no more requests, waits for those under way, flushes ── disk ──> owner
//!  owner: closes it, changes files, opens the new chain          (requests of the guest wait in their rings)
//!  owner ── give ──> thread: serves again; tells the driver if the size is another
//! ```
//!
//! A device may be reset, activated or dropped at any point of that: whose disk is away serves nothing, and lets go of its queues at once.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::Sender;

use drover_block::{Disk, ErrorClass, IoError};

use crate::virtio::block::bits::SECTOR_BYTES;
use crate::virtio::block::queue::Engine;
use crate::virtio::worker::Caller;

/// What becomes of a request that fails.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnError {
    /// The guest is told.
    #[default]
    Report,
    /// The request is kept and nothing further is served, until the owner says what becomes of it.
    Stop,
}

/// What becomes of requests that fail, by the kind of failure. What is the guest's own fault is always reported.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ErrorPolicy {
    /// The host has no space for the image.
    pub no_space: OnError,
    /// The host or the image fails.
    pub io: OnError,
}

impl ErrorPolicy {
    /// What becomes of a request that ended in `error`.
    pub(super) fn of(self, error: &IoError) -> OnError {
        match error.class() {
            ErrorClass::NoSpace => self.no_space,
            ErrorClass::Host => self.io,
            ErrorClass::Guest => OnError::Report,
        }
    }
}

/// A request failed and is kept; the disk serves nothing until the owner says more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stopped {
    /// `read`, `write`, `flush`, `discard` or `write-zeroes`.
    pub operation: &'static str,
    /// Where on the disk, in bytes; a flush has no place.
    pub offset: Option<u64>,
    /// Why.
    pub error: IoError,
}

/// Told, on the disk's thread, that it stopped.
pub type Observer = Arc<dyn Fn(Stopped) + Send + Sync>;

/// What a disk's thread answers to [`DiskHandle::take`].
pub(super) type Taken = Box<dyn FnOnce(Box<dyn Engine>, Result<(), IoError>) + Send>;

/// What is to be done with the disk, on its thread.
pub(super) type Visit = Box<dyn FnOnce(Option<&mut Disk>) + Send>;

/// What the owner asks of the thread.
pub(super) enum Call {
    Take(Taken),
    Give(Box<dyn Engine>),
    Visit(Visit),
    Policy(ErrorPolicy, Observer),
    Retry,
    Report,
}

/// The size of a disk, as the driver may ask for it at any time and the thread may change it.
#[derive(Clone, Debug)]
pub(super) struct Capacity(Arc<AtomicU64>);

impl Capacity {
    pub(super) fn new(bytes: u64) -> Self {
        Self(Arc::new(AtomicU64::new(bytes / SECTOR_BYTES)))
    }

    pub(super) fn sectors(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }

    /// Whether that changed it.
    pub(super) fn set(&self, bytes: u64) -> bool {
        let sectors = bytes / SECTOR_BYTES;
        self.0.swap(sectors, Ordering::AcqRel) != sectors
    }
}

/// The owner's way to a disk that is being served. Every method returns at once, and does nothing once the device is gone.
#[derive(Clone)]
pub struct DiskHandle {
    pub(super) calls: Sender<Call>,
    pub(super) caller: Caller,
}

impl DiskHandle {
    fn call(&self, call: Call) {
        if self.calls.send(call).is_ok() {
            let _ = self.caller.call();
        }
    }

    /// Asks for the disk itself. `taken` is called on the disk's thread once nothing is under way and everything is flushed, with how the
    /// flush ended. It is dropped unused if the device is dropped first, or its disk is away already.
    pub fn take(&self, taken: impl FnOnce(Disk, Result<(), IoError>) + Send + 'static) {
        self.call(Call::Take(Box::new(move |engine, flushed| {
            if let Some(disk) = engine.into_disk() {
                taken(disk, flushed);
            }
        })));
    }

    /// Gives a disk back after [`DiskHandle::take`], the same or another that the guest is to see in its place.
    pub fn give(&self, disk: Disk) {
        self.call(Call::Give(Box::new(disk)));
    }

    /// Does something quick with the disk, on its thread; there is none while it is away. Dropped unused once the device is gone.
    pub fn visit(&self, visit: impl FnOnce(Option<&mut Disk>) + Send + 'static) {
        self.call(Call::Visit(Box::new(visit)));
    }

    /// Decides what becomes of requests that fail from now on, and who is told when the disk stops for one.
    pub fn set_error_policy(&self, policy: ErrorPolicy, observer: Observer) {
        self.call(Call::Policy(policy, observer));
    }

    /// Tries requests that were kept again, and serves on.
    pub fn retry(&self) {
        self.call(Call::Retry);
    }

    /// Tells the guest of the failures of requests that were kept, and of all later ones until [`DiskHandle::retry`]; serves on.
    pub fn report(&self) {
        self.call(Call::Report);
    }
}
