//! The client for programs without a tokio runtime: each has one of its own, on the thread that calls.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::runtime::{Builder, Runtime};

use super::Result;
use crate::definition::{LimitsConfig, VmConfig};
use crate::disks::{DiskView, JobChange, JobRequest, JobView, ResizeRequest, SnapshotRequest};
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

    /// `POST /v1/vm/pause`.
    ///
    /// # Errors
    /// See [`super::ClientError`].
    pub fn pause(&self) -> Result<VmView> {
        self.runtime.block_on(self.client.pause())
    }

    /// `POST /v1/vm/resume`.
    ///
    /// # Errors
    /// See [`super::ClientError`].
    pub fn resume(&self) -> Result<VmView> {
        self.runtime.block_on(self.client.resume())
    }

    /// `GET /v1/vm/disks`.
    ///
    /// # Errors
    /// See [`super::ClientError`].
    pub fn disks(&self) -> Result<Vec<DiskView>> {
        self.runtime.block_on(self.client.disks())
    }

    /// `POST /v1/vm/disks/{disk}/resize`.
    ///
    /// # Errors
    /// See [`super::ClientError`].
    pub fn resize(&self, disk: &str, request: ResizeRequest) -> Result<DiskView> {
        self.runtime.block_on(self.client.resize(disk, request))
    }

    /// `POST /v1/vm/disks/snapshot`.
    ///
    /// # Errors
    /// See [`super::ClientError`].
    pub fn snapshot(&self, request: &SnapshotRequest) -> Result<Vec<DiskView>> {
        self.runtime.block_on(self.client.snapshot(request))
    }

    /// `PUT /v1/vm/disks/{disk}/limits`.
    ///
    /// # Errors
    /// See [`super::ClientError`].
    pub fn limit(&self, disk: &str, limits: &LimitsConfig) -> Result<DiskView> {
        self.runtime.block_on(self.client.limit(disk, limits))
    }

    /// `POST /v1/vm/disks/{disk}/jobs`.
    ///
    /// # Errors
    /// See [`super::ClientError`].
    pub fn begin_job(&self, disk: &str, request: JobRequest) -> Result<JobView> {
        self.runtime.block_on(self.client.begin_job(disk, request))
    }

    /// `GET /v1/vm/jobs`.
    ///
    /// # Errors
    /// See [`super::ClientError`].
    pub fn jobs(&self) -> Result<Vec<JobView>> {
        self.runtime.block_on(self.client.jobs())
    }

    /// `GET /v1/vm/jobs/{id}`.
    ///
    /// # Errors
    /// See [`super::ClientError`].
    pub fn job(&self, id: &str) -> Result<JobView> {
        self.runtime.block_on(self.client.job(id))
    }

    /// `PATCH /v1/vm/jobs/{id}`.
    ///
    /// # Errors
    /// See [`super::ClientError`].
    pub fn change_job(&self, id: &str, change: JobChange) -> Result<JobView> {
        self.runtime.block_on(self.client.change_job(id, change))
    }

    /// `DELETE /v1/vm/jobs/{id}`.
    ///
    /// # Errors
    /// See [`super::ClientError`].
    pub fn delete_job(&self, id: &str) -> Result<JobView> {
        self.runtime.block_on(self.client.delete_job(id))
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
