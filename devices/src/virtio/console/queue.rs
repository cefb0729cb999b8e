//! All queues of the device on its one thread.
//!
//! ```text
//!  driver                      device
//!  DEVICE_READY ─────────────>
//!               <───────────── DEVICE_ADD n          for each port
//!  PORT_READY n ─────────────>
//!               <───────────── CONSOLE_PORT, PORT_NAME, PORT_OPEN 1
//!  PORT_OPEN n  ─────────────>                       bytes flow to the guest from here on
//! ```
//!
//! A port's socket is watched edge-triggered: what is not taken because the guest has no buffer or has the port closed stays in the
//! socket, and holds up whoever writes at its other end.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::event::epoll;
use vm_memory::GuestMemoryMmap;
use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, IntoBytes};

use super::bits::{CONTROL_RECEIVE, CONTROL_TRANSMIT, Control, Role, event, feature};
use super::metrics::ConsoleMetrics;
use super::port::{MOST_PENDING, Port};
use crate::virtio::memory::{
    GuestSlice, MAX_SLICES, NotRam, copy_from_guest, copy_to_guest, read_vectored, translate,
};
use crate::virtio::queue::{Chain, EndlessChain, GuestQueue, walk};
use crate::virtio::worker::{Progress, Scope, Service, Watch};

/// Chains in one turn of a queue.
const TURN: usize = 32;
/// The longest control message of a driver that is looked at, in bytes; more is not meant for us.
const MOST_CONTROL: usize = 64;
/// Control messages that wait for the driver's buffers. A driver that asks for more than that without reading is broken.
const MOST_MESSAGES: usize = 1024;

/// Why a chain cannot be served.
#[derive(Debug, thiserror::Error)]
enum BadChain {
    #[error(transparent)]
    Endless(#[from] EndlessChain),
    #[error("a buffer of a receive queue is not writable")]
    NotWritable,
    #[error("a buffer of a transmit queue is not readable")]
    NotReadable,
    #[error("a transmit buffer of more than {MOST_PENDING} bytes")]
    TooLong,
    #[error(transparent)]
    NotRam(#[from] NotRam),
    #[error("more than {MOST_MESSAGES} control messages asked for and not read")]
    Flood,
}

pub(super) struct Server {
    ports: Vec<Port>,
    epoll: OwnedFd,
    multiport: bool,
    /// By queue number.
    queues: Vec<Option<GuestQueue>>,
    /// Messages to the driver.
    messages: VecDeque<Vec<u8>>,
    slices: Vec<GuestSlice>,
    metrics: Arc<ConsoleMetrics>,
}

impl Server {
    pub(super) fn new(ports: Vec<Port>, metrics: Arc<ConsoleMetrics>) -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        for (number, port) in (0..).zip(&ports) {
            let events = epoll::EventFlags::IN
                | epoll::EventFlags::OUT
                | epoll::EventFlags::RDHUP
                | epoll::EventFlags::ET;
            epoll::add(
                &epoll,
                &port.stream,
                epoll::EventData::new_u64(number),
                events,
            )?;
        }
        let queues = 2 * (ports.len() + 1);
        Ok(Self {
            ports,
            epoll,
            multiport: false,
            queues: (0..queues).map(|_| None).collect(),
            messages: VecDeque::new(),
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

    fn receive(&mut self, number: usize, index: u16) -> Progress {
        self.serve(index, |server, memory, chain| {
            let multiport = server.multiport;
            let (ports, slices) = (&mut server.ports, &mut server.slices);
            let Some(port) = ports.get_mut(number) else {
                return Ok(None);
            };
            if !port.readable || (multiport && !port.guest_open.get()) {
                return Ok(None);
            }
            writable(memory, chain, slices)?;
            slices.truncate(MAX_SLICES);
            if slices.is_empty() {
                return Ok(Some(0));
            }
            loop {
                match read_vectored(port.stream.as_fd(), memory, slices, &mut []) {
                    Ok(0) => {
                        port.hung_up = true;
                        port.readable = false;
                        return Ok(None);
                    }
                    Ok(bytes) => {
                        let received = &server.metrics.received_bytes;
                        received.fetch_add(bytes as u64, Ordering::Relaxed);
                        return Ok(Some(bytes as u32));
                    }
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(error) => {
                        port.readable = false;
                        port.hung_up |= error.kind() != io::ErrorKind::WouldBlock;
                        return Ok(None);
                    }
                }
            }
        })
    }

    fn transmit(&mut self, number: usize, index: u16) -> Progress {
        self.serve(index, |server, memory, chain| {
            let Some(port) = server.ports.get_mut(number) else {
                return Ok(None);
            };
            if port.is_blocked() {
                return Ok(None);
            }
            readable(memory, chain, &mut server.slices)?;
            let bytes = port.pending();
            copy_from_guest(memory, &server.slices, bytes);
            let sent = &server.metrics.sent_bytes;
            sent.fetch_add(bytes.len() as u64, Ordering::Relaxed);
            let dropped = port.flush() as u64;
            let counter = &server.metrics.dropped_bytes;
            counter.fetch_add(dropped, Ordering::Relaxed);
            Ok(Some(0))
        })
    }

    fn read_control(&mut self) -> Progress {
        let progress = self.serve(CONTROL_TRANSMIT, |server, memory, chain| {
            readable(memory, chain, &mut server.slices)?;
            let mut bytes = Vec::new();
            copy_from_guest(memory, &server.slices, &mut bytes);
            bytes.truncate(MOST_CONTROL);
            server.hear(&bytes)?;
            Ok(Some(0))
        });
        self.write_control();
        progress
    }

    fn hear(&mut self, bytes: &[u8]) -> Result<(), BadChain> {
        let bad = &self.metrics.bad_messages;
        let Ok((message, _)) = Control::read_from_prefix(bytes) else {
            bad.fetch_add(1, Ordering::Relaxed);
            return Ok(());
        };
        let number = message.id.get() as usize;
        let yes = message.value.get() != 0;
        match (message.event.get(), self.ports.get(number)) {
            (event::DEVICE_READY, _) => {
                if yes {
                    for id in 0..self.ports.len() {
                        self.tell(id, event::DEVICE_ADD, 0, b"")?;
                    }
                }
            }
            (event::PORT_READY, Some(port)) => {
                if yes {
                    let (console, name) = (port.console, port.name.clone());
                    if console {
                        self.tell(number, event::CONSOLE_PORT, 1, b"")?;
                    }
                    self.tell(number, event::PORT_NAME, 1, name.as_bytes())?;
                    self.tell(number, event::PORT_OPEN, 1, b"")?;
                }
            }
            (event::PORT_OPEN, Some(port)) => {
                port.guest_open.set(yes);
                if yes {
                    self.receive(number, receive_queue(number));
                }
            }
            _ => {
                bad.fetch_add(1, Ordering::Relaxed);
            }
        }
        Ok(())
    }

    fn tell(&mut self, id: usize, event: u16, value: u16, more: &[u8]) -> Result<(), BadChain> {
        if self.messages.len() >= MOST_MESSAGES {
            return Err(BadChain::Flood);
        }
        let control = Control {
            id: U32::new(id as u32),
            event: U16::new(event),
            value: U16::new(value),
        };
        let mut message = control.as_bytes().to_vec();
        message.extend_from_slice(more);
        self.messages.push_back(message);
        Ok(())
    }

    fn write_control(&mut self) -> Progress {
        self.serve(CONTROL_RECEIVE, |server, memory, chain| {
            let Some(message) = server.messages.front() else {
                return Ok(None);
            };
            writable(memory, chain, &mut server.slices)?;
            let bytes = copy_to_guest(memory, message, &server.slices);
            server.messages.pop_front();
            Ok(Some(bytes as u32))
        })
    }

    fn kick_role(&mut self, index: u16) -> Progress {
        match Role::of(index) {
            Role::Receive(port) => self.receive(port, index),
            Role::Transmit(port) => self.transmit(port, index),
            Role::ControlReceive => self.write_control(),
            Role::ControlTransmit => self.read_control(),
        }
    }
}

/// The queue that carries bytes to the guest for a port.
fn receive_queue(port: usize) -> u16 {
    let pair = if port == 0 { 0 } else { port + 1 };
    u16::try_from(2 * pair).unwrap_or(u16::MAX)
}

fn writable(
    memory: &GuestMemoryMmap<()>,
    chain: Chain<'_>,
    slices: &mut Vec<GuestSlice>,
) -> Result<(), BadChain> {
    slices.clear();
    walk(chain, |descriptor| {
        if !descriptor.is_write_only() {
            return Err(BadChain::NotWritable);
        }
        translate(memory, descriptor.addr(), descriptor.len(), slices)?;
        Ok(())
    })
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
            return Err(BadChain::NotReadable);
        }
        total = total.saturating_add(descriptor.len() as usize);
        if total > MOST_PENDING {
            return Err(BadChain::TooLong);
        }
        translate(memory, descriptor.addr(), descriptor.len(), slices)?;
        Ok(())
    })
}

impl Service for Server {
    fn start(&mut self, features: u64) {
        self.multiport = features & feature::MULTIPORT != 0;
        if !self.multiport
            && let Some(port) = self.ports.first()
        {
            // There is nobody to say so.
            port.guest_open.set(true);
        }
    }

    fn add_queue(&mut self, queue: GuestQueue) {
        self.put(queue);
    }

    fn remove_queues(&mut self, scope: Scope) {
        match scope {
            Scope::All => {
                self.queues.fill_with(|| None);
                self.messages.clear();
                for port in &mut self.ports {
                    port.reset();
                }
            }
            Scope::Queue(index) => drop(self.take(index)),
        }
    }

    fn is_quiet(&self, _scope: Scope) -> bool {
        true
    }

    fn kick(&mut self, index: u16) -> Progress {
        self.kick_role(index)
    }

    fn source(&self) -> Option<(BorrowedFd<'_>, Watch)> {
        Some((self.epoll.as_fd(), Watch::Readable))
    }

    fn source_ready(&mut self) -> Progress {
        let mut events = [const { std::mem::MaybeUninit::<epoll::Event>::uninit() }; 16];
        let zero = rustix::event::Timespec::default();
        let Ok((ready, _)) = epoll::wait(&self.epoll, &mut events, Some(&zero)) else {
            return Progress::Idle;
        };
        let ready: Vec<usize> = ready
            .iter()
            .map(|event| event.data.u64() as usize)
            .collect();
        let full = ready.len() == 16;
        for number in ready {
            let Some(port) = self.ports.get_mut(number) else {
                continue;
            };
            port.readable = true;
            let was_blocked = port.is_blocked();
            let dropped = port.flush() as u64;
            let blocked = port.is_blocked();
            let counter = &self.metrics.dropped_bytes;
            counter.fetch_add(dropped, Ordering::Relaxed);
            self.receive(number, receive_queue(number));
            if was_blocked && !blocked {
                self.transmit(number, receive_queue(number) + 1);
            }
        }
        if full { Progress::More } else { Progress::Idle }
    }

    fn end(self: Box<Self>) {}
}
