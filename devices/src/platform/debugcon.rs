//! The debug console of firmware builds at port 0x402: what is written there goes to a file.
//!
//! A guest can write as fast as it likes; past [`MOST`] bytes the rest is counted and dropped, so that a log never fills a disk.

use std::fs::File;
use std::io::Write;
use std::sync::Mutex;

use super::lock;
use crate::bus::BusDevice;

/// What the port reads as: there is a console.
const PRESENT: u8 = 0xe9;
/// Bytes kept at most.
const MOST: u64 = 4 << 20;
/// Bytes gathered before they are written.
const LINE: usize = 512;

struct Log {
    file: File,
    line: Vec<u8>,
    written: u64,
}

/// The console.
pub struct DebugConsole {
    log: Mutex<Log>,
}

impl DebugConsole {
    /// Its port; one byte.
    pub const PORT: u16 = drover_arch::layout::ports::DEBUGCON;

    /// A console whose output goes to `file`.
    #[must_use]
    pub fn new(file: File) -> Self {
        Self {
            log: Mutex::new(Log {
                file,
                line: Vec::with_capacity(LINE),
                written: 0,
            }),
        }
    }
}

impl Log {
    fn push(&mut self, byte: u8) {
        self.line.push(byte);
        if byte == b'\n' || self.line.len() >= LINE {
            self.flush();
        }
    }

    fn flush(&mut self) {
        let bytes = self.line.len() as u64;
        if self.written + bytes <= MOST {
            // A log that cannot be written is no reason to hold up a boot.
            let _ = self.file.write_all(&self.line);
        }
        self.written = self.written.saturating_add(bytes);
        self.line.clear();
    }
}

impl Drop for Log {
    fn drop(&mut self) {
        self.flush();
    }
}

impl BusDevice for DebugConsole {
    fn read(&self, _offset: u64, data: &mut [u8]) {
        data.fill(PRESENT);
    }

    fn write(&self, _offset: u64, data: &[u8]) {
        let mut log = lock(&self.log);
        for byte in data {
            log.push(*byte);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Seek};

    use super::*;

    #[test]
    fn firmware_finds_it_and_its_lines_are_in_the_file() {
        let mut file = tempfile::tempfile().unwrap();
        let console = DebugConsole::new(file.try_clone().unwrap());
        let mut byte = [0];
        console.read(0, &mut byte);
        assert_eq!(byte, [0xe9]);
        console.write(0, b"SecCore");
        console.write(0, b"Startup\nPei");
        drop(console);
        file.rewind().unwrap();
        let mut seen = String::new();
        file.read_to_string(&mut seen).unwrap();
        assert_eq!(seen, "SecCoreStartup\nPei");
    }

    #[test]
    fn a_flood_does_not_fill_the_disk() {
        let file = tempfile::tempfile().unwrap();
        let console = DebugConsole::new(file.try_clone().unwrap());
        let block = [b'x'; 4096];
        for _ in 0..2 * MOST / 4096 {
            console.write(0, &block);
        }
        drop(console);
        assert!(file.metadata().unwrap().len() <= MOST);
    }
}
