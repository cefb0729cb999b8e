//! Limits on requests and bytes a second, for a disk or a group of disks.
//!
//! ```text
//!  submit ──> Admission ──(tokens there, nobody before it)──────────────> begins
//!               │ else                                                      ^
//!               └──> the disk's own queue; its head stands in the line ─────┘ when its turn and its tokens have come:
//!                    of all disks of the group                                the disk's timer says so
//! ```
//!
//! Of every disk one read and one write at most stand in the line. They are ordered by how much their disk has had, counted in time at
//! the tightest limit, so that disks of a group share fairly whatever size and number of requests they have. Who has to
//! wait for tokens of one direction lets the other direction pass; who has to wait for tokens of both holds up everybody after it, so
//! that a large request is not starved by small ones.
//!
//! Time is whole nanoseconds and tokens are whole numbers ([`bucket`]). Flushes are never held up: a flush makes durable what
//! completed before it, and what waits has not.

mod admission;
mod bucket;
mod limits;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub(crate) use self::admission::Admission;
pub use self::limits::{
    Burst, Directions, Limit, Limits, LimitsError, MAX_BURST_SECONDS, MAX_RATE,
};
use self::limits::{Direction, Rule, Unit};
use crate::timer::{self, Alarm, Timer};

/// Waits are no shorter than this, in nanoseconds: what flows in meanwhile is not lost, and the host sleeps longer.
const SHORTEST_WAIT: u64 = 1_000_000;
/// A waiter that is not the next looks by itself after so many nanoseconds, should the one before it be held up.
const IMPATIENCE: u64 = 20_000_000;

/// A disk that had less than the others is ahead of them by no more than this, in nanoseconds at the limit. It takes some credit to be
/// fair to those who come back for the next request a little later than others.
const CREDIT: u128 = 100_000_000;

/// Where the time comes from.
#[derive(Debug)]
enum Clock {
    Host,
    #[cfg(test)]
    Stepped(Arc<std::sync::atomic::AtomicU64>),
}

impl Clock {
    fn now(&self) -> u64 {
        match self {
            Self::Host => timer::now(),
            #[cfg(test)]
            Self::Stepped(now) => now.load(Ordering::SeqCst),
        }
    }
}

/// What a request costs.
#[derive(Clone, Copy, Debug)]
struct Cost {
    direction: Direction,
    bytes: u64,
}

impl Rule {
    /// What it takes for a request, if it is about such requests.
    fn price(&self, cost: Cost) -> Option<u64> {
        let concerned = self
            .direction
            .is_none_or(|direction| direction == cost.direction);
        concerned.then_some(match self.unit {
            Unit::Operations => 1,
            Unit::Bytes => cost.bytes,
        })
    }
}

/// The first request of a disk in one direction, which waits.
struct Waiter {
    /// How much its disk has had; orders the line.
    had: u128,
    member: u64,
    cost: Cost,
}

struct MemberState {
    timer: Arc<Timer>,
    /// How much it has had, in nanoseconds; see [`State::account`].
    had: u128,
    /// Whether its waiting read and write may begin.
    granted: [bool; 2],
}

/// Why a waiter stays in the line.
#[derive(PartialEq, Eq)]
enum Obstacle {
    None,
    /// Tokens of its own direction.
    Own,
    /// Tokens of both directions together.
    Shared,
}

struct State {
    limits: Limits,
    rules: Vec<Rule>,
    /// Up to when the buckets are filled.
    filled: u64,
    line: Vec<Waiter>,
    members: BTreeMap<u64, MemberState>,
    next_member: u64,
    /// What the one that was let in last had had: a disk that comes back from a rest has little claim to the time before.
    fair: u128,
}

/// Limits that one disk keeps to, or several together. They can be changed from any thread, also while requests wait.
pub struct Throttle {
    clock: Clock,
    limited: AtomicBool,
    state: Mutex<State>,
}

impl std::fmt::Debug for Throttle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Throttle({:?})", self.limits())
    }
}

impl Throttle {
    /// Limits for the disks that are opened with it.
    ///
    /// # Errors
    /// A number is out of its range.
    pub fn new(limits: Limits) -> Result<Arc<Self>, LimitsError> {
        Self::with_clock(limits, Clock::Host)
    }

    fn with_clock(limits: Limits, clock: Clock) -> Result<Arc<Self>, LimitsError> {
        limits.check()?;
        let state = State {
            limits,
            rules: limits.rules(),
            filled: clock.now(),
            line: Vec::new(),
            members: BTreeMap::new(),
            next_member: 0,
            fair: 0,
        };
        Ok(Arc::new(Self {
            clock,
            limited: AtomicBool::new(!limits.is_unlimited()),
            state: Mutex::new(state),
        }))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The limits in force.
    #[must_use]
    pub fn limits(&self) -> Limits {
        self.state().limits
    }

    /// Changes the limits at once, for requests that wait already as well.
    ///
    /// # Errors
    /// A number is out of its range; nothing has changed.
    pub fn set_limits(&self, limits: Limits) -> Result<(), LimitsError> {
        limits.check()?;
        let now = self.clock.now();
        let mut state = self.state();
        state.fill(now);
        let old = std::mem::replace(&mut state.rules, limits.rules());
        for rule in &mut state.rules {
            let same = |old: &&Rule| {
                (old.unit, old.direction, old.is_burst)
                    == (rule.unit, rule.direction, rule.is_burst)
            };
            if let Some(old) = old.iter().find(same) {
                rule.bucket.continue_from(&old.bucket);
            }
        }
        state.limits = limits;
        self.limited
            .store(!limits.is_unlimited(), Ordering::Release);
        state.run(now);
        Ok(())
    }

    /// A disk that keeps to these limits; `timer` says when its requests may begin.
    fn join(self: &Arc<Self>, timer: &Arc<Timer>) -> Member {
        let mut state = self.state();
        let id = state.next_member;
        state.next_member += 1;
        let member = MemberState {
            timer: Arc::clone(timer),
            had: state.fair,
            granted: [false; 2],
        };
        state.members.insert(id, member);
        drop(state);
        Member {
            throttle: Arc::clone(self),
            id,
        }
    }
}

impl State {
    fn fill(&mut self, now: u64) {
        let nanos = now.saturating_sub(self.filled);
        self.filled = self.filled.max(now);
        let awaited = !self.line.is_empty();
        for rule in &mut self.rules {
            rule.bucket.fill(nanos, awaited);
        }
    }

    fn obstacle(&self, cost: Cost) -> Obstacle {
        let mut found = Obstacle::None;
        for rule in &self.rules {
            match rule.price(cost) {
                Some(price) if !rule.bucket.is_ready(price) => {
                    if rule.direction.is_some() {
                        return Obstacle::Own;
                    }
                    found = Obstacle::Shared;
                }
                _ => {}
            }
        }
        found
    }

    fn nanos_until_ready(&self, cost: Cost) -> u64 {
        let waits = self.rules.iter().filter_map(|rule| {
            let price = rule.price(cost)?;
            Some(rule.bucket.nanos_until_ready(price))
        });
        waits.max().unwrap_or(0).max(SHORTEST_WAIT)
    }

    fn take(&mut self, cost: Cost) {
        for rule in &mut self.rules {
            if let Some(price) = rule.price(cost) {
                rule.bucket.take(price);
            }
        }
    }

    /// What a member had when its next request comes, and has then: the time that the request takes at the tightest limit on both
    /// directions together, which is what members compete for; without one, of its own direction.
    fn account(&mut self, member: u64, cost: Cost) -> u128 {
        let time = |shared: bool| {
            let rules = self
                .rules
                .iter()
                .filter(|rule| rule.direction.is_none() == shared);
            let times = rules.filter_map(|rule| Some(rule.bucket.nanos_of(rule.price(cost)?)));
            times.max()
        };
        let time = time(true).or_else(|| time(false)).unwrap_or(0);
        let oldest = self.fair.saturating_sub(CREDIT);
        let Some(state) = self.members.get_mut(&member) else {
            return oldest;
        };
        let had = state.had.max(oldest);
        state.had = had.saturating_add(time);
        had
    }

    /// Puts a request into the line.
    fn enter(&mut self, member: u64, cost: Cost) {
        let had = self.account(member, cost);
        let place = self.line.partition_point(|other| other.had <= had);
        self.line.insert(place, Waiter { had, member, cost });
    }

    /// Lets in whom there are tokens for, in order, and wakes whoever has to look again.
    fn run(&mut self, now: u64) {
        self.fill(now);
        let mut passed = [false; 2];
        let mut place = 0;
        while let Some(waiter) = self.line.get(place) {
            let (member, cost, had) = (waiter.member, waiter.cost, waiter.had);
            let way = cost.direction as usize;
            if passed.get(way).copied().unwrap_or(true) {
                place += 1;
                continue;
            }
            let obstacle = self.obstacle(cost);
            if obstacle == Obstacle::None {
                self.take(cost);
                self.line.remove(place);
                self.fair = self.fair.max(had);
                if let Some(member) = self.members.get_mut(&member) {
                    if let Some(granted) = member.granted.get_mut(way) {
                        *granted = true;
                    }
                    member.timer.advance(Alarm::Limit, now);
                }
                continue;
            }
            let at = now.saturating_add(self.nanos_until_ready(cost));
            if let Some(member) = self.members.get(&member) {
                member.timer.advance(Alarm::Limit, at);
            }
            if obstacle == Obstacle::Shared {
                return;
            }
            if let Some(passed) = passed.get_mut(way) {
                *passed = true;
            }
            place += 1;
        }
    }
}

/// A disk under limits.
pub(crate) struct Member {
    throttle: Arc<Throttle>,
    id: u64,
}

impl Member {
    /// Whether a request may begin now. If not, it stands in the line from now on, and [`Member::granted`] says when it may; until
    /// then none must be asked for in its direction.
    fn ask(&self, cost: Cost) -> bool {
        if !self.throttle.limited.load(Ordering::Acquire) {
            return true;
        }
        let now = self.throttle.clock.now();
        let mut state = self.throttle.state();
        // Before anybody waits: the time up to now was not waited for.
        state.fill(now);
        state.enter(self.id, cost);
        state.run(now);
        self.collect(&mut state, now, cost.direction)
    }

    /// Whether the request that waits in a direction may begin. It is told once.
    fn granted(&self, direction: Direction) -> bool {
        let now = self.throttle.clock.now();
        let mut state = self.throttle.state();
        state.run(now);
        self.collect(&mut state, now, direction)
    }

    fn collect(&self, state: &mut State, now: u64, direction: Direction) -> bool {
        let Some(member) = state.members.get_mut(&self.id) else {
            return true;
        };
        let granted = member.granted.get_mut(direction as usize);
        let granted = granted.is_some_and(std::mem::take);
        // Who is next has its alarm set. Others do not depend on its being answered.
        let behind = state.line.iter().any(|waiter| waiter.member != self.id);
        if !granted && behind {
            let at = now.saturating_add(IMPATIENCE);
            member.timer.advance(Alarm::Limit, at);
        }
        granted
    }

    /// Takes what a request costs though it has not waited; those who come later wait longer for it.
    fn overdraw(&self, cost: Cost) {
        let now = self.throttle.clock.now();
        let mut state = self.throttle.state();
        state.fill(now);
        state.account(self.id, cost);
        state.take(cost);
    }

    /// Leaves the line; whether a request had been let in meanwhile, in each direction.
    fn leave_line(&self) -> [bool; 2] {
        let mut state = self.throttle.state();
        state.line.retain(|waiter| waiter.member != self.id);
        let member = state.members.get_mut(&self.id);
        member.map_or([false; 2], |member| std::mem::take(&mut member.granted))
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        let now = self.throttle.clock.now();
        let mut state = self.throttle.state();
        state.members.remove(&self.id);
        state.line.retain(|waiter| waiter.member != self.id);
        state.run(now);
    }
}
