//! How a program on the host asks for a port of the guest: it connects to the VM's socket and says `CONNECT 1234\n`.
//!
//! The answer is `OK 1073741824\n` with the port that stands for it in the guest's eyes, once the guest has accepted; a refusal is the
//! end of the stream. The words are those of the other monitors with a vsock in user space, so that their clients work here.

use std::io::{self, Read};
use std::os::unix::net::UnixStream;
use std::time::Instant;

use super::connection::PATIENCE;

/// The longest request, with its newline.
const MOST: usize = 32;

/// A stream whose request has not been read to its end.
pub(super) struct Handshake {
    stream: UnixStream,
    line: Vec<u8>,
    pub(super) deadline: Instant,
}

/// What a handshake has come to.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Said {
    /// There is more to come.
    Partly,
    /// It wants this port.
    Port(u32),
    /// Nothing that can be understood, or its end.
    Nonsense,
}

impl Handshake {
    pub(super) fn new(stream: UnixStream) -> Self {
        Self {
            stream,
            line: Vec::new(),
            deadline: Instant::now() + PATIENCE,
        }
    }

    pub(super) fn stream(&self) -> &UnixStream {
        &self.stream
    }

    pub(super) fn into_stream(self) -> UnixStream {
        self.stream
    }

    /// Reads on. A byte at a time, so that nothing is taken that belongs to the connection.
    pub(super) fn read(&mut self) -> Said {
        loop {
            let mut byte = [0];
            match self.stream.read(&mut byte) {
                Ok(0) => return Said::Nonsense,
                Ok(_) if byte == *b"\n" => {
                    return parse(&self.line).map_or(Said::Nonsense, Said::Port);
                }
                Ok(_) => {
                    self.line.extend(byte);
                    if self.line.len() >= MOST {
                        return Said::Nonsense;
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Said::Partly,
                Err(_) => return Said::Nonsense,
            }
        }
    }
}

fn parse(line: &[u8]) -> Option<u32> {
    let line = std::str::from_utf8(line).ok()?;
    let (word, port) = line.trim_end_matches('\r').split_once(' ')?;
    if !word.eq_ignore_ascii_case("connect") || !port.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    port.parse().ok()
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn requests_are_read_to_their_newline_and_no_further() {
        let (mut client, server) = UnixStream::pair().unwrap();
        server.set_nonblocking(true).unwrap();
        let mut handshake = Handshake::new(server);
        client.write_all(b"CONN").unwrap();
        assert_eq!(handshake.read(), Said::Partly);
        client.write_all(b"ECT 1024\nhello").unwrap();
        assert_eq!(handshake.read(), Said::Port(1024));
        let mut rest = [0; 5];
        handshake.into_stream().read_exact(&mut rest).unwrap();
        assert_eq!(&rest, b"hello");
    }

    #[test]
    fn nonsense_is_told_apart() {
        for line in [
            "",
            "CONNECT",
            "CONNECT ",
            "CONNECT -1",
            "CONNECT 4294967296",
            "GET / HTTP/1.1",
            "\u{e4} 1",
        ] {
            assert_eq!(parse(line.as_bytes()), None, "{line:?}");
        }
        assert_eq!(parse(b"connect 7\r"), Some(7));
        let (mut client, server) = UnixStream::pair().unwrap();
        client.write_all(&[b'x'; MOST]).unwrap();
        assert_eq!(Handshake::new(server).read(), Said::Nonsense);
        let (client, server) = UnixStream::pair().unwrap();
        drop(client);
        assert_eq!(Handshake::new(server).read(), Said::Nonsense);
    }
}
