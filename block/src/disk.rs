//! A disk: requests in, completions out.
//!
//! ```text
//!  submit(Request) ──> check ──> task: hold clusters ─> map ─> transfer ─> link ──> Completion ──> poll()
//! ```
//!
//! Everything but the transfers themselves happens on the thread that calls [`Disk::submit`] and [`Disk::poll`]. What performs them
//! is an [`IoEngine`]; with the inline one a task runs to its end inside `submit`.

use std::cell::Cell;
use std::future::Future;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use crate::budget::CacheCounts;
use crate::buffers::{Buffers, SharedBuffer, Span};
use crate::chain::{Chain, Image, Located};
use crate::error::{Error, ErrorClass, ErrorKind, IoError};
use crate::io::HostCounts;
use crate::io::queue::Queue;
use crate::online::{Running, Step, StepEnd};
use crate::options::{DetectZeroes, DiskOptions, IoEngine, Losses};
use crate::qcow2::Clear;
use crate::qcow2::relabel::Label;
use crate::statistics::DiskStatistics;
use crate::task::{self, Executor, Kind, Serve};
use crate::throttle::Admission;
use crate::timer::{self, Timer};
use crate::{Backing, DiskSpec, Format};

/// What a request does. Offsets and lengths are bytes of the disk, of any alignment.
#[derive(Debug)]
pub enum Op {
    /// Fills `buffers` from the disk.
    Read {
        /// First byte.
        offset: u64,
        /// Where the bytes go; their length is the request's.
        buffers: Buffers,
    },
    /// Writes `buffers` to the disk.
    Write {
        /// First byte.
        offset: u64,
        /// Where the bytes come from; their length is the request's.
        buffers: Buffers,
    },
    /// Makes everything durable that completed before. Succeeds on a read-only disk.
    Flush,
    /// Tells that a range's contents are not needed. Afterwards it reads as zero, or as before.
    Discard {
        /// First byte.
        offset: u64,
        /// Number of bytes.
        length: u64,
    },
    /// Makes a range read as zero.
    WriteZeroes {
        /// First byte.
        offset: u64,
        /// Number of bytes.
        length: u64,
        /// The range's space may be given back.
        unmap: bool,
    },
}

/// A request.
#[derive(Debug)]
pub struct Request {
    /// Comes back with the completion.
    pub tag: u64,
    /// What to do.
    pub op: Op,
}

/// The end of a request.
#[derive(Debug)]
pub struct Completion {
    /// The request's.
    pub tag: u64,
    /// How it ended.
    pub result: Result<(), IoError>,
    /// What a request was that failed, for whoever wants to try it again. Until this is dropped the memory is the request's.
    pub op: Option<Op>,
}

impl Completion {
    fn tells_of_loss(&self) -> bool {
        self.result == Err(IoError::Lost)
    }

    fn new(tag: u64, result: Result<(), IoError>, op: Op) -> Self {
        // The memory of one that succeeded belongs to the guest again before it hears of the end.
        let op = result.is_err().then_some(op);
        Self { tag, result, op }
    }
}

/// Failures of one disk that are logged; later ones are only counted by whoever serves the disk.
const LOGGED_FAILURES: u32 = 32;

/// How long, in nanoseconds, one who waits for a limit sleeps before it looks after the transfers of others.
const A_MOMENT: u64 = 5_000_000;

/// What requests share.
pub(crate) struct Core {
    pub(crate) chain: Chain,
    pub(crate) read_only: bool,
    pub(crate) discard: bool,
    pub(crate) detect_zeroes: DetectZeroes,
    statistics: Arc<DiskStatistics>,
    losses: Losses,
    /// The next flush has to tell of writes that were lost before the disk was opened.
    lost: Cell<bool>,
}

/// What runs as a task.
pub(crate) enum Work {
    Guest(Request),
    Job(Step),
}

/// What a task ends with.
pub(crate) enum Outcome {
    Guest(Completion),
    Job(StepEnd),
}

impl Serve<Work, Outcome> for Core {
    async fn serve(core: Rc<Self>, work: Work) -> Outcome {
        let request = match work {
            Work::Guest(request) => request,
            // On the heap, so that a request's task is no larger for it.
            Work::Job(step) => return Outcome::Job(Box::pin(step.run(&core)).await),
        };
        let Request { tag, op } = request;
        let result = core.run_counted(&op).await;
        Outcome::Guest(Completion::new(tag, result, op))
    }
}

/// An open disk. It can move to another thread, and belongs to one at a time.
pub struct Disk {
    pub(crate) executor: Executor<Core, Work, Outcome>,
    /// What transfers wait in; absent with the inline engine.
    pub(crate) queue: Option<Arc<Queue>>,
    /// What is waited for a time with: absent with the inline engine, unless there are limits or layers to be merged.
    pub(crate) timer: Option<Arc<Timer>>,
    /// Requests that a limit holds up.
    admission: Option<Admission>,
    pub(crate) done: Vec<Completion>,
    /// The job under way, its steps that are not over, and those that are and that it has not heard of.
    pub(crate) job: Option<Running>,
    steps_running: usize,
    pub(crate) steps: Vec<StepEnd>,
    failures: u32,
    closed: bool,
}

impl std::fmt::Debug for Disk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Disk({})", self.top().file().path().display())
    }
}

impl Disk {
    /// Opens and locks every image of a disk. No byte of any of them is changed, except that a layer that is opened to be committed
    /// to ([`DiskOptions::commit_below`]) grows to the size of the top. Transfers are made inline.
    ///
    /// # Errors
    /// An image is missing, in use, of another format than stated, damaged or in need of something unsupported; or a header names
    /// a backing file that nothing permits.
    pub fn open(spec: &DiskSpec) -> Result<Self, Error> {
        Self::open_with(spec, IoEngine::Inline)
    }

    /// [`Disk::open`] with a choice of how the disk works.
    ///
    /// # Errors
    /// Those of [`Disk::open`], and what the host says where it allows no io_uring or no more threads.
    pub fn open_with(spec: &DiskSpec, options: impl Into<DiskOptions>) -> Result<Self, Error> {
        let options = options.into();
        let chain = Chain::open(
            spec,
            writable_layers(spec, &options)?,
            &options.cache,
            options.lease.as_ref(),
        )?;
        let path = &spec.top.path;
        let queue = match options.engine {
            IoEngine::Inline => None,
            IoEngine::IoUring => Some(
                Queue::ring(&chain.descriptors())
                    .map_err(|e| Error::io(path, "make an io_uring for", e))?,
            ),
            IoEngine::Threads => {
                let queue = Queue::threads(options.thread_start.as_ref());
                Some(queue.map_err(|e| Error::io(path, "start threads for", e))?)
            }
        };
        let statistics = match &options.statistics {
            None => Arc::default(),
            Some(statistics) => {
                statistics.attach(chain.counts(), chain.top().file().fd());
                Arc::clone(statistics)
            }
        };
        let mut disk = Self::new_counting(chain, spec, queue, statistics, &options);
        // A job may be begun later, where a sandbox allows no new descriptors any more.
        let has_layers = !spec.read_only && disk.core().chain.layer(1).is_some();
        if disk.queue.is_some() || options.throttle.is_some() || has_layers {
            let timer = Timer::new().map_err(|e| Error::io(path, "make a timer for", e))?;
            let timer = Arc::new(timer);
            let throttle = options.throttle.as_ref();
            disk.admission = throttle.map(|throttle| Admission::new(throttle, &timer));
            disk.timer = Some(timer);
        }
        if options.commit_below {
            let size = disk.size_bytes();
            disk.grow_below(size)?;
        }
        Ok(disk)
    }

    /// [`Disk::open_with`] with transfers in an order that `seed` chooses, instead of those of an engine.
    #[cfg(test)]
    pub(crate) fn open_shuffled_with(
        spec: &DiskSpec,
        seed: u64,
        options: &DiskOptions,
    ) -> Result<Self, Error> {
        let chain = Chain::open(spec, writable_layers(spec, options)?, &options.cache, None)?;
        let mut disk = Self::new_counting(
            chain,
            spec,
            Some(Queue::shuffle(seed)),
            Arc::default(),
            options,
        );
        if options.commit_below {
            let size = disk.size_bytes();
            disk.grow_below(size)?;
        }
        Ok(disk)
    }

    fn new(chain: Chain, spec: &DiskSpec, queue: Option<Queue>) -> Self {
        Self::new_counting(chain, spec, queue, Arc::default(), &DiskOptions::default())
    }

    fn new_counting(
        mut chain: Chain,
        spec: &DiskSpec,
        queue: Option<Queue>,
        statistics: Arc<DiskStatistics>,
        options: &DiskOptions,
    ) -> Self {
        let queue = queue.map(Arc::new);
        if let Some(queue) = &queue {
            chain.set_queue(queue);
        }
        Self {
            executor: Executor::new(Core {
                chain,
                read_only: spec.read_only,
                discard: spec.discard,
                detect_zeroes: options.detect_zeroes,
                statistics,
                lost: Cell::new(options.losses.take()),
                losses: options.losses.clone(),
            }),
            queue,
            timer: None,
            admission: None,
            done: Vec::new(),
            job: None,
            steps_running: 0,
            steps: Vec::new(),
            failures: 0,
            closed: false,
        }
    }

    fn core(&self) -> &Core {
        self.executor.core()
    }

    fn top(&self) -> &Image {
        self.core().chain.top()
    }

    /// The top image.
    pub(crate) fn path(&self) -> &Path {
        self.top().file().path()
    }

    /// Size in bytes.
    #[must_use]
    pub fn size_bytes(&self) -> u64 {
        self.top().size()
    }

    /// Whether writes are refused.
    #[must_use]
    pub fn read_only(&self) -> bool {
        self.core().read_only
    }

    /// Whether discards give space back.
    #[must_use]
    pub fn supports_discard(&self) -> bool {
        self.core().discard && !self.core().read_only
    }

    /// To what discards should be aligned, in bytes: smaller ones may give no space back. At most 2 MiB.
    #[must_use]
    pub fn discard_granularity(&self) -> u64 {
        self.top().discard_granularity()
    }

    /// What the disk asks of the host; counted on while the disk is open.
    #[must_use]
    pub fn host_counts(&self) -> Arc<HostCounts> {
        Arc::clone(self.core().chain.calls())
    }

    /// How often the disk's tables were found in memory; counted on while the disk is open.
    #[must_use]
    pub fn cache_counts(&self) -> Arc<CacheCounts> {
        Arc::clone(self.core().chain.counts())
    }

    /// What the disk counts.
    #[must_use]
    pub fn statistics(&self) -> Arc<DiskStatistics> {
        Arc::clone(&self.core().statistics)
    }

    /// Begins a request; its completion comes from [`Disk::poll`], which has to be called after a batch of these: it is what
    /// hands the transfers to the host.
    pub fn submit(&mut self, request: Request) {
        let request = match &mut self.admission {
            Some(admission) => admission.admit(request),
            None => Some(request),
        };
        if let Some(request) = request {
            self.start(request);
        }
    }

    fn start(&mut self, request: Request) {
        let completion = match &self.queue {
            Some(_) => self.executor.start(Work::Guest(request)),
            None => {
                let Request { tag, op } = request;
                let result = task::complete(self.core().run_counted(&op));
                Some(Outcome::Guest(Completion::new(tag, result, op)))
            }
        };
        if let Some(Outcome::Guest(completion)) = completion {
            self.finish(completion);
        }
    }

    /// Begins a step of a job.
    pub(crate) fn start_step(&mut self, step: Step) {
        let end = match &self.queue {
            Some(_) => self.executor.start(Work::Job(step)),
            None => Some(Outcome::Job(task::complete(step.run(self.core())))),
        };
        match end {
            Some(Outcome::Job(end)) => self.steps.push(end),
            _ => self.steps_running += 1,
        }
    }

    /// Carries requests on as far as they get, and moves what has completed to the end of `completions`. Never waits.
    pub fn poll(&mut self, completions: &mut Vec<Completion>) {
        if let Some(timer) = &self.timer {
            timer.clear_due();
        }
        while let Some((request, waited)) = self.admission.as_mut().and_then(Admission::next) {
            self.core().statistics.count_wait(waited);
            self.start(request);
        }
        self.turn(false);
        if self.job.is_some() {
            self.pace();
            self.turn(false);
        }
        if self.core().lost.get() && self.done.iter().any(Completion::tells_of_loss) {
            self.core().lost.set(false);
        }
        completions.append(&mut self.done);
    }

    /// Readable while [`Disk::poll`] would get further; `None` where a request is over when [`Disk::submit`] returns. It is never
    /// read by the caller: polling the disk clears it.
    #[must_use]
    pub fn event(&self) -> Option<BorrowedFd<'_>> {
        self.queue.as_deref().and_then(Queue::event)
    }

    /// Readable when [`Disk::poll`] would get further because a time has come: a limit lets requests go on, or a job its next step.
    /// To be watched beside [`Disk::event`], and cleared by polling the disk as well. `None` where nothing ever waits.
    #[must_use]
    pub fn timer(&self) -> Option<BorrowedFd<'_>> {
        self.timer.as_deref().map(Timer::fd)
    }

    /// Requests submitted whose completion [`Disk::poll`] has not handed out.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        let waiting = self.admission.as_ref().map_or(0, Admission::waiting);
        waiting + self.guest_running() + self.done.len()
    }

    /// Begins the requests that wait for a limit, for a disk that is about to be stopped or closed: draining it should take no longer
    /// than its transfers. What comes later pays for it with a longer wait.
    pub fn release_waiting(&mut self) {
        let waiting = self.admission.as_mut().map(Admission::release);
        for request in waiting.into_iter().flatten() {
            self.start(request);
        }
    }

    /// Requests that are not over; steps of a job do not count.
    pub(crate) fn guest_running(&self) -> usize {
        self.executor.running() - self.steps_running
    }

    /// Runs one request to its end, for whoever has nothing else to do meanwhile.
    ///
    /// # Errors
    /// As its completion would tell.
    pub fn execute(&mut self, op: &Op) -> Result<(), IoError> {
        let wait = self.admission.as_ref().and_then(|a| a.wait_for(op));
        while wait.as_ref().is_some_and(|wait| !wait.is_over()) {
            self.turn(false);
            if let Some(timer) = &self.timer {
                timer.sleep(A_MOMENT);
            }
        }
        let core = self.executor.shared();
        let result = self.drive(core.run_counted(op));
        if result == Err(IoError::Lost) {
            self.core().lost.set(false);
        }
        result
    }

    /// Makes everything durable and lets go of the images.
    ///
    /// # Errors
    /// The host failed to make something durable.
    pub fn close(mut self) -> Result<(), Error> {
        self.closed = true;
        self.settle()
            .map_err(|error| Error::new(self.top().file().path(), ErrorKind::Request(error)))
    }

    /// [`Disk::close`], but the lease of the top image stays with this process, for a disk that is going to be opened again. It goes
    /// on with the same epoch then; [`lease::give_back`](crate::lease::give_back) is for one that is not.
    ///
    /// # Errors
    /// As [`Disk::close`].
    pub fn close_keeping_lease(self) -> Result<(), Error> {
        if let Some(lease) = self.core().chain.lease() {
            lease.keep();
        }
        self.close()
    }

    /// The epoch of the lease of the top image; `None` without one, or where another has taken it.
    #[must_use]
    pub fn lease_epoch(&self) -> Option<u64> {
        let lease = self.core().chain.lease()?;
        lease.is_ours().then(|| lease.epoch())
    }

    /// Waits for every request and leaves nothing to be done.
    fn settle(&mut self) -> Result<(), IoError> {
        let result = self.flush_and_settle();
        let core = self.core();
        if result.is_err() || core.lost.get() {
            core.losses.note();
        }
        result
    }

    fn flush_and_settle(&mut self) -> Result<(), IoError> {
        self.release_waiting();
        while self.executor.running() > 0 {
            self.turn(true);
        }
        self.end_job();
        let core = self.executor.shared();
        if let Some(two) = core.two() {
            return self.drive(two.settle());
        }
        match core.chain.top() {
            _ if core.read_only => Ok(()),
            Image::Raw(raw) => self.drive(raw.flush()),
            Image::Qcow2(qcow2) => self.drive(qcow2.settle()),
        }
    }

    /// Runs a future of this disk to its end, and other requests meanwhile.
    fn drive<T>(&mut self, future: impl Future<Output = T>) -> T {
        if self.queue.is_none() {
            return task::complete(future);
        }
        let mut future = pin!(future);
        let mut context = Context::from_waker(Waker::noop());
        // A look at it after every turn finds what it waited for; requests may finish holds that it waits for, too.
        loop {
            if let Poll::Ready(value) = future.as_mut().poll(&mut context) {
                return value;
            }
            self.turn(true);
        }
    }

    /// Hands transfers to the host and lets requests go on until none can; with `wait`, waits for a transfer first.
    fn turn(&mut self, wait: bool) {
        let mut wait = wait;
        while self.step(wait) {
            wait = false;
        }
    }

    /// Hands transfers to the host and lets the requests go on whose transfers are over; whether there were any.
    pub(crate) fn step(&mut self, wait: bool) -> bool {
        let Some(queue) = &self.queue else {
            return false;
        };
        let before = self.done.len();
        if let Err(error) = queue.turn(wait) {
            // Nothing is lost: what the host did not take now is offered again at the next turn.
            tracing::error!(image = %self.top().file().path().display(), %error, "cannot hand transfers to the host");
        }
        let any = self.executor.run(|outcome| match outcome {
            Outcome::Guest(completion) => self.done.push(completion),
            Outcome::Job(end) => {
                self.steps_running -= 1;
                self.steps.push(end);
            }
        });
        self.count_failures(before);
        self.call_for_pace();
        any
    }

    fn finish(&mut self, completion: Completion) {
        let before = self.done.len();
        self.done.push(completion);
        self.count_failures(before);
    }

    /// Logs the failures among the completions from number `from` on.
    fn count_failures(&mut self, from: usize) {
        let new = self.done.get(from..).unwrap_or_default();
        if new.iter().all(|completion| completion.result.is_ok()) {
            return;
        }
        let errors: Vec<_> = new.iter().filter_map(|c| c.result.clone().err()).collect();
        for error in errors {
            self.log(&error);
        }
    }

    /// The disk as it is read, whose top the caller has locked; see [`Chain::open_locked`].
    pub(crate) fn open_locked(spec: &DiskSpec) -> Result<Self, Error> {
        Ok(Self::new(Chain::open_locked(spec)?, spec, None))
    }

    /// The top image over something else than its header says; see [`Chain::open_over`].
    pub(crate) fn open_over(spec: &DiskSpec, below: Option<&DiskSpec>) -> Result<Self, Error> {
        let written = DiskSpec {
            read_only: false,
            ..spec.clone()
        };
        Ok(Self::new(
            Chain::open_over(&spec.top, below)?,
            &written,
            None,
        ))
    }

    /// Which layer answers for the first bytes of a range.
    pub(crate) fn locate(&mut self, offset: u64, length: u64) -> Result<Located, IoError> {
        let core = self.executor.shared();
        self.drive(core.chain.locate(offset, length))
    }

    /// Reads into memory of our own.
    pub(crate) fn read(&mut self, offset: u64, length: usize) -> Result<Vec<u8>, IoError> {
        let buffer = SharedBuffer::zeroed(length);
        let buffers = buffer.buffers();
        self.execute(&Op::Read { offset, buffers })?;
        Ok(buffer.take().unwrap_or_default())
    }

    /// Writes from memory of our own.
    pub(crate) fn write(&mut self, offset: u64, bytes: Vec<u8>) -> Result<(), IoError> {
        let buffers = Buffers::from_vec(bytes);
        self.execute(&Op::Write { offset, buffers })
    }

    /// Stores a cluster compressed; only qcow2 has that.
    pub(crate) fn write_packed(&mut self, offset: u64, packed: &[u8]) -> Result<(), IoError> {
        let core = self.executor.shared();
        match core.chain.top() {
            Image::Raw(_) => Err(IoError::Unsupported("compression")),
            Image::Qcow2(qcow2) => self.drive(qcow2.write_packed(offset, packed)),
        }
    }

    /// Makes the header of the top image name another layer below, or none, durably and in one step.
    pub(crate) fn relabel(&mut self, label: Option<Label<'_>>) -> Result<(), ErrorKind> {
        let core = self.executor.shared();
        match core.chain.top() {
            Image::Raw(_) => Err(ErrorKind::Backing(
                "a raw image has no backing files".into(),
            )),
            Image::Qcow2(qcow2) => self.drive(qcow2.relabel(label)),
        }
    }

    /// The files of the disk and their formats, the top one first.
    pub(crate) fn layers(&self) -> Vec<(PathBuf, Format)> {
        let chain = &self.core().chain;
        let layers = (0..).map_while(|depth| chain.layer(depth));
        layers
            .map(|image| {
                let format = match image {
                    Image::Raw(_) => Format::Raw,
                    Image::Qcow2(_) => Format::Qcow2,
                };
                (image.file().path().to_owned(), format)
            })
            .collect()
    }

    /// Bytes of a cluster of the top image, and the version of its format; `None` for a raw one.
    pub(crate) fn cluster_size(&self) -> Option<(u64, u32)> {
        match self.top() {
            Image::Raw(_) => None,
            Image::Qcow2(qcow2) => {
                let header = qcow2.header();
                Some((header.geometry.cluster_size(), header.version))
            }
        }
    }

    /// Changes the size of the disk to `size` bytes, durably.
    pub(crate) fn resize(&mut self, size: u64) -> Result<(), ErrorKind> {
        self.grow_below(size).map_err(|error| error.kind)?;
        self.resize_layer(0, size)
    }

    /// Changes the size of one layer.
    pub(crate) fn resize_layer(&mut self, depth: usize, size: u64) -> Result<(), ErrorKind> {
        let core = self.executor.shared();
        let below = core.chain.below_size(depth);
        let Some(image) = core.chain.layer(depth) else {
            return Ok(());
        };
        match image {
            Image::Raw(raw) => {
                raw.resize(size).map_err(|source| ErrorKind::Io {
                    doing: "resize it",
                    source,
                })?;
                Ok(self.drive(raw.flush())?)
            }
            Image::Qcow2(qcow2) => {
                if let Some(obstacle) = qcow2.resize_obstacle(size) {
                    return Err(ErrorKind::Size(obstacle));
                }
                Ok(self.drive(qcow2.resize(core.chain.view(depth), size, below))?)
            }
        }
    }

    /// Logs what an operator can act on; a guest that asks for nonsense is not worth a line.
    fn log(&mut self, error: &IoError) {
        if error.class() == ErrorClass::Guest {
            return;
        }
        self.failures = self.failures.saturating_add(1);
        if self.failures <= LOGGED_FAILURES {
            let image = self.top().file().path().display();
            tracing::warn!(%image, %error, "a disk request failed");
        }
    }
}

/// How many layers of a disk are written.
fn writable_layers(spec: &DiskSpec, options: &DiskOptions) -> Result<usize, Error> {
    if !options.commit_below {
        return Ok(1);
    }
    // What is written is never for a header to say.
    match &spec.backing {
        Backing::Explicit(layers) if !layers.is_empty() && !spec.read_only => Ok(2),
        _ => {
            let reason = "to commit it, the disk must be writable and the layers below it listed: the nearest is written to";
            Err(Error::new(
                &spec.top.path,
                ErrorKind::Backing(reason.into()),
            ))
        }
    }
}

impl Core {
    async fn run_counted(&self, op: &Op) -> Result<(), IoError> {
        let begin = timer::now();
        let result = self.run(op).await;
        let nanos = timer::now().saturating_sub(begin);
        self.statistics.count(op, nanos, &result);
        result
    }

    async fn run(&self, op: &Op) -> Result<(), IoError> {
        match op {
            Op::Read { offset, buffers } => {
                self.check(*offset, buffers.len() as u64)?;
                self.read(*offset, buffers).await
            }
            Op::Write { offset, buffers } => {
                self.check_change(*offset, buffers.len() as u64)?;
                if self.detect_zeroes != DetectZeroes::Off {
                    return self.write_detecting(*offset, buffers.span()).await;
                }
                self.write(*offset, buffers.span()).await
            }
            Op::Flush if self.lost.get() => Err(IoError::Lost),
            Op::Flush => self.flush().await,
            Op::Discard { offset, length } => {
                self.check_change(*offset, *length)?;
                if !self.discard {
                    return Err(IoError::Unsupported("discard"));
                }
                if let Some(two) = self.two() {
                    return two.clear(*offset, *length, Clear::Discard).await;
                }
                match self.chain.top() {
                    _ if *length == 0 => Ok(()),
                    Image::Raw(raw) => raw.discard(*offset, *length).await,
                    Image::Qcow2(qcow2) => {
                        qcow2
                            .clear(self.chain.view(0), *offset, *length, Clear::Discard)
                            .await
                    }
                }
            }
            Op::WriteZeroes {
                offset,
                length,
                unmap,
            } => {
                self.check_change(*offset, *length)?;
                let unmap = *unmap && self.discard;
                self.write_zeroes(*offset, *length, unmap).await
            }
        }
    }

    pub(crate) async fn write_zeroes(
        &self,
        offset: u64,
        length: u64,
        unmap: bool,
    ) -> Result<(), IoError> {
        let how = Clear::Zeroes { unmap };
        if let Some(two) = self.two() {
            return two.clear(offset, length, how).await;
        }
        match self.chain.top() {
            _ if length == 0 => Ok(()),
            Image::Raw(raw) => raw.zero(offset, length, unmap).await,
            Image::Qcow2(qcow2) => qcow2.clear(self.chain.view(0), offset, length, how).await,
        }
    }

    async fn read(&self, offset: u64, buffers: &Buffers) -> Result<(), IoError> {
        if buffers.is_empty() {
            return Ok(());
        }
        if let Some(two) = self.two() {
            return two.read(offset, buffers.span()).await;
        }
        let _hold = match self.chain.top() {
            Image::Raw(_) => None,
            Image::Qcow2(top) => Some(top.hold(offset, buffers.len() as u64, Kind::Shared).await),
        };
        self.chain.read_held(offset, buffers.span()).await
    }

    pub(crate) async fn flush(&self) -> Result<(), IoError> {
        if let Some(two) = self.two() {
            return two.flush().await;
        }
        match self.chain.top() {
            _ if self.read_only => Ok(()),
            Image::Raw(raw) => raw.flush().await,
            Image::Qcow2(qcow2) => qcow2.flush().await,
        }
    }

    pub(crate) async fn write(&self, offset: u64, span: Span<'_>) -> Result<(), IoError> {
        if let Some(two) = self.two() {
            return two.write(offset, span).await;
        }
        match self.chain.top() {
            _ if span.len() == 0 => Ok(()),
            Image::Raw(raw) => raw.write(offset, span).await,
            Image::Qcow2(qcow2) => qcow2.write(self.chain.view(0), offset, span).await,
        }
    }

    fn check(&self, offset: u64, length: u64) -> Result<(), IoError> {
        let size = self.chain.top().size();
        match offset.checked_add(length) {
            Some(end) if end <= size => Ok(()),
            _ => Err(IoError::OutOfRange {
                offset,
                length,
                size,
            }),
        }
    }

    fn check_change(&self, offset: u64, length: u64) -> Result<(), IoError> {
        if self.read_only {
            return Err(IoError::ReadOnly);
        }
        self.check(offset, length)
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        if !self.closed
            && let Err(error) = self.settle()
        {
            self.log(&error);
        }
    }
}
