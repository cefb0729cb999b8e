//! Another size for a disk.
//!
//! ```text
//!  grow    new L1 written, durable ─> header points at it, durable ─> old L1 freed
//!          ─> what would shine through from below is zeroed, durable ─> header: size
//!  shrink  header: size, durable ─> clusters past the end let go
//! ```

use super::discard::Clear;
use super::{Qcow2, spec};
use crate::buffers::Pages;
use crate::chain::View;
use crate::error::IoError;
use crate::task::Kind;

impl Qcow2 {
    /// Why this image's size cannot change to `new`, if so.
    pub(crate) fn resize_obstacle(&self, new: u64) -> Option<String> {
        let most = (spec::MAX_L1_BYTES / 8).saturating_mul(self.geometry().l1_span());
        if new > most {
            let cluster = self.geometry().cluster_size();
            return Some(format!(
                "with clusters of {cluster} bytes a disk has at most {most} bytes"
            ));
        }
        if new < self.size() && !self.snapshots.is_empty() {
            return Some("an image with internal snapshots cannot shrink".into());
        }
        self.snapshots
            .iter()
            .find(|snapshot| snapshot.size.is_none())
            .map(|snapshot| {
                format!(
                    "internal snapshot `{}` does not know its own size",
                    snapshot.name
                )
            })
    }

    /// Changes the size of the disk; nobody else uses it meanwhile.
    pub(crate) async fn resize(
        &self,
        chain: View<'_>,
        new: u64,
        below: u64,
    ) -> Result<(), IoError> {
        self.begin().await?;
        let _hold = self.hold(0, u64::MAX, Kind::Exclusive).await;
        if new < self.size() {
            self.shrink(chain, new).await
        } else {
            self.grow(chain, new, below).await
        }
    }

    async fn grow(&self, chain: View<'_>, new: u64, below: u64) -> Result<(), IoError> {
        let geometry = self.geometry();
        let old = self.size();
        self.grow_l1(geometry.l1_entries(new)).await?;
        // Up to the end of the cluster in which the disk used to end, then whole clusters as far as the layer below reaches.
        let edge = geometry.up(old).unwrap_or(old);
        self.write_zeros(chain, old, edge.min(new)).await?;
        let reach = below.min(new);
        if edge < reach {
            self.clear_held(chain, edge, reach - edge, Clear::Zeroes { unmap: true })
                .await?;
        }
        self.flush().await?;
        self.set_size(new).await
    }

    async fn shrink(&self, chain: View<'_>, new: u64) -> Result<(), IoError> {
        let geometry = self.geometry();
        let old = self.size();
        self.flush().await?;
        self.set_size(new).await?;
        let edge = geometry.up(new).unwrap_or(new);
        let end = geometry.up(old).unwrap_or(old);
        if edge < end {
            self.clear_held(chain, edge, end - edge, Clear::Forget)
                .await?;
        }
        self.settle().await
    }

    async fn set_size(&self, new: u64) -> Result<(), IoError> {
        self.write_bytes(spec::field::SIZE, &new.to_be_bytes(), "write the header")
            .await?;
        self.sync().await?;
        self.size.set(new);
        Ok(())
    }

    async fn grow_l1(&self, needed: u64) -> Result<(), IoError> {
        let geometry = self.geometry();
        let old = self.l1.borrow().at;
        if needed <= old.entries {
            return Ok(());
        }
        let _meta = self.meta().await;
        // What the entries point at has to be durable before the copy is.
        self.flush_tables().await?;
        let clusters = (needed * 8).div_ceil(geometry.cluster_size());
        let host = self.allocate_table(clusters, "the L1 table").await?;
        // Its refcounts before the header refers to it.
        self.flush_tables().await?;
        let mut entries = self.l1.borrow().entries.clone();
        entries.resize(needed as usize, 0);
        let mut pages = Pages::zeroed((clusters << geometry.cluster_bits) as usize);
        for (bytes, entry) in pages.bytes_mut().chunks_exact_mut(8).zip(&entries) {
            bytes.copy_from_slice(&entry.to_be_bytes());
        }
        let write = self.file.write(host, pages.span()).await;
        write.map_err(|e| IoError::host("write a new L1 table", host, &e))?;
        self.sync().await?;
        let mut fields = (needed as u32).to_be_bytes().to_vec();
        fields.extend(host.to_be_bytes());
        self.write_bytes(spec::field::L1_SIZE, &fields, "write the header")
            .await?;
        self.sync().await?;
        {
            let mut l1 = self.l1.borrow_mut();
            l1.at.offset = host;
            l1.at.entries = needed;
            l1.entries = entries;
        }
        let bytes = old.entries * 8;
        if bytes > 0 {
            self.overlap.borrow_mut().release(geometry, old.offset);
            let count = bytes.div_ceil(geometry.cluster_size());
            self.free_later(geometry.cluster(old.offset), count);
        }
        Ok(())
    }
}
