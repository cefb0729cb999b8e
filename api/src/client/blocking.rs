//! The client for programs without a tokio runtime: each has one of its own, on the thread that calls.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::runtime::{Builder, Runtime};

use super::Result;
use crate::definition::VmConfig;
use crate::types::{Event, Info, ShutdownRequest, VmView};

/// See [`super::Client`], whose operations and errors these are. Not to be used on a tokio runtime.
#[derive(Debug)]
pub struct Client {
    runtime: Runtime,
    client: super::Client,
}

impl Client {
    /// A client of `socket`. Nothing is connected before the first request.
    ///
    /// # Errors
    /// The runtime could not be built (no descriptors left).
    pub fn new(socket: impl Into<PathBuf>) -> io::Result<Self> {
        let runtime = Builder::new_current_thread()
            .enable_io()
            .enable_time()
            .build()?;
        Ok(Self {
            runtime,
            client: super::Client::new(socket),
        })
    }

    /// Waits at most `limit` for each reply, instead of a minute.
    #[must_use]
    pub fn with_timeout(mut self, limit: Duration) -> Self {
        self.client = self.client.with_timeout(limit);
        self
    }

    /// The socket.
    #[must_use]
    pub fn socket(&self) -> &Path {
        self.client.socket()
    }

    /// `GET /v1/info`.
    ///
    /// # Errors
    /// See [`super::ClientError`].
    pub fn info(&self) -> Result<Info> {
        self.runtime.block_on(self.client.info())
    }

    /// `GET /v1/vm`.
    ///
    /// # Errors
    /// See [`super::ClientError`].
    pub fn vm(&self) -> Result<VmView> {
        self.runtime.block_on(self.client.vm())
    }

    /// `PUT /v1/vm`.
    ///
    /// # Errors
    /// See [`super::ClientError`].
    pub fn create(&self, config: &VmConfig) -> Result<VmView> {
        self.runtime.block_on(self.client.create(config))
    }

    /// `DELETE /v1/vm`.
    ///
    /// # Errors
    /// See [`super::ClientError`].
    pub fn delete(&self) -> Result<()> {
        self.runtime.block_on(self.client.delete())
    }

    /// `POST /v1/vm/start`.
    ///
    /// # Errors
    /// See [`super::ClientError`].
    pub fn start(&self) -> Result<VmView> {
        self.runtime.block_on(self.client.start())
    }

    /// `POST /v1/vm/shutdown`: returns when the guest has been asked, not when it is off.
    ///
    /// # Errors
    /// See [`super::ClientError`].
    pub fn shutdown(&self, request: ShutdownRequest) -> Result<VmView> {
        self.runtime.block_on(self.client.shutdown(request))
    }

    /// `POST /v1/vm/reset`.
    ///
    /// # Errors
    /// See [`super::ClientError`].
    pub fn reset(&self) -> Result<VmView> {
        self.runtime.block_on(self.client.reset())
    }

    /// `GET /v1/metrics`: Prometheus text.
    ///
    /// # Errors
    /// See [`super::ClientError`].
    pub fn metrics(&self) -> Result<String> {
        self.runtime.block_on(self.client.metrics())
    }

    /// `GET /v1/events`: what happens from now on, read with [`Events::next`].
    ///
    /// # Errors
    /// See [`super::ClientError`].
    pub fn events(&self) -> Result<Events<'_>> {
        let events = self.runtime.block_on(self.client.events())?;
        Ok(Events {
            runtime: &self.runtime,
            events,
        })
    }
}

/// The events of one subscription.
#[derive(Debug)]
pub struct Events<'a> {
    runtime: &'a Runtime,
    events: super::Events,
}

impl Events<'_> {
    /// Waits for the next event; `None` when the server has stopped.
    ///
    /// # Errors
    /// See [`super::Events::next`].
    #[expect(
        clippy::should_implement_trait,
        reason = "an iterator of results would hide the end after an error"
    )]
    pub fn next(&mut self) -> Result<Option<Event>> {
        self.runtime.block_on(self.events.next())
    }
}
