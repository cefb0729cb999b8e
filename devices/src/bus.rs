//! The port and memory-mapped address spaces, and how a vCPU exit finds its device.
//!
//! There is one [`Bus`] per space. Ranges never overlap, so an access belongs to the range that holds its first byte. The table is
//! read-mostly: a look-up takes a shared lock that nobody holds while a device works, so that a device may insert and remove ranges
//! (a moved BAR) from within its own register access.
//!
//! What nobody claims reads as all ones and swallows writes, as on the real bus; [`Bus::misses`] counts such accesses.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use vmm_sys_util::eventfd::EventFd;

/// A device's registers as a vCPU reaches them. `offset` counts from the start of the range the device was inserted at.
///
/// Called on vCPU threads, several at once: a device keeps its register file behind a lock of its own, held for nanoseconds.
pub trait BusDevice: Send + Sync {
    /// Reads `data.len()` bytes (1, 2, 4 or 8) at `offset`.
    fn read(&self, offset: u64, data: &mut [u8]);

    /// Writes `data` at `offset`.
    fn write(&self, offset: u64, data: &[u8]);
}

/// Connects guest writes at an address to an event descriptor inside the kernel (ioeventfd); any width, any value.
pub trait Doorbells: Send + Sync {
    /// Signals `event` on every guest write at `address` (guest physical).
    ///
    /// # Errors
    /// The hypervisor refused.
    fn attach(&self, address: u64, event: &EventFd) -> io::Result<()>;

    /// Undoes [`Doorbells::attach`] with the same arguments.
    ///
    /// # Errors
    /// The hypervisor refused.
    fn detach(&self, address: u64, event: &EventFd) -> io::Result<()>;
}

/// Why a range could not be added to or taken from a [`Bus`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BusError {
    /// The range is empty or ends beyond the address space.
    #[error(
        "the range of {length:#x} bytes at {base:#x} is empty or ends beyond the address space"
    )]
    BadRange {
        /// First address.
        base: u64,
        /// Bytes.
        length: u64,
    },
    /// Another device has part of the range.
    #[error(
        "the range of {length:#x} bytes at {base:#x} overlaps the {other_length:#x} bytes at {other_base:#x}"
    )]
    Overlap {
        /// First address asked for.
        base: u64,
        /// Bytes asked for.
        length: u64,
        /// First address of the range in the way.
        other_base: u64,
        /// Bytes of the range in the way.
        other_length: u64,
    },
    /// No range begins at this address.
    #[error("no device was inserted at {base:#x}")]
    NotFound {
        /// The address given.
        base: u64,
    },
}

struct Range {
    base: u64,
    /// Last address, inclusive, so that a range may end at the top of the space.
    last: u64,
    device: Arc<dyn BusDevice>,
}

/// One address space: which device answers at which address.
#[derive(Default)]
pub struct Bus {
    /// Ascending and disjoint.
    ranges: RwLock<Vec<Range>>,
    misses: AtomicU64,
}

impl Bus {
    /// An empty address space.
    #[must_use]
    pub fn new() -> Bus {
        Bus::default()
    }

    /// Gives the `length` bytes from `base` to `device`. Accesses reach it from the moment this returns.
    ///
    /// # Errors
    /// The range is empty, leaves the address space, or overlaps another device's.
    pub fn insert(
        &self,
        base: u64,
        length: u64,
        device: Arc<dyn BusDevice>,
    ) -> Result<(), BusError> {
        let last = length
            .checked_sub(1)
            .and_then(|more| base.checked_add(more))
            .ok_or(BusError::BadRange { base, length })?;
        let mut ranges = self.ranges_mut();
        let at = ranges.partition_point(|range| range.last < base);
        if let Some(other) = ranges.get(at).filter(|range| range.base <= last) {
            return Err(BusError::Overlap {
                base,
                length,
                other_base: other.base,
                other_length: (other.last - other.base).saturating_add(1),
            });
        }
        ranges.insert(at, Range { base, last, device });
        Ok(())
    }

    /// Takes the range that begins at `base` from its device. An access that is already inside the device may still end after this
    /// returns.
    ///
    /// # Errors
    /// No range begins there.
    pub fn remove(&self, base: u64) -> Result<(), BusError> {
        let mut ranges = self.ranges_mut();
        let at = ranges
            .binary_search_by_key(&base, |range| range.base)
            .map_err(|_| BusError::NotFound { base })?;
        ranges.remove(at);
        Ok(())
    }

    /// Reads at `address`; all ones where no device is.
    pub fn read(&self, address: u64, data: &mut [u8]) {
        match self.find(address) {
            Some((offset, device)) => device.read(offset, data),
            None => data.fill(0xff),
        }
    }

    /// Writes at `address`; without effect where no device is.
    pub fn write(&self, address: u64, data: &[u8]) {
        if let Some((offset, device)) = self.find(address) {
            device.write(offset, data);
        }
    }

    /// How many accesses found no device.
    #[must_use]
    pub fn misses(&self) -> u64 {
        self.misses.load(Ordering::Relaxed)
    }

    fn find(&self, address: u64) -> Option<(u64, Arc<dyn BusDevice>)> {
        let ranges = self.ranges();
        let at = ranges.partition_point(|range| range.last < address);
        let found = ranges
            .get(at)
            .filter(|range| range.base <= address)
            .map(|range| (address - range.base, Arc::clone(&range.device)));
        drop(ranges);
        if found.is_none() {
            self.misses.fetch_add(1, Ordering::Relaxed);
        }
        found
    }

    // The table is consistent between any two statements that could panic, so a poisoned lock is as good as any.
    fn ranges(&self) -> RwLockReadGuard<'_, Vec<Range>> {
        self.ranges.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn ranges_mut(&self) -> RwLockWriteGuard<'_, Vec<Range>> {
        self.ranges.write().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    /// Answers with its own number and remembers what was written where.
    #[derive(Default)]
    struct Recorder {
        number: u8,
        writes: Mutex<Vec<(u64, Vec<u8>)>>,
    }

    impl BusDevice for Recorder {
        fn read(&self, _offset: u64, data: &mut [u8]) {
            data.fill(self.number);
        }

        fn write(&self, offset: u64, data: &[u8]) {
            self.writes.lock().unwrap().push((offset, data.to_vec()));
        }
    }

    fn recorder(number: u8) -> Arc<Recorder> {
        Arc::new(Recorder {
            number,
            ..Recorder::default()
        })
    }

    fn read_byte(bus: &Bus, address: u64) -> u8 {
        let mut data = [0];
        bus.read(address, &mut data);
        data[0]
    }

    #[test]
    fn an_access_reaches_the_device_that_has_its_first_byte_with_the_offset_in_its_range() {
        let bus = Bus::new();
        let (low, high) = (recorder(1), recorder(2));
        bus.insert(0x100, 0x10, low.clone()).unwrap();
        bus.insert(0x110, 0x10, high.clone()).unwrap();

        assert_eq!(read_byte(&bus, 0x10f), 1);
        assert_eq!(read_byte(&bus, 0x110), 2);
        bus.write(0x113, &[7, 8]);
        assert_eq!(*high.writes.lock().unwrap(), [(3, vec![7, 8])]);
        assert!(low.writes.lock().unwrap().is_empty());
    }

    #[test]
    fn an_unclaimed_address_reads_all_ones_and_is_counted() {
        let bus = Bus::new();
        bus.insert(0x100, 0x10, recorder(1)).unwrap();
        let mut data = [0; 4];
        bus.read(0xff, &mut data);
        assert_eq!(data, [0xff; 4]);
        bus.write(0x110, &[0]);
        assert_eq!(bus.misses(), 2);
    }

    #[test]
    fn an_overlapping_range_is_refused_and_names_the_one_in_the_way() {
        let bus = Bus::new();
        bus.insert(0x100, 0x10, recorder(1)).unwrap();
        for (base, length) in [(0xf8, 9), (0x10f, 1), (0x0, 0x1000), (0x104, 2)] {
            assert_eq!(
                bus.insert(base, length, recorder(2)),
                Err(BusError::Overlap {
                    base,
                    length,
                    other_base: 0x100,
                    other_length: 0x10
                })
            );
        }
        bus.insert(0xf0, 0x10, recorder(3)).unwrap();
        assert_eq!(read_byte(&bus, 0xff), 3);
    }

    #[test]
    fn a_range_may_end_at_the_top_of_the_space_but_not_beyond() {
        let bus = Bus::new();
        assert!(matches!(
            bus.insert(u64::MAX, 2, recorder(1)),
            Err(BusError::BadRange { .. })
        ));
        assert!(matches!(
            bus.insert(0, 0, recorder(1)),
            Err(BusError::BadRange { .. })
        ));
        bus.insert(u64::MAX, 1, recorder(1)).unwrap();
        assert_eq!(read_byte(&bus, u64::MAX), 1);
    }

    #[test]
    fn a_removed_range_is_free_again() {
        let bus = Bus::new();
        bus.insert(0x100, 0x10, recorder(1)).unwrap();
        bus.remove(0x100).unwrap();
        assert_eq!(read_byte(&bus, 0x100), 0xff);
        assert_eq!(bus.remove(0x100), Err(BusError::NotFound { base: 0x100 }));
        bus.insert(0x108, 0x10, recorder(2)).unwrap();
    }

    /// Moves itself when written to, as a BAR does.
    struct Mover {
        bus: Arc<Bus>,
        other: Arc<Recorder>,
    }

    impl BusDevice for Mover {
        fn read(&self, _offset: u64, _data: &mut [u8]) {}

        fn write(&self, _offset: u64, _data: &[u8]) {
            self.bus.remove(0x100).unwrap();
            self.bus.insert(0x200, 4, self.other.clone()).unwrap();
        }
    }

    #[test]
    fn a_device_may_change_the_table_from_within_its_own_access() {
        let bus = Arc::new(Bus::new());
        let mover = Mover {
            bus: Arc::clone(&bus),
            other: recorder(9),
        };
        bus.insert(0x100, 4, Arc::new(mover)).unwrap();
        bus.write(0x100, &[0]);
        assert_eq!(read_byte(&bus, 0x200), 9);
        assert_eq!(read_byte(&bus, 0x100), 0xff);
    }
}
