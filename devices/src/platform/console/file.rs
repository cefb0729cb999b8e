//! Back ends without a reader.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::RawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use crate::platform::serial::SerialOutput;

/// Drops all output.
#[derive(Debug)]
pub struct Nowhere;

impl SerialOutput for Nowhere {
    fn write(&mut self, _bytes: &[u8]) {}

    fn descriptors(&self) -> Vec<RawFd> {
        Vec::new()
    }

    fn ready(&mut self, _descriptor: RawFd, _room: usize, _input: &mut Vec<u8>) {}
}

/// Appends output to a file.
#[derive(Debug)]
pub struct FileConsole {
    file: File,
    dropped: u64,
}

impl FileConsole {
    /// Opens `path` for appending; makes it with mode 0600 where it does not exist.
    ///
    /// # Errors
    /// The file could not be opened.
    pub fn open(path: &Path) -> io::Result<Self> {
        let mut options = OpenOptions::new();
        let file = options.append(true).create(true).mode(0o600).open(path)?;
        Ok(Self { file, dropped: 0 })
    }
}

impl SerialOutput for FileConsole {
    fn write(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            match self.file.write(bytes) {
                Ok(count @ 1..) => bytes = &bytes[count..],
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Ok(0) | Err(_) => {
                    // A full disk stops nobody: the next batch tries again.
                    self.dropped += bytes.len() as u64;
                    return;
                }
            }
        }
    }

    fn descriptors(&self) -> Vec<RawFd> {
        Vec::new()
    }

    fn ready(&mut self, _descriptor: RawFd, _room: usize, _input: &mut Vec<u8>) {}

    fn dropped(&self) -> u64 {
        self.dropped
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn output_is_appended_to_a_file_for_its_owner_only() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("console.log");
        FileConsole::open(&path).unwrap().write(b"first\n");
        FileConsole::open(&path).unwrap().write(b"second\n");
        assert_eq!(std::fs::read(&path).unwrap(), b"first\nsecond\n");
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
    }

    #[test]
    fn what_a_full_disk_refuses_is_counted() {
        let mut full = FileConsole::open(Path::new("/dev/full")).unwrap();
        full.write(b"lost");
        full.write(b"too");
        assert_eq!(full.dropped(), 7);
    }
}
