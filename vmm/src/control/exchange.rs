//! Exchanges: taking disks from their threads, all at one instant, to change what they consist of.
//!
//! ```text
//!  begin ── take ──> each disk's thread ── Taken ──> control: all there? ── then: close, change files, open, give
//! ```
//!
//! The guest goes on meanwhile; its requests wait in their rings. The control thread serves everything else between `begin` and the last
//! `Taken`: a reset leaves an exchange alone, and the end of the VM ends it with an error. One is under way at a time, others queue.

use std::collections::VecDeque;

use drover_api::server::Reply;
use drover_api::types::{ApiError, ErrorCode, EventKind};
use drover_block::{Disk, IoError};

use super::Control;
use crate::lifecycle::Input;
use crate::machine::disks;
use crate::mailbox::{DiskMessage, Message};

/// A disk that its thread handed over; nothing if it could not be opened the last time.
pub(super) struct Taken {
    pub(super) index: usize,
    disk: Option<Disk>,
}

/// Whether an exchange goes on if a disk's last flush failed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Flush {
    /// No: the disks are given back as they are.
    Must,
    /// Yes: it is what the exchange is to mend.
    Try,
}

type Then = Box<dyn FnOnce(&mut Control, Reply<Vec<Taken>>)>;

struct Exchange {
    number: u64,
    disks: Vec<usize>,
    flush: Flush,
    then: Then,
    taken: Vec<Taken>,
    failed: Option<IoError>,
}

/// Those under way.
#[derive(Default)]
pub(super) struct Exchanges {
    next: u64,
    current: Option<Exchange>,
    waiting: VecDeque<Exchange>,
}

impl Exchanges {
    /// Whether one is under way or waits that concerns a disk.
    pub(super) fn concern(&self, index: usize) -> bool {
        let mut all = self.current.iter().chain(&self.waiting);
        all.any(|exchange| exchange.disks.contains(&index))
    }
}

impl Control {
    /// Takes `disks` from their threads and then does `then` with them, which gives a disk back for each, or is told why not.
    pub(super) fn exchange(
        &mut self,
        disks: Vec<usize>,
        flush: Flush,
        then: impl FnOnce(&mut Self, Reply<Vec<Taken>>) + 'static,
    ) {
        self.exchanges.next += 1;
        self.exchanges.waiting.push_back(Exchange {
            number: self.exchanges.next,
            disks,
            flush,
            then: Box::new(then),
            taken: Vec::new(),
            failed: None,
        });
        self.next_exchange();
    }

    fn next_exchange(&mut self) {
        if self.exchanges.current.is_some() {
            return;
        }
        let Some(mut exchange) = self.exchanges.waiting.pop_front() else {
            return;
        };
        let Some(machine) = &self.machine else {
            return (exchange.then)(self, Err(ApiError::no_vm()));
        };
        let live = machine.disks();
        for index in &exchange.disks {
            let Some(disk) = live.get(*index) else {
                continue;
            };
            if disk.missing.is_some() {
                exchange.taken.push(Taken {
                    index: *index,
                    disk: None,
                });
                continue;
            }
            let (mailbox, number, index) = (self.mailbox.clone(), exchange.number, *index);
            disk.handle.take(move |disk, flushed| {
                mailbox.send(Message::Disk(DiskMessage::Taken {
                    exchange: number,
                    index,
                    disk: Box::new(disk),
                    flushed,
                }));
            });
        }
        self.exchanges.current = Some(exchange);
        self.end_exchange_if_complete();
    }

    /// A disk's thread handed a disk over.
    pub(super) fn taken(
        &mut self,
        number: u64,
        index: usize,
        disk: Disk,
        flushed: Result<(), IoError>,
    ) {
        // One that nobody waits for any more is closed by being dropped.
        let Some(exchange) = &mut self.exchanges.current else {
            return;
        };
        if exchange.number != number {
            return;
        }
        if exchange.flush == Flush::Must
            && let Err(error) = flushed
        {
            exchange.failed = Some(error);
        }
        exchange.taken.push(Taken {
            index,
            disk: Some(disk),
        });
        self.end_exchange_if_complete();
    }

    fn end_exchange_if_complete(&mut self) {
        let all_there = |exchange: &Exchange| exchange.taken.len() == exchange.disks.len();
        let Some(exchange) = self.exchanges.current.take_if(|current| all_there(current)) else {
            return;
        };
        match exchange.failed {
            None => (exchange.then)(self, Ok(exchange.taken)),
            Some(error) => {
                for taken in exchange.taken {
                    self.give(taken.index, taken.disk);
                }
                let why = format!("the disk cannot be made durable, nothing was changed: {error}");
                (exchange.then)(self, Err(ApiError::new(ErrorCode::Unavailable, why)));
            }
        }
        self.next_exchange();
    }

    /// Ends all exchanges, because the VM ends. Disks that are here are closed.
    pub(super) fn end_exchanges(&mut self) {
        let exchanges = std::mem::take(&mut self.exchanges);
        // A number is never used twice, so that what arrives late is known to be late.
        self.exchanges.next = exchanges.next;
        for exchange in exchanges.current.into_iter().chain(exchanges.waiting) {
            drop(exchange.taken);
            (exchange.then)(self, Err(ApiError::no_vm()));
        }
    }

    /// Closes disks that were taken; the locks on their images are free then, their leases stay with this process.
    ///
    /// # Errors
    /// One could not be made durable.
    pub(super) fn close_taken(taken: Vec<Taken>) -> Reply<()> {
        let mut outcome = Ok(());
        for disk in taken.into_iter().filter_map(|taken| taken.disk) {
            if let Err(error) = disk.close_keeping_lease() {
                tracing::error!(%error, "a disk is closed for a change");
                outcome = Err(ApiError::new(ErrorCode::Unavailable, error.to_string()));
            }
        }
        outcome
    }

    /// Gives a disk to its thread.
    pub(super) fn give(&mut self, index: usize, disk: Option<Disk>) {
        let Some(machine) = &mut self.machine else {
            return;
        };
        let (_, live) = machine.disks_mut();
        if let (Some(live), Some(disk)) = (live.get_mut(index), disk) {
            live.size_bytes = disk.size_bytes();
            live.missing = None;
            live.handle.give(disk);
        }
    }

    /// Opens a disk as the definition has it now and gives it to its thread. If that fails, the VM is paused and the guest's requests
    /// wait until a later attempt succeeds.
    ///
    /// # Errors
    /// Why it cannot be opened.
    pub(super) fn open_again(&mut self, index: usize) -> Reply<()> {
        let Some(machine) = &mut self.machine else {
            return Err(ApiError::no_vm());
        };
        let (config, live) = machine.disks_mut();
        let (Some(config), Some(live)) = (config.disks.get(index), live.get_mut(index)) else {
            return Ok(());
        };
        match disks::open(config, live.options.clone()) {
            Ok(disk) => {
                self.give(index, Some(disk));
                Ok(())
            }
            Err(error) => {
                let reason = error.to_string();
                tracing::error!(disk = config.id, %error, "a disk cannot be opened again");
                live.missing = Some(reason.clone());
                let disk = config.id.clone();
                self.emit(EventKind::IoError {
                    disk,
                    operation: "open".to_owned(),
                    offset: None,
                    reason: reason.clone(),
                });
                self.internal(Input::DiskStopped);
                let why = format!(
                    "the disk cannot be opened again, POST /v1/vm/resume tries once more: {reason}"
                );
                Err(ApiError::new(ErrorCode::Unavailable, why))
            }
        }
    }
}
