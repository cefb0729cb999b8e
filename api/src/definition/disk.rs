//! Disks: images, what lies below them, and how they are used.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::{DefinitionError, limits, one, queue_size, yes};

/// The format of an image; always stated, never guessed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "server", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum ImageFormat {
    /// Bytes as they are.
    Raw,
    /// QEMU's copy-on-write format, versions 2 and 3.
    Qcow2,
}

/// How an image file is cached on the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "server", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum CacheMode {
    /// Past the host's page cache (O_DIRECT).
    Direct,
    /// Through the host's page cache.
    Buffered,
}

/// What a guest's discard does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "server", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum DiscardMode {
    /// Gives the space back to the host.
    #[default]
    Unmap,
    /// Not offered to the guest.
    Ignore,
}

/// A disk.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "server", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct DiskConfig {
    /// Its name in the API and in messages, unique in the VM.
    #[cfg_attr(
        feature = "server",
        schema(pattern = "^[A-Za-z0-9][-A-Za-z0-9_.]{0,31}$")
    )]
    pub id: String,
    /// The image, or a block device.
    #[cfg_attr(feature = "server", schema(value_type = String, min_length = 1, max_length = 4095))]
    pub path: PathBuf,
    /// The image's format.
    pub format: ImageFormat,
    /// Refuse writes.
    #[serde(default)]
    pub read_only: bool,
    /// The layers below, nearest first. Replaces whatever the image's header says.
    #[serde(default)]
    pub backing: Vec<BackingConfig>,
    /// Allow the header to name backing files (plain paths below the image's own folder). Never with `backing`.
    #[serde(default)]
    pub allow_header_backing: bool,
    /// Cache of the top layer.
    #[serde(default = "direct")]
    pub cache: CacheMode,
    /// What a discard does.
    #[serde(default)]
    pub discard: DiscardMode,
    /// Serial number that the guest sees, at most 20 bytes; the id where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "server", schema(max_length = 20))]
    pub serial: Option<String>,
    /// Request queues, 1 to 64.
    #[serde(default = "one")]
    #[cfg_attr(feature = "server", schema(minimum = 1, maximum = 64))]
    pub queues: u16,
    /// Entries of a queue: a power of two, 2 to 1024.
    #[serde(default = "queue_size")]
    #[cfg_attr(feature = "server", schema(minimum = 2, maximum = 1024))]
    pub queue_size: u16,
    /// What performs its transfers.
    #[serde(default)]
    pub io: IoMode,
    /// What becomes of zeros that the guest writes.
    #[serde(default)]
    pub detect_zeroes: DetectZeroes,
    /// What it may use at most.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limits: Option<LimitsConfig>,
    /// The one of `limit_groups` that it belongs to. Never with `limits`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(
        feature = "server",
        schema(pattern = "^[A-Za-z0-9][-A-Za-z0-9_.]{0,31}$")
    )]
    pub limit_group: Option<String>,
    /// What becomes of requests that fail.
    #[serde(default)]
    pub on_error: ErrorConfig,
    /// Own the image by a lease beside it, so that nobody else writes it, on whatever host; only for a disk that is written.
    #[serde(default = "yes")]
    pub lease: bool,
}

impl DiskConfig {
    /// A disk of which all is left as it is where nothing is said.
    pub fn new(id: impl Into<String>, path: impl Into<PathBuf>, format: ImageFormat) -> Self {
        Self {
            id: id.into(),
            path: path.into(),
            format,
            read_only: false,
            backing: Vec::new(),
            allow_header_backing: false,
            cache: direct(),
            discard: DiscardMode::default(),
            serial: None,
            queues: one(),
            queue_size: queue_size(),
            io: IoMode::default(),
            detect_zeroes: DetectZeroes::default(),
            limits: None,
            limit_group: None,
            on_error: ErrorConfig::default(),
            lease: yes(),
        }
    }
}

/// What performs a disk's transfers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "server", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum IoMode {
    /// An io_uring where the host allows it, threads where not.
    #[default]
    Auto,
    /// An io_uring, or the VM is not made.
    Uring,
    /// A pool of threads.
    Threads,
    /// The disk's own thread, one transfer at a time.
    Inline,
}

/// What becomes of zeros that a guest writes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "server", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum DetectZeroes {
    /// They are written like anything else.
    #[default]
    Off,
    /// Whole clusters of them become zero clusters.
    On,
    /// They give their space back besides.
    Unmap,
}

/// What becomes of requests that fail, by what fails. A stopped VM is paused; `POST /v1/vm/resume` tries the requests again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "server", derive(utoipa::ToSchema))]
#[serde(default, deny_unknown_fields)]
pub struct ErrorConfig {
    /// The host has no space for the image; `stop` where absent.
    pub enospc: OnError,
    /// The host or the image fails in another way; `report` where absent.
    pub eio: OnError,
}

impl Default for ErrorConfig {
    fn default() -> Self {
        Self {
            enospc: OnError::Stop,
            eio: OnError::Report,
        }
    }
}

/// What becomes of a request that fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "server", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum OnError {
    /// The guest is told.
    Report,
    /// The VM is paused and the request kept, to be tried again.
    Stop,
}

/// What a disk, or a group of disks together, may use. What is not stated is not limited; flushes never are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "server", derive(utoipa::ToSchema))]
#[serde(default, deny_unknown_fields)]
pub struct LimitsConfig {
    /// Requests a second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub iops: Option<RateLimit>,
    /// Reads a second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub read_iops: Option<RateLimit>,
    /// Writes, discards and write-zeroes requests a second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub write_iops: Option<RateLimit>,
    /// Bytes a second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bps: Option<RateLimit>,
    /// Bytes read a second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub read_bps: Option<RateLimit>,
    /// Bytes written a second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub write_bps: Option<RateLimit>,
}

impl LimitsConfig {
    /// # Errors
    /// A rate or a burst is out of its range; `at` is the path of these limits.
    pub fn check(&self, at: &str) -> Result<(), DefinitionError> {
        let all = [
            ("iops", self.iops),
            ("read_iops", self.read_iops),
            ("write_iops", self.write_iops),
            ("bps", self.bps),
            ("read_bps", self.read_bps),
            ("write_bps", self.write_bps),
        ];
        for (name, limit) in all {
            if let Some(limit) = limit {
                let separator = if at.is_empty() { "" } else { "." };
                limit.check(&format!("{at}{separator}{name}"))?;
            }
        }
        Ok(())
    }
}

/// A rate, and what is allowed above it for a while.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "server", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct RateLimit {
    /// A second.
    #[cfg_attr(
        feature = "server",
        schema(minimum = 1, maximum = 1_125_899_906_842_624_u64)
    )]
    pub rate: u64,
    /// A higher rate for a while; none where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub burst: Option<Burst>,
}

/// A rate above the usual one, for a while.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "server", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct Burst {
    /// A second; at least the usual rate.
    #[cfg_attr(
        feature = "server",
        schema(minimum = 1, maximum = 1_125_899_906_842_624_u64)
    )]
    pub rate: u64,
    /// How many seconds it can last after a time of rest.
    #[cfg_attr(feature = "server", schema(minimum = 1, maximum = 86400))]
    pub seconds: u32,
}

impl RateLimit {
    fn check(&self, at: &str) -> Result<(), DefinitionError> {
        let refuse = |field: &str, reason: String| {
            Err(DefinitionError::new(format!("{at}.{field}"), reason))
        };
        if !limits::RATE.contains(&self.rate) {
            return refuse(
                "rate",
                format!("{} is out of range, 1 to {}", self.rate, limits::RATE.end()),
            );
        }
        let Some(burst) = self.burst else {
            return Ok(());
        };
        if !(self.rate..=*limits::RATE.end()).contains(&burst.rate) {
            return refuse(
                "burst.rate",
                format!(
                    "{} is out of range, {} (the rate itself) to {}",
                    burst.rate,
                    self.rate,
                    limits::RATE.end()
                ),
            );
        }
        if !limits::BURST_SECONDS.contains(&burst.seconds.into()) {
            return refuse(
                "burst.seconds",
                format!(
                    "{} is out of range, 1 to {}",
                    burst.seconds,
                    limits::BURST_SECONDS.end()
                ),
            );
        }
        Ok(())
    }
}

/// Limits that several disks keep to together.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "server", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct LimitGroup {
    /// Its name, for `disks[].limit_group`.
    #[cfg_attr(
        feature = "server",
        schema(pattern = "^[A-Za-z0-9][-A-Za-z0-9_.]{0,31}$")
    )]
    pub id: String,
    /// What its disks may use together.
    pub limits: LimitsConfig,
}

fn direct() -> CacheMode {
    CacheMode::Direct
}

fn buffered() -> CacheMode {
    CacheMode::Buffered
}

/// A read-only layer below a disk.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "server", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct BackingConfig {
    /// The image, or a block device.
    #[cfg_attr(feature = "server", schema(value_type = String, min_length = 1, max_length = 4095))]
    pub path: PathBuf,
    /// Its format.
    pub format: ImageFormat,
    /// Its cache; buffered where absent, so that VMs on one base share it.
    #[serde(default = "buffered")]
    pub cache: CacheMode,
}

/// A disk that another process serves over vhost-user-blk: `drover image export`, qemu-storage-daemon, SPDK.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "server", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct VhostUserDiskConfig {
    /// Its name in the API and in messages, unique in the VM.
    #[cfg_attr(
        feature = "server",
        schema(pattern = "^[A-Za-z0-9][-A-Za-z0-9_.]{0,31}$")
    )]
    pub id: String,
    /// The unix socket on which the process listens.
    #[cfg_attr(feature = "server", schema(value_type = String, min_length = 1, max_length = 107))]
    pub socket: PathBuf,
    /// Request queues, 1 to 64, no more than the process serves.
    #[serde(default = "super::one")]
    #[cfg_attr(feature = "server", schema(minimum = 1, maximum = 64))]
    pub queues: u16,
    /// Entries of a queue: a power of two, 2 to 1024.
    #[serde(default = "super::queue_size")]
    #[cfg_attr(feature = "server", schema(minimum = 2, maximum = 1024))]
    pub queue_size: u16,
}
