//! What a disk's owner asks of its thread: to hand the disk over, to take it back, and what becomes of requests that failed.
//!
//! | the disk is | requests of the guest | by |
//! |---|---|---|
//! | served | are started | `give`, `retry`, `report` |
//! | stopped | wait; those that failed are kept | a failure whose policy is to stop |
//! | leaving | wait; those under way end, then all is flushed | `take` |
//! | away | wait | the end of that flush |
//!
//! Stopped and away are independent: what was kept is tried again only when the disk is there and not stopped.

use std::sync::mpsc::TryRecvError;

use drover_block::{Completion, IoError, Op};

use super::{Server, finish, status};
use crate::virtio::block::handle::{Call, ErrorPolicy, Observer, OnError, Stopped, Taken};
use crate::virtio::block::metrics::count;
use crate::virtio::block::queue::Engine;
use crate::virtio::worker::{Progress, Scope};

/// The tag of the flush before a disk leaves; no slot has this number.
const FAREWELL: u64 = u64::MAX;

/// What the owner decided.
pub(super) struct Owner {
    policy: ErrorPolicy,
    observer: Option<Observer>,
    /// A request failed and is kept.
    stopped: bool,
    /// Failures are told to the guest, whatever the policy.
    reporting: bool,
    kept: Vec<Kept>,
    /// Who gets the disk.
    leaving: Option<Taken>,
    /// The last flush is under way.
    flushing: bool,
}

/// A request that failed, with the tag of its slot.
struct Kept {
    tag: u64,
    op: Op,
    error: IoError,
}

impl Owner {
    pub(super) fn new() -> Self {
        Self {
            policy: ErrorPolicy::default(),
            observer: None,
            stopped: false,
            reporting: false,
            kept: Vec::new(),
            leaving: None,
            flushing: false,
        }
    }
}

impl Server {
    /// Whether requests are started.
    pub(super) fn serves(&self) -> bool {
        self.engine.is_some() && self.owner.leaving.is_none() && !self.owner.stopped
    }

    /// Does what the owner asks for.
    pub(super) fn answer_calls(&mut self) {
        loop {
            match self.calls.try_recv() {
                Ok(Call::Take(taken)) => {
                    if self.engine.is_some() && self.owner.leaving.is_none() {
                        self.owner.leaving = Some(taken);
                        self.release_waiting();
                    }
                }
                Ok(Call::Give(engine)) => self.arrive(engine),
                Ok(Call::Visit(visit)) => {
                    visit(self.engine.as_mut().and_then(|engine| engine.disk()));
                }
                Ok(Call::Policy(policy, observer)) => {
                    self.owner.policy = policy;
                    self.owner.observer = Some(observer);
                }
                Ok(Call::Retry) => {
                    self.owner.reporting = false;
                    self.owner.stopped = false;
                }
                Ok(Call::Report) => {
                    self.owner.reporting = true;
                    self.owner.stopped = false;
                    for Kept { tag, op, error } in std::mem::take(&mut self.owner.kept) {
                        self.complete(Completion {
                            tag,
                            result: Err(error),
                            op: Some(op),
                        });
                    }
                }
                Err(TryRecvError::Empty | TryRecvError::Disconnected) => break,
            }
        }
        if self.serves() {
            for Kept { tag, op, .. } in std::mem::take(&mut self.owner.kept) {
                self.submit(tag, op);
            }
        }
    }

    /// Lets requests go that wait for a limit: whoever waits for the last of them should not wait for that.
    pub(super) fn release_waiting(&mut self) {
        if let Some(disk) = self.engine.as_mut().and_then(|engine| engine.disk()) {
            disk.release_waiting();
        }
    }

    fn arrive(&mut self, engine: Box<dyn Engine>) {
        if let Some(size) = engine.size_bytes()
            && self.capacity.set(size)
        {
            self.parser.set_capacity(self.capacity.sectors());
            // One that has no queue yet reads the size when it starts.
            if let Some(lane) = self.lanes.iter().flatten().next() {
                lane.queue.configuration_changed();
            }
        }
        if let Some(refused) = self.engine.replace(engine)
            && let Err(error) = refused.close()
        {
            tracing::error!("closing a disk: {error}");
        }
    }

    /// Goes on with handing the disk over, as far as what is under way allows.
    pub(super) fn leave(&mut self) -> Progress {
        if self.owner.leaving.is_none() || self.in_engine > 0 || self.owner.flushing {
            return Progress::Idle;
        }
        self.owner.flushing = true;
        self.submit(FAREWELL, Op::Flush);
        Progress::More
    }

    /// Whether `completion` is not a guest's request, and is dealt with.
    pub(super) fn left(&mut self, completion: &Completion) -> bool {
        if completion.tag != FAREWELL {
            return false;
        }
        self.owner.flushing = false;
        match (self.owner.leaving.take(), self.engine.take()) {
            (Some(taken), Some(engine)) => taken(engine, completion.result.clone()),
            (_, engine) => self.engine = engine,
        }
        true
    }

    /// Keeps a request that failed, if that is what becomes of it.
    pub(super) fn keep(&mut self, tag: u64, op: Op, error: &IoError) -> Result<(), Op> {
        if self.owner.reporting || self.owner.policy.of(error) == OnError::Report {
            return Err(op);
        }
        count(&self.metrics.kept, 1);
        let first = !std::mem::replace(&mut self.owner.stopped, true);
        if first && let Some(observer) = &self.owner.observer {
            let (operation, offset) = describe(&op);
            observer(Stopped {
                operation,
                offset,
                error: error.clone(),
            });
        }
        self.owner.kept.push(Kept {
            tag,
            op,
            error: error.clone(),
        });
        Ok(())
    }

    /// Forgets requests that were kept for queues that are gone.
    pub(super) fn forget_kept(&mut self, scope: Scope) {
        for kept in std::mem::take(&mut self.owner.kept) {
            let lane = usize::try_from(kept.tag)
                .ok()
                .and_then(|place| self.slots.get(place)?.as_ref())
                .map(|slot| slot.lane);
            match (scope, lane) {
                (Scope::Queue(index), Some(lane)) if lane != index => self.owner.kept.push(kept),
                _ => self.end_operation(kept.tag),
            }
        }
    }

    /// One operation of a request whose queue is gone ended, whichever way.
    fn end_operation(&mut self, tag: u64) {
        let place = usize::try_from(tag).unwrap_or(usize::MAX);
        let Some(slot) = self.slots.get_mut(place).and_then(Option::as_mut) else {
            return;
        };
        slot.operations_left -= 1;
        slot.flush_after = false;
        slot.status = status::IOERR;
        if slot.operations_left == 0 {
            self.release(place);
        }
    }

    /// Frees the slot of a request that has ended, and answers it if its queue is still the one that it came from.
    pub(super) fn release(&mut self, place: usize) {
        let Some(slot) = self.slots.get_mut(place).and_then(Option::take) else {
            return;
        };
        self.free.push(place);
        if let Some(count) = self.under_way.get_mut(usize::from(slot.lane)) {
            *count -= 1;
        }
        let metrics = std::sync::Arc::clone(&self.metrics);
        if let Some(lane) = self.lane(slot.lane).filter(|lane| lane.epoch == slot.epoch) {
            lane.under_way -= 1;
            finish(&slot, &mut lane.queue, &metrics);
        }
    }
}

fn describe(op: &Op) -> (&'static str, Option<u64>) {
    match op {
        Op::Read { offset, .. } => ("read", Some(*offset)),
        Op::Write { offset, .. } => ("write", Some(*offset)),
        Op::Flush => ("flush", None),
        Op::Discard { offset, .. } => ("discard", Some(*offset)),
        Op::WriteZeroes { offset, .. } => ("write-zeroes", Some(*offset)),
    }
}
