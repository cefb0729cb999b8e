//! Jobs on disks, from the request to the disk's new layers.
//!
//! ```text
//!  flatten ────────────────────────────────────> begin ─> runs on the disk's thread ─> done ─> exchange: no layers below
//!  commit ── exchange: layer below writable ───> begin ─> …                          ─> done ─> exchange: without the top
//!                                                          └> failed, cancelled ──────────────> exchange: as before (commit)
//! ```

use std::os::fd::AsRawFd;
use std::time::Duration;

use drover_api::definition::DiskConfig;
use drover_api::disks::{JobChange, JobKind, JobRequest, JobState, JobView};
use drover_api::server::Reply;
use drover_api::types::{ApiError, ErrorCode, EventKind};
use drover_block::{Job, JobHandle, lease};

use super::Control;
use super::clock::Clock;
use super::disks::{invalid, unavailable};
use super::exchange::{Flush, Taken};
use crate::machine::{Machine, disks};
use crate::mailbox::{Answer, DiskMessage, Message};

/// How often jobs are looked at.
const TICK: Duration = Duration::from_millis(50);
/// Jobs that are over and not forgotten yet.
const REMEMBERED: usize = 32;

/// A job as the control thread follows it.
struct Entry {
    id: u64,
    index: usize,
    disk: String,
    kind: JobKind,
    rate: Option<u64>,
    /// Once its disk's thread has begun it.
    handle: Option<JobHandle>,
    /// Its disk is being opened with other layers.
    finishing: bool,
    over: Option<(JobState, Option<String>)>,
    /// Who waits for it to begin.
    answer: Option<Answer<JobView>>,
}

/// All jobs of a VM.
pub(super) struct Jobs {
    next: u64,
    all: Vec<Entry>,
    timer: Clock,
    ticking: bool,
}

impl Jobs {
    pub(super) fn new(timer: Clock) -> Self {
        Self {
            next: 0,
            all: Vec::new(),
            timer,
            ticking: false,
        }
    }

    pub(super) fn timer_fd(&self) -> i32 {
        self.timer.as_raw_fd()
    }

    /// Whether one is under way on a disk.
    pub(super) fn concern(&self, index: usize) -> bool {
        self.on(index).is_some()
    }

    /// The one that is under way on a disk.
    pub(super) fn on(&self, index: usize) -> Option<String> {
        let mut all = self.all.iter();
        let entry = all.find(|entry| entry.index == index && entry.over.is_none())?;
        Some(entry.id.to_string())
    }

    /// The VM is gone.
    pub(super) fn forget_all(&mut self) {
        self.all.clear();
        self.tick_while_needed();
    }

    fn entry(&mut self, id: u64) -> Option<&mut Entry> {
        self.all.iter_mut().find(|entry| entry.id == id)
    }

    fn tick_while_needed(&mut self) {
        let needed = self.all.iter().any(|entry| entry.over.is_none());
        if needed == self.ticking {
            return;
        }
        let changed = if needed {
            self.timer.set(TICK, Some(TICK))
        } else {
            self.timer.clear()
        };
        match changed {
            Ok(()) => self.ticking = needed,
            Err(error) => tracing::error!(%error, "no timer to follow jobs by"),
        }
    }
}

impl Entry {
    fn view(&self) -> JobView {
        use drover_block::JobState as State;
        let progress = self.handle.as_ref().map(JobHandle::progress);
        let progress = progress.unwrap_or_default();
        let (state, error) = match (&self.over, &self.handle) {
            (Some((state, error)), _) => (*state, error.clone()),
            (None, _) if self.finishing => (JobState::Finishing, None),
            (None, None) => (JobState::Running, None),
            (None, Some(handle)) => match handle.state() {
                State::Running => (JobState::Running, None),
                State::Paused => (JobState::Paused, None),
                State::Cancelling => (JobState::Cancelling, None),
                State::Done | State::Failed(_) | State::Cancelled => (JobState::Finishing, None),
            },
        };
        JobView {
            id: self.id.to_string(),
            disk: self.disk.clone(),
            kind: self.kind,
            state,
            done_bytes: progress.done,
            total_bytes: progress.total,
            moved_bytes: progress.moved,
            rate: self.rate,
            error,
        }
    }
}

fn no_job(id: &str) -> ApiError {
    ApiError::new(ErrorCode::NotFound, format!("there is no job \"{id}\""))
}

impl Control {
    pub(super) fn begin_job(&mut self, disk: &str, request: JobRequest, answer: Answer<JobView>) {
        let index = match self.may_begin(disk, request.kind) {
            Ok(index) => index,
            Err(error) => {
                let _ = answer.send(Err(error));
                return;
            }
        };
        self.jobs.next += 1;
        let id = self.jobs.next;
        self.jobs.all.push(Entry {
            id,
            index,
            disk: disk.to_owned(),
            kind: request.kind,
            rate: request.rate.map(|rate| rate.0).filter(|rate| *rate > 0),
            handle: None,
            finishing: false,
            over: None,
            answer: Some(answer),
        });
        match request.kind {
            JobKind::Flatten => self.begin_on_thread(id),
            JobKind::Commit => self.exchange(vec![index], Flush::Must, move |control, taken| {
                let opened = taken.and_then(|taken| control.open_below(index, taken));
                match opened {
                    Ok(()) => control.begin_on_thread(id),
                    Err(error) => control.not_begun(id, error),
                }
            }),
        }
    }

    fn may_begin(&self, disk: &str, kind: JobKind) -> Reply<usize> {
        let index = self.changeable(disk)?;
        let Some(config) = self.machine()?.config().disks.get(index) else {
            return Err(ApiError::new(ErrorCode::NotFound, "there is no such disk"));
        };
        if config.read_only {
            return Err(invalid(format!("disk \"{disk}\" is read-only")));
        }
        match kind {
            _ if config.backing.is_empty() && !config.allow_header_backing => {
                Err(invalid(format!("disk \"{disk}\" has no layer below it")))
            }
            JobKind::Commit if config.backing.is_empty() => Err(invalid(
                "a commit writes the layer below, which therefore has to be listed under `backing`",
            )),
            JobKind::Commit | JobKind::Flatten => Ok(index),
        }
    }

    /// Opens a disk so that the layer below its top is written as well.
    fn open_below(&mut self, index: usize, taken: Vec<Taken>) -> Reply<()> {
        let closed = Self::close_taken(taken);
        let opened = closed.and_then(|()| {
            let machine = self.machine()?;
            let disk = machine
                .disks()
                .get(index)
                .zip(machine.config().disks.get(index));
            let Some((live, config)) = disk else {
                return Err(ApiError::no_vm());
            };
            let mut options = live.options.clone();
            options.commit_below = true;
            disks::open(config, options).map_err(unavailable)
        });
        match opened {
            Ok(disk) => {
                self.set_commit_below(index, true);
                self.give(index, Some(disk));
                Ok(())
            }
            Err(error) => {
                // What cannot be opened again is told by an event.
                let _ = self.open_again(index);
                Err(error)
            }
        }
    }

    fn set_commit_below(&mut self, index: usize, below: bool) {
        if let Some(machine) = &mut self.machine {
            let (_, live) = machine.disks_mut();
            if let Some(live) = live.get_mut(index) {
                live.options.commit_below = below;
            }
        }
    }

    fn begin_on_thread(&mut self, id: u64) {
        let Some((index, kind)) = self.jobs.entry(id).map(|entry| (entry.index, entry.kind)) else {
            return;
        };
        let kind = match kind {
            JobKind::Flatten => Job::Flatten,
            JobKind::Commit => Job::Commit,
        };
        let live = self.machine.as_ref().map(Machine::disks);
        let Some(live) = live.and_then(|disks| disks.get(index)) else {
            return;
        };
        let mailbox = self.mailbox.clone();
        live.handle.visit(move |disk| {
            let handle = match disk {
                Some(disk) => disk.begin(kind).map_err(|error| error.to_string()),
                None => Err("the disk is not there".to_owned()),
            };
            mailbox.send(Message::Disk(DiskMessage::Begun { job: id, handle }));
        });
    }

    /// A disk's thread has begun a job, or could not.
    pub(super) fn begun(&mut self, id: u64, handle: Result<JobHandle, String>) {
        let Some(entry) = self.jobs.entry(id) else {
            return;
        };
        match handle {
            Ok(handle) => {
                handle.set_rate(entry.rate);
                entry.handle = Some(handle);
                let view = entry.view();
                if let Some(answer) = entry.answer.take() {
                    let _ = answer.send(Ok(view));
                }
                self.jobs.tick_while_needed();
            }
            Err(why) => {
                let (index, kind) = (entry.index, entry.kind);
                self.not_begun(id, unavailable(why));
                if kind == JobKind::Commit {
                    self.leave_commit(index, |_| {});
                }
            }
        }
    }

    fn not_begun(&mut self, id: u64, error: ApiError) {
        let place = self.jobs.all.iter().position(|entry| entry.id == id);
        let entry = place.map(|place| self.jobs.all.remove(place));
        if let Some(answer) = entry.and_then(|entry| entry.answer) {
            let _ = answer.send(Err(error));
        }
    }

    /// Opens a disk without writing the layer below its top.
    fn leave_commit(&mut self, index: usize, then: impl FnOnce(&mut Self) + 'static) {
        self.exchange(vec![index], Flush::Try, move |control, taken| {
            if let Ok(taken) = taken {
                let _ = Self::close_taken(taken);
                control.set_commit_below(index, false);
                // What cannot be opened again is told by an event.
                let _ = control.open_again(index);
            }
            then(control);
        });
    }

    /// Looks at all jobs that are under way.
    pub(super) fn tick_jobs(&mut self) {
        use drover_block::JobState as State;
        if !self.jobs.timer.rang() {
            return;
        }
        let active = self
            .jobs
            .all
            .iter()
            .filter(|entry| entry.over.is_none() && !entry.finishing);
        let ended: Vec<_> = active
            .filter_map(|entry| {
                let state = entry.handle.as_ref()?.state();
                state
                    .is_over()
                    .then_some((entry.id, entry.index, entry.kind, state))
            })
            .collect();
        for (id, index, kind, state) in ended {
            if let Some(entry) = self.jobs.entry(id) {
                entry.finishing = true;
            }
            let (state, error) = match state {
                State::Failed(error) => (JobState::Failed, Some(error.to_string())),
                State::Done => {
                    self.finish_job(id, index, kind);
                    continue;
                }
                _ => (JobState::Cancelled, None),
            };
            match kind {
                JobKind::Flatten => self.job_over(id, state, error),
                JobKind::Commit => self.leave_commit(index, move |control| {
                    control.job_over(id, state, error);
                }),
            }
        }
    }

    /// Opens the disk of a job that has done its work with the layers that are left.
    fn finish_job(&mut self, id: u64, index: usize, kind: JobKind) {
        self.exchange(vec![index], Flush::Must, move |control, taken| {
            let finished = taken.and_then(|taken| {
                if let Err(error) = Self::close_taken(taken) {
                    // What cannot be opened again is told by an event.
                    let _ = control.open_again(index);
                    return Err(error);
                }
                let disks = &control.machine()?.config().disks;
                let Some(disk) = disks.get(index) else {
                    return Err(ApiError::no_vm());
                };
                let (top, left) = (disk.path.clone(), left_of(disk, kind));
                if kind == JobKind::Commit {
                    // The top is empty: the layer below may be used without it again, and the top by anybody.
                    if let Err(error) = lease::restore(&left.path, &top) {
                        // As before, with the empty top: nothing is lost.
                        control.set_commit_below(index, false);
                        control.open_again(index)?;
                        return Err(unavailable(error));
                    }
                }
                control.set_disks([(index, &left)].into_iter());
                control.set_commit_below(index, false);
                control.open_again(index)?;
                if kind == JobKind::Commit
                    && let Err(error) = lease::give_back(&top)
                {
                    tracing::warn!(%error, "the lease of an image that was committed");
                }
                Ok(())
            });
            match finished {
                Ok(()) => control.job_over(id, JobState::Done, None),
                Err(error) => control.job_over(id, JobState::Failed, Some(error.to_string())),
            }
        });
    }

    fn job_over(&mut self, id: u64, state: JobState, error: Option<String>) {
        let Some(entry) = self.jobs.entry(id) else {
            return;
        };
        entry.finishing = false;
        entry.over = Some((state, error.clone()));
        let (disk, kind) = (entry.disk.clone(), entry.kind);
        let over = |entry: &&Entry| entry.over.is_some();
        let surplus = self
            .jobs
            .all
            .iter()
            .filter(over)
            .count()
            .saturating_sub(REMEMBERED);
        for _ in 0..surplus {
            if let Some(oldest) = self.jobs.all.iter().position(|entry| entry.over.is_some()) {
                self.jobs.all.remove(oldest);
            }
        }
        self.jobs.tick_while_needed();
        self.emit(EventKind::Job {
            id: id.to_string(),
            disk,
            kind,
            state,
            error,
        });
    }

    pub(super) fn job_views(&self) -> Reply<Vec<JobView>> {
        self.machine()?;
        Ok(self.jobs.all.iter().map(Entry::view).collect())
    }

    fn job_place(&self, id: &str) -> Reply<usize> {
        self.machine()?;
        let number = id.parse::<u64>().map_err(|_| no_job(id))?;
        let mut all = self.jobs.all.iter();
        all.position(|entry| entry.id == number)
            .ok_or_else(|| no_job(id))
    }

    pub(super) fn job_view(&self, id: &str) -> Reply<JobView> {
        let place = self.job_place(id)?;
        let entry = self.jobs.all.get(place);
        entry.map(Entry::view).ok_or_else(|| no_job(id))
    }

    pub(super) fn change_job(&mut self, id: &str, change: JobChange) -> Reply<JobView> {
        let place = self.job_place(id)?;
        let entry = self.jobs.all.get_mut(place).ok_or_else(|| no_job(id))?;
        if entry.over.is_none() {
            if let Some(rate) = change.rate {
                entry.rate = Some(rate.0).filter(|rate| *rate > 0);
                if let Some(handle) = &entry.handle {
                    handle.set_rate(entry.rate);
                }
            }
            match (change.paused, &entry.handle) {
                (Some(true), Some(handle)) => handle.pause(),
                (Some(false), Some(handle)) => handle.resume(),
                _ => {}
            }
        }
        Ok(entry.view())
    }

    pub(super) fn delete_job(&mut self, id: &str) -> Reply<JobView> {
        let place = self.job_place(id)?;
        let entry = self.jobs.all.get(place).ok_or_else(|| no_job(id))?;
        if entry.over.is_some() {
            return Ok(self.jobs.all.remove(place).view());
        }
        if let Some(handle) = &entry.handle {
            handle.cancel();
        }
        Ok(entry.view())
    }
}

/// What a disk consists of after a job.
fn left_of(disk: &DiskConfig, kind: JobKind) -> DiskConfig {
    match (kind, disk.backing.split_first()) {
        (JobKind::Commit, Some((below, rest))) => DiskConfig {
            path: below.path.clone(),
            format: below.format,
            backing: rest.to_vec(),
            ..disk.clone()
        },
        _ => DiskConfig {
            backing: Vec::new(),
            allow_header_backing: false,
            ..disk.clone()
        },
    }
}
