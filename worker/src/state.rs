//! Where workers live.
//!
//! ```text
//! STATE/                      $XDG_STATE_HOME/drover, or --state-dir
//!   workers/                  0700
//!     .NAME.new-XXXXXXXX/     a worker being made; its maker holds a lock (flock) on the folder
//!     .NAME.old-XXXXXXXX/     a worker being removed
//!     NAME/                   appears complete, by one rename
//!       worker.json           the record of this module, 0600
//!       vm.yaml               what the VMM is given, 0600
//!       overlay.qcow2         the disk, 0600
//!       seed.iso              the NoCloud seed; holds the join token, 0600
//!       api.sock console.sock vmm.pid vmm.log
//! ```

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use drover_api::definition::MacAddress;
use rustix::fs::{FlockOperation, Mode, OFlags, RenameFlags, flock, renameat_with};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::definition::is_dns_label;
use crate::error::Error;

/// Longest path in a unix socket's address (sun_path less its NUL).
const SOCKET_PATH_MAX: usize = 107;
/// How often a new folder is made when others sweep it before it is locked.
const BEGIN_ATTEMPTS: u32 = 16;
/// The file of a worker's record.
const RECORD_FILE: &str = "worker.json";

/// What is remembered about a worker. Holds no secret.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Record {
    /// Version of this record.
    pub version: u32,
    /// The worker's name.
    pub name: String,
    /// SMBIOS system UUID.
    pub uuid: Uuid,
    /// cloud-init's instance-id.
    pub instance_id: String,
    /// When it was made, milliseconds since the Unix epoch.
    pub created_ms: u64,
    /// The guest's host name.
    pub hostname: String,
    /// The image its disk starts from.
    pub base: PathBuf,
    /// The disk's size as the guest sees it.
    pub disk_size_bytes: u64,
    /// Processors.
    pub cpus: u8,
    /// RAM.
    pub memory_size_bytes: u64,
    /// Its card's MAC address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac: Option<MacAddress>,
    /// The bridge it is on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bridge: Option<String>,
    /// The tap that was made for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tap: Option<String>,
    /// Whether it joins a cluster.
    pub joins: bool,
}

/// The version of [`Record`] that this program writes.
pub(crate) const RECORD_VERSION: u32 = 1;

/// The folder in which workers live.
#[derive(Clone, Debug)]
pub struct StateDir {
    root: PathBuf,
}

/// The folder of one worker.
#[derive(Clone, Debug)]
pub struct WorkerDir {
    name: String,
    path: PathBuf,
}

/// A worker's folder under its maker's or remover's lock, released when dropped.
#[derive(Debug)]
pub(crate) struct Locked {
    /// The open folder, whose lock follows it through renames.
    pub(crate) handle: File,
    /// Where it is now.
    pub(crate) path: PathBuf,
}

impl StateDir {
    /// `root`, or where the XDG base directory specification puts it.
    ///
    /// # Errors
    /// Neither `XDG_STATE_HOME` nor `HOME` says where that is, or the path cannot be made absolute.
    pub fn new(root: Option<&Path>) -> Result<Self, Error> {
        let absolute = |name| {
            std::env::var_os(name)
                .map(PathBuf::from)
                .filter(|path| path.is_absolute())
        };
        let root = match root {
            Some(path) => std::path::absolute(path).map_err(Error::io("find the folder", path))?,
            None => absolute("XDG_STATE_HOME")
                .or_else(|| absolute("HOME").map(|home| home.join(".local/state")))
                .ok_or(Error::NoStateDir)?
                .join("drover"),
        };
        Ok(Self { root })
    }

    /// The folder itself.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.root
    }

    fn workers(&self) -> PathBuf {
        self.root.join("workers")
    }

    /// The folder of worker `name`, which need not exist.
    ///
    /// # Errors
    /// The name is not a DNS label, or the sockets' paths would be too long.
    pub fn worker(&self, name: &str) -> Result<WorkerDir, Error> {
        if !is_dns_label(name) {
            return Err(Error::Name(name.to_owned()));
        }
        let dir = WorkerDir {
            name: name.to_owned(),
            path: self.workers().join(name),
        };
        let longest = dir.console_socket();
        if longest.as_os_str().len() > SOCKET_PATH_MAX {
            return Err(Error::SocketPath { path: longest });
        }
        Ok(dir)
    }

    /// The names of all workers, sorted.
    ///
    /// # Errors
    /// The folder cannot be read.
    pub fn names(&self) -> Result<Vec<String>, Error> {
        let folder = self.workers();
        let mut names = Vec::new();
        for entry in entries(&folder)? {
            if let Some(name) = entry.to_str().filter(|name| is_dns_label(name)) {
                names.push(name.to_owned());
            }
        }
        names.sort();
        Ok(names)
    }

    /// Makes and locks a folder in which worker `name` is built before it appears.
    pub(crate) fn begin(&self, name: &str) -> Result<Locked, Error> {
        let folder = self.workers();
        make_folder(&folder)?;
        self.sweep(name)?;
        let mut attempts = 0;
        loop {
            let path = folder.join(format!(
                ".{name}.new-{:.8}",
                Uuid::new_v4().simple().to_string()
            ));
            DirBuilder::new()
                .mode(0o700)
                .create(&path)
                .map_err(Error::io("create the folder", &path))?;
            match lock(name, &path) {
                // Another maker of the same name swept the folder in the moment before it was locked.
                Err(Error::Busy(_)) if attempts < BEGIN_ATTEMPTS => attempts += 1,
                Err(error) if is_not_found(&error) && attempts < BEGIN_ATTEMPTS => attempts += 1,
                other => return other,
            }
        }
    }

    /// Makes a finished folder appear as the worker `name`, durably.
    pub(crate) fn publish(&self, locked: &mut Locked, dir: &WorkerDir) -> Result<(), Error> {
        rename_new(&locked.path, &dir.path).map_err(|error| match error.kind() {
            io::ErrorKind::AlreadyExists => Error::Exists(dir.name.clone()),
            _ => Error::io("create the folder", &dir.path)(error),
        })?;
        locked.path.clone_from(&dir.path);
        sync_folder(&self.workers())
    }

    /// Locks the folder of worker `name`; `None` if there is none.
    pub(crate) fn lock(&self, dir: &WorkerDir) -> Result<Option<Locked>, Error> {
        match lock(&dir.name, &dir.path) {
            Err(error) if is_not_found(&error) => Ok(None),
            other => other.map(Some),
        }
    }

    /// Removes a locked folder and all it holds; nobody sees it half-removed under its name.
    pub(crate) fn remove(&self, name: &str, locked: &Locked) -> Result<(), Error> {
        let folder = self.workers();
        let hidden = folder.join(format!(
            ".{name}.old-{:.8}",
            Uuid::new_v4().simple().to_string()
        ));
        fs::rename(&locked.path, &hidden).map_err(Error::io("remove the folder", &locked.path))?;
        fs::remove_dir_all(&hidden).map_err(Error::io("remove the folder", &hidden))?;
        sync_folder(&folder)
    }

    /// Removes what makers and removers of `name` that were killed left behind.
    pub(crate) fn sweep(&self, name: &str) -> Result<(), Error> {
        let folder = self.workers();
        let prefixes = [format!(".{name}.new-"), format!(".{name}.old-")];
        for entry in entries(&folder)? {
            let text = entry.to_string_lossy();
            if prefixes
                .iter()
                .any(|prefix| text.starts_with(prefix.as_str()))
            {
                let path = folder.join(&entry);
                // A lock that is held means that its process lives.
                if lock(name, &path).is_ok() {
                    fs::remove_dir_all(&path).map_err(Error::io("remove the folder", &path))?;
                }
            }
        }
        Ok(())
    }
}

impl WorkerDir {
    /// The worker's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The folder.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The socket of the VMM's API.
    #[must_use]
    pub fn api_socket(&self) -> PathBuf {
        self.path.join("api.sock")
    }

    /// The socket of the guest's first serial port.
    #[must_use]
    pub fn console_socket(&self) -> PathBuf {
        self.path.join("console.sock")
    }

    /// The disk.
    #[must_use]
    pub fn overlay(&self) -> PathBuf {
        self.path.join("overlay.qcow2")
    }

    /// The seed.
    #[must_use]
    pub fn seed(&self) -> PathBuf {
        self.path.join("seed.iso")
    }

    /// What the VMM is given.
    #[must_use]
    pub fn vm_config(&self) -> PathBuf {
        self.path.join("vm.yaml")
    }

    /// What the VMM says.
    #[must_use]
    pub fn log(&self) -> PathBuf {
        self.path.join("vmm.log")
    }

    pub(crate) fn pid_file(&self) -> PathBuf {
        self.path.join("vmm.pid")
    }

    pub(crate) fn record_file(&self) -> PathBuf {
        self.path.join(RECORD_FILE)
    }

    /// The worker's record.
    ///
    /// # Errors
    /// There is none, or it cannot be read.
    pub fn record(&self, state: &StateDir) -> Result<Record, Error> {
        let path = self.record_file();
        let text = fs::read(&path).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => Error::NotFound {
                name: self.name.clone(),
                state: state.root.clone(),
            },
            _ => Error::io("read", &path)(error),
        })?;
        serde_json::from_slice(&text).map_err(|error| Error::io("read", &path)(error.into()))
    }
}

fn entries(folder: &Path) -> Result<Vec<std::ffi::OsString>, Error> {
    match fs::read_dir(folder) {
        Ok(entries) => entries
            .map(|entry| {
                entry
                    .map(|entry| entry.file_name())
                    .map_err(Error::io("read the folder", folder))
            })
            .collect(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(Error::io("read the folder", folder)(error)),
    }
}

fn is_not_found(error: &Error) -> bool {
    matches!(error, Error::Io { source, .. } if source.kind() == io::ErrorKind::NotFound)
}

/// Opens and locks a folder. Never one that was moved away between the two, under whose name another may be by now.
fn lock(name: &str, path: &Path) -> Result<Locked, Error> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let handle = rustix::fs::open(path, flags, Mode::empty())
        .map_err(|error| Error::io("open the folder", path)(error.into()))?;
    lock_open(name, path, handle.into())
}

fn lock_open(name: &str, path: &Path, handle: File) -> Result<Locked, Error> {
    match flock(&handle, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => {}
        Err(rustix::io::Errno::WOULDBLOCK) => return Err(Error::Busy(name.to_owned())),
        Err(error) => return Err(Error::io("lock the folder", path)(error.into())),
    }
    let held = handle.metadata();
    let named = path.symlink_metadata();
    let same = held
        .and_then(|held| named.map(|named| (held.dev(), held.ino()) == (named.dev(), named.ino())));
    match same.map_err(Error::io("look at the folder", path))? {
        true => Ok(Locked {
            handle,
            path: path.to_path_buf(),
        }),
        false => Err(Error::io("lock the folder", path)(
            io::ErrorKind::NotFound.into(),
        )),
    }
}

/// Renames, but never over something that exists.
fn rename_new(from: &Path, to: &Path) -> io::Result<()> {
    match renameat_with(
        rustix::fs::CWD,
        from,
        rustix::fs::CWD,
        to,
        RenameFlags::NOREPLACE,
    ) {
        // Some network file systems lack the flag. There, rename refuses a folder that has anything in it, and ours always has.
        Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOSYS) => match fs::rename(from, to) {
            Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => {
                Err(io::ErrorKind::AlreadyExists.into())
            }
            other => other,
        },
        other => Ok(other?),
    }
}

/// Makes a private folder and those above it, durably.
fn make_folder(path: &Path) -> Result<(), Error> {
    let missing: Vec<&Path> = path
        .ancestors()
        .take_while(|folder| !folder.exists())
        .collect();
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(path)
        .map_err(Error::io("create the folder", path))?;
    missing
        .into_iter()
        .filter_map(Path::parent)
        .try_for_each(sync_folder)
}

pub(crate) fn sync_folder(path: &Path) -> Result<(), Error> {
    File::open(path)
        .and_then(|folder| folder.sync_all())
        .map_err(Error::io("make the folder durable", path))
}

/// Writes a new file that only its owner can read, and makes its contents durable; its name is when the folder has been synced.
pub(crate) fn write_durable(path: &Path, contents: &[u8]) -> Result<(), Error> {
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
        .map_err(Error::io("create", path))?;
    file.write_all(contents).map_err(Error::io("write", path))?;
    file.sync_all().map_err(Error::io("make durable", path))
}

/// What the file of a record holds.
pub(crate) fn record_text(record: &Record) -> Result<Vec<u8>, Error> {
    serde_json::to_vec_pretty(record)
        .map_err(|error| Error::io("write", Path::new(RECORD_FILE))(error.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state() -> (tempfile::TempDir, StateDir) {
        let folder = tempfile::tempdir().unwrap();
        let state = StateDir::new(Some(folder.path())).unwrap();
        (folder, state)
    }

    #[test]
    fn a_worker_appears_only_when_it_is_published_and_never_over_another() {
        let (_folder, state) = state();
        let dir = state.worker("a").unwrap();
        let mut first = state.begin("a").unwrap();
        let mut second = state.begin("a").unwrap();
        for locked in [&first, &second] {
            write_durable(&locked.path.join("x"), b"").unwrap();
        }
        assert_eq!(state.names().unwrap(), Vec::<String>::new());
        state.publish(&mut first, &dir).unwrap();
        assert_eq!(state.names().unwrap(), ["a"]);
        assert!(
            matches!(state.publish(&mut second, &dir), Err(Error::Exists(name)) if name == "a")
        );
    }

    #[test]
    fn what_a_killed_maker_left_is_swept_and_what_a_living_one_makes_is_not() {
        let (_folder, state) = state();
        let left = state.begin("a").unwrap();
        let left_path = left.path.clone();
        drop(left);
        let living = state.begin("a").unwrap();
        assert!(!left_path.exists());
        state.sweep("a").unwrap();
        assert!(living.path.exists());
    }

    #[test]
    fn a_worker_under_lock_is_busy_for_others() {
        let (_folder, state) = state();
        let dir = state.worker("a").unwrap();
        assert!(state.lock(&dir).unwrap().is_none());
        let mut made = state.begin("a").unwrap();
        state.publish(&mut made, &dir).unwrap();
        assert!(matches!(state.lock(&dir), Err(Error::Busy(_))));
        drop(made);
        let locked = state.lock(&dir).unwrap().unwrap();
        state.remove("a", &locked).unwrap();
        assert_eq!(fs::read_dir(state.workers()).unwrap().count(), 0);
    }

    #[test]
    fn a_folder_that_was_replaced_before_it_was_locked_is_not_taken_for_the_new_one() {
        let (_folder, state) = state();
        let dir = state.worker("a").unwrap();
        let mut old = state.begin("a").unwrap();
        state.publish(&mut old, &dir).unwrap();
        let opened_early = File::open(&dir.path).unwrap();
        state.remove("a", &old).unwrap();
        drop(old);
        let gone = lock_open("a", &dir.path, opened_early.try_clone().unwrap()).unwrap_err();
        assert!(is_not_found(&gone), "{gone}");
        let mut new = state.begin("a").unwrap();
        state.publish(&mut new, &dir).unwrap();
        let replaced = lock_open("a", &dir.path, opened_early).unwrap_err();
        assert!(is_not_found(&replaced), "{replaced}");
    }

    #[test]
    fn a_link_in_the_place_of_a_worker_is_not_followed() {
        let (folder, state) = state();
        let elsewhere = folder.path().join("elsewhere");
        fs::create_dir(&elsewhere).unwrap();
        fs::write(elsewhere.join("precious"), b"x").unwrap();
        make_folder(&state.workers()).unwrap();
        std::os::unix::fs::symlink(&elsewhere, state.workers().join("a")).unwrap();
        assert!(state.lock(&state.worker("a").unwrap()).is_err());
        assert!(elsewhere.join("precious").exists());
    }

    #[test]
    fn many_makers_of_one_name_make_one_worker_and_the_others_hear_that_it_exists() {
        let (_folder, state) = state();
        let dir = state.worker("a").unwrap();
        let start = std::sync::Barrier::new(8);
        let outcomes: Vec<Result<(), Error>> = std::thread::scope(|scope| {
            let makers: Vec<_> = (0..8)
                .map(|_| {
                    scope.spawn(|| {
                        start.wait();
                        let mut locked = state.begin("a")?;
                        write_durable(&locked.path.join("x"), b"")?;
                        state.publish(&mut locked, &dir)
                    })
                })
                .collect();
            makers
                .into_iter()
                .map(|maker| maker.join().unwrap())
                .collect()
        });
        assert_eq!(outcomes.iter().filter(|outcome| outcome.is_ok()).count(), 1);
        for error in outcomes.into_iter().filter_map(Result::err) {
            assert!(matches!(error, Error::Exists(_)), "{error}");
        }
    }

    #[test]
    fn names_and_paths_that_cannot_work_are_refused_before_anything_is_made() {
        let (folder, state) = state();
        for name in ["", "..", "A", "a/b", "-a"] {
            assert!(matches!(state.worker(name), Err(Error::Name(_))), "{name}");
        }
        let deep = StateDir::new(Some(&folder.path().join("x".repeat(90)))).unwrap();
        let message = deep.worker("a").unwrap_err().to_string();
        assert!(message.contains("too long for a unix socket"), "{message}");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
