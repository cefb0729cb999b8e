//! Packed bytes into a file with holes: how they are packed is stated, and how much may come out is limited while it comes.

use std::cell::Cell;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::rc::Rc;

use flate2::read::MultiGzDecoder;
use lzma_rust2::XzReader;
use ruzstd::decoding::errors::FrameDecoderError;
use ruzstd::decoding::errors::ReadFrameHeaderError::{BadMagicNumber, SkipFrame};
use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};

use super::{CHUNK, ImportOptions, check_size, read_full};
use crate::error::{Error, ErrorKind};
use crate::image::job::{Monitor, Way};

/// How a file is packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Packing {
    /// Not at all.
    None,
    /// gzip: any number of members.
    Gzip,
    /// xz: any number of streams, dictionaries of up to 256 MiB.
    Xz,
    /// Zstandard: any number of frames, windows of up to 128 MiB.
    Zstd,
}

impl Packing {
    fn name(self) -> &'static str {
        match self {
            Self::None => "nothing",
            Self::Gzip => "gzip",
            Self::Xz => "xz",
            Self::Zstd => "zstd",
        }
    }
}

/// The most memory for the dictionary of an xz stream, in KiB.
const XZ_MEMORY: u32 = 257 << 10;
/// The largest window of a Zstandard frame, in bytes.
const ZSTD_WINDOW: u64 = 128 << 20;
/// Bytes in which zeros are looked for, a block of most file systems.
const BLOCK: usize = 4096;

/// Counts what is taken from a file.
struct Counted<'a> {
    file: &'a File,
    at: Rc<Cell<u64>>,
}

impl Read for Counted<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let read = self.file.read_at(bytes, self.at.get())?;
        self.at.set(self.at.get() + read as u64);
        Ok(read)
    }
}

/// Frames of Zstandard, one after another. Those that may be skipped are, and checksums are checked.
struct Frames<R: BufRead> {
    source: R,
    frame: Option<FrameDecoder>,
}

impl<R: BufRead> Frames<R> {
    /// Begins the next frame; `None` at the end of the file.
    fn next(&mut self) -> io::Result<Option<FrameDecoder>> {
        loop {
            if self.source.fill_buf()?.is_empty() {
                return Ok(None);
            }
            let mut decoder = FrameDecoder::new();
            decoder.set_max_window_size(ZSTD_WINDOW);
            match decoder.init(&mut self.source) {
                Ok(()) => return Ok(Some(decoder)),
                Err(FrameDecoderError::ReadFrameHeaderError(SkipFrame { length, .. })) => {
                    let length = u64::from(length);
                    let mut rest = (&mut self.source).take(length);
                    if io::copy(&mut rest, &mut io::sink())? < length {
                        return Err(io::ErrorKind::UnexpectedEof.into());
                    }
                }
                Err(FrameDecoderError::ReadFrameHeaderError(BadMagicNumber(_))) => {
                    return Err(io::Error::other("it does not begin as a frame does"));
                }
                Err(error) => return Err(io::Error::other(error)),
            }
        }
    }
}

impl<R: BufRead> Read for Frames<R> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        loop {
            let Some(frame) = &mut self.frame else {
                self.frame = self.next()?;
                match self.frame {
                    Some(_) => continue,
                    None => return Ok(0),
                }
            };
            while frame.can_collect() == 0 && !frame.is_finished() {
                let one = BlockDecodingStrategy::UptoBlocks(1);
                frame
                    .decode_blocks(&mut self.source, one)
                    .map_err(io::Error::other)?;
            }
            let read = frame.read(bytes)?;
            if read > 0 || bytes.is_empty() {
                return Ok(read);
            }
            let stated = frame.get_checksum_from_data();
            if stated.is_some() && stated != frame.get_calculated_checksum() {
                return Err(io::Error::other("its checksum is wrong"));
            }
            self.frame = None;
        }
    }
}

/// Unpacks `file` to a new file, durably. Zeros become holes; a last sector that is not whole is filled with zeros.
pub(super) fn unpack(
    shown: &Path,
    file: &File,
    (path, out): (&Path, &File),
    options: &ImportOptions,
    monitor: &mut dyn Monitor,
) -> Result<(), Error> {
    let how = options.packing;
    monitor.phase(match how {
        Packing::None => "copying",
        _ => "unpacking",
    });
    let total = file
        .metadata()
        .map_err(|e| Error::io(shown, "examine it", e))?
        .len();
    let mut way = Way::new(monitor, total);
    let taken = Rc::new(Cell::new(0));
    let source = BufReader::with_capacity(
        256 << 10,
        Counted {
            file,
            at: Rc::clone(&taken),
        },
    );
    let mut from: Box<dyn Read + '_> = match how {
        Packing::None => Box::new(source),
        Packing::Gzip => Box::new(MultiGzDecoder::new(source)),
        Packing::Xz => Box::new(XzReader::new_mem_limit(source, true, XZ_MEMORY)),
        Packing::Zstd => Box::new(Frames {
            source,
            frame: None,
        }),
    };
    let failed = |error: io::Error| {
        // What the host refuses has a number; what the unpacker dislikes has none.
        if error.raw_os_error().is_some() || how == Packing::None {
            return Error::io(shown, "read it", error);
        }
        let reason = match error.kind() {
            io::ErrorKind::UnexpectedEof => "it is cut short".to_owned(),
            _ => format!("{error}; state the packing that it has, or fetch it again"),
        };
        let how = how.name();
        Error::new(shown, ErrorKind::Packed { how, reason })
    };
    let write = |error: io::Error| Error::io(path, "write it", error);
    let mut bytes = vec![0; CHUNK];
    let mut at = 0u64;
    loop {
        let read = read_full(from.as_mut(), &mut bytes).map_err(failed)?;
        if read == 0 {
            break;
        }
        check_size(shown, at + read as u64, options)?;
        let whole = bytes.get(..read).unwrap_or_default();
        for (n, block) in whole.chunks(BLOCK).enumerate() {
            if block.iter().any(|byte| *byte != 0) {
                let offset = at + (n * BLOCK) as u64;
                out.write_all_at(block, offset).map_err(write)?;
            }
        }
        at += read as u64;
        way.at(shown, taken.get().min(total), read as u64)?;
    }
    let size = match options.format {
        crate::Format::Raw => at.next_multiple_of(512),
        crate::Format::Qcow2 => at,
    };
    out.set_len(size).map_err(write)?;
    out.sync_all()
        .map_err(|e| Error::io(path, "make it durable", e))
}
