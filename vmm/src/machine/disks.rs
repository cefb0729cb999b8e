//! The disks of a machine: how each is opened, and what the control thread keeps of it while it is served on its own thread.

use std::error::Error as StdError;
use std::sync::Arc;

use drover_api::definition::{
    BackingConfig, CacheMode, DetectZeroes as ZeroesConfig, DiscardMode, DiskConfig, ImageFormat,
    IoMode, LimitsConfig, OnError as OnErrorConfig, RateLimit, VmConfig,
};
use drover_block::lease::LeaseRequest;
use drover_block::{
    Backing, Burst, Cache, DetectZeroes, Directions, Disk, DiskOptions, DiskSpec, Format, IoEngine,
    Layer, Limit, Limits, LimitsError, ThreadStart, Throttle,
};
use drover_devices::virtio::block::handle::{DiskHandle, ErrorPolicy, OnError, Stopped};
use drover_devices::virtio::block::metrics::BlockMetrics;

use super::BuildError;

/// A disk that is open or can be opened again.
pub struct LiveDisk {
    /// The way to it.
    pub handle: DiskHandle,
    /// How it is opened.
    pub options: DiskOptions,
    /// What it counts.
    pub metrics: Arc<BlockMetrics>,
    /// The size that the guest sees, in bytes.
    pub size_bytes: u64,
    /// A request failed and is kept: which, and why.
    pub stopped: Option<Stopped>,
    /// It could not be opened again after a change: why. The guest's requests wait.
    pub missing: Option<String>,
}

/// How the disks of a machine are opened.
pub struct Opener {
    /// The VM's name, as leases tell it.
    owner: String,
    thread_start: ThreadStart,
    /// By name.
    groups: Vec<(String, Arc<Throttle>)>,
    /// The better of the asynchronous engines here, once it was asked for.
    automatic: Option<IoEngine>,
}

impl Opener {
    /// Disks whose pools of threads begin with `thread_start`.
    ///
    /// # Errors
    /// A group's limits cannot be.
    pub fn new(config: &VmConfig, thread_start: ThreadStart) -> Result<Self, BuildError> {
        let mut groups = Vec::new();
        for (index, group) in config.limit_groups.iter().enumerate() {
            let throttle = Throttle::new(limits(&group.limits)).map_err(|error| {
                BuildError::of(format!("limit_groups[{index}].limits"))(error.into())
            })?;
            groups.push((group.id.clone(), throttle));
        }
        Ok(Self {
            owner: config.name.clone(),
            thread_start,
            groups,
            automatic: None,
        })
    }

    /// How a disk is opened.
    ///
    /// # Errors
    /// Its limits cannot be.
    pub fn options(&mut self, disk: &DiskConfig) -> Result<DiskOptions, LimitsError> {
        let group = disk.limit_group.as_ref();
        let group = group.and_then(|wanted| self.groups.iter().find(|(id, _)| id == wanted));
        let throttle = match group {
            Some((_, throttle)) => Arc::clone(throttle),
            // Without any limit, too: it can be given some while it is used.
            None => Throttle::new(limits(&disk.limits.unwrap_or_default()))?,
        };
        Ok(DiskOptions {
            engine: match disk.io {
                IoMode::Auto => *self.automatic.get_or_insert_with(IoEngine::asynchronous),
                IoMode::Uring => IoEngine::IoUring,
                IoMode::Threads => IoEngine::Threads,
                IoMode::Inline => IoEngine::Inline,
            },
            detect_zeroes: match disk.detect_zeroes {
                ZeroesConfig::Off => DetectZeroes::Off,
                ZeroesConfig::On => DetectZeroes::On,
                ZeroesConfig::Unmap => DetectZeroes::Unmap,
            },
            throttle: Some(throttle),
            lease: (disk.lease && !disk.read_only).then(|| LeaseRequest {
                owner: self.owner.clone(),
            }),
            statistics: Some(Arc::default()),
            thread_start: Some(self.thread_start.clone()),
            ..DiskOptions::default()
        })
    }
}

/// Opens a disk.
///
/// # Errors
/// Those of [`Disk::open_with`].
pub fn open(
    disk: &DiskConfig,
    options: DiskOptions,
) -> Result<Disk, Box<dyn StdError + Send + Sync>> {
    Ok(Disk::open_with(&disk_spec(disk), options)?)
}

/// What becomes of requests that fail.
pub fn error_policy(disk: &DiskConfig) -> ErrorPolicy {
    let choice = |choice| match choice {
        OnErrorConfig::Report => OnError::Report,
        OnErrorConfig::Stop => OnError::Stop,
    };
    ErrorPolicy {
        no_space: choice(disk.on_error.enospc),
        io: choice(disk.on_error.eio),
    }
}

/// Limits, in the block engine's words.
pub fn limits(limits: &LimitsConfig) -> Limits {
    let limit = |limit: Option<RateLimit>| {
        limit.map(|limit| Limit {
            rate: limit.rate,
            burst: limit.burst.map(|burst| Burst {
                rate: burst.rate,
                seconds: burst.seconds,
            }),
        })
    };
    Limits {
        operations: Directions {
            total: limit(limits.iops),
            read: limit(limits.read_iops),
            write: limit(limits.write_iops),
        },
        bytes: Directions {
            total: limit(limits.bps),
            read: limit(limits.read_bps),
            write: limit(limits.write_bps),
        },
    }
}

/// A format, in the block engine's words.
pub fn format(format: ImageFormat) -> Format {
    match format {
        ImageFormat::Raw => Format::Raw,
        ImageFormat::Qcow2 => Format::Qcow2,
    }
}

fn cache(cache: CacheMode) -> Cache {
    match cache {
        CacheMode::Direct => Cache::Direct,
        CacheMode::Buffered => Cache::Buffered,
    }
}

/// Which files make up a disk.
pub fn disk_spec(disk: &DiskConfig) -> DiskSpec {
    let below = |layer: &BackingConfig| Layer {
        path: layer.path.clone(),
        format: format(layer.format),
        cache: cache(layer.cache),
    };
    DiskSpec {
        top: Layer {
            path: disk.path.clone(),
            format: format(disk.format),
            cache: cache(disk.cache),
        },
        backing: if disk.allow_header_backing {
            Backing::FromHeader {
                cache: Cache::Buffered,
            }
        } else {
            Backing::Explicit(disk.backing.iter().map(below).collect())
        },
        read_only: disk.read_only,
        discard: disk.discard == DiscardMode::Unmap,
    }
}
