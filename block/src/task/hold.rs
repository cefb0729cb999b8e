//! Holds on ranges: many may share a range, one may have it to itself, the others wait in order of arrival.
//!
//! The same primitive guards guest clusters (a read or a write in place shares them; copy-on-write and discard own them),
//! blocks of a direct-I/O file (an unaligned write reads, changes and writes whole blocks) and, with one single unit, an
//! engine's tables.

use std::cell::RefCell;
use std::future::Future;
use std::ops::Range;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

/// How a range is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Together with others who share.
    Shared,
    /// Alone.
    Exclusive,
}

struct Entry {
    id: u64,
    range: Range<u64>,
    kind: Kind,
    /// `None` once granted.
    waiting: Option<Waker>,
}

#[derive(Default)]
struct State {
    next_id: u64,
    /// In order of arrival, granted and waiting alike.
    entries: Vec<Entry>,
}

/// Who holds which range of what.
#[derive(Default)]
pub(crate) struct RangeLock(RefCell<State>);

impl State {
    /// Whether an entry that came before position `end` stands in the way.
    fn blocked(&self, end: usize, range: &Range<u64>, kind: Kind) -> bool {
        self.entries.iter().take(end).any(|other| {
            let overlaps = other.range.start < range.end && range.start < other.range.end;
            overlaps && (kind == Kind::Exclusive || other.kind == Kind::Exclusive)
        })
    }

    fn remove(&mut self, id: u64) {
        self.entries.retain(|entry| entry.id != id);
        for entry in &mut self.entries {
            if let Some(waker) = &entry.waiting {
                waker.wake_by_ref();
            }
        }
    }
}

impl RangeLock {
    /// Waits for `range`.
    pub(crate) fn hold(&self, range: Range<u64>, kind: Kind) -> Hold<'_> {
        Hold {
            lock: self,
            range,
            kind,
            id: None,
        }
    }

    /// Takes `range` if nobody is in the way.
    pub(crate) fn try_hold(&self, range: Range<u64>, kind: Kind) -> Option<Guard<'_>> {
        let mut state = self.0.borrow_mut();
        let end = state.entries.len();
        if state.blocked(end, &range, kind) {
            return None;
        }
        let id = state.next_id;
        state.next_id += 1;
        state.entries.push(Entry {
            id,
            range,
            kind,
            waiting: None,
        });
        Some(Guard { lock: self, id })
    }
}

/// A future that becomes a [`Guard`].
pub(crate) struct Hold<'a> {
    lock: &'a RangeLock,
    range: Range<u64>,
    kind: Kind,
    /// Our entry, once we wait.
    id: Option<u64>,
}

impl<'a> Future for Hold<'a> {
    type Output = Guard<'a>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Guard<'a>> {
        let Some(id) = self.id else {
            if let Some(guard) = self.lock.try_hold(self.range.clone(), self.kind) {
                return Poll::Ready(guard);
            }
            let mut state = self.lock.0.borrow_mut();
            let id = state.next_id;
            state.next_id += 1;
            state.entries.push(Entry {
                id,
                range: self.range.clone(),
                kind: self.kind,
                waiting: Some(context.waker().clone()),
            });
            drop(state);
            self.id = Some(id);
            return Poll::Pending;
        };
        let mut state = self.lock.0.borrow_mut();
        let position = state
            .entries
            .iter()
            .position(|entry| entry.id == id)
            .unwrap_or(0);
        let free = !state.blocked(position, &self.range, self.kind);
        if let Some(entry) = state.entries.get_mut(position) {
            entry.waiting = (!free).then(|| context.waker().clone());
        }
        drop(state);
        if !free {
            return Poll::Pending;
        }
        self.id = None;
        Poll::Ready(Guard {
            lock: self.lock,
            id,
        })
    }
}

impl Drop for Hold<'_> {
    fn drop(&mut self) {
        if let Some(id) = self.id {
            self.lock.0.borrow_mut().remove(id);
        }
    }
}

/// A range held; let go when dropped.
pub(crate) struct Guard<'a> {
    lock: &'a RangeLock,
    id: u64,
}

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        self.lock.0.borrow_mut().remove(self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::pin::pin;

    #[test]
    fn sharers_do_not_wait_for_each_other() {
        let lock = RangeLock::default();
        let _one = lock.try_hold(0..4, Kind::Shared).unwrap();
        assert!(lock.try_hold(2..6, Kind::Shared).is_some());
    }

    #[test]
    fn an_owner_waits_for_sharers_and_later_sharers_wait_for_the_owner() {
        let lock = RangeLock::default();
        let mut context = Context::from_waker(Waker::noop());
        let sharer = lock.try_hold(0..4, Kind::Shared).unwrap();
        let mut owner = pin!(lock.hold(3..5, Kind::Exclusive));
        assert!(owner.as_mut().poll(&mut context).is_pending());
        assert!(
            lock.try_hold(4..5, Kind::Shared).is_none(),
            "a queue that can be jumped starves the owner"
        );
        assert!(lock.try_hold(5..6, Kind::Shared).is_some());
        drop(sharer);
        let Poll::Ready(guard) = owner.as_mut().poll(&mut context) else {
            panic!("nobody is in the way")
        };
        assert!(lock.try_hold(4..5, Kind::Shared).is_none());
        drop(guard);
        assert!(lock.try_hold(4..5, Kind::Shared).is_some());
    }

    #[test]
    fn a_waiter_that_gives_up_stands_in_nobodys_way() {
        let lock = RangeLock::default();
        let mut context = Context::from_waker(Waker::noop());
        let _sharer = lock.try_hold(0..4, Kind::Shared).unwrap();
        {
            let mut owner = pin!(lock.hold(0..4, Kind::Exclusive));
            assert!(owner.as_mut().poll(&mut context).is_pending());
        }
        assert!(lock.try_hold(0..4, Kind::Shared).is_some());
    }
}
