//! What requests and replies of the API carry, beside the definition itself.

use std::fmt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::definition::{DefinitionError, VmConfig};
use crate::disks::{JobKind, JobState};

/// `GET /v1/info`: who answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "server", derive(utoipa::ToSchema))]
pub struct Info {
    /// The program's version.
    pub version: String,
    /// The process.
    pub pid: u32,
    /// The VM's state; absent while there is no VM.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state: Option<VmState>,
}

/// Where a VM is in its life. Resetting does not leave `running`.
///
/// ```text
///            start            shutdown                 guest off, deadline
///  created ────────▶ running ──────────▶ shutting-down ──────────────────▶ stopped
///     ▲       pause, ↓ │  ↑ resume           ↑                                ▲ ▲
///     │    disk error paused ── shutdown ────┘       guest off, crash         │ │
///     │                └───────────────────────────────────────────────────────┘ │
///     └── PUT ── (no VM) ◀── DELETE ── created, stopped ◀──────────────────────┘
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "server", derive(utoipa::ToSchema))]
#[serde(rename_all = "kebab-case")]
pub enum VmState {
    /// Built, everything it needs is open; its processors have not run.
    Created,
    /// Its processors run.
    Running,
    /// Its processors wait: on request, or because a disk failed and its definition says `stop`.
    Paused,
    /// Asked to power off; forced when the deadline passes.
    ShuttingDown,
    /// Over: powered off, forced off or crashed.
    Stopped,
}

impl fmt::Display for VmState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Created => "created",
            Self::Running => "running",
            Self::Paused => "paused",
            Self::ShuttingDown => "shutting-down",
            Self::Stopped => "stopped",
        })
    }
}

/// Why a VM is paused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "server", derive(utoipa::ToSchema))]
#[serde(rename_all = "kebab-case")]
pub enum PauseReason {
    /// `POST /v1/vm/pause`.
    Requested,
    /// A request of a disk failed and waits to be tried again.
    IoError,
}

/// Why a VM stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "server", derive(utoipa::ToSchema))]
#[serde(rename_all = "kebab-case")]
pub enum StopReason {
    /// The guest powered itself off.
    PoweredOff,
    /// It did not power off before the deadline of a shutdown.
    Forced,
    /// The virtual machine could not go on.
    Crashed,
}

/// `GET /v1/vm`: the VM as it is now.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "server", derive(utoipa::ToSchema))]
pub struct VmView {
    /// Where it is in its life.
    pub state: VmState,
    /// Why it stopped, once it has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stop_reason: Option<StopReason>,
    /// Why it is paused, while it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pause_reason: Option<PauseReason>,
    /// How often the guest or the API reset it since it was started.
    pub resets: u64,
    /// The pseudo-terminal of its serial port, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "server", schema(value_type = Option<String>))]
    pub pty: Option<PathBuf>,
    /// The definition it was made from.
    pub config: VmConfig,
}

/// Body of `POST /v1/vm/shutdown`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "server", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct ShutdownRequest {
    /// How long the guest has, after its power button was pressed, before it is forced off; 0 forces it at once. Milliseconds, at most an hour.
    #[serde(default = "default_timeout")]
    #[cfg_attr(feature = "server", schema(maximum = 3_600_000, default = 30_000))]
    pub timeout_ms: u64,
}

/// The longest [`ShutdownRequest::timeout_ms`].
pub const MAX_SHUTDOWN_TIMEOUT_MS: u64 = 3_600_000;

fn default_timeout() -> u64 {
    30_000
}

impl Default for ShutdownRequest {
    fn default() -> Self {
        Self {
            timeout_ms: default_timeout(),
        }
    }
}

impl ShutdownRequest {
    /// # Errors
    /// The timeout is longer than [`MAX_SHUTDOWN_TIMEOUT_MS`].
    pub fn validate(&self) -> Result<(), DefinitionError> {
        if self.timeout_ms > MAX_SHUTDOWN_TIMEOUT_MS {
            return Err(DefinitionError::new(
                "timeout_ms",
                format!(
                    "{} is too long, at most {MAX_SHUTDOWN_TIMEOUT_MS}",
                    self.timeout_ms
                ),
            ));
        }
        Ok(())
    }
}

/// One message of `GET /v1/events`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "server", derive(utoipa::ToSchema))]
pub struct Event {
    /// When, milliseconds since the Unix epoch.
    pub time_ms: u64,
    /// What happened.
    #[serde(flatten)]
    pub kind: EventKind,
}

/// What happened to a VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "server", derive(utoipa::ToSchema))]
#[serde(tag = "event", rename_all = "kebab-case")]
pub enum EventKind {
    /// The VM entered this state.
    State {
        /// The new state.
        state: VmState,
        /// Why it stopped, with the state `stopped`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        stop_reason: Option<StopReason>,
    },
    /// The VM was removed.
    Deleted,
    /// The guest or the API reset the VM.
    Reset,
    /// A shutdown's deadline passed, the VM is forced off.
    ShutdownForced,
    /// The guest misused a device, which stopped serving it until the next reset.
    DeviceBroken {
        /// The device's id in the definition.
        id: String,
        /// What the guest did.
        reason: String,
    },
    /// A request of a disk failed and is kept; the VM is paused until `POST /v1/vm/resume` tries it again.
    IoError {
        /// The disk's id.
        disk: String,
        /// `read`, `write`, `flush`, `discard`, `write-zeroes`, or `open` where its image could not be opened again.
        operation: String,
        /// Where on the disk, in bytes, if it has a place.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        offset: Option<u64>,
        /// Why it failed.
        reason: String,
    },
    /// A job on a disk is over.
    Job {
        /// The job.
        id: String,
        /// The disk.
        disk: String,
        /// What it did.
        kind: JobKind,
        /// `done`, `failed` or `cancelled`.
        state: JobState,
        /// Why it failed.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        error: Option<String>,
    },
    /// The virtual machine could not go on.
    Crashed {
        /// What the hypervisor said.
        reason: String,
    },
    /// The reader was too slow and missed events.
    Lagged {
        /// How many.
        missed: u64,
    },
}

impl EventKind {
    /// The name by which the event goes in the stream: the value of the field `event`.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::State { .. } => "state",
            Self::Deleted => "deleted",
            Self::Reset => "reset",
            Self::ShutdownForced => "shutdown-forced",
            Self::DeviceBroken { .. } => "device-broken",
            Self::IoError { .. } => "io-error",
            Self::Job { .. } => "job",
            Self::Crashed { .. } => "crashed",
            Self::Lagged { .. } => "lagged",
        }
    }
}

/// What kind of error a reply carries; fixes its HTTP status.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "server", derive(utoipa::ToSchema))]
#[serde(rename_all = "kebab-case")]
pub enum ErrorCode {
    /// 400: the body is not what the operation takes.
    Malformed,
    /// 404: there is no VM.
    NoVm,
    /// 404: there is no such path, disk or job.
    NotFound,
    /// 405: the path has no such method.
    MethodNotAllowed,
    /// 408: the body did not arrive in time.
    Timeout,
    /// 409: the VM's state, told in `state`, does not allow it.
    WrongState,
    /// 409: a job is under way on the disk.
    Busy,
    /// 413: the body is too large.
    TooLarge,
    /// 415: the body's content type is none that the operation takes.
    UnsupportedMediaType,
    /// 422: the body has the right shape, but says what cannot be.
    Invalid,
    /// 422: the definition is sound, but this host cannot give what it asks for (a file, a tap, memory, a lock).
    Unavailable,
    /// 429: too many readers of events.
    TooMany,
    /// 500: a failure that no request should cause.
    Internal,
}

impl ErrorCode {
    /// The HTTP status (RFC 9110 §15).
    #[must_use]
    pub fn status(self) -> u16 {
        match self {
            Self::Malformed => 400,
            Self::NoVm | Self::NotFound => 404,
            Self::MethodNotAllowed => 405,
            Self::Timeout => 408,
            Self::WrongState | Self::Busy => 409,
            Self::TooLarge => 413,
            Self::UnsupportedMediaType => 415,
            Self::Invalid | Self::Unavailable => 422,
            Self::TooMany => 429,
            Self::Internal => 500,
        }
    }
}

/// The body of every reply that is no success.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[cfg_attr(feature = "server", derive(utoipa::ToSchema))]
#[error("{}{message}", field.as_ref().map(|field| format!("{field}: ")).unwrap_or_default())]
pub struct ApiError {
    /// What kind of error.
    pub code: ErrorCode,
    /// One line for a person, without the field.
    pub message: String,
    /// The path of the field that is wrong (`disks[0].format`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub field: Option<String>,
    /// With `wrong-state`: the VM's state.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state: Option<VmState>,
}

impl ApiError {
    /// An error without field and state.
    pub fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        Self {
            code,
            message: message.into(),
            field: None,
            state: None,
        }
    }

    /// There is no VM.
    #[must_use]
    pub fn no_vm() -> Self {
        Self::new(
            ErrorCode::NoVm,
            "there is no VM: create one with PUT /v1/vm",
        )
    }

    /// The VM is in `state`, in which `operation` (a verb: "be reset") is impossible.
    #[must_use]
    pub fn wrong_state(state: VmState, operation: &str) -> Self {
        Self {
            state: Some(state),
            ..Self::new(
                ErrorCode::WrongState,
                format!("a VM that is {state} cannot {operation}"),
            )
        }
    }

    /// Names the field at fault.
    #[must_use]
    pub fn with_field(mut self, field: impl Into<String>) -> Self {
        self.field = Some(field.into());
        self
    }

    /// The error of a definition; `code` tells a wrong shape from an impossible value.
    #[must_use]
    pub fn definition(code: ErrorCode, error: &DefinitionError) -> Self {
        Self {
            field: error.field().map(str::to_owned),
            ..Self::new(code, error.reason())
        }
    }

    /// The HTTP status (RFC 9110 §15).
    #[must_use]
    pub fn status(&self) -> u16 {
        self.code.status()
    }
}
