//! Memory that a request reads into or writes from.
//!
//! A guest's buffers are scattered, change under our feet and must never be seen as Rust slices; so they are kept as raw
//! pointers with an owner that keeps them mapped, and are only ever handed to the kernel or copied from. This module and
//! `io/sys.rs` are the only places of the crate that know pointers.
//!
//! ```text
//!  Buffers  [ iovec | iovec | iovec ]  + owner        what a caller submits
//!  Span        from ├──── length ────┤                 a part of it that one extent of the image covers
//! ```
#![allow(unsafe_code)]

use std::any::Any;
use std::borrow::Cow;
use std::cell::{RefCell, UnsafeCell};
use std::sync::Arc;

use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

/// A piece of memory of a request: an `iovec`.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub struct RawSlice(libc::iovec);

impl RawSlice {
    /// Describes `length` bytes at `pointer`. Nothing is accessed until the slice is part of [`Buffers`].
    #[must_use]
    pub fn new(pointer: *mut u8, length: usize) -> Self {
        Self(libc::iovec {
            iov_base: pointer.cast(),
            iov_len: length,
        })
    }

    pub(crate) fn pointer(&self) -> *mut u8 {
        self.0.iov_base.cast()
    }

    pub(crate) fn length(&self) -> usize {
        self.0.iov_len
    }

    #[cfg(test)]
    pub(crate) fn copied(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.length()];
        Span {
            slices: &[*self],
            from: 0,
            length: self.length(),
        }
        .copy_to(&mut bytes);
        bytes
    }

    /// The part that begins `skip` bytes in (at most its length) and has at most `length` bytes.
    pub(crate) fn part(&self, skip: usize, length: usize) -> Self {
        let skip = skip.min(self.length());
        Self::new(
            self.pointer().wrapping_add(skip),
            length.min(self.length() - skip),
        )
    }
}

/// The memory of one request, kept alive until the request completes.
pub struct Buffers {
    slices: Vec<RawSlice>,
    length: usize,
    owner: Arc<dyn Any + Send + Sync>,
}

// SAFETY: the pointers stay valid while `owner` lives, from whatever thread they are used, as `from_raw` demands.
unsafe impl Send for Buffers {}

impl std::fmt::Debug for Buffers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "Buffers({} bytes in {} pieces)",
            self.length,
            self.slices.len()
        )
    }
}

impl Buffers {
    /// Takes memory of someone else, typically of a guest.
    ///
    /// # Safety
    /// Every slice must be readable and writable from any thread for as long as `owner` (or a clone of it) lives, and must
    /// not be borrowed as a Rust reference meanwhile. Others may change it at any time.
    #[must_use]
    pub unsafe fn from_raw(slices: Vec<RawSlice>, owner: Arc<dyn Any + Send + Sync>) -> Self {
        let length = slices
            .iter()
            .fold(0usize, |sum, slice| sum.saturating_add(slice.length()));
        Self {
            slices,
            length,
            owner,
        }
    }

    /// Takes a vector: the plain way to write from one. To read, make a [`SharedBuffer`] and look at it afterwards.
    #[must_use]
    pub fn from_vec(bytes: Vec<u8>) -> Self {
        SharedBuffer::from_vec(bytes).buffers()
    }

    /// Bytes in total.
    #[must_use]
    pub fn len(&self) -> usize {
        self.length
    }

    /// Whether there are no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Another handle on the same memory.
    #[must_use]
    pub fn share(&self) -> Self {
        Self {
            slices: self.slices.clone(),
            length: self.length,
            owner: Arc::clone(&self.owner),
        }
    }

    pub(crate) fn span(&self) -> Span<'_> {
        Span {
            slices: &self.slices,
            from: 0,
            length: self.length,
        }
    }
}

/// Memory of our own for a request, which can be looked at when the request is over.
#[derive(Clone)]
pub struct SharedBuffer(Arc<Cells>);

/// A vector of which the first `skip` bytes are not part of the buffer.
struct Cells {
    bytes: UnsafeCell<Vec<u8>>,
    skip: usize,
}

// SAFETY: the vector is only reached through raw pointers while a `Buffers` shares it, and by value once nobody does.
unsafe impl Sync for Cells {}

impl SharedBuffer {
    /// `length` zero bytes.
    #[must_use]
    pub fn zeroed(length: usize) -> Self {
        Self::from_vec(vec![0; length])
    }

    /// The bytes of a vector.
    #[must_use]
    pub fn from_vec(bytes: Vec<u8>) -> Self {
        Self(Arc::new(Cells {
            bytes: UnsafeCell::new(bytes),
            skip: 0,
        }))
    }

    /// `length` bytes, all `value`, that begin at a page: memory that direct transfers take as it is.
    #[must_use]
    pub fn aligned(length: usize, value: u8) -> Self {
        let mut bytes = vec![value; length.saturating_add(PAGE)];
        let skip = bytes.as_ptr().addr().wrapping_neg() % PAGE;
        // Shorter in place: the bytes stay where they are.
        bytes.truncate(skip + length);
        Self(Arc::new(Cells {
            bytes: UnsafeCell::new(bytes),
            skip,
        }))
    }

    /// The memory as a request takes it.
    #[must_use]
    pub fn buffers(&self) -> Buffers {
        // SAFETY: no reference to the vector outlives this call, and it is neither moved nor resized while shared.
        let vector = unsafe { &mut *self.0.bytes.get() };
        let bytes = vector.get_mut(self.0.skip..).unwrap_or_default();
        let slice = RawSlice::new(bytes.as_mut_ptr(), bytes.len());
        let owner: Arc<dyn Any + Send + Sync> = Arc::clone(&self.0) as _;
        // SAFETY: the owner holds the vector, which nobody touches until the last `Buffers` is gone (`take`).
        unsafe { Buffers::from_raw(vec![slice], owner) }
    }

    /// The bytes, once no request uses them any more; `None` before.
    #[must_use]
    pub fn take(self) -> Option<Vec<u8>> {
        Arc::try_unwrap(self.0).ok().map(|cells| {
            let mut bytes = cells.bytes.into_inner();
            bytes.drain(..cells.skip.min(bytes.len()));
            bytes
        })
    }
}

/// A byte range of a request's memory.
#[derive(Clone, Copy)]
pub(crate) struct Span<'a> {
    slices: &'a [RawSlice],
    from: usize,
    length: usize,
}

impl<'a> Span<'a> {
    pub(crate) fn len(&self) -> usize {
        self.length
    }

    /// The part of `length` bytes that begins `from` bytes in; clipped to what is there.
    pub(crate) fn part(&self, from: usize, length: usize) -> Self {
        let from = from.min(self.length);
        Self {
            slices: self.slices,
            from: self.from + from,
            length: length.min(self.length - from),
        }
    }

    /// The slices for the kernel; borrowed where the span is all of them.
    pub(crate) fn slices(&self) -> Cow<'a, [RawSlice]> {
        let whole = self.slices.iter().map(RawSlice::length).sum::<usize>();
        if self.from == 0 && self.length == whole {
            return Cow::Borrowed(self.slices);
        }
        Cow::Owned(self.parts().collect())
    }

    /// The non-empty pieces of memory that make up the span.
    fn parts(&self) -> impl Iterator<Item = RawSlice> + use<'a> {
        let mut skip = self.from;
        let mut left = self.length;
        self.slices.iter().filter_map(move |slice| {
            let part = slice.part(skip, left);
            skip -= skip.min(slice.length());
            left -= part.length();
            (part.length() > 0).then_some(part)
        })
    }

    /// Whether every piece begins at a multiple of `memory` and has a multiple of `length` bytes.
    pub(crate) fn is_aligned(&self, memory: usize, length: usize) -> bool {
        self.parts().all(|part| {
            part.pointer().addr().is_multiple_of(memory) && part.length().is_multiple_of(length)
        })
    }

    pub(crate) fn fill_zero(&self) {
        for part in self.parts() {
            // SAFETY: the span's memory is valid and writable while it is borrowed (`Buffers::from_raw`, `Pages::span`).
            unsafe { std::ptr::write_bytes(part.pointer(), 0, part.length()) };
        }
    }

    /// Copies `bytes` into the span; the shorter of both decides.
    pub(crate) fn copy_from(&self, bytes: &[u8]) {
        let mut rest = bytes;
        for part in self.parts() {
            let (now, later) = rest.split_at(part.length().min(rest.len()));
            // SAFETY: as in `fill_zero`; `now` is no longer than the part and belongs to a Rust object, so they don't overlap.
            unsafe { std::ptr::copy_nonoverlapping(now.as_ptr(), part.pointer(), now.len()) };
            rest = later;
        }
    }

    /// Whether every byte is zero now.
    pub(crate) fn is_zero(&self) -> bool {
        // Looked at in a copy: the memory is a guest's, which may be writing to it.
        let mut copy = [0; 4096];
        (0..self.length).step_by(copy.len()).all(|at| {
            let part = self.part(at, copy.len());
            let copy = copy.get_mut(..part.len()).unwrap_or_default();
            part.copy_to(copy);
            copy.iter().fold(0, |bits, byte| bits | byte) == 0
        })
    }

    /// Copies the span into `bytes`; the shorter of both decides.
    pub(crate) fn copy_to(&self, bytes: &mut [u8]) {
        let mut rest = bytes;
        for part in self.parts() {
            let (now, later) = rest.split_at_mut(part.length().min(rest.len()));
            // SAFETY: as in `copy_from`.
            unsafe { std::ptr::copy_nonoverlapping(part.pointer(), now.as_mut_ptr(), now.len()) };
            rest = later;
        }
    }
}

/// Bytes in a page, the greatest memory alignment that direct I/O asks for.
pub(crate) const PAGE: usize = 4096;

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C, align(4096))]
struct Page([u8; PAGE]);

/// Page-aligned memory of our own: cached tables, bounce and copy-on-write buffers.
pub(crate) struct Pages {
    pages: Vec<Page>,
    length: usize,
    slice: [RawSlice; 1],
}

// SAFETY: `slice` points into `pages`, which moves along.
unsafe impl Send for Pages {}

thread_local! {
    /// Memory to be used again: taking it from the system and giving it back costs as much as a request does otherwise.
    static SPARE: RefCell<Spare> = RefCell::default();
}

#[derive(Default)]
struct Spare {
    buffers: Vec<Vec<Page>>,
    /// Pages in them.
    pages: usize,
}

/// The most pages that a thread keeps, 1 MiB, and the most of one buffer.
const MOST_SPARE: usize = 256;
const LONGEST_SPARE: usize = 64;

impl Spare {
    fn take(&mut self, pages: usize) -> Option<Vec<Page>> {
        let fits = |buffer: &Vec<Page>| buffer.len() >= pages && buffer.len() <= 2 * pages;
        let place = self.buffers.iter().rposition(fits)?;
        let buffer = self.buffers.swap_remove(place);
        self.pages -= buffer.len();
        Some(buffer)
    }

    fn keep(&mut self, buffer: Vec<Page>) {
        let pages = self.pages + buffer.len();
        if (1..=LONGEST_SPARE).contains(&buffer.len()) && pages <= MOST_SPARE {
            self.pages = pages;
            self.buffers.push(buffer);
        }
    }
}

/// So many pages at least, and whether something was in them.
fn take(pages: usize) -> (Vec<Page>, bool) {
    let spare = SPARE.try_with(|spare| spare.borrow_mut().take(pages));
    match spare.ok().flatten() {
        Some(buffer) => (buffer, true),
        None => (vec![Page::new_zeroed(); pages], false),
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        let pages = std::mem::take(&mut self.pages);
        // A thread that ends keeps nothing.
        let _ = SPARE.try_with(|spare| spare.borrow_mut().keep(pages));
    }
}

impl Pages {
    /// `length` zero bytes.
    pub(crate) fn zeroed(length: usize) -> Self {
        let (mut pages, is_used) = take(length.div_ceil(PAGE));
        if is_used {
            pages.as_mut_slice().zero();
        }
        Self::new(pages, length)
    }

    /// `length` bytes of whatever was there: for who overwrites all of them before anybody looks.
    pub(crate) fn used(length: usize) -> Self {
        Self::new(take(length.div_ceil(PAGE)).0, length)
    }

    fn new(mut pages: Vec<Page>, length: usize) -> Self {
        let slice = [RawSlice::new(pages.as_mut_ptr().cast(), length)];
        Self {
            pages,
            length,
            slice,
        }
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        self.pages.as_bytes().get(..self.length).unwrap_or_default()
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        self.pages
            .as_mut_bytes()
            .get_mut(..self.length)
            .unwrap_or_default()
    }

    /// The memory for a transfer in either direction. Exclusive, so that no Rust reference sees it change.
    pub(crate) fn span(&mut self) -> Span<'_> {
        self.slice = [RawSlice::new(self.pages.as_mut_ptr().cast(), self.length)];
        Span {
            slices: &self.slice,
            from: 0,
            length: self.length,
        }
    }
}

/// Spans one after another, as one transfer.
#[derive(Default)]
pub(crate) struct Gather(Vec<RawSlice>);

impl Gather {
    pub(crate) fn push(&mut self, span: Span<'_>) {
        self.0.extend(span.parts());
    }

    /// The pieces as one span. The caller keeps what was pushed borrowed until the transfer is over.
    pub(crate) fn span(&self) -> Span<'_> {
        Span {
            slices: &self.0,
            from: 0,
            length: self.0.iter().map(RawSlice::length).sum(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_span_cuts_across_pieces() {
        let mut memory = Pages::zeroed(10);
        memory.bytes_mut().copy_from_slice(b"0123456789");
        let whole = memory.span();
        let base = whole.slices()[0].pointer();
        let slices = vec![
            RawSlice::new(base, 3),
            RawSlice::new(base.wrapping_add(3), 0),
            RawSlice::new(base.wrapping_add(3), 7),
        ];
        let span = Span {
            slices: &slices,
            from: 0,
            length: 10,
        }
        .part(2, 5);
        let mut seen = [0; 5];
        span.copy_to(&mut seen);
        assert_eq!(&seen, b"23456");
        assert_eq!(
            span.slices()
                .iter()
                .map(RawSlice::length)
                .collect::<Vec<_>>(),
            [1, 4]
        );
        span.part(1, 2).copy_from(b"ab");
        span.part(4, 9).fill_zero();
        assert_eq!(memory.bytes(), b"012ab5\x00789");
    }

    #[test]
    fn a_shared_buffer_is_given_back_only_when_no_request_uses_it() {
        let shared = SharedBuffer::from_vec(vec![7; 4]);
        let buffers = shared.buffers();
        assert!(shared.clone().take().is_none());
        buffers.span().copy_from(&[1, 2]);
        drop(buffers);
        assert_eq!(shared.take(), Some(vec![1, 2, 7, 7]));
    }
}
