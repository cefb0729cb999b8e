//! `drover image`: what concerns a chain of images and takes its time: map, compare, convert, snapshot, commit, flatten.

use std::io::IsTerminal;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, ValueEnum};
use drover_api::definition::ByteSize;
use drover_block::image::{
    self, Comparison, Compression, ConvertOptions, CreateOptions, MapEntry, Monitor,
};
use drover_block::{Backing, Cache, DiskSpec, Format, Layer};
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

use super::image::failure;
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

/// Two images.
#[derive(Debug, Args)]
pub(crate) struct Compare {
    /// One image.
    pub(crate) first: PathBuf,
    /// The other image.
    pub(crate) second: PathBuf,
    /// The format of the first.
    #[arg(long, value_enum)]
    pub(crate) format: ImageFormat,
    /// The format of the second.
    #[arg(long, value_enum, value_name = "FORMAT")]
    pub(crate) second_format: ImageFormat,
    /// Believe the headers of images about what lies below them, as far as it is in the same folder.
    #[arg(long)]
    pub(crate) allow_backing: bool,
}

/// A source chain and a target.
#[derive(Debug, Args)]
pub(crate) struct Convert {
    #[command(flatten)]
    pub(crate) source: Chain,
    /// The new image, which must not exist.
    pub(crate) target: PathBuf,
    /// The format of the new image.
    #[arg(long, value_enum, value_name = "FORMAT")]
    pub(crate) to: ImageFormat,
    /// Compress the new image (qcow2 only).
    #[arg(long, value_enum, value_name = "HOW")]
    pub(crate) compress: Option<Packing>,
    /// Size of its clusters (qcow2 only), 512 bytes to 2 MiB.
    #[arg(long, value_parser = size, value_name = "SIZE")]
    pub(crate) cluster_size: Option<ByteSize>,
}

/// How clusters are compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Packing {
    /// Every reader of qcow2 has it.
    Zlib,
    /// Faster to read; QEMU 5.1 or later.
    Zstd,
}

/// An image and its new overlay.
#[derive(Debug, Args)]
pub(crate) struct Snapshot {
    /// The image, which nobody writes from now on.
    pub(crate) path: PathBuf,
    /// The overlay to be made.
    pub(crate) overlay: PathBuf,
    /// The format of the image.
    #[arg(long, value_enum)]
    pub(crate) format: ImageFormat,
}

impl Chain {
    pub(super) fn spec(&self) -> Result<DiskSpec, Failure> {
        if self.backing.len() != self.backing_format.len() {
            return Err(Failure::input("each --backing needs its --backing-format"));
        }
        let mut spec = spec(&self.path, self.format, self.allow_backing);
        if !self.allow_backing {
            let layers = self.backing.iter().zip(&self.backing_format);
            let layers = layers.map(|(path, format)| layer(path, *format));
            spec.backing = Backing::Explicit(layers.collect());
        }
        Ok(spec)
    }
}

fn layer(path: &Path, format: ImageFormat) -> Layer {
    Layer {
        path: path.to_path_buf(),
        format: format.into(),
        cache: Cache::Buffered,
    }
}

fn spec(path: &Path, format: ImageFormat, allow_backing: bool) -> DiskSpec {
    DiskSpec {
        top: layer(path, format),
        backing: if allow_backing {
            Backing::FromHeader {
                cache: Cache::Buffered,
            }
        } else {
            Backing::Explicit(Vec::new())
        },
        read_only: true,
        discard: true,
    }
}

/// Shows how far a job is, on a terminal's standard error.
struct Bar(Option<ProgressBar>);

impl Bar {
    fn new(mode: OutputMode) -> Self {
        let wanted = mode == OutputMode::Text && std::io::stderr().is_terminal();
        Self(wanted.then(|| {
            let template = "{bar:40} {bytes}/{total_bytes} {bytes_per_sec} {eta}";
            let style = ProgressStyle::with_template(template)
                .unwrap_or_else(|_| ProgressStyle::default_bar());
            ProgressBar::new(0).with_style(style)
        }))
    }
}

impl Monitor for Bar {
    fn progress(&mut self, done: u64, total: u64) -> ControlFlow<()> {
        if let Some(bar) = &self.0 {
            bar.set_length(total);
            bar.set_position(done);
        }
        ControlFlow::Continue(())
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        if let Some(bar) = &self.0 {
            bar.finish_and_clear();
        }
    }
}

/// What a job did.
#[derive(Serialize)]
struct Done<'a> {
    path: &'a Path,
}

fn done(mode: OutputMode, path: &Path, text: &str) -> Result<(), Failure> {
    output::print(mode, &Done { path }, |done| {
        format!("{} {text}", done.path.display())
    })
}

pub(crate) fn map(args: &Chain, mode: OutputMode) -> Result<(), Failure> {
    let entries = image::map(&args.spec()?).map_err(failure)?;
    output::print(mode, &entries, |entries| {
        let rows: Vec<Vec<String>> = entries.iter().map(row).collect();
        output::table(&["START", "LENGTH", "LAYER", "WHAT", "OFFSET"], &rows)
    })
}

fn row(entry: &MapEntry) -> Vec<String> {
    let what = match entry {
        MapEntry { present: false, .. } => "nothing",
        MapEntry { zero: true, .. } => "zero",
        MapEntry {
            compressed: true, ..
        } => "compressed",
        _ => "data",
    };
    vec![
        entry.start.to_string(),
        entry.length.to_string(),
        entry.depth.to_string(),
        what.to_owned(),
        entry
            .offset
            .map_or(String::new(), |offset| offset.to_string()),
    ]
}

/// Exit code 1 if they differ.
pub(crate) fn compare(args: &Compare, mode: OutputMode) -> Result<ExitCode, Failure> {
    let first = spec(&args.first, args.format, args.allow_backing);
    let second = spec(&args.second, args.second_format, args.allow_backing);
    let seen = image::compare(&first, &second).map_err(failure)?;
    output::print(mode, &seen, |seen: &Comparison| match seen.differs_at {
        Some(at) => format!("they differ at byte {at}"),
        None if seen.first_size_bytes == seen.second_size_bytes => "they are the same".to_owned(),
        None => "they are the same but for zeros at the end of one".to_owned(),
    })?;
    Ok(match seen.differs_at {
        Some(_) => ExitCode::FAILURE,
        None => ExitCode::SUCCESS,
    })
}

pub(crate) fn convert(args: &Convert, mode: OutputMode) -> Result<(), Failure> {
    let format: Format = args.to.into();
    if format == Format::Raw && (args.compress.is_some() || args.cluster_size.is_some()) {
        return Err(Failure::input(
            "a raw image has neither --compress nor --cluster-size: use --to qcow2",
        ));
    }
    let mut options = ConvertOptions::new(format);
    if let Some(ByteSize(bytes)) = args.cluster_size {
        options.cluster_size = bytes;
    }
    options.compression = args.compress.map(|packing| match packing {
        Packing::Zlib => Compression::Zlib,
        Packing::Zstd => Compression::Zstd,
    });
    let source = args.source.spec()?;
    image::convert(&source, &args.target, &options, &mut Bar::new(mode)).map_err(failure)?;
    done(mode, &args.target, "is made")
}

pub(crate) fn snapshot(args: &Snapshot, mode: OutputMode) -> Result<(), Failure> {
    let info = image::info(&args.path, args.format.into()).map_err(failure)?;
    // By its name alone where both are in one folder, so that they can move together; else by an absolute path.
    let folder = |path: &Path| path.parent().unwrap_or(Path::new("")).to_path_buf();
    let below = match args.path.file_name() {
        Some(name) if folder(&args.path) == folder(&args.overlay) => PathBuf::from(name),
        _ => std::path::absolute(&args.path)
            .map_err(|error| Failure::host(format!("{}: {error}", args.path.display())))?,
    };
    let options = CreateOptions {
        backing: Some((below, args.format.into())),
        ..CreateOptions::new(info.size_bytes.next_multiple_of(512))
    };
    image::create_qcow2(&args.overlay, &options).map_err(failure)?;
    done(mode, &args.overlay, "is the disk from now on")
}

pub(crate) fn commit(args: &Chain, mode: OutputMode) -> Result<(), Failure> {
    image::commit(&args.spec()?, &mut Bar::new(mode)).map_err(failure)?;
    done(
        mode,
        &args.path,
        "is empty: the image below it has everything",
    )
}

pub(crate) fn flatten(args: &Chain, mode: OutputMode) -> Result<(), Failure> {
    image::flatten(&args.spec()?, &mut Bar::new(mode)).map_err(failure)?;
    done(mode, &args.path, "needs no image below it any more")
}
