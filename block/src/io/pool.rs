//! The thread pool back end, for hosts that forbid io_uring, which pods usually do.
//!
//! ```text
//!  push ──> jobs ──> worker: one system call ──> results ──> collect
//!                                                  └─ eventfd, written when the first result of a batch arrives
//! ```
//!
//! Threads are made when the pool is, so that they inherit the sandbox of that moment and none is ever started later. Each can narrow it
//! before anything else ([`ThreadStart`]).

use std::collections::VecDeque;
use std::io;
use std::os::fd::RawFd;

use super::queue::USUAL;
use super::sync::{Arc, Condvar, Event, JoinHandle, Mutex, MutexGuard, PoisonError, spawn};
use super::sys::{Call, perform};
use crate::options::ThreadStart;

/// Calls that are performed at the same time.
const THREADS: usize = 8;

struct Jobs {
    waiting: VecDeque<(u64, Call)>,
    closed: bool,
}

struct Shared {
    jobs: Mutex<Jobs>,
    work: Condvar,
    results: Mutex<Vec<(u64, i32)>>,
    event: Event,
}

pub(super) struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Pool {
    pub(super) fn new(start: Option<&ThreadStart>) -> io::Result<Self> {
        let event = Event::new()?;
        let shared = Arc::new(Shared {
            jobs: Mutex::new(Jobs {
                waiting: VecDeque::with_capacity(USUAL),
                closed: false,
            }),
            work: Condvar::new(),
            results: Mutex::new(Vec::with_capacity(USUAL)),
            event,
        });
        let mut pool = Self {
            shared,
            workers: Vec::with_capacity(THREADS),
        };
        for n in 0..THREADS {
            let shared = Arc::clone(&pool.shared);
            let name = format!("block-io-{n}");
            let start = start.cloned();
            let worker = spawn(name, move || {
                if let Some(start) = start {
                    start.run();
                }
                work(&shared);
            })?;
            pool.workers.push(worker);
        }
        Ok(pool)
    }

    pub(super) fn event(&self) -> RawFd {
        self.shared.event.fd()
    }

    /// Queues a call. Its memory must stay valid until its result is there, which [`super::queue`] sees to.
    pub(super) fn push(&self, token: u64, call: Call) {
        lock(&self.shared.jobs).waiting.push_back((token, call));
        self.shared.work.notify_one();
    }

    /// Collects results; with `wait` not before there is one.
    pub(super) fn collect(&self, wait: bool, results: &mut Vec<(u64, i32)>) -> io::Result<()> {
        loop {
            {
                let mut there = lock(&self.shared.results);
                if !there.is_empty() {
                    // Written once since the list was empty; clearing it under the lock loses no later one.
                    self.shared.event.clear()?;
                    results.append(&mut there);
                    return Ok(());
                }
            }
            if !wait {
                return Ok(());
            }
            self.shared.event.wait()?;
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        lock(&self.shared.jobs).closed = true;
        self.shared.work.notify_all();
        for worker in self.workers.drain(..) {
            // A worker cannot panic; if it did, there is nothing left of it to care for.
            let _ = worker.join();
        }
    }
}

fn work(shared: &Shared) {
    loop {
        let (token, call) = {
            let mut jobs = lock(&shared.jobs);
            loop {
                if let Some(job) = jobs.waiting.pop_front() {
                    break job;
                }
                if jobs.closed {
                    return;
                }
                jobs = shared
                    .work
                    .wait(jobs)
                    .unwrap_or_else(PoisonError::into_inner);
            }
        };
        let result = perform(&call);
        let mut results = lock(&shared.results);
        if results.is_empty() {
            shared.event.raise();
        }
        results.push((token, result));
    }
}
