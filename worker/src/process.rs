//! The VMM's process, found and ended without ever touching another one.
//!
//! A process id alone may have been given to somebody else, so a process is known by its id and its start time, and is
//! signalled through a pidfd.

use std::fs;
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use crate::error::Error;
use crate::state::WorkerDir;

/// How long a process may take to end after SIGKILL (it may have to finish a disk request first).
const KILL_DEADLINE: Duration = Duration::from_secs(30);
/// How long the parent of an ended process (usually init) is given to take note of it.
const REAP_DEADLINE: Duration = Duration::from_millis(500);

/// Which process: ids are reused, start times with them are not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ProcessId {
    /// Process id.
    pub(crate) pid: i32,
    /// Clock ticks from boot to its start (field 22 of /proc/PID/stat).
    pub(crate) start_ticks: u64,
}

impl ProcessId {
    /// The process that has `pid` now, unless it has ended.
    #[must_use]
    pub(crate) fn of(pid: i32) -> Option<Self> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The name in parentheses may hold spaces and parentheses.
        let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace();
        let running = fields
            .next()
            .is_some_and(|state| state != "Z" && state != "X");
        let start_ticks = fields.nth(18)?.parse().ok()?;
        running.then_some(Self { pid, start_ticks })
    }

    /// A handle to it, if it still runs.
    #[must_use]
    pub(crate) fn open(self) -> Option<Process> {
        let fd = pidfd_open(Pid::from_raw(self.pid)?, PidfdFlags::empty()).ok()?;
        // The handle holds whoever has the id now; only then is it known who that is.
        (Self::of(self.pid) == Some(self)).then_some(Process { id: self, fd })
    }
}

/// A handle to one process.
#[derive(Debug)]
pub(crate) struct Process {
    id: ProcessId,
    fd: OwnedFd,
}

impl Process {
    /// Which one.
    #[must_use]
    pub(crate) fn id(&self) -> ProcessId {
        self.id
    }

    /// Waits until it has ended; whether it has.
    #[must_use]
    pub(crate) fn wait(&self, timeout: Duration) -> bool {
        let deadline = Instant::now() + timeout;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let timeout = Timespec {
                tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
                tv_nsec: i64::from(left.subsec_nanos()),
            };
            let mut fds = [PollFd::from_borrowed_fd(self.fd.as_fd(), PollFlags::IN)];
            match poll(&mut fds, Some(&timeout)) {
                Ok(0) => return false,
                Err(rustix::io::Errno::INTR) => {}
                Ok(_) => return true,
                Err(_) => return ProcessId::of(self.id.pid) != Some(self.id),
            }
        }
    }

    /// Waits until an ended process has left the process table; a parent that takes no note of its children is not waited for.
    pub(crate) fn wait_until_reaped(&self) {
        let deadline = Instant::now() + REAP_DEADLINE;
        while Path::new("/proc").join(self.id.pid.to_string()).exists() && Instant::now() < deadline
        {
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Ends it by force and waits until it is gone.
    ///
    /// # Errors
    /// It does not end, or belongs to somebody else.
    pub(crate) fn kill(&self) -> Result<(), Error> {
        match pidfd_send_signal(&self.fd, Signal::KILL) {
            Ok(()) | Err(rustix::io::Errno::SRCH) => {}
            Err(error) => {
                return Err(Error::Vmm(format!(
                    "cannot end process {}: {error}",
                    self.id.pid
                )));
            }
        }
        if self.wait(KILL_DEADLINE) {
            Ok(())
        } else {
            Err(Error::Unkillable(self.id.pid))
        }
    }
}

/// Remembers the process of a worker: its id and its start, in a line.
pub(crate) fn remember(dir: &WorkerDir, id: ProcessId) -> Result<(), Error> {
    let path = dir.pid_file();
    let line = format!("{} {}\n", id.pid, id.start_ticks);
    let mut options = fs::OpenOptions::new();
    options.write(true).create(true).truncate(true).mode(0o600);
    options
        .open(&path)
        .and_then(|mut file| file.write_all(line.as_bytes()))
        .map_err(Error::io("write", &path))
}

/// The running VMM of a worker: the one that was remembered, or, should its starter have been killed before it could write that
/// down, the one that serves the worker's API socket by its own command line.
#[must_use]
pub(crate) fn find(dir: &WorkerDir) -> Option<Process> {
    let remembered = fs::read_to_string(dir.pid_file())
        .ok()
        .and_then(|text| {
            let (pid, start_ticks) = text.trim().split_once(' ')?;
            Some(ProcessId {
                pid: pid.parse().ok()?,
                start_ticks: start_ticks.parse().ok()?,
            })
        })
        .and_then(ProcessId::open);
    remembered.or_else(|| find_by_socket(&dir.api_socket()))
}

fn find_by_socket(socket: &Path) -> Option<Process> {
    let mut expected = b"\0--api-socket\0".to_vec();
    expected.extend_from_slice(socket.as_os_str().as_encoded_bytes());
    expected.push(0);
    for entry in fs::read_dir("/proc").ok()?.flatten() {
        let Some(pid) = entry
            .file_name()
            .to_str()
            .and_then(|name| name.parse::<i32>().ok())
        else {
            continue;
        };
        let Some(id) = ProcessId::of(pid) else {
            continue;
        };
        let command = fs::read(entry.path().join("cmdline")).unwrap_or_default();
        if command.windows(expected.len()).any(|part| part == expected)
            && let Some(process) = id.open()
        {
            return Some(process);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;
    use crate::state::StateDir;

    #[test]
    fn a_process_is_ended_and_its_id_means_nothing_afterwards() {
        let mut child = Command::new("sleep")
            .arg("60")
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        let id = ProcessId::of(i32::try_from(child.id()).unwrap()).unwrap();
        let process = id.open().unwrap();
        assert!(!process.wait(Duration::from_millis(20)));
        process.kill().unwrap();
        // It is a zombie until its parent has waited, and counts as ended.
        assert!(id.open().is_none());
        child.wait().unwrap();
        assert_eq!(ProcessId::of(id.pid), None);
    }

    #[test]
    fn what_is_remembered_is_for_its_owner_only() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let dir = StateDir::new(Some(folder.path()))
            .unwrap()
            .worker("a")
            .unwrap();
        fs::create_dir_all(dir.path()).unwrap();
        let id = ProcessId::of(i32::try_from(std::process::id()).unwrap()).unwrap();
        remember(&dir, id).unwrap();
        assert_eq!(find(&dir).unwrap().id(), id);
        let mode = dir.pid_file().metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }

    #[test]
    fn another_process_with_the_same_id_is_not_taken_for_it() {
        let mine = ProcessId::of(i32::try_from(std::process::id()).unwrap()).unwrap();
        assert!(mine.open().is_some());
        let earlier = ProcessId {
            start_ticks: mine.start_ticks - 1,
            ..mine
        };
        assert!(earlier.open().is_none());
    }

    #[test]
    fn a_vmm_that_nobody_remembered_is_found_by_its_socket() {
        let folder = tempfile::tempdir().unwrap();
        let dir = StateDir::new(Some(folder.path()))
            .unwrap()
            .worker("a")
            .unwrap();
        assert!(find(&dir).is_none());
        let mut child = Command::new("sh")
            .args(["-c", "read x", "drover-vmm", "--api-socket"])
            .arg(dir.api_socket())
            .arg("")
            .stdin(Stdio::piped())
            .spawn()
            .unwrap();
        let deadline = Instant::now() + Duration::from_secs(5);
        let found = loop {
            match find(&dir) {
                Some(process) => break process,
                None => assert!(Instant::now() < deadline, "not found"),
            }
        };
        assert_eq!(found.id().pid, i32::try_from(child.id()).unwrap());
        found.kill().unwrap();
        child.wait().unwrap();
    }
}
