//! The record of requests under way (INFLIGHT_SHMFD): made here, kept by the client, and given to whoever serves it after a crash.

use std::fs::File;
use std::sync::Arc;

use rustix::fs::MemfdFlags;
use vhost::vhost_user::message::VhostUserInflight;
use vhost::vhost_user::{Error, Result};
use vm_memory::{FileOffset, GuestAddress, GuestMemoryMmap};

use super::session::{MAX_RING_SIZE, other, refuse};
use super::table::check_file;
use crate::virtio::block::MAX_QUEUES;
use crate::virtio::journal::{ALIGNMENT, Journal, region_bytes};

/// The record of all rings, mapped.
pub(super) struct Record {
    memory: Arc<GuestMemoryMmap<()>>,
    queues: u16,
    /// Bytes of each ring's region.
    stride: u64,
}

impl Record {
    /// A new record for so many rings, and what the client has to know of it. There is room for rings of any size: firmware has been
    /// seen to choose larger ones than its VMM asked a record for.
    pub(super) fn make(wanted: &VhostUserInflight) -> Result<(VhostUserInflight, File)> {
        let bytes = queues(wanted)? * region_bytes(MAX_RING_SIZE);
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
        let queues = queues(about)?;
        let stride =
            (about.mmap_size / queues).min(region_bytes(MAX_RING_SIZE)) / ALIGNMENT * ALIGNMENT;
        let needed = queues * stride;
        if needed == 0 {
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
            stride,
        })
    }

    /// The record of one ring.
    pub(super) fn journal(&self, index: u16, size: u16) -> Result<Journal> {
        if index >= self.queues || region_bytes(size) > self.stride {
            let (queues, stride) = (self.queues, self.stride);
            return Err(other(format!(
                "the record of requests has {stride} bytes for each of {queues} rings: no room for ring {index} of {size} entries"
            )));
        }
        let start = u64::from(index) * self.stride;
        Journal::open(Arc::clone(&self.memory), start, size).map_err(other)
    }
}

/// The number of rings, within bounds.
fn queues(about: &VhostUserInflight) -> Result<u64> {
    if !(1..=MAX_QUEUES).contains(&about.num_queues) {
        return Err(refuse("a record of requests is for 1 to 64 rings"));
    }
    Ok(about.num_queues.into())
}
