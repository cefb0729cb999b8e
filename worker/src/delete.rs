//! Removes a worker and every trace of it, in whatever state it is. Doing it again does nothing.

use std::time::{Duration, Instant};

use drover_api::types::ShutdownRequest;

use crate::error::Error;
use crate::netlink;
use crate::process::{self, Process};
use crate::state::{Locked, Record, StateDir, WorkerDir};
use crate::vmm;

/// How long the VMM may take to end after its guest is off.
const END_DEADLINE: Duration = Duration::from_secs(5);
/// How long the VMM may take to take a request.
const REPLY_DEADLINE: Duration = Duration::from_secs(5);
/// How long a worker may be locked by whoever made it.
const LOCK_DEADLINE: Duration = Duration::from_millis(500);
/// How long a tap may outlive the process that held it.
const TAP_DEADLINE: Duration = Duration::from_secs(2);

/// How a guest is ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// Its power button is pressed; after the timeout it is forced off.
    Shutdown {
        /// How long it has.
        timeout: Duration,
    },
    /// Its VMM is killed.
    Force,
}

/// How a worker ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Deleted {
    /// There was none.
    Absent,
    /// It did not run.
    Stopped,
    /// Its guest powered off.
    ShutDown,
    /// It was ended by force.
    Forced,
}

/// Removes the worker `name`.
///
/// # Errors
/// It is being created, its process does not end, or something of it cannot be removed. It can be called again.
pub fn delete(state: &StateDir, name: &str, end: End) -> Result<Deleted, Error> {
    let dir = state.worker(name)?;
    state.sweep(name)?;
    let Some(locked) = lock(state, &dir)? else {
        return Ok(Deleted::Absent);
    };
    let how = match process::find(&dir) {
        None => Deleted::Stopped,
        Some(process) => {
            let how = stop(&dir, &process, end)?;
            process.wait_until_reaped();
            how
        }
    };
    // A worker that was damaged by hand has no record; the folder is removed all the same.
    if let Ok(record) = dir.record(state)
        && let Some(tap) = &record.tap
    {
        remove_tap(tap)?;
    }
    state.remove(name, &locked)?;
    Ok(how)
}

/// Locks a worker. The VMM of a maker that was killed holds the maker's lock for the moment until it has become another program.
fn lock(state: &StateDir, dir: &WorkerDir) -> Result<Option<Locked>, Error> {
    let deadline = Instant::now() + LOCK_DEADLINE;
    loop {
        match state.lock(dir) {
            Err(Error::Busy(_)) if Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(5));
            }
            other => return other,
        }
    }
}

/// Removes a worker that is not finished: ends its process by force.
pub(crate) fn undo(
    state: &StateDir,
    dir: &WorkerDir,
    record: &Record,
    locked: &Locked,
) -> Result<(), Error> {
    if let Some(process) = process::find(dir) {
        process.kill()?;
    }
    if let Some(tap) = &record.tap {
        remove_tap(tap)?;
    }
    state.remove(dir.name(), locked)
}

fn stop(dir: &WorkerDir, process: &Process, end: End) -> Result<Deleted, Error> {
    if let End::Shutdown { timeout } = end {
        let timeout_ms = u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX);
        let began = Instant::now();
        // A VMM that cannot be asked any more is ended like one that does not obey.
        let asked = vmm::client(dir)?
            .with_timeout(REPLY_DEADLINE)
            .shutdown(ShutdownRequest { timeout_ms })
            .is_ok();
        if asked && process.wait(timeout.saturating_add(END_DEADLINE)) {
            // The VMM forces the guest off by itself at the deadline.
            return Ok(if began.elapsed() < timeout {
                Deleted::ShutDown
            } else {
                Deleted::Forced
            });
        }
    }
    process.kill()?;
    Ok(Deleted::Forced)
}

/// The kernel removes the tap when its last descriptor is closed, a little after the process is gone; one that is held by
/// somebody else goes by request.
fn remove_tap(tap: &str) -> Result<(), Error> {
    let deadline = Instant::now() + TAP_DEADLINE;
    while netlink::exists(tap) && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(5));
    }
    if !netlink::exists(tap) {
        return Ok(());
    }
    netlink::remove(tap).map_err(|source| Error::Network {
        what: format!("cannot remove {tap}"),
        source,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn made() -> (tempfile::TempDir, StateDir, Locked) {
        let folder = tempfile::tempdir().unwrap();
        let state = StateDir::new(Some(folder.path())).unwrap();
        let mut locked = state.begin("a").unwrap();
        state
            .publish(&mut locked, &state.worker("a").unwrap())
            .unwrap();
        (folder, state, locked)
    }

    #[test]
    fn a_lock_that_ends_in_a_moment_is_waited_for() {
        let (_folder, state, locked) = made();
        let held = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(30));
            drop(locked);
        });
        assert_eq!(delete(&state, "a", End::Force).unwrap(), Deleted::Stopped);
        held.join().unwrap();
        assert_eq!(delete(&state, "a", End::Force).unwrap(), Deleted::Absent);
    }

    #[test]
    fn a_worker_that_is_being_made_is_not_deleted() {
        let (_folder, state, locked) = made();
        assert!(matches!(
            delete(&state, "a", End::Force),
            Err(Error::Busy(_))
        ));
        assert!(locked.path.exists());
    }
}
