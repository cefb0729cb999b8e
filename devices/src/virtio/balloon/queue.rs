//! All queues of the balloon on its one thread.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use vm_memory::{GuestAddress, GuestMemoryMmap};

use super::bits::{PAGE_BYTES, Role};
use super::metrics::BalloonMetrics;
use super::statistics::{Latest, MemoryStatistics};
use crate::virtio::memory::{GuestSlice, NotRam, copy_from_guest, give_back, translate};
use crate::virtio::queue::{Chain, EndlessChain, GuestQueue, walk};
use crate::virtio::worker::{Progress, Scope, Service, Watch};

/// Chains in one turn of a queue.
const TURN: usize = 32;
/// The longest list of pages or statistics, in bytes: Linux sends 1 KiB.
const MOST_LIST: usize = 256 * 1024;

/// Why a chain cannot be served.
#[derive(Debug, thiserror::Error)]
enum BadChain {
    #[error(transparent)]
    Endless(#[from] EndlessChain),
    #[error("a list of a balloon queue is not readable")]
    NotReadable,
    #[error("a list of more than {MOST_LIST} bytes")]
    TooLong,
    #[error(transparent)]
    NotRam(#[from] NotRam),
}

/// What the device's owner asks the thread.
#[derive(Debug)]
pub(super) struct Requests {
    pub(super) bell: OwnedFd,
    pub(super) statistics: AtomicBool,
}

pub(super) struct Server {
    features: u64,
    queues: Vec<Option<GuestQueue>>,
    /// The statistics buffer that the driver has filled; giving it back asks for new ones.
    held: Option<u16>,
    requests: Arc<Requests>,
    latest: Arc<Latest>,
    slices: Vec<GuestSlice>,
    pages: Vec<u64>,
    metrics: Arc<BalloonMetrics>,
}

impl Server {
    pub(super) fn new(
        requests: Arc<Requests>,
        latest: Arc<Latest>,
        metrics: Arc<BalloonMetrics>,
    ) -> Self {
        Self {
            features: 0,
            queues: (0..super::QUEUE_SIZES.len()).map(|_| None).collect(),
            held: None,
            requests,
            latest,
            slices: Vec::new(),
            pages: Vec::new(),
            metrics,
        }
    }

    fn serve(
        &mut self,
        index: u16,
        mut each: impl FnMut(&mut Self, &GuestMemoryMmap<()>, Chain<'_>) -> Result<bool, BadChain>,
    ) -> Progress {
        let place = self.queues.get_mut(usize::from(index));
        let Some(mut queue) = place.and_then(Option::take) else {
            return Progress::Idle;
        };
        queue.silence();
        let memory = Arc::clone(queue.memory());
        let mut served = 0;
        let progress = loop {
            if served == TURN {
                break Progress::More;
            }
            let Some(chain) = queue.pop(&memory) else {
                if queue.listen() {
                    continue;
                }
                break Progress::Idle;
            };
            served += 1;
            let head = chain.head_index();
            match each(self, &memory, chain) {
                Ok(true) => queue.push(head, 0),
                // Kept: it is given back another time.
                Ok(false) => {}
                Err(error) => {
                    queue.give_up(&error);
                    break Progress::Idle;
                }
            }
        };
        queue.signal();
        if let Some(place) = self.queues.get_mut(usize::from(index)) {
            *place = Some(queue);
        }
        progress
    }

    /// Reads a list of page numbers.
    fn read_pages(
        &mut self,
        memory: &GuestMemoryMmap<()>,
        chain: Chain<'_>,
    ) -> Result<(), BadChain> {
        let bytes = read_list(memory, chain, &mut self.slices)?;
        self.pages.clear();
        let numbers = bytes.chunks_exact(4).map(|number| {
            let number = <[u8; 4]>::try_from(number).map_or(0, u32::from_le_bytes);
            u64::from(number)
        });
        self.pages.extend(numbers);
        Ok(())
    }

    fn inflate(&mut self, index: u16) -> Progress {
        self.serve(index, |server, memory, chain| {
            server.read_pages(memory, chain)?;
            server.pages.sort_unstable();
            server.pages.dedup();
            let mut rest = server.pages.as_slice();
            while let Some(first) = rest.first() {
                let run = rest
                    .iter()
                    .zip(*first..)
                    .take_while(|(page, wanted)| *page == wanted)
                    .count();
                let bytes = run as u64 * PAGE_BYTES;
                let address = GuestAddress(first * PAGE_BYTES);
                count(
                    &give_back(memory, address, bytes),
                    &server.metrics.inflated_bytes,
                    &server.metrics,
                );
                rest = rest.get(run..).unwrap_or_default();
            }
            Ok(true)
        })
    }

    fn deflate(&mut self, index: u16) -> Progress {
        self.serve(index, |server, memory, chain| {
            server.read_pages(memory, chain)?;
            let bytes = server.pages.len() as u64 * PAGE_BYTES;
            let deflated = &server.metrics.deflated_bytes;
            deflated.fetch_add(bytes, Ordering::Relaxed);
            Ok(true)
        })
    }

    fn report(&mut self, index: u16) -> Progress {
        self.serve(index, |server, memory, chain| {
            let metrics = &server.metrics;
            walk(chain, |descriptor| {
                let given = give_back(memory, descriptor.addr(), descriptor.len().into());
                count(&given, &metrics.reported_bytes, metrics);
                Ok::<_, BadChain>(())
            })?;
            Ok(true)
        })
    }

    fn hear_statistics(&mut self, index: u16) -> Progress {
        let progress = self.serve(index, |server, memory, chain| {
            let head = chain.head_index();
            let bytes = read_list(memory, chain, &mut server.slices)?;
            if !bytes.is_empty() {
                server.latest.set(Some(MemoryStatistics::parse(&bytes)));
            }
            // One buffer at a time goes to and fro; a driver that sends more gets the rest back at once.
            Ok(server.held.replace(head).is_some())
        });
        self.ask();
        progress
    }

    /// Gives the driver its buffer back, which asks for new statistics, if that is wanted.
    fn ask(&mut self) {
        let role = |index: &u16| Role::of(*index, self.features) == Some(Role::Statistics);
        let Some(index) = (0..super::QUEUE_SIZES.len() as u16).find(role) else {
            return;
        };
        let place = self.queues.get_mut(usize::from(index));
        if let (Some(queue), Some(head)) = (place.and_then(Option::as_mut), self.held)
            && self.requests.statistics.swap(false, Ordering::AcqRel)
        {
            self.held = None;
            queue.push(head, 0);
            queue.signal();
        }
    }
}

fn count(
    given: &std::io::Result<u64>,
    counter: &std::sync::atomic::AtomicU64,
    metrics: &BalloonMetrics,
) {
    match given {
        Ok(bytes) => counter.fetch_add(*bytes, Ordering::Relaxed),
        Err(_) => metrics.failed.fetch_add(1, Ordering::Relaxed),
    };
}

fn read_list(
    memory: &GuestMemoryMmap<()>,
    chain: Chain<'_>,
    slices: &mut Vec<GuestSlice>,
) -> Result<Vec<u8>, BadChain> {
    slices.clear();
    let mut total = 0usize;
    walk(chain, |descriptor| {
        if descriptor.is_write_only() {
            return Err(BadChain::NotReadable);
        }
        total = total.saturating_add(descriptor.len() as usize);
        if total > MOST_LIST {
            return Err(BadChain::TooLong);
        }
        translate(memory, descriptor.addr(), descriptor.len(), slices)?;
        Ok(())
    })?;
    let mut bytes = Vec::new();
    copy_from_guest(memory, slices, &mut bytes);
    Ok(bytes)
}

impl Service for Server {
    fn start(&mut self, features: u64) {
        self.features = features;
    }

    fn add_queue(&mut self, queue: GuestQueue) {
        if let Some(place) = self.queues.get_mut(usize::from(queue.index())) {
            *place = Some(queue);
        }
    }

    fn remove_queues(&mut self, scope: Scope) {
        match scope {
            Scope::All => {
                self.queues.fill_with(|| None);
                self.held = None;
                self.latest.set(None);
            }
            Scope::Queue(index) => {
                if Role::of(index, self.features) == Some(Role::Statistics) {
                    self.held = None;
                }
                if let Some(place) = self.queues.get_mut(usize::from(index)) {
                    *place = None;
                }
            }
        }
    }

    fn is_quiet(&self, _scope: Scope) -> bool {
        true
    }

    fn kick(&mut self, index: u16) -> Progress {
        match Role::of(index, self.features) {
            Some(Role::Inflate) => self.inflate(index),
            Some(Role::Deflate) => self.deflate(index),
            Some(Role::Statistics) => self.hear_statistics(index),
            Some(Role::Reporting) => self.report(index),
            None => Progress::Idle,
        }
    }

    fn source(&self) -> Option<(BorrowedFd<'_>, Watch)> {
        Some((self.requests.bell.as_fd(), Watch::Readable))
    }

    fn source_ready(&mut self) -> Progress {
        let _ = rustix::io::read(&self.requests.bell, &mut [0; 8]);
        self.ask();
        Progress::Idle
    }

    fn end(self: Box<Self>) {}
}
