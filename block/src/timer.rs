//! The timer of a disk: one descriptor to watch beside [`crate::Disk::event`], for everybody who has to wait for a time.
//!
//! Each [`Alarm`] is set and cleared by itself, from any thread; the descriptor becomes readable at the earliest of them.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{PollFd, PollFlags};
use rustix::time::{
    ClockId, Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec,
};

use super::sync::{AtomicU64, Mutex, MutexGuard, Ordering, PoisonError};

const NANOS: u64 = 1_000_000_000;
const NEVER: u64 = u64::MAX;

/// Nanoseconds of the host's monotonic clock.
pub(crate) fn now() -> u64 {
    let time = rustix::time::clock_gettime(ClockId::Monotonic);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    let nanos = u64::try_from(time.tv_nsec).unwrap_or(0);
    seconds.saturating_mul(NANOS).saturating_add(nanos)
}

/// Who waits.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Alarm {
    /// Requests that wait for a limit.
    Limit,
    /// A job that keeps to its rate.
    Job,
}

const ALARMS: usize = 2;

/// A timerfd with an alarm for each who waits.
pub(crate) struct Timer {
    fd: OwnedFd,
    /// When each alarm goes off, by the monotonic clock, or [`NEVER`].
    alarms: Mutex<[u64; ALARMS]>,
    /// The earliest of them.
    earliest: AtomicU64,
}

impl Timer {
    /// A timer with no alarm set.
    pub(crate) fn new() -> io::Result<Self> {
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        Ok(Self {
            fd: rustix::time::timerfd_create(TimerfdClockId::Monotonic, flags)?,
            alarms: Mutex::new([NEVER; ALARMS]),
            earliest: AtomicU64::new(NEVER),
        })
    }

    /// Readable from the earliest alarm until [`Timer::clear_due`].
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    fn alarms(&self) -> MutexGuard<'_, [u64; ALARMS]> {
        self.alarms.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets when an alarm goes off, by [`now`]; a time that is over makes it go off at once. `None` clears it.
    pub(crate) fn set(&self, alarm: Alarm, at: Option<u64>) {
        let mut alarms = self.alarms();
        if let Some(slot) = alarms.get_mut(alarm as usize) {
            *slot = at.unwrap_or(NEVER);
        }
        self.arm(&alarms);
    }

    /// Sets an alarm to a time if it would go off later than that, or not at all.
    pub(crate) fn advance(&self, alarm: Alarm, at: u64) {
        let mut alarms = self.alarms();
        if let Some(slot) = alarms.get_mut(alarm as usize) {
            *slot = at.min(*slot);
        }
        self.arm(&alarms);
    }

    /// Sleeps until the earliest alarm, or for `patience` nanoseconds if that is sooner, and clears what is due.
    pub(crate) fn sleep(&self, patience: u64) {
        let mut poll = [PollFd::new(&self.fd, PollFlags::IN)];
        let patience = Timespec {
            tv_sec: i64::try_from(patience / NANOS).unwrap_or(i64::MAX),
            tv_nsec: i64::try_from(patience % NANOS).unwrap_or(0),
        };
        // However it ends, the caller looks again.
        let _ = rustix::event::poll(&mut poll, Some(&patience));
        self.clear_due();
    }

    /// Clears the alarms whose time is over; whether there were any. Costs nothing while none is set.
    pub(crate) fn clear_due(&self) -> bool {
        if self.earliest.load(Ordering::Acquire) == NEVER {
            return false;
        }
        self.clear_due_at(now())
    }

    /// [`Timer::clear_due`] at a time.
    pub(crate) fn clear_due_at(&self, now: u64) -> bool {
        let mut alarms = self.alarms();
        let mut any = false;
        for at in alarms.iter_mut().filter(|at| **at <= now) {
            *at = NEVER;
            any = true;
        }
        if any {
            self.arm(&alarms);
        }
        any
    }

    /// The earliest alarm.
    #[cfg(test)]
    pub(crate) fn earliest(&self) -> u64 {
        self.earliest.load(Ordering::Acquire)
    }

    fn arm(&self, alarms: &[u64; ALARMS]) {
        let earliest = alarms.iter().copied().min().unwrap_or(NEVER);
        if self.earliest.swap(earliest, Ordering::AcqRel) == earliest {
            return;
        }
        // Zero would disarm it. Setting it also takes back that it is readable.
        let at = match earliest {
            NEVER => 0,
            at => at.max(1),
        };
        let spec = Itimerspec {
            it_interval: Timespec {
                tv_sec: 0,
                tv_nsec: 0,
            },
            it_value: Timespec {
                tv_sec: i64::try_from(at / NANOS).unwrap_or(i64::MAX),
                tv_nsec: i64::try_from(at % NANOS).unwrap_or(0),
            },
        };
        if let Err(error) =
            rustix::time::timerfd_settime(&self.fd, TimerfdTimerFlags::ABSTIME, &spec)
        {
            tracing::error!(%error, "cannot set the timer of a disk: what waits for a limit goes on with the next request");
        }
    }
}
