//! All queues and all connections on the device's one thread.
//!
//! ```text
//!  transmit queue ──> packet ──> connection ──> host socket
//!  receive queue  <── refusals, then the connections that have news, one packet each in turn
//! ```

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, HashSet, VecDeque};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::event::epoll;
use vm_memory::GuestMemoryMmap;
use zerocopy::{FromBytes, IntoBytes};

use super::bits::{
    EVENT, EVENT_TRANSPORT_RESET, HEADER_BYTES, HOST_CID, Header, RECEIVE, TRANSMIT, TYPE_STREAM,
    op,
};
use super::connection::{BUFFER_BYTES, Connection, Key, Outcome, refusal};
use super::handshake::{Handshake, Said};
use super::metrics::VsockMetrics;
use crate::virtio::memory::{
    GuestSlice, MAX_SLICES, NotRam, copy_from_guest, copy_to_guest, read_vectored, translate,
};
use crate::virtio::queue::{Chain, EndlessChain, GuestQueue, walk};
use crate::virtio::worker::{Progress, Scope, Service, Watch};

/// Packets in one turn of a queue.
const TURN: usize = 64;
/// Connections and handshakes at the same time.
pub(super) const MOST_CONNECTIONS: usize = 4096;
/// Refusals that wait for the guest to read; more are not told.
const MOST_REFUSALS: usize = 1024;
/// The most bytes of one packet.
const MOST_PACKET: usize = BUFFER_BYTES as usize;
/// The first port that stands for a program of the host which asked for a port of the guest.
const FIRST_HOST_PORT: u32 = 1 << 30;

/// Tokens of the wait point; those of connections are their ports. The port of all ones is nobody's.
const LISTENER: u64 = u64::MAX;
const BELL: u64 = u64::MAX - 1;
const FIRST_HANDSHAKE: u64 = 0xffff_ffff_0000_0000;
const NO_PORT: u32 = u32::MAX;

fn token(key: Key) -> u64 {
    u64::from(key.host_port) << 32 | u64::from(key.guest_port)
}

fn key(token: u64) -> Key {
    Key {
        host_port: (token >> 32) as u32,
        guest_port: token as u32,
    }
}

/// Why a chain cannot be served.
#[derive(Debug, thiserror::Error)]
enum BadChain {
    #[error(transparent)]
    Endless(#[from] EndlessChain),
    #[error("a buffer of a vsock queue points the wrong way")]
    Direction,
    #[error("a vsock packet without room for its header")]
    TooShort,
    #[error("a vsock packet of more than {MOST_PACKET} bytes")]
    TooLong,
    #[error(transparent)]
    NotRam(#[from] NotRam),
}

pub(super) struct Server {
    guest_cid: u64,
    path: PathBuf,
    listener: UnixListener,
    bell: Arc<OwnedFd>,
    epoll: OwnedFd,
    running: bool,
    queues: [Option<GuestQueue>; 3],
    connections: HashMap<Key, Connection>,
    handshakes: HashMap<u64, Handshake>,
    next_handshake: u32,
    next_host_port: u32,
    /// Connections that have something for the guest, each once, in turn.
    news: VecDeque<Key>,
    in_news: HashSet<Key>,
    refusals: VecDeque<Header>,
    deadlines: BinaryHeap<Reverse<(Instant, Key)>>,
    tell_reset: bool,
    slices: Vec<GuestSlice>,
    metrics: Arc<VsockMetrics>,
}

fn watch(epoll: &OwnedFd, file: impl AsFd, edges: bool, token: u64) -> io::Result<()> {
    let mut events = epoll::EventFlags::IN;
    if edges {
        events |= epoll::EventFlags::OUT | epoll::EventFlags::RDHUP | epoll::EventFlags::ET;
    }
    epoll::add(epoll, file, epoll::EventData::new_u64(token), events)?;
    Ok(())
}

impl Server {
    pub(super) fn new(
        guest_cid: u64,
        path: PathBuf,
        listener: UnixListener,
        bell: Arc<OwnedFd>,
        metrics: Arc<VsockMetrics>,
    ) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        watch(&epoll, &listener, false, LISTENER)?;
        watch(&epoll, &bell, false, BELL)?;
        Ok(Self {
            guest_cid,
            path,
            listener,
            bell,
            epoll,
            running: false,
            queues: [None, None, None],
            connections: HashMap::new(),
            handshakes: HashMap::new(),
            next_handshake: 0,
            next_host_port: FIRST_HOST_PORT,
            news: VecDeque::new(),
            in_news: HashSet::new(),
            refusals: VecDeque::new(),
            deadlines: BinaryHeap::new(),
            tell_reset: false,
            slices: Vec::new(),
            metrics,
        })
    }

    fn take(&mut self, index: u16) -> Option<GuestQueue> {
        self.queues.get_mut(usize::from(index))?.take()
    }

    fn put(&mut self, queue: GuestQueue) {
        if let Some(place) = self.queues.get_mut(usize::from(queue.index())) {
            *place = Some(queue);
        }
    }

    /// Serves a queue chain by chain: `each` says how many bytes it wrote to one, or that this one has to wait.
    fn serve(
        &mut self,
        index: u16,
        mut each: impl FnMut(
            &mut Self,
            &GuestMemoryMmap<()>,
            Chain<'_>,
        ) -> Result<Option<u32>, BadChain>,
    ) -> Progress {
        let Some(mut queue) = self.take(index) else {
            return Progress::Idle;
        };
        queue.silence();
        let memory = Arc::clone(queue.memory());
        let mut served = 0;
        let progress = loop {
            if served == TURN {
                break Progress::More;
            }
            let Some(chain) = queue.pop(&memory) else {
                if queue.listen() {
                    continue;
                }
                break Progress::Idle;
            };
            served += 1;
            let head = chain.head_index();
            match each(self, &memory, chain) {
                Ok(Some(bytes)) => queue.push(head, bytes),
                Ok(None) => {
                    queue.unpop();
                    break Progress::Idle;
                }
                Err(error) => {
                    queue.give_up(&error);
                    break Progress::Idle;
                }
            }
        };
        queue.signal();
        self.put(queue);
        progress
    }

    /// Sends the guest what there is for it, as far as it has buffers.
    fn receive(&mut self) -> Progress {
        if self.refusals.is_empty() && self.news.is_empty() {
            return Progress::Idle;
        }
        self.serve(RECEIVE, |server, memory, chain| {
            if server.refusals.is_empty() && server.news.is_empty() {
                return Ok(None);
            }
            writable(memory, chain, &mut server.slices)?;
            Ok(server.next_packet(memory))
        })
    }

    /// Fills the present slices with a packet; its bytes, if there was anything to say.
    fn next_packet(&mut self, memory: &GuestMemoryMmap<()>) -> Option<u32> {
        if let Some(header) = self.refusals.pop_front() {
            return Some(copy_to_guest(memory, header.as_bytes(), &self.slices) as u32);
        }
        while let Some(key) = self.news.pop_front() {
            self.in_news.remove(&key);
            let Some(connection) = self.connections.get_mut(&key) else {
                continue;
            };
            if let Some((header, outcome)) = connection.notice(self.guest_cid) {
                let deadline = connection.deadline();
                match outcome {
                    Outcome::Over => self.forget(key),
                    Outcome::Goes => {
                        self.deadlines.extend(deadline.map(|at| Reverse((at, key))));
                        self.has_news(key);
                    }
                }
                return Some(copy_to_guest(memory, header.as_bytes(), &self.slices) as u32);
            }
            if !connection.can_send() {
                continue;
            }
            let most = (connection.credit() as usize).min(MOST_PACKET);
            let mut payload = between(&self.slices, HEADER_BYTES, most);
            payload.truncate(MAX_SLICES);
            if payload.is_empty() {
                // A buffer for a header alone: the bytes have to wait for a larger one.
                self.has_news(key);
                return Some(0);
            }
            let result = read_vectored(connection.stream.as_fd(), memory, &mut payload, &mut []);
            connection.was_read(&result);
            let bytes = result.unwrap_or(0);
            let mut header = connection.header(self.guest_cid, op::RW);
            self.has_news(key);
            if bytes > 0 {
                header.len = (bytes as u32).into();
                let told = copy_to_guest(memory, header.as_bytes(), &self.slices);
                debug_assert!(told >= HEADER_BYTES);
                let received = &self.metrics.received_bytes;
                received.fetch_add(bytes as u64, Ordering::Relaxed);
                return Some((HEADER_BYTES + bytes) as u32);
            }
        }
        None
    }

    /// Puts a connection in the row of those that have something for the guest, if it has.
    fn has_news(&mut self, key: Key) {
        let news = self.connections.get(&key).is_some_and(Connection::has_news);
        if news && self.in_news.insert(key) {
            self.news.push_back(key);
        }
    }

    fn forget(&mut self, key: Key) {
        // Closing the socket takes it off the wait point.
        if self.connections.remove(&key).is_some() {
            self.count();
        }
    }

    fn count(&self) {
        let count = self.connections.len() as u64;
        self.metrics.connections.store(count, Ordering::Relaxed);
    }

    fn transmit(&mut self) -> Progress {
        let progress = self.serve(TRANSMIT, |server, memory, chain| {
            readable(memory, chain, &mut server.slices)?;
            let mut packet = Vec::new();
            copy_from_guest(memory, &server.slices, &mut packet);
            let Ok((header, rest)) = Header::read_from_prefix(&packet) else {
                return Err(BadChain::TooShort);
            };
            let bytes = rest.get(..header.len.get() as usize);
            server.hear(&header, bytes.ok_or(BadChain::TooShort)?);
            Ok(Some(0))
        });
        self.receive();
        progress
    }

    fn hear(&mut self, header: &Header, bytes: &[u8]) {
        let key = Key {
            host_port: header.dst_port.get(),
            guest_port: header.src_port.get(),
        };
        if header.src_cid.get() != self.guest_cid
            || header.dst_cid.get() != HOST_CID
            || header.kind.get() != TYPE_STREAM
        {
            return self.refuse(header);
        }
        if let Some(connection) = self.connections.get_mut(&key) {
            if header.op.get() == op::REQUEST {
                return self.refuse(header);
            }
            let sent = &self.metrics.sent_bytes;
            sent.fetch_add(bytes.len() as u64, Ordering::Relaxed);
            match connection.hear(header, bytes) {
                Outcome::Goes => self.has_news(key),
                Outcome::Over => self.forget(key),
            }
            return;
        }
        match header.op.get() {
            op::REQUEST => self.connect(key, header),
            _ => self.refuse(header),
        }
    }

    fn refuse(&mut self, header: &Header) {
        if header.op.get() != op::RST && self.refusals.len() < MOST_REFUSALS {
            self.metrics.refused.fetch_add(1, Ordering::Relaxed);
            self.refusals.push_back(refusal(header));
        }
    }

    /// The guest asks for a port of the host: the socket `PATH_PORT`.
    fn connect(&mut self, key: Key, request: &Header) {
        let mut path = self.path.clone().into_os_string();
        path.push(format!("_{}", key.host_port));
        let full = self.connections.len() + self.handshakes.len() >= MOST_CONNECTIONS;
        if full || key.host_port == NO_PORT {
            return self.refuse(request);
        }
        let stream = UnixStream::connect(path).and_then(|stream| {
            stream.set_nonblocking(true)?;
            watch(&self.epoll, &stream, true, token(key))?;
            Ok(stream)
        });
        match stream {
            Ok(stream) => {
                let connection = Connection::from_guest(key, stream, request);
                self.add(connection);
            }
            Err(_) => self.refuse(request),
        }
    }

    fn add(&mut self, connection: Connection) {
        let key = connection.key;
        self.deadlines
            .extend(connection.deadline().map(|at| Reverse((at, key))));
        self.connections.insert(key, connection);
        self.metrics.opened.fetch_add(1, Ordering::Relaxed);
        self.count();
        self.has_news(key);
    }

    fn accept(&mut self) {
        while let Ok((stream, _)) = self.listener.accept() {
            let full = self.connections.len() + self.handshakes.len() >= MOST_CONNECTIONS;
            if full || !self.running {
                // The client reads the end at once, which is how it learns that nobody is there.
                continue;
            }
            let token = FIRST_HANDSHAKE | u64::from(self.next_handshake);
            self.next_handshake = self.next_handshake.wrapping_add(1) % (NO_PORT - 1);
            let watched = stream
                .set_nonblocking(true)
                .and_then(|()| watch(&self.epoll, &stream, true, token));
            if watched.is_ok() {
                self.handshakes.insert(token, Handshake::new(stream));
                self.shake(token);
            }
        }
    }

    fn shake(&mut self, token: u64) {
        let Some(handshake) = self.handshakes.get_mut(&token) else {
            return;
        };
        match handshake.read() {
            Said::Partly => {}
            Said::Nonsense => drop(self.handshakes.remove(&token)),
            Said::Port(port) => {
                let Some(handshake) = self.handshakes.remove(&token) else {
                    return;
                };
                self.ask(port, handshake);
            }
        }
    }

    /// A program of the host asks for a port of the guest.
    fn ask(&mut self, guest_port: u32, handshake: Handshake) {
        let key = loop {
            let key = Key {
                host_port: self.next_host_port,
                guest_port,
            };
            self.next_host_port = match self.next_host_port + 1 {
                NO_PORT => FIRST_HOST_PORT,
                next => next,
            };
            if !self.connections.contains_key(&key) {
                break key;
            }
        };
        let _ = epoll::delete(&self.epoll, handshake.stream());
        let stream = handshake.into_stream();
        if watch(&self.epoll, &stream, true, token(key)).is_ok() {
            self.add(Connection::from_host(key, stream));
        }
    }

    /// All connections end, and the guest is told so when it listens (after a restore: the host's programs are others).
    fn drop_connections(&mut self) {
        self.connections.clear();
        self.handshakes.clear();
        self.news.clear();
        self.in_news.clear();
        self.refusals.clear();
        self.deadlines.clear();
        self.count();
    }

    fn write_event(&mut self) -> Progress {
        if !self.tell_reset {
            return Progress::Idle;
        }
        self.serve(EVENT, |server, memory, chain| {
            if !std::mem::take(&mut server.tell_reset) {
                return Ok(None);
            }
            writable(memory, chain, &mut server.slices)?;
            let event = EVENT_TRANSPORT_RESET.to_le_bytes();
            Ok(Some(copy_to_guest(memory, &event, &server.slices) as u32))
        })
    }

    fn expire(&mut self) {
        let now = Instant::now();
        while let Some(Reverse((at, key))) = self.deadlines.peek().copied() {
            if at > now {
                break;
            }
            self.deadlines.pop();
            if let Some(connection) = self.connections.get_mut(&key)
                && connection.deadline() == Some(at)
            {
                connection.give_up();
                self.has_news(key);
            }
        }
        self.handshakes
            .retain(|_, handshake| handshake.deadline > now);
    }
}

/// The part of `slices` that begins `skip` bytes in and has at most `most` bytes.
fn between(slices: &[GuestSlice], skip: usize, most: usize) -> Vec<GuestSlice> {
    let (mut skip, mut most) = (skip, most);
    let mut parts = Vec::new();
    for slice in slices {
        let part = slice.skip(skip).take(most);
        skip = skip.saturating_sub(slice.len());
        most -= part.len();
        if !part.is_empty() {
            parts.push(part);
        }
    }
    parts
}

fn writable(
    memory: &GuestMemoryMmap<()>,
    chain: Chain<'_>,
    slices: &mut Vec<GuestSlice>,
) -> Result<(), BadChain> {
    slices.clear();
    let mut total = 0usize;
    walk(chain, |descriptor| {
        if !descriptor.is_write_only() {
            return Err(BadChain::Direction);
        }
        total = total.saturating_add(descriptor.len() as usize);
        translate(memory, descriptor.addr(), descriptor.len(), slices)?;
        Ok(())
    })?;
    Ok(())
}

fn readable(
    memory: &GuestMemoryMmap<()>,
    chain: Chain<'_>,
    slices: &mut Vec<GuestSlice>,
) -> Result<(), BadChain> {
    slices.clear();
    let mut total = 0usize;
    walk(chain, |descriptor| {
        if descriptor.is_write_only() {
            return Err(BadChain::Direction);
        }
        total = total.saturating_add(descriptor.len() as usize);
        if total > HEADER_BYTES + MOST_PACKET {
            return Err(BadChain::TooLong);
        }
        translate(memory, descriptor.addr(), descriptor.len(), slices)?;
        Ok(())
    })
}

impl Service for Server {
    fn start(&mut self, _features: u64) {
        self.running = true;
    }

    fn add_queue(&mut self, queue: GuestQueue) {
        self.put(queue);
    }

    fn remove_queues(&mut self, scope: Scope) {
        match scope {
            Scope::All => {
                self.queues = [None, None, None];
                self.running = false;
                self.tell_reset = false;
                self.drop_connections();
            }
            Scope::Queue(index) => drop(self.take(index)),
        }
    }

    fn is_quiet(&self, _scope: Scope) -> bool {
        true
    }

    fn kick(&mut self, index: u16) -> Progress {
        match index {
            RECEIVE => self.receive(),
            TRANSMIT => self.transmit(),
            EVENT => self.write_event(),
            _ => Progress::Idle,
        }
    }

    fn source(&self) -> Option<(BorrowedFd<'_>, Watch)> {
        Some((self.epoll.as_fd(), Watch::Readable))
    }

    fn source_ready(&mut self) -> Progress {
        const EVENTS: usize = 64;
        let mut events = [const { std::mem::MaybeUninit::<epoll::Event>::uninit() }; EVENTS];
        let zero = rustix::event::Timespec::default();
        let Ok((ready, _)) = epoll::wait(&self.epoll, &mut events, Some(&zero)) else {
            return Progress::Idle;
        };
        let ready: Vec<(u64, epoll::EventFlags)> = ready
            .iter()
            .map(|event| (event.data.u64(), event.flags))
            .collect();
        for (token, flags) in &ready {
            match *token {
                LISTENER => self.accept(),
                BELL => {
                    let _ = rustix::io::read(&self.bell, &mut [0; 8]);
                    self.drop_connections();
                    self.tell_reset = true;
                    self.write_event();
                }
                token if token >= FIRST_HANDSHAKE => self.shake(token),
                token => {
                    let key = key(token);
                    if let Some(connection) = self.connections.get_mut(&key) {
                        connection.readable |= flags.contains(epoll::EventFlags::IN);
                        connection.flush();
                        if flags.intersects(epoll::EventFlags::HUP | epoll::EventFlags::ERR) {
                            connection.hung_up();
                        }
                        self.has_news(key);
                    }
                }
            }
        }
        let more = self.receive();
        if ready.len() == EVENTS {
            Progress::More
        } else {
            more
        }
    }

    fn timeout(&self) -> Option<Duration> {
        let connection = self.deadlines.peek().map(|Reverse((at, _))| *at);
        let handshake = self.handshakes.values().map(|shake| shake.deadline).min();
        let next = connection.into_iter().chain(handshake).min()?;
        Some(next.saturating_duration_since(Instant::now()))
    }

    fn expired(&mut self) {
        self.expire();
        self.receive();
    }

    fn end(self: Box<Self>) {}
}
