//! A disk: requests in, completions out.
//!
//! ```text
//!  submit(Request) ──> check ──> task: hold clusters ─> map ─> transfer ─> link ──> Completion ──> poll()
//! ```
//!
//! Everything happens on the thread that calls [`Disk::submit`] and [`Disk::poll`]. With the synchronous back end a task runs to
//! its end inside `submit`.

use std::os::fd::BorrowedFd;

use crate::DiskSpec;
use crate::buffers::Buffers;
use crate::chain::{Chain, Image};
use crate::error::{Error, ErrorKind, IoError};
use crate::qcow2::Clear;
use crate::task::{self, Kind};

/// What a request does. Offsets and lengths are bytes of the disk, of any alignment.
#[derive(Debug)]
pub enum Op {
    /// Fills `buffers` from the disk.
    Read {
        /// First byte.
        offset: u64,
        /// Where the bytes go; their length is the request's.
        buffers: Buffers,
    },
    /// Writes `buffers` to the disk.
    Write {
        /// First byte.
        offset: u64,
        /// Where the bytes come from; their length is the request's.
        buffers: Buffers,
    },
    /// Makes everything durable that completed before. Succeeds on a read-only disk.
    Flush,
    /// Tells that a range's contents are not needed. Afterwards it reads as zero, or as before.
    Discard {
        /// First byte.
        offset: u64,
        /// Number of bytes.
        length: u64,
    },
    /// Makes a range read as zero.
    WriteZeroes {
        /// First byte.
        offset: u64,
        /// Number of bytes.
        length: u64,
        /// The range's space may be given back.
        unmap: bool,
    },
}

/// A request.
#[derive(Debug)]
pub struct Request {
    /// Comes back with the completion.
    pub tag: u64,
    /// What to do.
    pub op: Op,
}

/// The end of a request.
#[derive(Debug)]
pub struct Completion {
    /// The request's.
    pub tag: u64,
    /// How it ended.
    pub result: Result<(), IoError>,
}

/// Failures of one disk that are logged; later ones are only counted by whoever serves the disk.
const LOGGED_FAILURES: u32 = 32;

/// An open disk. It can move to another thread, and belongs to one at a time.
pub struct Disk {
    chain: Chain,
    read_only: bool,
    discard: bool,
    done: Vec<Completion>,
    failures: u32,
    closed: bool,
}

impl std::fmt::Debug for Disk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Disk({})", self.chain.top().file().path().display())
    }
}

impl Disk {
    /// Opens and locks every image of a disk. No byte of any of them is changed.
    ///
    /// # Errors
    /// An image is missing, in use, of another format than stated, damaged or in need of something unsupported; or a header names
    /// a backing file that nothing permits.
    pub fn open(spec: &DiskSpec) -> Result<Self, Error> {
        Ok(Self {
            chain: Chain::open(spec)?,
            read_only: spec.read_only,
            discard: spec.discard,
            done: Vec::new(),
            failures: 0,
            closed: false,
        })
    }

    /// Size in bytes.
    #[must_use]
    pub fn size_bytes(&self) -> u64 {
        self.chain.top().size()
    }

    /// Whether writes are refused.
    #[must_use]
    pub fn read_only(&self) -> bool {
        self.read_only
    }

    /// Whether discards give space back.
    #[must_use]
    pub fn supports_discard(&self) -> bool {
        self.discard && !self.read_only
    }

    /// To what discards should be aligned, in bytes: smaller ones may give no space back. At most 2 MiB.
    #[must_use]
    pub fn discard_granularity(&self) -> u64 {
        self.chain.top().discard_granularity()
    }

    /// Begins a request; its completion comes from [`Disk::poll`].
    pub fn submit(&mut self, request: Request) {
        let Request { tag, op } = request;
        let result = task::complete(self.run(&op));
        drop(op);
        if let Err(error) = &result {
            self.log(error);
        }
        self.done.push(Completion { tag, result });
    }

    /// Moves what has completed to the end of `completions`.
    pub fn poll(&mut self, completions: &mut Vec<Completion>) {
        completions.append(&mut self.done);
    }

    /// Readable when [`Disk::poll`] would have something new; `None` where that is right after [`Disk::submit`].
    #[must_use]
    pub fn event(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Requests submitted whose completion [`Disk::poll`] has not handed out.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.done.len()
    }

    /// Runs one request to its end, for whoever has nothing else to do meanwhile.
    ///
    /// # Errors
    /// As its completion would tell.
    pub fn execute(&mut self, op: &Op) -> Result<(), IoError> {
        task::complete(self.run(op))
    }

    /// Makes everything durable and lets go of the images.
    ///
    /// # Errors
    /// The host failed to make something durable.
    pub fn close(mut self) -> Result<(), Error> {
        self.closed = true;
        self.settle()
            .map_err(|error| Error::new(self.chain.top().file().path(), ErrorKind::Request(error)))
    }

    fn settle(&self) -> Result<(), IoError> {
        match self.chain.top() {
            _ if self.read_only => Ok(()),
            Image::Raw(raw) => task::complete(raw.flush()),
            Image::Qcow2(qcow2) => task::complete(qcow2.settle()),
        }
    }

    /// Changes the size of the disk to `size` bytes, durably.
    pub(crate) fn resize(&mut self, size: u64) -> Result<(), ErrorKind> {
        let below = self.chain.below_size();
        if let Image::Raw(raw) = self.chain.top_mut() {
            raw.resize(size).map_err(|source| ErrorKind::Io {
                doing: "resize it",
                source,
            })?;
            return Ok(task::complete(raw.flush())?);
        }
        if let Image::Qcow2(qcow2) = self.chain.top() {
            if let Some(obstacle) = qcow2.resize_obstacle(size) {
                return Err(ErrorKind::Size(obstacle));
            }
            task::complete(qcow2.resize(&self.chain, size, below))?;
        }
        Ok(())
    }

    async fn run(&self, op: &Op) -> Result<(), IoError> {
        match op {
            Op::Read { offset, buffers } => {
                self.check(*offset, buffers.len() as u64)?;
                self.read(*offset, buffers).await
            }
            Op::Write { offset, buffers } => {
                self.check_change(*offset, buffers.len() as u64)?;
                self.write(*offset, buffers).await
            }
            Op::Flush => match self.chain.top() {
                _ if self.read_only => Ok(()),
                Image::Raw(raw) => raw.flush().await,
                Image::Qcow2(qcow2) => qcow2.flush().await,
            },
            Op::Discard { offset, length } => {
                self.check_change(*offset, *length)?;
                if !self.discard {
                    return Err(IoError::Unsupported("discard"));
                }
                match self.chain.top() {
                    _ if *length == 0 => Ok(()),
                    Image::Raw(raw) => raw.discard(*offset, *length).await,
                    Image::Qcow2(qcow2) => {
                        qcow2
                            .clear(&self.chain, *offset, *length, Clear::Discard)
                            .await
                    }
                }
            }
            Op::WriteZeroes {
                offset,
                length,
                unmap,
            } => {
                self.check_change(*offset, *length)?;
                let unmap = *unmap && self.discard;
                match self.chain.top() {
                    _ if *length == 0 => Ok(()),
                    Image::Raw(raw) => raw.zero(*offset, *length, unmap).await,
                    Image::Qcow2(qcow2) => {
                        qcow2
                            .clear(&self.chain, *offset, *length, Clear::Zeroes { unmap })
                            .await
                    }
                }
            }
        }
    }

    async fn read(&self, offset: u64, buffers: &Buffers) -> Result<(), IoError> {
        if buffers.is_empty() {
            return Ok(());
        }
        let _hold = match self.chain.top() {
            Image::Raw(_) => None,
            Image::Qcow2(top) => Some(top.hold(offset, buffers.len() as u64, Kind::Shared).await),
        };
        self.chain.read_held(offset, buffers.span()).await
    }

    async fn write(&self, offset: u64, buffers: &Buffers) -> Result<(), IoError> {
        match self.chain.top() {
            _ if buffers.is_empty() => Ok(()),
            Image::Raw(raw) => raw.write(offset, buffers.span()).await,
            Image::Qcow2(qcow2) => qcow2.write(&self.chain, offset, buffers.span()).await,
        }
    }

    fn check(&self, offset: u64, length: u64) -> Result<(), IoError> {
        let size = self.size_bytes();
        match offset.checked_add(length) {
            Some(end) if end <= size => Ok(()),
            _ => Err(IoError::OutOfRange {
                offset,
                length,
                size,
            }),
        }
    }

    fn check_change(&self, offset: u64, length: u64) -> Result<(), IoError> {
        if self.read_only {
            return Err(IoError::ReadOnly);
        }
        self.check(offset, length)
    }

    /// Logs what an operator can act on; a guest that asks for nonsense is not worth a line.
    fn log(&mut self, error: &IoError) {
        use IoError::{OutOfRange, ReadOnly, Unsupported};
        if matches!(error, OutOfRange { .. } | ReadOnly | Unsupported(_)) {
            return;
        }
        self.failures = self.failures.saturating_add(1);
        if self.failures <= LOGGED_FAILURES {
            let image = self.chain.top().file().path().display();
            tracing::warn!(%image, %error, "a disk request failed");
        }
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        if !self.closed
            && let Err(error) = self.settle()
        {
            self.log(&error);
        }
    }
}
