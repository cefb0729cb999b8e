//! What the outside world has of a job: how far it is, and the levers.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::Job;
use crate::error::IoError;
use crate::timer::{Alarm, Timer};

/// Where a job stands.
///
/// ```text
///   Running <──> Paused
///      │ └──────────┴──> Cancelling ──> Cancelled      also when the disk is closed
///      └──> Done | Failed
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum JobState {
    /// It goes on as its rate and the guest allow.
    Running,
    /// It waits for [`JobHandle::resume`].
    Paused,
    /// It is going to end after the steps that have begun.
    Cancelling,
    /// It has done its work, durably.
    Done,
    /// It ended early and left the disk as good as before; it may be begun again.
    Failed(JobError),
    /// It was ended early and left the disk as good as before; it may be begun again.
    Cancelled,
}

impl JobState {
    /// Whether nothing more is going to happen.
    #[must_use]
    pub fn is_over(&self) -> bool {
        matches!(self, Self::Done | Self::Failed(_) | Self::Cancelled)
    }
}

/// Why a job ended early.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}: {error}", path.display())]
pub struct JobError {
    /// The image that was read or written; the top, where a read went through it.
    pub path: PathBuf,
    /// What went wrong.
    #[source]
    pub error: IoError,
}

/// How far a job is. Neither number ever falls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct JobProgress {
    /// Bytes of the disk that have been worked through.
    pub done: u64,
    /// Bytes of the disk.
    pub total: u64,
    /// Bytes that had to be copied so far; they are what the rate is about.
    pub moved: u64,
}

/// What a handle and the disk share.
pub(super) struct Shared {
    pub(super) state: JobState,
    pub(super) progress: JobProgress,
    pub(super) rate: Option<u64>,
    /// Set when the rate or the state changed, until the disk has seen it.
    pub(super) changed: bool,
}

struct Inner {
    job: Job,
    shared: Mutex<Shared>,
    timer: Arc<Timer>,
}

/// A job that was begun by [`Disk::begin`](crate::Disk::begin). All of it may be used from any thread and after the disk is gone.
#[derive(Clone)]
pub struct JobHandle(Arc<Inner>);

impl std::fmt::Debug for JobHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let shared = self.shared();
        write!(
            f,
            "JobHandle({:?} {:?} {:?})",
            self.0.job, shared.state, shared.progress
        )
    }
}

impl JobHandle {
    pub(super) fn new(job: Job, total: u64, timer: Arc<Timer>) -> Self {
        Self(Arc::new(Inner {
            job,
            shared: Mutex::new(Shared {
                state: JobState::Running,
                progress: JobProgress {
                    total,
                    ..JobProgress::default()
                },
                rate: None,
                changed: false,
            }),
            timer,
        }))
    }

    /// What is shared, to oneself. The alarm is only ever set by whoever has this, so that none is lost.
    pub(super) fn shared(&self) -> MutexGuard<'_, Shared> {
        self.0.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets when the disk goes on with the job by itself.
    pub(super) fn set_alarm(&self, _held: &Shared, at: Option<u64>) {
        self.0.timer.set(Alarm::Job, at);
    }

    /// Changes something and sees to it that the disk notices.
    fn change(&self, change: impl FnOnce(&mut Shared)) {
        let mut shared = self.shared();
        if shared.state.is_over() {
            return;
        }
        change(&mut shared);
        shared.changed = true;
        self.set_alarm(&shared, Some(0));
    }

    /// What the job does.
    #[must_use]
    pub fn job(&self) -> Job {
        self.0.job
    }

    /// Where it stands.
    #[must_use]
    pub fn state(&self) -> JobState {
        self.shared().state.clone()
    }

    /// How far it is.
    #[must_use]
    pub fn progress(&self) -> JobProgress {
        self.shared().progress
    }

    /// The most bytes that it copies a second; `None` is as fast as the guest's requests let it.
    #[must_use]
    pub fn rate(&self) -> Option<u64> {
        self.shared().rate
    }

    /// Changes [`JobHandle::rate`]; 0 counts as 1.
    pub fn set_rate(&self, bytes_per_second: Option<u64>) {
        let rate = bytes_per_second.map(|rate| rate.max(1));
        if self.rate() != rate {
            self.change(|shared| shared.rate = rate);
        }
    }

    /// Lets the job wait; steps that have begun end first.
    pub fn pause(&self) {
        self.change(|shared| {
            if shared.state == JobState::Running {
                shared.state = JobState::Paused;
            }
        });
    }

    /// Ends a pause.
    pub fn resume(&self) {
        self.change(|shared| {
            if shared.state == JobState::Paused {
                shared.state = JobState::Running;
            }
        });
    }

    /// Ends the job early, unless it is in its last step. Every image stays whole.
    pub fn cancel(&self) {
        self.change(|shared| shared.state = JobState::Cancelling);
    }
}
