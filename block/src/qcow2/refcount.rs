//! Refcounts: how many references a host cluster has.
//!
//! ```text
//!  cluster number | refcount table index | index in refcount block |
//!                                         └─ refcount_block_bits ──┘
//! ```
//!
//! Growth: a new refcount block lies in the first cluster of the range that it describes and counts itself; a new refcount
//! table lies, with the blocks that describe it, in the first range that the old table could not reach. Both are durable
//! before anything points at them.

use super::Qcow2;
use super::spec::{self, Incompatible, REFCOUNT_OFFSET_MASK, get_refcount, put_refcount};
use super::table::Role;
use crate::buffers::Pages;
use crate::error::IoError;

/// Where the refcount of a cluster is.
pub(super) enum Slot {
    /// In this piece of a block, at this index of the piece.
    Piece(u64, usize),
    /// The refcount table has no block here: the refcount is 0.
    NoBlock,
    /// Past the end of the refcount table: the refcount is 0.
    NoTable,
}

impl Qcow2 {
    pub(super) fn slot(&self, cluster: u64) -> Result<Slot, IoError> {
        let geometry = self.geometry();
        let bits = geometry.refcount_block_bits();
        let index = usize::try_from(cluster >> bits).unwrap_or(usize::MAX);
        let table = self.refcount_table.borrow();
        let Some(entry) = table.entries.get(index) else {
            return Ok(Slot::NoTable);
        };
        let block = entry & REFCOUNT_OFFSET_MASK;
        if block == 0 {
            return Ok(Slot::NoBlock);
        }
        if geometry.in_cluster(block) != 0 || block >= self.file.end() {
            return Err(IoError::corrupt(
                block,
                "a refcount table entry points nowhere",
            ));
        }
        let order = geometry.refcount_order;
        let in_block = cluster & ((1 << bits) - 1);
        let (piece, _) = self.tables.locate(block + ((in_block << order) >> 3));
        let per_piece = (self.tables.piece_size() * 8) >> order;
        Ok(Slot::Piece(piece, (in_block % per_piece) as usize))
    }

    /// The refcount of a cluster.
    pub(super) async fn refcount(&self, cluster: u64) -> Result<u64, IoError> {
        let Slot::Piece(piece, index) = self.slot(cluster)? else {
            return Ok(0);
        };
        let order = self.geometry().refcount_order;
        loop {
            if let Some(value) = self
                .tables
                .get(piece, |bytes| get_refcount(bytes, order, index))
            {
                return Ok(value.unwrap_or(0));
            }
            self.load_piece(piece).await?;
        }
    }

    /// Sets the refcount of a cluster that has a block. The tables are held.
    pub(super) async fn set_refcount(&self, cluster: u64, value: u64) -> Result<(), IoError> {
        let Slot::Piece(piece, index) = self.slot(cluster)? else {
            let host = cluster << self.geometry().cluster_bits;
            return Err(IoError::corrupt(host, "a cluster in use has no refcount"));
        };
        let order = self.geometry().refcount_order;
        let change = |bytes: &mut [u8]| put_refcount(bytes, order, index, value);
        while self.tables.update(piece, Role::Refcount, change).is_none() {
            self.load_piece(piece).await?;
        }
        Ok(())
    }

    /// Puts the refcounts of an image that was not closed cleanly right, durably, and says so in the header. Until the last write
    /// the image stays marked, so that a cut only means doing it again. The tables are held.
    pub(super) async fn rebuild_refcounts(&self) -> Result<(), IoError> {
        let Some(references) = self.references.borrow().clone() else {
            return Ok(());
        };
        let geometry = self.geometry();
        let most = u64::MAX >> (64 - (1 << geometry.refcount_order));
        for cluster in 0..self.file.end().div_ceil(geometry.cluster_size()) {
            let wanted = references.get(&cluster).copied().unwrap_or(0);
            let host = cluster << geometry.cluster_bits;
            if wanted > most {
                return Err(IoError::corrupt(host, "a cluster has too many references"));
            }
            if self.refcount(cluster).await? != wanted {
                self.set_refcount(cluster, wanted).await?;
            }
            if self.tables.is_under_pressure() {
                self.write_tables(Role::Refcount).await?;
            }
        }
        self.flush_tables().await?;
        let features = self.incompatible.get() - Incompatible::DIRTY;
        let at = spec::field::INCOMPATIBLE_FEATURES;
        self.write_bytes(at, &features.bits().to_be_bytes(), "write the header")
            .await?;
        self.sync().await?;
        self.incompatible.set(features);
        self.references.replace(None);
        tracing::info!(image = %self.file.path().display(), "refcounts put right: the image had not been closed cleanly");
        Ok(())
    }

    /// Adds the refcount block that describes `cluster`, where there is none. The tables are held.
    pub(super) async fn add_refcount_block(&self, cluster: u64) -> Result<(), IoError> {
        let geometry = self.geometry();
        let bits = geometry.refcount_block_bits();
        let index = cluster >> bits;
        let host = self
            .claim_metadata(index << bits, 1, "a refcount block")
            .await?;
        let mut block = Pages::zeroed(geometry.cluster_size() as usize);
        put_refcount(block.bytes_mut(), geometry.refcount_order, 0, 1);
        self.file
            .write(host, block.span())
            .await
            .map_err(|e| IoError::host("write a refcount block", host, &e))?;
        self.sync().await?;
        self.set_table_entry(index, host).await
    }

    /// Points a refcount table entry at a block that is durable. The flush before the first use of it makes it durable too.
    async fn set_table_entry(&self, index: u64, block: u64) -> Result<(), IoError> {
        let at = {
            let mut table = self.refcount_table.borrow_mut();
            if let Some(entry) = table.entries.get_mut(index as usize) {
                *entry = block;
            }
            table.at.offset + index * 8
        };
        self.write_bytes(at, &block.to_be_bytes(), "write the refcount table")
            .await
    }

    /// Claims host clusters for metadata; the host offset of the first.
    async fn claim_metadata(
        &self,
        cluster: u64,
        count: u64,
        what: &'static str,
    ) -> Result<u64, IoError> {
        let geometry = self.geometry();
        let bytes = count << geometry.cluster_bits;
        let host = cluster
            .checked_shl(geometry.cluster_bits)
            .filter(|host| {
                *host < spec::HOST_LIMIT - bytes && host >> geometry.cluster_bits == cluster
            })
            .ok_or(IoError::NoSpace)?;
        if self.file.is_device() && host + bytes > self.file.end() {
            return Err(IoError::NoSpace);
        }
        let hit = self.overlap.borrow().hit(geometry, host, bytes);
        if hit.is_some() {
            return Err(self.corrupt(host, "a free cluster holds metadata").await);
        }
        // Nothing is claimed twice: it was free a moment ago.
        let _ = self.overlap.borrow_mut().claim(geometry, host, bytes, what);
        self.tables.purge(host..host + bytes);
        Ok(host)
    }

    /// Takes `payload` clusters in a row where no refcount block reaches, along with blocks that describe them; the number of
    /// the first. `entries` is the size of the refcount table that will hold the blocks, `first_index` where it is free.
    /// Returns the payload and the blocks. All of it is written except the payload; nothing points at it yet.
    async fn fresh_region(
        &self,
        first_index: u64,
        payload: u64,
        what: &'static str,
    ) -> Result<(u64, Vec<u64>), IoError> {
        let geometry = self.geometry();
        let bits = geometry.refcount_block_bits();
        let per_block = 1u64 << bits;
        let blocks = payload.div_ceil(per_block - 1);
        let first = first_index << bits;
        let used = blocks + payload;
        let host = self
            .claim_metadata(first, blocks, "a refcount block")
            .await?;
        let payload_host = self.claim_metadata(first + blocks, payload, what).await?;
        let mut offsets = Vec::new();
        for n in 0..blocks {
            let mut block = Pages::zeroed(geometry.cluster_size() as usize);
            for index in 0..used.saturating_sub(n << bits).min(per_block) {
                put_refcount(
                    block.bytes_mut(),
                    geometry.refcount_order,
                    index as usize,
                    1,
                );
            }
            let at = host + (n << geometry.cluster_bits);
            self.file
                .write(at, block.span())
                .await
                .map_err(|e| IoError::host("write a refcount block", at, &e))?;
            offsets.push(at);
        }
        Ok((payload_host, offsets))
    }

    /// Replaces the refcount table by one of twice the size. The tables are held.
    pub(super) async fn grow_refcount_table(&self) -> Result<(), IoError> {
        let geometry = self.geometry();
        let (old, mut entries) = {
            let table = self.refcount_table.borrow();
            (table.at, table.entries.clone())
        };
        let old_entries = entries.len() as u64;
        let new_entries = (old_entries * 2).min(spec::MAX_REFCOUNT_TABLE_BYTES / 8);
        if new_entries <= old_entries {
            return Err(IoError::NoSpace);
        }
        let clusters = new_entries.div_ceil(geometry.table_entries());
        let (host, blocks) = self
            .fresh_region(old_entries, clusters, "the refcount table")
            .await?;
        entries.extend(blocks);
        entries.resize((clusters * geometry.table_entries()) as usize, 0);
        let mut pages = Pages::zeroed(entries.len() * 8);
        for (bytes, entry) in pages.bytes_mut().chunks_exact_mut(8).zip(&entries) {
            bytes.copy_from_slice(&entry.to_be_bytes());
        }
        self.file
            .write(host, pages.span())
            .await
            .map_err(|e| IoError::host("write a new refcount table", host, &e))?;
        self.sync().await?;
        // One write within one sector: offset and number of clusters change together.
        let mut fields = host.to_be_bytes().to_vec();
        fields.extend((clusters as u32).to_be_bytes());
        self.write_bytes(
            spec::field::REFCOUNT_TABLE_OFFSET,
            &fields,
            "write the header",
        )
        .await?;
        self.sync().await?;
        {
            let mut table = self.refcount_table.borrow_mut();
            table.at.offset = host;
            table.at.entries = entries.len() as u64;
            table.entries = entries;
        }
        self.overlap.borrow_mut().release(geometry, old.offset);
        self.free_later(
            geometry.cluster(old.offset),
            (old_entries * 8).div_ceil(geometry.cluster_size()),
        );
        Ok(())
    }

    /// Takes `count` clusters in a row for a table, wherever they fit; the host offset of the first. The tables are held.
    pub(super) async fn allocate_table(
        &self,
        count: u64,
        what: &'static str,
    ) -> Result<u64, IoError> {
        let geometry = self.geometry();
        let bits = geometry.refcount_block_bits();
        if count >= 1 << bits {
            // Longer than a refcount block reaches: nothing but a region of its own will do.
            let first_free = {
                let table = self.refcount_table.borrow();
                table
                    .entries
                    .iter()
                    .rposition(|entry| *entry != 0)
                    .map_or(0, |last| last as u64 + 1)
            };
            let needed = first_free + count.div_ceil((1 << bits) - 1);
            if (self.refcount_table.borrow().entries.len() as u64) < needed {
                self.grow_refcount_table().await?;
                return Box::pin(self.allocate_table(count, what)).await;
            }
            let (host, blocks) = self.fresh_region(first_free, count, what).await?;
            self.sync().await?;
            for (n, block) in blocks.into_iter().enumerate() {
                self.set_table_entry(first_free + n as u64, block).await?;
            }
            return Ok(host);
        }
        let mut first = geometry.cluster(self.file.end()) + 1;
        let mut length = 0;
        while length < count {
            let cluster = first + length;
            match self.slot(cluster)? {
                Slot::NoTable => self.grow_refcount_table().await?,
                Slot::NoBlock => self.add_refcount_block(cluster).await?,
                Slot::Piece(..) if self.refcount(cluster).await? == 0 => length += 1,
                Slot::Piece(..) => (first, length) = (cluster + 1, 0),
            }
        }
        let host = self.claim_metadata(first, count, what).await?;
        for cluster in first..first + count {
            self.set_refcount(cluster, 1).await?;
        }
        Ok(host)
    }
}
