//! What threads meet at, in one place: the models of threads among the tests put other implementations here, under which they
//! run through many schedules.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};

use rustix::event::{EventfdFlags, PollFd, PollFlags};

pub(crate) use std::sync::atomic::{AtomicU64, Ordering};
pub(crate) use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
pub(crate) use std::thread::JoinHandle;

/// Starts a thread.
pub(crate) fn spawn(
    name: String,
    run: impl FnOnce() + Send + 'static,
) -> io::Result<JoinHandle<()>> {
    std::thread::Builder::new().name(name).spawn(run)
}

/// Something that happened, for whoever waits for it with a descriptor.
pub(crate) struct Event(OwnedFd);

impl Event {
    pub(crate) fn new() -> io::Result<Self> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        Ok(Self(rustix::event::eventfd(0, flags)?))
    }

    /// Readable from [`Event::raise`] to [`Event::clear`].
    pub(crate) fn fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }

    pub(crate) fn raise(&self) {
        // The counter is far from overflowing, the only way to fail.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    /// Undoes [`Event::raise`]; an error if there was none.
    pub(crate) fn clear(&self) -> io::Result<()> {
        let mut count = [0; 8];
        rustix::io::read(&self.0, &mut count)?;
        Ok(())
    }

    /// Waits for [`Event::raise`]; a signal ends it early.
    pub(crate) fn wait(&self) -> io::Result<()> {
        let mut poll = [PollFd::from_borrowed_fd(self.0.as_fd(), PollFlags::IN)];
        match rustix::event::poll(&mut poll, None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }
}
