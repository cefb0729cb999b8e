//! Jobs on a disk that is in use: they go on in small steps beside the guest's requests.
//!
//! ```text
//!  Disk::begin(job) ──> JobHandle: progress, pause, rate, cancel, from any thread
//!        │
//!        v               ┌──────────────── at most a few at a time, fewer while the guest is busy
//!  Disk::poll ── pace ──>│ step: hold clusters of the top ─> read ─> write ─> let go ─┐
//!                        └────────────────────────────────────────────────────────────┘
//!                          … last step: make durable, change the header
//! ```
//!
//! | job | a step | the last step |
//! |---|---|---|
//! | [`Job::Flatten`] | what a layer below has and the top does not is written to the top | the header names no backing file |
//! | [`Job::Commit`] | what the top has is written to layer 1 and made durable, then cleared in the top | both are flushed |
//!
//! The guest waits for a step only where it wants the clusters that the step holds, so its latency depends on the length of a
//! step ([`STRIDE`]) and not on that of the job. After every step, and in the midst of one, the chain reads the same: a job that
//! is cancelled, fails or dies with its process is begun again and finds less to do.
//!
//! A commit needs a disk that was opened with [`commit_below`](crate::DiskOptions::commit_below): [`two`] says how such a disk
//! serves the guest.

mod handle;
mod pace;
mod step;
mod two;

pub use handle::{JobError, JobHandle, JobProgress, JobState};
pub(crate) use pace::Running;
pub(crate) use step::{Step, StepEnd};

/// A job on an open disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Job {
    /// The top image gets what it lacks from the layers below it, and then needs none. The layers are let go when the disk is
    /// opened again without them.
    Flatten,
    /// What the top image has goes into the layer below it, until the top is empty. The top is let go when the disk is opened
    /// again without it.
    Commit,
}

/// Bytes of the disk that a step works on, if the clusters are not larger.
pub(crate) const STRIDE: u64 = 1 << 20;

/// [`STRIDE`] where no guest waits: fewer flushes.
pub(crate) const LONG_STRIDE: u64 = 16 << 20;
