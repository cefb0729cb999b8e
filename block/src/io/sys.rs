//! System calls that take raw memory or have no safe wrapper.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use crate::buffers::RawSlice;

/// The most slices that one call takes (`IOV_MAX`).
const MAX_SLICES: usize = 1024;

fn offset(value: u64) -> io::Result<libc::off_t> {
    value
        .try_into()
        .map_err(|_| io::Error::from_raw_os_error(libc::EFBIG))
}

fn count(value: &[RawSlice]) -> libc::c_int {
    libc::c_int::try_from(value.len().min(MAX_SLICES)).unwrap_or(libc::c_int::MAX)
}

/// `preadv(2)`; bytes read, 0 at the end of the file. The slices must belong to live [`crate::buffers::Span`]s.
pub(super) fn preadv(fd: BorrowedFd<'_>, at: u64, slices: &[RawSlice]) -> io::Result<usize> {
    let at = offset(at)?;
    // SAFETY: RawSlice is an iovec, and the memory of a span is writable while it is borrowed.
    let read = unsafe { libc::preadv(fd.as_raw_fd(), slices.as_ptr().cast(), count(slices), at) };
    usize::try_from(read).map_err(|_| io::Error::last_os_error())
}

/// `pwritev(2)`; bytes written. The slices must belong to live [`crate::buffers::Span`]s.
pub(super) fn pwritev(fd: BorrowedFd<'_>, at: u64, slices: &[RawSlice]) -> io::Result<usize> {
    let at = offset(at)?;
    // SAFETY: RawSlice is an iovec, and the memory of a span is readable while it is borrowed.
    let written =
        unsafe { libc::pwritev(fd.as_raw_fd(), slices.as_ptr().cast(), count(slices), at) };
    usize::try_from(written).map_err(|_| io::Error::last_os_error())
}

/// Alignment for direct I/O as `statx(2)` tells it, (memory, offset), in bytes; zeros where the file has no direct I/O;
/// `None` where the kernel does not say.
pub(super) fn direct_alignment(fd: BorrowedFd<'_>) -> io::Result<Option<(u32, u32)>> {
    // SAFETY: all-zero is a valid statx.
    let mut answer: libc::statx = unsafe { std::mem::zeroed() };
    // SAFETY: an empty path with AT_EMPTY_PATH names the descriptor; `answer` is written by the kernel alone.
    let result = unsafe {
        libc::statx(
            fd.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            libc::STATX_DIOALIGN,
            &raw mut answer,
        )
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    let told = answer.stx_mask & libc::STATX_DIOALIGN != 0;
    Ok(told.then_some((answer.stx_dio_mem_align, answer.stx_dio_offset_align)))
}

/// Sets (or with `F_UNLCK` drops) an open-file-description lock on one byte; `EAGAIN` or `EACCES` when another holds it.
pub(crate) fn ofd_lock(fd: BorrowedFd<'_>, byte: i64, kind: libc::c_int) -> io::Result<()> {
    let lock = one_byte(byte, kind);
    // SAFETY: F_OFD_SETLK reads the structure.
    let result = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_OFD_SETLK, &raw const lock) };
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Whether another open file description holds a lock on `byte`.
pub(crate) fn ofd_is_locked(fd: BorrowedFd<'_>, byte: i64) -> io::Result<bool> {
    let mut lock = one_byte(byte, libc::F_WRLCK);
    // SAFETY: F_OFD_GETLK reads and writes the structure.
    let result = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_OFD_GETLK, &raw mut lock) };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(libc::c_int::from(lock.l_type) != libc::F_UNLCK)
}

fn one_byte(byte: i64, kind: libc::c_int) -> libc::flock {
    libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: byte,
        l_len: 1,
        l_pid: 0,
    }
}
