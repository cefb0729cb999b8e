//! Guest memory as system calls take it: pointers into the VMM's own mapping of the guest's RAM.
//!
//! A device checks a guest's address and length here, once, and gets [`GuestSlice`]s that cannot be wrong afterwards. The kernel (never
//! Rust code) then reads and writes through them, so what the guest does to the same bytes meanwhile cannot break a Rust reference.
//! This module, and no other in the devices' hot paths, turns such pointers into system calls.
//!
//! A slice does not keep its memory mapped. The functions here take the memory besides, and their one rule is that it is the memory
//! which the slices were translated from. Devices keep slices beside the queue that holds that memory, and drop both together.

#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;

use drover_block::{Buffers, RawSlice};
use vm_memory::{
    Address, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion,
    MemoryRegionAddress,
};

use crate::GuestMemory;

/// One piece of guest memory, contiguous in the VMM's address space. Valid as long as the guest memory it came from stays mapped.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct GuestSlice(libc::iovec);

// SAFETY: the pointer is only ever handed to the kernel; no thread owns what it points to.
unsafe impl Send for GuestSlice {}

impl std::fmt::Debug for GuestSlice {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            formatter,
            "{} bytes at {:p}",
            self.0.iov_len, self.0.iov_base
        )
    }
}

/// A guest named memory that it does not have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{length} bytes at guest address {address:#x} are not all RAM")]
pub struct NotRam {
    /// Where the range starts.
    pub address: u64,
    /// Its length in bytes.
    pub length: u64,
}

impl GuestSlice {
    /// Where the piece lies in this process.
    #[must_use]
    pub fn as_ptr(&self) -> *mut u8 {
        self.0.iov_base.cast()
    }

    /// Its length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.iov_len
    }

    /// Whether it is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.iov_len == 0
    }

    /// The piece without its first `count` bytes; empty if it has no more.
    #[must_use]
    pub fn skip(&self, count: usize) -> Self {
        let count = count.min(self.len());
        Self(libc::iovec {
            iov_base: self.as_ptr().wrapping_add(count).cast(),
            iov_len: self.len() - count,
        })
    }

    /// The first `count` bytes of the piece; all of it if it has no more.
    #[must_use]
    pub fn take(&self, count: usize) -> Self {
        Self(libc::iovec {
            iov_base: self.0.iov_base,
            iov_len: self.len().min(count),
        })
    }

    /// A piece of the VMM's own memory, to stand beside guest memory in one system call.
    ///
    /// # Safety
    /// `bytes` must stay alive and untouched by Rust code until the system call that uses the slice has returned.
    unsafe fn own(bytes: &mut [u8]) -> Self {
        Self(libc::iovec {
            iov_base: bytes.as_mut_ptr().cast(),
            iov_len: bytes.len(),
        })
    }
}

/// Appends the pieces that make up `length` bytes at `address` to `slices`; nothing for a length of 0.
///
/// # Errors
/// Part of the range is not RAM; `slices` is as before.
pub fn translate(
    memory: &GuestMemoryMmap<()>,
    address: GuestAddress,
    length: u32,
    slices: &mut Vec<GuestSlice>,
) -> Result<(), NotRam> {
    let before = slices.len();
    for piece in memory.get_slices(address, length as usize) {
        let Ok(piece) = piece else {
            slices.truncate(before);
            return Err(NotRam {
                address: address.0,
                length: length.into(),
            });
        };
        let pointer = piece.ptr_guard_mut();
        slices.push(GuestSlice(libc::iovec {
            iov_base: pointer.as_ptr().cast(),
            iov_len: pointer.len(),
        }));
    }
    Ok(())
}

/// The most pieces that one system call takes (IOV_MAX of Linux).
pub const MAX_SLICES: usize = 1024;

/// Reads once from `file` into guest memory, in order; what exceeds it goes to `overflow`. Returns the bytes read in all.
///
/// `memory` is the RAM that `slices` were translated from; holding it here keeps it mapped during the call.
///
/// # Errors
/// As readv(2); more than [`MAX_SLICES`] pieces (with the overflow) are refused by the kernel.
pub(crate) fn read_vectored(
    file: BorrowedFd<'_>,
    _memory: &GuestMemoryMmap<()>,
    slices: &mut Vec<GuestSlice>,
    overflow: &mut [u8],
) -> io::Result<usize> {
    let guest = slices.len();
    if !overflow.is_empty() {
        // SAFETY: the slice leaves the vector again below, before `overflow`'s borrow ends.
        slices.push(unsafe { GuestSlice::own(overflow) });
    }
    let count = i32::try_from(slices.len()).unwrap_or(i32::MAX);
    // SAFETY: GuestSlice is a transparent iovec; every one points to guest memory that `_memory` keeps mapped, or to `overflow`.
    let read = unsafe { libc::readv(file.as_raw_fd(), slices.as_ptr().cast(), count) };
    let error = io::Error::last_os_error();
    slices.truncate(guest);
    usize::try_from(read).map_err(|_| error)
}

/// Writes `head` and then guest memory to `file` by one call. Returns the bytes written in all.
///
/// # Errors
/// As writev(2); more than [`MAX_SLICES`] pieces (with the head) are refused by the kernel.
pub(crate) fn write_vectored(
    file: BorrowedFd<'_>,
    _memory: &GuestMemoryMmap<()>,
    head: &mut [u8],
    slices: &mut [GuestSlice],
) -> io::Result<usize> {
    let Some(first) = slices.first_mut() else {
        return Ok(0);
    };
    // SAFETY: the slice is overwritten below, before `head`'s borrow ends.
    *first = unsafe { GuestSlice::own(head) };
    let count = i32::try_from(slices.len()).unwrap_or(i32::MAX);
    // SAFETY: GuestSlice is a transparent iovec; every one points to guest memory that `_memory` keeps mapped, or to `head`.
    let written = unsafe { libc::writev(file.as_raw_fd(), slices.as_ptr().cast(), count) };
    let error = io::Error::last_os_error();
    if let Some(first) = slices.first_mut() {
        *first = GuestSlice::EMPTY;
    }
    usize::try_from(written).map_err(|_| error)
}

/// Copies bytes into guest memory, in order, as far as the pieces reach. Returns how many.
#[must_use]
pub(crate) fn copy_to_guest(
    _memory: &GuestMemoryMmap<()>,
    bytes: &[u8],
    slices: &[GuestSlice],
) -> usize {
    let mut copied = 0;
    for slice in slices {
        let rest = bytes.get(copied..).unwrap_or_default();
        let count = rest.len().min(slice.len());
        // SAFETY: `count` bytes are readable in `rest` and writable in the guest memory that `_memory` keeps mapped; the VMM's heap
        // and the guest's RAM never overlap, and no Rust reference to guest memory exists.
        unsafe { std::ptr::copy_nonoverlapping(rest.as_ptr(), slice.as_ptr(), count) };
        copied += count;
    }
    copied
}

/// Guest memory as a disk takes it. `slices` must come from [`translate`] of this `memory`, which stays mapped until the disk is done.
#[must_use]
pub(crate) fn disk_buffers(slices: &[GuestSlice], memory: &GuestMemory) -> Buffers {
    let slices = slices
        .iter()
        .map(|slice| RawSlice::new(slice.as_ptr(), slice.len()))
        .collect();
    let owner: GuestMemory = Arc::clone(memory);
    // SAFETY: the slices lie in this guest memory, which stays mapped while `owner` lives; no Rust reference to it is ever made.
    unsafe { Buffers::from_raw(slices, owner) }
}

/// Appends a copy of guest memory to `bytes`.
pub(crate) fn copy_from_guest(
    _memory: &GuestMemoryMmap<()>,
    slices: &[GuestSlice],
    bytes: &mut Vec<u8>,
) {
    for slice in slices {
        let start = bytes.len();
        bytes.resize(start + slice.len(), 0);
        let into = bytes.get_mut(start..).unwrap_or_default();
        // SAFETY: both are `slice.len()` bytes, one in guest memory that `_memory` keeps mapped and one in the VMM's heap.
        unsafe { std::ptr::copy_nonoverlapping(slice.as_ptr(), into.as_mut_ptr(), into.len()) };
    }
}

/// Gives the whole host pages inside a range of guest memory back to the host; the guest reads zeros there from now on, until it
/// writes. Returns the bytes given back.
///
/// # Errors
/// The range is not all RAM, or as madvise(2).
pub(crate) fn give_back(
    memory: &GuestMemoryMmap<()>,
    address: GuestAddress,
    length: u64,
) -> io::Result<u64> {
    const PAGE: usize = 4096;
    let outside = || io::Error::from_raw_os_error(libc::EFAULT);
    let mut given = 0;
    let mut address = address;
    let mut left = length;
    if address.checked_add(length).is_none() {
        return Err(outside());
    }
    while left > 0 {
        let region = memory.find_region(address).ok_or_else(outside)?;
        let inside = address.raw_value() - region.start_addr().raw_value();
        let now = left.min(region.len() - inside);
        let piece = region
            .get_slice(MemoryRegionAddress(inside), now as usize)
            .map_err(io::Error::other)?;
        let start = piece.ptr_guard_mut().as_ptr() as usize;
        let first = start.next_multiple_of(PAGE);
        let end = (start + now as usize) & !(PAGE - 1);
        if first < end {
            // Pages of a file that others may map as well are gone only when the file has a hole there.
            let advice = match region.file_offset() {
                None => libc::MADV_DONTNEED,
                Some(_) => libc::MADV_REMOVE,
            };
            // SAFETY: the pages lie inside guest RAM that `memory` keeps mapped and that no Rust reference points into; what is there is
            // the guest's to give up.
            let result = unsafe { libc::madvise(first as *mut libc::c_void, end - first, advice) };
            if result != 0 {
                return Err(io::Error::last_os_error());
            }
            given += (end - first) as u64;
        }
        address = address.unchecked_add(now);
        left -= now;
    }
    Ok(given)
}

impl GuestSlice {
    /// A piece of nothing; keeps the place of what [`write_vectored`] puts before guest memory.
    pub const EMPTY: Self = Self(libc::iovec {
        iov_base: std::ptr::null_mut(),
        iov_len: 0,
    });
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Seek, Write};
    use std::os::fd::AsFd;

    use vm_memory::Bytes;

    use super::*;

    fn two_regions() -> GuestMemoryMmap<()> {
        GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 0x1000), (GuestAddress(0x1000), 0x1000)])
            .unwrap()
    }

    #[test]
    fn a_range_across_two_regions_becomes_two_pieces() {
        let memory = two_regions();
        let mut slices = Vec::new();
        translate(&memory, GuestAddress(0xff0), 0x20, &mut slices).unwrap();
        assert_eq!(
            slices.iter().map(GuestSlice::len).collect::<Vec<_>>(),
            [0x10, 0x10]
        );
    }

    #[test]
    fn a_range_that_leaves_ram_is_refused_and_leaves_no_piece() {
        let memory = two_regions();
        let mut slices = Vec::new();
        let error = translate(&memory, GuestAddress(0x1ff0), 0x20, &mut slices).unwrap_err();
        assert_eq!(
            error,
            NotRam {
                address: 0x1ff0,
                length: 0x20
            }
        );
        assert!(slices.is_empty());
        assert!(translate(&memory, GuestAddress(u64::MAX - 1), 0x20, &mut slices).is_err());
    }

    #[test]
    fn reading_fills_guest_memory_first_and_the_overflow_last() {
        let memory = two_regions();
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"abcdefgh").unwrap();
        file.rewind().unwrap();
        let mut slices = Vec::new();
        translate(&memory, GuestAddress(0xffe), 4, &mut slices).unwrap();
        let mut overflow = [0; 8];
        assert_eq!(
            read_vectored(file.as_fd(), &memory, &mut slices, &mut overflow).unwrap(),
            8
        );
        assert_eq!(slices.len(), 2);
        assert_eq!(
            memory.read_obj::<[u8; 4]>(GuestAddress(0xffe)).unwrap(),
            *b"abcd"
        );
        assert_eq!(overflow, *b"efgh\0\0\0\0");
    }

    #[test]
    fn writing_sends_the_head_and_then_guest_memory() {
        let memory = two_regions();
        memory.write_slice(b"wxyz", GuestAddress(0x10)).unwrap();
        let mut file = tempfile::tempfile().unwrap();
        let mut slices = vec![GuestSlice::EMPTY];
        translate(&memory, GuestAddress(0x10), 4, &mut slices).unwrap();
        let mut head = *b"head";
        assert_eq!(
            write_vectored(file.as_fd(), &memory, &mut head, &mut slices).unwrap(),
            8
        );
        let mut back = String::new();
        file.rewind().unwrap();
        file.read_to_string(&mut back).unwrap();
        assert_eq!(back, "headwxyz");
    }
}
