//! Threads under a scheduler that tries out what they may do to each other.
//!
//! The sources of what threads share are compiled here once more, over shuttle's locks, atomics and threads: `super::sync` is
//! [`sync`] for them. Each model runs through some thousands of schedules; one in which everybody waits for somebody is a failure.
//! `BLOCK_SCHEDULES` is their number.
#![allow(
    clippy::duplicate_mod,
    reason = "the same source over other locks is the point"
)]

#[path = "../io/pool.rs"]
#[allow(dead_code, reason = "a model uses its own part of it")]
mod pool;
mod sync;
#[path = "../timer.rs"]
#[allow(dead_code, reason = "a model uses its own part of it")]
mod timer;

use self::pool::Pool;
use self::timer::{Alarm, Timer};

/// What the pool takes from its neighbours.
mod queue {
    pub(super) const USUAL: usize = 8;
}

/// Calls that only count.
mod sys {
    use super::sync::{Arc, AtomicUsize, Ordering};

    #[derive(Clone, Debug)]
    pub(super) struct Call {
        pub(super) performed: Arc<AtomicUsize>,
        pub(super) result: i32,
    }

    pub(super) fn perform(call: &Call) -> i32 {
        call.performed.fetch_add(1, Ordering::SeqCst);
        call.result
    }
}

fn schedules() -> usize {
    let text = std::env::var("BLOCK_SCHEDULES").ok();
    text.and_then(|text| text.parse().ok()).unwrap_or(1000)
}

/// Half of the schedules at random, half with few changes of thread at the worst places.
fn try_out(model: impl Fn() + Send + Sync + Copy + 'static) {
    shuttle::check_random(model, schedules() / 2);
    shuttle::check_pct(model, schedules() / 2, 3);
}

#[test]
fn a_pool_performs_every_call_once_and_tells_of_it() {
    try_out(|| {
        let pool = Pool::new(None).unwrap();
        let performed = sync::Arc::new(sync::AtomicUsize::new(0));
        let call = |result| sys::Call {
            performed: sync::Arc::clone(&performed),
            result,
        };
        let mut results = Vec::new();
        for token in 0..6u64 {
            pool.push(token, call(token as i32 * 10));
            if token == 2 {
                pool.collect(true, &mut results).unwrap();
                assert!(!results.is_empty());
            }
        }
        while results.len() < 6 {
            pool.collect(true, &mut results).unwrap();
        }
        results.sort_unstable();
        let expected: Vec<_> = (0..6).map(|token| (token, token as i32 * 10)).collect();
        assert_eq!(results, expected);
        assert_eq!(performed.load(sync::Ordering::SeqCst), 6);
        pool.collect(false, &mut results).unwrap();
        assert_eq!(results.len(), 6);
    });
}

#[test]
fn whoever_waits_for_a_pools_event_and_only_then_collects_misses_nothing() {
    try_out(|| {
        let pool = Pool::new(None).unwrap();
        let performed = sync::Arc::new(sync::AtomicUsize::new(0));
        let mut results = Vec::new();
        for token in 0..4 {
            let performed = sync::Arc::clone(&performed);
            let result = 0;
            pool.push(token, sys::Call { performed, result });
        }
        while results.len() < 4 {
            sync::wait_for(pool.event());
            pool.collect(false, &mut results).unwrap();
        }
        assert!(!sync::is_raised(pool.event()), "nothing is left to tell of");
    });
}

#[test]
fn a_pool_that_is_dropped_performs_what_was_pushed() {
    try_out(|| {
        let performed = sync::Arc::new(sync::AtomicUsize::new(0));
        let pool = Pool::new(None).unwrap();
        for token in 0..3 {
            let performed = sync::Arc::clone(&performed);
            let result = 0;
            pool.push(token, sys::Call { performed, result });
        }
        drop(pool);
        assert_eq!(performed.load(sync::Ordering::SeqCst), 3);
    });
}

#[test]
fn an_alarm_set_by_another_thread_is_seen_by_the_owner() {
    try_out(|| {
        let timer = sync::Arc::new(Timer::new().unwrap());
        let asked = sync::Arc::new(sync::AtomicU64::new(0));
        let others: Vec<_> = [Alarm::Job, Alarm::Limit]
            .into_iter()
            .map(|alarm| {
                let (timer, asked) = (sync::Arc::clone(&timer), sync::Arc::clone(&asked));
                shuttle::thread::spawn(move || {
                    for _ in 0..2 {
                        asked.fetch_add(1, sync::Ordering::SeqCst);
                        timer.set(alarm, Some(0));
                    }
                })
            })
            .collect();
        // The owner looks only when the timer says so; in the end it has seen everything.
        let mut seen = 0;
        for _ in 0..3 {
            if timer.clear_due() {
                seen = asked.load(sync::Ordering::SeqCst);
            }
            shuttle::thread::yield_now();
        }
        for other in others {
            other.join().unwrap();
        }
        if timer.clear_due() {
            seen = asked.load(sync::Ordering::SeqCst);
        }
        assert_eq!(seen, 4, "a change that nobody was told of");
        assert!(!timer.clear_due());
    });
}
