//! A disk whose two top layers are written, because the top is being merged into the layer below.
//!
//! ```text
//!                          the top has it        the top does not
//!  read                    top                   layer 1 …
//!  write, discard, zero    top                   layer 1
//!  flush                   layer 1, then the top
//! ```
//!
//! So the top never gets more than it has, whatever the guest does, and the job comes to an end. What decides is the mapping of
//! the clusters (or subclusters) in the top, which the request holds from the decision on. Order of holds: clusters of the top,
//! clusters of layer 1, then the tables of one of them.
//!
//! Flushed is flushed at every power cut: a cluster is cleared in the top only after layer 1 has it durably, and a guest's flush
//! reaches layer 1 first, so that a cleared entry is never durable before what it uncovers.

use super::step::is_below;
use crate::buffers::Span;
use crate::chain::{Chain, Image, View};
use crate::disk::Core;
use crate::error::IoError;
use crate::qcow2::{Clear, Mapping, Qcow2};
use crate::task::{Guard, Kind};

/// The layer below the top, and what it sees of the chain.
#[derive(Clone, Copy)]
pub(super) struct Lower<'a> {
    image: &'a Image,
    view: View<'a>,
}

impl<'a> Lower<'a> {
    pub(super) fn of(chain: &'a Chain) -> Result<Self, IoError> {
        match chain.layer(1) {
            Some(image) if chain.writable() > 1 => Ok(Self {
                image,
                view: chain.view(1),
            }),
            _ => Err(IoError::Unsupported("writing to the layer below")),
        }
    }

    /// Keeps clusters from being changed while they are read through the top.
    async fn hold(self, offset: u64, length: u64) -> Option<Guard<'a>> {
        match self.image {
            Image::Raw(_) => None,
            Image::Qcow2(qcow2) => Some(qcow2.hold(offset, length, Kind::Shared).await),
        }
    }

    pub(super) async fn write(self, offset: u64, data: Span<'_>) -> Result<(), IoError> {
        match self.image {
            Image::Raw(raw) => raw.write(offset, data).await,
            Image::Qcow2(qcow2) => qcow2.write(self.view, offset, data).await,
        }
    }

    pub(super) async fn zero(self, offset: u64, length: u64) -> Result<(), IoError> {
        self.clear(offset, length, Clear::Zeroes { unmap: true })
            .await
    }

    async fn clear(self, offset: u64, length: u64, how: Clear) -> Result<(), IoError> {
        match (self.image, how) {
            (Image::Qcow2(qcow2), _) => qcow2.clear(self.view, offset, length, how).await,
            (Image::Raw(raw), Clear::Zeroes { unmap }) => raw.zero(offset, length, unmap).await,
            (Image::Raw(raw), Clear::Discard | Clear::Forget) => raw.discard(offset, length).await,
        }
    }

    /// Whether making a range read as zero writes no data.
    pub(super) fn zeroes_cheaply(self) -> bool {
        match self.image {
            Image::Raw(raw) => !raw.file().is_device(),
            Image::Qcow2(qcow2) => qcow2.header().version >= 3,
        }
    }

    pub(super) async fn flush(self) -> Result<(), IoError> {
        match self.image {
            Image::Raw(raw) => raw.flush().await,
            Image::Qcow2(qcow2) => qcow2.flush().await,
        }
    }
}

impl Core {
    /// Both layers, where the disk is one of this kind.
    pub(crate) fn two(&self) -> Option<Two<'_>> {
        match self.chain.top() {
            Image::Qcow2(top) if self.chain.writable() > 1 => {
                let lower = Lower::of(&self.chain).ok()?;
                let chain = &self.chain;
                Some(Two { top, lower, chain })
            }
            _ => None,
        }
    }
}

/// The two layers that are written.
#[derive(Clone, Copy)]
pub(crate) struct Two<'a> {
    top: &'a Qcow2,
    lower: Lower<'a>,
    chain: &'a Chain,
}

impl Two<'_> {
    pub(crate) async fn read(self, offset: u64, span: Span<'_>) -> Result<(), IoError> {
        let length = span.len() as u64;
        let _top = self.top.hold(offset, length, Kind::Shared).await;
        let _lower = self.lower.hold(offset, length).await;
        self.chain.read_held(offset, span).await
    }

    pub(crate) async fn write(self, offset: u64, data: Span<'_>) -> Result<(), IoError> {
        self.top.begin().await?;
        let length = data.len() as u64;
        let mut done = 0;
        // Whatever changes a mapping of the top wants its clusters alone; most writes do not.
        for kind in [Kind::Shared, Kind::Exclusive] {
            let _hold = self.top.hold(offset + done, length - done, kind).await;
            while done < length {
                let at = offset + done;
                let extent = self.top.map(at, length - done).await?;
                let part = data.part(done as usize, extent.length as usize);
                match extent.mapping {
                    mapping if is_below(mapping) => self.lower.write(at, part).await?,
                    Mapping::Data { host, copied: true } => self.top.overwrite(host, part).await?,
                    _ if kind == Kind::Shared => break,
                    _ => {
                        let _lower = self.hold_around(at, extent.length).await;
                        self.top.write_held(self.chain.view(0), at, part).await?;
                    }
                }
                done += extent.length;
            }
            if done == length {
                break;
            }
        }
        Ok(())
    }

    pub(crate) async fn clear(self, offset: u64, length: u64, how: Clear) -> Result<(), IoError> {
        self.top.begin().await?;
        let _hold = self.top.hold(offset, length, Kind::Exclusive).await;
        let end = offset + length;
        let mut at = offset;
        while at < end {
            let extent = self.top.map(at, end - at).await?;
            if is_below(extent.mapping) {
                self.lower.clear(at, extent.length, how).await?;
            } else {
                let _lower = self.hold_around(at, extent.length).await;
                let view = self.chain.view(0);
                self.top.clear_held(view, at, extent.length, how).await?;
            }
            at += extent.length;
        }
        Ok(())
    }

    pub(crate) async fn flush(self) -> Result<(), IoError> {
        self.lower.flush().await?;
        self.top.flush().await
    }

    /// Leaves both images with nothing to be done.
    pub(crate) async fn settle(self) -> Result<(), IoError> {
        match self.lower.image {
            Image::Raw(raw) => raw.flush().await?,
            Image::Qcow2(lower) => lower.settle().await?,
        }
        self.top.settle().await
    }

    /// Holds what the top reads of layer 1 when it copies whole clusters of its own.
    async fn hold_around(&self, offset: u64, length: u64) -> Option<Guard<'_>> {
        let cluster = self.top.cluster_size();
        let start = offset - offset % cluster;
        let end = (offset + length).next_multiple_of(cluster);
        self.lower.hold(start, end - start).await
    }
}
