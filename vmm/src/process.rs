//! What the process asks of the kernel and the C library about itself: inherited descriptors, one malloc arena, a raw terminal.

use std::io;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};

pub use drover_devices::termination::TerminationSignals;
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
}
