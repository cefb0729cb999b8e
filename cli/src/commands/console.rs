//! `drover worker console`: this terminal becomes the guest's.
//!
//! Bytes go both ways unchanged, Ctrl-C included; only `Ctrl-]` stays here and ends it. The socket first sends what the guest wrote
//! while nobody looked.

use std::io::{self, IsTerminal, Read, Stdin, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::process::ExitCode;

use drover_worker::{Error, StateDir};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcsetattr};

use crate::failure::Failure;

/// `Ctrl-]`.
const ESCAPE: u8 = 0x1d;

/// Connects the terminal to the console of worker `name`.
pub(crate) fn run(state: &StateDir, name: &str) -> Result<ExitCode, Failure> {
    let dir = state.worker(name)?;
    dir.record(state)?;
    let socket = match UnixStream::connect(dir.console_socket()) {
        Ok(socket) => socket,
        Err(error)
            if matches!(
                error.kind(),
                io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused
            ) =>
        {
            return Err(Error::NotRunning(name.to_owned()).into());
        }
        Err(error) => {
            return Err(Failure::host(format!(
                "{}: cannot connect: {error}",
                dir.console_socket().display()
            )));
        }
    };
    let failed = |error: io::Error| Failure::host(format!("console: {error}"));
    let raw = RawMode::enter(io::stdin()).map_err(failed)?;
    if raw.is_some() {
        eprint!("connected to {name}; leave with Ctrl-]\r\n");
    }
    let end = relay(&socket);
    drop(raw);
    match end.map_err(failed)? {
        End::Left => eprintln!(),
        End::Closed => eprintln!("\n{name} has closed its console"),
    }
    Ok(ExitCode::SUCCESS)
}

/// How a session ended.
#[derive(Debug, PartialEq, Eq)]
enum End {
    /// The person left.
    Left,
    /// The VMM closed the socket: the guest is off, or another client came.
    Closed,
}

fn relay(mut socket: &UnixStream) -> io::Result<End> {
    let mut buffer = [0; 4096];
    let mut input_open = true;
    loop {
        let stdin = io::stdin();
        let mut fds = vec![PollFd::from_borrowed_fd(socket.as_fd(), PollFlags::IN)];
        if input_open {
            fds.push(PollFd::from_borrowed_fd(stdin.as_fd(), PollFlags::IN));
        }
        match poll(&mut fds, None) {
            Err(rustix::io::Errno::INTR) => continue,
            other => other?,
        };
        let ready = |index: usize| fds.get(index).is_some_and(|fd| !fd.revents().is_empty());
        let (output_ready, input_ready) = (ready(0), ready(1));
        if output_ready {
            match socket.read(&mut buffer) {
                Ok(0) => return Ok(End::Closed),
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => {
                    return Ok(End::Closed);
                }
                Err(error) => return Err(error),
                Ok(length) => {
                    let mut stdout = io::stdout().lock();
                    stdout.write_all(buffer.get(..length).unwrap_or_default())?;
                    stdout.flush()?;
                }
            }
        }
        if input_ready {
            // Read past std's buffer, which poll would not see.
            let length = rustix::io::read(&stdin, &mut buffer[..])?;
            let typed = buffer.get(..length).unwrap_or_default();
            let (typed, leave) = until_escape(typed);
            socket.write_all(typed)?;
            if leave {
                return Ok(End::Left);
            }
            // The end of a file or pipe ends the input, not the session.
            input_open = length > 0;
        }
    }
}

/// What is before the escape character, and whether there was one.
fn until_escape(typed: &[u8]) -> (&[u8], bool) {
    match typed.iter().position(|byte| *byte == ESCAPE) {
        Some(at) => (typed.get(..at).unwrap_or_default(), true),
        None => (typed, false),
    }
}

/// A terminal in raw mode, put back when dropped.
struct RawMode {
    terminal: Stdin,
    before: Termios,
}

impl RawMode {
    /// `None` if standard input is no terminal.
    fn enter(terminal: Stdin) -> io::Result<Option<Self>> {
        if !terminal.is_terminal() {
            return Ok(None);
        }
        let before = tcgetattr(&terminal)?;
        let mut raw = before.clone();
        raw.make_raw();
        tcsetattr(&terminal, OptionalActions::Now, &raw)?;
        Ok(Some(Self { terminal, before }))
    }
}

impl Drop for RawMode {
    fn drop(&mut self) {
        // A terminal that has gone away needs nothing put back.
        let _ = tcsetattr(&self.terminal, OptionalActions::Flush, &self.before);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_typed_before_the_escape_character_is_still_sent() {
        assert_eq!(until_escape(b"ls\n"), (&b"ls\n"[..], false));
        assert_eq!(until_escape(b"ls\x1drm"), (&b"ls"[..], true));
        assert_eq!(until_escape(b"\x03"), (&b"\x03"[..], false));
    }
}
