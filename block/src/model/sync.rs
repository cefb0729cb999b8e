//! Shuttle's in place of the standard library's.

use std::collections::HashMap;
use std::io;
use std::os::fd::RawFd;

pub(super) use shuttle::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
pub(super) use shuttle::sync::{Arc, Condvar, Mutex, MutexGuard};
pub(super) use shuttle::thread::JoinHandle;
pub(super) use std::sync::PoisonError;

pub(super) fn spawn(
    _name: String,
    run: impl FnOnce() + Send + 'static,
) -> io::Result<JoinHandle<()>> {
    Ok(shuttle::thread::spawn(run))
}

#[derive(Default)]
struct Flag {
    raised: Mutex<bool>,
    changed: Condvar,
}

thread_local! {
    /// The events of a schedule by their number, which stands for a descriptor: all its threads are one of the host's.
    static EVENTS: std::cell::RefCell<HashMap<RawFd, std::sync::Arc<Flag>>> = std::cell::RefCell::default();
}

/// As `eventfd`: raised or not.
pub(super) struct Event {
    flag: std::sync::Arc<Flag>,
    number: RawFd,
}

impl Event {
    pub(super) fn new() -> io::Result<Self> {
        let flag = std::sync::Arc::<Flag>::default();
        let number = EVENTS.with(|events| {
            let mut events = events.borrow_mut();
            let number = (0..).find(|n| !events.contains_key(n)).unwrap_or(0);
            events.insert(number, std::sync::Arc::clone(&flag));
            number
        });
        Ok(Self { flag, number })
    }

    pub(super) fn fd(&self) -> RawFd {
        self.number
    }

    pub(super) fn raise(&self) {
        *self.flag.raised.lock().unwrap() = true;
        self.flag.changed.notify_all();
    }

    pub(super) fn clear(&self) -> io::Result<()> {
        let was = std::mem::take(&mut *self.flag.raised.lock().unwrap());
        was.then_some(()).ok_or(io::ErrorKind::WouldBlock.into())
    }

    pub(super) fn wait(&self) -> io::Result<()> {
        wait_for(self.number);
        Ok(())
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        EVENTS.with(|events| events.borrow_mut().remove(&self.number));
    }
}

fn flag(number: RawFd) -> std::sync::Arc<Flag> {
    EVENTS.with(|events| std::sync::Arc::clone(&events.borrow()[&number]))
}

/// Waits as `poll` would.
pub(super) fn wait_for(number: RawFd) {
    let flag = flag(number);
    let mut raised = flag.raised.lock().unwrap();
    while !*raised {
        raised = flag.changed.wait(raised).unwrap();
    }
}

pub(super) fn is_raised(number: RawFd) -> bool {
    *flag(number).raised.lock().unwrap()
}
