//! The server's end: HTTP/1.1 (RFC 9112) with JSON on a unix socket.
//!
//! Whoever owns the VM implements [`VmService`]; [`serve`] turns requests into its calls and keeps every bound: connections,
//! header and body sizes, times.

use std::future::Future;

use tokio::sync::broadcast;

use crate::definition::VmConfig;
use crate::types::{ApiError, Event, Info, ShutdownRequest, VmView};

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

    /// Counters in the Prometheus text format (version 0.0.4).
    fn metrics(&self) -> impl Future<Output = Reply<String>> + Send;

    /// Events from now on.
    fn subscribe(&self) -> broadcast::Receiver<Event>;
}
