//! Transfers that are under way while their task waits: a table of calls over a back end that performs them.
//!
//! ```text
//!  task ──poll──> entry: waiting(waker) ──push──> Ring (io_uring) | Pool (threads)
//!   ^                                                │ token, result
//!   └──wake── entry: done(result) <──────────turn()──┘
//! ```
//!
//! What is in the host's memory is not worth waking somebody for: such transfers are made on the spot ([`super::pace`]).
//!
//! A transfer's memory must stay where it is until the call is over: a future that is dropped before waits for it.
#![allow(unsafe_code)]

use std::future::Future;
use std::io;
use std::marker::PhantomData;
use std::os::fd::{BorrowedFd, RawFd};
use std::pin::Pin;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use rustix::fs::FallocateFlags;

use super::FileIo;
use super::pace::Paces;
use super::pool::Pool;
use super::ring::Ring;
#[cfg(test)]
use super::shuffle::Shuffle;
use super::sys::{Action, Call};
use crate::buffers::RawSlice;
use crate::options::ThreadStart;

/// Calls under way for which there is room from the beginning.
pub(super) const USUAL: usize = 256;

/// What performs calls.
pub(super) enum Back {
    Ring(Box<Ring>),
    Pool(Pool),
    #[cfg(test)]
    Shuffle(Shuffle),
}

enum Entry {
    Free,
    Waiting(Waker),
    Done(i32),
}

struct Calls {
    entries: Vec<Entry>,
    free: Vec<usize>,
    back: Back,
    /// Begun and not handed over.
    staged: Vec<(u64, Call)>,
    /// Handed over and not delivered.
    under_way: usize,
    paces: Paces,
    /// Results on their way from the back end to the entries.
    results: Vec<(u64, i32)>,
}

/// The calls of one disk.
pub(crate) struct Queue {
    calls: Mutex<Calls>,
    event: RawFd,
}

impl Queue {
    /// Calls performed by an io_uring that can do nothing but transfers on the files of `fds`.
    pub(crate) fn ring(fds: &[RawFd]) -> io::Result<Self> {
        Ok(Self::new(Back::Ring(Box::new(Ring::new(fds)?))))
    }

    /// Calls performed by threads.
    pub(crate) fn threads(start: Option<&ThreadStart>) -> io::Result<Self> {
        Ok(Self::new(Back::Pool(Pool::new(start)?)))
    }

    /// Calls performed in an order that a test's random numbers choose.
    #[cfg(test)]
    pub(crate) fn shuffle(seed: u64) -> Self {
        Self::new(Back::Shuffle(Shuffle::new(seed)))
    }

    fn new(back: Back) -> Self {
        let event = match &back {
            Back::Ring(ring) => ring.event(),
            Back::Pool(pool) => pool.event(),
            #[cfg(test)]
            Back::Shuffle(_) => -1,
        };
        Self {
            calls: Mutex::new(Calls {
                entries: Vec::new(),
                free: Vec::new(),
                back,
                staged: Vec::with_capacity(USUAL),
                under_way: 0,
                paces: Paces::default(),
                results: Vec::with_capacity(USUAL),
            }),
            event,
        }
    }

    fn calls(&self) -> MutexGuard<'_, Calls> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Readable while calls are over that [`Queue::turn`] has not collected.
    pub(crate) fn event(&self) -> Option<BorrowedFd<'_>> {
        // SAFETY: the descriptor belongs to the back end, which lives as long as the queue and is never replaced.
        (self.event >= 0).then(|| unsafe { BorrowedFd::borrow_raw(self.event) })
    }

    /// Hands what was begun to the back end and collects what is over, waking its tasks; with `wait` not before something is.
    pub(crate) fn turn(&self, wait: bool) -> io::Result<()> {
        self.calls().turn(wait)
    }

    fn transfer<'a>(&'a self, fd: BorrowedFd<'a>, action: Action) -> Transfer<'a> {
        Transfer {
            queue: self,
            // SAFETY: the caller's future keeps file and slices borrowed while this lives, and this lives until the call is over:
            // its drop waits.
            call: unsafe { Call::new(fd, action) },
            token: None,
            memory: PhantomData,
        }
    }
}

impl Calls {
    fn begin(&mut self, call: Call, waker: &Waker) -> usize {
        let token = self.free.pop().unwrap_or_else(|| {
            self.entries.push(Entry::Free);
            let all = self.entries.len();
            self.free.reserve(all);
            all - 1
        });
        self.staged.push((token as u64, call));
        if let Some(entry) = self.entries.get_mut(token) {
            *entry = Entry::Waiting(waker.clone());
        }
        token
    }

    fn turn(&mut self, wait: bool) -> io::Result<()> {
        self.paces.turn(self.staged.len(), self.under_way > 0);
        let result = self.hand_over();
        let result = result.and_then(|()| {
            // What is over already is worth more than waiting for the rest.
            let wait = wait && self.results.is_empty() && self.under_way > 0;
            match &mut self.back {
                Back::Ring(ring) => ring.submit(wait, &mut self.results),
                Back::Pool(pool) => pool.collect(wait, &mut self.results),
                #[cfg(test)]
                Back::Shuffle(shuffle) => {
                    shuffle.collect(&mut self.results);
                    Ok(())
                }
            }
        });
        self.deliver();
        result
    }

    /// Makes a transfer on the spot, if that promises to be quick.
    fn try_now(&mut self, call: &Call) -> Option<i32> {
        #[cfg(test)]
        if matches!(self.back, Back::Shuffle(_)) {
            return None;
        }
        let others = self.under_way > 0 || !self.staged.is_empty();
        self.paces.try_now(call, others)
    }

    fn hand_over(&mut self) -> io::Result<()> {
        let mut handed = 0;
        let mut result = Ok(());
        for (token, call) in &self.staged {
            result = match &mut self.back {
                Back::Ring(ring) => loop {
                    match ring.push(*token, call) {
                        Ok(true) => break Ok(()),
                        // Full: what is queued goes to the kernel, and if that is full too, results are collected first.
                        Ok(false) => {
                            if let Err(error) = ring.submit(false, &mut self.results) {
                                break Err(error);
                            }
                        }
                        // A file that is not registered: the call's own failure.
                        Err(error) => {
                            let errno = error.raw_os_error().unwrap_or(libc::EBADF);
                            self.results.push((*token, -errno));
                            break Ok(());
                        }
                    }
                },
                Back::Pool(pool) => {
                    pool.push(*token, *call);
                    Ok(())
                }
                #[cfg(test)]
                Back::Shuffle(shuffle) => {
                    shuffle.push(*token, *call);
                    Ok(())
                }
            };
            if result.is_err() {
                break;
            }
            handed += 1;
        }
        self.under_way += handed;
        self.staged.drain(..handed);
        result
    }

    fn deliver(&mut self) {
        self.under_way -= self.results.len().min(self.under_way);
        for (token, result) in self.results.drain(..) {
            let entry = usize::try_from(token)
                .ok()
                .and_then(|n| self.entries.get_mut(n));
            if let Some(entry) = entry
                && let Entry::Waiting(waker) = std::mem::replace(entry, Entry::Done(result))
            {
                waker.wake();
            }
        }
    }
}

/// One call; its result is what the system call gives, errors as negative numbers.
struct Transfer<'a> {
    queue: &'a Queue,
    call: Call,
    token: Option<usize>,
    memory: PhantomData<&'a [RawSlice]>,
}

/// A system call's result as the kernel gives it: -4095..0 is an error number.
fn outcome(result: i32) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::from_raw_os_error(result.saturating_neg()))
}

impl Future for Transfer<'_> {
    type Output = io::Result<usize>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let queue = self.queue;
        let mut calls = queue.calls();
        let Some(token) = self.token else {
            if let Some(result) = calls.try_now(&self.call) {
                return Poll::Ready(outcome(result));
            }
            self.token = Some(calls.begin(self.call, context.waker()));
            return Poll::Pending;
        };
        let Some(entry) = calls.entries.get_mut(token) else {
            return Poll::Pending;
        };
        match entry {
            Entry::Done(result) => {
                let result = *result;
                *entry = Entry::Free;
                calls.free.push(token);
                drop(calls);
                self.token = None;
                Poll::Ready(outcome(result))
            }
            Entry::Waiting(waker) => {
                if !waker.will_wake(context.waker()) {
                    waker.clone_from(context.waker());
                }
                Poll::Pending
            }
            Entry::Free => Poll::Pending,
        }
    }
}

impl Drop for Transfer<'_> {
    fn drop(&mut self) {
        let Some(token) = self.token.take() else {
            return;
        };
        let mut calls = self.queue.calls();
        while matches!(calls.entries.get(token), Some(Entry::Waiting(_))) {
            // Its memory may be written until it is over; there is no other way out than to wait.
            if calls.turn(true).is_err() {
                std::thread::yield_now();
            }
        }
        if let Some(entry) = calls.entries.get_mut(token) {
            *entry = Entry::Free;
        }
        calls.free.push(token);
    }
}

impl FileIo for Queue {
    async fn readv(&self, fd: BorrowedFd<'_>, at: u64, slices: &[RawSlice]) -> io::Result<usize> {
        let (slices, count) = (slices.as_ptr(), slices.len());
        let read = || Action::Read { at, slices, count };
        retry(|| self.transfer(fd, read())).await
    }

    async fn writev(&self, fd: BorrowedFd<'_>, at: u64, slices: &[RawSlice]) -> io::Result<usize> {
        let (slices, count) = (slices.as_ptr(), slices.len());
        let write = || Action::Write { at, slices, count };
        retry(|| self.transfer(fd, write())).await
    }

    async fn fdatasync(&self, fd: BorrowedFd<'_>) -> io::Result<()> {
        retry(|| self.transfer(fd, Action::Sync)).await.map(|_| ())
    }

    async fn fallocate(
        &self,
        fd: BorrowedFd<'_>,
        mode: FallocateFlags,
        at: u64,
        length: u64,
    ) -> io::Result<()> {
        let allocate = || Action::Allocate { mode, at, length };
        retry(|| self.transfer(fd, allocate())).await.map(|_| ())
    }
}

async fn retry<'a>(call: impl Fn() -> Transfer<'a>) -> io::Result<usize> {
    loop {
        match call().await {
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock
                ) => {}
            other => return other,
        }
    }
}
