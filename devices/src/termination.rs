//! SIGTERM and SIGINT as something to wait for beside everything else.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

/// SIGTERM and SIGINT as a readable descriptor.
pub struct TerminationSignals {
    fd: OwnedFd,
}

impl TerminationSignals {
    /// Blocks the signals for this thread and all it starts, and takes them here instead. Call before any other thread exists.
    ///
    /// # Errors
    /// The kernel refused.
    pub fn take() -> io::Result<Self> {
        let mut set = MaybeUninit::<libc::sigset_t>::uninit();
        // SAFETY: `sigemptyset` initialises the set that it is given.
        unsafe { libc::sigemptyset(set.as_mut_ptr()) };
        for signal in [libc::SIGTERM, libc::SIGINT] {
            // SAFETY: the set was initialised above and the signal numbers are valid.
            unsafe { libc::sigaddset(set.as_mut_ptr(), signal) };
        }
        // SAFETY: the set is initialised; no old mask is asked for.
        let error =
            unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, set.as_ptr(), std::ptr::null_mut()) };
        if error != 0 {
            return Err(io::Error::from_raw_os_error(error));
        }
        // SAFETY: the set is initialised; -1 asks for a new descriptor.
        let fd =
            unsafe { libc::signalfd(-1, set.as_ptr(), libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor was just made and belongs to nobody else.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        Ok(Self { fd })
    }

    /// How many signals arrived since the last call.
    pub fn received(&self) -> usize {
        let mut info = [0; size_of::<libc::signalfd_siginfo>()];
        std::iter::from_fn(|| {
            rustix::io::read(&self.fd, &mut info)
                .ok()
                .filter(|n| *n > 0)
        })
        .count()
    }
}

impl AsRawFd for TerminationSignals {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

impl AsFd for TerminationSignals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_termination_signal_is_read_instead_of_ending_the_process() {
        // On a thread of its own, whose mask dies with it.
        std::thread::spawn(|| {
            let signals = TerminationSignals::take().unwrap();
            assert_eq!(signals.received(), 0);
            // SAFETY: names the calling thread.
            let this = unsafe { libc::pthread_self() };
            // SAFETY: the thread is alive, and has the signal blocked.
            unsafe { libc::pthread_kill(this, libc::SIGTERM) };
            assert_eq!(signals.received(), 1);
            assert_eq!(signals.received(), 0);
        })
        .join()
        .unwrap();
    }
}
