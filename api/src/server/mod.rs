//! The server's end: HTTP/1.1 (RFC 9112) with JSON on a unix socket.
//!
//! Whoever owns the VM implements [`VmService`]; [`serve`] turns requests into its calls.
//!
//! | bound | what happens beyond it |
//! |---|---|
//! | [`limits::CONNECTIONS`] | further clients wait to be accepted |
//! | [`limits::HEADER_BYTES`], [`limits::HEADERS`] | 431 |
//! | [`limits::BODY_BYTES`] | 413 |
//! | [`limits::REQUEST_TIMEOUT`] for the header and for the body | the connection is closed; 408 |
//! | [`limits::REPLY_TIMEOUT`] for a client to read on | the connection is closed |
//! | [`limits::SUBSCRIBERS`] | 429 |
//!
//! ```text
//!  bind_socket ─▶ serve ─▶ one task a connection ─▶ routes ─▶ VmService (messages to the owner)
//!                   └ told to stop: no new connections, replies in flight are written, event streams end, return
//! ```

mod disk_routes;
mod events;
pub mod openapi;
mod patience;
mod routes;

use std::future::Future;
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, broadcast, watch};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

pub use crate::socket::{SocketError, SocketGuard, bind_socket};

use self::patience::Patient;
use crate::definition::{LimitsConfig, VmConfig};
use crate::disks::{DiskView, JobChange, JobRequest, JobView, ResizeRequest, SnapshotRequest};
use crate::types::{ApiError, Event, Info, ShutdownRequest, VmView};

/// What a client may take of the server.
pub mod limits {
    use std::time::Duration;

    /// Clients at once.
    pub const CONNECTIONS: usize = 32;
    /// Readers of events at once.
    pub const SUBSCRIBERS: usize = 8;
    /// A request's line and header together.
    pub const HEADER_BYTES: usize = 16 << 10;
    /// A request's header fields.
    pub const HEADERS: usize = 64;
    /// A request's body.
    pub const BODY_BYTES: usize = 1 << 20;
    /// For the header to arrive, and then for the body.
    pub const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
    /// For a client to take some of a reply that waits for it.
    pub const REPLY_TIMEOUT: Duration = Duration::from_secs(10);
    /// For the clients to take the last replies when the server stops.
    pub const STOP_TIMEOUT: Duration = Duration::from_secs(2);
}

/// What a request got.
pub type Reply<T> = Result<T, ApiError>;

/// What `PUT /v1/vm` did.
#[derive(Clone, Debug, PartialEq)]
pub enum Created {
    /// A VM was made.
    New(VmView),
    /// There is one of the same definition already.
    Existing(VmView),
}

/// The owner of the VM, as requests reach it. The server runs each call on its own task of a current-thread runtime.
///
/// Calls are idempotent: what is already so is a success. What the state forbids is [`ApiError::wrong_state`], what needs a VM
/// while there is none is [`ApiError::no_vm`].
pub trait VmService: Send + Sync + 'static {
    /// Who answers. Never waits for the VM.
    fn info(&self) -> impl Future<Output = Reply<Info>> + Send;

    /// The VM as it is now.
    fn vm(&self) -> impl Future<Output = Reply<VmView>> + Send;

    /// Makes a VM from a definition that [`VmConfig::validate`] accepted; opens all that it needs, or nothing.
    fn create(&self, config: VmConfig) -> impl Future<Output = Reply<Created>> + Send;

    /// Removes a VM that is created or stopped. Nothing to remove is a success.
    fn delete(&self) -> impl Future<Output = Reply<()>> + Send;

    /// Lets a created VM run.
    fn start(&self) -> impl Future<Output = Reply<VmView>> + Send;

    /// Presses the power button and starts the deadline; replies at once. A second, shorter deadline replaces the first.
    fn shutdown(&self, request: ShutdownRequest) -> impl Future<Output = Reply<VmView>> + Send;

    /// Resets a running VM.
    fn reset(&self) -> impl Future<Output = Reply<VmView>> + Send;

    /// Parks the processors of a running VM.
    fn pause(&self) -> impl Future<Output = Reply<VmView>> + Send;

    /// Lets a paused VM run on, after what failed was tried again.
    fn resume(&self) -> impl Future<Output = Reply<VmView>> + Send;

    /// The disks, in the definition's order.
    fn disks(&self) -> impl Future<Output = Reply<Vec<DiskView>>> + Send;

    /// Makes a disk larger. The size is one that [`ResizeRequest::validate`] accepted.
    fn resize(
        &self,
        disk: String,
        request: ResizeRequest,
    ) -> impl Future<Output = Reply<DiskView>> + Send;

    /// Lets disks continue in overlays, all at the same instant or none. [`SnapshotRequest::validate`] accepted it.
    fn snapshot(
        &self,
        request: SnapshotRequest,
    ) -> impl Future<Output = Reply<Vec<DiskView>>> + Send;

    /// Changes the limits of a disk, or of the group that it belongs to.
    fn limit(
        &self,
        disk: String,
        limits: LimitsConfig,
    ) -> impl Future<Output = Reply<DiskView>> + Send;

    /// Begins a job on a disk.
    fn begin_job(
        &self,
        disk: String,
        request: JobRequest,
    ) -> impl Future<Output = Reply<JobView>> + Send;

    /// All jobs that were not removed, oldest first.
    fn jobs(&self) -> impl Future<Output = Reply<Vec<JobView>>> + Send;

    /// One job.
    fn job(&self, id: String) -> impl Future<Output = Reply<JobView>> + Send;

    /// Changes a job's rate, or lets it wait or go on.
    fn change_job(
        &self,
        id: String,
        change: JobChange,
    ) -> impl Future<Output = Reply<JobView>> + Send;

    /// Cancels a job that is under way; removes one that is over.
    fn delete_job(&self, id: String) -> impl Future<Output = Reply<JobView>> + Send;

    /// Counters in the Prometheus text format (version 0.0.4).
    fn metrics(&self) -> impl Future<Output = Reply<String>> + Send;

    /// Events from now on.
    fn subscribe(&self) -> broadcast::Receiver<Event>;
}

/// Serves requests on this thread, with a current-thread runtime of its own, until `stop` is ready. See [`serve`].
///
/// # Errors
/// The runtime could not be built, or the listener not be handed to it.
pub fn run<S: VmService>(
    listener: std::os::unix::net::UnixListener,
    service: Arc<S>,
    stop: impl Future<Output = ()>,
) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .enable_time()
        .build()?;
    runtime.block_on(async {
        serve(UnixListener::from_std(listener)?, service, stop).await;
        Ok(())
    })
}

/// Serves requests until `stop` is ready; returns once the replies in flight are with the clients (or
/// [`limits::STOP_TIMEOUT`] has passed), so that the process may end.
pub async fn serve<S: VmService>(
    listener: UnixListener,
    service: Arc<S>,
    stop: impl Future<Output = ()>,
) {
    let (stopping, stopped) = watch::channel(false);
    let router = routes::router(service, stopped.clone());
    let slots = Arc::new(Semaphore::new(limits::CONNECTIONS));
    let mut connections = JoinSet::new();
    let mut stop = pin!(stop);
    loop {
        tokio::select! {
            biased;
            () = &mut stop => break,
            Some(_) = connections.join_next() => {}
            accepted = accept(&listener, &slots) => match accepted {
                Ok((stream, slot)) => {
                    connections.spawn(connection(stream, router.clone(), stopped.clone(), slot));
                }
                Err(error) => {
                    // Out of descriptors, most likely: without a pause this would spin until some are free again.
                    tracing::warn!(%error, "cannot accept an API client");
                    sleep(Duration::from_millis(100)).await;
                }
            },
        }
    }
    drop(listener);
    stopping.send_replace(true);
    let last = async { while connections.join_next().await.is_some() {} };
    if timeout(limits::STOP_TIMEOUT, last).await.is_err() {
        tracing::warn!("an API client did not take its last reply in time");
    }
}

async fn accept(
    listener: &UnixListener,
    slots: &Arc<Semaphore>,
) -> io::Result<(UnixStream, OwnedSemaphorePermit)> {
    let slot = Arc::clone(slots)
        .acquire_owned()
        .await
        .map_err(io::Error::other)?;
    let (stream, _) = listener.accept().await?;
    Ok((stream, slot))
}

async fn connection(
    stream: UnixStream,
    router: axum::Router,
    mut stopped: watch::Receiver<bool>,
    _slot: OwnedSemaphorePermit,
) {
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(limits::REQUEST_TIMEOUT)
        .max_buf_size(limits::HEADER_BYTES)
        .max_headers(limits::HEADERS)
        .serve_connection(
            TokioIo::new(Patient::new(stream, limits::REPLY_TIMEOUT)),
            TowerToHyperService::new(router),
        );
    let mut connection = pin!(connection);
    let result = tokio::select! {
        result = connection.as_mut() => result,
        () = async { let _ = stopped.wait_for(|stopped| *stopped).await; } => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = result {
        tracing::debug!(%error, "an API client went away");
    }
}
