//! Workers as they are now.

use std::path::PathBuf;

use drover_api::types::VmState;
use serde::Serialize;

use crate::error::Error;
use crate::process;
use crate::state::{Record, StateDir};
use crate::vmm;

/// What a worker is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Status {
    /// It has no process: it was never started, or its guest is off.
    Stopped,
    /// Its machine is built.
    Created,
    /// Its guest runs.
    Running,
    /// Its processors wait: on request, or because a disk failed.
    Paused,
    /// Its guest has been asked to power off.
    ShuttingDown,
    /// It has a process that does not answer.
    Unreachable,
    /// Its record is missing or damaged; it can only be deleted.
    Damaged,
}

impl Status {
    /// As a person reads it.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::Stopped => "stopped",
            Self::Created => "created",
            Self::Running => "running",
            Self::Paused => "paused",
            Self::ShuttingDown => "shutting-down",
            Self::Unreachable => "unreachable",
            Self::Damaged => "damaged",
        }
    }
}

/// A worker as it is now.
#[derive(Clone, Debug, Serialize)]
pub struct View {
    /// Its name.
    pub name: String,
    /// What it is doing.
    pub status: Status,
    /// Its VMM's process id.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pid: Option<i32>,
    /// What is remembered about it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub record: Option<Record>,
    /// Bytes that its disk takes on the host.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk_used_bytes: Option<u64>,
    /// Its folder.
    pub folder: PathBuf,
    /// Its API.
    pub api_socket: PathBuf,
    /// Its console.
    pub console_socket: PathBuf,
}

/// The worker `name`.
///
/// # Errors
/// There is none.
pub fn show(state: &StateDir, name: &str) -> Result<View, Error> {
    use std::os::unix::fs::MetadataExt;

    let dir = state.worker(name)?;
    if !dir.path().exists() {
        return Err(Error::NotFound {
            name: name.to_owned(),
            state: state.path().to_path_buf(),
        });
    }
    let record = dir.record(state).ok();
    let process = process::find(&dir);
    let status = match (&record, &process) {
        (_, Some(_)) => match vmm::client(&dir)?.vm() {
            Ok(vm) => match vm.state {
                VmState::Created => Status::Created,
                VmState::Running => Status::Running,
                VmState::Paused => Status::Paused,
                VmState::ShuttingDown => Status::ShuttingDown,
                VmState::Stopped => Status::Stopped,
            },
            Err(_) => Status::Unreachable,
        },
        (Some(_), None) => Status::Stopped,
        (None, None) => Status::Damaged,
    };
    Ok(View {
        name: name.to_owned(),
        status,
        pid: process.map(|process| process.id().pid),
        record,
        disk_used_bytes: std::fs::metadata(dir.overlay())
            .ok()
            .map(|file| file.blocks() * 512),
        folder: dir.path().to_path_buf(),
        api_socket: dir.api_socket(),
        console_socket: dir.console_socket(),
    })
}

/// All workers, by name.
///
/// # Errors
/// The state folder cannot be read.
pub fn list(state: &StateDir) -> Result<Vec<View>, Error> {
    let mut views = Vec::new();
    for name in state.names()? {
        match show(state, &name) {
            Ok(view) => views.push(view),
            // Deleted in the meantime.
            Err(Error::NotFound { .. }) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(views)
}
