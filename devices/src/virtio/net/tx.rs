//! Transmitting (virtio 1.2 §5.1.6.2): frames go from the guest's buffers straight to the tap.
//!
//! The virtio header is copied out of guest memory once, checked against what was negotiated, and handed to the kernel as checked; the
//! guest cannot change it in between. The kernel checks the rest (offsets, protocol) and refuses what is wrong. A frame that is refused
//! is dropped and counted, like one lost on a wire; the queue goes on.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;

use vm_memory::{Bytes, GuestMemoryMmap};
use zerocopy::IntoBytes;

use crate::virtio::memory::{GuestSlice, MAX_SLICES, NotRam, translate, write_vectored};
use crate::virtio::net::bits::{HEADER_BYTES, Header, feature, gso, header_flag};
use crate::virtio::net::metrics::{NetMetrics, count};
use crate::virtio::net::tap::Tap;
use crate::virtio::queue::{Chain, EndlessChain, GuestQueue, walk};
use crate::virtio::worker::Progress;

/// Frames in one turn.
const TURN: usize = 64;

/// Why a frame of the guest is not sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadFrame {
    /// The chain has no end.
    #[error(transparent)]
    Endless(#[from] EndlessChain),
    /// A descriptor is writable.
    #[error("a transmit buffer is not readable")]
    Writable,
    /// A descriptor is not of RAM.
    #[error(transparent)]
    NotRam(#[from] NotRam),
    /// There is no frame behind the header, or no whole header.
    #[error("a frame is shorter than its header")]
    Short,
    /// More pieces than a system call takes.
    #[error("a frame lies in too many pieces")]
    Pieces,
    /// It asks for an offload that was not negotiated, or that contradicts itself.
    #[error("a frame asks for an offload that was not negotiated")]
    Offload,
}

/// Reads a frame off its chain: the header, checked against the negotiated `features`, and the places of the frame's bytes. The first
/// of `slices` is left for the header.
///
/// # Errors
/// The frame must be dropped.
pub fn parse(
    memory: &GuestMemoryMmap<()>,
    chain: Chain<'_>,
    features: u64,
    slices: &mut Vec<GuestSlice>,
) -> Result<Header, BadFrame> {
    let mut header = Header::default();
    let mut have = 0;
    slices.clear();
    slices.push(GuestSlice::EMPTY);
    walk(chain, |descriptor| {
        if descriptor.is_write_only() {
            return Err(BadFrame::Writable);
        }
        let (address, length) = (descriptor.addr(), descriptor.len());
        let missing = header.as_mut_bytes().get_mut(have..).unwrap_or_default();
        let here = missing.len().min(length as usize);
        let (into, _) = missing.split_at_mut(here);
        let not_ram = NotRam {
            address: address.0,
            length: length.into(),
        };
        memory.read_slice(into, address).map_err(|_| not_ram)?;
        have += here;
        let taken = u32::try_from(here).unwrap_or(length);
        let start = address.0.checked_add(taken.into()).ok_or(not_ram)?;
        translate(
            memory,
            vm_memory::GuestAddress(start),
            length - taken,
            slices,
        )?;
        if slices.len() > MAX_SLICES {
            Err(BadFrame::Pieces)
        } else {
            Ok(())
        }
    })?;
    if slices.len() < 2 {
        return Err(BadFrame::Short);
    }
    check(header, features).ok_or(BadFrame::Offload)
}

/// The header as the kernel gets it, if it asks for nothing but what was negotiated. Unknown flags are ignored (§5.1.6.2.2).
fn check(header: Header, features: u64) -> Option<Header> {
    let has = |bit: u64| features & bit != 0;
    let partial = header.flags & header_flag::NEEDS_CSUM != 0;
    let (kind, ecn) = (header.gso_type & !gso::ECN, header.gso_type & gso::ECN != 0);
    let allowed = match kind {
        gso::NONE => !ecn,
        gso::TCPV4 => has(feature::HOST_TSO4) && (!ecn || has(feature::HOST_ECN)),
        gso::TCPV6 => has(feature::HOST_TSO6) && (!ecn || has(feature::HOST_ECN)),
        gso::UDP => has(feature::HOST_UFO) && !ecn,
        gso::UDP_L4 => has(feature::HOST_USO) && !ecn,
        _ => false,
    };
    // Segments need their checksums completed and a size.
    let segmented = kind == gso::NONE || (partial && header.gso_size != [0, 0]);
    let flags = header.flags & header_flag::NEEDS_CSUM;
    (allowed && segmented && (!partial || has(feature::CSUM))).then_some(Header {
        flags,
        num_buffers: [0, 0],
        ..header
    })
}

/// The transmitting half of a queue pair.
pub(super) struct TxQueue {
    queue: Option<GuestQueue>,
    features: u64,
    /// For one system call; kept for its allocation.
    slices: Vec<GuestSlice>,
    unfinished: bool,
}

impl TxQueue {
    pub(super) fn new() -> Self {
        Self {
            queue: None,
            features: 0,
            slices: Vec::new(),
            unfinished: false,
        }
    }

    pub(super) fn start(&mut self, features: u64) {
        self.features = features;
    }

    pub(super) fn set_queue(&mut self, queue: Option<GuestQueue>) {
        self.queue = queue;
        self.unfinished = false;
    }

    /// Whether the driver has more to send, which the last turn did not get to or the host did not take.
    pub(super) fn is_unfinished(&self) -> bool {
        self.unfinished
    }

    /// Transmits until the driver has nothing more to send, the host takes no more, or the turn is over.
    pub(super) fn run(&mut self, tap: &Tap, metrics: &NetMetrics) -> Progress {
        let Some(mut queue) = self.queue.take() else {
            return Progress::Idle;
        };
        queue.silence();
        let memory = Arc::clone(queue.memory());
        self.unfinished = true;
        let mut frames = 0;
        let progress = loop {
            if frames == TURN {
                break Progress::More;
            }
            let Some(chain) = queue.pop(&memory) else {
                if queue.listen() {
                    continue;
                }
                self.unfinished = false;
                break Progress::Idle;
            };
            frames += 1;
            let head = chain.head_index();
            match parse(&memory, chain, self.features, &mut self.slices) {
                Ok(header) => {
                    if !self.send(tap, &memory, header, metrics) {
                        queue.unpop();
                        break Progress::Idle;
                    }
                }
                Err(_) => count(&metrics.tx_malformed, 1),
            }
            queue.push(head, 0);
        };
        queue.signal();
        self.queue = Some(queue);
        progress
    }

    /// Gives one frame to the host; false if it must be tried again later.
    fn send(
        &mut self,
        tap: &Tap,
        memory: &GuestMemoryMmap<()>,
        mut header: Header,
        metrics: &NetMetrics,
    ) -> bool {
        loop {
            let head = header.as_mut_bytes();
            match write_vectored(tap.as_fd(), memory, head, &mut self.slices) {
                Ok(bytes) => {
                    count(&metrics.tx_frames, 1);
                    count(&metrics.tx_bytes, bytes.saturating_sub(HEADER_BYTES) as u64);
                    return true;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    count(&metrics.tx_blocked, 1);
                    return false;
                }
                Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                    count(&metrics.tx_malformed, 1);
                    return true;
                }
                Err(_) => {
                    count(&metrics.tx_refused, 1);
                    return true;
                }
            }
        }
    }
}
