//! What long jobs have in common: telling how far they are, being stopped, and not taking all of the host's disk.

use std::ops::ControlFlow;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::error::{Error, ErrorKind};

/// Watches a job.
pub trait Monitor {
    /// Told now and then that `done` of `total` bytes are worked through; a `total` of 0 is not known. To break is to cancel the job: it ends with
    /// [`ErrorKind::Cancelled`] and leaves every image whole.
    fn progress(&mut self, done: u64, total: u64) -> ControlFlow<()>;

    /// Told that another part of the job begins, whose progress counts from zero: "downloading", "converting".
    fn phase(&mut self, _name: &'static str) {}

    /// The most bytes of the disk a second; asked again and again, so that it may change.
    fn bytes_per_second(&self) -> Option<u64> {
        None
    }
}

/// Nobody watches: the job runs to its end as fast as it can.
#[derive(Clone, Copy, Debug, Default)]
pub struct Unwatched;

impl Monitor for Unwatched {
    fn progress(&mut self, _: u64, _: u64) -> ControlFlow<()> {
        ControlFlow::Continue(())
    }
}

/// A job's way through a disk.
pub(super) struct Way<'a> {
    monitor: &'a mut dyn Monitor,
    total: u64,
    /// What the rate counts from: a time, and the bytes that had been moved then.
    since: Instant,
    moved: u64,
}

/// The longest pause at a time, so that a job can be cancelled soon.
const PAUSE: Duration = Duration::from_millis(100);

impl<'a> Way<'a> {
    pub(super) fn new(monitor: &'a mut dyn Monitor, total: u64) -> Self {
        Self {
            monitor,
            total,
            since: Instant::now(),
            moved: 0,
        }
    }

    /// How much there is, now that it is known.
    #[cfg(feature = "import")]
    pub(super) fn set_total(&mut self, total: u64) {
        self.total = total;
    }

    /// Tells that the job has come to `done`, having moved `bytes` bytes since the last time; pauses where it is too fast.
    pub(super) fn at(&mut self, path: &Path, done: u64, bytes: u64) -> Result<(), Error> {
        self.moved += bytes;
        loop {
            if self.monitor.progress(done, self.total).is_break() {
                return Err(Error::new(path, ErrorKind::Cancelled));
            }
            let Some(rate) = self.monitor.bytes_per_second() else {
                return Ok(());
            };
            let due = Duration::from_secs_f64(self.moved as f64 / rate.max(1) as f64);
            let early = due.saturating_sub(self.since.elapsed());
            if early.is_zero() {
                return Ok(());
            }
            std::thread::sleep(early.min(PAUSE));
        }
    }
}
