//! A driver without a guest: the front end of the vhost-user protocol with memory and rings of its own, for tests and benches.
//!
//! The same client drives any back end, so that two of them can be compared:
//!
//! ```ignore
//! let mut client = Client::connect(socket, &ClientOptions { queues: 2, depth: 32, buffer_bytes: 4096 })?;
//! let pattern = Pattern { order: Order::Random { seed: 1 }, reads_percent: 70, ..Pattern::reads(4096, client.capacity_bytes()) };
//! let outcome = client.run(pattern.jobs().take(100_000))?;
//! println!("{} requests a second", outcome.requests as f64 / outcome.elapsed.as_secs_f64());
//! client.execute(Access::Flush, 0, 0)?;
//! ```
//!
//! One thread drives all queues: it fills every free place, rings where the back end asks for it, and sleeps until it is called.
//!
//! ```text
//!   slot s of a queue:  descriptors 3s (header) ─> 3s+1 (data, or segment) ─> 3s+2 (status), always the same ones
//! ```

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use rustix::fs::MemfdFlags;
use vhost::vhost_user::message::{VhostUserConfigFlags, VhostUserHeaderFlag, VhostUserInflight};
use vhost::vhost_user::{
    Frontend, VhostUserFrontend, VhostUserProtocolFeatures, VhostUserVirtioFeatures,
};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};
use zerocopy::{FromBytes, IntoBytes};

use crate::virtio::block::bits::{
    Config, DISCARD_FLAG_UNMAP, DiscardSegment, Header, SECTOR_BYTES, feature, kind, status,
};

/// The longest that a back end may take over one request.
const PATIENCE: Duration = Duration::from_secs(60);

/// Descriptors of a request.
const CHAIN: u16 = 3;

/// Bytes set aside for the header, segment and status of a slot, and for each ring structure.
const SLOT_BYTES: u64 = 64;
const RING_BYTES: u64 = 64 << 10;

/// What the connection is called at the wait point; calls have the numbers of their queues.
const CONNECTION: u64 = 1 << 32;

const NEXT: u16 = 1;
const WRITE: u16 = 2;

/// What a request does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Read.
    Read,
    /// Write.
    Write,
    /// Make durable.
    Flush,
    /// Forget a range.
    Discard,
    /// Make a range zero, giving its space back.
    WriteZeroes,
}

/// A request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Job {
    /// What it does.
    pub access: Access,
    /// First byte of the disk; a multiple of 512.
    pub offset: u64,
    /// Bytes, a multiple of 512; for reads and writes at most [`ClientOptions::buffer_bytes`].
    pub length: u64,
}

/// How large a client is.
#[derive(Clone, Copy, Debug)]
pub struct ClientOptions {
    /// Queues to use.
    pub queues: u16,
    /// Requests at once in each queue, 1 to 256.
    pub depth: u16,
    /// The most data of a request.
    pub buffer_bytes: u32,
}

/// In what order a pattern visits a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// One block after the other, and from the end back to the start.
    Sequential,
    /// Each block as likely as any other; the same for the same seed.
    Random {
        /// Where the sequence starts.
        seed: u64,
    },
}

/// A stream of requests of one size.
#[derive(Clone, Copy, Debug)]
pub struct Pattern {
    /// The order of blocks.
    pub order: Order,
    /// Bytes of each request.
    pub block_bytes: u64,
    /// The first so many bytes of the disk are visited.
    pub range_bytes: u64,
    /// Of 100 requests how many read.
    pub reads_percent: u8,
    /// Of 100 requests how many discard; the rest writes.
    pub discards_percent: u8,
}

impl Pattern {
    /// Random reads of `block_bytes`.
    #[must_use]
    pub fn reads(block_bytes: u64, range_bytes: u64) -> Self {
        Self {
            order: Order::Random { seed: 1 },
            block_bytes,
            range_bytes,
            reads_percent: 100,
            discards_percent: 0,
        }
    }

    /// The requests, without end.
    pub fn jobs(self) -> impl Iterator<Item = Job> {
        let blocks = (self.range_bytes / self.block_bytes).max(1);
        let mut state = match self.order {
            Order::Random { seed } => seed.wrapping_mul(2).wrapping_add(1),
            Order::Sequential => 1,
        };
        (0_u64..).map(move |number| {
            // splitmix64: enough for offsets, and the same everywhere.
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut mixed = state;
            mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            mixed ^= mixed >> 31;
            let block = match self.order {
                Order::Sequential => number % blocks,
                Order::Random { .. } => (mixed >> 8) % blocks,
            };
            let die = mixed % 100;
            let (reads, discards) = (
                u64::from(self.reads_percent),
                u64::from(self.discards_percent),
            );
            Job {
                access: if die < reads {
                    Access::Read
                } else if die < reads + discards {
                    Access::Discard
                } else {
                    Access::Write
                },
                offset: block * self.block_bytes,
                length: self.block_bytes,
            }
        })
    }
}

/// What a run came to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Requests answered.
    pub requests: u64,
    /// Those answered with an error.
    pub errors: u64,
    /// Bytes that were asked for.
    pub bytes: u64,
    /// From the first request to the last answer.
    pub elapsed: Duration,
    /// Times the back end was rung.
    pub kicks: u64,
    /// Times this client slept until it was called.
    pub waits: u64,
}

/// Why a client cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The back end refused a message, or went away.
    #[error("{0}: {1}")]
    Protocol(&'static str, #[source] vhost::Error),
    /// The host refused something.
    #[error("{0}: {1}")]
    Host(&'static str, #[source] io::Error),
    /// The back end lacks something.
    #[error("the back end has no {0}")]
    Missing(&'static str),
    /// The back end answered nothing for a minute.
    #[error("no answer from the back end for {} s", PATIENCE.as_secs())]
    Silent,
    /// The back end answered what was not asked.
    #[error("the back end answered descriptor {0}, which was not under way")]
    Stray(u32),
    /// The connection broke.
    #[error("the back end has gone")]
    Gone,
    /// Options or a request that this client is not made for.
    #[error("{0}")]
    Usage(&'static str),
    /// A request failed.
    #[error("a request was answered with status {0}")]
    Status(u8),
}

type Result<T> = std::result::Result<T, ClientError>;

fn protocol(what: &'static str) -> impl Fn(vhost::Error) -> ClientError {
    move |error| ClientError::Protocol(what, error)
}

fn host<E: Into<io::Error>>(what: &'static str) -> impl Fn(E) -> ClientError {
    move |error| ClientError::Host(what, error.into())
}

fn memory_error(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> ClientError {
    ClientError::Host("the client's own memory", io::Error::other(error))
}

/// One queue, as its driver has it.
struct Lane {
    available: u64,
    used: u64,
    slots: u64,
    buffers: u64,
    kick: EventFd,
    call: EventFd,
    next_available: u16,
    /// What `next_available` was when the back end was last told.
    told: u16,
    next_used: u16,
    free: Vec<u16>,
    /// For each slot the job under way.
    under_way: Vec<Option<Job>>,
}

/// A connection to a back end. Dropping it closes the connection as a crash would, without stopping the rings.
pub struct Client {
    frontend: Frontend,
    socket: PathBuf,
    memory: GuestMemoryMmap<()>,
    options: ClientOptions,
    /// The back end's record of what is under way, where it keeps one.
    record: Option<(VhostUserInflight, File)>,
    reconnect: bool,
    ring_size: u16,
    config: Config,
    features: u64,
    lanes: Vec<Lane>,
    /// All calls, edge-triggered: they are never read.
    calls: Epoll,
}

impl Client {
    /// Connects, negotiates all that this client knows, and starts its rings.
    ///
    /// # Errors
    /// Nobody serves the socket, or not a disk, or not with so many queues.
    pub fn connect(socket: &Path, options: &ClientOptions) -> Result<Self> {
        if !(1..=256).contains(&options.depth) || options.queues == 0 {
            return Err(ClientError::Usage(
                "a client has at least one queue, of depth 1 to 256",
            ));
        }
        let (frontend, features, config) = greet(socket, options)?;
        let ring_size = (options.depth * CHAIN).next_power_of_two();
        let per_slot = SLOT_BYTES + u64::from(options.buffer_bytes).next_multiple_of(4096);
        let per_lane = 3 * RING_BYTES + u64::from(options.depth) * per_slot;
        let per_lane = per_lane.next_multiple_of(4096);
        let memory = shared_memory(per_lane * u64::from(options.queues))?;
        let calls = Epoll::new().map_err(host("make an epoll"))?;
        let mut lanes = Vec::new();
        for index in 0..options.queues {
            let lane = Lane::lay_out(&memory, u64::from(index) * per_lane, options, ring_size)?;
            calls
                .ctl(
                    ControlOperation::Add,
                    lane.call.as_raw_fd(),
                    EpollEvent::new(EventSet::IN | EventSet::EDGE_TRIGGERED, index.into()),
                )
                .map_err(host("watch a call"))?;
            lanes.push(lane);
        }
        let mut client = Self {
            frontend,
            socket: socket.into(),
            memory,
            options: *options,
            record: None,
            reconnect: false,
            ring_size,
            config,
            features,
            lanes,
            calls,
        };
        client.hand_over()?;
        Ok(client)
    }

    /// Hands memory, record and rings to the back end, which goes on where the rings are.
    fn hand_over(&mut self) -> Result<()> {
        let gone = EventSet::IN | EventSet::READ_HANG_UP;
        self.calls
            .ctl(
                ControlOperation::Add,
                self.frontend.as_raw_fd(),
                EpollEvent::new(gone, CONNECTION),
            )
            .map_err(host("watch the connection"))?;
        let region = self
            .memory
            .iter()
            .next()
            .ok_or(ClientError::Missing("memory"))?;
        let region = VhostUserMemoryRegionInfo::from_guest_region(region)
            .map_err(protocol("describe the memory"))?;
        self.frontend
            .set_mem_table(&[region])
            .map_err(protocol("set the memory table"))?;
        self.share_record()?;
        for (index, lane) in (0_u16..).zip(&self.lanes) {
            let base = shown(&self.memory, lane)?;
            start(
                &mut self.frontend,
                index,
                lane,
                self.ring_size,
                (region.userspace_addr, base),
            )?;
        }
        Ok(())
    }

    /// Gives the back end its record of requests, a new one if there is none; where it keeps none, nothing happens.
    fn share_record(&mut self) -> Result<()> {
        let wanted = VhostUserInflight {
            num_queues: self.options.queues,
            queue_size: self.ring_size,
            ..VhostUserInflight::default()
        };
        if self.record.is_none() {
            // The one way to fail that is none: the feature was not negotiated.
            let Ok(record) = self.frontend.get_inflight_fd(&wanted) else {
                return Ok(());
            };
            self.record = Some(record);
        }
        let Some((about, file)) = &self.record else {
            return Ok(());
        };
        self.frontend
            .set_inflight_fd(about, file.as_raw_fd())
            .map_err(protocol("give the record of requests"))
    }

    /// Whether [`Client::run`] waits for another back end when this one goes away, and goes on with it.
    pub fn set_reconnect(&mut self, reconnect: bool) {
        self.reconnect = reconnect;
    }

    /// Connects to whoever serves the socket now and goes on.
    fn find_another(&mut self) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            // It may be another one by now, and may have gone as well.
            let _ = self.calls.ctl(
                ControlOperation::Delete,
                self.frontend.as_raw_fd(),
                EpollEvent::default(),
            );
            let found = greet(&self.socket, &self.options).and_then(|(frontend, _, _)| {
                self.frontend = frontend;
                self.hand_over()
            });
            match found {
                Ok(()) => return Ok(()),
                Err(error) if Instant::now() > deadline => return Err(error),
                Err(_) => std::thread::sleep(Duration::from_millis(20)),
            }
        }
    }

    /// Size of the disk.
    #[must_use]
    pub fn capacity_bytes(&self) -> u64 {
        u64::from_le_bytes(self.config.capacity).saturating_mul(SECTOR_BYTES)
    }

    /// The disk's configuration space.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Features that both sides know; see [`feature`].
    #[must_use]
    pub fn features(&self) -> u64 {
        self.features
    }

    /// Runs all jobs, spread over the queues, each queue as deep as it goes.
    ///
    /// # Errors
    /// The back end went silent or answered nonsense. Requests that it answers with an error are only counted.
    pub fn run(&mut self, jobs: impl IntoIterator<Item = Job>) -> Result<Outcome> {
        let mut jobs = jobs.into_iter();
        let mut outcome = Outcome::default();
        let mut under_way = 0_u64;
        let mut more = true;
        let start = Instant::now();
        loop {
            let mut answered = 0;
            for index in 0..self.lanes.len() {
                answered += self.reap(index, &mut outcome)?;
            }
            under_way -= answered;
            for index in 0..self.lanes.len() {
                while more {
                    let Some(slot) = self.lanes.get_mut(index).and_then(|lane| lane.free.pop())
                    else {
                        break;
                    };
                    match jobs.next() {
                        Some(job) => {
                            self.offer(index, slot, job)?;
                            under_way += 1;
                        }
                        None => {
                            more = false;
                            if let Some(lane) = self.lanes.get_mut(index) {
                                lane.free.push(slot);
                            }
                        }
                    }
                }
                outcome.kicks += u64::from(self.tell(index)?);
            }
            if under_way == 0 && !more {
                break;
            }
            if answered == 0 && self.listen()? {
                outcome.waits += 1;
                self.wait()?;
            }
        }
        outcome.elapsed = start.elapsed();
        Ok(outcome)
    }

    /// Runs one request without data.
    ///
    /// # Errors
    /// As [`Client::run`], and the request's own.
    pub fn execute(&mut self, access: Access, offset: u64, length: u64) -> Result<()> {
        self.only(Job {
            access,
            offset,
            length,
        })
    }

    /// Reads; the length is that of `bytes`.
    ///
    /// # Errors
    /// As [`Client::execute`].
    pub fn read_at(&mut self, offset: u64, bytes: &mut [u8]) -> Result<()> {
        let length = bytes.len() as u64;
        self.execute(Access::Read, offset, length)?;
        let buffer = self.first_buffer();
        self.memory.read_slice(bytes, buffer).map_err(memory_error)
    }

    /// Writes.
    ///
    /// # Errors
    /// As [`Client::execute`].
    pub fn write_at(&mut self, offset: u64, bytes: &[u8]) -> Result<()> {
        if bytes.len() > self.options.buffer_bytes as usize {
            return Err(ClientError::Usage("more data than a buffer holds"));
        }
        let buffer = self.first_buffer();
        self.memory
            .write_slice(bytes, buffer)
            .map_err(memory_error)?;
        self.execute(Access::Write, offset, bytes.len() as u64)
    }

    /// Stops all rings, as a driver does that resets its device; the client is of no further use.
    ///
    /// # Errors
    /// The back end refused.
    pub fn disconnect(self) -> Result<()> {
        for index in 0..self.lanes.len() {
            let base = self
                .frontend
                .get_vring_base(index)
                .map_err(protocol("stop a ring"))?;
            let expected = self.lanes.get(index).map(|lane| lane.next_available);
            if expected.is_some_and(|expected| u32::from(expected) != base) {
                return Err(ClientError::Usage("the back end stopped a ring elsewhere"));
            }
        }
        Ok(())
    }

    /// With nothing else under way, the slot used next on the first queue is always the same.
    fn first_buffer(&self) -> GuestAddress {
        let lane = self.lanes.first();
        let slot = lane.and_then(|lane| lane.free.last()).copied();
        let size = u64::from(self.options.buffer_bytes).next_multiple_of(4096);
        GuestAddress(lane.map_or(0, |l| l.buffers) + u64::from(slot.unwrap_or(0)) * size)
    }

    fn only(&mut self, job: Job) -> Result<()> {
        let slot = self
            .lanes
            .first()
            .and_then(|lane| lane.free.last())
            .copied();
        self.run([job])?;
        // Freed last, so it is the next one again.
        let lane = self.lanes.first().ok_or(ClientError::Missing("queue"))?;
        let at = lane.slots + u64::from(slot.unwrap_or(0)) * SLOT_BYTES + STATUS;
        let code: u8 = self
            .memory
            .read_obj(GuestAddress(at))
            .map_err(memory_error)?;
        match code {
            status::OK => Ok(()),
            code => Err(ClientError::Status(code)),
        }
    }

    /// Puts a job into a slot and the slot into the available ring.
    fn offer(&mut self, index: usize, slot: u16, job: Job) -> Result<()> {
        let size = u64::from(self.options.buffer_bytes).next_multiple_of(4096);
        let ring_mask = self.ring_size - 1;
        let lane = self
            .lanes
            .get_mut(index)
            .ok_or(ClientError::Missing("queue"))?;
        let at = lane.slots + u64::from(slot) * SLOT_BYTES;
        let sector = job.offset / SECTOR_BYTES;
        let sectors = u32::try_from(job.length / SECTOR_BYTES)
            .map_err(|_| ClientError::Usage("a request is too long"))?;
        let transfer = matches!(job.access, Access::Read | Access::Write);
        if transfer && job.length > u64::from(self.options.buffer_bytes) {
            return Err(ClientError::Usage("more data than a buffer holds"));
        }
        let kind = match job.access {
            Access::Read => kind::IN,
            Access::Write => kind::OUT,
            Access::Flush => kind::FLUSH,
            Access::Discard => kind::DISCARD,
            Access::WriteZeroes => kind::WRITE_ZEROES,
        };
        let header = Header {
            kind: kind.to_le_bytes(),
            reserved: [0; 4],
            sector: if transfer { sector } else { 0 }.to_le_bytes(),
        };
        let descriptors = lane.available - RING_BYTES;
        let head = slot * CHAIN;
        let put = |address: u64, bytes: &[u8]| {
            self.memory
                .write_slice(bytes, GuestAddress(address))
                .map_err(memory_error)
        };
        put(at, header.as_bytes())?;
        let mut data = (lane.buffers + u64::from(slot) * size, sectors * 512, NEXT);
        let mut first = head + 1;
        match job.access {
            Access::Read => data.2 |= WRITE,
            Access::Write => {}
            Access::Flush => first = head + 2,
            Access::Discard | Access::WriteZeroes => {
                let unmap = job.access == Access::WriteZeroes;
                let segment = DiscardSegment {
                    sector: sector.to_le_bytes(),
                    num_sectors: sectors.to_le_bytes(),
                    flags: if unmap { DISCARD_FLAG_UNMAP } else { 0 }.to_le_bytes(),
                };
                put(at + SEGMENT, segment.as_bytes())?;
                data = (at + SEGMENT, 16, NEXT);
            }
        }
        let header_at = descriptors + u64::from(head) * 16;
        put(header_at, &descriptor(at, 16, NEXT, first))?;
        put(
            header_at + 16,
            &descriptor(data.0, data.1, data.2, head + 2),
        )?;
        put(at + STATUS, &[0xff])?;
        let place = u64::from(lane.next_available & ring_mask);
        put(lane.available + 4 + place * 2, &head.to_le_bytes())?;
        lane.next_available = lane.next_available.wrapping_add(1);
        if let Some(place) = lane.under_way.get_mut(usize::from(slot)) {
            *place = Some(job);
        }
        Ok(())
    }

    /// Shows the back end what was offered; true if it had to be rung.
    fn tell(&mut self, index: usize) -> Result<bool> {
        let event_idx = self.features & 1 << VIRTIO_RING_F_EVENT_IDX != 0;
        let lane = self
            .lanes
            .get_mut(index)
            .ok_or(ClientError::Missing("queue"))?;
        if lane.told == lane.next_available {
            return Ok(false);
        }
        self.memory
            .store(
                lane.next_available,
                GuestAddress(lane.available + 2),
                Ordering::Release,
            )
            .map_err(memory_error)?;
        fence(Ordering::SeqCst);
        let load = |address: u64| -> Result<u16> {
            self.memory
                .load(GuestAddress(address), Ordering::Relaxed)
                .map_err(memory_error)
        };
        let needed = if event_idx {
            let event = load(lane.used + 4 + u64::from(self.ring_size) * 8)?;
            let behind = lane.next_available.wrapping_sub(event).wrapping_sub(1);
            behind < lane.next_available.wrapping_sub(lane.told)
        } else {
            load(lane.used)? & 1 == 0
        };
        lane.told = lane.next_available;
        if needed {
            lane.kick.write(1).map_err(host("ring the back end"))?;
        }
        Ok(needed)
    }

    /// Takes what the back end has answered; how many.
    fn reap(&mut self, index: usize, outcome: &mut Outcome) -> Result<u64> {
        let lane = self
            .lanes
            .get_mut(index)
            .ok_or(ClientError::Missing("queue"))?;
        let shown: u16 = self
            .memory
            .load(GuestAddress(lane.used + 2), Ordering::Acquire)
            .map_err(memory_error)?;
        let mut answered = 0;
        while lane.next_used != shown {
            let place = u64::from(lane.next_used & (self.ring_size - 1));
            let head: u32 = self
                .memory
                .read_obj(GuestAddress(lane.used + 4 + place * 8))
                .map_err(memory_error)?;
            lane.next_used = lane.next_used.wrapping_add(1);
            let stray = ClientError::Stray(head);
            let slot = u16::try_from(head / u32::from(CHAIN)).unwrap_or(u16::MAX);
            let job = lane
                .under_way
                .get_mut(usize::from(slot))
                .and_then(Option::take)
                .filter(|_| head.is_multiple_of(CHAIN.into()))
                .ok_or(stray)?;
            let at = lane.slots + u64::from(slot) * SLOT_BYTES + STATUS;
            let code: u8 = self
                .memory
                .read_obj(GuestAddress(at))
                .map_err(memory_error)?;
            lane.free.push(slot);
            outcome.requests += 1;
            outcome.bytes += job.length;
            outcome.errors += u64::from(code != status::OK);
            answered += 1;
        }
        Ok(answered)
    }

    /// Asks to be called for the next answer; false if one came meanwhile.
    fn listen(&mut self) -> Result<bool> {
        for lane in &mut self.lanes {
            let event = lane.available + 4 + u64::from(self.ring_size) * 2;
            self.memory
                .store(lane.next_used, GuestAddress(event), Ordering::Relaxed)
                .map_err(memory_error)?;
        }
        fence(Ordering::SeqCst);
        for lane in &self.lanes {
            let shown: u16 = self
                .memory
                .load(GuestAddress(lane.used + 2), Ordering::Acquire)
                .map_err(memory_error)?;
            if shown != lane.next_used {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Sleeps until called.
    fn wait(&mut self) -> Result<()> {
        let mut events = [EpollEvent::default(); 1];
        let patience = i32::try_from(PATIENCE.as_millis()).unwrap_or(i32::MAX);
        match self.calls.wait(patience, &mut events) {
            Ok(0) => Err(ClientError::Silent),
            Ok(_) if events.iter().all(|event| event.data() != CONNECTION) => Ok(()),
            Ok(_) if self.reconnect => self.find_another(),
            Ok(_) => Err(ClientError::Gone),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(()),
            Err(error) => Err(ClientError::Host("wait for the back end", error)),
        }
    }
}

/// Where the status byte and the segment of a slot are.
const STATUS: u64 = 16;
const SEGMENT: u64 = 32;

fn descriptor(address: u64, length: u32, flags: u16, next: u16) -> [u8; 16] {
    let words = u64::from(length) | u64::from(flags) << 32 | u64::from(next) << 48;
    let mut bytes = [0; 16];
    let (low, high) = bytes.split_at_mut(8);
    low.copy_from_slice(&address.to_le_bytes());
    high.copy_from_slice(&words.to_le_bytes());
    bytes
}

impl Lane {
    fn lay_out(
        memory: &GuestMemoryMmap<()>,
        start: u64,
        options: &ClientOptions,
        ring_size: u16,
    ) -> Result<Self> {
        debug_assert!(u64::from(ring_size) * 16 <= RING_BYTES);
        let slots = start + 3 * RING_BYTES;
        let lane = Self {
            available: start + RING_BYTES,
            used: start + 2 * RING_BYTES,
            slots,
            buffers: (slots + u64::from(options.depth) * SLOT_BYTES).next_multiple_of(4096),
            kick: EventFd::new(EFD_NONBLOCK).map_err(host("make an eventfd"))?,
            call: EventFd::new(EFD_NONBLOCK).map_err(host("make an eventfd"))?,
            next_available: 0,
            told: 0,
            next_used: 0,
            free: (0..options.depth).rev().collect(),
            under_way: vec![None; options.depth.into()],
        };
        // The last descriptor of each slot never changes; buffers hold something that is not zero.
        for slot in 0..options.depth {
            let status = slots + u64::from(slot) * SLOT_BYTES + STATUS;
            let at = start + u64::from(slot * CHAIN + 2) * 16;
            memory
                .write_slice(&descriptor(status, 1, WRITE, 0), GuestAddress(at))
                .map_err(memory_error)?;
            let size = options.buffer_bytes as usize;
            let bytes = vec![(slot % 255 + 1).to_le_bytes()[0]; size];
            let buffer = lane.buffers + u64::from(slot) * (size as u64).next_multiple_of(4096);
            memory
                .write_slice(&bytes, GuestAddress(buffer))
                .map_err(memory_error)?;
        }
        Ok(lane)
    }
}

/// The used ring's index.
fn shown(memory: &GuestMemoryMmap<()>, lane: &Lane) -> Result<u16> {
    memory
        .load(GuestAddress(lane.used + 2), Ordering::Acquire)
        .map_err(memory_error)
}

/// Connects and negotiates.
fn greet(socket: &Path, options: &ClientOptions) -> Result<(Frontend, u64, Config)> {
    let mut frontend =
        Frontend::connect(socket, options.queues.into()).map_err(protocol("connect"))?;
    let offered = frontend.get_features().map_err(protocol("get features"))?;
    let wanted = 1 << VIRTIO_F_VERSION_1
        | 1 << VIRTIO_RING_F_EVENT_IDX
        | feature::RO
        | feature::FLUSH
        | feature::MQ
        | feature::DISCARD
        | feature::WRITE_ZEROES
        | VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits();
    let features = offered & wanted;
    if features & 1 << VIRTIO_F_VERSION_1 == 0 {
        return Err(ClientError::Missing("VIRTIO_F_VERSION_1"));
    }
    if features & VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits() == 0 {
        return Err(ClientError::Missing("protocol features"));
    }
    let config = negotiate(&mut frontend, options)?;
    frontend
        .set_features(features)
        .map_err(protocol("set features"))?;
    Ok((frontend, features, config))
}

/// Agrees on the protocol's features; the disk's configuration.
fn negotiate(frontend: &mut Frontend, options: &ClientOptions) -> Result<Config> {
    let offered = frontend
        .get_protocol_features()
        .map_err(protocol("get protocol features"))?;
    let needed = VhostUserProtocolFeatures::MQ | VhostUserProtocolFeatures::CONFIG;
    if !offered.contains(needed) {
        return Err(ClientError::Missing("MQ or CONFIG"));
    }
    let features = offered
        & (needed
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::INFLIGHT_SHMFD);
    frontend
        .set_protocol_features(features)
        .map_err(protocol("set protocol features"))?;
    if features.contains(VhostUserProtocolFeatures::REPLY_ACK) {
        frontend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
    }
    frontend.set_owner().map_err(protocol("become the owner"))?;
    let queues = frontend
        .get_queue_num()
        .map_err(protocol("get the number of queues"))?;
    if queues < u64::from(options.queues) {
        return Err(ClientError::Missing("so many queues"));
    }
    let mut config = Config::default();
    let size = u32::try_from(size_of::<Config>()).unwrap_or_default();
    let (_, bytes) = frontend
        .get_config(0, size, VhostUserConfigFlags::WRITABLE, config.as_bytes())
        .map_err(protocol("get the configuration"))?;
    config = Config::read_from_bytes(&bytes).map_err(|_| ClientError::Missing("configuration"))?;
    Ok(config)
}

fn shared_memory(bytes: u64) -> Result<GuestMemoryMmap<()>> {
    let file = rustix::fs::memfd_create("drover-client", MemfdFlags::CLOEXEC)
        .map_err(host("make shared memory"))?;
    let file = std::fs::File::from(file);
    file.set_len(bytes).map_err(host("make shared memory"))?;
    let size = usize::try_from(bytes).map_err(|_| ClientError::Usage("too much memory"))?;
    GuestMemoryMmap::from_ranges_with_files([(
        GuestAddress(0),
        size,
        Some(FileOffset::new(file, 0)),
    )])
    .map_err(memory_error)
}

/// Tells the back end where a queue lies and starts it.
fn start(
    frontend: &mut Frontend,
    index: u16,
    lane: &Lane,
    ring_size: u16,
    (address, base): (u64, u16),
) -> Result<()> {
    let number = usize::from(index);
    frontend
        .set_vring_num(number, ring_size)
        .map_err(protocol("set a ring's size"))?;
    frontend
        .set_vring_base(number, base)
        .map_err(protocol("set a ring's base"))?;
    let places = VringConfigData {
        queue_max_size: ring_size,
        queue_size: ring_size,
        flags: 0,
        desc_table_addr: address + lane.available - RING_BYTES,
        used_ring_addr: address + lane.used,
        avail_ring_addr: address + lane.available,
        log_addr: None,
    };
    frontend
        .set_vring_addr(number, &places)
        .map_err(protocol("set a ring's addresses"))?;
    frontend
        .set_vring_call(number, &lane.call)
        .map_err(protocol("set a ring's call"))?;
    frontend
        .set_vring_kick(number, &lane.kick)
        .map_err(protocol("set a ring's kick"))?;
    frontend
        .set_vring_enable(number, true)
        .map_err(protocol("enable a ring"))?;
    // What was offered to the last back end.
    lane.kick.write(1).map_err(host("ring the back end"))
}
