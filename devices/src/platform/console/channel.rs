//! One reader behind a bounded backlog, watched by an epoll set of its own. Nothing here blocks.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};

use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::io::Errno;

use super::backlog::Backlog;

/// What an event of the set is about.
const INPUT: u64 = 0;
const OUTPUT: u64 = 1;
const ARRIVAL: u64 = 2;

/// Input read at once, in bytes: as much as the port's FIFO takes.
const INPUT_PIECE: usize = 64;

/// Whether input that cannot be had any more (end of file, hang-up) means that the reader is gone, too.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Hangup {
    /// A socket's client: it is gone when both directions are closed.
    Leaves,
    /// Standard input may end long before standard output does.
    EndsInput,
}

/// Who reads and types.
pub(super) struct Peer {
    /// Absent when it will type no more.
    pub(super) input: Option<OwnedFd>,
    /// Non-blocking, except for what never makes a writer wait (regular files).
    pub(super) output: OwnedFd,
    pub(super) hangup: Hangup,
}

struct Attached {
    peer: Peer,
    /// Position in the stream of the next byte it gets.
    position: u64,
    /// It took less than it was given, and the set reports when it takes more.
    blocked: bool,
}

pub(super) struct Channel {
    epoll: OwnedFd,
    backlog: Backlog,
    attached: Option<Attached>,
    dropped: u64,
    /// The port has no room for input.
    held: bool,
}

impl Channel {
    /// A channel without a reader that keeps the last `capacity` bytes.
    pub(super) fn new(capacity: usize) -> io::Result<Self> {
        Ok(Self {
            epoll: epoll::create(CreateFlags::CLOEXEC)?,
            backlog: Backlog::new(capacity),
            attached: None,
            dropped: 0,
            held: false,
        })
    }

    /// The one descriptor of all that is watched.
    pub(super) fn descriptor(&self) -> RawFd {
        self.epoll.as_raw_fd()
    }

    /// Bytes that a reader was too slow for.
    pub(super) fn dropped(&self) -> u64 {
        self.dropped
    }

    pub(super) fn has_peer(&self) -> bool {
        self.attached.is_some()
    }

    /// Watches a listening socket; [`Channel::ready`] tells of arrivals.
    pub(super) fn watch_arrivals(&self, listener: impl AsFd) -> io::Result<()> {
        let data = EventData::new_u64(ARRIVAL);
        epoll::add(&self.epoll, listener, data, EventFlags::IN)?;
        Ok(())
    }

    /// `peer` reads from now on, beginning with the last `scrollback` bytes.
    pub(super) fn attach(&mut self, mut peer: Peer, scrollback: usize) -> io::Result<()> {
        self.detach();
        if let Some(input) = &peer.input {
            let interest = self.input_interest();
            match epoll::add(&self.epoll, input, EventData::new_u64(INPUT), interest) {
                Ok(()) => {}
                // A regular file or /dev/null: not a source of keys.
                Err(Errno::PERM) => peer.input = None,
                Err(error) => return Err(error.into()),
            }
        }
        let oldest = self.backlog.end().saturating_sub(scrollback as u64);
        self.attached = Some(Attached {
            peer,
            position: oldest.max(self.backlog.start()),
            blocked: false,
        });
        self.flush();
        Ok(())
    }

    /// Takes all of `bytes`; what the reader cannot take now waits, as far as there is room.
    pub(super) fn write(&mut self, bytes: &[u8]) {
        // In pieces that fit, so that a reader that keeps up loses nothing of a large batch.
        for piece in bytes.chunks(self.backlog.capacity()) {
            self.backlog.push(piece);
            self.flush();
        }
    }

    /// Stops reporting input, or begins again; the rest goes on.
    pub(super) fn hold_input(&mut self, held: bool) {
        if held == self.held {
            return;
        }
        self.held = held;
        let interest = self.input_interest();
        let Some(Attached { peer, .. }) = &self.attached else {
            return;
        };
        let Some(input) = &peer.input else { return };
        let data = EventData::new_u64(INPUT);
        // A hang-up is reported whatever the interest is. Where it only means that input ends, it must wait for what is still unread.
        let result = match (peer.hangup, held) {
            (Hangup::Leaves, _) => epoll::modify(&self.epoll, input, data, interest),
            (Hangup::EndsInput, true) => epoll::delete(&self.epoll, input),
            (Hangup::EndsInput, false) => epoll::add(&self.epoll, input, data, interest),
        };
        if let Err(error) = result {
            tracing::warn!(%error, "the serial console's input cannot be watched");
        }
    }

    /// Handles what is ready: appends at most `room` bytes of input, goes on with output. Returns whether somebody waits to be accepted.
    pub(super) fn ready(&mut self, room: usize, input: &mut Vec<u8>) -> bool {
        let empty = Event {
            flags: EventFlags::empty(),
            data: EventData::new_u64(0),
        };
        let mut events = [empty; 3];
        let now = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        let count = epoll::wait(&self.epoll, &mut events, Some(&now)).unwrap_or(0);
        let mut arrival = false;
        for event in &events[..count] {
            // Copied: the structure is packed.
            let (flags, data) = (event.flags, event.data);
            match data.u64() {
                INPUT => self.read(flags, room, input),
                OUTPUT => self.flush(),
                _ => arrival = true,
            }
        }
        arrival
    }

    fn input_interest(&self) -> EventFlags {
        if self.held {
            EventFlags::empty()
        } else {
            EventFlags::IN
        }
    }

    fn read(&mut self, flags: EventFlags, room: usize, input: &mut Vec<u8>) {
        let Some(Attached { peer, .. }) = &mut self.attached else {
            return;
        };
        let Some(source) = &peer.input else { return };
        let hung_up = flags.intersects(EventFlags::HUP | EventFlags::ERR);
        if room > 0 && !self.held {
            let mut bytes = [0; INPUT_PIECE];
            let length = room.min(INPUT_PIECE);
            match rustix::io::read(source, &mut bytes[..length]) {
                Ok(count @ 1..) => return input.extend_from_slice(&bytes[..count]),
                Err(Errno::INTR | Errno::AGAIN) => return,
                Ok(0) | Err(_) => {}
            }
        } else if !hung_up {
            return;
        }
        self.input_ended(hung_up);
    }

    fn input_ended(&mut self, hung_up: bool) {
        let Some(Attached { peer, .. }) = &mut self.attached else {
            return;
        };
        match peer.hangup {
            Hangup::Leaves if hung_up => self.detach(),
            Hangup::Leaves => {
                // It will only listen. Interest in nothing still reports the hang-up.
                if let Some(input) = &peer.input {
                    let data = EventData::new_u64(INPUT);
                    let _ = epoll::modify(&self.epoll, input, data, EventFlags::empty());
                }
            }
            Hangup::EndsInput => {
                if let Some(input) = peer.input.take() {
                    let _ = epoll::delete(&self.epoll, &input);
                }
            }
        }
    }

    /// Gives the reader what it takes without blocking.
    fn flush(&mut self) {
        let Some(attached) = &mut self.attached else {
            return;
        };
        let missed = self.backlog.start().saturating_sub(attached.position);
        self.dropped += missed;
        attached.position += missed;
        let output = &attached.peer.output;
        let blocked = loop {
            let piece = self.backlog.piece(attached.position);
            if piece.is_empty() {
                break false;
            }
            match rustix::io::write(output, piece) {
                Ok(count) => attached.position += count as u64,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => break true,
                Err(_) => return self.detach(),
            }
        };
        if blocked == attached.blocked {
            return;
        }
        attached.blocked = blocked;
        let result = if blocked {
            epoll::add(
                &self.epoll,
                output,
                EventData::new_u64(OUTPUT),
                EventFlags::OUT,
            )
        } else {
            epoll::delete(&self.epoll, output)
        };
        if let Err(error) = result {
            tracing::warn!(%error, "the serial console's output cannot be watched");
        }
    }

    pub(super) fn detach(&mut self) {
        let Some(Attached { peer, blocked, .. }) = self.attached.take() else {
            return;
        };
        // Closing is not enough where the file is open elsewhere, too.
        if let Some(input) = &peer.input {
            let _ = epoll::delete(&self.epoll, input);
        }
        if blocked {
            let _ = epoll::delete(&self.epoll, &peer.output);
        }
    }
}
