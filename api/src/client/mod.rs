//! The client's end: one connection a request, so that a VMM that restarts is simply talked to again.
//!
//! [`Client`] is for programs on a tokio runtime; [`blocking::Client`] is the same for those that have none.

pub mod blocking;
mod events;

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::header::{ACCEPT, CONNECTION, CONTENT_TYPE, HOST};
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::net::UnixStream;
use tokio::time::timeout;

pub use events::Events;

use crate::definition::{LimitsConfig, VmConfig};
use crate::disks::{DiskView, JobChange, JobRequest, JobView, ResizeRequest, SnapshotRequest};
use crate::types::{ApiError, Info, ShutdownRequest, VmView};

/// A reply larger than this is not read, bytes.
const MAX_REPLY: usize = 16 << 20;

/// Why a request got no good reply.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// Nobody answers on the socket.
    #[error("{}: cannot connect: {source}", socket.display())]
    Connect {
        /// The socket.
        socket: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The server refused the request, and says why.
    #[error("{0}")]
    Refused(#[source] ApiError),
    /// The server went away before its reply was complete.
    #[error("{operation}: the connection broke: {source}")]
    Broken {
        /// Method and path.
        operation: String,
        /// What went wrong.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The reply is not what this version of the client expects.
    #[error("{operation}: unexpected reply: {reason}")]
    Unexpected {
        /// Method and path.
        operation: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The reply took too long.
    #[error("{operation}: no reply in {} ms", limit.as_millis())]
    Timeout {
        /// Method and path.
        operation: String,
        /// How long the client waited.
        limit: Duration,
    },
}

impl ClientError {
    /// Whether nobody serves the socket: there is none, or its process is gone.
    #[must_use]
    pub fn is_absent(&self) -> bool {
        use io::ErrorKind::{ConnectionRefused, NotFound};
        matches!(self, Self::Connect { source, .. } if matches!(source.kind(), NotFound | ConnectionRefused))
    }
}

/// What a request got.
pub type Result<T> = std::result::Result<T, ClientError>;

/// Talks to the VM behind one socket.
#[derive(Clone, Debug)]
pub struct Client {
    socket: PathBuf,
    limit: Duration,
}

impl Client {
    /// A client of `socket`. Nothing is connected before the first request.
    pub fn new(socket: impl Into<PathBuf>) -> Self {
        Self {
            socket: socket.into(),
            limit: Duration::from_secs(60),
        }
    }

    /// Waits at most `limit` for each reply, instead of a minute.
    #[must_use]
    pub fn with_timeout(mut self, limit: Duration) -> Self {
        self.limit = limit;
        self
    }

    /// The socket.
    #[must_use]
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// `GET /v1/info`.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn info(&self) -> Result<Info> {
        self.call(Method::GET, "/v1/info", NO_BODY).await
    }

    /// `GET /v1/vm`.
    ///
    /// # Errors
    /// See [`ClientError`]; [`crate::types::ErrorCode::NoVm`] where there is none.
    pub async fn vm(&self) -> Result<VmView> {
        self.call(Method::GET, "/v1/vm", NO_BODY).await
    }

    /// `PUT /v1/vm`.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn create(&self, config: &VmConfig) -> Result<VmView> {
        self.call(Method::PUT, "/v1/vm", Some(config)).await
    }

    /// `DELETE /v1/vm`.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn delete(&self) -> Result<()> {
        self.exchange(Method::DELETE, "/v1/vm", NO_BODY)
            .await
            .map(drop)
    }

    /// `POST /v1/vm/start`.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn start(&self) -> Result<VmView> {
        self.call(Method::POST, "/v1/vm/start", NO_BODY).await
    }

    /// `POST /v1/vm/shutdown`: returns when the guest has been asked, not when it is off.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn shutdown(&self, request: ShutdownRequest) -> Result<VmView> {
        self.call(Method::POST, "/v1/vm/shutdown", Some(&request))
            .await
    }

    /// `POST /v1/vm/reset`.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn reset(&self) -> Result<VmView> {
        self.call(Method::POST, "/v1/vm/reset", NO_BODY).await
    }

    /// `POST /v1/vm/pause`.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn pause(&self) -> Result<VmView> {
        self.call(Method::POST, "/v1/vm/pause", NO_BODY).await
    }

    /// `POST /v1/vm/resume`.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn resume(&self) -> Result<VmView> {
        self.call(Method::POST, "/v1/vm/resume", NO_BODY).await
    }

    /// `GET /v1/vm/disks`.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn disks(&self) -> Result<Vec<DiskView>> {
        self.call(Method::GET, "/v1/vm/disks", NO_BODY).await
    }

    /// `POST /v1/vm/disks/{disk}/resize`.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn resize(&self, disk: &str, request: ResizeRequest) -> Result<DiskView> {
        self.call(
            Method::POST,
            &format!("/v1/vm/disks/{disk}/resize"),
            Some(&request),
        )
        .await
    }

    /// `POST /v1/vm/disks/snapshot`.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn snapshot(&self, request: &SnapshotRequest) -> Result<Vec<DiskView>> {
        self.call(Method::POST, "/v1/vm/disks/snapshot", Some(request))
            .await
    }

    /// `PUT /v1/vm/disks/{disk}/limits`.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn limit(&self, disk: &str, limits: &LimitsConfig) -> Result<DiskView> {
        self.call(
            Method::PUT,
            &format!("/v1/vm/disks/{disk}/limits"),
            Some(limits),
        )
        .await
    }

    /// `POST /v1/vm/disks/{disk}/jobs`.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn begin_job(&self, disk: &str, request: JobRequest) -> Result<JobView> {
        self.call(
            Method::POST,
            &format!("/v1/vm/disks/{disk}/jobs"),
            Some(&request),
        )
        .await
    }

    /// `GET /v1/vm/jobs`.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn jobs(&self) -> Result<Vec<JobView>> {
        self.call(Method::GET, "/v1/vm/jobs", NO_BODY).await
    }

    /// `GET /v1/vm/jobs/{id}`.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn job(&self, id: &str) -> Result<JobView> {
        self.call(Method::GET, &format!("/v1/vm/jobs/{id}"), NO_BODY)
            .await
    }

    /// `PATCH /v1/vm/jobs/{id}`.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn change_job(&self, id: &str, change: JobChange) -> Result<JobView> {
        self.call(Method::PATCH, &format!("/v1/vm/jobs/{id}"), Some(&change))
            .await
    }

    /// `DELETE /v1/vm/jobs/{id}`.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn delete_job(&self, id: &str) -> Result<JobView> {
        self.call(Method::DELETE, &format!("/v1/vm/jobs/{id}"), NO_BODY)
            .await
    }

    /// `GET /v1/metrics`: Prometheus text.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn metrics(&self) -> Result<String> {
        let body = self.exchange(Method::GET, "/v1/metrics", NO_BODY).await?;
        String::from_utf8(body.into()).map_err(|error| ClientError::Unexpected {
            operation: operation(&Method::GET, "/v1/metrics"),
            reason: error.to_string(),
        })
    }

    /// `GET /v1/events`: what happens from now on. The timeout holds until the stream begins.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn events(&self) -> Result<Events> {
        let (method, path) = (Method::GET, "/v1/events");
        let reply = self
            .in_time(&method, path, self.send(&method, path, NO_BODY))
            .await?;
        if reply.status().is_success() {
            return Ok(Events::new(reply.into_body()));
        }
        let status = reply.status();
        let body = self
            .in_time(&method, path, collect(&method, path, reply.into_body()))
            .await?;
        Err(refusal(&method, path, status, &body))
    }

    async fn call<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: Option<&impl Serialize>,
    ) -> Result<T> {
        let operation = operation(&method, path);
        let reply = self.exchange(method, path, body).await?;
        serde_json::from_slice(&reply).map_err(|error| ClientError::Unexpected {
            operation,
            reason: error.to_string(),
        })
    }

    async fn exchange(
        &self,
        method: Method,
        path: &str,
        body: Option<&impl Serialize>,
    ) -> Result<Bytes> {
        let exchange = async {
            let reply = self.send(&method, path, body).await?;
            let status = reply.status();
            let body = collect(&method, path, reply.into_body()).await?;
            if status.is_success() {
                Ok(body)
            } else {
                Err(refusal(&method, path, status, &body))
            }
        };
        self.in_time(&method, path, exchange).await
    }

    async fn in_time<T>(
        &self,
        method: &Method,
        path: &str,
        work: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        timeout(self.limit, work).await.unwrap_or_else(|_| {
            Err(ClientError::Timeout {
                operation: operation(method, path),
                limit: self.limit,
            })
        })
    }

    async fn send(
        &self,
        method: &Method,
        path: &str,
        body: Option<&impl Serialize>,
    ) -> Result<Response<Incoming>> {
        let unexpected = |reason: String| ClientError::Unexpected {
            operation: operation(method, path),
            reason,
        };
        let mut request = Request::builder()
            .method(method)
            .uri(path)
            .header(HOST, "drover")
            .header(CONNECTION, "close")
            .header(ACCEPT, "application/json");
        let body = match body {
            Some(body) => {
                request = request.header(CONTENT_TYPE, "application/json");
                serde_json::to_vec(body).map_err(|error| unexpected(error.to_string()))?
            }
            None => Vec::new(),
        };
        let request = request
            .body(Full::new(Bytes::from(body)))
            .map_err(|error| unexpected(error.to_string()))?;
        let stream =
            UnixStream::connect(&self.socket)
                .await
                .map_err(|source| ClientError::Connect {
                    socket: self.socket.clone(),
                    source,
                })?;
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
            .await
            .map_err(|error| broken(method, path, error))?;
        // Ends with the reply's body; its errors are those of the reply.
        tokio::spawn(connection);
        sender
            .send_request(request)
            .await
            .map_err(|error| broken(method, path, error))
    }
}

const NO_BODY: Option<&()> = None;

async fn collect(method: &Method, path: &str, body: Incoming) -> Result<Bytes> {
    match Limited::new(body, MAX_REPLY).collect().await {
        Ok(body) => Ok(body.to_bytes()),
        Err(error) if error.is::<LengthLimitError>() => Err(ClientError::Unexpected {
            operation: operation(method, path),
            reason: format!("larger than {MAX_REPLY} bytes"),
        }),
        Err(error) => Err(broken(method, path, error)),
    }
}

fn refusal(method: &Method, path: &str, status: StatusCode, body: &[u8]) -> ClientError {
    serde_json::from_slice(body).map_or_else(
        |_| ClientError::Unexpected {
            operation: operation(method, path),
            reason: format!("status {status} without an error that this client knows"),
        },
        ClientError::Refused,
    )
}

fn broken(
    method: &Method,
    path: &str,
    source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
) -> ClientError {
    ClientError::Broken {
        operation: operation(method, path),
        source: source.into(),
    }
}

fn operation(method: &Method, path: &str) -> String {
    format!("{method} {path}")
}
