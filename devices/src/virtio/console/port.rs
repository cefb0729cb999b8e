//! One port: a socket on the host, and what both ends have said of it.

use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::net::{SendFlags, send};

/// What a port is and where it leads.
#[derive(Debug)]
pub struct PortOptions {
    /// Its name in the guest (`/dev/virtio-ports/NAME`).
    pub name: String,
    /// Let the guest use it as a console (`/dev/hvcN`).
    pub console: bool,
    /// The host's end leads to whoever holds the other end of this socket.
    pub stream: UnixStream,
}

/// Whether the guest has a port open; set by the device's thread.
#[derive(Clone, Debug, Default)]
pub struct GuestOpen(Arc<AtomicBool>);

impl GuestOpen {
    /// Whether it has.
    #[must_use]
    pub fn get(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }

    pub(super) fn set(&self, open: bool) {
        self.0.store(open, Ordering::Release);
    }
}

/// The most bytes of the guest's that wait for the host's end to take them: one transmit chain.
pub(super) const MOST_PENDING: usize = 256 * 1024;

pub(super) struct Port {
    pub(super) name: String,
    pub(super) console: bool,
    pub(super) stream: UnixStream,
    pub(super) guest_open: GuestOpen,
    /// The host's end may have bytes for the guest.
    pub(super) readable: bool,
    /// The other end is gone; what the guest writes is dropped.
    pub(super) hung_up: bool,
    /// Taken from the guest and not yet by the host's end; from `written` on.
    pending: Vec<u8>,
    written: usize,
}

impl Port {
    pub(super) fn new(options: PortOptions) -> io::Result<Self> {
        options.stream.set_nonblocking(true)?;
        Ok(Self {
            name: options.name,
            console: options.console,
            stream: options.stream,
            guest_open: GuestOpen::default(),
            readable: true,
            hung_up: false,
            pending: Vec::new(),
            written: 0,
        })
    }

    /// Whether bytes of the guest wait for the host's end.
    pub(super) fn is_blocked(&self) -> bool {
        self.written < self.pending.len()
    }

    /// Where the next bytes of the guest go; [`Port::flush`] sends them on. Not while the port is blocked.
    pub(super) fn pending(&mut self) -> &mut Vec<u8> {
        self.pending.clear();
        self.written = 0;
        &mut self.pending
    }

    /// Sends what waits as far as the host's end takes it; how many bytes were dropped because it is gone.
    pub(super) fn flush(&mut self) -> usize {
        while self.is_blocked() {
            let rest = self.pending.get(self.written..).unwrap_or_default();
            match send(self.stream.as_fd(), rest, SendFlags::NOSIGNAL) {
                Ok(sent) => self.written += sent,
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => return 0,
                Err(_) => {
                    self.hung_up = true;
                    let dropped = rest.len();
                    self.written = self.pending.len();
                    return dropped;
                }
            }
        }
        0
    }

    /// The driver is gone, and with it what it had not been told or had not sent.
    pub(super) fn reset(&mut self) {
        self.guest_open.set(false);
        self.pending.clear();
        self.written = 0;
        self.readable = true;
    }
}
