//! All queues of a disk on its one thread, around one engine.
//!
//! ```text
//!   chain ──parse──> operations ──submit──> engine ──poll──> completions ──> status byte, used ring ──> one interrupt a queue
//! ```
//!
//! A request may be several operations (the segments of a discard, or a write and the flush that makes it durable for a driver that
//! cannot flush). Its slot in the table of requests is the tag of all of them. A queue that was reset meanwhile no longer has the epoch
//! that its old requests remember, so their answers go nowhere. What the disk's owner asks for is in [`owner`].

mod owner;

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::mpsc::Receiver;

use drover_block::{Completion, Disk, IoError, Op};
use virtio_queue::Queue;
use vm_memory::{Bytes, GuestAddress};

use crate::GuestMemory;
use crate::virtio::block::bits::{ID_BYTES, feature, status};
use crate::virtio::block::handle::{Call, Capacity};
use crate::virtio::block::metrics::{BlockMetrics, count};
use crate::virtio::block::request::{BadRequest, DiskRange, Operation, Parser, Request};
use crate::virtio::memory::{copy_to_guest, disk_buffers};
use crate::virtio::queue::GuestQueue;
use crate::virtio::worker::{Progress, Scope, Service, Watch};

use self::owner::Owner;

/// Requests in one turn of a queue, and roughly their bytes. Answers are shown after each turn, so a disk that works synchronously must
/// not keep the driver waiting for the first of many.
const TURN: usize = 64;
const TURN_BYTES: u64 = 128 << 10;

/// What serves the requests: a disk, or in tests something that fails and dawdles on demand.
pub(super) trait Engine: Send {
    fn submit(&mut self, tag: u64, op: Op);
    fn poll(&mut self, completions: &mut Vec<Completion>);
    fn event(&self) -> Option<BorrowedFd<'_>>;
    fn timer(&self) -> Option<BorrowedFd<'_>> {
        None
    }
    fn close(self: Box<Self>) -> Result<(), drover_block::Error>;
    /// Its size, where it can be another than before.
    fn size_bytes(&self) -> Option<u64> {
        None
    }
    fn disk(&mut self) -> Option<&mut Disk> {
        None
    }
    fn into_disk(self: Box<Self>) -> Option<Disk> {
        None
    }
}

impl Engine for Disk {
    fn submit(&mut self, tag: u64, op: Op) {
        Disk::submit(self, drover_block::Request { tag, op });
    }

    fn poll(&mut self, completions: &mut Vec<Completion>) {
        Disk::poll(self, completions);
    }

    fn event(&self) -> Option<BorrowedFd<'_>> {
        Disk::event(self)
    }

    fn timer(&self) -> Option<BorrowedFd<'_>> {
        Disk::timer(self)
    }

    fn close(self: Box<Self>) -> Result<(), drover_block::Error> {
        Disk::close(*self)
    }

    fn size_bytes(&self) -> Option<u64> {
        Some(Disk::size_bytes(self))
    }

    fn disk(&mut self) -> Option<&mut Disk> {
        Some(self)
    }

    fn into_disk(self: Box<Self>) -> Option<Disk> {
        Some(*self)
    }
}

/// A queue being served.
struct Lane {
    queue: GuestQueue,
    epoch: u64,
    under_way: u16,
    /// It has as much under way as it has entries, or nothing is served; looked at again after a completion or a call of the owner.
    waiting: bool,
    /// Nothing more is taken from it.
    halted: bool,
}

/// What a request turns into when it is done.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Read,
    Write,
    Flush,
    GetId,
    Discard,
    WriteZeroes,
}

/// A request under way.
struct Slot {
    lane: u16,
    epoch: u64,
    head: u16,
    status_address: GuestAddress,
    kind: Kind,
    data_bytes: u32,
    operations_left: u32,
    flush_after: bool,
    status: u8,
}

/// Serves a disk.
pub(super) struct Server {
    /// Absent while the owner has it.
    engine: Option<Box<dyn Engine>>,
    /// Operations that the engine has not ended.
    in_engine: usize,
    owner: Owner,
    calls: Receiver<Call>,
    capacity: Capacity,
    parser: Parser,
    id: [u8; ID_BYTES],
    /// Writes are made durable before they are answered: the driver did not negotiate FLUSH (§5.2.6.2).
    write_through: bool,
    lanes: Vec<Option<Lane>>,
    epoch: u64,
    slots: Vec<Option<Slot>>,
    free: Vec<usize>,
    /// Requests under way by queue number, of whatever epoch.
    under_way: Vec<u32>,
    completions: Vec<Completion>,
    metrics: Arc<BlockMetrics>,
}

impl Server {
    pub(super) fn new(
        engine: Box<dyn Engine>,
        calls: Receiver<Call>,
        (parser, capacity): (Parser, Capacity),
        id: [u8; ID_BYTES],
        queues: u16,
        metrics: Arc<BlockMetrics>,
    ) -> Self {
        Self {
            engine: Some(engine),
            in_engine: 0,
            owner: Owner::new(),
            calls,
            capacity,
            parser,
            id,
            write_through: false,
            lanes: (0..queues).map(|_| None).collect(),
            epoch: 0,
            slots: Vec::new(),
            free: Vec::new(),
            under_way: vec![0; queues.into()],
            completions: Vec::new(),
            metrics,
        }
    }

    fn lane(&mut self, index: u16) -> Option<&mut Lane> {
        self.lanes.get_mut(usize::from(index))?.as_mut()
    }

    fn submit(&mut self, tag: u64, op: Op) {
        if let Some(engine) = &mut self.engine {
            self.in_engine += 1;
            engine.submit(tag, op);
        }
    }

    /// Takes up to a turn's requests from a queue and starts them.
    fn take_requests(&mut self, index: u16) -> Progress {
        if !self.serves() {
            if let Some(lane) = self.lane(index) {
                lane.waiting = true;
            }
            return Progress::Idle;
        }
        let Some(mut lane) = self
            .lanes
            .get_mut(usize::from(index))
            .and_then(Option::take)
        else {
            return Progress::Idle;
        };
        if lane.halted {
            if let Some(place) = self.lanes.get_mut(usize::from(index)) {
                *place = Some(lane);
            }
            return Progress::Idle;
        }
        lane.queue.silence();
        lane.waiting = false;
        let memory = Arc::clone(lane.queue.memory());
        let mut requests = 0;
        let mut bytes = 0;
        let progress = loop {
            if lane.under_way >= lane.queue.size() {
                lane.waiting = true;
                break Progress::Idle;
            }
            if requests == TURN || bytes >= TURN_BYTES {
                break Progress::More;
            }
            let Some(chain) = lane.queue.pop(&memory) else {
                if lane.queue.listen() {
                    continue;
                }
                break Progress::Idle;
            };
            requests += 1;
            let head = chain.head_index();
            match self.parser.parse(&memory, chain) {
                Ok(request) => {
                    bytes += work(&request);
                    self.start_request(&mut lane, head, request, &memory);
                }
                Err(BadRequest::Answer {
                    status: address,
                    code,
                }) => {
                    count(&self.metrics.refused, 1);
                    answer(&mut lane.queue, head, address, code, 0);
                }
                Err(error) => {
                    lane.queue.give_up(&error);
                    break Progress::Idle;
                }
            }
        };
        if let Some(place) = self.lanes.get_mut(usize::from(index)) {
            *place = Some(lane);
        }
        progress
    }

    fn start_request(
        &mut self,
        lane: &mut Lane,
        head: u16,
        request: Request,
        memory: &GuestMemory,
    ) {
        let Request {
            operation,
            data_bytes,
            status: status_address,
        } = request;
        let data = self.parser.data(&operation);
        let mut slot = Slot {
            lane: lane.queue.index(),
            epoch: lane.epoch,
            head,
            status_address,
            kind: Kind::Flush,
            data_bytes,
            operations_left: 0,
            flush_after: self.write_through,
            status: status::OK,
        };
        // Most requests are one operation, which needs no list.
        let (first, more) = match operation {
            Operation::Read { offset } => {
                slot.kind = Kind::Read;
                slot.flush_after = false;
                let op = (data_bytes > 0).then(|| Op::Read {
                    offset,
                    buffers: disk_buffers(data, memory),
                });
                (op, Vec::new())
            }
            Operation::Write { offset } => {
                slot.kind = Kind::Write;
                let op = (data_bytes > 0).then(|| Op::Write {
                    offset,
                    buffers: disk_buffers(data, memory),
                });
                (op, Vec::new())
            }
            Operation::Flush => {
                slot.flush_after = false;
                (Some(Op::Flush), Vec::new())
            }
            Operation::GetId => {
                slot.kind = Kind::GetId;
                slot.flush_after = false;
                let copied = copy_to_guest(memory, &self.id, data);
                slot.data_bytes = u32::try_from(copied).unwrap_or_default();
                (None, Vec::new())
            }
            Operation::Discard(ranges) => {
                slot.kind = Kind::Discard;
                (
                    None,
                    operations(&ranges, |DiskRange { offset, length, .. }| Op::Discard {
                        offset,
                        length,
                    }),
                )
            }
            Operation::WriteZeroes(ranges) => {
                slot.kind = Kind::WriteZeroes;
                (
                    None,
                    operations(
                        &ranges,
                        |DiskRange {
                             offset,
                             length,
                             unmap,
                         }| {
                            Op::WriteZeroes {
                                offset,
                                length,
                                unmap,
                            }
                        },
                    ),
                )
            }
        };
        slot.operations_left = u32::try_from(more.len()).unwrap_or(u32::MAX);
        slot.operations_left = slot
            .operations_left
            .saturating_add(u32::from(first.is_some()));
        if slot.operations_left == 0 {
            finish(&slot, &mut lane.queue, &self.metrics);
            return;
        }
        lane.under_way += 1;
        if let Some(count) = self.under_way.get_mut(usize::from(slot.lane)) {
            *count += 1;
        }
        let tag = self.store(slot);
        for op in first.into_iter().chain(more) {
            self.submit(tag, op);
        }
    }

    fn store(&mut self, slot: Slot) -> u64 {
        let place = self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            self.slots.len() - 1
        });
        if let Some(free) = self.slots.get_mut(place) {
            *free = Some(slot);
        }
        place as u64
    }

    /// Collects what the engine has finished, until it has nothing more, and tells the drivers.
    fn collect(&mut self) {
        loop {
            let mut completions = std::mem::take(&mut self.completions);
            if let Some(engine) = &mut self.engine {
                engine.poll(&mut completions);
            }
            let any = !completions.is_empty();
            for completion in completions.drain(..) {
                self.in_engine -= 1;
                if !self.left(&completion) {
                    self.complete(completion);
                }
            }
            self.completions = completions;
            if !any {
                break;
            }
        }
        for lane in self.lanes.iter_mut().flatten() {
            lane.queue.signal();
        }
    }

    fn complete(&mut self, completion: Completion) {
        let Completion { tag, result, op } = completion;
        let place = usize::try_from(tag).unwrap_or(usize::MAX);
        let Some(slot) = self.slots.get(place).and_then(Option::as_ref) else {
            tracing::error!(tag, "the disk completed a request that it was not given");
            return;
        };
        let (lane, epoch) = (slot.lane, slot.epoch);
        if let Err(error) = result {
            let present = self.lane(lane).is_some_and(|lane| lane.epoch == epoch);
            let kept = op.map(|op| present && self.keep(tag, op, &error).is_ok());
            if kept == Some(true) {
                return;
            }
            if let Some(slot) = self.slots.get_mut(place).and_then(Option::as_mut) {
                slot.status = match error {
                    IoError::Unsupported(_) => status::UNSUPP,
                    _ => status::IOERR,
                };
            }
            // The disk itself logs what an operator can act on.
            count(&self.metrics.failed, 1);
        }
        let Some(slot) = self.slots.get_mut(place).and_then(Option::as_mut) else {
            return;
        };
        slot.operations_left -= 1;
        if slot.operations_left > 0 {
            return;
        }
        if std::mem::take(&mut slot.flush_after) && slot.status == status::OK {
            slot.operations_left = 1;
            self.submit(tag, Op::Flush);
            return;
        }
        self.release(place);
    }

    /// Collects, and serves queues that had to stop because they were full and are no longer; what they then submit is collected next time.
    fn settle(&mut self) -> Progress {
        self.collect();
        if !self.serves() {
            return self.leave();
        }
        let mut progress = Progress::Idle;
        for index in 0..self.under_way.len() {
            let index = u16::try_from(index).unwrap_or(u16::MAX);
            if self
                .lane(index)
                .is_some_and(|l| l.waiting && !l.halted && l.under_way < l.queue.size())
            {
                let unfinished = self.take_requests(index) == Progress::More;
                if let Some(lane) = self.lane(index) {
                    lane.waiting |= unfinished;
                }
                progress = Progress::More;
            }
        }
        progress
    }
}

/// How much of a turn a request takes.
fn work(request: &Request) -> u64 {
    match request.operation {
        Operation::Read { .. } | Operation::Write { .. } => request.data_bytes.into(),
        Operation::GetId => 0,
        Operation::Flush | Operation::Discard(_) | Operation::WriteZeroes(_) => TURN_BYTES,
    }
}

/// Operations on all ranges that are not empty.
fn operations(ranges: &[DiskRange], op: impl Fn(DiskRange) -> Op) -> Vec<Op> {
    ranges
        .iter()
        .filter(|range| range.length > 0)
        .map(|range| op(*range))
        .collect()
}

/// Answers a request that is done and counts it.
fn finish(slot: &Slot, queue: &mut GuestQueue, metrics: &BlockMetrics) {
    let mut written = 0;
    if slot.status == status::OK {
        let bytes = u64::from(slot.data_bytes);
        let (requests, bytes_moved) = match slot.kind {
            Kind::Read => (Some(&metrics.reads), Some(&metrics.read_bytes)),
            Kind::Write => (Some(&metrics.writes), Some(&metrics.written_bytes)),
            Kind::Flush => (Some(&metrics.flushes), None),
            Kind::Discard => (Some(&metrics.discards), None),
            Kind::WriteZeroes => (Some(&metrics.write_zeroes), None),
            Kind::GetId => (None, None),
        };
        for (counter, more) in [(requests, 1), (bytes_moved, bytes)] {
            if let Some(counter) = counter {
                count(counter, more);
            }
        }
        if matches!(slot.kind, Kind::Read | Kind::GetId) {
            written = slot.data_bytes;
        }
    }
    answer(queue, slot.head, slot.status_address, slot.status, written);
}

/// Writes a status byte and hands the chain back.
fn answer(queue: &mut GuestQueue, head: u16, address: GuestAddress, code: u8, data_bytes: u32) {
    match queue.memory().write_obj(code, address) {
        Ok(()) => queue.push(head, data_bytes.saturating_add(1)),
        Err(error) => queue.give_up(&error),
    }
}

impl Service for Server {
    fn start(&mut self, features: u64) {
        self.write_through = features & feature::FLUSH == 0;
    }

    fn add_queue(&mut self, queue: GuestQueue) {
        self.epoch += 1;
        let epoch = self.epoch;
        if let Some(place) = self.lanes.get_mut(usize::from(queue.index())) {
            *place = Some(Lane {
                queue,
                epoch,
                under_way: 0,
                waiting: false,
                halted: false,
            });
        }
    }

    fn remove_queues(&mut self, scope: Scope) {
        match scope {
            Scope::All => self.lanes.fill_with(|| None),
            Scope::Queue(index) => {
                if let Some(place) = self.lanes.get_mut(usize::from(index)) {
                    *place = None;
                }
            }
        }
        self.forget_kept(scope);
        self.release_waiting();
    }

    fn is_quiet(&self, scope: Scope) -> bool {
        match scope {
            Scope::All => self.under_way.iter().all(|count| *count == 0),
            Scope::Queue(index) => self
                .under_way
                .get(usize::from(index))
                .is_none_or(|n| *n == 0),
        }
    }

    fn halt(&mut self, scope: Scope) {
        for lane in self.lanes.iter_mut().flatten() {
            lane.halted |= scope == Scope::All || scope == Scope::Queue(lane.queue.index());
        }
    }

    fn take_back(&mut self, scope: Scope) -> Vec<(u16, Queue)> {
        let concerned =
            |lane: &mut Lane| scope == Scope::All || scope == Scope::Queue(lane.queue.index());
        self.lanes
            .iter_mut()
            .filter_map(|lane| lane.take_if(concerned))
            .map(|mut lane| {
                lane.queue.signal();
                (lane.queue.index(), lane.queue.into_queue())
            })
            .collect()
    }

    fn kick(&mut self, index: u16) -> Progress {
        let progress = self.take_requests(index);
        match (progress, self.settle()) {
            (Progress::Idle, Progress::Idle) => Progress::Idle,
            _ => Progress::More,
        }
    }

    fn source(&self) -> Option<(BorrowedFd<'_>, Watch)> {
        let event = self.engine.as_ref()?.event()?;
        Some((event, Watch::Readable))
    }

    fn timer(&self) -> Option<BorrowedFd<'_>> {
        self.engine.as_ref()?.timer()
    }

    fn called(&mut self) -> Progress {
        self.answer_calls();
        self.settle();
        Progress::More
    }

    fn source_ready(&mut self) -> Progress {
        self.settle()
    }

    fn end(self: Box<Self>) {
        let closed = self.engine.map(Engine::close);
        if let Some(Err(error)) = closed {
            count(&self.metrics.failed, 1);
            tracing::error!("closing a disk: {error}");
        }
    }
}
