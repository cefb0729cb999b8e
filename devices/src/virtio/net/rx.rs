//! Receiving (virtio 1.2 §5.1.6.4): frames go from the tap straight into the guest's buffers.
//!
//! ```text
//!   available chains ──> posted (in order) ──readv──> frame ends in the k-th chain ──> k chains used, num_buffers = k
//!                                     └── what does not fit ──> overflow
//! ```
//!
//! The kernel cuts a frame that is longer than the read. So wherever the posted chains hold less than the longest possible frame, the
//! read ends in an overflow buffer of the VMM. With mergeable buffers such a frame waits there for more chains; without, it is dropped.

use std::collections::VecDeque;
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;

use crate::virtio::memory::{GuestSlice, MAX_SLICES, copy_to_guest, read_vectored, translate};
use crate::virtio::net::bits::{HEADER_BYTES, MAX_FRAME_BYTES, NUM_BUFFERS_OFFSET, feature};
use crate::virtio::net::metrics::{NetMetrics, count};
use crate::virtio::net::tap::Tap;
use crate::virtio::queue::{EndlessChain, GuestQueue, walk};
use crate::virtio::worker::Progress;

/// Frames in one turn.
const TURN: usize = 64;

/// The most frames that a tap holds back for a driver that comes late, all thrown away; Linux' default is 1000.
const BACKLOG: usize = 4096;

/// A chain that the driver made available and that no frame has taken yet.
struct Posted {
    head: u16,
    slices: usize,
    bytes: usize,
}

/// A frame that the posted chains were too small for: its first `placed` bytes lie in them, the next `tail` in the overflow.
#[derive(Clone, Copy)]
struct Held {
    placed: usize,
    tail: usize,
}

enum Outcome {
    Frame,
    NoFrame,
    NoBuffers,
}

/// The receiving half of a queue pair.
pub(super) struct RxQueue {
    queue: Option<GuestQueue>,
    mergeable: bool,
    posted: VecDeque<Posted>,
    slices: VecDeque<GuestSlice>,
    posted_bytes: usize,
    held: Option<Held>,
    overflow: Box<[u8]>,
    /// For one system call; kept for its allocation.
    vector: Vec<GuestSlice>,
    listening: bool,
}

/// What is wrong with a receive buffer.
#[derive(Debug, thiserror::Error)]
enum BadBuffer {
    #[error(transparent)]
    Endless(#[from] EndlessChain),
    #[error("a receive buffer is not writable")]
    ReadOnly,
    #[error(transparent)]
    NotRam(#[from] crate::virtio::memory::NotRam),
    #[error("a receive buffer is shorter than a packet header")]
    Short,
    #[error("a receive buffer lies in too many pieces")]
    Pieces,
}

impl RxQueue {
    pub(super) fn new() -> Self {
        Self {
            queue: None,
            mergeable: false,
            posted: VecDeque::new(),
            slices: VecDeque::new(),
            posted_bytes: 0,
            held: None,
            overflow: vec![0; MAX_FRAME_BYTES].into_boxed_slice(),
            vector: Vec::new(),
            listening: true,
        }
    }

    pub(super) fn start(&mut self, features: u64, tap: &Tap) {
        self.mergeable = features & feature::MRG_RXBUF != 0;
        // What came before may be of a shape that this driver did not agree to.
        for _ in 0..BACKLOG {
            if rustix::io::read(tap, &mut *self.overflow).is_err() {
                break;
            }
        }
    }

    pub(super) fn set_queue(&mut self, queue: Option<GuestQueue>) {
        self.queue = queue;
        self.posted.clear();
        self.slices.clear();
        self.posted_bytes = 0;
        self.held = None;
        self.listening = true;
    }

    /// Receives until the tap is empty (and `readable` is cleared), the driver has no buffers, or the turn is over.
    pub(super) fn run(&mut self, tap: &Tap, readable: &mut bool, metrics: &NetMetrics) -> Progress {
        let Some(mut queue) = self.queue.take() else {
            return Progress::Idle;
        };
        let progress = self.turn(&mut queue, tap, readable, metrics);
        queue.signal();
        self.queue = Some(queue);
        progress
    }

    fn turn(
        &mut self,
        queue: &mut GuestQueue,
        tap: &Tap,
        readable: &mut bool,
        metrics: &NetMetrics,
    ) -> Progress {
        if std::mem::take(&mut self.listening) {
            queue.silence();
        }
        let mut frames = 0;
        while (*readable || self.held.is_some()) && frames < TURN {
            match self.receive(queue, tap, metrics) {
                Outcome::Frame => {
                    frames += 1;
                    queue.publish();
                }
                Outcome::NoFrame => *readable = false,
                Outcome::NoBuffers if queue.is_broken() => return Progress::Idle,
                Outcome::NoBuffers if queue.listen() => {}
                Outcome::NoBuffers => {
                    self.listening = true;
                    count(&metrics.rx_starved, 1);
                    return Progress::Idle;
                }
            }
        }
        if *readable {
            Progress::More
        } else {
            Progress::Idle
        }
    }

    fn receive(&mut self, queue: &mut GuestQueue, tap: &Tap, metrics: &NetMetrics) -> Outcome {
        if let Some(held) = self.held {
            return self.place_held(queue, held, metrics);
        }
        let wanted = if self.mergeable { MAX_FRAME_BYTES } else { 1 };
        self.post(queue, wanted);
        let Some(first) = self.posted.front() else {
            return Outcome::NoBuffers;
        };

        let mut room = first.bytes;
        let mut pieces = first.slices;
        if self.mergeable {
            for next in self.posted.iter().skip(1) {
                if room >= MAX_FRAME_BYTES || pieces + next.slices >= MAX_SLICES {
                    break;
                }
                room += next.bytes;
                pieces += next.slices;
            }
        }
        self.vector.clear();
        self.vector.extend(self.slices.iter().take(pieces));
        let overflow = if room < MAX_FRAME_BYTES {
            &mut *self.overflow
        } else {
            Default::default()
        };
        let bytes = match read_vectored(tap.as_fd(), queue.memory(), &mut self.vector, overflow) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => return Outcome::Frame,
            // Empty, or detached, or the interface is gone: the next event will tell.
            Err(_) => return Outcome::NoFrame,
        };
        if bytes <= room {
            self.finish(queue, bytes, metrics);
        } else if self.mergeable {
            self.held = Some(Held {
                placed: room,
                tail: bytes - room,
            });
        } else {
            count(&metrics.rx_dropped, 1);
        }
        Outcome::Frame
    }

    /// Makes available chains posted until they hold `wanted` bytes, or no more are there.
    fn post(&mut self, queue: &mut GuestQueue, wanted: usize) {
        let memory = Arc::clone(queue.memory());
        while self.posted_bytes < wanted && self.posted.len() < usize::from(queue.size()) {
            let Some(chain) = queue.pop(&memory) else {
                return;
            };
            let head = chain.head_index();
            let slices = &mut self.vector;
            slices.clear();
            let result = walk(chain, |descriptor| {
                if !descriptor.is_write_only() {
                    return Err(BadBuffer::ReadOnly);
                }
                translate(&memory, descriptor.addr(), descriptor.len(), slices)?;
                if slices.len() >= MAX_SLICES {
                    Err(BadBuffer::Pieces)
                } else {
                    Ok(())
                }
            });
            let bytes = slices.iter().map(GuestSlice::len).sum();
            match result {
                Ok(()) if bytes >= HEADER_BYTES => {}
                // There is no way to hand back a buffer that cannot hold a frame.
                Ok(()) => return queue.give_up(&BadBuffer::Short),
                Err(error) => return queue.give_up(&error),
            }
            self.posted.push_back(Posted {
                head,
                slices: slices.len(),
                bytes,
            });
            self.posted_bytes += bytes;
            self.slices.extend(slices.iter());
        }
    }

    fn place_held(&mut self, queue: &mut GuestQueue, held: Held, metrics: &NetMetrics) -> Outcome {
        let bytes = held.placed + held.tail;
        self.post(queue, bytes);
        if self.posted_bytes >= bytes {
            self.vector.clear();
            let mut skip = held.placed;
            for slice in &self.slices {
                let rest = slice.skip(skip);
                skip = skip.saturating_sub(slice.len());
                self.vector.push(rest);
            }
            let tail = self.overflow.get(..held.tail).unwrap_or_default();
            // The room was counted above.
            let _ = copy_to_guest(queue.memory(), tail, &self.vector);
            self.held = None;
            self.finish(queue, bytes, metrics);
            Outcome::Frame
        } else if self.posted.len() >= usize::from(queue.size()) {
            // All that the driver can ever offer at once is too little.
            self.held = None;
            count(&metrics.rx_dropped, 1);
            Outcome::Frame
        } else {
            Outcome::NoBuffers
        }
    }

    /// A frame of `bytes` lies in the first posted chains: hands those to the driver.
    fn finish(&mut self, queue: &mut GuestQueue, bytes: usize, metrics: &NetMetrics) {
        let mut chains = 0_u16;
        let mut left = bytes;
        for posted in &self.posted {
            chains = chains.saturating_add(1);
            left = left.saturating_sub(posted.bytes);
            if left == 0 {
                break;
            }
        }
        self.write_num_buffers(queue, chains);
        left = bytes;
        for _ in 0..chains {
            let Some(posted) = self.posted.pop_front() else {
                break;
            };
            let used = left.min(posted.bytes);
            left -= used;
            self.posted_bytes -= posted.bytes;
            self.slices.drain(..posted.slices);
            queue.push(posted.head, u32::try_from(used).unwrap_or(u32::MAX));
        }
        count(&metrics.rx_frames, 1);
        count(&metrics.rx_bytes, bytes.saturating_sub(HEADER_BYTES) as u64);
    }

    /// The kernel leaves this field of the header to us.
    fn write_num_buffers(&mut self, queue: &GuestQueue, chains: u16) {
        let mut skip = NUM_BUFFERS_OFFSET;
        let mut bytes = &chains.to_le_bytes()[..];
        for slice in &self.slices {
            let rest = slice.skip(skip);
            skip = skip.saturating_sub(slice.len());
            let copied = copy_to_guest(queue.memory(), bytes, &[rest]);
            bytes = bytes.get(copied..).unwrap_or_default();
            if bytes.is_empty() {
                break;
            }
        }
    }
}
