//! Which transfers are made on the spot, on the thread that owns the disk, instead of being handed over.
//!
//! ```text
//!   quick   what is in the host's memory takes a microsecond or two; waking somebody for it takes ten times that
//!   lone    one request after the other, never two at a time: nobody is kept waiting by one who waits
//! ```
//!
//! Both are found out by trying: a file whose transfer took longer than handing it over would have ([`limit`]) is left alone for some transfers,
//! longer each time it happens again. Whether requests come alone is seen when they are handed over, and looked at anew now and
//! then ([`PROBE`]).

use std::os::fd::RawFd;
use std::time::{Duration, Instant};

use super::sys::{Call, perform};

/// The longest transfer that is made on the spot, in bytes.
const LONGEST: usize = 128 * 1024;
/// So many transfers of a file are handed over after one that was slow; and at most so many.
const PATIENCE: u32 = 16;
const MOST_PATIENCE: u32 = 4096;
/// So many slow ones are bad luck no more.
const STRIKES: u32 = 3;
/// Transfers in a row that were under way alone before they are taken to come alone.
const LONE: u32 = 16;
/// One of so many that come alone is handed over all the same.
const PROBE: u32 = 32;
/// A lone transfer that takes longer than this ends it: this is no disk to wait for.
const ENDLESS: Duration = Duration::from_millis(1);

/// What a transfer of so many bytes may take that is not worth handing over.
fn limit(bytes: usize) -> Duration {
    // 20 µs, and the copying of 2 GiB a second.
    Duration::from_nanos(20_000 + bytes as u64 / 2)
}

/// How a file behaves.
struct Pace {
    fd: RawFd,
    /// Transfers to be handed over before one is tried again.
    patience: u32,
    /// The patience that the next slow one costs.
    next: u32,
    /// Slow transfers of late; one may have been bad luck.
    strikes: u32,
}

/// How the files of a disk behave, and its requests.
#[derive(Default)]
pub(super) struct Paces {
    files: Vec<Pace>,
    /// Transfers in a row that were alone.
    lone: u32,
    /// Transfers made on the spot because of that since [`Paces::turn`].
    since: u32,
    probe: u32,
}

impl Paces {
    /// Makes a transfer on the spot if that promises to be right.
    pub(super) fn try_now(&mut self, call: &Call, under_way: bool) -> Option<i32> {
        let bytes = call.short_transfer(LONGEST)?;
        let place = self.place(call.fd());
        let pace = self.files.get_mut(place)?;
        if under_way {
            self.lone = 0;
        }
        if pace.patience > 0 {
            pace.patience -= 1;
            return self.try_lone(call);
        }
        let start = Instant::now();
        let result = perform(call);
        if start.elapsed() > limit(bytes) {
            pace.strikes += 1;
            if pace.strikes >= STRIKES {
                // One more after that is enough.
                pace.strikes = STRIKES - 1;
                pace.patience = pace.next;
                pace.next = (pace.next * 2).min(MOST_PATIENCE);
            }
        } else {
            pace.strikes = pace.strikes.saturating_sub(1);
            pace.next = (pace.next - PATIENCE).max(PATIENCE);
        }
        Some(result)
    }

    fn try_lone(&mut self, call: &Call) -> Option<i32> {
        if self.lone < LONE {
            return None;
        }
        self.probe += 1;
        if self.probe.is_multiple_of(PROBE) {
            return None;
        }
        self.since += 1;
        if self.since > 1 {
            // Two in one batch: they do not come alone any more.
            self.lone = 0;
            return None;
        }
        let start = Instant::now();
        let result = perform(call);
        if start.elapsed() > ENDLESS {
            self.lone = 0;
        }
        Some(result)
    }

    /// A batch ends, in which so many calls are handed over.
    pub(super) fn turn(&mut self, handed_over: usize, under_way: bool) {
        self.since = 0;
        match handed_over {
            0 => {}
            1 if !under_way => self.lone = self.lone.saturating_add(1),
            _ => self.lone = 0,
        }
    }

    fn place(&mut self, fd: RawFd) -> usize {
        if let Some(place) = self.files.iter().position(|pace| pace.fd == fd) {
            return place;
        }
        self.files.push(Pace {
            fd,
            patience: 0,
            next: PATIENCE,
            strikes: 0,
        });
        self.files.len() - 1
    }
}
