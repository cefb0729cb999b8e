//! The lease file beside an image: read whole, replaced whole, given back in place.
//!
//! ```text
//!  IMAGE.lease.new-… ──written, fsync──> IMAGE.lease.next (exclusive) ──the old one is still what was read──> IMAGE.lease ──fsync folder
//! ```
//!
//! `.next` can be made by one host at a time, also where locks do not reach from host to host. Who finds one that was left behind
//! judges it as a lease: it says who wanted to take the image.
//!
//! The one that holds a lease keeps the file open. Once another file has taken its name nobody sees what is written to it, so giving
//! it back is one write of one sector, which can do no harm to a successor and needs nothing to be opened.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, Gid, Mode, OFlags, RenameFlags, Uid};
use rustix::io::Errno;

use super::cut;
use super::record::{Lease, Place, VERSION};
use crate::error::{Error, ErrorKind};

/// The longest lease that is read, in bytes.
const MAX_BYTES: u64 = 16 * 1024;
/// A lease is padded to this, so that it is given back with a write of one sector.
const SECTOR: usize = 512;

/// What lies beside an image.
#[derive(Debug)]
pub(super) enum Found {
    Nothing,
    Lease(Lease),
    /// A file that is no lease, with what is wrong with it.
    Damaged(String),
}

/// Why a lease was not replaced.
#[derive(Debug)]
pub(super) enum Failure {
    /// Somebody else is about to take the image, or left that behind.
    Contested(Box<Found>),
    /// The lease is not what it was thought to be any more.
    Changed,
    Io(&'static str, io::Error),
}

/// The place of an image's lease.
pub(super) struct Slot {
    image: PathBuf,
    path: PathBuf,
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().as_bytes().to_vec();
    name.extend_from_slice(suffix.as_bytes());
    PathBuf::from(std::ffi::OsString::from_vec(name))
}

impl Slot {
    /// Beside the file itself, wherever a link to it may be.
    pub(super) fn of(image: &Path) -> Result<Self, Error> {
        let real =
            std::fs::canonicalize(image).map_err(|e| Error::io(image, "find its folder", e))?;
        Ok(Self {
            path: with_suffix(&real, ".lease"),
            image: real,
        })
    }

    pub(super) fn image(&self) -> &Path {
        &self.image
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    fn next(&self) -> PathBuf {
        with_suffix(&self.path, ".next")
    }

    pub(super) fn read(&self) -> Result<Found, Error> {
        read(&self.path).map_err(|e| Error::io(&self.path, "read the lease", e))
    }

    /// The open file of a lease of this process; `None` if it is not `wanted` any more.
    pub(super) fn open_again(&self, wanted: &Found) -> Result<Option<OwnedFd>, Error> {
        let open = || {
            let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
            let file = std::fs::File::from(rustix::fs::open(&self.path, flags, Mode::empty())?);
            let seen = understand(&file)?;
            Ok(same(&seen, wanted).then(|| file.into()))
        };
        open().map_err(|e: io::Error| io_error(&self.path, "open the lease again", e))
    }

    /// Takes away what one left behind who wanted to take the image.
    pub(super) fn forget_next(&self) -> Result<(), Error> {
        match rustix::fs::unlink(self.next()) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(errno) => Err(Error::io(&self.next(), "remove it", errno)),
        }
    }

    /// Replaces the lease by `new` if it still is `old`; the open file.
    pub(super) fn replace(
        &self,
        old: &Found,
        new: &Lease,
        place: &Place,
    ) -> Result<OwnedFd, Failure> {
        let io = |doing| move |errno: Errno| Failure::Io(doing, errno.into());
        let host = place.machine.unwrap_or(place.boot).simple().to_string();
        let suffix = format!(".new-{}", host.get(..8).unwrap_or_default());
        let fresh = with_suffix(&self.path, &suffix);
        let file = self
            .write_fresh(&fresh, new)
            .map_err(io("write the lease"))?;
        let result = self.put_in_place(&fresh, old);
        if result.is_err() {
            // Where it was moved on it is not there any more.
            let _ = rustix::fs::unlink(&fresh);
        }
        result.map(|()| file)
    }

    fn write_fresh(&self, path: &Path, lease: &Lease) -> rustix::io::Result<OwnedFd> {
        let image = rustix::fs::stat(&self.image)?;
        cut::step()?;
        // One that was left behind may belong to another user: it is made anew.
        match rustix::fs::unlink(path) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(errno) => return Err(errno),
        }
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let mode = Mode::from_raw_mode(image.st_mode & 0o666) | Mode::RUSR | Mode::WUSR;
        let file = rustix::fs::open(path, flags | OFlags::NOFOLLOW, mode)?;
        rustix::fs::fchmod(&file, mode)?;
        // Whoever may write the image may take it; that is only for root to arrange, and not worth failing for.
        let owner = (Uid::from_raw(image.st_uid), Gid::from_raw(image.st_gid));
        let _ = rustix::fs::fchown(&file, Some(owner.0), Some(owner.1));
        cut::step()?;
        write_at_start(&file, &bytes(lease, SECTOR))?;
        cut::step()?;
        rustix::fs::fsync(&file)?;
        cut::step()?;
        Ok(file)
    }

    fn put_in_place(&self, fresh: &Path, old: &Found) -> Result<(), Failure> {
        let io = |doing| move |errno: Errno| Failure::Io(doing, errno.into());
        let next = self.next();
        let cwd = rustix::fs::CWD;
        let claimed =
            match rustix::fs::renameat_with(cwd, fresh, cwd, &next, RenameFlags::NOREPLACE) {
                Err(Errno::INVAL | Errno::NOSYS) => {
                    // A file system without that, such as NFS, has links.
                    rustix::fs::linkat(cwd, fresh, cwd, &next, AtFlags::empty())
                        .and_then(|()| rustix::fs::unlink(fresh))
                }
                other => other,
            };
        match claimed {
            Ok(()) => {}
            Err(Errno::EXIST) => {
                let found = read(&next).map_err(|e| Failure::Io("read who is taking it", e))?;
                return Err(Failure::Contested(Box::new(found)));
            }
            Err(errno) => return Err(io("claim the lease")(errno)),
        }
        cut::step().map_err(io("be cut off"))?;
        let now = read(&self.path).map_err(|e| Failure::Io("read the lease", e))?;
        if !same(&now, old) {
            let _ = rustix::fs::unlink(&next);
            return Err(Failure::Changed);
        }
        rustix::fs::rename(&next, &self.path).map_err(io("put the lease in place"))?;
        cut::step().map_err(io("be cut off"))?;
        let folder = self.path.parent().unwrap_or(Path::new("/"));
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        rustix::fs::open(folder, flags, Mode::empty())
            .and_then(rustix::fs::fsync)
            .map_err(io("make the lease durable"))
    }
}

fn same(one: &Found, two: &Found) -> bool {
    match (one, two) {
        (Found::Lease(one), Found::Lease(two)) => one == two,
        (Found::Nothing, Found::Nothing) | (Found::Damaged(_), Found::Damaged(_)) => true,
        _ => false,
    }
}

/// A lease as text, padded with spaces to at least `size`.
fn bytes(lease: &Lease, size: usize) -> Vec<u8> {
    // A structure of strings and numbers: nothing that JSON cannot say, except a path that is no UTF-8, which is refused earlier.
    let mut text = serde_json::to_vec_pretty(lease).unwrap_or_default();
    text.resize(text.len().max(size.saturating_sub(1)), b' ');
    text.push(b'\n');
    text
}

fn write_at_start(file: &OwnedFd, bytes: &[u8]) -> rustix::io::Result<()> {
    let slices = [io::IoSlice::new(bytes)];
    // The calls that a disk's thread may make in its sandbox.
    let written = rustix::io::pwritev(file, &slices, 0)?;
    if written == bytes.len() {
        Ok(())
    } else {
        Err(Errno::NOSPC)
    }
}

/// Writes a lease over the one in an open file.
pub(super) fn overwrite(file: &OwnedFd, lease: &Lease) -> io::Result<()> {
    let size = rustix::fs::fstat(file)?.st_size;
    write_at_start(file, &bytes(lease, usize::try_from(size).unwrap_or(SECTOR)))?;
    Ok(rustix::fs::fdatasync(file)?)
}

fn read(path: &Path) -> io::Result<Found> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let file = match rustix::fs::open(path, flags, Mode::empty()) {
        Ok(file) => std::fs::File::from(file),
        Err(Errno::NOENT) => return Ok(Found::Nothing),
        Err(errno) => return Err(errno.into()),
    };
    understand(&file)
}

/// What an open file says, read from its beginning.
fn understand(file: &std::fs::File) -> io::Result<Found> {
    use std::io::Read as _;
    if !file.metadata()?.is_file() {
        return Ok(Found::Damaged("it is no regular file".into()));
    }
    let mut text = Vec::new();
    file.take(MAX_BYTES).read_to_end(&mut text)?;
    Ok(match serde_json::from_slice::<Lease>(&text) {
        Ok(lease) if lease.version == VERSION => Found::Lease(lease),
        Ok(lease) => Found::Damaged(format!("version {} is not known", lease.version)),
        Err(error) => Found::Damaged(error.to_string()),
    })
}

/// What a failure means to whoever wanted the image.
pub(super) fn io_error(path: &Path, doing: &'static str, source: io::Error) -> Error {
    Error::new(path, ErrorKind::Io { doing, source })
}
