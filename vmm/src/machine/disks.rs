//! The disks of a machine: how each is opened, and what the control thread keeps of it while it is served on its own thread.

use std::error::Error as StdError;

use drover_api::definition::{
    BackingConfig, CacheMode, DetectZeroes as ZeroesConfig, DiscardMode, DiskConfig, ImageFormat,
    IoMode, OnError as OnErrorConfig,
};
use drover_block::{
    Backing, Cache, DetectZeroes, Disk, DiskOptions, DiskSpec, Format, IoEngine, Layer, ThreadStart,
};
use drover_devices::virtio::block::handle::{DiskHandle, ErrorPolicy, OnError};

/// A disk that is open or can be opened again.
pub struct LiveDisk {
    /// The way to it.
    pub handle: DiskHandle,
    /// How it is opened.
    pub options: DiskOptions,
    /// It could not be opened again after a change: why. The guest's requests wait.
    pub missing: Option<String>,
}

/// How the disks of a machine are opened.
pub struct Opener {
    thread_start: ThreadStart,
    /// The better of the asynchronous engines here, once it was asked for.
    automatic: Option<IoEngine>,
}

impl Opener {
    /// Disks whose pools of threads begin with `thread_start`.
    pub fn new(thread_start: ThreadStart) -> Self {
        Self {
            thread_start,
            automatic: None,
        }
    }

    /// How a disk is opened.
    pub fn options(&mut self, disk: &DiskConfig) -> DiskOptions {
        DiskOptions {
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
            thread_start: Some(self.thread_start.clone()),
            ..DiskOptions::default()
        }
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
