//! When the steps of a job are begun: as many as the guest, the rate and the levers of its handle allow.

use std::sync::Arc;

use super::step::Failure;
use super::{Job, JobError, JobHandle, JobState, LONG_STRIDE, STRIDE, Step, StepEnd};
use crate::chain::Image;
use crate::disk::{Core, Disk};
use crate::error::{Error, ErrorKind};
use crate::timer::{self, Timer};

/// Steps at a time, while the guest asks for nothing.
const AT_ONCE: usize = 2;

/// Nanoseconds of its rate that a job may catch up with.
const CREDIT: u64 = 200_000_000;

/// Steps a second that a job with a rate consists of, so that it moves evenly.
const EVENLY: u64 = 20;

/// Steps that a job consists of at least, so that progress can be seen and a small disk's job cancelled.
const AT_LEAST: u64 = 64;

const NANOS: u64 = 1_000_000_000;

/// A job that is not over.
pub(crate) struct Running {
    job: Job,
    handle: JobHandle,
    /// Where the next step begins; a cluster's start, or the disk's end.
    cursor: u64,
    cluster: u64,
    stride: u64,
    /// Where the steps under way began.
    under_way: Vec<u64>,
    /// The last step has begun.
    finishing: bool,
    rate: Rate,
}

/// How a job keeps to its rate.
#[derive(Default)]
struct Rate {
    /// When the next step may begin, by [`timer::now`].
    due: u64,
}

impl Rate {
    /// A step has moved so many bytes, where so many may be moved a second.
    fn pay(&mut self, now: u64, moved: u64, bytes_per_second: u64) {
        let cost = u128::from(moved) * u128::from(NANOS) / u128::from(bytes_per_second.max(1));
        let from = self.due.max(now.saturating_sub(CREDIT));
        self.due = from.saturating_add(u64::try_from(cost).unwrap_or(u64::MAX));
    }

    /// A new rate does not pay for what the old one allowed.
    fn forgive(&mut self, now: u64) {
        self.due = self.due.min(now);
    }
}

/// Whether there is anything to be done at once.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Next {
    Step,
    Wait,
    Over,
}

impl Running {
    fn begin(job: Job, core: &Core, timer: Arc<Timer>) -> Result<Self, Error> {
        let top = core.chain.top();
        let path = top.file().path();
        let refuse = |reason: &str| Err(Error::new(path, ErrorKind::Job(reason.into())));
        let Image::Qcow2(qcow2) = top else {
            return refuse("a raw image has no layers below");
        };
        if core.read_only {
            return refuse("the disk is read-only, its layers cannot be merged");
        }
        if qcow2.header().nb_snapshots > 0 {
            return refuse(
                "has internal snapshots, which would change with the layers below: delete them first (`qemu-img snapshot -d`)",
            );
        }
        match job {
            Job::Flatten if core.chain.writable() > 1 => {
                return refuse("is being committed: let that end before it is flattened");
            }
            Job::Commit if core.chain.writable() < 2 => {
                return refuse("the layer below was not opened for writing (`commit_below`)");
            }
            _ => {}
        }
        let handle = JobHandle::new(job, top.size(), timer);
        Ok(Self {
            job,
            handle,
            cursor: 0,
            cluster: qcow2.cluster_size(),
            stride: STRIDE,
            under_way: Vec::with_capacity(AT_ONCE),
            finishing: false,
            rate: Rate::default(),
        })
    }

    /// Takes note of how a step ended.
    fn ended(&mut self, core: &Core, end: StepEnd) {
        if let Some(n) = self.under_way.iter().position(|start| *start == end.start) {
            self.under_way.swap_remove(n);
        }
        let mut shared = self.handle.shared();
        match end.result {
            Ok(worked) => {
                self.cursor = self.cursor.max(worked.to);
                shared.progress.moved += worked.moved;
                if let Some(rate) = shared.rate {
                    self.rate.pay(timer::now(), worked.moved, rate);
                }
                if end.last {
                    shared.state = JobState::Done;
                }
            }
            // The first failure counts.
            Err(_) if matches!(shared.state, JobState::Failed(_)) => {}
            Err(Failure { depth, error }) => {
                let image = core.chain.layer(depth).unwrap_or(core.chain.top());
                let path = image.file().path().to_owned();
                shared.state = JobState::Failed(JobError { path, error });
            }
        }
        let first = self.under_way.iter().copied().min();
        let done = first.unwrap_or(self.cursor).min(shared.progress.total);
        shared.progress.done = shared.progress.done.max(done);
    }

    /// What may be done now; sets the alarm for what may be done later. `at_once`: so many steps may be under way.
    fn next(&mut self, at_once: usize, size: u64) -> Next {
        let handle = self.handle.clone();
        let mut shared = handle.shared();
        if std::mem::take(&mut shared.changed) {
            self.rate.forgive(timer::now());
        }
        handle.set_alarm(&shared, None);
        shared.progress.total = size.max(shared.progress.done);
        let under_way = self.under_way.len();
        match shared.state {
            JobState::Running => {}
            JobState::Paused => return Next::Wait,
            _ if under_way > 0 => return Next::Wait,
            JobState::Cancelling => {
                shared.state = JobState::Cancelled;
                return Next::Over;
            }
            JobState::Done | JobState::Failed(_) | JobState::Cancelled => return Next::Over,
        }
        // With a rate, what a step costs is known when it is over.
        let at_once = if shared.rate.is_some() { 1 } else { at_once };
        if under_way >= at_once || self.finishing || (self.cursor >= size && under_way > 0) {
            return Next::Wait;
        }
        if self.rate.due > timer::now() {
            if under_way == 0 {
                handle.set_alarm(&shared, Some(self.rate.due));
            }
            return Next::Wait;
        }
        Next::Step
    }

    /// The next step; there is one.
    fn step(&mut self, size: u64) -> Step {
        if self.cursor >= size {
            self.finishing = true;
            self.under_way.push(size);
            return Step::Finish(self.job);
        }
        let mut stride = self.stride.min(size / AT_LEAST);
        if let Some(rate) = self.handle.rate() {
            stride = stride.min(rate / EVENLY);
        }
        let stride = (stride - stride % self.cluster).max(self.cluster);
        let start = self.cursor;
        let end = start.saturating_add(stride).min(size);
        self.cursor = end;
        self.under_way.push(start);
        Step::Work(self.job, start..end)
    }
}

impl Disk {
    /// Begins a job. It goes on whenever the disk is polled; [`Disk::timer`] says when that is worthwhile.
    ///
    /// # Errors
    /// [`ErrorKind::Job`]: another job is under way, or the disk is not one that the job could be done on.
    pub fn begin(&mut self, job: Job) -> Result<JobHandle, Error> {
        let core = self.executor.shared();
        let path = core.chain.top().file().path();
        if self.job.is_some() {
            let reason = "another job on this disk is under way: wait for its end or cancel it";
            return Err(Error::new(path, ErrorKind::Job(reason.into())));
        }
        let timer = match &self.timer {
            Some(timer) => Arc::clone(timer),
            None => {
                let timer = Timer::new().map_err(|e| Error::io(path, "make a timer for", e))?;
                Arc::clone(self.timer.insert(Arc::new(timer)))
            }
        };
        let running = Running::begin(job, &core, timer)?;
        let handle = running.handle.clone();
        handle.set_alarm(&handle.shared(), Some(0));
        self.job = Some(running);
        Ok(handle)
    }

    /// The job that is under way.
    #[must_use]
    pub fn job(&self) -> Option<&JobHandle> {
        self.job.as_ref().map(|running| &running.handle)
    }

    /// From now on steps may be longer: no guest waits for them.
    pub(crate) fn job_has_the_disk(&mut self) {
        if let Some(running) = &mut self.job {
            running.stride = LONG_STRIDE;
        }
    }

    /// Carries the job on: begins what steps may begin. Bounded, whatever there is to do.
    pub(crate) fn pace(&mut self) {
        self.collect_steps();
        let busy = self.guest_running() > 0;
        let at_once = match self.queue {
            Some(_) if !busy => AT_ONCE,
            _ => 1,
        };
        let size = self.size_bytes();
        let mut begun = 0;
        while let Some(running) = &mut self.job {
            match running.next(at_once, size) {
                Next::Wait => return,
                Next::Over => {
                    self.job = None;
                    return;
                }
                Next::Step if begun == at_once => {
                    // Steps that end at once leave the thread to others, too.
                    running.handle.set_alarm(&running.handle.shared(), Some(0));
                    return;
                }
                Next::Step => {
                    let step = running.step(size);
                    begun += 1;
                    self.start_step(step);
                }
            }
            self.collect_steps();
        }
    }

    /// Sees to it that the disk is polled again, where steps ended of which the job has not heard.
    pub(crate) fn call_for_pace(&self) {
        if let Some(running) = &self.job
            && !self.steps.is_empty()
        {
            let shared = running.handle.shared();
            running.handle.set_alarm(&shared, Some(0));
        }
    }

    /// Makes the layer below no smaller than `size`, where that layer is written.
    pub(crate) fn grow_below(&mut self, size: u64) -> Result<(), Error> {
        let core = self.executor.shared();
        let Some(lower) = core.chain.layer(1).filter(|_| core.chain.writable() > 1) else {
            return Ok(());
        };
        if lower.size() >= size {
            return Ok(());
        }
        self.resize_layer(1, size)
            .map_err(|kind| Error::new(lower.file().path(), kind))
    }

    fn collect_steps(&mut self) {
        for end in self.steps.drain(..) {
            if let Some(running) = &mut self.job {
                running.ended(self.executor.core(), end);
            }
        }
    }

    /// Ends the job because the disk is closed; its steps are over.
    pub(crate) fn end_job(&mut self) {
        self.collect_steps();
        if let Some(running) = self.job.take() {
            let mut shared = running.handle.shared();
            if !shared.state.is_over() {
                shared.state = JobState::Cancelled;
            }
            running.handle.set_alarm(&shared, None);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The share of its rate that a job comes to whose steps move so much and take between nothing and `longest` nanoseconds.
    fn share(bytes_per_second: u64, step: u64, longest: u64) -> f64 {
        let mut rate = Rate::default();
        let (mut now, mut moved) = (7 * NANOS, 0);
        let start = now;
        rate.forgive(now);
        for n in 0u64.. {
            now = now.max(rate.due);
            if now - start > 60 * NANOS {
                break;
            }
            now += n.wrapping_mul(0x9e37_79b9_7f4a_7c15) % (longest + 1);
            moved += step;
            rate.pay(now, step, bytes_per_second);
        }
        moved as f64 / 60.0 / bytes_per_second as f64
    }

    #[test]
    fn a_rate_is_kept_within_one_percent_however_long_steps_take() {
        for rate in [64 << 10, 1 << 20, 100 << 20, 3 << 30] {
            let step = (rate / EVENLY).clamp(4096, STRIDE);
            let paid = step * NANOS / rate;
            for longest in [0, paid / 2, paid] {
                let share = share(rate, step, longest);
                assert!((0.99..1.01).contains(&share), "{share} of {rate}");
            }
        }
    }

    #[test]
    fn a_job_that_stood_still_makes_up_for_no_more_than_its_credit() {
        let mut rate = Rate::default();
        rate.pay(NANOS, 1000, 1000);
        let later = 100 * NANOS;
        let mut burst = 0;
        while rate.due <= later {
            rate.pay(later, 10, 1000);
            burst += 10;
        }
        assert!(
            (200..=210).contains(&burst),
            "{burst} bytes of 1000 a second"
        );
    }
}
