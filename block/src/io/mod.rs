//! The files below an image: whole transfers at any alignment, over a back end that moves bytes.
//!
//! ```text
//!  engine ──(offset, Span)──> BlockFile ──aligned?──> FileIo: Inline (system calls) | Queue (io_uring or threads)
//!                                 │ no                   ^
//!                                 └──> bounce (whole blocks through memory of ours)
//! ```
//!
//! A read past the end of the file gives zeros, as every reader of sparse images expects; the engines decide what lies
//! too far beyond to be honest.

mod bounce;
mod counts;
mod inline;
mod pace;
mod pool;
pub(crate) mod queue;
mod ring;
#[cfg(test)]
pub(crate) mod shuffle;
pub(crate) mod sys;
#[cfg(test)]
pub(crate) mod tape;

use std::cell::Cell;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::{FallocateFlags, FileType, Mode, OFlags, SeekFrom};

pub use self::counts::HostCounts;
use self::inline::Inline;
use self::queue::Queue;
use crate::Cache;
use crate::buffers::{PAGE, Pages, RawSlice, Span};
use crate::error::{Error, ErrorKind};
use crate::lease;
use crate::lock::{self, Access};
use crate::sync;
use crate::task::{Guard, Kind, RangeLock};

/// What moves bytes between a descriptor and memory. Transfers may be short, as the system calls are.
pub(crate) trait FileIo {
    /// `preadv`: bytes read, 0 at the end of the file.
    async fn readv(&self, fd: BorrowedFd<'_>, at: u64, slices: &[RawSlice]) -> io::Result<usize>;
    /// `pwritev`: bytes written.
    async fn writev(&self, fd: BorrowedFd<'_>, at: u64, slices: &[RawSlice]) -> io::Result<usize>;
    /// `fdatasync`.
    async fn fdatasync(&self, fd: BorrowedFd<'_>) -> io::Result<()>;
    /// `fallocate`.
    async fn fallocate(
        &self,
        fd: BorrowedFd<'_>,
        mode: FallocateFlags,
        at: u64,
        length: u64,
    ) -> io::Result<()>;
}

/// The back end of a file.
enum Io {
    /// System calls on the spot.
    Inline(Inline),
    /// Whatever a queue has behind it; the task waits.
    Queued(Arc<Queue>),
}

impl FileIo for Io {
    async fn readv(&self, fd: BorrowedFd<'_>, at: u64, slices: &[RawSlice]) -> io::Result<usize> {
        #[cfg(test)]
        let cut = tape::read(fd, slices)?;
        #[cfg(test)]
        let slices = cut.as_deref().unwrap_or(slices);
        match self {
            Self::Inline(io) => io.readv(fd, at, slices).await,
            Self::Queued(io) => io.readv(fd, at, slices).await,
        }
    }

    async fn writev(&self, fd: BorrowedFd<'_>, at: u64, slices: &[RawSlice]) -> io::Result<usize> {
        #[cfg(test)]
        let (_recorded, cut) = tape::write(fd, at, slices)?;
        #[cfg(test)]
        let slices = cut.as_deref().unwrap_or(slices);
        match self {
            Self::Inline(io) => io.writev(fd, at, slices).await,
            Self::Queued(io) => io.writev(fd, at, slices).await,
        }
    }

    async fn fdatasync(&self, fd: BorrowedFd<'_>) -> io::Result<()> {
        #[cfg(test)]
        let _recorded = tape::sync(fd)?;
        match self {
            Self::Inline(io) => io.fdatasync(fd).await,
            Self::Queued(io) => io.fdatasync(fd).await,
        }
    }

    async fn fallocate(
        &self,
        fd: BorrowedFd<'_>,
        mode: FallocateFlags,
        at: u64,
        length: u64,
    ) -> io::Result<()> {
        #[cfg(test)]
        let _recorded = tape::punch(fd, at, length)?;
        match self {
            Self::Inline(io) => io.fallocate(fd, mode, at, length).await,
            Self::Queued(io) => io.fallocate(fd, mode, at, length).await,
        }
    }
}

/// What direct I/O demands, in bytes; powers of two.
#[derive(Clone, Copy, Debug)]
struct Alignment {
    memory: usize,
    offset: usize,
}

impl Alignment {
    fn down(self, at: u64) -> u64 {
        at & !(self.offset as u64 - 1)
    }

    fn up(self, at: u64) -> u64 {
        self.down(at.saturating_add(self.offset as u64 - 1))
    }
}

/// A file or block device under an image.
pub(crate) struct BlockFile {
    path: PathBuf,
    fd: OwnedFd,
    io: Io,
    counts: Arc<HostCounts>,
    /// `Some` for O_DIRECT.
    direct: Option<Alignment>,
    /// The last bytes of a direct file that must not grow and whose size is no multiple of the alignment: from where, and a
    /// descriptor that goes through the page cache.
    tail: Option<(u64, OwnedFd)>,
    /// Blocks of a direct file that are being read, changed and written back.
    blocks: RangeLock,
    /// Where the file ends now.
    end: Cell<u64>,
    /// One unit: the fdatasync under way.
    syncing: RangeLock,
    /// Number of changes made, and how many of them are known to be durable.
    changes: Cell<u64>,
    durable: Cell<u64>,
    /// The error of an fdatasync that failed: nobody knows what was lost, so it stays.
    sync_failed: Cell<Option<i32>>,
    /// Whether the host's file system can punch holes; assumed until it says no.
    punches: Cell<bool>,
    zeroes_range: Cell<bool>,
    is_device: bool,
    /// What ranges that the host itself clears must be multiples of, in bytes: a logical block of a device.
    unit: u64,
    locked: Cell<Option<Access>>,
}

impl Drop for BlockFile {
    fn drop(&mut self) {
        // Closing does it too, but not while a process that was being forked off still has the descriptor.
        if let Some(access) = self.locked.get() {
            lock::release(self.fd(), access);
        }
    }
}

/// The longest run of zeros written at once where the host cannot zero a range by itself.
const ZERO_CHUNK: usize = 256 * 1024;
/// How long the transfers of a process that was killed may go on.
const LAST_TRANSFERS: Duration = Duration::from_secs(3);

impl BlockFile {
    /// Opens an existing regular file or block device.
    pub(crate) fn open(path: &Path, cache: Cache, writable: bool) -> Result<Self, Error> {
        let fd = rustix::fs::open(path, open_flags(cache, writable), Mode::empty())
            .map_err(|errno| open_error(path, cache, writable, errno))?;
        Self::from_fd(path, fd, cache)
    }

    /// Takes a descriptor opened with [`open_flags`].
    pub(crate) fn from_fd(path: &Path, fd: OwnedFd, cache: Cache) -> Result<Self, Error> {
        let stat = rustix::fs::fstat(&fd).map_err(|e| Error::io(path, "examine it", e))?;
        let is_device = match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile => false,
            FileType::BlockDevice => true,
            _ => return Err(Error::new(path, ErrorKind::NotAFile)),
        };
        // O_NONBLOCK was there only so that opening a FIFO does not hang.
        rustix::fs::fcntl_getfl(&fd)
            .and_then(|flags| rustix::fs::fcntl_setfl(&fd, flags - OFlags::NONBLOCK))
            .map_err(|e| Error::io(path, "set its flags", e))?;
        let end = rustix::fs::seek(&fd, SeekFrom::End(0))
            .map_err(|e| Error::io(path, "find its size", e))?;
        let unit = match is_device {
            false => 1,
            true => rustix::fs::ioctl_blksszget(&fd)
                .map_err(|e| Error::io(path, "ask for its block size", e))?
                .into(),
        };
        let direct = match cache {
            Cache::Buffered => None,
            Cache::Direct => Some(direct_alignment(path, fd.as_fd())?),
        };
        Ok(Self {
            path: path.to_owned(),
            fd,
            io: Io::Inline(Inline),
            counts: Arc::default(),
            direct,
            tail: None,
            blocks: RangeLock::default(),
            end: Cell::new(end),
            syncing: RangeLock::default(),
            changes: Cell::new(0),
            durable: Cell::new(0),
            sync_failed: Cell::new(None),
            punches: Cell::new(true),
            zeroes_range: Cell::new(true),
            is_device,
            unit,
            locked: Cell::new(None),
        })
    }

    /// Keeps other processes from using the file in a way that conflicts, until this is dropped. Where it is going to be written its
    /// lease must allow that.
    pub(crate) fn lock(&self, access: Access) -> Result<(), Error> {
        self.lock_below(access, None)
    }

    /// [`BlockFile::lock`] for an image over which `above` lies, which may be committed to it.
    pub(crate) fn lock_below(&self, access: Access, above: Option<&Path>) -> Result<(), Error> {
        match self.lock_only(access) {
            // What a killed holder had under way ends soon, and its lock with it.
            Err(error)
                if matches!(error.kind, ErrorKind::Locked(_))
                    && lease::holder_has_died(&self.path)
                    && lock::is_free_within(self.fd(), access, LAST_TRANSFERS) =>
            {
                self.lock_only(access)?;
            }
            other => other?,
        }
        if access == Access::Write && !self.is_device {
            lease::check(&self.path, above)?;
        }
        Ok(())
    }

    /// [`BlockFile::lock`] whatever its lease says.
    pub(crate) fn lock_only(&self, access: Access) -> Result<(), Error> {
        lock::acquire(&self.path, self.fd(), access)?;
        self.locked.set(Some(access));
        Ok(())
    }

    /// Promises that the file never grows, as the size of a raw image is that of its file.
    pub(crate) fn fix_size(&mut self) -> Result<(), Error> {
        let (Some(alignment), end) = (self.direct, self.end.get()) else {
            return Ok(());
        };
        if alignment.down(end) == end {
            return Ok(());
        }
        let same_file = format!("/proc/self/fd/{}", self.fd.as_raw_fd());
        let mode = rustix::fs::fcntl_getfl(&self.fd)
            .map_err(|e| Error::io(&self.path, "read its flags", e))?
            & OFlags::RWMODE;
        let fd = rustix::fs::open(same_file, mode | OFlags::CLOEXEC, Mode::empty())
            .map_err(|e| Error::io(&self.path, "open its last block through the page cache", e))?;
        self.tail = Some((alignment.down(end), fd));
        Ok(())
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// The descriptors that transfers go through.
    pub(crate) fn descriptors(&self) -> impl Iterator<Item = RawFd> {
        let tail = self.tail.iter().map(|(_, fd)| fd.as_raw_fd());
        std::iter::once(self.fd.as_raw_fd()).chain(tail)
    }

    /// From now on transfers go through `queue`.
    pub(crate) fn set_queue(&mut self, queue: &Arc<Queue>) {
        self.io = Io::Queued(Arc::clone(queue));
    }

    /// From now on calls are counted in `counts`.
    pub(crate) fn set_counts(&mut self, counts: &Arc<HostCounts>) {
        self.counts = Arc::clone(counts);
    }

    /// Where the file ends, in bytes.
    pub(crate) fn end(&self) -> u64 {
        self.end.get()
    }

    pub(crate) fn is_device(&self) -> bool {
        self.is_device
    }

    /// Reads `span.len()` bytes; what lies past the end of the file is zero.
    pub(crate) async fn read(&self, at: u64, span: Span<'_>) -> io::Result<()> {
        match self.direct {
            Some(alignment) if !is_aligned(alignment, at, span) => {
                self.read_bounced(alignment, at, span).await
            }
            _ => self.read_whole(at, span).await,
        }
    }

    async fn read_whole(&self, at: u64, span: Span<'_>) -> io::Result<()> {
        let mut done = 0;
        while done < span.len() {
            let rest = span.part(done, span.len());
            self.counts.read(rest.len());
            let read = self
                .io
                .readv(self.fd(), add(at, done)?, &rest.slices())
                .await?;
            done += read;
            // A direct read that stops between blocks has met the end, and could not go on from there anyway.
            if read == 0 || self.direct.is_some_and(|a| !read.is_multiple_of(a.offset)) {
                span.part(done, span.len()).fill_zero();
                break;
            }
        }
        Ok(())
    }

    /// Writes the whole span.
    pub(crate) async fn write(&self, at: u64, span: Span<'_>) -> io::Result<()> {
        self.changed();
        if let Some((from, fd)) = &self.tail {
            let end = add(at, span.len())?;
            if end > *from {
                // The last block goes through the page cache, which does not round its end up.
                let before = usize::try_from(from.saturating_sub(at)).unwrap_or(usize::MAX);
                let before = before.min(span.len());
                if before > 0 {
                    self.write_blocks(at, span.part(0, before)).await?;
                }
                let rest = span.part(before, span.len());
                return self.write_whole(fd.as_fd(), add(at, before)?, rest).await;
            }
        }
        self.write_blocks(at, span).await
    }

    async fn write_blocks(&self, at: u64, span: Span<'_>) -> io::Result<()> {
        match self.direct {
            Some(alignment) => self.write_direct(alignment, at, span).await,
            None => self.write_whole(self.fd(), at, span).await,
        }
    }

    async fn write_whole(&self, fd: BorrowedFd<'_>, at: u64, span: Span<'_>) -> io::Result<()> {
        let end = add(at, span.len())?;
        let mut done = 0;
        let mut result = Ok(());
        while done < span.len() {
            let rest = span.part(done, span.len());
            self.counts.write(rest.len());
            match self.io.writev(fd, add(at, done)?, &rest.slices()).await {
                Ok(0) => result = Err(io::ErrorKind::WriteZero.into()),
                Ok(written) => done += written,
                Err(error) => result = Err(error),
            }
            if result.is_err() {
                break;
            }
        }
        // After a failure nobody knows how far the file grew: nothing below `end` may be taken for fresh.
        self.end.set(self.end.get().max(end));
        self.changed();
        result
    }

    fn changed(&self) {
        self.changes.set(self.changes.get().wrapping_add(1));
    }

    /// Makes all that was written durable. Does nothing where nothing was written since the last time. Once it has failed it
    /// fails for good: the kernel forgets the pages that it could not write, and would call the next attempt a success.
    pub(crate) async fn sync(&self) -> io::Result<()> {
        if let Some(errno) = self.sync_failed.get() {
            return Err(io::Error::from_raw_os_error(errno));
        }
        let wanted = self.changes.get();
        if self.durable.get() >= wanted {
            return Ok(());
        }
        // One at a time: those who wait share the next one.
        let _turn = self.syncing.hold(0..1, Kind::Exclusive).await;
        if let Some(errno) = self.sync_failed.get() {
            return Err(io::Error::from_raw_os_error(errno));
        }
        if self.durable.get() >= wanted {
            return Ok(());
        }
        let seen = self.changes.get();
        self.counts.sync();
        let result = self.io.fdatasync(self.fd()).await;
        if let Err(error) = &result {
            let errno = error.raw_os_error().unwrap_or(libc::EIO);
            self.sync_failed.set(Some(errno));
        }
        if result.is_ok() {
            self.durable.set(seen);
        }
        result
    }

    /// Keeps writes that read, change and write back whole blocks away from a range that is about to be cleared: they would put
    /// back what was there before.
    async fn own_blocks(&self, at: u64, length: u64) -> Option<Guard<'_>> {
        let alignment = self.direct?;
        let blocks = alignment.down(at)..alignment.up(at.saturating_add(length));
        Some(self.blocks.hold(blocks, Kind::Exclusive).await)
    }

    /// The part of a range that the host itself can clear: whole blocks of a device.
    fn whole_units(&self, at: u64, length: u64) -> Range<u64> {
        let end = at.saturating_add(length);
        let first = at.checked_next_multiple_of(self.unit).unwrap_or(end);
        first..(end - end % self.unit).max(first)
    }

    /// Clears whole blocks; false where the host has no such call.
    async fn clear(&self, mode: FallocateFlags, range: Range<u64>) -> io::Result<bool> {
        let (at, length) = (range.start, range.end - range.start);
        let _blocks = self.own_blocks(at, length).await;
        self.changed();
        self.counts.allocate();
        let mode = mode | FallocateFlags::KEEP_SIZE;
        let result = self.io.fallocate(self.fd(), mode, at, length).await;
        self.changed();
        match result {
            Ok(()) => Ok(true),
            Err(error) if is_unsupported(&error) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Gives space back; true if the range reads as zero from now on, false where the host cannot do that. Of a device only whole
    /// blocks are given back.
    pub(crate) async fn punch(&self, at: u64, length: u64) -> io::Result<bool> {
        let whole = self.whole_units(at, length);
        if whole.is_empty() || !self.punches.get() {
            return Ok(length == 0);
        }
        let is_all = whole == (at..at.saturating_add(length));
        let punched = self.clear(FallocateFlags::PUNCH_HOLE, whole).await?;
        self.punches.set(punched);
        Ok(punched && is_all)
    }

    /// Makes a range of the file read as zero; with `unmap` it may become a hole.
    pub(crate) async fn zero(&self, at: u64, length: u64, unmap: bool) -> io::Result<()> {
        let end = at.checked_add(length).ok_or_else(too_far)?;
        if unmap && self.punch(at, length).await? {
            return Ok(());
        }
        let mut whole = self.whole_units(at, length);
        // With holes, the whole blocks are zero by now.
        let cleared =
            !whole.is_empty() && (unmap && self.punches.get() || self.zero_range(&whole).await?);
        if !cleared {
            whole = at..at;
        }
        self.write_zeros(at..whole.start).await?;
        self.write_zeros(whole.end..end).await
    }

    async fn zero_range(&self, whole: &Range<u64>) -> io::Result<bool> {
        if !self.zeroes_range.get() {
            return Ok(false);
        }
        let zeroed = self
            .clear(FallocateFlags::ZERO_RANGE, whole.clone())
            .await?;
        self.zeroes_range.set(zeroed);
        Ok(zeroed)
    }

    async fn write_zeros(&self, range: Range<u64>) -> io::Result<()> {
        let length = range.end.saturating_sub(range.start);
        if length == 0 {
            return Ok(());
        }
        let chunk = |left| usize::try_from(left).unwrap_or(ZERO_CHUNK).min(ZERO_CHUNK);
        let mut zeros = Pages::zeroed(chunk(length));
        let span = zeros.span();
        let mut at = range.start;
        while at < range.end {
            let now = chunk(range.end - at);
            self.write(at, span.part(0, now)).await?;
            at += now as u64;
        }
        Ok(())
    }

    /// Changes where the file ends.
    pub(crate) fn set_end(&self, end: u64) -> io::Result<()> {
        #[cfg(test)]
        let _recorded = tape::truncate(self.fd(), end)?;
        rustix::fs::ftruncate(&self.fd, end)?;
        self.end.set(end);
        self.changed();
        Ok(())
    }
}

/// How an image is opened: never through a terminal, never waiting for a FIFO's other end, never inherited.
pub(crate) fn open_flags(cache: Cache, writable: bool) -> OFlags {
    let access = if writable {
        OFlags::RDWR
    } else {
        OFlags::RDONLY
    };
    let direct = match cache {
        Cache::Direct => OFlags::DIRECT,
        Cache::Buffered => OFlags::empty(),
    };
    access | direct | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY
}

/// What a failed open means to whoever named the file.
pub(crate) fn open_error(
    path: &Path,
    cache: Cache,
    writable: bool,
    errno: rustix::io::Errno,
) -> Error {
    if errno == rustix::io::Errno::ISDIR {
        return Error::new(path, ErrorKind::NotAFile);
    }
    if errno == rustix::io::Errno::INVAL && cache == Cache::Direct {
        // What is no file has no direct I/O either, and another cache mode would not help.
        let kind = match rustix::fs::stat(path).map(|stat| FileType::from_raw_mode(stat.st_mode)) {
            Ok(FileType::RegularFile | FileType::BlockDevice) | Err(_) => ErrorKind::NoDirectIo,
            Ok(_) => ErrorKind::NotAFile,
        };
        return Error::new(path, kind);
    }
    let doing = if writable {
        "open it for writing"
    } else {
        "open it for reading"
    };
    Error::io(path, doing, errno)
}

fn direct_alignment(path: &Path, fd: BorrowedFd<'_>) -> Result<Alignment, Error> {
    let told =
        sys::direct_alignment(fd).map_err(|e| Error::io(path, "ask for its alignment", e))?;
    let (memory, offset) = match told {
        None => (PAGE, PAGE),
        Some((0, _) | (_, 0)) => return Err(Error::new(path, ErrorKind::NoDirectIo)),
        Some((memory, offset)) => (memory as usize, offset as usize),
    };
    if !memory.is_power_of_two() || !offset.is_power_of_two() || memory > PAGE || offset > 64 * 1024
    {
        return Err(Error::new(path, ErrorKind::NoDirectIo));
    }
    Ok(Alignment { memory, offset })
}

fn is_aligned(alignment: Alignment, at: u64, span: Span<'_>) -> bool {
    alignment.down(at) == at && span.is_aligned(alignment.memory, alignment.offset)
}

fn is_unsupported(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::EOPNOTSUPP | libc::ENOSYS | libc::ENODEV)
    )
}

fn too_far() -> io::Error {
    io::Error::from_raw_os_error(libc::EFBIG)
}

fn add(at: u64, length: usize) -> io::Result<u64> {
    at.checked_add(length as u64).ok_or_else(too_far)
}
