//! Raw images: the disk's bytes are the file's. Nothing in them is ever interpreted.

use std::cell::Cell;

use crate::buffers::Span;
use crate::error::{Error, IoError};
use crate::io::BlockFile;

/// An open raw image.
pub(crate) struct Raw {
    file: BlockFile,
    size: Cell<u64>,
}

impl Raw {
    pub(crate) fn open(mut file: BlockFile) -> Result<Self, Error> {
        file.fix_size()?;
        Ok(Self {
            size: Cell::new(file.end()),
            file,
        })
    }

    pub(crate) fn file(&self) -> &BlockFile {
        &self.file
    }

    pub(crate) fn file_mut(&mut self) -> &mut BlockFile {
        &mut self.file
    }

    /// Size of the disk in bytes.
    pub(crate) fn size(&self) -> u64 {
        self.size.get()
    }

    pub(crate) async fn write(&self, offset: u64, data: Span<'_>) -> Result<(), IoError> {
        let write = self.file.write(offset, data).await;
        write.map_err(|e| IoError::host("write guest data", offset, &e))
    }

    pub(crate) async fn flush(&self) -> Result<(), IoError> {
        self.file
            .sync()
            .await
            .map_err(|e| IoError::host("make writes durable", 0, &e))
    }

    /// Gives the space of a range back; where the host cannot, it stays as it is.
    pub(crate) async fn discard(&self, offset: u64, length: u64) -> Result<(), IoError> {
        let punch = self.file.punch(offset, length).await;
        punch
            .map(|_| ())
            .map_err(|e| IoError::host("punch a hole", offset, &e))
    }

    pub(crate) async fn zero(&self, offset: u64, length: u64, unmap: bool) -> Result<(), IoError> {
        let zero = self.file.zero(offset, length, unmap).await;
        zero.map_err(|e| IoError::host("write zeros", offset, &e))
    }

    pub(crate) fn resize(&self, size: u64) -> std::io::Result<()> {
        self.file.set_end(size)?;
        self.size.set(size);
        Ok(())
    }
}
