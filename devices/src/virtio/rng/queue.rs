//! The request queue: each chain is a writable buffer, filled straight from the host's source.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use vm_memory::GuestMemoryMmap;

use crate::virtio::memory::{GuestSlice, NotRam, read_vectored, translate};
use crate::virtio::queue::{Chain, EndlessChain, GuestQueue, walk};
use crate::virtio::rng::metrics::RngMetrics;
use crate::virtio::rng::{BYTES_PER_SECOND, MAX_REQUEST_BYTES};
use crate::virtio::worker::{Progress, Scope, Service, Watch};

/// Requests in one turn.
const TURN: usize = 16;

/// Bytes that may be given out now; refills with time.
struct Allowance {
    bytes: u64,
    since: Instant,
}

impl Allowance {
    fn refill(&mut self) {
        let now = Instant::now();
        let passed = now.duration_since(self.since).as_micros();
        let earned = u64::try_from(passed)
            .unwrap_or(u64::MAX)
            .saturating_mul(BYTES_PER_SECOND);
        let earned = earned / 1_000_000;
        if earned > 0 {
            self.bytes = self.bytes.saturating_add(earned).min(BYTES_PER_SECOND);
            self.since = now;
        }
    }
}

/// Why a request cannot be answered.
#[derive(Debug, thiserror::Error)]
enum BadRequest {
    #[error(transparent)]
    Endless(#[from] EndlessChain),
    #[error("an entropy buffer is not writable")]
    ReadOnly,
    #[error(transparent)]
    NotRam(#[from] NotRam),
}

/// Serves the queue.
pub(super) struct Server {
    source: File,
    queue: Option<GuestQueue>,
    allowance: Allowance,
    waiting: bool,
    slices: Vec<GuestSlice>,
    metrics: Arc<RngMetrics>,
}

impl Server {
    pub(super) fn new(source: File, metrics: Arc<RngMetrics>) -> Self {
        let allowance = Allowance {
            bytes: BYTES_PER_SECOND,
            since: Instant::now(),
        };
        Self {
            source,
            queue: None,
            allowance,
            waiting: false,
            slices: Vec::new(),
            metrics,
        }
    }

    fn serve(&mut self) -> Progress {
        let Some(mut queue) = self.queue.take() else {
            return Progress::Idle;
        };
        queue.silence();
        self.allowance.refill();
        self.waiting = false;
        let memory = Arc::clone(queue.memory());
        let mut requests = 0;
        let progress = loop {
            if requests == TURN {
                break Progress::More;
            }
            let Some(chain) = queue.pop(&memory) else {
                if queue.listen() {
                    continue;
                }
                break Progress::Idle;
            };
            if self.allowance.bytes < MAX_REQUEST_BYTES as u64 {
                queue.unpop();
                self.waiting = true;
                self.metrics.delayed.fetch_add(1, Ordering::Relaxed);
                break Progress::Idle;
            }
            requests += 1;
            let head = chain.head_index();
            if let Err(error) = self.place(&memory, chain) {
                queue.give_up(&error);
                break Progress::Idle;
            }
            let bytes = self.fill(&memory);
            self.allowance.bytes -= u64::from(bytes);
            queue.push(head, bytes);
        };
        queue.signal();
        self.queue = Some(queue);
        progress
    }

    /// Finds where the first [`MAX_REQUEST_BYTES`] of a request go.
    fn place(&mut self, memory: &GuestMemoryMmap<()>, chain: Chain<'_>) -> Result<(), BadRequest> {
        self.slices.clear();
        let mut room = u32::try_from(MAX_REQUEST_BYTES).unwrap_or(u32::MAX);
        let slices = &mut self.slices;
        walk(chain, |descriptor| {
            if !descriptor.is_write_only() {
                return Err(BadRequest::ReadOnly);
            }
            let length = descriptor.len().min(room);
            translate(memory, descriptor.addr(), length, slices)?;
            room -= length;
            Ok(())
        })
    }

    fn fill(&mut self, memory: &GuestMemoryMmap<()>) -> u32 {
        let slices = &mut self.slices;
        slices.truncate(crate::virtio::memory::MAX_SLICES);
        let read = loop {
            match read_vectored(self.source.as_fd(), memory, slices, &mut []) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                other => break other,
            }
        };
        let bytes = u32::try_from(read.unwrap_or_default()).unwrap_or_default();
        let counter = if bytes == 0 {
            &self.metrics.failed
        } else {
            &self.metrics.requests
        };
        counter.fetch_add(1, Ordering::Relaxed);
        self.metrics
            .bytes
            .fetch_add(bytes.into(), Ordering::Relaxed);
        bytes
    }
}

impl Service for Server {
    fn start(&mut self, _features: u64) {}

    fn add_queue(&mut self, queue: GuestQueue) {
        self.queue = Some(queue);
    }

    fn remove_queues(&mut self, _scope: Scope) {
        self.queue = None;
        self.waiting = false;
    }

    fn is_quiet(&self, _scope: Scope) -> bool {
        true
    }

    fn kick(&mut self, _index: u16) -> Progress {
        self.serve()
    }

    fn source(&self) -> Option<(BorrowedFd<'_>, Watch)> {
        None
    }

    fn source_ready(&mut self) -> Progress {
        Progress::Idle
    }

    fn timeout(&self) -> Option<Duration> {
        self.waiting.then(|| {
            let missing = (MAX_REQUEST_BYTES as u64).saturating_sub(self.allowance.bytes);
            Duration::from_micros(missing.saturating_mul(1_000_000) / BYTES_PER_SECOND)
        })
    }

    fn expired(&mut self) {
        // One request at least is served, so a turn that ends early only means another short wait.
        self.waiting = self.serve() == Progress::More || self.waiting;
    }

    fn end(self: Box<Self>) {}
}
