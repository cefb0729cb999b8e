//! A unix socket that serves one client at a time. Whoever comes next is first sent what is kept of the past.

use std::io;
use std::os::fd::{OwnedFd, RawFd};
use std::os::unix::net::UnixListener;

use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with};

use super::BACKLOG;
use super::channel::{Channel, Hangup, Peer};
use crate::platform::serial::SerialOutput;

/// What a second client is told before it is turned away.
const IN_USE: &[u8] = b"the console is in use by another client\r\n";

/// A listening socket and its client. `K` is whatever removes the socket's file when it is dropped.
pub struct SocketConsole<K> {
    channel: Channel,
    listener: OwnedFd,
    scrollback: usize,
    _keeper: K,
}

impl<K> SocketConsole<K> {
    /// Serves `listener`; each client is first sent the last `scrollback` bytes.
    ///
    /// # Errors
    /// No more descriptors.
    pub fn new(listener: UnixListener, scrollback: usize, keeper: K) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        let listener = OwnedFd::from(listener);
        // What a client was too slow for waits in the same place, so there is some even without scrollback.
        let channel = Channel::new(scrollback.max(BACKLOG))?;
        channel.watch_arrivals(&listener)?;
        Ok(Self {
            channel,
            listener,
            scrollback,
            _keeper: keeper,
        })
    }

    fn accept(&mut self) {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let client = match accept_with(&self.listener, flags) {
            Ok(client) => client,
            // It changed its mind.
            Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => return,
            Err(error) => return tracing::warn!(%error, "cannot accept a console client"),
        };
        if self.channel.has_peer() {
            // Fits an empty socket's buffer; a client that is gone needs no answer.
            let _ = rustix::io::write(&client, IN_USE);
            return;
        }
        let attached = client.try_clone().and_then(|input| {
            let peer = Peer {
                input: Some(input),
                output: client,
                hangup: Hangup::Leaves,
            };
            self.channel.attach(peer, self.scrollback)
        });
        if let Err(error) = attached {
            tracing::warn!(%error, "cannot serve a console client");
        }
    }
}

impl<K: Send> SerialOutput for SocketConsole<K> {
    fn write(&mut self, bytes: &[u8]) {
        self.channel.write(bytes);
    }

    fn descriptors(&self) -> Vec<RawFd> {
        vec![self.channel.descriptor()]
    }

    fn ready(&mut self, _descriptor: RawFd, room: usize, input: &mut Vec<u8>) {
        // After what the present client did: if it has left, the next one is welcome at once.
        if self.channel.ready(room, input) {
            self.accept();
        }
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
    use std::io::{Read, Write};
    use std::net::Shutdown;
    use std::os::unix::net::UnixStream;
    use std::path::PathBuf;
    use std::time::Duration;

    use super::*;

    struct Fixture {
        console: SocketConsole<()>,
        path: PathBuf,
        _folder: tempfile::TempDir,
    }

    impl Fixture {
        fn new(scrollback: usize) -> Self {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("console.sock");
            let listener = UnixListener::bind(&path).unwrap();
            let console = SocketConsole::new(listener, scrollback, ()).unwrap();
            Self {
                console,
                path,
                _folder: folder,
            }
        }

        fn connect(&mut self) -> UnixStream {
            let client = UnixStream::connect(&self.path).unwrap();
            client
                .set_read_timeout(Some(Duration::from_secs(5)))
                .unwrap();
            self.turn();
            client
        }

        /// One turn of the control loop.
        fn turn(&mut self) -> Vec<u8> {
            let mut input = Vec::new();
            let descriptor = self.console.descriptors()[0];
            self.console.ready(descriptor, 64, &mut input);
            input
        }
    }

    fn seen(client: &mut UnixStream, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        client.read_exact(&mut bytes).unwrap();
        bytes
    }

    fn rest(client: &mut UnixStream) -> Vec<u8> {
        let mut bytes = Vec::new();
        client.read_to_end(&mut bytes).unwrap();
        bytes
    }

    #[test]
    fn a_new_client_first_gets_the_scrollback_and_then_what_comes() {
        let mut fixture = Fixture::new(8);
        fixture.console.write(b"booting...");
        let mut client = fixture.connect();
        fixture.console.write(b"login: ");
        assert_eq!(seen(&mut client, 15), b"oting...login: ");
        client.write_all(b"root\r").unwrap();
        assert_eq!(fixture.turn(), b"root\r");
        drop(client);
        fixture.turn();
        let mut client = fixture.connect();
        assert_eq!(seen(&mut client, 8), b".login: ");
        assert_eq!(fixture.console.dropped(), 0);
    }

    #[test]
    fn a_second_client_is_turned_away_with_the_reason() {
        let mut fixture = Fixture::new(64);
        let mut first = fixture.connect();
        let mut second = fixture.connect();
        assert_eq!(rest(&mut second), IN_USE);
        fixture.console.write(b"still here");
        assert_eq!(seen(&mut first, 10), b"still here");
    }

    #[test]
    fn a_slow_client_never_blocks_and_what_it_missed_is_counted() {
        let mut fixture = Fixture::new(1000);
        let mut client = fixture.connect();
        let sent: Vec<u8> = (0..400_000_u32).flat_map(u32::to_le_bytes).collect();
        for batch in sent.chunks(100_000) {
            fixture.console.write(batch);
        }
        let dropped = usize::try_from(fixture.console.dropped()).unwrap();
        assert!(dropped > 0);
        let mut received = Vec::new();
        while received.len() + dropped < sent.len() {
            let mut piece = [0; 65_536];
            let count = client.read(&mut piece).unwrap();
            received.extend_from_slice(&piece[..count]);
            fixture.turn();
        }
        assert_eq!(received.len() + dropped, sent.len());
        assert!(received.ends_with(&sent[sent.len() - BACKLOG..]));
    }

    #[test]
    fn a_client_that_keeps_up_loses_nothing_of_a_large_batch() {
        let mut fixture = Fixture::new(0);
        let mut client = fixture.connect();
        let batch: Vec<u8> = (0..=255).cycle().take(150_000).collect();
        fixture.console.write(&batch);
        assert_eq!(seen(&mut client, batch.len()), batch);
        assert_eq!(fixture.console.dropped(), 0);
    }

    #[test]
    fn a_client_that_only_listens_stays() {
        let mut fixture = Fixture::new(64);
        let mut client = fixture.connect();
        client.shutdown(Shutdown::Write).unwrap();
        fixture.turn();
        fixture.turn();
        fixture.console.write(b"news");
        assert_eq!(seen(&mut client, 4), b"news");
        drop(client);
        fixture.turn();
        fixture.console.write(b"more");
        let mut client = fixture.connect();
        assert_eq!(seen(&mut client, 8), b"newsmore");
    }

    #[test]
    fn a_guest_that_takes_no_input_does_not_keep_clients_from_coming_and_going() {
        let mut fixture = Fixture::new(64);
        let mut client = fixture.connect();
        fixture.console.hold_input(true);
        client.write_all(b"anybody there?").unwrap();
        assert_eq!(fixture.turn(), b"");
        assert!(
            !readable(&fixture),
            "held input does not wake the control loop"
        );
        drop(client);
        assert!(readable(&fixture));
        fixture.turn();
        fixture.console.write(b"panic");
        let mut client = fixture.connect();
        assert_eq!(seen(&mut client, 5), b"panic");
        client.write_all(b"x").unwrap();
        fixture.console.hold_input(false);
        assert_eq!(fixture.turn(), b"x");
    }

    #[test]
    fn input_beyond_the_room_stays_for_later() {
        let mut fixture = Fixture::new(0);
        let mut client = fixture.connect();
        client.write_all(b"abcdef").unwrap();
        let mut input = Vec::new();
        fixture.console.ready(0, 2, &mut input);
        fixture.console.ready(0, 3, &mut input);
        fixture.console.ready(0, 64, &mut input);
        assert_eq!(input, b"abcdef");
    }

    fn readable(fixture: &Fixture) -> bool {
        use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
        let epoll = Epoll::new().unwrap();
        let descriptor = fixture.console.descriptors()[0];
        epoll
            .ctl(
                ControlOperation::Add,
                descriptor,
                EpollEvent::new(EventSet::IN, 0),
            )
            .unwrap();
        epoll.wait(0, &mut [EpollEvent::default()]).unwrap() == 1
    }
}
