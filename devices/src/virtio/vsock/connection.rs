//! One connection between a port of the guest and a stream socket of the host.
//!
//! ```text
//!                   guest asks                       host asks
//!   (connect PATH_PORT) ── RESPONSE ─┐     REQUEST ── RESPONSE ─┐
//!                                    └──> open <────────────────┘
//!            host closes its end: SHUTDOWN(send)   │   guest: SHUTDOWN, RST
//!                                                  v
//!                                    closing ── RST, or two seconds ──> gone
//! ```
//!
//! Credit (§5.10.6.3) goes both ways: the guest never has more than [`BUFFER_BYTES`] on their way to the host's socket, and is sent no
//! more than it has said to have room for.

use std::collections::VecDeque;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::net::{SendFlags, send};

use super::bits::{Header, TYPE_STREAM, op, shutdown};

/// What one connection may have on its way from the guest to the host, in bytes.
pub(super) const BUFFER_BYTES: u32 = 256 * 1024;
/// How long the other side may take to answer a request or the end.
pub(super) const PATIENCE: Duration = Duration::from_secs(2);

/// The two ports that name a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Key {
    pub(super) host_port: u32,
    pub(super) guest_port: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// The guest was asked and has not answered.
    Requested,
    /// Bytes flow.
    Open,
    /// The end has been told; the guest is to confirm.
    Closing,
}

/// What has to be told to the guest as soon as it has a buffer; the order of the fields is the order of telling.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Notices {
    request: bool,
    response: bool,
    reset: bool,
    credit: bool,
    shutdown: bool,
}

/// What happened to a packet from the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// The connection goes on.
    Goes,
    /// It is over; forget it.
    Over,
}

pub(super) struct Connection {
    pub(super) key: Key,
    pub(super) stream: UnixStream,
    pub(super) stage: Stage,
    notices: Notices,
    /// The host's socket may have bytes.
    pub(super) readable: bool,
    /// The host's end will send no more.
    host_ended: bool,
    /// Nor will it take anything.
    gone: bool,
    /// The guest will receive or send no more.
    guest_shut: u32,
    /// From the guest, not yet taken by the host's socket.
    pending: VecDeque<u8>,
    /// Bytes taken by the host's socket, and that number as the guest was told last.
    forwarded: u32,
    forwarded_told: u32,
    /// Bytes sent to the guest, and what it has said of its buffer.
    sent: u32,
    peer_buffer: u32,
    peer_forwarded: u32,
    deadline: Option<Instant>,
}

impl Connection {
    /// A connection that the host asks for.
    pub(super) fn from_host(key: Key, stream: UnixStream) -> Self {
        let mut connection = Self::new(key, stream, Stage::Requested);
        connection.notices.request = true;
        connection.deadline = Some(Instant::now() + PATIENCE);
        connection
    }

    /// A connection that the guest asked for by `request`.
    pub(super) fn from_guest(key: Key, stream: UnixStream, request: &Header) -> Self {
        let mut connection = Self::new(key, stream, Stage::Open);
        connection.notices.response = true;
        connection.hear_credit(request);
        connection
    }

    fn new(key: Key, stream: UnixStream, stage: Stage) -> Self {
        Self {
            key,
            stream,
            stage,
            notices: Notices::default(),
            readable: true,
            host_ended: false,
            gone: false,
            guest_shut: 0,
            pending: VecDeque::new(),
            forwarded: 0,
            forwarded_told: 0,
            sent: 0,
            peer_buffer: 0,
            peer_forwarded: 0,
            deadline: None,
        }
    }

    /// When the guest's answer is due.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    fn hear_credit(&mut self, header: &Header) {
        self.peer_buffer = header.buf_alloc.get();
        self.peer_forwarded = header.fwd_cnt.get();
    }

    /// Bytes that the guest has room for.
    pub(super) fn credit(&self) -> u32 {
        let under_way = self.sent.wrapping_sub(self.peer_forwarded);
        self.peer_buffer.saturating_sub(under_way)
    }

    /// A packet of the guest's with its bytes.
    pub(super) fn hear(&mut self, header: &Header, bytes: &[u8]) -> Outcome {
        self.hear_credit(header);
        match (header.op.get(), self.stage) {
            (op::RESPONSE, Stage::Requested) => {
                self.stage = Stage::Open;
                self.deadline = None;
                // The socket is fresh, so a short line always fits; a client that is gone is noticed by reading.
                let line = format!("OK {}\n", self.key.host_port);
                let _ = send(self.stream.as_fd(), line.as_bytes(), SendFlags::NOSIGNAL);
            }
            (op::RW, Stage::Open) => return self.take(bytes),
            (op::SHUTDOWN, Stage::Open | Stage::Closing) => {
                self.guest_shut |= header.flags.get() & shutdown::BOTH;
                if self.guest_shut & shutdown::SEND != 0 {
                    self.flush();
                }
                if self.guest_shut == shutdown::BOTH && self.pending.is_empty() {
                    self.notices.reset = true;
                }
            }
            (op::CREDIT_REQUEST, _) => self.notices.credit = true,
            (op::CREDIT_UPDATE, _) => {}
            (op::RST, _) => return Outcome::Over,
            // Bytes that were on their way when the end was told.
            (op::RW, Stage::Closing) => {}
            _ => self.notices.reset = true,
        }
        Outcome::Goes
    }

    fn take(&mut self, bytes: &[u8]) -> Outcome {
        let room = (BUFFER_BYTES as usize).saturating_sub(self.pending.len());
        if bytes.len() > room || self.guest_shut & shutdown::SEND != 0 {
            // It has sent more than it had credit for, or after it said that it would not.
            self.notices.reset = true;
            return Outcome::Goes;
        }
        self.pending.extend(bytes);
        self.flush();
        Outcome::Goes
    }

    /// Hands bytes of the guest's on, as far as the host's socket takes them.
    pub(super) fn flush(&mut self) {
        while !self.pending.is_empty() {
            let (next, _) = self.pending.as_slices();
            match send(self.stream.as_fd(), next, SendFlags::NOSIGNAL) {
                Ok(sent) => {
                    self.pending.drain(..sent);
                    self.forwarded = self.forwarded.wrapping_add(sent as u32);
                }
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => break,
                Err(_) => {
                    self.pending.clear();
                    self.notices.reset = true;
                    return;
                }
            }
        }
        // A guest that has little credit left may be waiting for more.
        let untold = self.forwarded.wrapping_sub(self.forwarded_told);
        if untold >= BUFFER_BYTES / 2 {
            self.notices.credit = true;
        }
        if self.pending.is_empty() && self.guest_shut & shutdown::SEND != 0 {
            // The host's end reads its end of file after the last byte. One that is gone already needs no telling.
            let _ = self.stream.shutdown(std::net::Shutdown::Write);
            if self.guest_shut == shutdown::BOTH {
                self.notices.reset = true;
            }
        }
    }

    /// Whether the guest has to be told or sent something.
    pub(super) fn has_news(&self) -> bool {
        self.notices != Notices::default() || self.can_send()
    }

    /// Whether the host's socket may have bytes that the guest has room for.
    pub(super) fn can_send(&self) -> bool {
        self.stage == Stage::Open
            && self.readable
            && !self.host_ended
            && self.guest_shut & shutdown::RECEIVE == 0
            && self.credit() > 0
    }

    /// What has to be told next, if it is not bytes; with whether that was the last word.
    pub(super) fn notice(&mut self, guest_cid: u64) -> Option<(Header, Outcome)> {
        let mut outcome = Outcome::Goes;
        let notices = &mut self.notices;
        let (op, flags) = if std::mem::take(&mut notices.request) {
            (op::REQUEST, 0)
        } else if notices.reset {
            outcome = Outcome::Over;
            (op::RST, 0)
        } else if std::mem::take(&mut notices.response) {
            (op::RESPONSE, 0)
        } else if std::mem::take(&mut notices.credit) {
            (op::CREDIT_UPDATE, 0)
        } else if std::mem::take(&mut notices.shutdown) {
            if self.gone {
                self.stage = Stage::Closing;
                self.deadline = Some(Instant::now() + PATIENCE);
                (op::SHUTDOWN, shutdown::BOTH)
            } else {
                (op::SHUTDOWN, shutdown::SEND)
            }
        } else {
            return None;
        };
        let mut header = self.header(guest_cid, op);
        header.flags = flags.into();
        Some((header, outcome))
    }

    /// A header of this connection, with what the guest has to know of our buffer.
    pub(super) fn header(&mut self, guest_cid: u64, op: u16) -> Header {
        self.forwarded_told = self.forwarded;
        Header {
            src_cid: super::bits::HOST_CID.into(),
            dst_cid: guest_cid.into(),
            src_port: self.key.host_port.into(),
            dst_port: self.key.guest_port.into(),
            kind: TYPE_STREAM.into(),
            op: op.into(),
            buf_alloc: BUFFER_BYTES.into(),
            fwd_cnt: self.forwarded.into(),
            ..Header::default()
        }
    }

    /// What reading from the host's socket gave.
    pub(super) fn was_read(&mut self, result: &io::Result<usize>) {
        match result {
            Ok(0) => {
                self.host_ended = true;
                self.readable = false;
                // It may go on reading: only its sending has ended.
                self.notices.shutdown = true;
            }
            Ok(bytes) => self.sent = self.sent.wrapping_add(*bytes as u32),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.readable = false,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => {
                self.readable = false;
                self.notices.reset = true;
            }
        }
    }

    /// The host's end is gone altogether: it neither sends nor takes anything any more. What it had sent before is still read.
    pub(super) fn hung_up(&mut self) {
        self.gone = true;
        match self.stage {
            Stage::Requested => self.notices.reset = true,
            Stage::Open if self.host_ended => self.notices.shutdown = true,
            Stage::Open => self.readable = true,
            Stage::Closing => {}
        }
    }

    /// The guest's answer is overdue.
    pub(super) fn give_up(&mut self) {
        self.notices = Notices {
            reset: true,
            ..Notices::default()
        };
        self.stage = Stage::Closing;
        self.deadline = None;
    }
}

/// The refusal of a packet that belongs to no connection.
pub(super) fn refusal(to: &Header) -> Header {
    Header {
        src_cid: to.dst_cid,
        dst_cid: to.src_cid,
        src_port: to.dst_port,
        dst_port: to.src_port,
        kind: to.kind,
        op: op::RST.into(),
        ..Header::default()
    }
}
