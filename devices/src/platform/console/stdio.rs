//! The process's standard input and output. Putting a terminal into raw mode, and back, is up to whoever starts the VM.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

use rustix::fs::{FileType, Mode, OFlags};

use super::BACKLOG;
use super::channel::{Channel, Hangup, Peer};
use crate::platform::serial::SerialOutput;

/// Standard input and output.
pub struct StdioConsole {
    channel: Channel,
}

impl StdioConsole {
    /// # Errors
    /// No more descriptors, or standard input or output is closed.
    pub fn new() -> io::Result<Self> {
        Self::over(io::stdin().as_fd(), io::stdout().as_fd())
    }

    fn over(input: BorrowedFd<'_>, output: BorrowedFd<'_>) -> io::Result<Self> {
        let mut channel = Channel::new(BACKLOG)?;
        let input = input.try_clone_to_owned()?;
        let output = non_blocking(output)?;
        let hangup = Hangup::EndsInput;
        channel.attach(
            Peer {
                input: Some(input),
                output,
                hangup,
            },
            0,
        )?;
        Ok(Self { channel })
    }
}

/// A descriptor of the same file that never makes a writer wait. `O_NONBLOCK` belongs to the open file, which other processes share
/// (a shell, a pager): they must not find it changed, so the file is opened anew where that is possible.
fn non_blocking(output: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let kind = FileType::from_raw_mode(rustix::fs::fstat(output)?.st_mode);
    if matches!(kind, FileType::Fifo | FileType::CharacterDevice) {
        let path = format!("/proc/self/fd/{}", output.as_raw_fd());
        let flags = OFlags::WRONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        if let Ok(reopened) = rustix::fs::open(path, flags, Mode::empty()) {
            return Ok(reopened);
        }
        tracing::warn!(
            "standard output cannot be opened without blocking: a stopped terminal stops the console"
        );
    }
    output.try_clone_to_owned()
}

impl SerialOutput for StdioConsole {
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
    use std::io::{Read, Write, pipe};

    use super::*;

    #[test]
    fn input_ends_and_output_goes_on() {
        let (stdin, mut typing) = pipe().unwrap();
        let (mut screen, stdout) = pipe().unwrap();
        let mut console = StdioConsole::over(stdin.as_fd(), stdout.as_fd()).unwrap();
        drop(stdin);
        typing.write_all(b"ls\n").unwrap();
        drop(typing);
        let mut input = Vec::new();
        console.hold_input(true);
        console.ready(0, 0, &mut input);
        console.hold_input(false);
        for _ in 0..3 {
            console.ready(0, 2, &mut input);
        }
        assert_eq!(input, b"ls\n");
        console.write(b"file\n");
        let mut seen = [0; 5];
        screen.read_exact(&mut seen).unwrap();
        assert_eq!(&seen, b"file\n");
    }

    #[test]
    fn a_stopped_reader_costs_the_oldest_output_and_never_blocks() {
        let (stdin, _typing) = pipe().unwrap();
        let (mut screen, stdout) = pipe().unwrap();
        let mut console = StdioConsole::over(stdin.as_fd(), stdout.as_fd()).unwrap();
        let sent: Vec<u8> = (0..400_000_u32).flat_map(u32::to_le_bytes).collect();
        for batch in sent.chunks(10_000) {
            console.write(batch);
        }
        drop(stdout);
        let dropped = usize::try_from(console.dropped()).unwrap();
        assert!(dropped > 0);
        let mut seen = Vec::new();
        while seen.len() + dropped < sent.len() {
            let mut piece = [0; 4096];
            let count = screen.read(&mut piece).unwrap();
            seen.extend_from_slice(&piece[..count]);
            console.ready(0, 64, &mut Vec::new());
        }
        assert_eq!(
            seen.len() + dropped,
            sent.len(),
            "everything is either seen or counted"
        );
        let tail = &sent[sent.len() - BACKLOG..];
        assert!(seen.ends_with(tail), "the newest output survives");
    }

    #[test]
    fn the_shared_output_stays_as_it_was() {
        let (stdin, _typing) = pipe().unwrap();
        let (_screen, stdout) = pipe().unwrap();
        let _console = StdioConsole::over(stdin.as_fd(), stdout.as_fd()).unwrap();
        let flags = rustix::fs::fcntl_getfl(&stdout).unwrap();
        assert!(!flags.contains(OFlags::NONBLOCK));
    }
}
