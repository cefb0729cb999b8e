//! An image from elsewhere: a file or an HTTP(S) address, packed or not, checked and written in the form that is wanted.
//!
//! ```text
//!  URL ──> TARGET.download ─┐ sha256  ┌─ raw ──> TARGET.partial ────────────┐
//!            (resumed)      ├────────>┤                                     ├─ durable ─> rename ─> TARGET
//!  file ────────────────────┘         └─ else ─> TARGET.unpacked ─ convert ─┘
//! ```
//!
//! What comes in is believed in nothing: its format and packing are stated, its size has limits at every step, it is checked before
//! it is used, and an image that refers to other files is refused. The files beside the target are those of a job that died or was
//! cut off; the same command takes them up or replaces them, and removes them in the end.

mod download;
mod unpack;

use std::fs::File;
use std::io::Read;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use super::convert::{ConvertOptions, convert};
use super::fresh;
use super::job::{Monitor, Way};
use crate::error::{Error, ErrorKind};
use crate::io::BlockFile;
use crate::lock::{self, Access};
use crate::qcow2::read_header;
use crate::{Backing, Cache, DiskSpec, Format, Layer};

pub use self::unpack::Packing;

/// Where an image comes from.
#[derive(Clone, PartialEq, Eq)]
pub enum ImportSource {
    /// A file of this host.
    File(PathBuf),
    /// An `http:` or `https:` address. Credentials in it are sent, and shown nowhere.
    Url(String),
}

impl std::fmt::Debug for ImportSource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.shown().display())
    }
}

impl ImportSource {
    /// What messages call it: without credentials and without a query, which may be a signature.
    fn shown(&self) -> PathBuf {
        match self {
            Self::File(path) => path.clone(),
            Self::Url(url) => download::redacted(url).into(),
        }
    }
}

/// How an image is imported.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImportOptions {
    /// The format of what comes, once it is unpacked.
    pub format: Format,
    /// How it is packed.
    pub packing: Packing,
    /// The SHA-256 of the bytes as they come, before anything is unpacked.
    pub sha256: Option<[u8; 32]>,
    /// What is made of it.
    pub to: ConvertOptions,
    /// The most bytes to download.
    pub max_download_bytes: u64,
    /// The most bytes of the disk, and of what is unpacked.
    pub max_size_bytes: u64,
    /// The authorities to trust for `https:` in place of the host's, a file of PEM certificates.
    pub ca_file: Option<PathBuf>,
}

impl ImportOptions {
    /// From one format to another, not packed, at most 64 GiB to download and 2 TiB as a disk.
    #[must_use]
    pub fn new(format: Format, to: Format) -> Self {
        Self {
            format,
            packing: Packing::None,
            sha256: None,
            to: ConvertOptions::new(to),
            max_download_bytes: 64 << 30,
            max_size_bytes: 2 << 40,
            ca_file: None,
        }
    }
}

/// Bytes looked at in one go.
const CHUNK: usize = 1 << 20;

/// Fetches, checks, unpacks and converts an image; `target` is there whole or not at all.
///
/// # Errors
/// The target exists, what was to come did not or is not what was stated, a limit is passed, the image refers to other files, or the
/// host refuses. A download that was cut off, or stopped by the monitor, stays beside the target and goes on where it was when the
/// same import is done again.
pub fn import(
    source: &ImportSource,
    target: &Path,
    options: &ImportOptions,
    monitor: &mut dyn Monitor,
) -> Result<(), Error> {
    fresh::must_be_absent(target)?;
    let shown = source.shown();
    let (path, file) = match source {
        ImportSource::File(path) => (path.clone(), open_source(path)?),
        ImportSource::Url(url) => download::fetch(url, target, options, monitor)?,
    };
    let before = identity(&path, &file)?;
    let made = check_sum(&shown, &file, options, monitor).and_then(|()| {
        make(&shown, &path, &file, target, options, monitor)?;
        // What was checked has to be what was used.
        if identity(&path, &file)? == before {
            return Ok(());
        }
        let _ = std::fs::remove_file(target);
        let reason = "it was changed while it was read: import it again when nobody writes it";
        Err(Error::new(&path, ErrorKind::Size(reason.into())))
    });
    let _ = std::fs::remove_file(fresh::beside(target, ".unpacked"));
    if let ImportSource::Url(_) = source {
        use ErrorKind::{Cancelled, Io, Request};
        let again = |error: &Error| matches!(error.kind, Cancelled | Io { .. } | Request(_));
        // A download that is no good will not be better the next time.
        if !made.as_ref().is_err_and(again) {
            download::discard(target);
        }
    }
    made
}

fn open_source(path: &Path) -> Result<File, Error> {
    let file = BlockFile::open(path, Cache::Buffered, false)?;
    file.lock(Access::Read)?;
    // Of its own, so that it is read and locked apart from whoever reads it as a disk.
    let own = File::open(path).map_err(|e| Error::io(path, "open it", e))?;
    lock::acquire(path, own.as_fd(), Access::Read)?;
    Ok(own)
}

/// Which file it is and when it was last written.
fn identity(path: &Path, file: &File) -> Result<(u64, u64, u64, i64, i64), Error> {
    let seen = file
        .metadata()
        .map_err(|e| Error::io(path, "examine it", e))?;
    Ok((
        seen.dev(),
        seen.ino(),
        seen.size(),
        seen.mtime(),
        seen.mtime_nsec(),
    ))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn check_sum(
    shown: &Path,
    file: &File,
    options: &ImportOptions,
    monitor: &mut dyn Monitor,
) -> Result<(), Error> {
    let Some(wanted) = options.sha256 else {
        return Ok(());
    };
    monitor.phase("checking");
    let total = file
        .metadata()
        .map_err(|e| Error::io(shown, "examine it", e))?
        .len();
    let mut way = Way::new(monitor, total);
    let mut hash = Sha256::new();
    let mut bytes = vec![0; CHUNK];
    let mut at = 0;
    loop {
        let read = read_at(shown, file, &mut bytes, at)?;
        if read.is_empty() {
            break;
        }
        hash.update(read);
        at += read.len() as u64;
        way.at(shown, at.min(total), 0)?;
    }
    let seen: [u8; 32] = hash.finalize().into();
    if seen == wanted {
        return Ok(());
    }
    Err(Error::new(
        shown,
        ErrorKind::Checksum {
            wanted: hex(&wanted),
            seen: hex(&seen),
        },
    ))
}

fn read_at<'a>(path: &Path, file: &File, bytes: &'a mut [u8], at: u64) -> Result<&'a [u8], Error> {
    use std::os::unix::fs::FileExt;
    loop {
        match file.read_at(bytes, at) {
            Ok(read) => return Ok(bytes.get(..read).unwrap_or_default()),
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(Error::io(path, "read it", error)),
        }
    }
}

/// Unpacks and converts what has been checked.
fn make(
    shown: &Path,
    path: &Path,
    file: &File,
    target: &Path,
    options: &ImportOptions,
    monitor: &mut dyn Monitor,
) -> Result<(), Error> {
    let rename = |error: Error| match error.path == path {
        true => Error::new(shown, error.kind),
        false => error,
    };
    if options.format == Format::Raw && options.to.format == Format::Raw {
        let partial = fresh::beside(target, ".partial");
        let out = fresh::replace(&partial)?;
        let written = unpack::unpack(shown, file, (&partial, &out), options, monitor)
            .and_then(|()| fresh::publish(&partial, target));
        return written.inspect_err(|_| {
            // The error that matters is the first one.
            let _ = std::fs::remove_file(&partial);
        });
    }
    if options.packing == Packing::None {
        check_image(path, options).map_err(rename)?;
        return to_target(path, target, options, monitor).map_err(rename);
    }
    let unpacked = fresh::beside(target, ".unpacked");
    let out = fresh::replace(&unpacked)?;
    unpack::unpack(shown, file, (&unpacked, &out), options, monitor)?;
    // Others may read it, as the conversion is about to.
    lock::release(out.as_fd(), Access::Write);
    lock::acquire(&unpacked, out.as_fd(), Access::Read)?;
    let rename = |error: Error| match error.path == unpacked {
        true => Error::new(shown, error.kind),
        false => error,
    };
    check_image(&unpacked, options).map_err(rename)?;
    to_target(&unpacked, target, options, monitor).map_err(rename)
}

/// Refuses what is too large and what refers to other files.
fn check_image(path: &Path, options: &ImportOptions) -> Result<(), Error> {
    let file = BlockFile::open(path, Cache::Buffered, false)?;
    file.lock(Access::Read)?;
    let size = match options.format {
        Format::Raw => file.end(),
        Format::Qcow2 => {
            let header = read_header(&file)?;
            if let Some(backing) = header.backing {
                let name = String::from_utf8_lossy(&backing.name)
                    .escape_debug()
                    .to_string();
                let reason = format!(
                    "needs the backing file `{name}`; an image to import stands alone: flatten it first"
                );
                return Err(Error::new(path, ErrorKind::Backing(reason)));
            }
            header.size
        }
    };
    check_size(path, size, options)
}

fn check_size(path: &Path, size: u64, options: &ImportOptions) -> Result<(), Error> {
    let most = options.max_size_bytes;
    if size <= most {
        return Ok(());
    }
    let reason = format!(
        "is larger than the {most} bytes that are allowed: allow more, if it is not a mistake"
    );
    Err(Error::new(path, ErrorKind::Size(reason)))
}

fn to_target(
    path: &Path,
    target: &Path,
    options: &ImportOptions,
    monitor: &mut dyn Monitor,
) -> Result<(), Error> {
    monitor.phase("converting");
    let disk = DiskSpec {
        top: Layer {
            path: path.to_owned(),
            format: options.format,
            cache: Cache::Buffered,
        },
        backing: Backing::Explicit(Vec::new()),
        read_only: true,
        discard: false,
    };
    convert(&disk, target, &options.to, monitor)
}

/// Fills as much of `bytes` as there is to read.
fn read_full(from: &mut dyn Read, bytes: &mut [u8]) -> std::io::Result<usize> {
    let mut done = 0;
    while let Some(rest) = bytes.get_mut(done..).filter(|rest| !rest.is_empty()) {
        match from.read(rest) {
            Ok(0) => break,
            Ok(read) => done += read,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(done)
}
