//! The serial console on the control thread: moves batches of bytes between the port and its back end.
//!
//! A back end's descriptors come and go (clients of a socket). They live in an epoll set of their own, [`ConsoleWatch`], which the
//! event loop watches as one descriptor that never changes.

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;

use drover_devices::platform::serial::{SerialOutput, SerialPort};
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};

/// The serial port and where its bytes go.
pub struct Console {
    port: Arc<SerialPort>,
    output: Box<dyn SerialOutput>,
    /// Reused for every batch.
    batch: Vec<u8>,
    /// Input waits for room in the port, so the back end does not report it: its descriptor would stay readable.
    held: bool,
}

impl Console {
    /// Connects `port` to `output`.
    pub fn new(port: Arc<SerialPort>, output: Box<dyn SerialOutput>) -> Self {
        Self {
            port,
            output,
            batch: Vec::new(),
            held: false,
        }
    }

    /// Bytes that a slow reader or a slow control thread cost so far.
    pub fn dropped(&self) -> u64 {
        self.port.dropped().saturating_add(self.output.dropped())
    }

    /// Hands all waiting output to the back end.
    pub fn drain(&mut self) {
        self.batch.clear();
        self.port.take_output(&mut self.batch);
        if !self.batch.is_empty() {
            self.output.write(&self.batch);
        }
    }

    /// A guest that takes no input still has clients that come, go and read.
    fn hold(&mut self, held: bool) {
        self.held = held;
        self.output.hold_input(held);
    }

    fn input(&mut self, descriptor: RawFd) {
        let room = self.port.input_room();
        self.hold(room == 0);
        self.batch.clear();
        self.output.ready(descriptor, room, &mut self.batch);
        self.port.push_input(&self.batch);
    }
}

/// What an event of the set is about.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Output,
    Room,
    BackEnd,
}

/// The epoll set of the console that there is at present.
pub struct ConsoleWatch {
    epoll: Epoll,
    watched: Vec<RawFd>,
}

impl ConsoleWatch {
    /// An empty set.
    ///
    /// # Errors
    /// No more descriptors.
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            epoll: Epoll::new()?,
            watched: Vec::new(),
        })
    }

    /// Watches what `console` has now, and nothing else. Call whenever there is another console.
    pub fn follow(&mut self, console: Option<&Console>) {
        let wanted: Vec<(RawFd, Kind)> = console.map_or_else(Vec::new, |console| {
            let back_end = console.output.descriptors().into_iter();
            [
                (console.port.output_descriptor(), Kind::Output),
                (console.port.room_descriptor(), Kind::Room),
            ]
            .into_iter()
            .chain(back_end.map(|fd| (fd, Kind::BackEnd)))
            .collect()
        });
        for fd in std::mem::take(&mut self.watched) {
            if !wanted.iter().any(|(wanted, _)| *wanted == fd) {
                // Fails for a descriptor that was closed, which the kernel took out already.
                let _ = self
                    .epoll
                    .ctl(ControlOperation::Delete, fd, EpollEvent::default());
            }
        }
        for (fd, kind) in wanted {
            let event = EpollEvent::new(EventSet::IN, (kind as u64) << 32 | u64::from(fd as u32));
            match self.epoll.ctl(ControlOperation::Add, fd, event) {
                Ok(()) => self.watched.push(fd),
                // Watched before, and the same descriptor still: a closed one's number may have come back as another file.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => self.watched.push(fd),
                // Regular files (standard input from a file) cannot be waited for.
                Err(error) if error.raw_os_error() == Some(libc::EPERM) => {}
                Err(error) => tracing::error!(%error, "the serial console cannot be watched"),
            }
        }
    }

    /// Handles what is ready.
    pub fn process(&mut self, console: &mut Console) {
        let mut ready = [EpollEvent::default(); 4];
        let count = self.epoll.wait(0, &mut ready).unwrap_or(0);
        let mut changed = false;
        for event in &ready[..count] {
            let fd = event.data() as u32 as RawFd;
            match event.data() >> 32 {
                kind if kind == Kind::Output as u64 => console.drain(),
                kind if kind == Kind::Room as u64 => {
                    console.port.acknowledge_room();
                    changed |= console.held;
                    console.hold(false);
                }
                _ => {
                    console.input(fd);
                    changed = true;
                }
            }
        }
        if changed {
            self.follow(Some(console));
        }
    }
}

impl AsRawFd for ConsoleWatch {
    fn as_raw_fd(&self) -> RawFd {
        self.epoll.as_raw_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    use drover_devices::bus::BusDevice;
    use vmm_sys_util::eventfd::EventFd;

    use super::*;

    /// A back end over one stream, as the trait prescribes.
    struct Stream(Option<UnixStream>, bool);

    impl SerialOutput for Stream {
        fn write(&mut self, bytes: &[u8]) {
            if let Some(stream) = &mut self.0 {
                stream.write_all(bytes).unwrap();
            }
        }

        fn descriptors(&self) -> Vec<RawFd> {
            self.0
                .iter()
                .filter(|_| !self.1)
                .map(AsRawFd::as_raw_fd)
                .collect()
        }

        fn hold_input(&mut self, held: bool) {
            self.1 = held;
        }

        fn ready(&mut self, _descriptor: RawFd, room: usize, input: &mut Vec<u8>) {
            if self.1 {
                return;
            }
            let mut bytes = vec![0; room];
            match self.0.as_mut().map(|stream| stream.read(&mut bytes)) {
                Some(Ok(0)) => self.0 = None,
                Some(Ok(n)) => input.extend_from_slice(&bytes[..n]),
                _ => {}
            }
        }
    }

    fn console() -> (Console, ConsoleWatch, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let port = Arc::new(SerialPort::new(EventFd::new(libc::EFD_NONBLOCK).unwrap()).unwrap());
        let console = Console::new(port, Box::new(Stream(Some(ours), false)));
        let mut watch = ConsoleWatch::new().unwrap();
        watch.follow(Some(&console));
        (console, watch, theirs)
    }

    fn ready(watch: &ConsoleWatch) -> bool {
        let outer = Epoll::new().unwrap();
        let event = EpollEvent::new(EventSet::IN, 0);
        outer
            .ctl(ControlOperation::Add, watch.as_raw_fd(), event)
            .unwrap();
        outer.wait(200, &mut [EpollEvent::default()]).unwrap() == 1
    }

    #[test]
    fn a_guests_bytes_reach_the_back_end_in_one_batch() {
        let (mut console, mut watch, mut client) = console();
        for byte in b"login: " {
            console.port.write(0, &[*byte]);
        }
        assert!(ready(&watch));
        watch.process(&mut console);
        let mut seen = [0; 7];
        client.read_exact(&mut seen).unwrap();
        assert_eq!(&seen, b"login: ");
    }

    #[test]
    fn input_beyond_the_ports_room_waits_without_spinning_and_arrives_in_order() {
        let (mut console, mut watch, mut client) = console();
        let sent: Vec<u8> = (0..200).collect();
        client.write_all(&sent).unwrap();
        let mut seen = Vec::new();
        while seen.len() < sent.len() {
            while ready(&watch) {
                watch.process(&mut console);
                assert!(watch.watched.len() <= 3);
            }
            assert!(console.held, "a full port is not polled for more");
            let room = seen.len();
            while console.port.input_room() < 64 && seen.len() < sent.len() {
                let mut byte = [0];
                console.port.read(0, &mut byte);
                seen.push(byte[0]);
            }
            assert!(seen.len() > room, "the guest found input");
            if sent.len() - seen.len() < 64 {
                while ready(&watch) {
                    watch.process(&mut console);
                }
                while seen.len() < sent.len() {
                    let mut byte = [0];
                    console.port.read(0, &mut byte);
                    seen.push(byte[0]);
                }
            }
        }
        assert_eq!(seen, sent);
    }

    #[test]
    fn a_client_that_went_away_is_not_watched_any_more() {
        let (mut console, mut watch, client) = console();
        drop(client);
        assert!(ready(&watch));
        watch.process(&mut console);
        assert_eq!(watch.watched.len(), 2);
        assert!(!ready(&watch));
        watch.follow(None);
        assert!(watch.watched.is_empty());
    }
}
