//! For tests: what a back end did to its files, in order, and failures on demand.

use std::cell::RefCell;
use std::io;
use std::rc::Rc;

use crate::buffers::RawSlice;

/// One thing that happened.
#[derive(Clone, Debug)]
pub(crate) enum Event {
    Write {
        at: u64,
        bytes: Vec<u8>,
    },
    Punch {
        at: u64,
        length: u64,
    },
    Sync,
    /// The test's own remark.
    Mark(usize),
}

/// Events so far; and which change from now on fails, with what.
#[derive(Default)]
pub(crate) struct Tape {
    pub(crate) events: Vec<Event>,
    pub(crate) fail: Option<(usize, i32)>,
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

fn record(event: impl FnOnce() -> Event) -> io::Result<()> {
    TAPE.with(|slot| {
        let slot = slot.borrow();
        let Some(tape) = slot.as_ref() else {
            return Ok(());
        };
        let mut tape = tape.borrow_mut();
        match &mut tape.fail {
            Some((0, errno)) => {
                let errno = *errno;
                tape.fail = None;
                return Err(io::Error::from_raw_os_error(errno));
            }
            Some((left, _)) => *left -= 1,
            None => {}
        }
        tape.events.push(event());
        Ok(())
    })
}

pub(super) fn write(at: u64, slices: &[RawSlice]) -> io::Result<()> {
    record(|| Event::Write {
        at,
        bytes: slices.iter().flat_map(RawSlice::copied).collect(),
    })
}

pub(super) fn punch(at: u64, length: u64) -> io::Result<()> {
    record(|| Event::Punch { at, length })
}

pub(super) fn sync() -> io::Result<()> {
    record(|| Event::Sync)
}
