//! `drover image`: which command is whose, and info, create and resize. The format is always stated, never guessed.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, ValueEnum};
use drover_api::definition::ByteSize;
use drover_block::Format;
use drover_block::image::{self, Compat, CreateOptions, ImageInfo, LayerInfo, Qcow2Info, Shrink};
use serde::Serialize;

use super::image_chain::{Chain, failure};
use super::image_jobs::Codec;
use super::image_lease::Shown;
use super::{image_bench, image_check, image_export, image_import, image_jobs, image_lease};
use crate::args::{Image, ImageFormat, OutputMode, size};
use crate::failure::Failure;
use crate::output;

/// An image to describe.
#[derive(Debug, Args)]
pub(crate) struct Info {
    #[command(flatten)]
    pub(crate) chain: Chain,
    /// Describe what lies below it, too.
    #[arg(long = "chain")]
    pub(crate) all_layers: bool,
}

/// A new image.
#[derive(Debug, Args)]
pub(crate) struct Create {
    /// The image, which must not exist.
    pub(crate) path: PathBuf,
    /// Its size, such as 4GiB [default: that of the image below].
    #[arg(value_parser = size, required_unless_present = "backing")]
    pub(crate) size: Option<ByteSize>,
    /// Its format.
    #[arg(long, value_enum)]
    pub(crate) format: ImageFormat,
    /// The image below it (qcow2 only).
    #[arg(long, value_name = "PATH", requires = "backing_format")]
    pub(crate) backing: Option<PathBuf>,
    /// The format of the image below.
    #[arg(long, value_enum, requires = "backing", value_name = "FORMAT")]
    pub(crate) backing_format: Option<ImageFormat>,
    #[command(flatten)]
    pub(crate) look: Look,
    /// How clusters will be compressed, if any are (qcow2 only).
    #[arg(long, value_enum, value_name = "HOW")]
    pub(crate) compression: Option<Codec>,
    /// Let writers that know how keep refcounts lazily (qcow2 only).
    #[arg(long)]
    pub(crate) lazy_refcounts: bool,
}

/// How the tables of a qcow2 image look.
#[derive(Debug, Args)]
pub(crate) struct Look {
    /// Size of a cluster (qcow2 only), 512 bytes to 2 MiB [default: 64KiB].
    #[arg(long, value_parser = size, value_name = "SIZE")]
    pub(crate) cluster_size: Option<ByteSize>,
    /// Bits of a refcount (qcow2 only), a power of two up to 64 [default: 16].
    #[arg(long, value_name = "BITS")]
    pub(crate) refcount_bits: Option<u32>,
    /// The version of qcow2, as QEMU calls it.
    #[arg(long, value_enum, value_name = "VERSION", default_value_t = Version::V3)]
    pub(crate) compat: Version,
    /// Give clusters subclusters, so that small writes copy less (qcow2 only, clusters of at least 16 KiB).
    #[arg(long)]
    pub(crate) extended_l2: bool,
}

impl Look {
    /// Whether anything was stated that only qcow2 has.
    pub(crate) fn is_stated(&self) -> bool {
        self.cluster_size.is_some()
            || self.refcount_bits.is_some()
            || self.compat != Version::V3
            || self.extended_l2
    }
}

/// The version of qcow2.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Version {
    /// For readers of before 2012.
    #[value(name = "0.10")]
    V2,
    /// Every other reader.
    #[value(name = "1.1")]
    V3,
}

impl From<Version> for Compat {
    fn from(version: Version) -> Self {
        match version {
            Version::V2 => Self::V2,
            Version::V3 => Self::V3,
        }
    }
}

/// An image and its new size.
#[derive(Debug, Args)]
pub(crate) struct Resize {
    #[command(flatten)]
    pub(crate) chain: Chain,
    /// Its new size, such as 8GiB.
    #[arg(value_parser = size)]
    pub(crate) size: ByteSize,
    /// Allow a smaller size; what lies past it is lost.
    #[arg(long)]
    pub(crate) shrink: bool,
}

pub(crate) fn run(command: Image, mode: OutputMode) -> Result<ExitCode, Failure> {
    match command {
        Image::Info(args) => info(&args, mode)?,
        Image::Create(args) => create(&args, mode)?,
        Image::Resize(args) => resize(&args, mode)?,
        Image::Check(args) => return image_check::check(&args, mode),
        Image::Repair(args) => return image_check::repair(&args, mode),
        Image::Map(args) => image_jobs::map(&args, mode)?,
        Image::Compare(args) => return image_jobs::compare(&args, mode),
        Image::Convert(args) => image_jobs::convert(&args, mode)?,
        Image::Import(args) => image_import::import(&args, mode)?,
        Image::Snapshot(args) => image_jobs::snapshot(&args, mode)?,
        Image::Commit(args) => image_jobs::commit(&args, mode)?,
        Image::Export(args) => image_export::export(&args)?,
        Image::Flatten(args) => image_jobs::flatten(&args, mode)?,
        Image::Rebase(args) => image_jobs::rebase(&args, mode)?,
        Image::Lease(command) => image_lease::run(&command, mode)?,
        Image::Bench(args) => return image_bench::bench(&args, mode),
    }
    Ok(ExitCode::SUCCESS)
}

fn info(args: &Info, mode: OutputMode) -> Result<(), Failure> {
    let chain = &args.chain;
    if args.all_layers {
        let layers = image::info_chain(&chain.spec()?).map_err(failure)?;
        return output::print(mode, &layers, |layers| {
            let texts: Vec<String> = layers
                .iter()
                .map(|LayerInfo { path, info }| format!("{}\n{}", path.display(), describe(info)))
                .collect();
            texts.join("\n")
        });
    }
    let info = image::info(&chain.path, chain.format.into()).map_err(failure)?;
    let lease = Some(Shown::of(&chain.path)).filter(|lease| !lease.is_none());
    output::print(mode, &InfoShown { info, lease }, |shown| {
        let mut text = describe(&shown.info);
        if let Some(lease) = &shown.lease {
            text.push_str(&output::fields(&[("lease", lease.text().to_owned())]));
        }
        text
    })
}

/// What is told of one image.
#[derive(Serialize)]
struct InfoShown {
    #[serde(flatten)]
    info: ImageInfo,
    #[serde(skip_serializing_if = "Option::is_none")]
    lease: Option<Shown>,
}

fn describe(info: &ImageInfo) -> String {
    let mut pairs = vec![
        ("format", format!("{:?}", info.format).to_lowercase()),
        (
            "size",
            format!(
                "{} ({} bytes)",
                output::bytes(info.size_bytes),
                info.size_bytes
            ),
        ),
        ("on the host", output::bytes(info.allocated_bytes)),
    ];
    if let Some(qcow2) = &info.qcow2 {
        describe_qcow2(qcow2, &mut pairs);
    }
    output::fields(&pairs)
}

fn describe_qcow2(qcow2: &Qcow2Info, pairs: &mut Vec<(&str, String)>) {
    pairs.extend([
        ("version", qcow2.version.to_string()),
        ("cluster size", output::bytes(qcow2.cluster_size_bytes)),
        ("refcount bits", qcow2.refcount_bits.to_string()),
        ("compression", qcow2.compression.to_owned()),
    ]);
    if let Some(backing) = &qcow2.backing_file {
        let format = qcow2
            .backing_format
            .as_deref()
            .unwrap_or("format not stated");
        pairs.push((
            "backing file",
            format!("{} ({})", backing.escape_debug(), format.escape_debug()),
        ));
    }
    for snapshot in &qcow2.snapshots {
        pairs.push((
            "snapshot",
            format!(
                "{} `{}`, {}, {}",
                snapshot.id.escape_debug(),
                snapshot.name.escape_debug(),
                output::date(snapshot.date_seconds.into()),
                output::bytes(snapshot.size_bytes),
            ),
        ));
    }
    for bitmap in &qcow2.bitmaps {
        let state = match (bitmap.inconsistent, bitmap.recording) {
            (true, _) => "not to be believed",
            (false, true) => "recording",
            (false, false) => "at rest",
        };
        pairs.push((
            "bitmap",
            format!(
                "`{}`, a bit for {}, {state}",
                bitmap.name.escape_debug(),
                output::bytes(bitmap.granularity_bytes)
            ),
        ));
    }
    let marks = [
        (qcow2.extended_l2, "extended L2"),
        (qcow2.dirty, "dirty"),
        (qcow2.corrupt, "corrupt"),
        (qcow2.lazy_refcounts, "lazy refcounts"),
    ];
    let marks: Vec<&str> = marks
        .into_iter()
        .filter(|(set, _)| *set)
        .map(|(_, mark)| mark)
        .collect();
    if !marks.is_empty() {
        pairs.push(("marked", marks.join(", ")));
    }
}

#[derive(Serialize)]
struct Made<'a> {
    path: &'a Path,
    size_bytes: u64,
}

fn create(args: &Create, mode: OutputMode) -> Result<(), Failure> {
    let below = match (&args.backing, args.backing_format) {
        (Some(path), Some(format)) => Some((path.clone(), Format::from(format))),
        _ => None,
    };
    let size_bytes = match (args.size, &below) {
        (Some(ByteSize(bytes)), Some((path, format))) => {
            let below = below_size(&args.path, path, *format)?;
            if below > bytes {
                return Err(Failure::input(format!(
                    "{}: {} is smaller than its backing file, which has {}",
                    args.path.display(),
                    ByteSize(bytes),
                    ByteSize(below)
                )));
            }
            bytes
        }
        (Some(ByteSize(bytes)), None) => bytes,
        (None, Some((path, format))) => {
            below_size(&args.path, path, *format)?.next_multiple_of(512)
        }
        (None, None) => return Err(Failure::input("a size is needed, such as 4GiB")),
    };
    match args.format.into() {
        Format::Raw => {
            let stated = args.look.is_stated() || args.compression.is_some() || args.lazy_refcounts;
            if below.is_some() || stated {
                return Err(Failure::input(
                    "a raw image has neither --backing nor --cluster-size nor anything else of qcow2: use --format qcow2",
                ));
            }
            image::create_raw(&args.path, size_bytes).map_err(failure)?;
        }
        Format::Qcow2 => {
            let mut options = CreateOptions::new(size_bytes);
            if let Some(ByteSize(bytes)) = args.look.cluster_size {
                options.cluster_size = bytes;
            }
            if let Some(bits) = args.look.refcount_bits {
                options.refcount_bits = bits;
            }
            if let Some(codec) = args.compression {
                options.compression = codec.into();
            }
            options.compat = args.look.compat.into();
            options.extended_l2 = args.look.extended_l2;
            options.lazy_refcounts = args.lazy_refcounts;
            options.backing = below;
            image::create_qcow2(&args.path, &options).map_err(failure)?;
        }
    }
    output::print(
        mode,
        &Made {
            path: &args.path,
            size_bytes,
        },
        |made| {
            format!(
                "{} is made, {}",
                made.path.display(),
                output::bytes(made.size_bytes)
            )
        },
    )
}

/// A backing file that is missing or of another format would only be noticed by the first guest.
fn below_size(image: &Path, backing: &Path, format: Format) -> Result<u64, Failure> {
    let folder = image.parent().unwrap_or(Path::new(""));
    let info = image::info(&folder.join(backing), format).map_err(failure)?;
    Ok(info.size_bytes)
}

fn resize(args: &Resize, mode: OutputMode) -> Result<(), Failure> {
    let shrink = if args.shrink {
        Shrink::Allow
    } else {
        Shrink::Refuse
    };
    image::resize(&args.chain.spec()?, args.size.0, shrink).map_err(failure)?;
    output::print(
        mode,
        &Made {
            path: &args.chain.path,
            size_bytes: args.size.0,
        },
        |made| {
            format!(
                "{} has {} now",
                made.path.display(),
                output::bytes(made.size_bytes)
            )
        },
    )
}
