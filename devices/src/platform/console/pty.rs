//! A new pseudo-terminal (pty(7)) in raw mode; any terminal program can open its other side, again and again.

use std::ffi::OsStr;
use std::io;
use std::os::fd::{OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{OptionalActions, tcgetattr, tcsetattr};

use super::BACKLOG;
use super::channel::{Channel, Hangup, Peer};
use crate::platform::serial::SerialOutput;

/// A pseudo-terminal.
pub struct PtyConsole {
    channel: Channel,
    path: PathBuf,
    /// Kept open, so that a terminal program that leaves does not hang up the line.
    _other_side: OwnedFd,
}

impl PtyConsole {
    /// Makes a pseudo-terminal.
    ///
    /// # Errors
    /// The system has none left, or refused.
    pub fn open() -> io::Result<Self> {
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let ours = openpt(flags)?;
        grantpt(&ours)?;
        unlockpt(&ours)?;
        let name = ptsname(&ours, Vec::new())?;
        let path = PathBuf::from(OsStr::from_bytes(name.as_bytes()));
        let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
        let other_side = rustix::fs::open(&path, flags, rustix::fs::Mode::empty())?;
        // Raw before the first byte: an echo would come back to the guest as typed.
        let mut attributes = tcgetattr(&other_side)?;
        attributes.make_raw();
        tcsetattr(&other_side, OptionalActions::Now, &attributes)?;
        rustix::io::ioctl_fionbio(&ours, true)?;
        let mut channel = Channel::new(BACKLOG)?;
        let peer = Peer {
            input: Some(ours.try_clone()?),
            output: ours,
            hangup: Hangup::EndsInput,
        };
        channel.attach(peer, 0)?;
        Ok(Self {
            channel,
            path,
            _other_side: other_side,
        })
    }

    /// What a terminal program opens (`/dev/pts/7`).
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl SerialOutput for PtyConsole {
    fn write(&mut self, bytes: &[u8]) {
        self.channel.write(bytes);
    }

    fn descriptors(&self) -> Vec<RawFd> {
        vec![self.channel.descriptor()]
    }

    fn ready(&mut self, _descriptor: RawFd, room: usize, input: &mut Vec<u8>) {
        self.channel.ready(room, input);
    }

    fn hold_input(&mut self, held: bool) {
        self.channel.hold_input(held);
    }

    fn dropped(&self) -> u64 {
        self.channel.dropped()
    }
}

#[cfg(test)]
mod tests {
    use std::fs::OpenOptions;
    use std::io::{Read, Write};
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn bytes_pass_unchanged_both_ways_for_one_terminal_after_another() {
        let mut console = PtyConsole::open().unwrap();
        for _ in 0..2 {
            let mut terminal = OpenOptions::new()
                .read(true)
                .write(true)
                .open(console.path())
                .unwrap();
            terminal.write_all(b"ls\r\x03\n").unwrap();
            // The kernel moves the bytes on a thread of its own.
            let mut input = typed(&mut console, 5);
            assert_eq!(input, b"ls\r\x03\n", "no line discipline, no signals");
            console.write(b"a\nb\r\n");
            let mut seen = [0; 5];
            terminal.read_exact(&mut seen).unwrap();
            assert_eq!(&seen, b"a\nb\r\n");
            console.ready(0, 64, &mut input);
            assert_eq!(input.len(), 5, "no echo");
        }
    }

    fn typed(console: &mut PtyConsole, length: usize) -> Vec<u8> {
        let deadline = Instant::now() + Duration::from_secs(5);
        let mut input = Vec::new();
        while input.len() < length && Instant::now() < deadline {
            console.ready(0, 64, &mut input);
        }
        input
    }

    #[test]
    fn without_a_terminal_output_is_bounded_and_counted() {
        let mut console = PtyConsole::open().unwrap();
        for _ in 0..100 {
            console.write(&[b'x'; 10_000]);
        }
        assert!(console.dropped() > 0);
    }
}
