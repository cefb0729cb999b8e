//! Taking host clusters and giving them back.
//!
//! Taking raises the refcount in memory; the flush that makes the new mapping durable writes it first. Giving back waits in
//! [`Allocator::pending`] until the pointer that used to refer to the cluster is durably cleared; then the hole is punched, and
//! only then does the refcount fall and the cluster become free ([`super::flush`]).

use std::collections::HashSet;

use super::Qcow2;
use super::refcount::Slot;
use super::spec::{self, RawEntry, Reference, get_refcount, put_refcount};
use super::states::Transit;
use super::table::Role;
use crate::error::IoError;

/// What the allocator of an image knows beyond the refcounts.
#[derive(Default)]
pub(super) struct Allocator {
    /// No cluster below this one is free.
    pub(super) cursor: u64,
    /// Free clusters that are known to read as zero, because a hole was punched there.
    pub(super) punched: HashSet<u64>,
    /// Clusters that lose a reference as soon as that is safe; more than once if they lose several.
    pub(super) pending: Vec<u64>,
}

/// Pending frees that make a flush worthwhile for their own sake: so many clusters, or so many bytes.
const PENDING_LIMIT: usize = 4096;
const PENDING_BYTES: u64 = 32 * 1024 * 1024;
/// Punched clusters that are remembered; more only cost the writing of zeros.
const PUNCHED_LIMIT: usize = 1 << 18;

/// Host clusters in a row, newly taken.
#[derive(Clone, Copy, Debug)]
pub(super) struct Run {
    /// Host offset of the first.
    pub(super) host: u64,
    pub(super) clusters: u64,
    /// Whether they read as zero as they are.
    pub(super) zeroed: bool,
}

impl Qcow2 {
    /// Takes between 1 and `want` free clusters in a row. The tables are held.
    pub(super) async fn allocate(&self, want: u64) -> Result<Run, IoError> {
        let geometry = self.geometry();
        let mut first = self.find_free().await?;
        let grows = first << geometry.cluster_bits >= self.file.end();
        if grows && self.file.end() > self.size() && !self.allocator.borrow().pending.is_empty() {
            // Before the file outgrows the disk, what was discarded comes back.
            self.flush_tables().await?;
            first = self.find_free().await?;
        }
        let host = first << geometry.cluster_bits;
        let zeroed = self.is_zeroed(first);
        let Slot::Piece(piece, index) = self.slot(first)? else {
            return Err(IoError::corrupt(host, "a refcount block has vanished"));
        };
        let order = geometry.refcount_order;
        let count = self.tables.get(piece, |bytes| {
            (0..want.max(1))
                .take_while(|n| {
                    get_refcount(bytes, order, index + *n as usize) == Some(0)
                        && self.is_zeroed(first + n) == zeroed
                })
                .count() as u64
        });
        let count = count.unwrap_or(1).max(1);
        let end = host.checked_add(count << geometry.cluster_bits);
        let end = end
            .filter(|end| *end <= spec::HOST_LIMIT)
            .ok_or(IoError::NoSpace)?;
        if self.file.is_device() && end > self.file.end() {
            return Err(IoError::NoSpace);
        }
        let hit = self.overlap.borrow().hit(geometry, host, end - host);
        if hit.is_some() {
            return Err(self.corrupt(host, "a free cluster holds metadata").await);
        }
        let take = |bytes: &mut [u8]| {
            for n in 0..count as usize {
                put_refcount(bytes, order, index + n, 1);
            }
        };
        while self.tables.update(piece, Role::Refcount, take).is_none() {
            self.load_piece(piece).await?;
        }
        self.step(first..first + count, Some(Transit::CowInFlight))?;
        let mut allocator = self.allocator.borrow_mut();
        allocator.cursor = first + count;
        for cluster in first..first + count {
            allocator.punched.remove(&cluster);
        }
        Ok(Run {
            host,
            clusters: count,
            zeroed,
        })
    }

    /// The first free cluster; its refcount block exists and is in the cache.
    async fn find_free(&self) -> Result<u64, IoError> {
        let geometry = self.geometry();
        let order = geometry.refcount_order;
        let mut cluster = self.allocator.borrow().cursor;
        loop {
            if cluster >= spec::HOST_LIMIT >> geometry.cluster_bits {
                return Err(IoError::NoSpace);
            }
            match self.slot(cluster)? {
                Slot::NoTable => self.grow_refcount_table().await?,
                Slot::NoBlock => self.add_refcount_block(cluster).await?,
                Slot::Piece(piece, index) => {
                    let found = self.tables.get(piece, |bytes| {
                        let mut passed = 0u64;
                        while let Some(refcount) =
                            get_refcount(bytes, order, index + passed as usize)
                        {
                            if refcount == 0 {
                                return (passed, true);
                            }
                            passed += 1;
                        }
                        (passed, false)
                    });
                    match found {
                        None => self.load_piece(piece).await?,
                        Some((passed, true)) => {
                            self.allocator.borrow_mut().cursor = cluster + passed;
                            return Ok(cluster + passed);
                        }
                        Some((passed, false)) => cluster += passed.max(1),
                    }
                }
            }
        }
    }

    /// Whether a free cluster reads as zero.
    fn is_zeroed(&self, cluster: u64) -> bool {
        let fresh =
            !self.file.is_device() && cluster << self.geometry().cluster_bits >= self.file.end();
        fresh || self.allocator.borrow().punched.contains(&cluster)
    }

    /// Gives back what [`Qcow2::allocate`] took, where nothing came to refer to it. The tables are held.
    pub(super) async fn abandon(&self, run: Run) {
        let first = self.geometry().cluster(run.host);
        if self.step(first..first + run.clusters, None).is_err() {
            return;
        }
        for cluster in first..first + run.clusters {
            // What cannot be given back is a leak, no more.
            if self.set_refcount(cluster, 0).await.is_err() {
                return;
            }
        }
        let mut allocator = self.allocator.borrow_mut();
        allocator.cursor = allocator.cursor.min(first);
    }

    /// Something refers to what [`Qcow2::allocate`] took.
    pub(super) fn settle_in(&self, run: Run) -> Result<(), IoError> {
        let first = self.geometry().cluster(run.host);
        self.step(first..first + run.clusters, None)
    }

    /// Takes one reference off each of `count` clusters, once that is safe.
    pub(super) fn free_later(&self, cluster: u64, count: u64) {
        let clusters = cluster..cluster + count;
        if self.step(clusters, Some(Transit::DiscardInFlight)).is_err() {
            // Writing has stopped; a leak is the safe answer.
            return;
        }
        self.allocator
            .borrow_mut()
            .pending
            .extend(cluster..cluster + count);
    }

    /// Takes off the references of an L2 entry that was replaced.
    pub(super) fn free_entry_later(&self, raw: RawEntry) {
        let geometry = self.geometry();
        match raw.reference(geometry, self.header.version) {
            Ok(Reference::Cluster { host, .. }) => self.free_later(geometry.cluster(host), 1),
            Ok(Reference::Compressed { host, bytes }) => {
                let first = geometry.cluster(host);
                let last = geometry.cluster(host + bytes - 1);
                self.free_later(first, last - first + 1);
            }
            // A reserved bit: whatever it meant, a leak is the safe answer.
            Ok(Reference::Nothing) | Err(_) => {}
        }
    }

    /// Whether so much waits to be freed that a flush should not wait for the guest's.
    pub(super) fn has_much_to_free(&self) -> bool {
        let pending = self.allocator.borrow().pending.len();
        let bytes = (pending as u64).saturating_mul(self.geometry().cluster_size());
        pending >= PENDING_LIMIT || bytes >= PENDING_BYTES
    }

    /// Frees what waits for it; every pointer to it has been durably cleared. The tables are held.
    pub(super) async fn free_pending(&self) -> Result<(), IoError> {
        let geometry = self.geometry();
        let mut pending = std::mem::take(&mut self.allocator.borrow_mut().pending);
        pending.sort_unstable();
        let mut rest = pending.as_slice();
        let result = loop {
            // A run of clusters that become free together, or one cluster that keeps references.
            let Some(first) = rest.first().copied() else {
                break Ok(());
            };
            let mut clusters = 0;
            let step = loop {
                let cluster = first + clusters;
                let losses = rest.iter().take_while(|c| **c == cluster).count();
                if losses == 0 {
                    break Ok(());
                }
                match self.refcount(cluster).await {
                    Ok(refcount) if refcount == losses as u64 => {
                        rest = rest.get(losses..).unwrap_or_default();
                        clusters += 1;
                    }
                    Ok(refcount) if refcount > losses as u64 => {
                        if clusters == 0 {
                            rest = rest.get(losses..).unwrap_or_default();
                            // Others refer to it.
                            break match self.step(cluster..cluster + 1, None) {
                                Ok(()) => {
                                    let rest = refcount - losses as u64;
                                    self.set_refcount(cluster, rest).await
                                }
                                Err(error) => Err(error),
                            };
                        }
                        break Ok(());
                    }
                    Ok(_) => {
                        rest = rest.get(losses..).unwrap_or_default();
                        let host = cluster << geometry.cluster_bits;
                        break Err(self.corrupt(host, "a cluster in use has no refcount").await);
                    }
                    Err(error) => break Err(error),
                }
            };
            if let Err(error) = step {
                break Err(error);
            }
            if clusters > 0
                && let Err(error) = self.punch_and_free(first, clusters).await
            {
                break Err(error);
            }
        };
        // What was not reached stays for the next time.
        self.allocator.borrow_mut().pending.extend(rest);
        result
    }

    async fn punch_and_free(&self, first: u64, clusters: u64) -> Result<(), IoError> {
        let geometry = self.geometry();
        let host = first << geometry.cluster_bits;
        let bytes = clusters << geometry.cluster_bits;
        if !self.is_clear(host, bytes) {
            return Err(self
                .corrupt(host, "metadata was about to be freed as guest data")
                .await);
        }
        self.packed_to.set(None);
        self.step(first..first + clusters, Some(Transit::PunchPending))?;
        // A hole that cannot be punched costs space, not correctness.
        let zeroed = self.file.punch(host, bytes).await.unwrap_or(false);
        for cluster in first..first + clusters {
            self.set_refcount(cluster, 0).await?;
            self.step(cluster..cluster + 1, None)?;
        }
        let mut allocator = self.allocator.borrow_mut();
        allocator.cursor = allocator.cursor.min(first);
        if zeroed && allocator.punched.len() < PUNCHED_LIMIT {
            allocator.punched.extend(first..first + clusters);
        }
        Ok(())
    }
}
