//! A disk's images, one upon the other: opened as the definition says, read through.
//!
//! ```text
//!   layer 0   overlay    written      ■ □ z ■ □        ■ data   z zero   □ look below
//!   layer 1   …          read only    □ ■ ■ □ □
//!   layer 2   base       read only    ■ ■ ■ ■|         past its end: zero
//! ```
//!
//! While the top is merged into the layer below it, layer 1 is written, too; each layer that is written sees the chain from itself
//! downwards ([`View`]). What the others say is put together once, in the merged map ([`merged`]). Which files these are is the matter of
//! [`open`].

mod merged;
mod open;

use self::merged::{Answer, Merged};
use std::os::fd::RawFd;
use std::sync::Arc;

use crate::budget::CacheCounts;
use crate::buffers::Span;
use crate::error::IoError;
use crate::io::queue::Queue;
use crate::io::{BlockFile, HostCounts};
use crate::lease::Held;
use crate::qcow2::header::Header;
use crate::qcow2::{Extent, Mapping, Qcow2};
use crate::raw::Raw;

/// The most layers of a chain: 32 below the top.
pub const MAX_LAYERS: usize = 33;

/// One image of a chain.
pub(crate) enum Image {
    Raw(Box<Raw>),
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

    /// log2 of what is mapped as one, a cluster or subcluster; `None` where all of the image is.
    fn unit_bits(&self) -> Option<u32> {
        self.header().map(|header| header.geometry.unit_bits())
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
    /// That the top is ours; given back before its locks are.
    lease: Option<Held>,
    layers: Vec<Image>,
    /// How many layers, from the top, may change while the chain is open. The others never do.
    writable: usize,
    /// What the layers that nobody writes say together; `None` where that would be no gain.
    merged: Option<Merged>,
    counts: Arc<CacheCounts>,
    calls: Arc<HostCounts>,
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

impl Chain {
    /// How often tables were found in memory.
    pub(crate) fn counts(&self) -> &Arc<CacheCounts> {
        &self.counts
    }

    /// How many layers, from the top, may change while the chain is open.
    pub(crate) fn writable(&self) -> usize {
        self.writable
    }

    /// The layer of this number, 0 for the top.
    pub(crate) fn layer(&self, depth: usize) -> Option<&Image> {
        self.layers.get(depth)
    }

    /// What was asked of the host.
    pub(crate) fn calls(&self) -> &Arc<HostCounts> {
        &self.calls
    }

    /// The chain as the layer of this number sees it.
    pub(crate) fn view(&self, first: usize) -> View<'_> {
        View { chain: self, first }
    }

    /// The lease of the top.
    pub(crate) fn lease(&self) -> Option<&Held> {
        self.lease.as_ref()
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
        let length = span.len() as u64;
        let mut done = 0;
        while done < length {
            let located = self
                .locate_from(first, offset + done, length - done)
                .await?;
            let part = span.part(done as usize, located.length as usize);
            self.read_located(&located, offset + done, part).await?;
            done += located.length;
        }
        Ok(())
    }

    async fn read_located(
        &self,
        located: &Located,
        offset: u64,
        span: Span<'_>,
    ) -> Result<(), IoError> {
        let Some(image) = self.layers.get(located.depth) else {
            span.fill_zero();
            return Ok(());
        };
        match (located.mapping, image) {
            (Mapping::Data { host, .. }, _) => {
                let read = image.file().read(host, span).await;
                read.map_err(|e| IoError::host("read guest data", host, &e))?;
            }
            (Mapping::Compressed { host, bytes }, Image::Qcow2(qcow2)) => {
                let cluster = qcow2.inflate(host, bytes).await?;
                let skip = offset as usize & (cluster.len() - 1);
                span.copy_from(cluster.get(skip..).unwrap_or_default());
            }
            _ => span.fill_zero(),
        }
        Ok(())
    }

    /// Which layer answers for the first bytes of a range, and how.
    pub(crate) async fn locate(&self, offset: u64, length: u64) -> Result<Located, IoError> {
        self.locate_from(0, offset, length).await
    }

    async fn locate_from(
        &self,
        first: usize,
        offset: u64,
        length: u64,
    ) -> Result<Located, IoError> {
        let mut length = length;
        let mut merged = self.merged.as_ref();
        for (depth, image) in self.layers.iter().enumerate().skip(first) {
            let inside = match depth {
                _ if depth == first => length,
                _ => image.size().saturating_sub(offset).min(length),
            };
            if inside == 0 {
                return Ok(Located {
                    length,
                    depth,
                    mapping: Mapping::Zero,
                });
            }
            length = inside;
            if let Some(merged) = merged.take_if(|merged| merged.first() == depth)
                && let Answer::Located(located) = merged.find(&self.layers, offset, length).await?
            {
                return Ok(located);
            }
            let extent = image.map(offset, length).await?;
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
        let mut done = 0;
        while done < length {
            let located = self
                .locate_from(first, offset + done, length - done)
                .await?;
            if matches!(
                located.mapping,
                Mapping::Data { .. } | Mapping::Compressed { .. }
            ) {
                return Ok(false);
            }
            done += located.length;
        }
        Ok(true)
    }
}
