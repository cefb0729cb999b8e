//! Limits over simulated time: the clock steps to the next alarm, and only disks whose alarm goes off look whether they may go on.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use proptest::prelude::*;

use super::*;

const SECOND: u64 = 1_000_000_000;

/// A disk that always has `depth` requests, each like the next of `costs`.
struct Load {
    member: Member,
    timer: Arc<Timer>,
    costs: VecDeque<Cost>,
    depth: usize,
    /// Requests that wait, by direction.
    waiting: [VecDeque<Cost>; 2],
    /// What has begun: when, and what it cost.
    begun: Vec<(u64, Cost)>,
}

impl Load {
    /// Submits requests, each over as soon as it begins, until as many wait as the disk has at a time.
    fn fill(&mut self, now: u64) {
        while self.waiting.iter().map(VecDeque::len).sum::<usize>() < self.depth {
            self.submit_one(now);
            assert!(self.begun.len() < 10_000_000, "no limit is kept");
        }
    }

    fn submit_one(&mut self, now: u64) {
        let cost = self.costs.pop_front().unwrap();
        self.costs.push_back(cost);
        let queue = &mut self.waiting[cost.direction as usize];
        if queue.is_empty() && self.member.ask(cost) {
            self.begun.push((now, cost));
        } else {
            queue.push_back(cost);
        }
    }

    /// What a disk does when it is polled; whether anything began.
    fn look(&mut self, now: u64) -> bool {
        let mut any = false;
        for way in [Direction::Read, Direction::Write] {
            let queue = &mut self.waiting[way as usize];
            let mut ready = !queue.is_empty() && self.member.granted(way);
            while ready {
                self.begun.push((now, queue.pop_front().unwrap()));
                any = true;
                ready = queue.front().is_some_and(|next| self.member.ask(*next));
            }
        }
        any
    }

    fn bytes(&self, from: u64, to: u64) -> u64 {
        let inside = self.begun.iter().filter(|(at, _)| (from..to).contains(at));
        inside.map(|(_, cost)| cost.bytes).sum()
    }

    fn count(&self, from: u64, to: u64) -> u64 {
        let inside = self.begun.iter().filter(|(at, _)| (from..to).contains(at));
        inside.count() as u64
    }
}

struct World {
    now: Arc<AtomicU64>,
    throttle: Arc<Throttle>,
    loads: Vec<Load>,
}

impl World {
    fn new(limits: Limits) -> Self {
        let now = Arc::new(AtomicU64::new(SECOND));
        let throttle = Throttle::with_clock(limits, Clock::Stepped(Arc::clone(&now))).unwrap();
        Self {
            now,
            throttle,
            loads: Vec::new(),
        }
    }

    fn now(&self) -> u64 {
        self.now.load(Ordering::SeqCst)
    }

    fn add(&mut self, depth: usize, costs: &[Cost]) {
        let timer = Arc::new(Timer::new().unwrap());
        let mut load = Load {
            member: self.throttle.join(&timer),
            timer,
            costs: costs.iter().copied().collect(),
            depth,
            waiting: [VecDeque::new(), VecDeque::new()],
            begun: Vec::new(),
        };
        load.fill(self.now());
        self.loads.push(load);
    }

    /// Runs for so long; every request is followed by another one. `late` nanoseconds pass before an alarm is answered.
    fn run(&mut self, nanos: u64, late: u64) {
        let end = self.now() + nanos;
        loop {
            let next = self.loads.iter().map(|load| load.timer.earliest()).min();
            let next = next.unwrap().saturating_add(late);
            if next >= end {
                self.now.store(end, Ordering::SeqCst);
                return;
            }
            let now = self.now().max(next);
            self.now.store(now, Ordering::SeqCst);
            for load in &mut self.loads {
                if !load.timer.clear_due_at(now) {
                    continue;
                }
                while load.look(now) {}
                load.fill(now);
            }
        }
    }
}

fn read(bytes: u64) -> Cost {
    Cost {
        direction: Direction::Read,
        bytes,
    }
}

fn write(bytes: u64) -> Cost {
    Cost {
        direction: Direction::Write,
        bytes,
    }
}

fn operations(limit: impl Into<Limit>) -> Limits {
    Limits {
        operations: Directions {
            total: Some(limit.into()),
            ..Directions::default()
        },
        ..Limits::default()
    }
}

fn bytes(limit: impl Into<Limit>) -> Limits {
    Limits {
        bytes: Directions {
            total: Some(limit.into()),
            ..Directions::default()
        },
        ..Limits::default()
    }
}

/// Asserts that `actual` is within 2 % of `wanted`, or within `slack`.
#[track_caller]
fn assert_near(actual: u64, wanted: u64, slack: u64) {
    let off = actual.abs_diff(wanted);
    assert!(
        off <= slack.max(wanted / 50),
        "{actual} is not {wanted} within 2 % or {slack}"
    );
}

#[test]
fn the_rate_of_requests_is_the_limit_whatever_the_depth() {
    for rate in [1, 3, 10, 100, 1_000, 17_777] {
        for depth in [1, 32] {
            let mut world = World::new(operations(rate));
            world.add(depth, &[read(4096)]);
            world.run(SECOND, 0);
            let from = world.now();
            let seconds = if rate < 100 { 200 } else { 10 };
            world.run(seconds * SECOND, 0);
            let count = world.loads[0].count(from, world.now());
            assert_near(count, rate * seconds, 2);
        }
    }
}

#[test]
fn the_rate_is_kept_when_wakeups_come_late() {
    for late in [100_000, 3_000_000, 60_000_000] {
        let mut world = World::new(operations(1_000));
        world.add(32, &[read(4096)]);
        world.add(32, &[write(4096)]);
        world.run(SECOND, late);
        let from = world.now();
        world.run(20 * SECOND, late);
        let count: u64 = world.loads.iter().map(|l| l.count(from, world.now())).sum();
        assert_near(count, 20_000, 0);
    }
}

#[test]
fn requests_larger_than_the_bucket_pass_at_the_rate() {
    let mut world = World::new(bytes(100_000));
    world.add(4, &[write(1 << 20), write(512)]);
    world.run(1_000 * SECOND, 0);
    let load = &world.loads[0];
    assert_near(load.bytes(0, world.now()), 100_000_000, 2 << 20);
}

#[test]
fn a_large_request_is_not_starved_by_small_ones() {
    let mut world = World::new(bytes(1 << 20));
    world.add(64, &[read(4096)]);
    world.add(1, &[write(16 << 20)]);
    world.run(200 * SECOND, 0);
    let half = 100 << 20;
    assert_near(world.loads[0].bytes(0, world.now()), half, 33 << 20);
    assert_near(world.loads[1].bytes(0, world.now()), half, 33 << 20);
}

#[test]
fn a_burst_lasts_as_long_as_stated_and_comes_again_after_a_rest() {
    let limit = Limit {
        rate: 100,
        burst: Some(Burst {
            rate: 1_000,
            seconds: 5,
        }),
    };
    let mut world = World::new(operations(limit));
    let start = world.now();
    world.add(16, &[read(0)]);
    world.run(5 * SECOND, 0);
    let fast = world.loads[0].count(start, world.now());
    // A tenth of a second's worth more at the very beginning.
    assert_near(fast, 5_000, 100);
    let from = world.now() + SECOND;
    world.run(21 * SECOND, 0);
    assert_near(world.loads[0].count(from, world.now()), 2_000, 2);
    world.loads.clear();
    world.run_alone(100 * SECOND);
    let from = world.now();
    world.add(16, &[read(0)]);
    world.run(5 * SECOND, 0);
    assert_near(world.loads[0].count(from, world.now()), 5_000, 100);
}

impl World {
    fn run_alone(&mut self, nanos: u64) {
        self.now.fetch_add(nanos, Ordering::SeqCst);
    }
}

#[test]
fn a_group_shares_bytes_fairly_whatever_its_members_ask_for() {
    let mut world = World::new(bytes(16 << 20));
    world.add(64, &[read(4096)]);
    world.add(1, &[write(256 << 10)]);
    world.add(8, &[read(64 << 10), write(512)]);
    world.run(SECOND, 0);
    let from = world.now();
    world.run(15 * SECOND, 0);
    for load in &world.loads {
        assert_near(load.bytes(from, world.now()), 5 * (16 << 20), 0);
    }
}

#[test]
fn a_group_shares_requests_fairly_and_a_newcomer_gets_no_more() {
    let mut world = World::new(operations(300));
    world.add(64, &[read(4096)]);
    world.add(2, &[write(1 << 20)]);
    world.run(20 * SECOND, 0);
    world.add(32, &[read(512)]);
    world.run(SECOND, 0);
    let from = world.now();
    world.run(20 * SECOND, 0);
    for load in &world.loads {
        assert_near(load.count(from, world.now()), 2_000, 0);
    }
}

#[test]
fn a_member_that_leaves_makes_room_for_the_others() {
    let mut world = World::new(operations(1_000));
    world.add(16, &[read(0)]);
    world.add(16, &[read(0)]);
    world.run(3 * SECOND, 0);
    world.loads.remove(0);
    let from = world.now();
    world.run(20 * SECOND, 0);
    assert_near(world.loads[0].count(from, world.now()), 20_000, 0);
}

#[test]
fn directions_have_limits_of_their_own_and_one_together() {
    let limits = Limits {
        operations: Directions {
            total: Some(1_000.into()),
            read: None,
            write: Some(100.into()),
        },
        ..Limits::default()
    };
    let mut world = World::new(limits);
    world.add(32, &[read(4096)]);
    world.add(32, &[write(4096)]);
    world.run(SECOND, 0);
    let from = world.now();
    world.run(30 * SECOND, 0);
    assert_near(world.loads[0].count(from, world.now()), 27_000, 0);
    assert_near(world.loads[1].count(from, world.now()), 3_000, 0);
}

#[test]
fn a_new_limit_wakes_those_who_wait_for_the_old_one() {
    let mut world = World::new(operations(1));
    world.add(8, &[read(0)]);
    world.run(3 * SECOND, 0);
    let from = world.now();
    world.throttle.set_limits(operations(1_000)).unwrap();
    world.run(10 * SECOND, 0);
    assert_near(world.loads[0].count(from, world.now()), 10_000, 100);
    let waiting = |world: &World| world.loads[0].waiting[0].len();
    assert_eq!(waiting(&world), 8);
    world.throttle.set_limits(Limits::default()).unwrap();
    assert!(world.loads[0].timer.earliest() <= world.now());
    let now = world.now();
    while world.loads[0].look(now) {}
    assert_eq!(waiting(&world), 0);
}

#[test]
fn a_debt_lasts_as_long_under_a_new_limit_as_under_the_old_one() {
    let mut world = World::new(bytes(1 << 20));
    // Ten seconds' worth, at once.
    world.add(1, &[read(10 << 20)]);
    world.throttle.set_limits(bytes(1 << 10)).unwrap();
    let from = world.now();
    world.run(9 * SECOND, 0);
    assert_eq!(world.loads[0].count(from + 1, world.now()), 0);
    world.run(2 * SECOND, 0);
    assert_eq!(world.loads[0].count(from + 1, world.now()), 1);
}

#[test]
fn hours_lose_nothing_to_rounding() {
    let mut world = World::new(operations(7));
    world.add(3, &[read(0)]);
    let seconds = 3_000;
    let from = world.now();
    world.run(seconds * SECOND, 0);
    let count = world.loads[0].count(from, world.now());
    assert!(count.abs_diff(7 * seconds) <= 2, "{count}");
}

#[test]
fn limits_out_of_range_are_refused_by_name() {
    let refusal = |limits: Limits| Throttle::new(limits).expect_err("it is out of range");
    assert_eq!(refusal(operations(0)).name, "operations.total");
    assert_eq!(refusal(bytes(MAX_RATE + 1)).name, "bytes.total");
    let slow = Burst {
        rate: 9,
        seconds: 1,
    };
    let limit = Limit {
        rate: 10,
        burst: Some(slow),
    };
    assert!(refusal(bytes(limit)).reason.contains("at least as fast"));
    let endless = Burst {
        rate: 10,
        seconds: 0,
    };
    let limit = Limit {
        burst: Some(endless),
        ..limit
    };
    assert!(refusal(bytes(limit)).reason.contains("seconds"));
    let throttle = Throttle::new(operations(5)).unwrap();
    throttle.set_limits(operations(0)).unwrap_err();
    assert_eq!(throttle.limits(), operations(5));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 16, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_window_of_time_gets_more_than_the_rate_and_a_bucket(
        rate in 1_000u64..1_000_000,
        loads in prop::collection::vec((1usize..20, 100u64..200_000, any::<bool>()), 1..4),
        late in 0u64..5_000_000,
    ) {
        let mut world = World::new(bytes(rate));
        for (depth, size, is_write) in &loads {
            world.add(*depth, &[if *is_write { write(*size) } else { read(*size) }]);
        }
        let start = world.now();
        world.run(20 * SECOND, late);
        let end = world.now();
        let largest = loads.iter().map(|(_, size, _)| *size).max().unwrap();
        let all = |from, to| world.loads.iter().map(|load| load.bytes(from, to)).sum::<u64>();
        for (from, to) in [(start, end), (start + 7 * SECOND, end), (start + 3 * SECOND, start + 4 * SECOND)] {
            let most = rate * (to - from) / SECOND + 2 * (rate / 10 + 1) + largest;
            prop_assert!(all(from, to) <= most, "{} > {most}", all(from, to));
        }
        let least = rate * 20 - rate / 2;
        prop_assert!(all(start, end) + 2 * largest * loads.len() as u64 >= least);
        // Whoever waits gets something once the others' largest requests are paid for.
        if 20 * rate > 4 * largest * loads.len() as u64 {
            for load in &world.loads {
                prop_assert!(load.begun.len() > 1);
            }
        }
    }
}
