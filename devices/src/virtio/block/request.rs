//! From a descriptor chain to a request: the edge at which all that a driver says is checked, once.
//!
//! ```text
//!   readable  ├ header 16 B ┤ data of OUT, segments of DISCARD and WRITE_ZEROES ┤
//!   writable  ├ data of IN and GET_ID ┤ status 1 B ┤
//! ```
//!
//! How these bytes are cut into descriptors is the driver's choice (virtio 1.2 §2.7.4), but for the order: readable ones come first.
//! A request that breaks a rule is answered if there is a status byte; a chain without one can only be answered by needing a reset.

use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use zerocopy::{FromBytes, IntoBytes};

use crate::virtio::block::bits::{
    DISCARD_FLAG_UNMAP, DiscardSegment, Header, SECTOR_BYTES, kind, status,
};
use crate::virtio::memory::{GuestSlice, MAX_SLICES, copy_from_guest, translate};
use crate::virtio::queue::{Chain, EndlessChain, walk};

/// The most data of one request: what the greatest known driver (the UEFI one) limits itself to.
pub const MAX_DATA_BYTES: u64 = 1 << 30;

/// The most segments of a discard or write-zeroes request.
pub const MAX_DISCARD_SEGMENTS: usize = 32;

/// The most sectors of such a segment: 2 GiB.
pub const MAX_DISCARD_SECTORS: u32 = 1 << 22;

/// What the disk can do.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Its size in sectors.
    pub capacity_sectors: u64,
    /// Refuses writes.
    pub read_only: bool,
    /// Understands DISCARD.
    pub discard: bool,
}

/// A range of a disk, in bytes; lies on the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskRange {
    /// Where it starts.
    pub offset: u64,
    /// Its length.
    pub length: u64,
    /// The space may be given back.
    pub unmap: bool,
}

/// What a request asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Read from this offset into the data.
    Read {
        /// Bytes from the start of the disk.
        offset: u64,
    },
    /// Write the data at this offset.
    Write {
        /// Bytes from the start of the disk.
        offset: u64,
    },
    /// Make everything written durable.
    Flush,
    /// Write the serial number into the data.
    GetId,
    /// Forget these ranges.
    Discard(Vec<DiskRange>),
    /// Make these ranges zero.
    WriteZeroes(Vec<DiskRange>),
}

/// A well-formed request. Its data are in [`Parser::data`] until the next one is parsed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// What it asks for.
    pub operation: Operation,
    /// Bytes of its data.
    pub data_bytes: u32,
    /// Where the status byte goes.
    pub status: GuestAddress,
}

/// A request that is not carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadRequest {
    /// The chain has no end, so the status byte cannot be found.
    #[error(transparent)]
    Endless(#[from] EndlessChain),
    /// There is no writable byte in RAM for the status.
    #[error("a block request has no place for its status")]
    NoStatus,
    /// The answer to the request.
    #[error("a block request is answered with status {code}")]
    Answer {
        /// Where the status byte goes.
        status: GuestAddress,
        /// IOERR or UNSUPP.
        code: u8,
    },
}

/// Parses requests; keeps its buffers from one to the next.
#[derive(Debug)]
pub struct Parser {
    limits: Limits,
    readable: Vec<GuestSlice>,
    writable: Vec<GuestSlice>,
    segments: Vec<u8>,
}

/// What a first walk over the chain finds.
#[derive(Default)]
struct Found {
    header: Header,
    header_bytes: usize,
    readable_bytes: u64,
    writable_bytes: u64,
    status: Option<GuestAddress>,
    broken: bool,
}

impl Parser {
    /// A parser for a disk.
    #[must_use]
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            readable: Vec::new(),
            writable: Vec::new(),
            segments: Vec::new(),
        }
    }

    /// The disk's size is another from now on, in sectors.
    pub fn set_capacity(&mut self, sectors: u64) {
        self.limits.capacity_sectors = sectors;
    }

    /// Where the data of the request parsed last lie.
    #[must_use]
    pub fn data(&self, operation: &Operation) -> &[GuestSlice] {
        match operation {
            Operation::Read { .. } | Operation::GetId => &self.writable,
            Operation::Write { .. } => &self.readable,
            Operation::Flush | Operation::Discard(_) | Operation::WriteZeroes(_) => &[],
        }
    }

    /// Reads a request off its chain.
    ///
    /// # Errors
    /// It is malformed, out of the disk's range, or asks for what the disk does not do.
    pub fn parse(
        &mut self,
        memory: &GuestMemoryMmap<()>,
        chain: Chain<'_>,
    ) -> Result<Request, BadRequest> {
        let found = self.find(memory, chain)?;
        let status = found
            .status
            .filter(|address| memory.read_obj::<u8>(*address).is_ok())
            .ok_or(BadRequest::NoStatus)?;
        let refuse = |code| BadRequest::Answer { status, code };
        if found.broken || found.header_bytes < size_of::<Header>() {
            return Err(refuse(status::IOERR));
        }
        let (readable, writable) = (found.readable_bytes, found.writable_bytes);
        let sector = u64::from_le_bytes(found.header.sector);
        let kind = u32::from_le_bytes(found.header.kind);
        let (operation, data) = match kind {
            kind::IN if readable == 0 => (self.transfer(sector, writable, false), writable),
            kind::OUT if writable == 0 => (self.transfer(sector, readable, true), readable),
            kind::FLUSH if readable == 0 && writable == 0 => (Ok(Operation::Flush), 0),
            kind::GET_ID if readable == 0 => (Ok(Operation::GetId), writable),
            kind::DISCARD | kind::WRITE_ZEROES if writable == 0 => (self.ranges(kind), 0),
            kind::IN
            | kind::OUT
            | kind::FLUSH
            | kind::GET_ID
            | kind::DISCARD
            | kind::WRITE_ZEROES => (Err(status::IOERR), 0),
            _ => (Err(status::UNSUPP), 0),
        };
        let data_bytes = u32::try_from(data).map_err(|_| refuse(status::IOERR))?;
        operation
            .map(|operation| Request {
                operation,
                data_bytes,
                status,
            })
            .map_err(refuse)
    }

    /// Walks the chain to its end and sorts its bytes; whatever is wrong with them is only noted, so that the status byte is found.
    fn find(
        &mut self,
        memory: &GuestMemoryMmap<()>,
        chain: Chain<'_>,
    ) -> Result<Found, BadRequest> {
        self.readable.clear();
        self.writable.clear();
        self.segments.clear();
        let mut found = Found::default();
        walk(chain, |descriptor| {
            let (mut address, mut length) = (descriptor.addr(), descriptor.len());
            let slices = if descriptor.is_write_only() {
                found.status = address
                    .0
                    .checked_add(u64::from(length) - 1)
                    .map(GuestAddress);
                found.writable_bytes = found.writable_bytes.saturating_add(length.into());
                &mut self.writable
            } else {
                found.broken |= found.status.is_some();
                let missing = found.header.as_mut_bytes().get_mut(found.header_bytes..);
                let missing = missing.unwrap_or_default();
                let here = missing.len().min(length as usize);
                let (into, _) = missing.split_at_mut(here);
                found.broken |= memory.read_slice(into, address).is_err();
                found.header_bytes += here;
                length -= u32::try_from(here).unwrap_or(length);
                match address.0.checked_add(here as u64) {
                    Some(rest) => address = GuestAddress(rest),
                    None => found.broken = true,
                }
                found.readable_bytes = found.readable_bytes.saturating_add(length.into());
                &mut self.readable
            };
            found.broken |= found.readable_bytes > MAX_DATA_BYTES
                || found.writable_bytes > MAX_DATA_BYTES + 1
                || slices.len() >= MAX_SLICES - 1;
            if !found.broken {
                found.broken = translate(memory, address, length, slices).is_err();
            }
            Ok::<(), BadRequest>(())
        })?;
        // The last writable byte is not data.
        found.writable_bytes = found.writable_bytes.saturating_sub(1);
        if let Some(last) = self.writable.pop()
            && last.len() > 1
        {
            self.writable.push(last.take(last.len() - 1));
        }
        let kind = u32::from_le_bytes(found.header.kind);
        let segmented = matches!(kind, kind::DISCARD | kind::WRITE_ZEROES);
        if segmented && !found.broken && found.readable_bytes <= SEGMENTS_BYTES as u64 {
            // Copied once, so that the driver cannot change them any more.
            copy_from_guest(memory, &self.readable, &mut self.segments);
        }
        Ok(found)
    }

    fn transfer(&self, sector: u64, bytes: u64, write: bool) -> Result<Operation, u8> {
        let range = DiskRange::on_disk(sector, bytes / SECTOR_BYTES, self.limits.capacity_sectors)
            .filter(|_| bytes.is_multiple_of(SECTOR_BYTES))
            .filter(|_| !(write && self.limits.read_only))
            .ok_or(status::IOERR)?;
        let offset = range.offset;
        Ok(if write {
            Operation::Write { offset }
        } else {
            Operation::Read { offset }
        })
    }

    fn ranges(&self, kind: u32) -> Result<Operation, u8> {
        let discard = kind == kind::DISCARD;
        if discard && !self.limits.discard {
            return Err(status::UNSUPP);
        }
        let (segments, rest) = self.segments.as_chunks::<{ size_of::<DiscardSegment>() }>();
        if self.limits.read_only || segments.is_empty() || !rest.is_empty() {
            return Err(status::IOERR);
        }
        let mut ranges = Vec::with_capacity(segments.len());
        for bytes in segments {
            let segment = DiscardSegment::read_from_bytes(bytes).map_err(|_| status::IOERR)?;
            let flags = u32::from_le_bytes(segment.flags);
            let known = if discard { 0 } else { DISCARD_FLAG_UNMAP };
            if flags & !known != 0 {
                return Err(status::UNSUPP);
            }
            let sectors = u32::from_le_bytes(segment.num_sectors);
            let sector = u64::from_le_bytes(segment.sector);
            let mut range =
                DiskRange::on_disk(sector, sectors.into(), self.limits.capacity_sectors)
                    .filter(|_| sectors <= MAX_DISCARD_SECTORS)
                    .ok_or(status::IOERR)?;
            range.unmap = discard || flags & DISCARD_FLAG_UNMAP != 0;
            ranges.push(range);
        }
        Ok(if discard {
            Operation::Discard(ranges)
        } else {
            Operation::WriteZeroes(ranges)
        })
    }
}

const SEGMENTS_BYTES: usize = MAX_DISCARD_SEGMENTS * size_of::<DiscardSegment>();

impl DiskRange {
    fn on_disk(sector: u64, sectors: u64, capacity_sectors: u64) -> Option<Self> {
        let end = sector.checked_add(sectors)?;
        (end <= capacity_sectors).then_some(Self {
            offset: sector.checked_mul(SECTOR_BYTES)?,
            length: sectors.checked_mul(SECTOR_BYTES)?,
            unmap: false,
        })
    }
}
