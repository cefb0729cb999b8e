//! `drover image import`: an image from a file or an HTTP(S) address, checked, unpacked and converted.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use drover_api::definition::ByteSize;
use drover_block::image::{self, ImportOptions, ImportSource, Packing};

use super::image_chain::{Pace, Watch, done, failure};
use super::image_jobs::Form;
use crate::args::{ImageFormat, OutputMode, size};
use crate::failure::Failure;

/// A source and a target.
#[derive(Debug, Args)]
pub(crate) struct Import {
    /// A file, or an http:// or https:// address.
    pub(crate) source: String,
    /// The new image, which must not exist.
    pub(crate) target: PathBuf,
    /// The format of what comes, unpacked; never guessed.
    #[arg(long, value_enum)]
    pub(crate) format: ImageFormat,
    /// How it is packed; never guessed.
    #[arg(long, value_enum, value_name = "HOW", default_value_t = Packed::None)]
    pub(crate) compressed: Packed,
    /// The SHA-256 that its bytes have to have as they come, in hexadecimal digits.
    #[arg(long, value_name = "DIGITS", value_parser = sha256)]
    pub(crate) sha256: Option<Sha256>,
    /// The most to download.
    #[arg(long, value_parser = size, value_name = "SIZE", default_value = "64GiB")]
    pub(crate) max_download: ByteSize,
    /// The most that the disk may have, and what is unpacked.
    #[arg(long, value_parser = size, value_name = "SIZE", default_value = "2TiB")]
    pub(crate) max_size: ByteSize,
    /// Trust these authorities for https:// in place of the host's (PEM).
    #[arg(long, value_name = "FILE")]
    pub(crate) ca_file: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) form: Form,
    #[command(flatten)]
    pub(crate) pace: Pace,
}

/// How a file is packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Packed {
    /// Not at all.
    None,
    /// gzip.
    Gz,
    /// xz.
    Xz,
    /// Zstandard.
    Zst,
}

/// A SHA-256.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sha256([u8; 32]);

fn sha256(text: &str) -> Result<Sha256, String> {
    let mut bytes = [0; 32];
    let pairs = text.as_bytes().chunks(2);
    let digits = text.len() == 64 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    if !digits {
        let length = text.len();
        return Err(format!(
            "expected 64 hexadecimal digits, and this has {length} characters"
        ));
    }
    for (byte, pair) in bytes.iter_mut().zip(pairs) {
        let pair = std::str::from_utf8(pair).unwrap_or_default();
        *byte = u8::from_str_radix(pair, 16).map_err(|error| error.to_string())?;
    }
    Ok(Sha256(bytes))
}

pub(crate) fn import(args: &Import, mode: OutputMode) -> Result<(), Failure> {
    let source = match args.source.contains("://") {
        true => ImportSource::Url(args.source.clone()),
        false => ImportSource::File(PathBuf::from(&args.source)),
    };
    let options = ImportOptions {
        packing: match args.compressed {
            Packed::None => Packing::None,
            Packed::Gz => Packing::Gzip,
            Packed::Xz => Packing::Xz,
            Packed::Zst => Packing::Zstd,
        },
        sha256: args.sha256.map(|Sha256(bytes)| bytes),
        to: args.form.options()?,
        max_download_bytes: args.max_download.0,
        max_size_bytes: args.max_size.0,
        ca_file: args.ca_file.clone(),
        ..ImportOptions::new(args.format.into(), args.form.to.into())
    };
    let mut watch = Watch::new(mode, Some(&args.pace));
    image::import(&source, &args.target, &options, &mut watch).map_err(failure)?;
    drop(watch);
    done(mode, &args.target, "is made")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sha256_has_64_digits_in_either_case() {
        let digits = "00ff".repeat(16);
        assert_eq!(sha256(&digits).unwrap().0[..2], [0, 0xff]);
        assert_eq!(sha256(&digits.to_uppercase()), sha256(&digits));
        for bad in [
            "",
            "00",
            &"0g".repeat(32),
            &"00".repeat(33),
            &"é".repeat(32),
        ] {
            assert!(sha256(bad).is_err(), "{bad}");
        }
    }
}
