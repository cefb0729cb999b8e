//! Timers of the control loop.
//!
//! The loop is told of several events at a time. What is done for one of them may set or clear a timer whose event comes next, which
//! then has nothing to say any more: so a timer is asked whether it rang, and that never waits.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::time::Duration;

use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};

/// A timer, not set at first.
pub(super) struct Clock(OwnedFd);

impl Clock {
    /// # Errors
    /// No more descriptors.
    pub(super) fn new() -> io::Result<Self> {
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        Ok(Self(timerfd_create(TimerfdClockId::Monotonic, flags)?))
    }

    /// Rings once after `first`, at the soonest now, and then at every `interval`.
    ///
    /// # Errors
    /// A time that the host cannot count to.
    pub(super) fn set(&self, first: Duration, interval: Option<Duration>) -> io::Result<()> {
        // Zero would clear it.
        let first = first.max(Duration::from_nanos(1));
        self.write(first, interval.unwrap_or_default())
    }

    /// Rings no more.
    ///
    /// # Errors
    /// None that is known.
    pub(super) fn clear(&self) -> io::Result<()> {
        self.write(Duration::ZERO, Duration::ZERO)
    }

    fn write(&self, first: Duration, interval: Duration) -> io::Result<()> {
        let time = |time: Duration| {
            let seconds = i64::try_from(time.as_secs());
            let tv_sec = seconds.map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
            let tv_nsec = time.subsec_nanos().into();
            Ok::<_, io::Error>(Timespec { tv_sec, tv_nsec })
        };
        let times = Itimerspec {
            it_interval: time(interval)?,
            it_value: time(first)?,
        };
        timerfd_settime(&self.0, TimerfdTimerFlags::empty(), &times)?;
        Ok(())
    }

    /// Whether it rang since it was last set or asked.
    pub(super) fn rang(&self) -> bool {
        let mut times = [0; 8];
        rustix::io::read(&self.0, &mut times).is_ok_and(|read| read == times.len())
    }
}

impl AsRawFd for Clock {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As the loop waits for it.
    fn wait(clock: &Clock) {
        use rustix::event::{PollFd, PollFlags, poll};
        poll(&mut [PollFd::new(&clock.0, PollFlags::IN)], None).unwrap();
    }

    #[test]
    fn a_clock_that_was_cleared_or_set_anew_since_it_rang_says_so_and_never_waits() {
        let clock = Clock::new().unwrap();
        assert!(!clock.rang());
        clock.set(Duration::ZERO, None).unwrap();
        wait(&clock);
        clock.clear().unwrap();
        assert!(!clock.rang());
        clock.set(Duration::ZERO, None).unwrap();
        wait(&clock);
        clock.set(Duration::from_secs(3600), None).unwrap();
        assert!(!clock.rang());
        clock.set(Duration::ZERO, None).unwrap();
        wait(&clock);
        assert!(clock.rang());
        assert!(!clock.rang());
    }

    #[test]
    fn a_clock_with_an_interval_goes_on_ringing() {
        let clock = Clock::new().unwrap();
        let tick = Duration::from_millis(1);
        clock.set(tick, Some(tick)).unwrap();
        for _ in 0..3 {
            wait(&clock);
            assert!(clock.rang());
        }
        assert!(clock.set(Duration::MAX, None).is_err());
    }
}
