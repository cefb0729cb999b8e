//! What the commands about images have in common: naming an image with what lies below it, watching a job, telling its end.

use std::io::IsTerminal;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use clap::Args;
use drover_api::definition::ByteSize;
use drover_block::image::Monitor;
use drover_block::{Backing, Cache, DiskSpec, Error, ErrorKind, Layer};
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

use crate::args::{ImageFormat, OutputMode, size};
use crate::failure::Failure;
use crate::output;

/// An image and what lies below it.
#[derive(Debug, Args)]
pub(crate) struct Chain {
    /// The image.
    pub(crate) path: PathBuf,
    /// Its format; never guessed.
    #[arg(long, value_enum)]
    pub(crate) format: ImageFormat,
    #[command(flatten)]
    pub(crate) below: Below,
}

/// What lies below an image.
#[derive(Debug, Args)]
pub(crate) struct Below {
    /// The image below it; once a layer, nearest first.
    #[arg(long, value_name = "PATH", requires = "backing_format")]
    pub(crate) backing: Vec<PathBuf>,
    /// The format of the image below; once a layer.
    #[arg(long, value_enum, value_name = "FORMAT", requires = "backing")]
    pub(crate) backing_format: Vec<ImageFormat>,
    /// Believe the headers of images about what lies below them, as far as it is in the same folder.
    #[arg(long, conflicts_with = "backing")]
    pub(crate) allow_backing: bool,
}

/// How fast a job may be.
#[derive(Debug, Args)]
pub(crate) struct Pace {
    /// Move at most this much a second, such as 50MiB.
    #[arg(long, value_parser = size, value_name = "SIZE")]
    pub(crate) rate: Option<ByteSize>,
}

impl Chain {
    pub(crate) fn spec(&self) -> Result<DiskSpec, Failure> {
        let below = &self.below;
        let backing = layers(&below.backing, &below.backing_format, "--backing")?;
        Ok(spec(&self.path, self.format, backing, below.allow_backing))
    }
}

/// Layers as listed by a pair of options, each so often.
pub(crate) fn layers(
    paths: &[PathBuf],
    formats: &[ImageFormat],
    option: &str,
) -> Result<Vec<Layer>, Failure> {
    if paths.len() != formats.len() {
        return Err(Failure::input(format!(
            "{} times {option} and {} times {option}-format: each layer needs both",
            paths.len(),
            formats.len()
        )));
    }
    let pairs = paths.iter().zip(formats);
    Ok(pairs.map(|(path, format)| layer(path, *format)).collect())
}

pub(crate) fn layer(path: &Path, format: ImageFormat) -> Layer {
    Layer {
        path: path.to_path_buf(),
        format: format.into(),
        cache: Cache::Buffered,
    }
}

/// A disk to be read.
pub(crate) fn spec(
    path: &Path,
    format: ImageFormat,
    backing: Vec<Layer>,
    allow_backing: bool,
) -> DiskSpec {
    DiskSpec {
        top: layer(path, format),
        backing: match allow_backing {
            true => Backing::FromHeader {
                cache: Cache::Buffered,
            },
            false => Backing::Explicit(backing),
        },
        read_only: true,
        discard: true,
    }
}

/// How an overlay names the image below it: by its name alone where both are in one folder, so that they can move together; else by
/// an absolute path.
pub(crate) fn stored_name(image: &Path, below: &Path) -> Result<PathBuf, Failure> {
    let folder = |path: &Path| path.parent().unwrap_or(Path::new("")).to_path_buf();
    match below.file_name() {
        Some(name) if folder(below) == folder(image) => Ok(PathBuf::from(name)),
        _ => std::path::absolute(below)
            .map_err(|error| Failure::host(format!("{}: {error}", below.display()))),
    }
}

/// What the library says of what can be done, and what that is called on the command line.
const HINTS: [(&str, &str); 9] = [
    ("and was not allowed", "and is not done without --shrink"),
    (
        "list it under `backing`, or allow backing files named in headers",
        "list it with --backing and --backing-format, or allow what headers name with --allow-backing",
    ),
    (
        "list it under `backing`",
        "list it with --backing and --backing-format",
    ),
    (
        "the layers below it listed",
        "the layers below it listed with --backing and --backing-format",
    ),
    ("state `format: raw`", "state --format raw"),
    ("set `cache: buffered`", "state --cache buffered"),
    (
        "bytes that may be downloaded: allow more",
        "bytes that may be downloaded: allow more with --max-download",
    ),
    (
        "bytes that are allowed: allow more",
        "bytes that are allowed: allow more with --max-size",
    ),
    (
        "state its certificate with a CA file",
        "give its certificate with --ca-file",
    ),
];

/// Whether the person or the host is at fault; and what the person can do where only the command line knows.
#[expect(clippy::needless_pass_by_value, reason = "stands in map_err")]
pub(crate) fn failure(error: Error) -> Failure {
    let mut message = error.to_string();
    for (general, here) in HINTS {
        message = message.replace(general, here);
    }
    if let ErrorKind::Io { source, .. } = &error.kind
        && source.kind() == std::io::ErrorKind::AlreadyExists
    {
        message.push_str(": choose another name, or remove it");
    }
    let host = match &error.kind {
        ErrorKind::Request(_) | ErrorKind::Download(_) => true,
        ErrorKind::Io { source, .. } => !matches!(
            source.kind(),
            std::io::ErrorKind::NotFound
                | std::io::ErrorKind::AlreadyExists
                | std::io::ErrorKind::PermissionDenied
        ),
        _ => false,
    };
    match host {
        true => Failure::host(message),
        false => Failure::input(message),
    }
    .about(&error.path)
}

/// Shows how far a job is, on a terminal's standard error, and tells it its pace.
pub(crate) struct Watch {
    bar: Option<ProgressBar>,
    rate: Option<u64>,
    unknown: bool,
}

impl Watch {
    pub(crate) fn new(mode: OutputMode, pace: Option<&Pace>) -> Self {
        let wanted = mode == OutputMode::Text && std::io::stderr().is_terminal();
        Self {
            bar: wanted.then(|| ProgressBar::new(0).with_style(style(false))),
            rate: pace.and_then(|pace| pace.rate).map(|ByteSize(rate)| rate),
            unknown: false,
        }
    }
}

/// How a bar looks; of a job of unknown length, only what is done.
fn style(unknown: bool) -> ProgressStyle {
    let template = match unknown {
        true => "{msg}{spinner} {bytes} {binary_bytes_per_sec}",
        false => {
            "{msg}{bar:40} {percent:>3} %  {bytes} of {total_bytes}  {binary_bytes_per_sec}  {eta} left"
        }
    };
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
}

impl Monitor for Watch {
    fn progress(&mut self, done: u64, total: u64) -> ControlFlow<()> {
        if let Some(bar) = &self.bar {
            if self.unknown != (total == 0) {
                self.unknown = total == 0;
                bar.set_style(style(self.unknown));
            }
            bar.set_length(total);
            bar.set_position(done);
        }
        ControlFlow::Continue(())
    }

    fn phase(&mut self, name: &'static str) {
        if let Some(bar) = &self.bar {
            bar.set_message(format!("{name:12}"));
            bar.reset();
        }
    }

    fn bytes_per_second(&self) -> Option<u64> {
        self.rate
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// What a job did.
#[derive(Serialize)]
struct Done<'a> {
    path: &'a Path,
}

pub(crate) fn done(mode: OutputMode, path: &Path, text: &str) -> Result<(), Failure> {
    output::print(mode, &Done { path }, |done| {
        format!("{} {text}", done.path.display())
    })
}
