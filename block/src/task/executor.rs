//! The executor of one disk: its requests as futures that run on the thread that owns the disk.
//!
//! ```text
//!  start(argument) ──> slot: future ──poll──> result
//!                        ^        └─pending─> its waker puts the slot on the ready list ──> run()
//!                        └── used again: a request that finds a slot free allocates nothing
//! ```
#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Wake, Waker};

/// A place for a future of a type that has no name, filled again and again.
trait Task<A, T> {
    fn start(&mut self, argument: A);
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<T>;
}

struct Place<C, A, F> {
    core: Rc<C>,
    serve: fn(Rc<C>, A) -> F,
    future: Pin<Box<Option<F>>>,
}

impl<C, A, T, F: Future<Output = T>> Task<A, T> for Place<C, A, F> {
    fn start(&mut self, argument: A) {
        let future = (self.serve)(Rc::clone(&self.core), argument);
        self.future.as_mut().set(Some(future));
    }

    fn poll(&mut self, context: &mut Context<'_>) -> Poll<T> {
        let Some(future) = self.future.as_mut().as_pin_mut() else {
            return Poll::Pending;
        };
        let result = future.poll(context);
        if result.is_ready() {
            self.future.as_mut().set(None);
        }
        result
    }
}

/// Slots whose futures want to be polled.
#[derive(Default)]
struct Ready(Mutex<VecDeque<usize>>);

impl Ready {
    fn list(&self) -> MutexGuard<'_, VecDeque<usize>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct SlotWaker {
    slot: usize,
    queued: AtomicBool,
    ready: Arc<Ready>,
}

impl Wake for SlotWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if !self.queued.swap(true, Ordering::AcqRel) {
            self.ready.list().push_back(self.slot);
        }
    }
}

struct Slot<A, T> {
    task: Box<dyn Task<A, T>>,
    state: Arc<SlotWaker>,
    waker: Waker,
}

/// Runs futures that `serve` makes of a shared core and an argument.
pub(crate) struct Executor<C, A, T> {
    core: Rc<C>,
    new_task: fn(Rc<C>) -> Box<dyn Task<A, T>>,
    slots: Vec<Slot<A, T>>,
    free: Vec<usize>,
    ready: Arc<Ready>,
}

// SAFETY: every clone of `core` is in `core` itself, in a slot, or in the future of a slot, all of which move with the executor;
// `Executor::shared` is for the duration of a call, and futures are made from (core, argument) alone. Wakers are `Send` of their own.
unsafe impl<C: Send, A: Send, T: Send> Send for Executor<C, A, T> {}

/// How an executor makes a future of its core and an argument.
pub(crate) trait Serve<A, T>: Sized + 'static {
    /// Serves one request.
    fn serve(core: Rc<Self>, argument: A) -> impl Future<Output = T> + 'static;
}

impl<C: Serve<A, T>, A: 'static, T: 'static> Executor<C, A, T> {
    pub(crate) fn new(core: C) -> Self {
        Self {
            core: Rc::new(core),
            new_task: |core| {
                Box::new(Place {
                    core,
                    serve: C::serve,
                    future: Box::pin(None),
                })
            },
            slots: Vec::new(),
            free: Vec::new(),
            ready: Arc::default(),
        }
    }

    pub(crate) fn core(&self) -> &C {
        &self.core
    }

    /// The core, for a future of the owner's own that must end before the executor moves.
    pub(crate) fn shared(&self) -> Rc<C> {
        Rc::clone(&self.core)
    }

    /// Futures that are not over.
    pub(crate) fn running(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Starts a request and runs it as far as it gets; the result if that is its end.
    pub(crate) fn start(&mut self, argument: A) -> Option<T> {
        let place = self.free.pop().unwrap_or_else(|| self.add_slot());
        self.slots.get_mut(place)?.task.start(argument);
        self.poll(place)
    }

    /// Runs what can go on, handing results to `done`; whether anything did.
    pub(crate) fn run(&mut self, mut done: impl FnMut(T)) -> bool {
        let mut any = false;
        loop {
            let next = self.ready.list().pop_front();
            let Some(place) = next else {
                return any;
            };
            any = true;
            if let Some(slot) = self.slots.get(place) {
                slot.state.queued.store(false, Ordering::Release);
            }
            if let Some(result) = self.poll(place) {
                done(result);
            }
        }
    }

    fn poll(&mut self, place: usize) -> Option<T> {
        let slot = self.slots.get_mut(place)?;
        let mut context = Context::from_waker(&slot.waker);
        match slot.task.poll(&mut context) {
            Poll::Pending => None,
            Poll::Ready(result) => {
                self.free.push(place);
                Some(result)
            }
        }
    }

    fn add_slot(&mut self) -> usize {
        let place = self.slots.len();
        let state = Arc::new(SlotWaker {
            slot: place,
            queued: AtomicBool::new(false),
            ready: Arc::clone(&self.ready),
        });
        self.slots.push(Slot {
            task: (self.new_task)(Rc::clone(&self.core)),
            waker: Waker::from(Arc::clone(&state)),
            state,
        });
        // Room for every slot to be free or ready, so that neither list grows later.
        self.free.reserve(self.slots.len());
        let mut ready = self.ready.list();
        let missing = self.slots.len().saturating_sub(ready.len());
        ready.reserve(missing);
        place
    }
}
