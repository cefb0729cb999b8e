//! What the process asks of the kernel and the C library about itself: signals as a descriptor, one malloc arena, a raw terminal.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use rustix::termios::{OptionalActions, Termios, tcgetattr, tcsetattr};

/// Keeps the C library from giving each thread a heap of its own: with a dozen threads that is megabytes of address space and of
/// memory that nobody reuses. The data path allocates nothing, so threads do not wait for each other either.
pub fn use_one_malloc_arena() {
    const TRIM_THRESHOLD: libc::c_int = 128 << 10;
    // SAFETY: mallopt only sets parameters of the allocator; a value that it does not know is ignored.
    unsafe { libc::mallopt(libc::M_ARENA_MAX, 1) };
    // SAFETY: as above. Setting it also stops glibc from raising it, and the mmap threshold with it, after a large block was freed.
    unsafe { libc::mallopt(libc::M_TRIM_THRESHOLD, TRIM_THRESHOLD) };
    // SAFETY: as above.
    unsafe { libc::mallopt(libc::M_MMAP_THRESHOLD, TRIM_THRESHOLD) };
}

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

/// A duplicate of a descriptor that the process was started with, closed on exec. The original stays open, so that a VM made after this
/// one may name it again.
///
/// # Errors
/// There is no such descriptor.
pub fn duplicate_inherited(fd: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: duplicating has no effect on whoever owns the original; a number that is no descriptor is refused.
    let duplicate = unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, 3) };
    if duplicate < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor was just made and belongs to nobody else.
    Ok(unsafe { OwnedFd::from_raw_fd(duplicate) })
}

/// The terminal on standard input in raw mode; as it was again when dropped.
pub struct RawTerminal {
    before: Termios,
}

impl RawTerminal {
    /// Puts the terminal into raw mode; `None` where standard input is no terminal.
    ///
    /// # Errors
    /// The terminal refused.
    pub fn enter() -> io::Result<Option<Self>> {
        let stdin = io::stdin();
        if !rustix::termios::isatty(&stdin) {
            return Ok(None);
        }
        let before = tcgetattr(&stdin)?;
        let mut raw = before.clone();
        raw.make_raw();
        tcsetattr(&stdin, OptionalActions::Now, &raw)?;
        Ok(Some(Self { before }))
    }
}

impl Drop for RawTerminal {
    fn drop(&mut self) {
        // Nobody is left to tell if the terminal went away.
        let _ = tcsetattr(io::stdin(), OptionalActions::Now, &self.before);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_that_is_no_descriptor_is_refused() {
        assert!(duplicate_inherited(-1).is_err());
        assert!(duplicate_inherited(1 << 20).is_err());
        assert!(duplicate_inherited(0).is_ok());
    }

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
