//! Who may use an image file at the same time: QEMU's byte-range permission locks.
//!
//! A user of a file read-locks byte `100 + n` for every permission `n` it uses and byte `200 + n` for every permission it does
//! not let others use, and then looks whether somebody else locked the opposite byte. The locks belong to the open file
//! description: they end with it, whatever happens to the process, and two opens in one process conflict as well.
//!
//! | n | permission | reader | writer |
//! |---|---|---|---|
//! | 0 | consistent read | uses | uses |
//! | 1 | write | forbids | uses, forbids |
//! | 3 | resize | forbids | uses, forbids |
//!
//! So readers never conflict, and a writer is alone. QEMU's own tools follow the same table (`file.locking=auto`), except that those
//! which read a raw image forbid nothing, since it has no tables that could change under them.
//!
//! What reaches over hosts and over the death of a process is the lease ([`crate::lease`]).

use std::os::fd::BorrowedFd;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::error::{Error, ErrorKind};
use crate::io::sys;

const PERMISSION_BASE: i64 = 100;
const FORBID_BASE: i64 = 200;

const CONSISTENT_READ: i64 = 0;
const WRITE: i64 = 1;
const RESIZE: i64 = 3;

/// How an image is going to be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    /// Read, while others may read.
    Read,
    /// Write, alone.
    Write,
}

impl Access {
    fn uses(self) -> &'static [i64] {
        match self {
            Self::Read => &[CONSISTENT_READ],
            Self::Write => &[CONSISTENT_READ, WRITE, RESIZE],
        }
    }

    fn forbids(self) -> &'static [i64] {
        &[WRITE, RESIZE]
    }
}

/// How long a lock is waited for that may be that of a killed process: the host lets go of its transfers a little later than of
/// the process.
const PATIENCE: Duration = Duration::from_millis(200);
const LOOK_AGAIN: Duration = Duration::from_millis(5);

/// Locks the file of `fd` until it is closed.
///
/// # Errors
/// Another process uses the file in a way that excludes this one, or the file system has no such locks.
pub(crate) fn acquire(path: &Path, fd: BorrowedFd<'_>, access: Access) -> Result<(), Error> {
    match attempt(path, fd, access) {
        Err(error)
            if matches!(error.kind, ErrorKind::Locked(_))
                && is_free_within(fd, access, PATIENCE) =>
        {
            attempt(path, fd, access)
        }
        other => other,
    }
}

/// Waits until nobody has a lock that excludes `access`. Takes none itself, so that it disturbs nobody.
pub(crate) fn is_free_within(fd: BorrowedFd<'_>, access: Access, patience: Duration) -> bool {
    let others = |base: i64, permissions: &[i64]| {
        let locked = |n: &i64| sys::ofd_is_locked(fd, base + n).unwrap_or(true);
        permissions.iter().any(locked)
    };
    let end = Instant::now() + patience;
    loop {
        if !others(FORBID_BASE, access.uses()) && !others(PERMISSION_BASE, access.forbids()) {
            return true;
        }
        if Instant::now() >= end {
            return false;
        }
        std::thread::sleep(LOOK_AGAIN);
    }
}

fn attempt(path: &Path, fd: BorrowedFd<'_>, access: Access) -> Result<(), Error> {
    let host = |error| Error::io(path, "lock it", error);
    // All locks first, then all tests: of two that come at once, at least one sees the other.
    for n in access.uses() {
        sys::ofd_lock(fd, PERMISSION_BASE + n, libc::F_RDLCK).map_err(host)?;
    }
    for n in access.forbids() {
        sys::ofd_lock(fd, FORBID_BASE + n, libc::F_RDLCK).map_err(host)?;
    }
    for n in access.uses() {
        if sys::ofd_is_locked(fd, FORBID_BASE + n).map_err(host)? {
            release(fd, access);
            let reason = "in use by another process, which excludes writers: stop it first";
            return Err(Error::new(path, ErrorKind::Locked(reason)));
        }
    }
    for n in access.forbids() {
        if sys::ofd_is_locked(fd, PERMISSION_BASE + n).map_err(host)? {
            release(fd, access);
            let reason = "another process has it open for writing: stop it first";
            return Err(Error::new(path, ErrorKind::Locked(reason)));
        }
    }
    Ok(())
}

/// Lets go of what [`acquire`] took.
pub(crate) fn release(fd: BorrowedFd<'_>, access: Access) {
    for byte in access
        .uses()
        .iter()
        .map(|n| PERMISSION_BASE + n)
        .chain(access.forbids().iter().map(|n| FORBID_BASE + n))
    {
        // Failure leaves a lock that ends with the descriptor, which the caller is about to close.
        let _ = sys::ofd_lock(fd, byte, libc::F_UNLCK);
    }
}
