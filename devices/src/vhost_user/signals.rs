//! The eventfds that a client hands over: kicks, by which its driver rings, and calls, by which its driver is interrupted.

#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd};
use std::sync::{Mutex, PoisonError};

use rustix::fs::OFlags;
use vhost::vhost_user::{Error, Result};
use vmm_sys_util::eventfd::EventFd;

use super::session::refuse;
use crate::virtio::VirtioInterrupt;

/// Takes a descriptor of the client's for an eventfd, if it is one. A pipe or a socket in its place could make a write wait for ever.
pub(super) fn eventfd(file: File) -> Result<EventFd> {
    let host = |error: io::Error| Error::ReqHandlerError(error);
    let link = format!("/proc/self/fd/{}", file.as_raw_fd());
    let kind = std::fs::read_link(link).map_err(host)?;
    if !kind.to_string_lossy().starts_with("anon_inode:[eventfd") {
        return Err(refuse("a kick, call or error descriptor is no eventfd"));
    }
    let flags = rustix::fs::fcntl_getfl(&file).map_err(|e| host(e.into()))?;
    rustix::fs::fcntl_setfl(&file, flags | OFlags::NONBLOCK).map_err(|e| host(e.into()))?;
    // SAFETY: the descriptor is an eventfd, open, and its only owner gives it up here.
    Ok(unsafe { EventFd::from_raw_fd(file.into_raw_fd()) })
}

/// How one ring reaches its driver.
#[derive(Default)]
struct Lines {
    call: Option<EventFd>,
    error: Option<EventFd>,
}

/// The calls of all rings; may be exchanged while rings are served.
pub(super) struct Calls(Vec<Mutex<Lines>>);

impl Calls {
    pub(super) fn new(rings: u16) -> Self {
        Self((0..rings).map(|_| Mutex::default()).collect())
    }

    /// Exchanges a ring's call and rings the new one once: what happened meanwhile may have gone to the old one.
    pub(super) fn set_call(&self, index: u16, call: Option<EventFd>) {
        self.with(index, |lines| {
            ring(call.as_ref());
            lines.call = call;
        });
    }

    /// Exchanges a ring's error line.
    pub(super) fn set_error(&self, index: u16, error: Option<EventFd>) {
        self.with(index, |lines| lines.error = error);
    }

    /// Forgets all lines.
    pub(super) fn clear(&self) {
        for lines in &self.0 {
            *lines.lock().unwrap_or_else(PoisonError::into_inner) = Lines::default();
        }
    }

    fn with(&self, index: u16, action: impl FnOnce(&mut Lines)) {
        if let Some(lines) = self.0.get(usize::from(index)) {
            action(&mut lines.lock().unwrap_or_else(PoisonError::into_inner));
        }
    }
}

/// An eventfd that is full has been rung already.
fn ring(line: Option<&EventFd>) {
    if let Some(line) = line {
        let _ = line.write(1);
    }
}

impl VirtioInterrupt for Calls {
    fn queue(&self, index: u16) {
        self.with(index, |lines| ring(lines.call.as_ref()));
    }

    /// Nothing of a disk's configuration changes while it is exported.
    fn config(&self) {}

    fn needs_reset(&self) {
        for lines in &self.0 {
            ring(
                lines
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .error
                    .as_ref(),
            );
        }
    }
}
