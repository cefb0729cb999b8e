//! What can go wrong: [`Error`] when an image is opened or worked on as a whole, [`IoError`] for one request.

use std::io;
use std::path::{Path, PathBuf};

/// An image cannot be opened, made or changed. One line: the file, what is wrong, what to do.
#[derive(Debug, thiserror::Error)]
#[error("{}: {kind}", path.display())]
pub struct Error {
    /// The file in question.
    pub path: PathBuf,
    /// What is wrong with it.
    #[source]
    pub kind: ErrorKind,
}

/// Reasons of an [`Error`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The host refused a call.
    #[error("cannot {doing}: {source}")]
    Io {
        /// What was attempted.
        doing: &'static str,
        /// The host's answer.
        source: io::Error,
    },
    /// A request of a job failed.
    #[error("{0}")]
    Request(#[from] IoError),
    /// The file is neither a regular file nor a block device.
    #[error("not a regular file or block device")]
    NotAFile,
    /// The format stated is qcow2 and the file is not.
    #[error("not a qcow2 image: bad magic {0:#010x} (state `format: raw` if that is what it is)")]
    Magic(u32),
    /// A header field that no image may have.
    #[error("qcow2 header: {field} {reason}")]
    Header {
        /// Name in the specification.
        field: &'static str,
        /// Value and what is wrong with it.
        reason: String,
    },
    /// A well-formed image that needs something we do not do.
    #[error("unsupported: {0}")]
    Unsupported(String),
    /// The image cannot be written as it is.
    #[error("cannot be opened for writing: {0}")]
    NotWritable(String),
    /// Another process uses the file in a way that excludes us.
    #[error("{0}")]
    Locked(&'static str),
    /// The lease beside the image keeps others from writing it; see [`crate::lease`].
    #[error("{0}")]
    Leased(String),
    /// The chain of backing files is not allowed.
    #[error("{0}")]
    Backing(String),
    /// Direct I/O was asked for where the file system has none.
    #[error("its file system does not do direct I/O (O_DIRECT): set `cache: buffered` for it")]
    NoDirectIo,
    /// A job was stopped by who watches it.
    #[error("cancelled")]
    Cancelled,
    /// What was to be fetched did not come.
    #[error("cannot be downloaded: {0}")]
    Download(String),
    /// What was fetched is not what was wanted.
    #[error(
        "its SHA-256 is {seen}, not {wanted}: it is not the file that was meant, or it was damaged on the way"
    )]
    Checksum {
        /// What the caller stated, in hexadecimal digits.
        wanted: String,
        /// What the bytes have.
        seen: String,
    },
    /// What is stated to be packed does not unpack.
    #[error("cannot be unpacked as {how}: {reason}")]
    Packed {
        /// How it was stated to be packed.
        how: &'static str,
        /// What is wrong.
        reason: String,
    },
    /// A job that cannot be begun on this disk.
    #[error("{0}")]
    Job(String),
    /// A size that cannot be.
    #[error("{0}")]
    Size(String),
}

impl Error {
    pub(crate) fn new(path: &Path, kind: ErrorKind) -> Self {
        Self {
            path: path.to_owned(),
            kind,
        }
    }

    pub(crate) fn io(path: &Path, doing: &'static str, source: impl Into<io::Error>) -> Self {
        Self::new(
            path,
            ErrorKind::Io {
                doing,
                source: source.into(),
            },
        )
    }

    pub(crate) fn header(path: &Path, field: &'static str, reason: impl Into<String>) -> Self {
        Self::new(
            path,
            ErrorKind::Header {
                field,
                reason: reason.into(),
            },
        )
    }
}

/// One request failed. Offsets and lengths are bytes.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum IoError {
    /// The request reaches past the end of the disk.
    #[error("{length} bytes at {offset} reach past the disk's end at {size}")]
    OutOfRange {
        /// First byte of the disk asked for.
        offset: u64,
        /// How many.
        length: u64,
        /// Size of the disk.
        size: u64,
    },
    /// The disk was opened for reading only.
    #[error("the disk is read-only")]
    ReadOnly,
    /// The disk does not do this.
    #[error("{0} is not supported by this disk")]
    Unsupported(&'static str),
    /// The host is out of space.
    #[error("no space left on the host for the image")]
    NoSpace,
    /// The image contradicts itself.
    #[error("corrupt image: {reason} (host offset {host_offset:#x})")]
    Corrupt {
        /// Where in the file.
        host_offset: u64,
        /// What is wrong there.
        reason: &'static str,
    },
    /// Writing has stopped for good after an earlier failure.
    #[error("writing has stopped: {0}")]
    Stopped(&'static str),
    /// Writes that had completed were lost when the disk was opened again, and this flush is the one that has to say so.
    #[error("writes that had completed were lost: the host failed to make them durable")]
    Lost,
    /// The host failed.
    #[error("cannot {doing} at host offset {host_offset:#x}: {}", io::Error::from_raw_os_error(*errno))]
    Host {
        /// What was attempted.
        doing: &'static str,
        /// Where in the file.
        host_offset: u64,
        /// The host's answer.
        errno: i32,
    },
}

/// What a failure of a request is a failure of; see docs/adr/0008-ownership.md.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorClass {
    /// The guest has to know: it asked for what cannot be, or a flush cannot keep its promise. Trying again is no answer.
    Guest,
    /// The host is out of space. The request can be made again once there is some.
    NoSpace,
    /// The host or the image failed. The request can be made again after a repair, on a disk that was opened anew.
    Host,
}

impl IoError {
    /// What it is a failure of.
    #[must_use]
    pub fn class(&self) -> ErrorClass {
        match self {
            Self::OutOfRange { .. } | Self::ReadOnly | Self::Unsupported(_) | Self::Lost => {
                ErrorClass::Guest
            }
            Self::NoSpace => ErrorClass::NoSpace,
            Self::Corrupt { .. } | Self::Stopped(_) | Self::Host { .. } => ErrorClass::Host,
        }
    }

    pub(crate) fn host(doing: &'static str, host_offset: u64, error: &io::Error) -> Self {
        match error.raw_os_error() {
            Some(libc::ENOSPC | libc::EDQUOT) => Self::NoSpace,
            errno => Self::Host {
                doing,
                host_offset,
                errno: errno.unwrap_or(libc::EIO),
            },
        }
    }

    pub(crate) fn corrupt(host_offset: u64, reason: &'static str) -> Self {
        Self::Corrupt {
            host_offset,
            reason,
        }
    }
}
