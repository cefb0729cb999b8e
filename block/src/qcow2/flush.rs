//! The order in which changes become durable.
//!
//! ```text
//!  1  write dirty refcount blocks    (new clusters are counted)        ┐
//!  2  fdatasync                      (with them: guest data, COW       │ one FLUSH of the guest
//!                                     data, new L2 tables, new blocks) │
//!  3  write dirty L2 pieces and L1 entries, in place                   │
//!  4  fdatasync                                                        ┘
//!  5  punch what is no longer referred to, then lower its refcounts (written by the next step 1)
//! ```
//!
//! Whatever of 1 or 3 a power cut lets through, the refcounts are never below the references: the worst outcome is a leak.
//! A new L2 table is written in full when it is made, before step 2, so that an L1 entry never points at stale bytes.
//! Each step is left out where there is nothing to do; after plain overwrites a flush is one fdatasync.

use std::cell::Cell;

use super::Qcow2;
use super::table::Role;
use crate::error::IoError;

/// Guest flushes that wait at the same time share one: what they ask for is that everything before them is durable, and a flush
/// that begins later than all of them gives that to each.
#[derive(Default)]
pub(super) struct Flushes {
    begun: Cell<u64>,
    done: Cell<u64>,
}

impl Qcow2 {
    /// Makes everything that completed before the call durable.
    pub(crate) async fn flush(&self) -> Result<(), IoError> {
        if !self.writable {
            return Ok(());
        }
        if let Some(reason) = self.stopped.get() {
            return Err(IoError::Stopped(reason));
        }
        let mine = self.flushes.begun.get() + 1;
        let meta = self.meta().await;
        if self.flushes.done.get() >= mine {
            return Ok(());
        }
        if let Some(reason) = self.stopped.get() {
            return Err(IoError::Stopped(reason));
        }
        let number = self.flushes.begun.get() + 1;
        self.flushes.begun.set(number);
        if self.is_settled() {
            // Nothing but data: those who allocate need not wait for it.
            drop(meta);
            self.sync().await?;
        } else {
            self.flush_tables().await?;
        }
        self.flushes.done.set(self.flushes.done.get().max(number));
        Ok(())
    }

    /// Whether no table has changed since the last flush and nothing waits to be freed.
    fn is_settled(&self) -> bool {
        !self.tables.is_dirty()
            && self.l1_dirty.borrow().is_empty()
            && self.allocator.borrow().pending.is_empty()
    }

    /// [`Qcow2::flush`] for whoever holds the tables.
    pub(super) async fn flush_tables(&self) -> Result<(), IoError> {
        self.write_tables(Role::Refcount).await?;
        self.sync().await?;
        if self.tables.has_dirty(Role::L2) || !self.l1_dirty.borrow().is_empty() {
            self.write_tables(Role::L2).await?;
            self.write_l1().await?;
            self.sync().await?;
        }
        if !self.allocator.borrow().pending.is_empty() {
            self.free_pending().await?;
        }
        Ok(())
    }

    /// Flushes where the caches or the clusters to free demand it. The tables are held.
    pub(super) async fn relieve(&self) -> Result<(), IoError> {
        if self.tables.is_under_pressure() || self.has_much_to_free() {
            self.flush_tables().await?;
            if self.tables.is_under_pressure() {
                // Freeing dirtied refcounts; nothing has to wait for those.
                self.write_tables(Role::Refcount).await?;
            }
        }
        Ok(())
    }

    pub(super) async fn write_tables(&self, role: Role) -> Result<(), IoError> {
        let write = self.tables.write_dirty(&self.file, role).await;
        write.map_err(|e| IoError::host("write a table", 0, &e))
    }

    async fn write_l1(&self) -> Result<(), IoError> {
        loop {
            let Some((index, at, entry)) = ({
                let dirty = self.l1_dirty.borrow();
                let l1 = self.l1.borrow();
                dirty.first().map(|index| {
                    let entry = l1.entries.get(*index).copied().unwrap_or(0);
                    (*index, l1.at.offset + *index as u64 * 8, entry)
                })
            }) else {
                return Ok(());
            };
            self.write_bytes(at, &entry.to_be_bytes(), "write the L1 table")
                .await?;
            self.l1_dirty.borrow_mut().remove(&index);
        }
    }

    /// Leaves the image with nothing to be done: what a flush does, and the refcounts of what it freed.
    pub(crate) async fn settle(&self) -> Result<(), IoError> {
        self.flush().await?;
        self.flush().await
    }
}
