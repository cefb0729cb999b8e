//! Back ends of the serial port that need nothing but a file.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::RawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use drover_devices::platform::serial::SerialOutput;

/// Appends to a file, or drops everything.
pub(super) struct FileOutput(Option<File>, u64);

impl FileOutput {
    pub(super) fn none() -> Self {
        Self(None, 0)
    }

    pub(super) fn append(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().append(true).create(true).mode(0o600).open(path)?;
        Ok(Self(Some(file), 0))
    }
}

impl SerialOutput for FileOutput {
    fn write(&mut self, bytes: &[u8]) {
        if let Some(file) = &mut self.0
            && file.write_all(bytes).is_err()
        {
            self.1 = self.1.saturating_add(bytes.len() as u64);
        }
    }

    fn descriptors(&self) -> Vec<RawFd> {
        Vec::new()
    }

    fn ready(&mut self, _descriptor: RawFd, _room: usize, _input: &mut Vec<u8>) {}

    fn dropped(&self) -> u64 {
        self.1
    }
}
