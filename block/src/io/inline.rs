//! The synchronous back end: every transfer is over when the call returns.

use std::io;
use std::os::fd::BorrowedFd;

use rustix::fs::FallocateFlags;

use super::{FileIo, sys};
use crate::buffers::RawSlice;

/// Plain system calls on the caller's thread.
pub(crate) struct Inline;

impl FileIo for Inline {
    async fn readv(&self, fd: BorrowedFd<'_>, at: u64, slices: &[RawSlice]) -> io::Result<usize> {
        retry(|| sys::preadv(fd, at, slices))
    }

    async fn writev(&self, fd: BorrowedFd<'_>, at: u64, slices: &[RawSlice]) -> io::Result<usize> {
        retry(|| sys::pwritev(fd, at, slices))
    }

    async fn fdatasync(&self, fd: BorrowedFd<'_>) -> io::Result<()> {
        retry(|| Ok(rustix::fs::fdatasync(fd)?))
    }

    async fn fallocate(
        &self,
        fd: BorrowedFd<'_>,
        mode: FallocateFlags,
        at: u64,
        length: u64,
    ) -> io::Result<()> {
        retry(|| Ok(rustix::fs::fallocate(fd, mode, at, length)?))
    }
}

fn retry<T>(mut call: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    loop {
        match call() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            other => return other,
        }
    }
}
