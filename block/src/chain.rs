//! A disk's images, one upon the other: opened as the definition says, read through.
//!
//! ```text
//!   layer 0   overlay    written      ■ □ z ■ □        ■ data   z zero   □ look below
//!   layer 1   …          read only    □ ■ ■ □ □
//!   layer 2   base       read only    ■ ■ ■ ■|         past its end: zero
//! ```
//!
//! While the top is merged into the layer below it, layer 1 is written, too (`writable`); each layer that is written
//! sees the chain from itself downwards ([`View`]).
//!
//! Which files these are and what format they have is stated by the caller. A header may only name files where the caller allowed
//! it, and then only plain paths beneath the folder of the top image ([`Backing::FromHeader`]).

use std::ffi::OsStr;
use std::os::fd::RawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{Mode, OFlags, ResolveFlags};

use crate::buffers::Span;
use crate::error::{Error, ErrorKind, IoError};
use crate::io::queue::Queue;
use crate::io::{BlockFile, open_error, open_flags};
use crate::lock::Access;
use crate::qcow2::header::Header;
use crate::qcow2::{Extent, Mapping, Qcow2};
use crate::raw::Raw;
use crate::{Backing, Cache, DiskSpec, Format, Layer};

/// The most layers of a chain.
pub const MAX_LAYERS: usize = 32;

/// One image of a chain.
pub(crate) enum Image {
    Raw(Raw),
    Qcow2(Box<Qcow2>),
}

impl Image {
    pub(crate) fn size(&self) -> u64 {
        match self {
            Self::Raw(raw) => raw.size(),
            Self::Qcow2(qcow2) => qcow2.size(),
        }
    }

    pub(crate) fn file(&self) -> &BlockFile {
        match self {
            Self::Raw(raw) => raw.file(),
            Self::Qcow2(qcow2) => qcow2.file(),
        }
    }

    /// The least range whose discard gives space back: a cluster, or a block of the file system.
    pub(crate) fn discard_granularity(&self) -> u64 {
        const FILE_SYSTEM_BLOCK: u64 = 4096;
        match self.header() {
            Some(header) => header.geometry.cluster_size().max(FILE_SYSTEM_BLOCK),
            None => FILE_SYSTEM_BLOCK,
        }
    }

    fn header(&self) -> Option<&Header> {
        match self {
            Self::Raw(_) => None,
            Self::Qcow2(qcow2) => Some(qcow2.header()),
        }
    }

    /// Where a range inside the image is.
    async fn map(&self, offset: u64, length: u64) -> Result<Extent, IoError> {
        match self {
            Self::Raw(_) => Ok(Extent {
                mapping: Mapping::Data {
                    host: offset,
                    copied: true,
                },
                length,
            }),
            Self::Qcow2(qcow2) => qcow2.map(offset, length).await,
        }
    }
}

/// The images of a disk, the top one first.
pub(crate) struct Chain {
    layers: Vec<Image>,
    /// How many layers, from the top, may change while the chain is open. The others never do.
    #[allow(dead_code, reason = "the merged map asks for it")]
    writable: usize,
}

/// A chain as one of its layers sees it: that layer and those below it.
#[derive(Clone, Copy)]
pub(crate) struct View<'a> {
    chain: &'a Chain,
    first: usize,
}

impl View<'_> {
    /// [`Chain::read_held`] from this layer on; the clusters of this layer are held.
    pub(crate) async fn read_held(self, offset: u64, span: Span<'_>) -> Result<(), IoError> {
        self.chain.read_from(self.first, offset, span).await
    }

    /// Whether a range is known to read as zero from the tables alone.
    pub(crate) async fn is_zero(self, offset: u64, length: u64) -> Result<bool, IoError> {
        self.chain.is_zero_from(self.first, offset, length).await
    }
}

/// Where the first bytes of a range come from: [`Mapping::Below`] where no layer has them.
pub(crate) struct Located {
    /// At least 1.
    pub(crate) length: u64,
    /// Number of the layer, 0 for the top.
    pub(crate) depth: usize,
    pub(crate) mapping: Mapping,
}

/// A part of a read that one layer is going to answer.
struct Piece<'a> {
    layer: usize,
    offset: u64,
    span: Span<'a>,
}

impl Chain {
    /// Opens and locks every layer, the top `writable` ones for writing unless the disk is read-only.
    pub(crate) fn open(spec: &DiskSpec, writable: usize) -> Result<Self, Error> {
        let writable = if spec.read_only { 0 } else { writable };
        let mut opener = Opener {
            writable,
            ..Opener::default()
        };
        let top = &spec.top;
        let file = BlockFile::open(&top.path, top.cache, opener.next_is_written())?;
        opener.push(file, top.format)?;
        match &spec.backing {
            Backing::Explicit(layers) => opener.open_listed(layers)?,
            Backing::FromHeader { cache } => opener.open_named(&top.path, *cache)?,
        }
        let mut layers = opener.layers;
        let last = layers.len() - 1;
        for (n, layer) in layers.iter_mut().enumerate() {
            if let Image::Qcow2(qcow2) = layer {
                qcow2.set_below(n < last);
            }
        }
        Ok(Self { layers, writable })
    }

    /// Opens the top alone, though its header names a backing file: what it does not have itself reads as zero.
    pub(crate) fn open_alone(top: &Layer) -> Result<Self, Error> {
        let mut opener = Opener {
            writable: 1,
            ..Opener::default()
        };
        let file = BlockFile::open(&top.path, top.cache, true)?;
        opener.push(file, top.format)?;
        Ok(Self {
            layers: opener.layers,
            writable: 1,
        })
    }

    /// The chain as the layer of this number sees it.
    pub(crate) fn view(&self, first: usize) -> View<'_> {
        View { chain: self, first }
    }

    /// The image that is written.
    pub(crate) fn top(&self) -> &Image {
        self.layers
            .first()
            .unwrap_or_else(|| unreachable!("a chain has a top"))
    }

    /// The descriptors of all files.
    pub(crate) fn descriptors(&self) -> Vec<RawFd> {
        let files = self.layers.iter().map(Image::file);
        files.flat_map(BlockFile::descriptors).collect()
    }

    /// From now on all transfers go through `queue`.
    pub(crate) fn set_queue(&mut self, queue: &Arc<Queue>) {
        for layer in &mut self.layers {
            match layer {
                Image::Raw(raw) => raw.file_mut().set_queue(queue),
                Image::Qcow2(qcow2) => qcow2.file_mut().set_queue(queue),
            }
        }
    }

    /// Size of the layer under layer `depth`; 0 without one.
    pub(crate) fn below_size(&self, depth: usize) -> u64 {
        self.layers.get(depth + 1).map_or(0, Image::size)
    }

    /// Reads guest bytes; their clusters in the top image are held.
    pub(crate) async fn read_held(&self, offset: u64, span: Span<'_>) -> Result<(), IoError> {
        self.read_from(0, offset, span).await
    }

    async fn read_from(&self, first: usize, offset: u64, span: Span<'_>) -> Result<(), IoError> {
        let mut piece = Piece {
            layer: first,
            offset,
            span,
        };
        // The common case is one extent in one layer, and never gets as far as allocating this.
        let mut later = Vec::new();
        loop {
            let Some(image) = self.layers.get(piece.layer) else {
                piece.span.fill_zero();
                let Some(next) = later.pop() else {
                    return Ok(());
                };
                piece = next;
                continue;
            };
            let length = piece.span.len() as u64;
            let inside = image.size().saturating_sub(piece.offset).min(length);
            if inside < length && piece.layer > first {
                // A shorter layer below reads as zero past its end.
                piece
                    .span
                    .part(inside as usize, piece.span.len())
                    .fill_zero();
                piece.span = piece.span.part(0, inside as usize);
            }
            if piece.span.len() > 0 {
                let extent = image.map(piece.offset, piece.span.len() as u64).await?;
                let taken = extent.length as usize;
                if taken < piece.span.len() {
                    later.push(Piece {
                        layer: piece.layer,
                        offset: piece.offset + extent.length,
                        span: piece.span.part(taken, piece.span.len()),
                    });
                    piece.span = piece.span.part(0, taken);
                }
                if matches!(extent.mapping, Mapping::Below | Mapping::BelowKept { .. }) {
                    piece.layer += 1;
                    continue;
                }
                self.read_extent(image, extent.mapping, &piece).await?;
            }
            let Some(next) = later.pop() else {
                return Ok(());
            };
            piece = next;
        }
    }

    async fn read_extent(
        &self,
        image: &Image,
        mapping: Mapping,
        piece: &Piece<'_>,
    ) -> Result<(), IoError> {
        match (mapping, image) {
            (Mapping::Data { host, .. }, _) => {
                let read = image.file().read(host, piece.span).await;
                read.map_err(|e| IoError::host("read guest data", host, &e))?;
            }
            (Mapping::Compressed { host, bytes }, Image::Qcow2(qcow2)) => {
                let cluster = qcow2.inflate(host, bytes).await?;
                let skip = piece.offset as usize & (cluster.len() - 1);
                piece
                    .span
                    .copy_from(cluster.get(skip..).unwrap_or_default());
            }
            _ => piece.span.fill_zero(),
        }
        Ok(())
    }

    /// Which layer answers for the first bytes of a range, and how.
    pub(crate) async fn locate(&self, offset: u64, length: u64) -> Result<Located, IoError> {
        let mut length = length;
        for (depth, image) in self.layers.iter().enumerate() {
            let inside = match depth {
                0 => length,
                _ => image.size().saturating_sub(offset).min(length),
            };
            if inside == 0 {
                return Ok(Located {
                    length,
                    depth,
                    mapping: Mapping::Zero,
                });
            }
            let extent = image.map(offset, inside).await?;
            length = extent.length;
            if !matches!(extent.mapping, Mapping::Below | Mapping::BelowKept { .. }) {
                return Ok(Located {
                    length,
                    depth,
                    mapping: extent.mapping,
                });
            }
        }
        Ok(Located {
            length,
            depth: 0,
            mapping: Mapping::Below,
        })
    }

    async fn is_zero_from(&self, first: usize, offset: u64, length: u64) -> Result<bool, IoError> {
        let mut work = vec![(first, offset, length)];
        while let Some((layer, offset, length)) = work.pop() {
            let Some(image) = self.layers.get(layer) else {
                continue;
            };
            let inside = match layer {
                _ if layer == first => length,
                _ => image.size().saturating_sub(offset).min(length),
            };
            if inside == 0 {
                continue;
            }
            let extent = image.map(offset, inside).await?;
            if extent.length < inside {
                work.push((layer, offset + extent.length, inside - extent.length));
            }
            match extent.mapping {
                Mapping::Below | Mapping::BelowKept { .. } => {
                    work.push((layer + 1, offset, extent.length));
                }
                Mapping::Zero | Mapping::ZeroKept { .. } => {}
                Mapping::Data { .. } | Mapping::Compressed { .. } => return Ok(false),
            }
        }
        Ok(true)
    }
}

/// Collects layers, top first.
#[derive(Default)]
struct Opener {
    layers: Vec<Image>,
    seen: Vec<(u64, u64)>,
    /// How many layers, from the top, are opened for writing.
    writable: usize,
}

impl Opener {
    fn next_is_written(&self) -> bool {
        self.layers.len() < self.writable
    }

    fn push(&mut self, file: BlockFile, format: Format) -> Result<(), Error> {
        let written = self.next_is_written();
        let access = if written { Access::Write } else { Access::Read };
        let path = file.path().to_owned();
        let refuse = |reason: String| Err(Error::new(&path, ErrorKind::Backing(reason)));
        let stat = rustix::fs::fstat(file.fd()).map_err(|e| Error::io(&path, "examine it", e))?;
        let identity = (stat.st_dev, stat.st_ino);
        if self.seen.contains(&identity) {
            return refuse("appears twice in its own chain of backing files".into());
        }
        if self.layers.len() == MAX_LAYERS {
            return refuse(format!("the chain has more than {MAX_LAYERS} layers"));
        }
        self.seen.push(identity);
        file.lock(access)?;
        self.layers.push(match format {
            Format::Raw => Image::Raw(Raw::open(file)?),
            Format::Qcow2 => Image::Qcow2(Box::new(Qcow2::open(file, written)?)),
        });
        Ok(())
    }

    fn last(&self) -> Option<&Image> {
        self.layers.last()
    }

    fn open_listed(&mut self, layers: &[Layer]) -> Result<(), Error> {
        for layer in layers {
            if let Some(above) = self.last() {
                check_stated(above, layer)?;
            }
            let file = BlockFile::open(&layer.path, layer.cache, self.next_is_written())?;
            self.push(file, layer.format)?;
        }
        let Some(bottom) = self.last() else {
            return Ok(());
        };
        let Some(backing) = bottom.header().and_then(|header| header.backing.as_ref()) else {
            return Ok(());
        };
        let name = String::from_utf8_lossy(&backing.name)
            .escape_debug()
            .to_string();
        Err(Error::new(
            bottom.file().path(),
            ErrorKind::Backing(format!(
                "its header names the backing file `{name}`, which nothing permits: list it under `backing`, or allow backing files named in headers"
            )),
        ))
    }

    fn open_named(&mut self, top: &Path, cache: Cache) -> Result<(), Error> {
        let parent = top.parent().filter(|p| !p.as_os_str().is_empty());
        let root_path = parent.unwrap_or(Path::new("."));
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = rustix::fs::open(root_path, flags, Mode::empty())
            .map_err(|e| Error::io(root_path, "open the image's folder", e))?;
        // The folder of the present layer, relative to the root.
        let mut folder = PathBuf::new();
        loop {
            let Some(above) = self.last() else {
                return Ok(());
            };
            let Some(backing) = above.header().and_then(|header| header.backing.as_ref()) else {
                return Ok(());
            };
            let path = above.file().path().to_owned();
            let refuse = |reason: String| Error::new(&path, ErrorKind::Backing(reason));
            let shown = String::from_utf8_lossy(&backing.name)
                .escape_debug()
                .to_string();
            if backing.name.contains(&0) || is_protocol(&backing.name) {
                return Err(refuse(format!(
                    "its header's backing file `{shown}` is not a plain path"
                )));
            }
            let format = match backing.format.as_deref() {
                Some("raw") => Format::Raw,
                Some("qcow2") => Format::Qcow2,
                Some(other) => {
                    let other = other.escape_debug();
                    return Err(refuse(format!(
                        "its header gives its backing file the format `{other}`, which is not supported"
                    )));
                }
                None => {
                    return Err(refuse(format!(
                        "its header does not say which format its backing file `{shown}` has, and formats are never guessed: list it under `backing`"
                    )));
                }
            };
            let relative = folder.join(Path::new(OsStr::from_bytes(&backing.name)));
            let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
            let fd = match rustix::fs::openat2(
                &root,
                &relative,
                open_flags(cache, self.next_is_written()),
                Mode::empty(),
                resolve,
            ) {
                Ok(fd) => fd,
                Err(rustix::io::Errno::XDEV) => {
                    return Err(refuse(format!(
                        "its header's backing file `{shown}` lies outside of `{}`: list it under `backing`",
                        root_path.display()
                    )));
                }
                Err(errno) => {
                    let written = self.next_is_written();
                    return Err(open_error(
                        &root_path.join(&relative),
                        cache,
                        written,
                        errno,
                    ));
                }
            };
            let file = BlockFile::from_fd(&root_path.join(&relative), fd, cache)?;
            self.push(file, format)?;
            folder = relative.parent().map(Path::to_owned).unwrap_or_default();
        }
    }
}

/// A statement about a backing file must not contradict the one thing that is written down about it.
fn check_stated(above: &Image, layer: &Layer) -> Result<(), Error> {
    let refuse = |reason: String| Err(Error::new(above.file().path(), ErrorKind::Backing(reason)));
    let Some(header) = above.header() else {
        return refuse("a raw image has no backing files".into());
    };
    let Some(format) = header
        .backing
        .as_ref()
        .and_then(|backing| backing.format.as_deref())
    else {
        return Ok(());
    };
    let stated = match layer.format {
        Format::Raw => "raw",
        Format::Qcow2 => "qcow2",
    };
    if matches!(format, "raw" | "qcow2") && format != stated {
        return refuse(format!(
            "its header says that its backing file is {format}, but `{}` is stated to be {stated}",
            layer.path.display()
        ));
    }
    Ok(())
}

/// `proto:…` and `json:…`, as QEMU tells them from paths: a colon before the first slash.
fn is_protocol(name: &[u8]) -> bool {
    let path = Path::new(OsStr::from_bytes(name));
    match path.components().next() {
        Some(Component::Normal(first)) => first.as_bytes().contains(&b':'),
        _ => false,
    }
}
