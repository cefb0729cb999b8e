//! The socket's file: a live one is never stolen, a stale one is replaced, and at the end only our own is removed.
//!
//! Looking and replacing are two steps, so they happen under a lock file beside the socket (`PATH.lock`, flock(2)). It lives only
//! as long as the steps take. Whoever has locked a file that is no longer the one under that name starts over.

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

/// Clients the kernel queues until they are accepted.
const BACKLOG: i32 = 64;

/// Why there is no socket.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    /// A process answers on it.
    #[error("{}: socket in use: another process serves it", path.display())]
    InUse {
        /// The socket.
        path: PathBuf,
    },
    /// There is something else under that name.
    #[error("{}: exists and is no socket", path.display())]
    NotASocket {
        /// The file.
        path: PathBuf,
    },
    /// The system refused.
    #[error("{}: cannot {action}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What was tried.
        action: &'static str,
        /// What the system said.
        source: io::Error,
    },
}

/// The socket's file. Removes it when dropped, unless another has taken its place.
#[derive(Debug)]
pub struct SocketGuard {
    path: PathBuf,
    /// The file itself (`O_PATH`): as long as it is open, its inode number is not used again.
    file: File,
}

/// Makes the socket `path` with mode 0600 and listens on it (non-blocking, close-on-exec).
///
/// # Errors
/// A process answers on the socket, the file is none, or the system refused.
pub fn bind_socket(path: &Path) -> Result<(UnixListener, SocketGuard), SocketError> {
    let fail = |action| {
        move |source: io::Error| SocketError::Io {
            path: path.into(),
            action,
            source,
        }
    };
    let _lock = Lock::take(path).map_err(fail("lock"))?;
    remove_stale(path)?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let address = SocketAddrUnix::new(path).map_err(|e| fail("make a socket")(e.into()))?;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
        .map_err(|e| fail("make a socket")(e.into()))?;
    // The file that bind(2) makes takes the mode of the descriptor (less the umask): there is no moment at which others may connect.
    rustix::fs::fchmod(&socket, Mode::RUSR | Mode::WUSR)
        .map_err(|e| fail("set the mode")(e.into()))?;
    rustix::net::bind(&socket, &address).map_err(|e| fail("bind")(e.into()))?;
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = rustix::fs::open(path, flags, Mode::empty()).map_err(|e| fail("open")(e.into()))?;
    let guard = SocketGuard {
        path: path.into(),
        file: file.into(),
    };
    rustix::net::listen(&socket, BACKLOG).map_err(|e| fail("listen on")(e.into()))?;
    Ok((UnixListener::from(socket), guard))
}

fn remove_stale(path: &Path) -> Result<(), SocketError> {
    let fail = |action| {
        move |source: io::Error| SocketError::Io {
            path: path.into(),
            action,
            source,
        }
    };
    match path.symlink_metadata() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(fail("look at")(error)),
        Ok(metadata) if !metadata.file_type().is_socket() => {
            return Err(SocketError::NotASocket { path: path.into() });
        }
        Ok(_) => {}
    }
    match connect(path) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            std::fs::remove_file(path).map_err(fail("remove the stale socket"))
        }
        // A full backlog belongs to a live process, too.
        Err(error) if error.kind() != io::ErrorKind::WouldBlock => Err(fail("connect to")(error)),
        Ok(_) | Err(_) => Err(SocketError::InUse { path: path.into() }),
    }
}

/// Connects without waiting for a place in the backlog.
fn connect(path: &Path) -> io::Result<UnixStream> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(UnixStream::from(socket))
}

impl Drop for SocketGuard {
    fn drop(&mut self) {
        // Without the lock another process might replace the file between our look and the removal; then it is better left alone.
        if let Ok(_lock) = Lock::take(&self.path)
            && is_at(&self.file, &self.path).unwrap_or(false)
            && let Err(error) = std::fs::remove_file(&self.path)
        {
            tracing::warn!(path = %self.path.display(), %error, "cannot remove the socket");
        }
    }
}

/// Whether `file` is what is under the name `path` now.
fn is_at(file: &File, path: &Path) -> io::Result<bool> {
    let held = file.metadata()?;
    match path.symlink_metadata() {
        Ok(named) => Ok((named.dev(), named.ino()) == (held.dev(), held.ino())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// The lock file, held.
struct Lock {
    path: PathBuf,
    _file: File,
}

impl Lock {
    fn take(socket: &Path) -> io::Result<Self> {
        let mut path = OsString::from(socket);
        path.push(".lock");
        let path = PathBuf::from(path);
        loop {
            let flags = OFlags::CREATE | OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW;
            let file: OwnedFd = rustix::fs::open(&path, flags, Mode::RUSR | Mode::WUSR)?;
            rustix::io::retry_on_intr(|| rustix::fs::flock(&file, FlockOperation::LockExclusive))?;
            let file = File::from(file);
            if is_at(&file, &path)? {
                return Ok(Self { path, _file: file });
            }
        }
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        // Still locked: those who wait for this file will see that its name is gone. Failure leaves an empty file, no harm.
        let _ = std::fs::remove_file(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::sync::Barrier;

    use super::*;

    #[test]
    fn the_socket_is_for_its_owner_only_and_gone_at_the_end() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("api.sock");
        let (_listener, guard) = bind_socket(&path).unwrap();
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
        UnixStream::connect(&path).unwrap();
        drop(guard);
        assert_eq!(
            folder.path().read_dir().unwrap().count(),
            0,
            "socket and lock file are gone"
        );
    }

    #[test]
    fn a_live_socket_is_not_stolen() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("api.sock");
        let (listener, _guard) = bind_socket(&path).unwrap();
        let error = bind_socket(&path).unwrap_err();
        assert!(matches!(error, SocketError::InUse { .. }), "{error}");
        assert!(error.to_string().contains("socket in use"), "{error}");
        UnixStream::connect(&path).unwrap();
        drop(listener);
    }

    #[test]
    fn a_stale_socket_is_replaced_and_its_late_owner_leaves_the_new_one_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("api.sock");
        let (listener, late) = bind_socket(&path).unwrap();
        drop(listener);
        let (_listener, _guard) = bind_socket(&path).unwrap();
        drop(late);
        UnixStream::connect(&path).unwrap();
    }

    #[test]
    fn another_file_is_never_removed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("notes.txt");
        std::fs::write(&path, "mine").unwrap();
        assert!(matches!(
            bind_socket(&path),
            Err(SocketError::NotASocket { .. })
        ));
        assert_eq!(std::fs::read(&path).unwrap(), b"mine");
    }

    #[test]
    fn of_many_at_once_exactly_one_gets_a_stale_socket() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("api.sock");
        drop(UnixListener::bind(&path).unwrap());
        let start = Barrier::new(8);
        let winners: Vec<_> = std::thread::scope(|scope| {
            let racers: Vec<_> = (0..8)
                .map(|_| {
                    scope.spawn(|| {
                        start.wait();
                        bind_socket(&path)
                    })
                })
                .collect();
            racers
                .into_iter()
                .map(|racer| racer.join().unwrap())
                .filter_map(Result::ok)
                .collect()
        });
        assert_eq!(winners.len(), 1);
        UnixStream::connect(&path).unwrap();
    }
}
