//! `drover image`: info, create, resize, check; the rest is in [`image_jobs`]. The format is always stated, never guessed.

use std::path::Path;
use std::process::ExitCode;

use drover_api::definition::ByteSize;
use drover_block::image::{self, CheckReport, CreateOptions, ImageInfo, Shrink};
use drover_block::{Backing, Cache, DiskSpec, Error, ErrorKind, Format, Layer};
use serde::Serialize;

use super::{image_export, image_jobs};
use crate::args::{Image, ImageCreate, ImagePath, ImageResize, OutputMode};
use crate::failure::Failure;
use crate::output;

pub(crate) fn run(command: Image, mode: OutputMode) -> Result<ExitCode, Failure> {
    match command {
        Image::Info(args) => {
            let info = image::info(&args.path, args.format.into()).map_err(failure)?;
            output::print(mode, &info, describe)?;
        }
        Image::Create(args) => create(&args, mode)?,
        Image::Resize(args) => resize(&args, mode)?,
        Image::Check(args) => return check(&args, mode),
        Image::Map(args) => image_jobs::map(&args, mode)?,
        Image::Compare(args) => return image_jobs::compare(&args, mode),
        Image::Convert(args) => image_jobs::convert(&args, mode)?,
        Image::Snapshot(args) => image_jobs::snapshot(&args, mode)?,
        Image::Commit(args) => image_jobs::commit(&args, mode)?,
        Image::Export(args) => image_export::export(&args)?,
        Image::Flatten(args) => image_jobs::flatten(&args, mode)?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Whether the person or the host is at fault.
#[expect(clippy::needless_pass_by_value, reason = "stands in map_err")]
pub(super) fn failure(error: Error) -> Failure {
    match &error.kind {
        ErrorKind::Request(_) => Failure::host(error.to_string()),
        ErrorKind::Io { source, .. }
            if !matches!(
                source.kind(),
                std::io::ErrorKind::NotFound
                    | std::io::ErrorKind::AlreadyExists
                    | std::io::ErrorKind::PermissionDenied
            ) =>
        {
            Failure::host(error.to_string())
        }
        _ => Failure::input(error.to_string()),
    }
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
            pairs.push(("backing file", format!("{backing} ({format})")));
        }
        if !qcow2.snapshots.is_empty() {
            pairs.push(("snapshots", qcow2.snapshots.join(", ")));
        }
        let marks = [
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
    output::fields(&pairs)
}

#[derive(Serialize)]
struct Made<'a> {
    path: &'a Path,
    size_bytes: u64,
}

fn create(args: &ImageCreate, mode: OutputMode) -> Result<(), Failure> {
    let size_bytes = args.size.0;
    match args.format.into() {
        Format::Raw => {
            if args.backing.is_some() || args.cluster_size.is_some() {
                return Err(Failure::input(
                    "a raw image has neither --backing nor --cluster-size: use --format qcow2",
                ));
            }
            image::create_raw(&args.path, size_bytes).map_err(failure)?;
        }
        Format::Qcow2 => {
            let mut options = CreateOptions::new(size_bytes);
            if let Some(ByteSize(bytes)) = args.cluster_size {
                options.cluster_size = bytes;
            }
            if let (Some(path), Some(format)) = (&args.backing, args.backing_format) {
                check_backing(&args.path, path, format.into(), size_bytes)?;
                options.backing = Some((path.clone(), format.into()));
            }
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

/// A backing file that is missing, of another format or larger would only be noticed by the first guest.
fn check_backing(
    image: &Path,
    backing: &Path,
    format: Format,
    size_bytes: u64,
) -> Result<(), Failure> {
    let folder = image.parent().unwrap_or(Path::new(""));
    let info = image::info(&folder.join(backing), format).map_err(failure)?;
    if info.size_bytes > size_bytes {
        return Err(Failure::input(format!(
            "{}: {} is smaller than its backing file, which has {}",
            image.display(),
            ByteSize(size_bytes),
            ByteSize(info.size_bytes)
        )));
    }
    Ok(())
}

fn resize(args: &ImageResize, mode: OutputMode) -> Result<(), Failure> {
    if args.backing.len() != args.backing_format.len() {
        return Err(Failure::input("each --backing needs its --backing-format"));
    }
    let layer = |path: &Path, format: Format| Layer {
        path: path.to_path_buf(),
        format,
        cache: Cache::Buffered,
    };
    let backing = args.backing.iter().zip(&args.backing_format);
    let spec = DiskSpec {
        top: layer(&args.path, args.format.into()),
        backing: Backing::Explicit(
            backing
                .map(|(path, format)| layer(path, (*format).into()))
                .collect(),
        ),
        read_only: false,
        discard: true,
    };
    let shrink = if args.shrink {
        Shrink::Allow
    } else {
        Shrink::Refuse
    };
    image::resize(&spec, args.size.0, shrink).map_err(failure)?;
    output::print(
        mode,
        &Made {
            path: &args.path,
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

/// Exit code 1 if the image is not clean.
fn check(args: &ImagePath, mode: OutputMode) -> Result<ExitCode, Failure> {
    let report = image::check(&args.path, args.format.into()).map_err(failure)?;
    output::print(mode, &report, |report: &CheckReport| {
        let mut text: String = report
            .findings
            .iter()
            .map(|finding| format!("{finding}\n"))
            .collect();
        text.push_str(&match (report.corruptions, report.leaks) {
            (0, 0) => "clean".to_owned(),
            (0, leaks) => {
                format!("sound, but {leaks} clusters are leaked: space that nothing uses")
            }
            (corruptions, leaks) => {
                format!("corrupt: {corruptions} errors, {leaks} leaked clusters")
            }
        });
        text
    })?;
    Ok(if report.is_clean() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}
