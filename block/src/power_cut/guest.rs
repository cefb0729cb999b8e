//! Guests that keep a disk busy and remember what it owes them.

use std::cell::RefCell;
use std::ops::Range;
use std::rc::Rc;

use super::scene::{Random, SECTOR, Scene};
use crate::io::tape::{Event, Tape};
use crate::{
    Buffers, Disk, DiskOptions, Error, IoEngine, Job, JobState, Op, Request, SharedBuffer,
};

/// What the guest did, as the marks on the tape say.
#[derive(Clone, Debug)]
pub(super) enum Deed {
    /// Began to give these sectors this value; `weak`: or to leave them as they are.
    Set {
        sectors: Range<usize>,
        value: u8,
        weak: bool,
    },
    /// The deed of this number is over.
    Over(usize),
    /// Began a flush.
    Flush,
    /// The disk has its last size, durably.
    Grown,
}

/// How a guest goes about it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Run {
    pub(super) requests: usize,
    /// Most requests under way; 1 with the inline engine.
    pub(super) depth: usize,
    pub(super) with: With,
    /// What goes on beside the requests, from the beginning.
    pub(super) job: Option<Job>,
}

/// What performs the transfers of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum With {
    Shuffled,
    Engine(IoEngine),
}

/// What became of a run.
pub(super) struct Outcome {
    /// By mark.
    pub(super) deeds: Vec<Deed>,
    /// Requests that failed, and the end of the disk if that did.
    pub(super) failures: Vec<String>,
}

impl Run {
    /// Keeps the disk of `scene` busy with the tape in.
    pub(super) fn of(
        self,
        scene: &Scene,
        random: &mut Random,
        tape: &Rc<RefCell<Tape>>,
    ) -> Outcome {
        let disk = match self.open(scene, random.0) {
            Ok(disk) => disk,
            Err(error) => {
                return Outcome {
                    deeds: vec![],
                    failures: vec![error.to_string()],
                };
            }
        };
        let job = disk.job().cloned();
        let mut guest = Guest {
            disk,
            tape: Rc::clone(tape),
            deeds: Vec::new(),
            busy: Vec::new(),
            now: scene.initial.iter().map(|value| vec![*value]).collect(),
            failures: Vec::new(),
        };
        for n in 0..self.requests {
            while guest.busy.len() >= self.depth || random.below(3) == 0 && !guest.busy.is_empty() {
                guest.step();
            }
            if scene.grows && n == self.requests / 2 {
                guest.drain();
                match guest.disk.resize(scene.size as u64) {
                    Ok(()) => guest.mark(Deed::Grown),
                    Err(error) => guest.failures.push(error.to_string()),
                }
            }
            guest.request(n, random);
        }
        guest.drain();
        while job.as_ref().is_some_and(|job| !job.state().is_over()) {
            guest.step();
        }
        if let Some(JobState::Failed(error)) = job.map(|job| job.state()) {
            guest.failures.push(error.to_string());
        }
        let Guest {
            disk,
            mut deeds,
            tape,
            mut failures,
            ..
        } = guest;
        mark(&tape, &mut deeds, Deed::Flush);
        let flush = deeds.len() - 1;
        match disk.close() {
            Ok(()) => mark(&tape, &mut deeds, Deed::Over(flush)),
            Err(error) => failures.push(error.to_string()),
        }
        Outcome { deeds, failures }
    }

    fn open(self, scene: &Scene, seed: u64) -> Result<Disk, Error> {
        let mut options = DiskOptions {
            commit_below: self.job == Some(Job::Commit),
            ..DiskOptions::default()
        };
        let mut disk = match self.with {
            With::Shuffled => Disk::open_shuffled_with(&scene.spec, seed, &options)?,
            With::Engine(engine) => {
                options.engine = engine;
                Disk::open_with(&scene.spec, options)?
            }
        };
        if let Some(job) = self.job {
            disk.begin(job)?;
        }
        Ok(disk)
    }
}

/// Requests under way of one disk.
struct Guest {
    disk: Disk,
    tape: Rc<RefCell<Tape>>,
    deeds: Vec<Deed>,
    busy: Vec<Busy>,
    /// What each sector may read as; several after a discard.
    now: Vec<Vec<u8>>,
    failures: Vec<String>,
}

struct Busy {
    tag: u64,
    sectors: Range<usize>,
    read: Option<SharedBuffer>,
    /// What the sectors hold for certain once it has succeeded.
    value: Option<u8>,
}

fn mark(tape: &Rc<RefCell<Tape>>, deeds: &mut Vec<Deed>, deed: Deed) {
    tape.borrow_mut().events.push(Event::Mark(deeds.len()));
    deeds.push(deed);
}

impl Guest {
    fn mark(&mut self, deed: Deed) {
        mark(&self.tape, &mut self.deeds, deed);
    }

    fn drain(&mut self) {
        while !self.busy.is_empty() {
            self.step();
        }
    }

    fn step(&mut self) {
        self.disk.step(true);
        if self.disk.job().is_some() {
            self.disk.pace();
        }
        self.collect();
    }

    fn collect(&mut self) {
        let mut done = std::mem::take(&mut self.disk.done);
        for completion in done.drain(..) {
            let at = self.busy.iter().position(|busy| busy.tag == completion.tag);
            let busy = self.busy.swap_remove(at.expect("it was asked for"));
            if let Err(error) = completion.result {
                // What it was to do may be done in part.
                self.failures.push(error.to_string());
                continue;
            }
            if let Some(value) = busy.value {
                self.now[busy.sectors.clone()].fill(vec![value]);
            }
            let Some(read) = busy.read else {
                self.mark(Deed::Over(completion.tag as usize));
                continue;
            };
            let read = read.take().expect("the request is over");
            for (sector, n) in read.chunks(SECTOR).zip(busy.sectors) {
                let known = self.now[n].contains(&sector[0]);
                assert!(
                    known && sector.iter().all(|byte| *byte == sector[0]),
                    "sector {n} reads {} and not one of {:?}",
                    sector[0],
                    self.now[n]
                );
            }
        }
    }

    /// Begins a request that touches no sector that another one under way does; clusters they may well share.
    fn request(&mut self, n: usize, random: &mut Random) {
        let total = (self.disk.size_bytes() / SECTOR as u64) as usize;
        let first = random.below(total as u64) as usize;
        let most = if n.is_multiple_of(4) { 100 } else { 24 };
        let count = (random.below(most) as usize + 1).min(total - first);
        let sectors = first..first + count;
        let is_free =
            |busy: &Busy| busy.sectors.end <= sectors.start || sectors.end <= busy.sectors.start;
        if !self.busy.iter().all(is_free) {
            return;
        }
        let (offset, length) = ((first * SECTOR) as u64, count * SECTOR);
        let value = (n % 250) as u8 + 1;
        let tag = self.deeds.len() as u64;
        let (mut read, mut certain) = (None, None);
        let mut touched = sectors.clone();
        let op = match random.below(10) {
            0..4 => {
                self.set(&sectors, value, false);
                certain = Some(value);
                Op::Write {
                    offset,
                    buffers: Buffers::from_vec(vec![value; length]),
                }
            }
            4..6 => {
                self.set(&sectors, 0, false);
                certain = Some(0);
                Op::WriteZeroes {
                    offset,
                    length: length as u64,
                    unmap: random.below(2) == 0,
                }
            }
            6 => {
                self.set(&sectors, 0, true);
                Op::Discard {
                    offset,
                    length: length as u64,
                }
            }
            7 => {
                let buffer = SharedBuffer::zeroed(length);
                let buffers = buffer.buffers();
                read = Some(buffer);
                Op::Read { offset, buffers }
            }
            _ => {
                self.mark(Deed::Flush);
                touched = 0..0;
                Op::Flush
            }
        };
        // A read leaves no mark; its tag must not be that of the next deed.
        let tag = if read.is_some() {
            u64::MAX - n as u64
        } else {
            tag
        };
        self.busy.push(Busy {
            tag,
            sectors: touched,
            read,
            value: certain,
        });
        self.disk.submit(Request { tag, op });
        if self.disk.queue.is_none() && self.disk.job().is_some() {
            self.disk.pace();
        }
        self.collect();
    }

    fn set(&mut self, sectors: &Range<usize>, value: u8, weak: bool) {
        for values in &mut self.now[sectors.clone()] {
            values.push(value);
        }
        self.mark(Deed::Set {
            sectors: sectors.clone(),
            value,
            weak,
        });
    }
}
