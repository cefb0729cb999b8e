//! The record of requests under way (INFLIGHT_SHMFD): made here, kept by the client, and given to whoever serves it after a crash.

use std::fs::File;
use std::sync::Arc;

use rustix::fs::MemfdFlags;
use vhost::vhost_user::message::VhostUserInflight;
use vhost::vhost_user::{Error, Result};
use vm_memory::{FileOffset, GuestAddress, GuestMemoryMmap};

use super::session::{other, refuse};
use super::table::check_file;
use crate::virtio::block::MAX_QUEUES;
use crate::virtio::journal::{Journal, region_bytes};

/// The record of all rings, mapped.
pub(super) struct Record {
    memory: Arc<GuestMemoryMmap<()>>,
    queues: u16,
    queue_size: u16,
}

impl Record {
    /// A new record for so many rings of such a size, and what the client has to know of it.
    pub(super) fn make(wanted: &VhostUserInflight) -> Result<(VhostUserInflight, File)> {
        let bytes = bytes(wanted)?;
        let file = rustix::fs::memfd_create("drover-inflight", MemfdFlags::CLOEXEC)
            .map_err(|error| Error::ReqHandlerError(error.into()))?;
        let file = File::from(file);
        file.set_len(bytes).map_err(Error::ReqHandlerError)?;
        let about = VhostUserInflight {
            mmap_size: bytes,
            mmap_offset: 0,
            ..*wanted
        };
        Ok((about, file))
    }

    /// The record that a client kept.
    pub(super) fn map(about: &VhostUserInflight, file: File) -> Result<Self> {
        let needed = bytes(about)?;
        if about.mmap_size < needed {
            return Err(refuse("the record of requests is too small for its rings"));
        }
        check_file(&file, about.mmap_offset, needed)?;
        let size = usize::try_from(needed).map_err(|_| Error::InvalidParam)?;
        let place = FileOffset::new(file, about.mmap_offset);
        let memory =
            GuestMemoryMmap::from_ranges_with_files([(GuestAddress(0), size, Some(place))])
                .map_err(other)?;
        Ok(Self {
            memory: Arc::new(memory),
            queues: about.num_queues,
            queue_size: about.queue_size,
        })
    }

    /// The record of one ring.
    pub(super) fn journal(&self, index: u16, size: u16) -> Result<Journal> {
        if index >= self.queues || size > self.queue_size {
            return Err(refuse("the record of requests has no room for this ring"));
        }
        let start = u64::from(index) * region_bytes(self.queue_size);
        Journal::open(Arc::clone(&self.memory), start, size).map_err(other)
    }
}

fn bytes(about: &VhostUserInflight) -> Result<u64> {
    // The protocol's limit of a ring; larger ones are refused where they are set.
    if !(1..=MAX_QUEUES).contains(&about.num_queues) || !(1..=32768).contains(&about.queue_size) {
        return Err(refuse("a record of requests is for 1 to 64 rings"));
    }
    Ok(u64::from(about.num_queues) * region_bytes(about.queue_size))
}
