//! What requests and replies about the disks of a VM carry: what there is, live changes, and the jobs on them.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::definition::{ByteSize, DefinitionError, ImageFormat, LimitsConfig, limits};

/// A disk as it is now.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "server", derive(utoipa::ToSchema))]
pub struct DiskView {
    /// Its name in the definition.
    pub id: String,
    /// The size that the guest sees, in bytes.
    pub size_bytes: u64,
    /// Whether writes are refused.
    pub read_only: bool,
    /// What performs its transfers.
    pub io: IoView,
    /// Its images, the one that is written first.
    pub layers: Vec<LayerView>,
    /// What it may use at most; absent where nothing is limited.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limits: Option<LimitsConfig>,
    /// The group that it shares its limits with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit_group: Option<String>,
    /// The job that is under way on it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub job: Option<String>,
    /// Why the disk is not served: its image could not be opened again after a change. `POST /v1/vm/resume` tries once more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub missing: Option<String>,
    /// What was done since the VM was made.
    pub statistics: DiskCounters,
}

/// What performs a disk's transfers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "server", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum IoView {
    /// An io_uring.
    Uring,
    /// A pool of threads.
    Threads,
    /// The disk's own thread.
    Inline,
}

/// One image of a disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "server", derive(utoipa::ToSchema))]
pub struct LayerView {
    /// The file or block device.
    #[cfg_attr(feature = "server", schema(value_type = String))]
    pub path: PathBuf,
    /// Its format.
    pub format: ImageFormat,
    /// What it takes of the host's file system, in bytes; absent where that cannot be told.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allocated_bytes: Option<u64>,
}

/// What was done on a disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "server", derive(utoipa::ToSchema))]
pub struct DiskCounters {
    /// Reads done.
    pub reads: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Writes done.
    pub writes: u64,
    /// Bytes written.
    pub written_bytes: u64,
    /// Flushes done.
    pub flushes: u64,
    /// Discards done.
    pub discards: u64,
    /// Write-zeroes requests done.
    pub write_zeroes: u64,
    /// Requests whose failure the guest was told of.
    pub failed: u64,
    /// Requests that failed and were kept, to be tried again.
    pub kept: u64,
}

/// Body of `POST /v1/vm/disks/{id}/resize`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "server", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct ResizeRequest {
    /// The new size: a multiple of 512 bytes, no less than the present one.
    pub size: ByteSize,
}

impl ResizeRequest {
    /// # Errors
    /// The size is no multiple of 512 bytes, or 0.
    pub fn validate(&self) -> Result<(), DefinitionError> {
        if self.size.0 == 0 || !self.size.0.is_multiple_of(512) {
            let reason = format!("{} is no positive multiple of 512 bytes", self.size);
            return Err(DefinitionError::new("size", reason));
        }
        Ok(())
    }
}

/// Body of `POST /v1/vm/disks/snapshot`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "server", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct SnapshotRequest {
    /// The disks, all of whose images stop changing at the same instant.
    #[cfg_attr(feature = "server", schema(min_items = 1, max_items = 30))]
    pub disks: Vec<SnapshotDisk>,
}

/// A disk that continues in an overlay.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "server", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct SnapshotDisk {
    /// The disk.
    pub id: String,
    /// The overlay, an absolute path; beside the image, with a number in its name, where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "server", schema(value_type = Option<String>, min_length = 1, max_length = 4095, pattern = "^/"))]
    pub overlay: Option<PathBuf>,
    /// The overlay exists already: a qcow2 image over the disk's present one, of its size, in which nothing is written yet. Otherwise it is
    /// made, and must not exist.
    #[serde(default)]
    pub existing: bool,
}

impl SnapshotRequest {
    /// # Errors
    /// No disk, one twice, or an overlay that is not named as it must be.
    pub fn validate(&self) -> Result<(), DefinitionError> {
        if self.disks.is_empty() || self.disks.len() > limits::DEVICES {
            let reason = format!("names 1 to {} disks", limits::DEVICES);
            return Err(DefinitionError::new("disks", reason));
        }
        for (index, disk) in self.disks.iter().enumerate() {
            let refuse = |field: &str, why: &str| {
                DefinitionError::new(format!("disks[{index}].{field}"), why)
            };
            let before = self.disks.get(..index).unwrap_or_default();
            if before.iter().any(|other| other.id == disk.id) {
                return Err(refuse("id", "the disk is named twice"));
            }
            match &disk.overlay {
                Some(path) => {
                    crate::definition::check_path(&format!("disks[{index}].overlay"), path)?;
                    if !path.is_absolute() || path.file_name().is_none() {
                        return Err(refuse("overlay", "is no absolute path of a file"));
                    }
                    let same =
                        |other: &SnapshotDisk| other.overlay.as_deref() == Some(path as &Path);
                    if before.iter().any(same) {
                        return Err(refuse("overlay", "is another disk's overlay, too"));
                    }
                }
                None if disk.existing => {
                    return Err(refuse("overlay", "missing: which one exists already"));
                }
                None => {}
            }
        }
        Ok(())
    }
}

/// Body of `POST /v1/vm/disks/{id}/jobs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "server", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct JobRequest {
    /// What is to be done.
    pub kind: JobKind,
    /// The most bytes that it copies a second; as many as the guest leaves it where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate: Option<ByteSize>,
}

/// What a job does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "server", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum JobKind {
    /// Copies what lies below the disk's image into it; the disk then needs no other layer.
    Flatten,
    /// Moves what the disk's image has into the one below, which is then written in its place. Needs layers that the definition lists.
    Commit,
}

impl std::fmt::Display for JobKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Flatten => "flatten",
            Self::Commit => "commit",
        })
    }
}

/// A job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "server", derive(utoipa::ToSchema))]
pub struct JobView {
    /// Its name.
    pub id: String,
    /// The disk that it works on.
    pub disk: String,
    /// What it does.
    pub kind: JobKind,
    /// Where it stands.
    pub state: JobState,
    /// Bytes of the disk that it has worked through.
    pub done_bytes: u64,
    /// Bytes of the disk.
    pub total_bytes: u64,
    /// Bytes that it had to copy so far.
    pub moved_bytes: u64,
    /// The most bytes that it copies a second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate: Option<u64>,
    /// Why it failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// Where a job stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "server", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum JobState {
    /// It goes on as its rate and the guest allow.
    Running,
    /// It waits to be resumed.
    Paused,
    /// It ends after the steps that have begun.
    Cancelling,
    /// Its work is done; the disk is being opened with its new layers.
    Finishing,
    /// It is over, and the disk has its new layers.
    Done,
    /// It ended early; the disk is as good as before.
    Failed,
    /// It was cancelled; the disk is as good as before.
    Cancelled,
}

impl JobState {
    /// Whether nothing more is going to happen.
    #[must_use]
    pub fn is_over(self) -> bool {
        matches!(self, Self::Done | Self::Failed | Self::Cancelled)
    }
}

/// Body of `PATCH /v1/vm/jobs/{id}`; what is absent stays as it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "server", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct JobChange {
    /// The most bytes that it copies a second; 0 for as many as the guest leaves it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate: Option<ByteSize>,
    /// Whether it waits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub paused: Option<bool>,
}
