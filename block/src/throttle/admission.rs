//! The requests of one disk that wait for a limit.

use std::collections::VecDeque;
use std::sync::Arc;

use super::{Cost, Direction, Member, Throttle};
use crate::disk::{Op, Request};
use crate::timer::{self, Timer};

const WAYS: [Direction; 2] = [Direction::Read, Direction::Write];

/// A request that waits, and since when.
struct Waiting {
    request: Request,
    cost: Cost,
    since: u64,
}

/// What may begin now and what waits.
pub(crate) struct Admission {
    member: Member,
    timer: Arc<Timer>,
    /// In order of arrival, reads and writes apart.
    waiting: [VecDeque<Waiting>; 2],
    /// Whether the first of each may begin.
    ready: [bool; 2],
}

/// What a request costs; `None` for a flush, which is never held up.
fn cost(op: &Op) -> Option<Cost> {
    let (direction, bytes) = match op {
        Op::Read { buffers, .. } => (Direction::Read, buffers.len() as u64),
        Op::Write { buffers, .. } => (Direction::Write, buffers.len() as u64),
        Op::Discard { .. } | Op::WriteZeroes { .. } => (Direction::Write, 0),
        Op::Flush => return None,
    };
    Some(Cost { direction, bytes })
}

impl Admission {
    pub(crate) fn new(throttle: &Arc<Throttle>, timer: &Arc<Timer>) -> Self {
        Self {
            member: throttle.join(timer),
            timer: Arc::clone(timer),
            waiting: [VecDeque::new(), VecDeque::new()],
            ready: [false; 2],
        }
    }

    /// Requests that wait.
    pub(crate) fn waiting(&self) -> usize {
        self.waiting.iter().map(VecDeque::len).sum()
    }

    /// Gives a request back that may begin at once; else keeps it.
    pub(crate) fn admit(&mut self, request: Request) -> Option<Request> {
        let Some(cost) = cost(&request.op) else {
            return Some(request);
        };
        let [reads, writes] = &mut self.waiting;
        let queue = match cost.direction {
            Direction::Read => reads,
            Direction::Write => writes,
        };
        if queue.is_empty() && self.member.ask(cost) {
            return Some(request);
        }
        queue.push_back(Waiting {
            request,
            cost,
            since: timer::now(),
        });
        None
    }

    /// The next request that may begin, and how many nanoseconds it has waited.
    pub(crate) fn next(&mut self) -> Option<(Request, u64)> {
        for (way, (queue, ready)) in WAYS
            .into_iter()
            .zip(self.waiting.iter_mut().zip(&mut self.ready))
        {
            if queue.is_empty() || !(std::mem::take(ready) || self.member.granted(way)) {
                continue;
            }
            let first = queue.pop_front()?;
            if let Some(second) = queue.front() {
                *ready = self.member.ask(second.cost);
            }
            return Some((first.request, timer::now().saturating_sub(first.since)));
        }
        None
    }

    /// All that wait, for a disk that is about to be closed or handed on: they begin at once, and what comes later pays for it.
    pub(crate) fn release(&mut self) -> Vec<Request> {
        let granted = self.member.leave_line();
        let mut all = Vec::with_capacity(self.waiting());
        for ((queue, ready), granted) in self.waiting.iter_mut().zip(&mut self.ready).zip(granted) {
            let mut paid = std::mem::take(ready) || granted;
            for waiting in queue.drain(..) {
                if !std::mem::take(&mut paid) {
                    self.member.overdraw(waiting.cost);
                }
                all.push(waiting.request);
            }
        }
        all
    }

    /// Stands in the line for an operation that is not in any queue, until it may begin; `meanwhile` is called now and then.
    pub(crate) fn wait_for(&self, op: &Op) -> Option<Wait> {
        let cost = cost(op)?;
        let member = self.member.throttle.join(&self.timer);
        let granted = member.ask(cost);
        (!granted).then_some(Wait {
            member,
            direction: cost.direction,
        })
    }
}

/// An operation in the line that is in no queue.
pub(crate) struct Wait {
    member: Member,
    direction: Direction,
}

impl Wait {
    /// Whether it may begin. Told once.
    pub(crate) fn is_over(&self) -> bool {
        self.member.granted(self.direction)
    }
}
