//! The guest's RAM: reserved address space with unmapped guards around it, backed the way the definition asks for.
//!
//! ```text
//!   host virtual            guard │ low RAM (2 MiB or 1 GiB aligned) │ guard      guard │ high RAM │ guard
//!   guest physical                0 ................... <= 2 GiB                        4 GiB ....
//! ```
//!
//! | backing | when | why |
//! |---|---|---|
//! | private anonymous + `MADV_HUGEPAGE` | default | gets transparent huge pages on every host, costs only what is touched |
//! | hugetlbfs (`MAP_HUGETLB`) | `hugepages` | reserved huge pages; the kernel refuses here, not later in the guest |
//! | memfd | `shared` | another process can map it |
//!
//! The only unsafe code about mappings in this crate lives here.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::Arc;

use drover_api::definition::MemoryConfig;
use drover_arch::layout::RamLayout;
use drover_devices::GuestMemory;
use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::VmFd;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};
use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::{FileOffset, GuestAddress, GuestMemoryMmap, GuestRegionMmap, MmapRegion};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
/// Unmapped space on both sides of each range: a stray host access next to guest RAM faults instead of reading something else.
const GUARD_BYTES: usize = 64 << 10;

/// Why the guest's RAM could not be provided.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// The definition asks for more than the host has to give.
    #[error(
        "{wanted_mib} MiB is more than the {available_mib} MiB available on this host; \
         choose less, or set memory.overcommit"
    )]
    TooMuch {
        /// Asked for, in MiB.
        wanted_mib: u64,
        /// MemAvailable, in MiB.
        available_mib: u64,
    },
    /// Too few huge pages are reserved on the host.
    #[error(
        "{wanted} pages of {page_kib} KiB are needed but {free} are free; \
         reserve more: echo N > /sys/kernel/mm/hugepages/hugepages-{page_kib}kB/nr_hugepages"
    )]
    TooFewHugePages {
        /// Pages needed.
        wanted: u64,
        /// Pages free.
        free: u64,
        /// Page size in KiB.
        page_kib: u64,
    },
    /// The huge page size does not exist.
    #[error("the host has no pages of {page_kib} KiB (2MiB and 1GiB exist on x86-64)")]
    NoSuchHugePage {
        /// Page size in KiB.
        page_kib: u64,
    },
    /// The size does not suit the backing or this process's address space.
    #[error("{0}")]
    Size(&'static str),
    /// The kernel refused a step.
    #[error("memory: cannot {step}: {source}")]
    Host {
        /// What was tried.
        step: &'static str,
        /// The kernel's answer.
        source: io::Error,
    },
}

impl MemoryError {
    /// The definition's field to change, if one is to blame.
    pub fn field(&self) -> Option<&'static str> {
        match self {
            Self::TooMuch { .. } | Self::Size(_) => Some("memory.size"),
            Self::TooFewHugePages { .. } | Self::NoSuchHugePage { .. } => Some("memory.hugepages"),
            Self::Host { .. } => None,
        }
    }
}

fn host(step: &'static str) -> impl FnOnce(rustix::io::Errno) -> MemoryError {
    move |errno| MemoryError::Host {
        step,
        source: errno.into(),
    }
}

/// One contiguous range of guest RAM and where the process sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot {
    /// First guest physical address.
    pub guest_address: u64,
    /// Length in bytes.
    pub size_bytes: u64,
    /// Address in this process.
    pub host_address: u64,
}

/// The RAM of one VM. Unmapped when this value is dropped, provided that no device still holds a reference to it.
pub struct Memory {
    guest: GuestMemory,
    slots: Vec<Slot>,
    // After `guest`: fields drop in order, and the reservation checks that nobody refers to the mapping any more.
    _reservations: Vec<Reservation>,
}

impl Memory {
    /// Provides RAM as `config` asks for it.
    ///
    /// # Errors
    /// The host has too little, or refuses.
    pub fn new(config: &MemoryConfig) -> Result<Self, MemoryError> {
        let size = config.size.0;
        if size == 0 || !size.is_multiple_of(4096) {
            return Err(MemoryError::Size("must be a positive multiple of 4 KiB"));
        }
        let page = HugePage::of(config)?;
        check_available(config, page)?;
        let layout = RamLayout::new(size);
        let ranges = std::iter::once(layout.low.clone()).chain(layout.high.clone());
        let file = config.shared.then(|| shared_file(size, page)).transpose()?;
        let mut reservations = Vec::new();
        let mut regions = Vec::new();
        let mut slots = Vec::new();
        let mut file_offset = 0;
        for range in ranges {
            let bytes = range.end - range.start;
            let file = file.as_ref().map(|file| (file.clone(), file_offset));
            let (reservation, region) = Reservation::map(bytes, page, file)?;
            slots.push(Slot {
                guest_address: range.start,
                size_bytes: bytes,
                host_address: reservation.mapping.as_ptr() as u64,
            });
            if config.prefault {
                reservation.prefault()?;
            }
            reservations.push(reservation);
            let region = GuestRegionMmap::with_arc(region, GuestAddress(range.start))
                .ok_or(MemoryError::Size("does not fit the guest's address space"))?;
            regions.push(region);
            file_offset += bytes;
        }
        let guest = GuestMemoryMmap::from_regions(regions)
            .map_err(|_| MemoryError::Size("gives overlapping ranges"))?;
        Ok(Self {
            guest: Arc::new(guest),
            slots,
            _reservations: reservations,
        })
    }

    /// The RAM as devices see it.
    pub fn guest(&self) -> &GuestMemory {
        &self.guest
    }

    /// Its ranges, ascending by guest address.
    pub fn slots(&self) -> &[Slot] {
        &self.slots
    }

    /// Makes it the RAM of `vm`.
    ///
    /// # Errors
    /// The kernel refused.
    pub fn register(&self, vm: &VmFd) -> Result<(), MemoryError> {
        for (number, slot) in (0..).zip(&self.slots) {
            let region = kvm_userspace_memory_region {
                slot: number,
                flags: 0,
                guest_phys_addr: slot.guest_address,
                memory_size: slot.size_bytes,
                userspace_addr: slot.host_address,
            };
            // SAFETY: the range is guest RAM that no Rust reference points into. Should it be unmapped before the VM is gone, KVM finds
            // nothing there, since nothing else is mapped while a vCPU runs: a machine drops its RAM last.
            unsafe { vm.set_user_memory_region(region) }.map_err(|errno| MemoryError::Host {
                step: "give the RAM to KVM",
                source: errno.into(),
            })?;
        }
        Ok(())
    }
}

/// A page size of hugetlbfs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum HugePage {
    Size2MiB,
    Size1GiB,
}

impl HugePage {
    fn of(config: &MemoryConfig) -> Result<Option<Self>, MemoryError> {
        match config.hugepages.map(|size| size.0) {
            None => Ok(None),
            Some(size) if size == 2 * MIB => Ok(Some(Self::Size2MiB)),
            Some(GIB) => Ok(Some(Self::Size1GiB)),
            Some(other) => Err(MemoryError::NoSuchHugePage {
                page_kib: other >> 10,
            }),
        }
    }

    fn bytes(self) -> u64 {
        match self {
            Self::Size2MiB => 2 * MIB,
            Self::Size1GiB => GIB,
        }
    }

    fn map_flags(self) -> MapFlags {
        MapFlags::HUGETLB
            | match self {
                Self::Size2MiB => MapFlags::HUGE_2MB,
                Self::Size1GiB => MapFlags::HUGE_1GB,
            }
    }

    fn memfd_flags(self) -> MemfdFlags {
        MemfdFlags::HUGETLB
            | match self {
                Self::Size2MiB => MemfdFlags::HUGE_2MB,
                Self::Size1GiB => MemfdFlags::HUGE_1GB,
            }
    }
}

/// Refuses what the host cannot give, before anything is mapped.
fn check_available(config: &MemoryConfig, page: Option<HugePage>) -> Result<(), MemoryError> {
    let size = config.size.0;
    if let Some(page) = page {
        let page_kib = page.bytes() >> 10;
        if !size.is_multiple_of(page.bytes()) {
            return Err(MemoryError::Size("must be a multiple of memory.hugepages"));
        }
        let path = format!("/sys/kernel/mm/hugepages/hugepages-{page_kib}kB/free_hugepages");
        let free = std::fs::read_to_string(path)
            .ok()
            .and_then(|text| text.trim().parse::<u64>().ok())
            .ok_or(MemoryError::NoSuchHugePage { page_kib })?;
        let wanted = size / page.bytes();
        if wanted > free {
            return Err(MemoryError::TooFewHugePages {
                wanted,
                free,
                page_kib,
            });
        }
        return Ok(());
    }
    if config.overcommit {
        return Ok(());
    }
    let text = std::fs::read_to_string("/proc/meminfo").map_err(|source| MemoryError::Host {
        step: "read /proc/meminfo",
        source,
    })?;
    let available = mem_available(&text).ok_or_else(|| MemoryError::Host {
        step: "find MemAvailable in /proc/meminfo",
        source: io::ErrorKind::InvalidData.into(),
    })?;
    if size > available {
        return Err(MemoryError::TooMuch {
            wanted_mib: size / MIB,
            available_mib: available / MIB,
        });
    }
    Ok(())
}

/// MemAvailable of a /proc/meminfo text, in bytes.
fn mem_available(meminfo: &str) -> Option<u64> {
    let line = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

fn shared_file(size: u64, page: Option<HugePage>) -> Result<Arc<File>, MemoryError> {
    let flags = MemfdFlags::CLOEXEC | page.map_or(MemfdFlags::empty(), HugePage::memfd_flags);
    let fd: OwnedFd = memfd_create("guest-ram", flags).map_err(host("create a memfd"))?;
    ftruncate(&fd, size).map_err(host("size the memfd"))?;
    Ok(Arc::new(File::from(fd)))
}

/// Address space that belongs to one range of RAM, guards included.
struct Reservation {
    base: NonNull<u8>,
    total: usize,
    mapping: Arc<MmapRegion<()>>,
}

// SAFETY: the pointer is an address range owned by this value; it is only used to unmap or advise it.
unsafe impl Send for Reservation {}
// SAFETY: as above; no method reads or writes through the pointer.
unsafe impl Sync for Reservation {}

impl Reservation {
    fn map(
        bytes: u64,
        page: Option<HugePage>,
        file: Option<(Arc<File>, u64)>,
    ) -> Result<(Self, Arc<MmapRegion<()>>), MemoryError> {
        let too_big = || MemoryError::Size("does not fit this process's address space");
        let size = usize::try_from(bytes).map_err(|_| too_big())?;
        let alignment = page.map_or(2 * MIB, HugePage::bytes) as usize;
        let total = size
            .checked_add(alignment + 2 * GUARD_BYTES)
            .ok_or_else(too_big)?;
        // SAFETY: an anonymous mapping at an address of the kernel's choice replaces nothing.
        let base = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                total,
                ProtFlags::empty(),
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        }
        .map_err(host("reserve address space"))?;
        let start = (base as usize + GUARD_BYTES).next_multiple_of(alignment);
        let address = start as *mut std::ffi::c_void;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let private = file.is_none();
        let mapped = if let Some((file, offset)) = &file {
            // SAFETY: `address..address + size` lies inside the reservation made above, which nothing else uses.
            unsafe {
                mmap(
                    address,
                    size,
                    protection,
                    MapFlags::SHARED | MapFlags::FIXED,
                    &**file,
                    *offset,
                )
            }
        } else {
            let flags = MapFlags::PRIVATE
                | MapFlags::FIXED
                | page.map_or(MapFlags::NORESERVE, HugePage::map_flags);
            // SAFETY: `address..address + size` lies inside the reservation made above, which nothing else uses.
            unsafe { mmap_anonymous(address, size, protection, flags) }
        };
        if let Err(errno) = mapped {
            // SAFETY: the reservation was made above and is not referred to by anything.
            let _ = unsafe { munmap(base, total) };
            return Err(host("map the guest's RAM")(errno));
        }
        if private && page.is_none() {
            // SAFETY: advice about our own mapping; it does not change its content. A kernel without THP refuses, which is fine.
            let _ = unsafe { madvise(address, size, Advice::LinuxHugepage) };
        }
        // SAFETY: guest RAM in a core dump helps nobody and leaks the guest's secrets; advice about our own mapping.
        let _ = unsafe { madvise(address, size, Advice::LinuxDontDump) };

        let flags = if private {
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS
        } else {
            libc::MAP_SHARED
        };
        let mut builder = MmapRegionBuilder::new(size)
            .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
            .with_mmap_flags(flags | libc::MAP_NORESERVE);
        if let Some((file, offset)) = file {
            builder = builder.with_file_offset(FileOffset::from_arc(file, offset));
        }
        // SAFETY: `address` is a live mapping of `size` bytes, unmapped by `Drop` only once no region refers to it.
        let builder = unsafe { builder.with_raw_mmap_pointer(address.cast()) };
        let mapping = builder.build().map_err(|error| MemoryError::Host {
            step: "describe the guest's RAM",
            source: io::Error::other(error),
        })?;
        let mapping = Arc::new(mapping);
        let base = NonNull::new(base.cast::<u8>()).ok_or_else(too_big)?;
        Ok((
            Self {
                base,
                total,
                mapping: mapping.clone(),
            },
            mapping,
        ))
    }

    fn prefault(&self) -> Result<(), MemoryError> {
        let (address, size) = (self.mapping.as_ptr().cast(), self.mapping.size());
        // SAFETY: the range is our own live mapping, and populating it changes no content.
        unsafe { madvise(address, size, Advice::LinuxPopulateWrite) }
            .map_err(host("prefault the guest's RAM"))
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if Arc::strong_count(&self.mapping) > 1 {
            // A device still refers to it: leaking address space is safe, unmapping would not be.
            tracing::warn!(
                bytes = self.total,
                "guest RAM is still referred to and stays mapped"
            );
            return;
        }
        // SAFETY: the reservation was made by `map`; ours is the last reference to the mapping inside it.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.total) };
    }
}

#[cfg(test)]
mod tests {
    use drover_api::definition::ByteSize;
    use vm_memory::{Bytes, GuestMemoryBackend as _};

    use super::*;

    fn config(size: u64) -> MemoryConfig {
        MemoryConfig {
            size: ByteSize(size),
            hugepages: None,
            prefault: false,
            shared: false,
            overcommit: false,
        }
    }

    #[test]
    fn ram_above_2_gib_continues_at_4_gib() {
        let memory = Memory::new(&MemoryConfig {
            overcommit: true,
            ..config(3 * GIB)
        })
        .unwrap();
        let slots: Vec<_> = memory
            .slots()
            .iter()
            .map(|slot| (slot.guest_address, slot.size_bytes))
            .collect();
        assert_eq!(slots, [(0, 2 * GIB), (4 * GIB, GIB)]);
        memory
            .guest()
            .write_obj(0x55u8, GuestAddress(5 * GIB - 1))
            .unwrap();
        assert!(
            memory
                .guest()
                .write_obj(0u8, GuestAddress(2 * GIB))
                .is_err()
        );
    }

    #[test]
    fn more_than_the_host_has_is_refused_unless_overcommitted() {
        let wanted = 1 << 44;
        let error = Memory::new(&config(wanted))
            .err()
            .expect("16 TiB must be refused");
        assert!(
            matches!(error, MemoryError::TooMuch { wanted_mib, .. } if wanted_mib == wanted / MIB)
        );
        assert!(
            error
                .to_string()
                .starts_with("16777216 MiB is more than the ")
        );
        assert!(
            Memory::new(&MemoryConfig {
                overcommit: true,
                ..config(wanted)
            })
            .is_ok()
        );
    }

    #[test]
    fn shared_ram_is_one_file_in_guest_order() {
        use std::os::unix::fs::FileExt;
        let memory = Memory::new(&MemoryConfig {
            shared: true,
            ..config(32 * MIB)
        })
        .unwrap();
        memory
            .guest()
            .write_slice(b"hello", GuestAddress(0x2000))
            .unwrap();
        let region = memory.guest().find_region(GuestAddress(0)).unwrap();
        let file = region.file_offset().unwrap();
        let mut seen = [0; 5];
        file.file()
            .read_exact_at(&mut seen, file.start() + 0x2000)
            .unwrap();
        assert_eq!(&seen, b"hello");
    }

    #[test]
    fn prefaulted_ram_is_resident() {
        let memory = Memory::new(&MemoryConfig {
            prefault: true,
            ..config(32 * MIB)
        })
        .unwrap();
        let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
        let pages: u64 = statm.split(' ').nth(1).unwrap().parse().unwrap();
        assert!(pages * 4096 >= 32 * MIB, "{pages} pages resident");
        drop(memory);
    }

    #[test]
    fn the_mapping_outlives_a_device_that_still_holds_it() {
        let memory = Memory::new(&config(32 * MIB)).unwrap();
        let device = memory.guest().clone();
        drop(memory);
        device.write_obj(7u8, GuestAddress(0x3000)).unwrap();
        assert_eq!(device.read_obj::<u8>(GuestAddress(0x3000)).unwrap(), 7);
    }

    #[test]
    fn meminfo_without_the_line_is_not_guessed() {
        assert_eq!(
            mem_available("MemTotal: 1 kB\nMemAvailable:   2048 kB\n"),
            Some(2 << 20)
        );
        assert_eq!(mem_available("MemTotal: 1 kB\n"), None);
        assert_eq!(
            mem_available("MemAvailable: 18446744073709551615 kB\n"),
            None
        );
    }
}
