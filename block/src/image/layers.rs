//! Merging the layers of a disk that nobody uses: down into the layer below, or up into the top.
//!
//! ```text
//!  commit    top ■□■, below ▨▨▨   ─>  top □□□, below ▣▨▣
//!  flatten   top ■□■, below ▨▨▨   ─>  top ■▨■ without a backing file
//! ```
//!
//! They are the jobs of an open disk ([`crate::Job`]), driven to their end. Both leave what a guest of the top reads as it is, at
//! every moment; one that was stopped or died is just done again.

use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};

use super::job::Monitor;
use crate::error::{Error, ErrorKind};
use crate::options::DiskOptions;
use crate::{Backing, Disk, DiskSpec, Format, Job, JobState, lease};

/// The longest pause at a time, so that a job can be cancelled soon.
const PAUSE: Duration = Duration::from_millis(100);

/// Moves what the top image of a disk has into the layer below it, which grows where it is shorter. Afterwards the top is empty and
/// may be deleted: the layer below reads the same.
///
/// # Errors
/// The disk has no layer below that is listed by the caller, somebody uses one of the two, or an image is damaged or full.
pub fn commit(spec: &DiskSpec, monitor: &mut dyn Monitor) -> Result<(), Error> {
    let options = DiskOptions {
        commit_below: true,
        ..DiskOptions::default()
    };
    let disk = DiskSpec {
        read_only: false,
        ..spec.clone()
    };
    run(Disk::open_with(&disk, options)?, Job::Commit, monitor)?;
    // The layer below does not go on in the overlay any more.
    match &spec.backing {
        Backing::Explicit(layers) => layers
            .first()
            // Block devices have no leases.
            .filter(|below| below.path.is_file())
            .map_or(Ok(()), |below| lease::restore(&below.path, &spec.top.path)),
        Backing::FromHeader { .. } => Ok(()),
    }
}

/// Copies what the layers below have, and the top does not hide, into the top image, which then needs no backing file. One that needs
/// none is left as it is: a flatten that died after its last step is done again like any other.
///
/// # Errors
/// The top is not qcow2, somebody uses it, or an image is damaged or full.
pub fn flatten(spec: &DiskSpec, monitor: &mut dyn Monitor) -> Result<(), Error> {
    if spec.top.format != Format::Qcow2 {
        let reason = "a raw image has no backing files";
        let kind = ErrorKind::Backing(reason.into());
        return Err(Error::new(&spec.top.path, kind));
    }
    let info = super::info(&spec.top.path, spec.top.format)?;
    let is_flat = info.qcow2.is_some_and(|qcow2| qcow2.backing_file.is_none());
    let alone = DiskSpec {
        read_only: false,
        backing: Backing::Explicit(Vec::new()),
        ..spec.clone()
    };
    if is_flat {
        // Opened all the same: in use or marked corrupt it is refused.
        return Disk::open(&alone)?.close();
    }
    let disk = Disk::open(&DiskSpec {
        backing: spec.backing.clone(),
        ..alone
    })?;
    run(disk, Job::Flatten, monitor)
}

fn run(mut disk: Disk, job: Job, monitor: &mut dyn Monitor) -> Result<(), Error> {
    let handle = disk.begin(job)?;
    disk.job_has_the_disk();
    let mut completions = Vec::new();
    loop {
        handle.set_rate(monitor.bytes_per_second());
        disk.poll(&mut completions);
        let progress = handle.progress();
        if monitor.progress(progress.done, progress.total).is_break() {
            handle.cancel();
        }
        match handle.state() {
            JobState::Done => return disk.close(),
            JobState::Failed(failure) => {
                let kind = ErrorKind::Request(failure.error);
                return Err(Error::new(&failure.path, kind));
            }
            JobState::Cancelled => {
                let path = disk.path().to_owned();
                disk.close()?;
                return Err(Error::new(&path, ErrorKind::Cancelled));
            }
            JobState::Running | JobState::Paused | JobState::Cancelling => wait(&disk),
        }
    }
}

/// Waits until the job may go on.
fn wait(disk: &Disk) {
    let Some(timer) = disk.timer() else { return };
    let pause = Timespec {
        tv_sec: 0,
        tv_nsec: i64::from(PAUSE.subsec_nanos()),
    };
    // A signal or a failure only makes the job look sooner.
    let _ = rustix::event::poll(&mut [PollFd::new(&timer, PollFlags::IN)], Some(&pause));
}
