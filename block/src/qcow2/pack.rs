//! Storing compressed clusters, one behind the other.
//!
//! ```text
//!  host cluster   |aaaaaa bbbbbbbbb cc|cccc dddddd …   |      c lies in two clusters; every cluster counts who touches it
//! ```
//!
//! The file ends at a sector's end, because a reader takes whole sectors.

use super::Qcow2;
use super::spec::{COMPRESSED, RawEntry};
use crate::error::IoError;
use crate::task::Kind;

const SECTOR: u64 = 512;

impl Qcow2 {
    /// Replaces the guest cluster at `offset` by compressed data, which is shorter than a cluster.
    pub(crate) async fn write_packed(&self, offset: u64, packed: &[u8]) -> Result<(), IoError> {
        self.begin().await?;
        let geometry = self.geometry();
        let _hold = self
            .hold(offset, geometry.cluster_size(), Kind::Exclusive)
            .await;
        let _meta = self.meta().await;
        self.own_l2_table(offset).await?;
        let length = packed.len() as u64;
        let host = self.place(length).await?;
        let offset_bits = 62 - (geometry.cluster_bits - 8);
        let end = host + length;
        if end >> offset_bits != 0 {
            return Err(IoError::NoSpace);
        }
        let mut bytes = packed.to_vec();
        bytes.resize((end.next_multiple_of(SECTOR) - host) as usize, 0);
        self.write_bytes(host, &bytes, "write compressed data")
            .await?;
        let sectors = (end - 1) / SECTOR - host / SECTOR;
        let entry = RawEntry {
            entry: COMPRESSED | sectors << offset_bits | host,
            bitmap: 0,
        };
        for old in self.change_entries(offset, 1, |_, _| Some(entry)).await? {
            self.free_entry_later(old);
        }
        self.relieve().await
    }

    /// Where `length` bytes of compressed data go; the clusters count them. What fails in between is a leak at most. The tables
    /// are held.
    async fn place(&self, length: u64) -> Result<u64, IoError> {
        let geometry = self.geometry();
        let most = u64::MAX >> (64 - (1 << geometry.refcount_order));
        let mut host = None;
        if let Some(at) = self.packed_to.get() {
            let cluster = geometry.cluster(at);
            let refcount = self.refcount(cluster).await?;
            let room = geometry.cluster_size() - geometry.in_cluster(at);
            let next = if length > room {
                Some(self.allocate_packed().await?)
            } else {
                None
            };
            let follows = next.is_none_or(|next| next == at + room);
            if refcount > 0 && refcount < most && follows {
                self.set_refcount(cluster, refcount + 1).await?;
                host = Some(at);
            } else {
                host = next;
            }
        }
        let host = match host {
            Some(host) => host,
            None => self.allocate_packed().await?,
        };
        let end = host + length;
        let inside = geometry.in_cluster(end) != 0;
        self.packed_to.set(inside.then_some(end));
        Ok(host)
    }

    /// A new cluster for compressed data, which counts as allocated at once.
    async fn allocate_packed(&self) -> Result<u64, IoError> {
        let run = self.allocate(1).await?;
        self.settle_in(run)?;
        Ok(run.host)
    }

    /// Forgets the backing file; every byte that is visible has been copied and is durable.
    pub(crate) async fn forget_backing(&self) -> Result<(), IoError> {
        self.settle().await?;
        // backing_file_offset and backing_file_size, in one sector.
        self.write_bytes(8, &[0; 12], "write the header").await?;
        self.sync().await
    }
}
