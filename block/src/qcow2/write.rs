//! A guest's writes.
//!
//! ```text
//!  mapped, COPIED           ─> one pwritev in place, nothing else
//!  anything else            ─> take host clusters ─> head + data + tail in one pwritev ─> L2 entry (in memory)
//!
//!      cluster      |  head  |   data …            … data   |  tail  |
//!                     as read before the write, through the chain; left out where the new cluster reads as zero anyway
//! ```
//!
//! The L2 entry becomes durable only by a flush, which first makes data and refcount durable ([`super::flush`]).

use std::ops::Range;

use super::alloc::Run;
use super::map::{Extent, Mapping};
use super::spec::{ALL_ALLOCATED, COPIED, OFFSET_MASK, RawEntry};
use super::table::Role;
use super::{Entries, Qcow2};
use crate::buffers::{Gather, Pages, Span};
use crate::chain::View;
use crate::error::IoError;
use crate::task::Kind;

impl Qcow2 {
    /// Writes guest bytes; `chain` is the chain whose top this image is.
    pub(crate) async fn write(
        &self,
        chain: View<'_>,
        offset: u64,
        data: Span<'_>,
    ) -> Result<(), IoError> {
        self.begin().await?;
        let length = data.len() as u64;
        let mut done = 0;
        {
            let _hold = self.hold(offset, length, Kind::Shared).await;
            while done < length {
                let extent = self.map(offset + done, length - done).await?;
                let Mapping::Data { host, copied: true } = extent.mapping else {
                    break;
                };
                self.overwrite(host, data.part(done as usize, extent.length as usize))
                    .await?;
                done += extent.length;
            }
        }
        if done == length {
            return Ok(());
        }
        let _hold = self
            .hold(offset + done, length - done, Kind::Exclusive)
            .await;
        self.write_held(chain, offset + done, data.part(done as usize, data.len()))
            .await
    }

    /// Writes guest bytes whose clusters are held exclusively.
    pub(crate) async fn write_held(
        &self,
        chain: View<'_>,
        offset: u64,
        data: Span<'_>,
    ) -> Result<(), IoError> {
        let geometry = self.geometry();
        let length = data.len() as u64;
        let mut done = 0;
        while done < length {
            let at = offset + done;
            let extent = self.map(at, length - done).await?;
            let rest = data.part(done as usize, extent.length as usize);
            done += match extent.mapping {
                Mapping::Data { host, copied: true } => {
                    self.overwrite(host, rest).await?;
                    extent.length
                }
                Mapping::ZeroKept { host, copied: true }
                | Mapping::BelowKept { host, copied: true } => {
                    self.write_kept(chain, at, extent, host, rest).await?;
                    extent.length
                }
                // Where there was no host cluster, the subclusters around stay as they are.
                Mapping::Below | Mapping::Zero => {
                    let unit = geometry.unit_bits();
                    self.write_new(chain, at, rest, unit).await?
                }
                _ => {
                    self.write_new(chain, at, rest, geometry.cluster_bits)
                        .await?
                }
            };
        }
        Ok(())
    }

    /// Whether guest data may go to a place in the file.
    pub(crate) fn is_clear(&self, host: u64, length: u64) -> bool {
        self.overlap
            .borrow()
            .hit(self.geometry(), host, length)
            .is_none()
    }

    /// Writes to host clusters that nobody else uses, in place. Their guest clusters are held.
    pub(crate) async fn overwrite(&self, host: u64, data: Span<'_>) -> Result<(), IoError> {
        if !self.is_clear(host, data.len() as u64) {
            return Err(self
                .corrupt(host, "guest data would overwrite metadata")
                .await);
        }
        self.put(host, data).await
    }

    async fn put(&self, host: u64, data: Span<'_>) -> Result<(), IoError> {
        self.file
            .write(host, data)
            .await
            .map_err(|e| IoError::host("write guest data", host, &e))
    }

    /// Writes to clusters, or subclusters of them, that were kept while reading as zero or what lies below.
    async fn write_kept(
        &self,
        chain: View<'_>,
        at: u64,
        extent: Extent,
        host: u64,
        data: Span<'_>,
    ) -> Result<(), IoError> {
        let geometry = self.geometry();
        let first = geometry.down(host);
        let bytes = (geometry.in_cluster(at) + extent.length).div_ceil(geometry.cluster_size());
        let run = Run {
            host: first,
            clusters: bytes,
            zeroed: false,
        };
        // The file may end inside the last of them, not before.
        let last = first.saturating_add(bytes.saturating_sub(1) << geometry.cluster_bits);
        if last >= self.file.end() {
            return Err(IoError::corrupt(
                last,
                "an L2 entry points past the end of the file",
            ));
        }
        if !self.is_clear(first, bytes << geometry.cluster_bits) {
            return Err(self
                .corrupt(first, "guest data would overwrite metadata")
                .await);
        }
        let unit = geometry.unit_bits();
        let covered = self.fill(chain, at, data, run, unit).await?;
        let _meta = self.meta().await;
        // The same clusters go on to be used: nothing is freed.
        self.link(covered, run).await?;
        self.relieve().await
    }

    /// Writes to new clusters, as many as there are in a row; the number of guest bytes written. Head and tail go to the borders of
    /// units of `1 << unit_bits` bytes.
    async fn write_new(
        &self,
        chain: View<'_>,
        at: u64,
        data: Span<'_>,
        unit_bits: u32,
    ) -> Result<u64, IoError> {
        let geometry = self.geometry();
        let skip = geometry.in_cluster(at);
        let want = (skip + data.len() as u64).div_ceil(geometry.cluster_size());
        let run = {
            let _meta = self.meta().await;
            // First the table, so that nothing but the host can fail once the data is written.
            self.own_l2_table(at).await?;
            self.allocate(want).await?
        };
        let length = ((run.clusters << geometry.cluster_bits) - skip).min(data.len() as u64);
        let data = data.part(0, length as usize);
        let covered = match self.fill(chain, at, data, run, unit_bits).await {
            Ok(covered) => covered,
            Err(error) => {
                let _meta = self.meta().await;
                self.abandon(run).await;
                return Err(error);
            }
        };
        let _meta = self.meta().await;
        match self.link(covered, run).await {
            Ok(replaced) => {
                self.settle_in(run)?;
                for raw in replaced {
                    self.free_entry_later(raw);
                }
            }
            Err(error) => {
                self.abandon(run).await;
                return Err(error);
            }
        }
        self.relieve().await?;
        Ok(length)
    }

    /// Writes data with its head and tail to host clusters that nothing refers to yet, or whose units that are written nothing reads;
    /// the guest bytes that lie there from now on.
    async fn fill(
        &self,
        chain: View<'_>,
        at: u64,
        data: Span<'_>,
        run: Run,
        unit_bits: u32,
    ) -> Result<Range<u64>, IoError> {
        let unit = 1u64 << unit_bits;
        let start = at & !(unit - 1);
        let data_end = at + data.len() as u64;
        let end = data_end.next_multiple_of(unit);
        let base = run.host + (start - self.geometry().down(at));
        if start < at && data_end < end && data.len() as u64 <= (end - start) / 2 {
            // Little in the middle: one read for all that is around it.
            let whole = self.surroundings(chain, start, end, run.zeroed).await?;
            match whole {
                None => self.put(base + (at - start), data).await?,
                Some(mut whole) => {
                    let middle = whole.bytes_mut().get_mut((at - start) as usize..);
                    data.copy_to(middle.unwrap_or_default());
                    self.put(base, whole.span()).await?;
                }
            }
            return Ok(start..end);
        }
        let mut head = self.surroundings(chain, start, at, run.zeroed).await?;
        let mut tail = self.surroundings(chain, data_end, end, run.zeroed).await?;
        let mut all = Gather::default();
        let mut host = base + (at - start);
        if let Some(head) = &mut head {
            host = base;
            all.push(head.span());
        }
        all.push(data);
        if let Some(tail) = &mut tail {
            all.push(tail.span());
        }
        self.put(host, all.span()).await?;
        Ok(start..end)
    }

    /// What the guest reads in a range now; `None` where nothing needs to be written for it. Past the disk's end it is zero,
    /// so that growing the disk reveals nothing.
    async fn surroundings(
        &self,
        chain: View<'_>,
        from: u64,
        to: u64,
        zeroed: bool,
    ) -> Result<Option<Pages>, IoError> {
        let inside = to.min(self.size()).saturating_sub(from);
        if from >= to || (zeroed && chain.is_zero(from, inside).await?) {
            return Ok(None);
        }
        let mut pages = Pages::used((to - from) as usize);
        let outside = pages.bytes_mut().get_mut(inside as usize..);
        outside.unwrap_or_default().fill(0);
        if inside > 0 {
            chain
                .read_held(from, pages.span().part(0, inside as usize))
                .await?;
        }
        Ok(Some(pages))
    }

    /// Points the L2 entries of a run of guest clusters at host clusters, in which the guest bytes of `covered` lie now; the entries
    /// replaced. The tables are held.
    async fn link(&self, covered: Range<u64>, run: Run) -> Result<Vec<RawEntry>, IoError> {
        let geometry = self.geometry();
        let first = geometry.down(covered.start);
        self.change_entries(first, run.clusters, |n, old| {
            let host = run.host + (n << geometry.cluster_bits);
            let mut new = RawEntry {
                entry: host | COPIED,
                bitmap: 0,
            };
            if geometry.extended_l2 {
                let cluster = first + (n << geometry.cluster_bits);
                let to = covered.end.min(cluster + geometry.cluster_size()) - 1;
                let units =
                    geometry.subcluster(covered.start.max(cluster))..=geometry.subcluster(to);
                let written = units.fold(0, |bits, n| bits | 1u64 << n);
                // What the old entry said of the other subclusters holds on, unless it said it of another host cluster; then all
                // were written.
                let same = old.entry & OFFSET_MASK == host;
                let before = if same { old.bitmap & ALL_ALLOCATED } else { 0 };
                let zero = (old.bitmap >> 32) & !written;
                new.bitmap = before | written | zero << 32;
            }
            Some(new)
        })
        .await
    }

    /// Changes the L2 entries of `count` guest clusters from the one at `at` on, all in one table: `new` gets each one's number
    /// and value and gives what to put there instead. Returns the entries that were replaced. The tables are held.
    pub(super) async fn change_entries(
        &self,
        at: u64,
        count: u64,
        new: impl Fn(u64, RawEntry) -> Option<RawEntry>,
    ) -> Result<Vec<RawEntry>, IoError> {
        let geometry = self.geometry();
        let table = self.own_l2_table(at).await?;
        let index = geometry.cluster(at % geometry.l1_span());
        let size = geometry.l2_entry_bytes();
        let per_piece = self.tables.piece_size() / size;
        let mut replaced = Vec::new();
        let mut n = 0;
        while n < count {
            let (piece, position) = self.tables.locate(table + (index + n) * size);
            let now = (count - n).min(per_piece - position as u64 / size);
            let change = |bytes: &mut [u8]| {
                let entries = bytes.get_mut(position..).unwrap_or_default();
                for (bytes, n) in entries.chunks_exact_mut(size as usize).zip(n..n + now) {
                    let old = RawEntry::read(bytes, geometry);
                    if let Some(value) = new(n, old) {
                        value.write(bytes);
                        replaced.push(old);
                    }
                }
            };
            // A piece in which nothing changes is not made dirty.
            let changes = self.tables.get(piece, |bytes| {
                let entries = bytes.get(position..).unwrap_or_default();
                let mut entries = entries.chunks_exact(size as usize).zip(n..n + now);
                entries.any(|(bytes, n)| new(n, RawEntry::read(bytes, geometry)).is_some())
            });
            match changes {
                None => self.load_piece(piece).await?,
                Some(false) => n += now,
                Some(true) => {
                    if self.tables.update(piece, Role::L2, change).is_some() {
                        n += now;
                    }
                }
            }
        }
        Ok(replaced)
    }

    /// The L2 table for a guest offset, made or copied first if it does not exist or is a snapshot's too. The tables are held.
    pub(super) async fn own_l2_table(&self, at: u64) -> Result<u64, IoError> {
        let geometry = self.geometry();
        let index = (at / geometry.l1_span()) as usize;
        let old = self.l2_table(at)?;
        let entry = self.l1.borrow().entries.get(index).copied().unwrap_or(0);
        if let Some(table) = old
            && entry & COPIED != 0
        {
            return Ok(table);
        }
        let cluster = geometry.cluster_size();
        let run = self.allocate(1).await?;
        let mut contents = Pages::zeroed(cluster as usize);
        let written = async {
            if let Some(old) = old {
                // Nothing of a shared table is ever dirty: it is copied before it is changed.
                let read = self.file.read(old, contents.span()).await;
                read.map_err(|e| IoError::host("read an L2 table", old, &e))?;
            }
            let write = self.file.write(run.host, contents.span()).await;
            write.map_err(|e| IoError::host("write a new L2 table", run.host, &e))
        };
        if let Err(error) = written.await {
            self.abandon(run).await;
            return Err(error);
        }
        self.tables.purge(run.host..run.host + cluster);
        {
            let mut overlap = self.overlap.borrow_mut();
            if let Some(old) = old {
                overlap.release(geometry, old);
            }
            // The allocator has looked already.
            let _ = overlap.claim(geometry, run.host, cluster, "an L2 table");
        }
        if let Some(old) = old {
            self.free_later(geometry.cluster(old), 1);
        }
        self.settle_in(run)?;
        set_l1(&mut self.l1.borrow_mut(), index, run.host | COPIED);
        self.l1_dirty.borrow_mut().insert(index);
        Ok(run.host)
    }
}

fn set_l1(l1: &mut Entries, index: usize, value: u64) {
    debug_assert_eq!(value & !(OFFSET_MASK | COPIED), 0);
    if let Some(entry) = l1.entries.get_mut(index) {
        *entry = value;
    }
}
