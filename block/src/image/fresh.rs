//! Files that are there whole or not at all: written under another name, durable, then renamed. What a job that died left behind
//! is replaced when it is done again, but never what a job that still runs is writing.

use std::ffi::OsString;
use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;

use crate::Cache;
use crate::error::Error;
use crate::io::BlockFile;
use crate::lock::{self, Access};

/// `path` with `suffix` after its name.
pub(super) fn beside(path: &Path, suffix: &str) -> PathBuf {
    let mut name = OsString::from(path);
    name.push(suffix);
    name.into()
}

/// Refuses a target that is there already.
pub(super) fn must_be_absent(target: &Path) -> Result<(), Error> {
    if target.symlink_metadata().is_err() {
        return Ok(());
    }
    Err(Error::io(target, "create it", Errno::EXIST))
}

/// Removes what a job that died left behind; one that still runs holds its file.
pub(super) fn remove_leftover(path: &Path) -> Result<(), Error> {
    if path.symlink_metadata().is_err() {
        return Ok(());
    }
    BlockFile::open(path, Cache::Buffered, true)?.lock(Access::Write)?;
    std::fs::remove_file(path).map_err(|e| Error::io(path, "remove it", e))
}

/// A new, empty file in the place of what a job that died left behind, locked until it is closed.
pub(super) fn replace(path: &Path) -> Result<File, Error> {
    remove_leftover(path)?;
    let file = open_own(File::options().create_new(true), path)?;
    lock::acquire(path, file.as_fd(), Access::Write)?;
    Ok(file)
}

/// Opens a file for reading and writing that nobody else may look at.
pub(super) fn open_own(options: &mut std::fs::OpenOptions, path: &Path) -> Result<File, Error> {
    options
        .read(true)
        .write(true)
        .mode(0o600)
        .open(path)
        .map_err(|e| Error::io(path, "create it", e))
}

/// Gives a durable file its name, which nobody may have taken meanwhile.
pub(super) fn publish(partial: &Path, target: &Path) -> Result<(), Error> {
    let renamed = match renameat_with(CWD, partial, CWD, target, RenameFlags::NOREPLACE) {
        // File systems that know no such flag.
        Err(Errno::INVAL | Errno::NOSYS) => {
            std::fs::hard_link(partial, target).and_then(|()| std::fs::remove_file(partial))
        }
        other => other.map_err(Into::into),
    };
    renamed.map_err(|e| Error::io(target, "create it", e))?;
    sync_folder(target)
}

/// Gives a durable file the name of one that it replaces.
#[cfg(feature = "import")]
pub(super) fn exchange(new: &Path, path: &Path) -> Result<(), Error> {
    std::fs::rename(new, path).map_err(|e| Error::io(path, "replace it", e))?;
    sync_folder(path)
}

/// Makes the entry of a file in its folder durable.
pub(super) fn sync_folder(path: &Path) -> Result<(), Error> {
    let parent = path.parent().filter(|p| !p.as_os_str().is_empty());
    let folder = parent.unwrap_or(Path::new("."));
    File::open(folder)
        .and_then(|file| Ok(rustix::fs::fsync(file.as_fd())?))
        .map_err(|e| Error::io(folder, "make its entries durable", e))
}
