//! Transfers that direct I/O would refuse: whole blocks through aligned memory of ours.
//!
//! ```text
//!  file    |  block  |  block  |  block  |
//!  wanted       ├────────────────┤            read: all three, copy the middle out
//!  first and last block are read, changed and written back, held exclusively meanwhile
//! ```
//!
//! The guest's logical block stays 512 bytes whatever the host's file system wants.

use std::io;

use super::{Alignment, BlockFile, add, is_aligned};
use crate::buffers::{Pages, Span};
use crate::task::Kind;

/// The most memory that one transfer bounces through at a time, in bytes; a multiple of every alignment.
const CHUNK: u64 = 1024 * 1024;

impl BlockFile {
    pub(super) async fn read_bounced(
        &self,
        alignment: Alignment,
        at: u64,
        span: Span<'_>,
    ) -> io::Result<()> {
        let end = add(at, span.len())?;
        let mut done = 0;
        while done < span.len() {
            let from = add(at, done)?;
            let first = alignment.down(from);
            let last = alignment.up(end).min(first.saturating_add(CHUNK));
            let mut pages = Pages::used(usize_of(last - first)?);
            self.read_whole(first, pages.span()).await?;
            let skip = usize_of(from - first)?;
            let length = usize_of(last.min(end) - from)?;
            span.part(done, length)
                .copy_from(pages.bytes().get(skip..).unwrap_or_default());
            done += length;
        }
        Ok(())
    }

    /// Writes a direct file: straight where aligned, else block by block.
    pub(super) async fn write_direct(
        &self,
        alignment: Alignment,
        at: u64,
        span: Span<'_>,
    ) -> io::Result<()> {
        let end = add(at, span.len())?;
        let blocks = alignment.down(at)..alignment.up(end);
        if is_aligned(alignment, at, span) {
            let _hold = self.blocks.hold(blocks, Kind::Shared).await;
            return self.write_whole(self.fd(), at, span).await;
        }
        let _hold = self.blocks.hold(blocks, Kind::Exclusive).await;
        let block = alignment.offset;
        let mut done = 0;
        while done < span.len() {
            let from = add(at, done)?;
            let first = alignment.down(from);
            let last = alignment.up(end).min(first.saturating_add(CHUNK));
            let to = last.min(end);
            let mut pages = Pages::used(usize_of(last - first)?);
            let size = pages.span().len();
            if first < from {
                self.read_whole(first, pages.span().part(0, block)).await?;
            }
            if to < last && (size > block || first == from) {
                self.read_whole(last - block as u64, pages.span().part(size - block, block))
                    .await?;
            }
            let skip = usize_of(from - first)?;
            let length = usize_of(to - from)?;
            span.part(done, length)
                .copy_to(pages.bytes_mut().get_mut(skip..).unwrap_or_default());
            self.write_whole(self.fd(), first, pages.span()).await?;
            done += length;
        }
        Ok(())
    }
}

fn usize_of(value: u64) -> io::Result<usize> {
    value
        .try_into()
        .map_err(|_| io::Error::from_raw_os_error(libc::EFBIG))
}
