//! One queue pair on its thread, and on the first pair's thread the control queue as well.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use crate::virtio::net::QueueRole;
use crate::virtio::net::control::Control;
use crate::virtio::net::metrics::NetMetrics;
use crate::virtio::net::rx::RxQueue;
use crate::virtio::net::tap::Tap;
use crate::virtio::net::tx::TxQueue;
use crate::virtio::queue::GuestQueue;
use crate::virtio::worker::{Progress, Scope, Service, Watch};

/// Serves a receive queue, a transmit queue and a tap; nothing is ever left under way.
pub(super) struct Pair {
    pairs: u16,
    features: u64,
    tap: Arc<Tap>,
    /// The tap may have frames: it was readable since it was last seen empty.
    readable: bool,
    rx: RxQueue,
    tx: TxQueue,
    control: Option<Control>,
    metrics: Arc<NetMetrics>,
}

impl Pair {
    pub(super) fn new(
        pairs: u16,
        tap: Arc<Tap>,
        control: Option<Control>,
        metrics: Arc<NetMetrics>,
    ) -> Self {
        Self {
            pairs,
            features: 0,
            tap,
            readable: true,
            rx: RxQueue::new(),
            tx: TxQueue::new(),
            control,
            metrics,
        }
    }

    fn set_queue(&mut self, index: u16, queue: Option<GuestQueue>) {
        match QueueRole::of(index, self.features, self.pairs) {
            Some(QueueRole::Receive(_)) => self.rx.set_queue(queue),
            Some(QueueRole::Transmit(_)) => self.tx.set_queue(queue),
            Some(QueueRole::Control) => {
                if let Some(control) = &mut self.control {
                    control.set_queue(queue);
                }
            }
            None => {}
        }
    }

    fn receive(&mut self) -> Progress {
        self.rx.run(&self.tap, &mut self.readable, &self.metrics)
    }

    fn transmit(&mut self) -> Progress {
        self.tx.run(&self.tap, &self.metrics)
    }
}

impl Service for Pair {
    fn start(&mut self, features: u64) {
        self.features = features;
        if let Some(control) = &mut self.control {
            control.start(features);
        }
        self.rx.start(features, &self.tap);
        self.tx.start(features);
        self.readable = true;
    }

    fn add_queue(&mut self, queue: GuestQueue) {
        self.set_queue(queue.index(), Some(queue));
    }

    fn remove_queues(&mut self, scope: Scope) {
        match scope {
            Scope::Queue(index) => self.set_queue(index, None),
            Scope::All => {
                self.rx.set_queue(None);
                self.tx.set_queue(None);
                if let Some(control) = &mut self.control {
                    control.reset();
                }
            }
        }
    }

    fn is_quiet(&self, _scope: Scope) -> bool {
        true
    }

    fn kick(&mut self, index: u16) -> Progress {
        match QueueRole::of(index, self.features, self.pairs) {
            Some(QueueRole::Receive(_)) => self.receive(),
            Some(QueueRole::Transmit(_)) => self.transmit(),
            Some(QueueRole::Control) => self
                .control
                .as_mut()
                .map_or(Progress::Idle, |control| control.run(&self.metrics)),
            None => Progress::Idle,
        }
    }

    fn source(&self) -> Option<(BorrowedFd<'_>, Watch)> {
        Some((self.tap.as_fd(), Watch::Edges))
    }

    fn source_ready(&mut self) -> Progress {
        self.readable = true;
        let sent = if self.tx.is_unfinished() {
            self.transmit()
        } else {
            Progress::Idle
        };
        match (self.receive(), sent) {
            (Progress::Idle, Progress::Idle) => Progress::Idle,
            // Calling again costs one read that may find the tap empty.
            _ => Progress::More,
        }
    }

    fn end(self: Box<Self>) {}
}
