//! For tests: what a back end did to its files, in order, and failures on demand.

use std::cell::RefCell;
use std::io;
use std::os::fd::BorrowedFd;
use std::rc::Rc;

use crate::buffers::RawSlice;

/// One thing that happened. What takes time has a number, under which its end is told; files are numbered as they are met.
#[derive(Clone, Debug)]
pub(crate) enum Event {
    Write {
        id: usize,
        file: usize,
        at: u64,
        bytes: Vec<u8>,
    },
    Punch {
        id: usize,
        file: usize,
        at: u64,
        length: u64,
    },
    /// The file has another length; over at once.
    Truncate {
        id: usize,
        file: usize,
        length: u64,
    },
    Sync {
        id: usize,
        file: usize,
    },
    End {
        id: usize,
    },
    /// The test's own remark.
    Mark(usize),
}

/// What a back end is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Read,
    Write,
    Sync,
    /// `fallocate`, whatever its mode.
    Punch,
    Truncate,
}

/// How a call fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// With this error number, having done nothing.
    Errno(i32),
    /// It is a read or a write that ends half-way.
    Short,
}

/// A failure to come.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Failure {
    /// Calls of which kind; `None` for all that change a file.
    pub(crate) of: Option<Kind>,
    /// How many of those go well before.
    pub(crate) after: usize,
    /// How many fail then, one after the other.
    pub(crate) times: usize,
    pub(crate) fault: Fault,
}

/// Events so far; and which call from now on fails, with what.
#[derive(Default)]
pub(crate) struct Tape {
    pub(crate) events: Vec<Event>,
    pub(crate) fail: Option<Failure>,
    /// Calls so far by [`Kind`].
    pub(crate) calls: [usize; 5],
    /// Failures that have happened.
    pub(crate) failed: usize,
    /// Device and inode of the files met.
    files: Vec<(u64, u64)>,
    ids: usize,
}

thread_local! {
    static TAPE: RefCell<Option<Rc<RefCell<Tape>>>> = const { RefCell::new(None) };
}

/// Records what this thread does from now on.
pub(crate) fn insert() -> Rc<RefCell<Tape>> {
    let tape = Rc::new(RefCell::new(Tape::default()));
    TAPE.with(|slot| *slot.borrow_mut() = Some(Rc::clone(&tape)));
    tape
}

/// Ends the recording.
pub(crate) fn eject() {
    TAPE.with(|slot| *slot.borrow_mut() = None);
}

impl Tape {
    /// The number of the file with this device and inode, which events of it carry.
    pub(crate) fn file(&mut self, identity: (u64, u64)) -> usize {
        let known = self.files.iter().position(|other| *other == identity);
        known.unwrap_or_else(|| {
            self.files.push(identity);
            self.files.len() - 1
        })
    }

    /// Whether this call fails, and how.
    fn fault(&mut self, kind: Kind) -> Option<Fault> {
        self.calls[kind as usize] += 1;
        let failure = self.fail.as_mut()?;
        let hit = failure.of.map_or(kind != Kind::Read, |of| of == kind);
        if !hit {
            return None;
        }
        if failure.after > 0 {
            failure.after -= 1;
            return None;
        }
        let fault = failure.fault;
        failure.times -= 1;
        if failure.times == 0 {
            self.fail = None;
        }
        self.failed += 1;
        Some(fault)
    }
}

/// Tells the end of what it stands for when it is dropped.
pub(super) struct Running(Option<usize>);

impl Drop for Running {
    fn drop(&mut self) {
        let Some(id) = self.0 else { return };
        with(|tape| tape.events.push(Event::End { id }));
    }
}

fn with<T>(act: impl FnOnce(&mut Tape) -> T) -> Option<T> {
    TAPE.with(|slot| {
        slot.borrow()
            .as_ref()
            .map(|tape| act(&mut tape.borrow_mut()))
    })
}

/// Whether the call is to be cut short; its beginning is on the tape unless it fails.
fn record(
    kind: Kind,
    fd: BorrowedFd<'_>,
    event: impl FnOnce(usize, usize, bool) -> Option<Event>,
) -> io::Result<(Running, bool)> {
    let outcome = with(|tape| {
        let short = match tape.fault(kind) {
            Some(Fault::Errno(errno)) => return Err(io::Error::from_raw_os_error(errno)),
            fault => fault.is_some(),
        };
        let stat = rustix::fs::fstat(fd)?;
        let file = tape.file((stat.st_dev, stat.st_ino));
        let id = tape.ids;
        let event = event(id, file, short);
        let number = event.is_some().then_some(id);
        if let Some(event) = event {
            tape.ids += 1;
            tape.events.push(event);
        }
        Ok((Running(number), short))
    });
    outcome.unwrap_or(Ok((Running(None), false)))
}

/// The first half of a transfer, in whole sectors where it has several.
fn half(slices: &[RawSlice]) -> Vec<RawSlice> {
    let whole: usize = slices.iter().map(RawSlice::length).sum();
    let mut left = match whole / 2 / 512 * 512 {
        0 => whole.div_ceil(2),
        sectors => sectors,
    };
    let parts = slices.iter().map(|slice| {
        let part = slice.part(0, left);
        left -= part.length();
        part
    });
    parts.filter(|part| part.length() > 0).collect()
}

/// What is left of a transfer's slices where it is to be short.
pub(super) type Cut = Option<Vec<RawSlice>>;

pub(super) fn read(fd: BorrowedFd<'_>, slices: &[RawSlice]) -> io::Result<Cut> {
    let (_, short) = record(Kind::Read, fd, |_, _, _| None)?;
    Ok(short.then(|| half(slices)))
}

pub(super) fn write(
    fd: BorrowedFd<'_>,
    at: u64,
    slices: &[RawSlice],
) -> io::Result<(Running, Cut)> {
    let (running, short) = record(Kind::Write, fd, |id, file, short| {
        let cut = short.then(|| half(slices));
        let slices = cut.as_deref().unwrap_or(slices);
        let bytes = slices.iter().flat_map(RawSlice::copied).collect();
        Some(Event::Write {
            id,
            file,
            at,
            bytes,
        })
    })?;
    Ok((running, short.then(|| half(slices))))
}

pub(super) fn punch(fd: BorrowedFd<'_>, at: u64, length: u64) -> io::Result<Running> {
    let event = |id, file, _| {
        Some(Event::Punch {
            id,
            file,
            at,
            length,
        })
    };
    record(Kind::Punch, fd, event).map(|(running, _)| running)
}

pub(super) fn truncate(fd: BorrowedFd<'_>, length: u64) -> io::Result<Running> {
    let event = |id, file, _| Some(Event::Truncate { id, file, length });
    record(Kind::Truncate, fd, event).map(|(running, _)| running)
}

pub(super) fn sync(fd: BorrowedFd<'_>) -> io::Result<Running> {
    let event = |id, file, _| Some(Event::Sync { id, file });
    record(Kind::Sync, fd, event).map(|(running, _)| running)
}
