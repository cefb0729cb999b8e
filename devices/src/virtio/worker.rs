//! The thread of a device: one wait point for its doorbells, its host file and its owner's messages.
//!
//! ```text
//!   transport ── Activate, EnableQueue, ResetQueue, Reset, Stop ──> inbox + eventfd ─┐
//!   owner ────── Called ─────────────────────────────────────────────────────────────┤
//!   guest doorbells (edge-triggered, never read) ────────────────────────────────────┼─> epoll ──> Service
//!   host files (tap, disk's ring, disk's timer) ─────────────────────────────────────┘
//! ```
//!
//! The thread is made once, with the device, and lives until the device is dropped; between a reset and the next activation it sleeps.
//! It never waits for anything but its wait point. A reset is answered when the service is *quiet*, that is when no request of the
//! queues concerned can touch guest memory any more; until then the thread goes on serving what is under way.
//!
//! Doorbells are watched edge-triggered, so that a notification costs no system call but the wait itself.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use virtio_queue::Queue;
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::GuestMemory;
use crate::thread::{ThreadRole, Threads};
use crate::virtio::queue::GuestQueue;
use crate::virtio::{ActivateError, ActiveQueue, Pending, VirtioInterrupt};

/// Which queues a message speaks of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// All of the worker's.
    All,
    /// The one with this number.
    Queue(u16),
}

/// Whether a service has done all it can for now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// It has; the next event will tell.
    Idle,
    /// It stopped to let others have a turn; call it again.
    More,
}

/// A host file that a service waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Watch {
    /// Call while it is readable.
    Readable,
    /// Call once each time it becomes readable or writable.
    Edges,
}

/// What a device does on its thread. All methods return without waiting, but for I/O that is the request itself.
pub trait Service: Send {
    /// Features are negotiated and queues are about to be added.
    fn start(&mut self, features: u64);

    /// Serves one more queue, from now on and including what is already available in it.
    fn add_queue(&mut self, queue: GuestQueue);

    /// Lets go of queues; answers still under way are dropped when they come.
    fn remove_queues(&mut self, scope: Scope);

    /// Whether nothing of these (removed) queues is under way that could touch guest memory.
    fn is_quiet(&self, scope: Scope) -> bool;

    /// Takes nothing more from these queues; what is under way is answered. Services whose queues are never handed back keep the default.
    fn halt(&mut self, scope: Scope) {
        let _ = scope;
    }

    /// Hands back these (halted, quiet) queues as they stand, with their numbers.
    fn take_back(&mut self, scope: Scope) -> Vec<(u16, Queue)> {
        let _ = scope;
        Vec::new()
    }

    /// The driver rang for queue `index`, or the service asked to be called again for it.
    fn kick(&mut self, index: u16) -> Progress;

    /// The host file to watch; another one only after [`Service::called`].
    fn source(&self) -> Option<(BorrowedFd<'_>, Watch)>;

    /// A second one, watched while it is readable: a timer. [`Service::source_ready`] is for both.
    fn timer(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// The host file is ready, or the service asked to be called again for it.
    fn source_ready(&mut self) -> Progress;

    /// The service's owner rang by its [`Caller`]. Host files may be others afterwards.
    fn called(&mut self) -> Progress {
        Progress::Idle
    }

    /// When to call [`Service::expired`] at the latest, counted from now.
    fn timeout(&self) -> Option<Duration> {
        None
    }

    /// The time is up.
    fn expired(&mut self) {}

    /// The device is gone; the service is quiet.
    fn end(self: Box<Self>);
}

/// Says that a request to a thread is done, by being dropped.
pub(super) struct Answer(Arc<Gate>);

/// An answer to be given, and what waits for it.
pub(super) fn answer() -> (Answer, Answers) {
    let gate = Arc::new(Gate::default());
    (Answer(Arc::clone(&gate)), Answers(vec![gate]))
}

#[derive(Default)]
struct Gate {
    open: AtomicBool,
    lock: Mutex<()>,
    opened: Condvar,
}

impl Drop for Answer {
    fn drop(&mut self) {
        let _guard = self.0.lock.lock().unwrap_or_else(PoisonError::into_inner);
        self.0.open.store(true, Ordering::Release);
        self.0.opened.notify_all();
    }
}

/// Done when every one of several threads has answered; at once if there is none.
#[derive(Default)]
pub struct Answers(Vec<Arc<Gate>>);

impl Answers {
    /// Waits for what another waits for as well.
    pub fn join(&mut self, other: Self) {
        self.0.extend(other.0);
    }
}

impl Pending for Answers {
    fn is_done(&self) -> bool {
        self.0.iter().all(|gate| gate.open.load(Ordering::Acquire))
    }

    fn wait(&self, timeout: Duration) -> bool {
        let deadline = std::time::Instant::now() + timeout;
        self.0.iter().all(|gate| {
            let left = deadline.saturating_duration_since(std::time::Instant::now());
            let guard = gate.lock.lock().unwrap_or_else(PoisonError::into_inner);
            let (_guard, _) = gate
                .opened
                .wait_timeout_while(guard, left, |()| !gate.open.load(Ordering::Acquire))
                .unwrap_or_else(PoisonError::into_inner);
            gate.open.load(Ordering::Acquire)
        })
    }
}

/// What the queues of one activation have in common.
#[derive(Clone)]
pub struct Session {
    /// The guest's RAM.
    pub memory: GuestMemory,
    /// Negotiated features.
    pub features: u64,
    /// How to signal the driver.
    pub interrupt: Arc<dyn VirtioInterrupt>,
}

/// Queues that were being served, with their numbers, as they stand after the last answer.
pub type HandedBack = Vec<(u16, Queue)>;

enum Message {
    Activate(Session, Vec<ActiveQueue>),
    EnableQueue(ActiveQueue),
    Halt(Scope, Sender<HandedBack>),
    Reset(Scope, Answer),
    Called,
    Stop,
}

/// Rings for a service from any thread.
#[derive(Clone)]
pub struct Caller {
    inbox: Sender<Message>,
    bell: Arc<EventFd>,
}

impl Caller {
    /// Makes the service be [called](Service::called).
    ///
    /// # Errors
    /// The thread has ended.
    pub fn call(&self) -> Result<(), ActivateError> {
        self.send(Message::Called)
    }

    fn send(&self, message: Message) -> Result<(), ActivateError> {
        self.inbox
            .send(message)
            .map_err(|_| ActivateError::ThreadGone)?;
        self.bell
            .write(1)
            .map_err(|error| ActivateError::Host("waking the device's thread", error))
    }
}

/// The owner's end of a device thread. Dropping it ends the thread, once what is under way has ended.
pub struct Worker {
    caller: Caller,
    thread: Option<JoinHandle<()>>,
}

impl Worker {
    /// Starts a thread that runs `service`.
    ///
    /// # Errors
    /// No descriptors or no thread could be had.
    pub fn spawn(
        threads: &dyn Threads,
        name: &str,
        role: ThreadRole,
        service: Box<dyn Service>,
    ) -> io::Result<Self> {
        let (inbox, messages) = channel();
        let bell = EventFd::new(EFD_NONBLOCK)?;
        let event_loop = EventLoop::new(service, messages, bell.try_clone()?)?;
        let thread = threads.spawn(name, role, Box::new(move || event_loop.run()))?;
        Ok(Self {
            caller: Caller {
                inbox,
                bell: Arc::new(bell),
            },
            thread: Some(thread),
        })
    }

    /// What rings for the service.
    #[must_use]
    pub fn caller(&self) -> Caller {
        self.caller.clone()
    }

    /// Starts serving `queues`.
    ///
    /// # Errors
    /// The thread has ended.
    pub fn activate(
        &self,
        session: Session,
        queues: Vec<ActiveQueue>,
    ) -> Result<(), ActivateError> {
        self.send(Message::Activate(session, queues))
    }

    /// Serves one more queue of the running session.
    ///
    /// # Errors
    /// The thread has ended.
    pub fn enable_queue(&self, queue: ActiveQueue) -> Result<(), ActivateError> {
        self.send(Message::EnableQueue(queue))
    }

    /// Stops serving queues. A thread that has ended serves none, so the answer is there at once.
    #[must_use]
    pub fn reset(&self, scope: Scope) -> Answers {
        let (answer, answers) = answer();
        // A message that cannot be sent is dropped, and the answer in it with it.
        let _ = self.send(Message::Reset(scope, answer));
        answers
    }

    /// Stops serving queues as [`Worker::reset`] does, but answers what is under way first. The queues come through the channel, which
    /// ends without a word if the thread has ended.
    #[must_use]
    pub fn halt(&self, scope: Scope) -> Receiver<HandedBack> {
        let (sender, queues) = channel();
        let _ = self.send(Message::Halt(scope, sender));
        queues
    }

    fn send(&self, message: Message) -> Result<(), ActivateError> {
        self.caller.send(message)
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.send(Message::Stop);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("a device thread ended by a panic");
        }
    }
}

/// Tokens of the wait point; queue numbers are below.
const BELL: u64 = 1 << 32;
const SOURCE: u64 = BELL + 1;

struct EventLoop {
    service: Box<dyn Service>,
    messages: Receiver<Message>,
    _bell: EventFd,
    epoll: Epoll,
    session: Option<Session>,
    doorbells: Vec<(u16, EventFd)>,
    /// Queues, by number, and the source that want another turn without an event.
    again: Vec<u64>,
    draining: Vec<(Scope, Answer)>,
    halting: Vec<(Scope, Sender<HandedBack>)>,
    /// The service's host files, as they are watched.
    watched: Vec<RawFd>,
    stopping: bool,
}

impl EventLoop {
    fn new(
        service: Box<dyn Service>,
        messages: Receiver<Message>,
        bell: EventFd,
    ) -> io::Result<Self> {
        let epoll = Epoll::new()?;
        let edges = EventSet::IN | EventSet::EDGE_TRIGGERED;
        add(&epoll, bell.as_raw_fd(), edges, BELL)?;
        let mut event_loop = Self {
            service,
            messages,
            _bell: bell,
            epoll,
            session: None,
            doorbells: Vec::new(),
            again: Vec::new(),
            draining: Vec::new(),
            halting: Vec::new(),
            watched: Vec::new(),
            stopping: false,
        };
        event_loop.watch()?;
        Ok(event_loop)
    }

    /// Watches the service's host files.
    fn watch(&mut self) -> io::Result<()> {
        let timer = self.service.timer().map(|timer| (timer, Watch::Readable));
        for (file, watch) in [self.service.source(), timer].into_iter().flatten() {
            let events = match watch {
                Watch::Readable => EventSet::IN,
                Watch::Edges => EventSet::IN | EventSet::OUT | EventSet::EDGE_TRIGGERED,
            };
            add(&self.epoll, file.as_raw_fd(), events, SOURCE)?;
            self.watched.push(file.as_raw_fd());
        }
        Ok(())
    }

    /// Lets the service do what its owner wants; its host files may be others afterwards.
    fn called(&mut self) {
        // Before they may be closed, and their numbers be another's.
        for file in self.watched.drain(..) {
            let _ = self
                .epoll
                .ctl(ControlOperation::Delete, file, EpollEvent::default());
        }
        if self.service.called() == Progress::More {
            self.again.push(SOURCE);
        }
        if let Err(error) = self.watch() {
            tracing::error!("a device's host file cannot be watched: {error}");
            if let Some(session) = &self.session {
                session.interrupt.needs_reset();
            }
        }
    }

    fn run(mut self) {
        let mut events = [EpollEvent::default(); 16];
        let mut turn = Vec::new();
        while !(self.stopping && self.service.is_quiet(Scope::All)) {
            let timeout = self.service.timeout();
            let ready = match self.epoll.wait(self.patience(timeout), &mut events) {
                Ok(count) => events.get(..count).unwrap_or_default(),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => {
                    // Only a bug in this module can get here; nothing can be served without a wait point.
                    tracing::error!("a device thread cannot wait for events: {error}");
                    break;
                }
            };
            turn.clear();
            turn.append(&mut self.again);
            turn.extend(
                ready
                    .iter()
                    .map(EpollEvent::data)
                    .filter(|token| *token != BELL),
            );
            if ready.iter().any(|event| event.data() == BELL) {
                self.read_messages();
            }
            if ready.is_empty() && timeout.is_some() {
                self.service.expired();
            }
            turn.sort_unstable();
            turn.dedup();
            for token in turn.drain(..) {
                self.serve(token);
            }
            let service = &self.service;
            self.draining
                .retain(|(scope, _answer)| !service.is_quiet(*scope));
            self.hand_back();
        }
        self.forget_doorbells(Scope::All);
        self.service.end();
    }

    /// Hands back the halted queues whose last answer is given.
    fn hand_back(&mut self) {
        let mut halting = std::mem::take(&mut self.halting);
        halting.retain(|(scope, owner)| {
            let quiet = self.service.is_quiet(*scope);
            if quiet {
                let queues = self.service.take_back(*scope);
                self.remove_queues(*scope);
                // Nobody waits any more; the queues are as good as reset.
                let _ = owner.send(queues);
            }
            !quiet
        });
        self.halting = halting;
    }

    /// How long to wait, in milliseconds as epoll takes it.
    fn patience(&self, timeout: Option<Duration>) -> i32 {
        match timeout {
            _ if !self.again.is_empty() => 0,
            None => -1,
            Some(left) => {
                i32::try_from(left.as_millis()).map_or(i32::MAX, |millis| millis.saturating_add(1))
            }
        }
    }

    fn serve(&mut self, token: u64) {
        let progress = if token == SOURCE {
            self.service.source_ready()
        } else {
            match u16::try_from(token) {
                Ok(index) if self.doorbells.iter().any(|(queue, _)| *queue == index) => {
                    self.service.kick(index)
                }
                // An event of a queue that a message has just taken away.
                _ => Progress::Idle,
            }
        };
        if progress == Progress::More {
            self.again.push(token);
        }
    }

    fn read_messages(&mut self) {
        loop {
            match self.messages.try_recv() {
                Ok(Message::Activate(session, queues)) => {
                    self.service.start(session.features);
                    self.session = Some(session);
                    for queue in queues {
                        self.add_queue(queue);
                    }
                }
                Ok(Message::EnableQueue(queue)) => self.add_queue(queue),
                Ok(Message::Halt(scope, owner)) => {
                    self.forget_doorbells(scope);
                    self.service.halt(scope);
                    self.halting.push((scope, owner));
                }
                Ok(Message::Reset(scope, answer)) => {
                    self.remove_queues(scope);
                    self.draining.push((scope, answer));
                }
                Ok(Message::Called) => self.called(),
                Ok(Message::Stop) | Err(TryRecvError::Disconnected) => {
                    self.remove_queues(Scope::All);
                    self.stopping = true;
                    return;
                }
                Err(TryRecvError::Empty) => return,
            }
        }
    }

    fn add_queue(&mut self, active: ActiveQueue) {
        let Some(session) = self.session.clone() else {
            return;
        };
        let ActiveQueue {
            index,
            queue,
            doorbell,
            tracking,
        } = active;
        self.remove_queues(Scope::Queue(index));
        let events = EventSet::IN | EventSet::EDGE_TRIGGERED;
        if let Err(error) = add(&self.epoll, doorbell.as_raw_fd(), events, index.into()) {
            tracing::error!(queue = index, "a doorbell cannot be watched: {error}");
            session.interrupt.needs_reset();
            return;
        }
        self.doorbells.push((index, doorbell));
        let Session {
            memory,
            features,
            interrupt,
        } = session;
        let queue = GuestQueue::new(index, queue, features, memory, interrupt);
        self.service.add_queue(queue.tracked(tracking));
        // The driver may have rung before the doorbell was watched.
        self.again.push(index.into());
    }

    fn remove_queues(&mut self, scope: Scope) {
        self.forget_doorbells(scope);
        match scope {
            Scope::All => {
                self.session = None;
                self.again.clear();
            }
            Scope::Queue(index) => self.again.retain(|token| *token != u64::from(index)),
        }
        self.service.remove_queues(scope);
    }

    fn forget_doorbells(&mut self, scope: Scope) {
        let epoll = &self.epoll;
        self.doorbells.retain(|(index, doorbell)| {
            let concerned = scope == Scope::All || scope == Scope::Queue(*index);
            if concerned {
                // Closing is not enough: the transport may hold a duplicate. Failing leaves a token that nobody knows.
                let _ = epoll.ctl(
                    ControlOperation::Delete,
                    doorbell.as_raw_fd(),
                    EpollEvent::default(),
                );
            }
            !concerned
        });
    }
}

fn add(epoll: &Epoll, file: RawFd, events: EventSet, token: u64) -> io::Result<()> {
    epoll.ctl(ControlOperation::Add, file, EpollEvent::new(events, token))
}
