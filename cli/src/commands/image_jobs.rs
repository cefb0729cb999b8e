//! `drover image`: what concerns a chain of images and takes its time: map, compare, convert, snapshot, commit, flatten, rebase.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, ValueEnum};
use drover_api::definition::ByteSize;
use drover_block::image::{
    self, Comparison, Compression, ConvertOptions, CreateOptions, MapEntry, NewBacking,
};
use drover_block::{Backing, Cache, Format, MAX_LAYERS};

use super::image::Look;
use super::image_chain::{Chain, Pace, Watch, done, failure, layers, spec, stored_name};
use crate::args::{ImageFormat, OutputMode};
use crate::failure::Failure;
use crate::output;

/// A chain and how fast a job on it may be.
#[derive(Debug, Args)]
pub(crate) struct ChainJob {
    #[command(flatten)]
    pub(crate) chain: Chain,
    #[command(flatten)]
    pub(crate) pace: Pace,
}

/// Two images.
#[derive(Debug, Args)]
pub(crate) struct Compare {
    #[command(flatten)]
    pub(crate) first: Chain,
    /// The other image.
    pub(crate) second: PathBuf,
    /// The format of the other image.
    #[arg(long, value_enum, value_name = "FORMAT")]
    pub(crate) second_format: ImageFormat,
    /// The image below the other one; once a layer, nearest first.
    #[arg(long, value_name = "PATH", requires = "second_backing_format")]
    pub(crate) second_backing: Vec<PathBuf>,
    /// The format of the image below the other one; once a layer.
    #[arg(long, value_enum, value_name = "FORMAT", requires = "second_backing")]
    pub(crate) second_backing_format: Vec<ImageFormat>,
}

/// A source chain and a target.
#[derive(Debug, Args)]
pub(crate) struct Convert {
    #[command(flatten)]
    pub(crate) source: Chain,
    /// The new image, which must not exist.
    pub(crate) target: PathBuf,
    #[command(flatten)]
    pub(crate) form: Form,
    #[command(flatten)]
    pub(crate) pace: Pace,
}

/// The form of an image that is made from another.
#[derive(Debug, Args)]
pub(crate) struct Form {
    /// The format of the new image.
    #[arg(long, value_enum, value_name = "FORMAT")]
    pub(crate) to: ImageFormat,
    /// Compress the new image (qcow2 only).
    #[arg(long, value_enum, value_name = "HOW")]
    pub(crate) compress: Option<Codec>,
    #[command(flatten)]
    pub(crate) look: Look,
}

/// How clusters are compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Codec {
    /// Every reader of qcow2 has it.
    Zlib,
    /// Faster to read; QEMU 5.1 or later.
    Zstd,
}

impl From<Codec> for Compression {
    fn from(codec: Codec) -> Self {
        match codec {
            Codec::Zlib => Self::Zlib,
            Codec::Zstd => Self::Zstd,
        }
    }
}

impl Form {
    pub(crate) fn options(&self) -> Result<ConvertOptions, Failure> {
        let format: Format = self.to.into();
        if format == Format::Raw && (self.compress.is_some() || self.look.is_stated()) {
            return Err(Failure::input(
                "a raw image has no clusters, so none of --compress, --cluster-size, --refcount-bits, --compat and --extended-l2: use --to qcow2",
            ));
        }
        let mut options = ConvertOptions::new(format);
        if let Some(ByteSize(bytes)) = self.look.cluster_size {
            options.cluster_size = bytes;
        }
        if let Some(bits) = self.look.refcount_bits {
            options.refcount_bits = bits;
        }
        options.compat = self.look.compat.into();
        options.extended_l2 = self.look.extended_l2;
        options.compression = self.compress.map(Into::into);
        Ok(options)
    }
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

/// An overlay and what it is to lie over.
#[derive(Debug, Args)]
#[command(group = clap::ArgGroup::new("where").required(true).args(["onto", "onto_nothing"]))]
pub(crate) struct Rebase {
    #[command(flatten)]
    pub(crate) chain: Chain,
    /// The image to lie over from now on; once a layer, nearest first.
    #[arg(long, value_name = "PATH", requires = "onto_format")]
    pub(crate) onto: Vec<PathBuf>,
    /// The format of the image to lie over; once a layer.
    #[arg(long, value_enum, value_name = "FORMAT", requires = "onto")]
    pub(crate) onto_format: Vec<ImageFormat>,
    /// Believe the header of the image to lie over about what lies below it, as far as it is in the same folder.
    #[arg(long, requires = "onto")]
    pub(crate) onto_allow_backing: bool,
    /// Lie over nothing from now on.
    #[arg(long)]
    pub(crate) onto_nothing: bool,
    /// What the overlay's header is to say [default: the name alone in the same folder, else the whole path].
    #[arg(long, value_name = "NAME", requires = "onto")]
    pub(crate) onto_name: Option<PathBuf>,
    /// Change the name in the header and look at nothing: for an image that has moved, or reads the same.
    #[arg(long)]
    pub(crate) r#unsafe: bool,
    #[command(flatten)]
    pub(crate) pace: Pace,
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
    let first = args.first.spec()?;
    let below = layers(
        &args.second_backing,
        &args.second_backing_format,
        "--second-backing",
    )?;
    let second = spec(
        &args.second,
        args.second_format,
        below,
        args.first.below.allow_backing,
    );
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
    let options = args.form.options()?;
    let source = args.source.spec()?;
    let mut watch = Watch::new(mode, Some(&args.pace));
    image::convert(&source, &args.target, &options, &mut watch).map_err(failure)?;
    drop(watch);
    done(mode, &args.target, "is made")
}

pub(crate) fn snapshot(args: &Snapshot, mode: OutputMode) -> Result<(), Failure> {
    let info = image::info(&args.path, args.format.into()).map_err(failure)?;
    check_depth(args)?;
    let below = stored_name(&args.overlay, &args.path)?;
    let options = CreateOptions {
        backing: Some((below, args.format.into())),
        ..CreateOptions::new(info.size_bytes.next_multiple_of(512))
    };
    image::create_qcow2(&args.overlay, &options).map_err(failure)?;
    done(mode, &args.overlay, "is the disk from now on")
}

/// Refuses an overlay that nobody could open, as far as the chain can be followed by its headers.
fn check_depth(args: &Snapshot) -> Result<(), Failure> {
    let chain = spec(&args.path, args.format, Vec::new(), true);
    match image::info_chain(&chain) {
        Ok(layers) if layers.len() >= MAX_LAYERS => Err(Failure::input(format!(
            "{}: it has as many layers as a disk can have, {MAX_LAYERS}: commit or flatten it first",
            args.path.display()
        ))
        .about(&args.path)),
        // Layers in other folders have to be listed by whoever opens it, and are counted then.
        _ => Ok(()),
    }
}

pub(crate) fn commit(args: &ChainJob, mode: OutputMode) -> Result<(), Failure> {
    let chain = &args.chain;
    let mut watch = Watch::new(mode, Some(&args.pace));
    image::commit(&chain.spec()?, &mut watch).map_err(failure)?;
    drop(watch);
    let text = "is empty now: the image below it has all that it had, and it can be removed";
    done(mode, &chain.path, text)
}

pub(crate) fn flatten(args: &ChainJob, mode: OutputMode) -> Result<(), Failure> {
    let chain = &args.chain;
    let mut watch = Watch::new(mode, Some(&args.pace));
    image::flatten(&chain.spec()?, &mut watch).map_err(failure)?;
    drop(watch);
    done(mode, &chain.path, "needs no image below it any more")
}

pub(crate) fn rebase(args: &Rebase, mode: OutputMode) -> Result<(), Failure> {
    let old = args.chain.spec()?;
    let path = &args.chain.path;
    let mut new = layers(&args.onto, &args.onto_format, "--onto")?.into_iter();
    let new = match new.next() {
        None => None,
        Some(top) => {
            let name = match &args.onto_name {
                Some(name) => name.clone(),
                None => stored_name(path, &top.path)?,
            };
            let backing = match args.onto_allow_backing {
                true => Backing::FromHeader {
                    cache: Cache::Buffered,
                },
                false => Backing::Explicit(new.collect()),
            };
            let disk = drover_block::DiskSpec {
                top,
                backing,
                read_only: true,
                discard: false,
            };
            Some(NewBacking { disk, name })
        }
    };
    if args.r#unsafe {
        let label = new
            .as_ref()
            .map(|new| (new.name.as_path(), new.disk.top.format));
        image::rename_backing(&old, label).map_err(failure)?;
    } else {
        let mut watch = Watch::new(mode, Some(&args.pace));
        image::rebase(&old, new.as_ref(), &mut watch).map_err(failure)?;
    }
    let text = match &new {
        Some(new) => format!("lies over {} now", new.name.display()),
        None => "lies over nothing now".to_owned(),
    };
    done(mode, path, &text)
}
