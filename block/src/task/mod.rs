//! The small world in which requests run: futures on one thread, and the holds by which they keep out of each other's way.

mod executor;
mod hold;

pub(crate) use executor::{Executor, Serve};
pub(crate) use hold::{Guard, Kind, RangeLock};

use std::future::Future;
use std::pin::pin;
use std::task::{Context, Poll, Waker};

/// Runs a future whose back end is synchronous: it is never truly pending, so polling until it is ready never spins.
pub(crate) fn complete<T>(future: impl Future<Output = T>) -> T {
    let mut future = pin!(future);
    let mut context = Context::from_waker(Waker::noop());
    loop {
        if let Poll::Ready(value) = future.as_mut().poll(&mut context) {
            return value;
        }
    }
}
