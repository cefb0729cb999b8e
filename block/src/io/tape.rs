//! For tests: what a back end did to its files, in order, and failures on demand.

use std::cell::RefCell;
use std::io;
use std::rc::Rc;

use crate::buffers::RawSlice;

/// One thing that happened. What takes time has a number, under which its end is told.
#[derive(Clone, Debug)]
pub(crate) enum Event {
    Write {
        id: usize,
        at: u64,
        bytes: Vec<u8>,
    },
    Punch {
        id: usize,
        at: u64,
        length: u64,
    },
    Sync {
        id: usize,
    },
    End {
        id: usize,
    },
    /// The test's own remark.
    Mark(usize),
}

/// Events so far; and which change from now on fails, with what.
#[derive(Default)]
pub(crate) struct Tape {
    pub(crate) events: Vec<Event>,
    pub(crate) fail: Option<(usize, i32)>,
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

/// Tells the end of what it stands for when it is dropped.
pub(super) struct Running(Option<usize>);

impl Drop for Running {
    fn drop(&mut self) {
        let Some(id) = self.0 else { return };
        TAPE.with(|slot| {
            if let Some(tape) = slot.borrow().as_ref() {
                tape.borrow_mut().events.push(Event::End { id });
            }
        });
    }
}

fn record(event: impl FnOnce(usize) -> Event) -> io::Result<Running> {
    TAPE.with(|slot| {
        let slot = slot.borrow();
        let Some(tape) = slot.as_ref() else {
            return Ok(Running(None));
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
        let id = tape.ids;
        tape.ids += 1;
        tape.events.push(event(id));
        Ok(Running(Some(id)))
    })
}

pub(super) fn write(at: u64, slices: &[RawSlice]) -> io::Result<Running> {
    record(|id| Event::Write {
        id,
        at,
        bytes: slices.iter().flat_map(RawSlice::copied).collect(),
    })
}

pub(super) fn punch(at: u64, length: u64) -> io::Result<Running> {
    record(|id| Event::Punch { id, at, length })
}

pub(super) fn sync() -> io::Result<Running> {
    record(|id| Event::Sync { id })
}
