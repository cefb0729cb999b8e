//! A disk on a socket: one client after the other, until told to stop.

use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::event::{PollFd, PollFlags, poll};
use vhost::vhost_user::{BackendReqHandler, Error as Protocol};

use super::session::Session;
use crate::virtio::block::Block;

/// How an export ended before it was told to.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    /// The host refused something.
    #[error("{0}: {1}")]
    Host(&'static str, #[source] io::Error),
    /// At the end not everything could be made durable.
    #[error("the disk was closed, but not everything that was written is durable")]
    NotDurable,
}

/// What an export promises its clients.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Crashes {
    /// A crash of the export is to the guest what a power cut is to a disk: what it had not flushed may be gone, and requests under way
    /// may be lost. A client had better not go on as if nothing had happened.
    #[default]
    LoseCache,
    /// Whatever was answered is durable, and the client keeps a record of what is under way (INFLIGHT_SHMFD): it may connect to the
    /// next export after any crash, and its guest notices nothing. Every write waits for the host's disk.
    LoseNothing,
}

/// Serves `disk` to whoever connects to `listener` until `stop` is readable; then answers what is under way, makes everything durable
/// and closes the disk. A client that connects while another is served waits.
///
/// # Errors
/// The host has no threads or descriptors left, or a disk failed at the end.
pub fn serve(
    listener: &UnixListener,
    disk: Block,
    crashes: Crashes,
    stop: BorrowedFd<'_>,
) -> Result<(), ExportError> {
    let metrics = disk.metrics();
    let session = Arc::new(Mutex::new(Session::new(disk, crashes)));
    listener
        .set_nonblocking(true)
        .map_err(host("watch the socket"))?;
    let result = accept_clients(listener, &session, stop);
    let failures = lock(&session).failures();
    // The last reference: the device closes its disk before this returns.
    drop(session);
    result?;
    if metrics.failed.load(std::sync::atomic::Ordering::Relaxed) > failures {
        return Err(ExportError::NotDurable);
    }
    Ok(())
}

fn host(what: &'static str) -> impl Fn(io::Error) -> ExportError {
    move |error| ExportError::Host(what, error)
}

fn lock(session: &Mutex<Session>) -> std::sync::MutexGuard<'_, Session> {
    session.lock().unwrap_or_else(PoisonError::into_inner)
}

fn accept_clients(
    listener: &UnixListener,
    session: &Arc<Mutex<Session>>,
    stop: BorrowedFd<'_>,
) -> Result<(), ExportError> {
    while !wait(listener.as_fd(), stop)? {
        match listener.accept() {
            Ok((stream, _)) => serve_client(stream, session, stop)?,
            // It went away again before it was accepted.
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::WouldBlock
                        | io::ErrorKind::ConnectionAborted
                        | io::ErrorKind::Interrupted
                ) => {}
            Err(error) => return Err(ExportError::Host("accept a client", error)),
        }
    }
    Ok(())
}

/// Serves one client to its end, or until `stop` is readable.
fn serve_client(
    stream: UnixStream,
    session: &Arc<Mutex<Session>>,
    stop: BorrowedFd<'_>,
) -> Result<(), ExportError> {
    stream
        .set_nonblocking(false)
        .map_err(host("take a client"))?;
    let line = stream.try_clone().map_err(host("take a client"))?;
    let (ended, over) = rustix::pipe::pipe().map_err(|e| host("take a client")(e.into()))?;
    let mut messages = BackendReqHandler::from_stream(stream, Arc::clone(session));
    tracing::info!("a client has connected");
    // Waiting for a message cannot wait for anything else, so it gets a thread; closing the socket ends it.
    let thread = std::thread::Builder::new()
        .name("vhost-user".into())
        .spawn(move || {
            let end = loop {
                if let Err(error) = messages.handle_request() {
                    break error;
                }
            };
            drop(over);
            end
        })
        .map_err(host("start a thread for a client"))?;
    let stopped = wait(ended.as_fd(), stop);
    let _ = line.shutdown(Shutdown::Both);
    let end = thread.join();
    lock(session).disconnect();
    match end {
        Ok(Protocol::Disconnected | Protocol::PartialMessage | Protocol::SocketBroken(_)) => {
            tracing::info!("the client has left");
        }
        Ok(error) => tracing::warn!("the client was turned away: {error}"),
        Err(_) => tracing::error!("the client's thread ended by a panic"),
    }
    stopped.map(drop)
}

/// Waits for `file` or `stop` to be readable; true if it is `stop`.
fn wait(file: BorrowedFd<'_>, stop: BorrowedFd<'_>) -> Result<bool, ExportError> {
    let mut files = [
        PollFd::from_borrowed_fd(file, PollFlags::IN),
        PollFd::from_borrowed_fd(stop, PollFlags::IN),
    ];
    loop {
        match poll(&mut files, None) {
            Ok(_) => return Ok(!files[1].revents().is_empty()),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(ExportError::Host("wait for clients", error.into())),
        }
    }
}
