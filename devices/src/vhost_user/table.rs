//! A client's memory: the regions that it shares, mapped here, at the addresses that its guest and the client itself know them by.

use std::fs::File;
use std::io;
use std::sync::Arc;

use rustix::fs::FileType;
use vhost::vhost_user::message::VhostUserMemoryRegion;
use vhost::vhost_user::{Error, Result};
use vm_memory::{
    GuestAddress, GuestMemoryMmap, GuestMemoryRegion, GuestRegionMmap, GuestUsize, MmapRegion,
};

use super::session::refuse;
use crate::GuestMemory;
use crate::virtio::block::MAX_QUEUES;

/// The most regions of a client.
pub(super) const MAX_REGIONS: usize = 256;

/// Memory of our own above the client's: a page for each ring, for a list of the requests to be begun again.
const SPARE_BYTES: usize = SPARE_PAGE_BYTES as usize * MAX_QUEUES as usize;
const SPARE_PAGE_BYTES: u64 = 4096;
/// Keeps the spare memory away from what a client may add.
const SPARE_ALIGNMENT: u64 = 1 << 30;

/// One region, mapped.
struct Mapped {
    /// Where the client itself has it; ring addresses are told so.
    client_address: u64,
    region: Arc<GuestRegionMmap<()>>,
}

/// All regions of a client.
#[derive(Default)]
pub(super) struct MemoryTable {
    regions: Vec<Mapped>,
    memory: Option<GuestMemory>,
    /// Where the spare memory is.
    spare: u64,
}

impl MemoryTable {
    /// A table of these regions in place of what there was.
    pub(super) fn new(regions: &[VhostUserMemoryRegion], files: Vec<File>) -> Result<Self> {
        let mut table = Self::default();
        for (region, file) in regions.iter().zip(files) {
            table.insert(region, file)?;
        }
        table.rebuild()?;
        Ok(table)
    }

    /// Adds a region.
    pub(super) fn add(&mut self, region: &VhostUserMemoryRegion, file: File) -> Result<()> {
        self.insert(region, file)?;
        self.rebuild().inspect_err(|_| {
            self.regions.pop();
        })
    }

    /// Takes the region away that was added with these addresses.
    pub(super) fn remove(&mut self, region: &VhostUserMemoryRegion) -> Result<()> {
        let (guest, client) = (region.guest_phys_addr, region.user_addr);
        let size = region.memory_size;
        let at = self.regions.iter().position(|mapped| {
            mapped.region.start_addr().0 == guest
                && mapped.client_address == client
                && mapped.region.len() == size
        });
        let at = at.ok_or_else(|| refuse("no region has these addresses"))?;
        self.regions.remove(at);
        self.rebuild()
    }

    /// The memory as devices see it; none before the client has told of any.
    pub(super) fn memory(&self) -> Option<&GuestMemory> {
        self.memory.as_ref()
    }

    /// The guest's address of what the client has at `address`.
    pub(super) fn guest_address(&self, address: u64) -> Result<u64> {
        self.regions
            .iter()
            .find_map(|mapped| {
                let offset = address.checked_sub(mapped.client_address)?;
                (offset < mapped.region.len()).then(|| mapped.region.start_addr().0 + offset)
            })
            .ok_or_else(|| refuse("a ring lies outside of the memory table"))
    }

    /// The page of our own that belongs to ring `index`.
    pub(super) fn spare_page(&self, index: u16) -> GuestAddress {
        GuestAddress(self.spare + u64::from(index.min(MAX_QUEUES - 1)) * SPARE_PAGE_BYTES)
    }

    fn insert(&mut self, region: &VhostUserMemoryRegion, file: File) -> Result<()> {
        if self.regions.len() >= MAX_REGIONS {
            return Err(refuse("too many memory regions"));
        }
        check_file(&file, region.mmap_offset, region.memory_size)?;
        let mapping: MmapRegion<()> = region.mmap_region(file)?;
        let mapped = GuestRegionMmap::new(mapping, GuestAddress(region.guest_phys_addr))
            .ok_or_else(|| refuse("a memory region exceeds the address space"))?;
        self.regions.push(Mapped {
            client_address: region.user_addr,
            region: Arc::new(mapped),
        });
        Ok(())
    }

    fn rebuild(&mut self) -> Result<()> {
        if self.regions.is_empty() {
            self.memory = None;
            return Ok(());
        }
        let end = |mapped: &Mapped| mapped.region.start_addr().0 + mapped.region.len();
        let highest = self.regions.iter().map(end).max().unwrap_or(0);
        let spare = highest
            .checked_next_multiple_of(SPARE_ALIGNMENT)
            .ok_or_else(|| refuse("a memory region exceeds the address space"))?;
        let own = MmapRegion::new(SPARE_BYTES)
            .map_err(|error| Error::ReqHandlerError(io::Error::other(error)))?;
        let own = GuestRegionMmap::new(own, GuestAddress(spare))
            .ok_or_else(|| refuse("a memory region exceeds the address space"))?;
        let mut regions: Vec<_> = self.regions.iter().map(|m| Arc::clone(&m.region)).collect();
        regions.sort_by_key(|region| region.start_addr());
        regions.push(Arc::new(own));
        self.spare = spare;
        let memory = GuestMemoryMmap::from_arc_regions(regions)
            .map_err(|_| refuse("memory regions overlap"))?;
        self.memory = Some(Arc::new(memory));
        Ok(())
    }
}

/// Touching memory past the end of its file would end this process, so the file must have all of it, and be of a kind that has an end.
pub(super) fn check_file(file: &File, offset: u64, size: GuestUsize) -> Result<()> {
    let stat = rustix::fs::fstat(file).map_err(|e| Error::ReqHandlerError(e.into()))?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Err(refuse("memory must be a memfd or another regular file"));
    }
    let end = offset.checked_add(size);
    let length = u64::try_from(stat.st_size).unwrap_or(0);
    if end.is_none_or(|end| end > length) {
        return Err(refuse("a memory region is longer than its file"));
    }
    Ok(())
}
