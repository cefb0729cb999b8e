//! System calls that take raw memory or have no safe wrapper.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};

use rustix::fs::FallocateFlags;

use crate::buffers::RawSlice;

/// The most slices that one call takes (`IOV_MAX`).
pub(super) const MAX_SLICES: usize = 1024;

/// A system call on a file that somebody else is going to make.
#[derive(Clone, Copy)]
pub(super) struct Call {
    fd: RawFd,
    action: Action,
}

impl Call {
    /// Describes a call.
    ///
    /// # Safety
    /// The file stays open, and the slices and their memory stay valid, until the call is over or nobody has it any more.
    pub(super) unsafe fn new(fd: BorrowedFd<'_>, action: Action) -> Self {
        Self {
            fd: fd.as_raw_fd(),
            action,
        }
    }

    pub(super) fn fd(&self) -> RawFd {
        self.fd
    }

    /// The bytes of a transfer of a few pieces and at most `longest` bytes; `None` for others, and for an fdatasync or the like, which take
    /// their time.
    pub(super) fn short_transfer(&self, longest: usize) -> Option<usize> {
        let (slices, count) = match self.action {
            Action::Read { slices, count, .. } | Action::Write { slices, count, .. } => {
                (slices, count)
            }
            Action::Sync | Action::Allocate { .. } => return None,
        };
        if count > 16 {
            return None;
        }
        // SAFETY: the slices stay valid until the call is over (`Call::new`).
        let slices = unsafe { std::slice::from_raw_parts(slices, count) };
        let bytes = slices.iter().map(RawSlice::length).sum();
        (bytes <= longest).then_some(bytes)
    }

    pub(super) fn action(&self) -> &Action {
        &self.action
    }
}

/// What a [`Call`] does.
#[derive(Clone, Copy)]
pub(super) enum Action {
    Read {
        at: u64,
        slices: *const RawSlice,
        count: usize,
    },
    Write {
        at: u64,
        slices: *const RawSlice,
        count: usize,
    },
    Sync,
    Allocate {
        mode: FallocateFlags,
        at: u64,
        length: u64,
    },
}

// SAFETY: the memory behind the pointers may be used from any thread (`Buffers::from_raw`) and stays until the call is over.
unsafe impl Send for Call {}

/// Makes a call; its result, errors as negative numbers.
pub(super) fn perform(call: &Call) -> i32 {
    // SAFETY: `Call::new` demands that its maker keeps the file open until it is over.
    let fd = unsafe { BorrowedFd::borrow_raw(call.fd) };
    // SAFETY: `Call::new` demands that its maker keeps the slices until it is over.
    let all = |slices, count| unsafe { std::slice::from_raw_parts(slices, count) };
    let result = match call.action {
        Action::Read { at, slices, count } => preadv(fd, at, all(slices, count)),
        Action::Write { at, slices, count } => pwritev(fd, at, all(slices, count)),
        Action::Sync => rustix::fs::fdatasync(fd).map(|()| 0).map_err(Into::into),
        Action::Allocate { mode, at, length } => rustix::fs::fallocate(fd, mode, at, length)
            .map(|()| 0)
            .map_err(Into::into),
    };
    match result {
        // No call transfers more than 2 GiB less a page.
        Ok(bytes) => i32::try_from(bytes).unwrap_or(i32::MAX),
        Err(error) => -error.raw_os_error().unwrap_or(libc::EIO),
    }
}

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
