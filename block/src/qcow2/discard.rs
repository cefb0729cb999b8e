//! Discard and write-zeroes.
//!
//! | | version 3 | version 2 |
//! |---|---|---|
//! | discard, nothing below | entry cleared | entry cleared |
//! | discard over a backing | zero flag: the base never shines through | nothing: the data stays |
//! | write zeroes, `unmap` | as discard | as discard without a backing, else zeros are written |
//! | write zeroes | zero flag, cluster kept | zeros are written |
//!
//! Both act on whole clusters; write-zeroes writes the rest as data, discard leaves it. The clusters let go are freed by the next
//! flush, after the cleared entries are durable.

use super::Qcow2;
use super::spec::{RawEntry, Reference};
use crate::buffers::Pages;
use crate::chain::View;
use crate::error::IoError;
use crate::task::Kind;

/// Why guest clusters lose their contents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Clear {
    /// The guest does not need them any more.
    Discard,
    /// The guest wants zeros.
    Zeroes {
        /// The clusters may be let go.
        unmap: bool,
    },
    /// They lie past the disk's new end, or the layer below has the same: the entries are emptied, whatever is below.
    Forget,
}

/// Zeros written at a time where the format has no other way, in bytes.
const CHUNK: u64 = 256 * 1024;

impl Qcow2 {
    /// Clears a range of guest bytes.
    pub(crate) async fn clear(
        &self,
        chain: View<'_>,
        offset: u64,
        length: u64,
        how: Clear,
    ) -> Result<(), IoError> {
        self.begin().await?;
        let _hold = self.hold(offset, length, Kind::Exclusive).await;
        self.clear_held(chain, offset, length, how).await
    }

    /// [`Qcow2::clear`] of clusters held exclusively.
    pub(crate) async fn clear_held(
        &self,
        chain: View<'_>,
        offset: u64,
        length: u64,
        how: Clear,
    ) -> Result<(), IoError> {
        let geometry = self.geometry();
        let end = offset + length;
        // The last cluster of a disk is whole though the disk may end inside it.
        let whole_end = if end >= self.size() {
            geometry.up(end)
        } else {
            None
        };
        let whole_end = whole_end.unwrap_or(geometry.down(end));
        let whole_start = geometry.up(offset).unwrap_or(end);
        if let Clear::Zeroes { .. } = how {
            if whole_start >= whole_end {
                return self.write_zeros(chain, offset, end).await;
            }
            self.write_zeros(chain, offset, whole_start).await?;
            self.write_zeros(chain, whole_end, end).await?;
        }
        if whole_start >= whole_end {
            return Ok(());
        }
        if self.header.version < 3 {
            let keeps = matches!(how, Clear::Zeroes { unmap: false });
            match how {
                Clear::Discard if self.has_below => return Ok(()),
                Clear::Zeroes { .. } if self.has_below || keeps => {
                    return self
                        .write_zeros(chain, whole_start, whole_end.min(end))
                        .await;
                }
                _ => {}
            }
        }
        let mut at = whole_start;
        while at < whole_end {
            let table_end = (at / geometry.l1_span() + 1) * geometry.l1_span();
            let to = whole_end.min(table_end);
            self.clear_in_table(at, geometry.cluster(to - at), how)
                .await?;
            at = to;
        }
        Ok(())
    }

    async fn clear_in_table(&self, at: u64, clusters: u64, how: Clear) -> Result<(), IoError> {
        let _meta = self.meta().await;
        let geometry = self.geometry();
        let version = self.header.version;
        let zero = RawEntry::default().zeroed(geometry);
        let cleared = match how {
            Clear::Forget => Some(RawEntry::default()),
            _ if self.has_below => Some(zero),
            _ => None,
        };
        if self.l2_table(at)?.is_none() && cleared.is_none_or(|entry| entry != zero) {
            return Ok(());
        }
        let keeps = how == (Clear::Zeroes { unmap: false });
        let replaced = self.change_entries(at, clusters, |_, old| {
            let new = match old.reference(geometry, version) {
                // Nothing below and nothing there: it reads as zero as it is.
                Ok(Reference::Nothing) => cleared.unwrap_or(old),
                Ok(Reference::Cluster { copied: true, .. }) if keeps => old.zeroed(geometry),
                // An entry that means nothing is left for repair, unless the guest is owed zeros.
                Err(_) if how == Clear::Discard => old,
                Ok(_) | Err(_) => cleared.unwrap_or_default(),
            };
            (new != old).then_some(new)
        });
        for raw in replaced.await? {
            let reference = raw.reference(geometry, version);
            let kept = keeps && matches!(reference, Ok(Reference::Cluster { copied: true, .. }));
            if !kept {
                self.free_entry_later(raw);
            }
        }
        self.relieve().await
    }

    /// Writes zeros as data where the guest does not read zero already. The clusters are held exclusively.
    pub(super) async fn write_zeros(
        &self,
        chain: View<'_>,
        from: u64,
        to: u64,
    ) -> Result<(), IoError> {
        let mut at = from;
        while at < to {
            let length = (to - at).min(CHUNK);
            if !chain.is_zero(at, length).await? {
                let mut zeros = Pages::zeroed(length as usize);
                self.write_held(chain, at, zeros.span()).await?;
            }
            at += length;
        }
        Ok(())
    }
}
