//! The thread of the device: hands the back end's calls on to the guest, carries out what the transport asks for, and connects again
//! when the back end has gone.
//!
//! ```text
//!             first greeting                       message failed, or the connection broke
//!   (new) ──────────────────────────> connected ─────────────────────────────────────────> gone
//!                                         ^                                                  │ every second
//!                                         └──────── greeted, queues started again ───────────┘
//! ```

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, Sender, TryRecvError};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::back_end::{BackEnd, BackEndError, Record, Served, dial};
use super::metrics::VhostUserMetrics;
use super::{Line, SharedConfig, VhostUserBlkOptions};
use crate::virtio::ActiveQueue;
use crate::virtio::worker::{Answer, Scope, Session};

/// How often a back end that has gone is looked for.
const RETRY: Duration = Duration::from_secs(1);

/// Tokens of the wait point; queue numbers are below.
const BELL: u64 = 1 << 32;
const CONNECTION: u64 = BELL + 1;

/// What the transport asks for.
pub(super) enum Message {
    Activate(Session, Vec<ActiveQueue>),
    EnableQueue(ActiveQueue),
    Reset(Scope, Answer),
    Stop,
}

/// All that the thread owns.
pub(super) struct Relay {
    options: VhostUserBlkOptions,
    messages: Receiver<Message>,
    _bell: EventFd,
    epoll: Epoll,
    /// The calls of all queues, watched edge-triggered and never read.
    calls: Vec<EventFd>,
    config: SharedConfig,
    metrics: Arc<VhostUserMetrics>,
    line: Arc<Line>,
    back_end: Option<BackEnd>,
    session: Option<Session>,
    queues: Vec<Served>,
    record: Option<Record>,
    retry_at: Instant,
    stopping: bool,
}

impl Relay {
    pub(super) fn new(
        options: VhostUserBlkOptions,
        messages: Receiver<Message>,
        bell: EventFd,
        config: SharedConfig,
        metrics: Arc<VhostUserMetrics>,
        line: Arc<Line>,
    ) -> io::Result<Self> {
        let epoll = Epoll::new()?;
        let edges = EventSet::IN | EventSet::EDGE_TRIGGERED;
        watch(&epoll, bell.as_raw_fd(), edges, BELL)?;
        let mut calls = Vec::new();
        for index in 0..options.queues {
            let call = EventFd::new(EFD_NONBLOCK)?;
            watch(&epoll, call.as_raw_fd(), edges, index.into())?;
            calls.push(call);
        }
        Ok(Self {
            options,
            messages,
            _bell: bell,
            epoll,
            calls,
            config,
            metrics,
            line,
            back_end: None,
            session: None,
            queues: Vec::new(),
            record: None,
            retry_at: Instant::now(),
            stopping: false,
        })
    }

    /// Greets the back end and says so, then works until told to stop.
    pub(super) fn run(mut self, ready: &Sender<Result<u64, BackEndError>>) {
        let greeted = self.greet();
        let failed = greeted.is_err();
        // Nobody waits any more if it took too long.
        if ready.send(greeted).is_err() || failed {
            return;
        }
        let mut events = [EpollEvent::default(); 16];
        while !self.stopping {
            let ready = match self.epoll.wait(self.patience(), &mut events) {
                Ok(count) => events.get(..count).unwrap_or_default(),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => {
                    // Only a bug in this module can get here; nothing can be served without a wait point.
                    tracing::error!("a device thread cannot wait for events: {error}");
                    return;
                }
            };
            for event in ready {
                match event.data() {
                    BELL => {}
                    CONNECTION => self.look_at_connection(event.event_set()),
                    queue => self.hand_on(queue),
                }
            }
            self.read_messages();
            if self.back_end.is_none() && Instant::now() >= self.retry_at {
                self.look_for_back_end();
            }
        }
    }

    fn patience(&self) -> i32 {
        if self.back_end.is_some() {
            return -1;
        }
        let left = self.retry_at.saturating_duration_since(Instant::now());
        i32::try_from(left.as_millis()).map_or(i32::MAX, |millis| millis.saturating_add(1))
    }

    /// Connects and negotiates; the features offered.
    fn greet(&mut self) -> Result<u64, BackEndError> {
        let stream = dial(&self.options.socket)?;
        let clone = stream.try_clone().map_err(BackEndError::Host)?;
        self.line.set(Some(clone));
        let back_end =
            BackEnd::greet(stream, &self.options).inspect_err(|_| self.line.set(None))?;
        let events = EventSet::IN | EventSet::READ_HANG_UP;
        watch(&self.epoll, back_end.as_raw_fd(), events, CONNECTION).map_err(BackEndError::Host)?;
        *self.config.lock().unwrap_or_else(PoisonError::into_inner) = back_end.config;
        let features = back_end.features;
        self.back_end = Some(back_end);
        self.metrics.connections.fetch_add(1, Ordering::Relaxed);
        Ok(features)
    }

    /// A back end speaks only when it is asked, so what can be read here is its end, or nonsense.
    fn look_at_connection(&mut self, events: EventSet) {
        if !events.is_empty() {
            self.lose("it closed the connection, or spoke out of turn");
        }
    }

    fn hand_on(&mut self, queue: u64) {
        if let (Some(session), Ok(index)) = (&self.session, u16::try_from(queue)) {
            self.metrics.calls.fetch_add(1, Ordering::Relaxed);
            session.interrupt.queue(index);
        }
    }

    fn lose(&mut self, why: impl std::fmt::Display) {
        let Some(back_end) = self.back_end.take() else {
            return;
        };
        // Closing is not enough while the line has a duplicate.
        let _ = self.epoll.ctl(
            ControlOperation::Delete,
            back_end.as_raw_fd(),
            EpollEvent::default(),
        );
        drop(back_end);
        self.line.cut();
        self.line.set(None);
        self.metrics.losses.fetch_add(1, Ordering::Relaxed);
        self.retry_at = Instant::now() + RETRY;
        tracing::error!(
            disk = self.options.id,
            socket = %self.options.socket.display(),
            "the vhost-user back end is lost and looked for every second; its guest's requests wait: {why}"
        );
    }

    fn look_for_back_end(&mut self) {
        self.retry_at = Instant::now() + RETRY;
        let before = *self.config.lock().unwrap_or_else(PoisonError::into_inner);
        match self.greet() {
            Ok(features) => {
                if let Some(session) = &self.session {
                    let missing = session.features & super::back_end::DISK_FEATURES & !features;
                    if missing != 0 {
                        return self.lose(format_args!(
                            "the new one lacks features {missing:#x}, which the guest uses"
                        ));
                    }
                }
                self.start_all();
                if self.back_end.is_some() {
                    tracing::warn!(
                        disk = self.options.id,
                        "a vhost-user back end serves the disk again"
                    );
                    let now = *self.config.lock().unwrap_or_else(PoisonError::into_inner);
                    if let Some(session) = &self.session
                        && now.capacity != before.capacity
                    {
                        session.interrupt.config();
                    }
                }
            }
            Err(error) => {
                tracing::debug!(disk = self.options.id, "still no back end: {error}");
            }
        }
    }

    /// Starts all queues of the session, if there is one.
    fn start_all(&mut self) {
        let (Some(session), Some(back_end)) = (&self.session, &mut self.back_end) else {
            return;
        };
        let started = back_end.start(
            &session.memory,
            session.features,
            &self.queues,
            &self.calls,
            &mut self.record,
            self.options.queue_size,
        );
        // What was answered just before the last back end went may not have been told.
        for queue in &self.queues {
            session.interrupt.queue(queue.index);
        }
        if let Err(error) = started {
            self.lose(error);
        }
    }

    fn read_messages(&mut self) {
        loop {
            match self.messages.try_recv() {
                Ok(Message::Activate(session, queues)) => {
                    self.session = Some(session);
                    self.queues = queues.into_iter().map(served).collect();
                    self.start_all();
                }
                Ok(Message::EnableQueue(queue)) => self.enable(queue),
                Ok(Message::Reset(scope, answer)) => {
                    self.stop(scope);
                    drop(answer);
                }
                Ok(Message::Stop) | Err(TryRecvError::Disconnected) => {
                    self.stop(Scope::All);
                    self.stopping = true;
                    return;
                }
                Err(TryRecvError::Empty) => return,
            }
        }
    }

    fn enable(&mut self, queue: ActiveQueue) {
        let queue = served(queue);
        if let (Some(session), Some(back_end)) = (&self.session, &mut self.back_end)
            && let Err(error) = back_end.start_queue(&session.memory, &queue, &self.calls)
        {
            self.lose(error);
        }
        self.queues.retain(|other| other.index != queue.index);
        self.queues.push(queue);
    }

    /// Stops queues. A back end that does not stop them loses its connection; one that has gone has stopped them.
    fn stop(&mut self, scope: Scope) {
        let concerned = |queue: &Served| scope == Scope::All || scope == Scope::Queue(queue.index);
        for queue in self.queues.iter().filter(|queue| concerned(queue)) {
            let Some(back_end) = &mut self.back_end else {
                break;
            };
            if let Err(error) = back_end.stop_queue(queue.index) {
                let error = error.to_string();
                self.lose(error);
                break;
            }
        }
        self.queues.retain(|queue| !concerned(queue));
        if scope == Scope::All {
            self.session = None;
            self.record = None;
        }
    }
}

fn served(active: ActiveQueue) -> Served {
    let ActiveQueue {
        index,
        queue,
        doorbell,
        // The back end keeps the record.
        tracking: _,
    } = active;
    Served {
        index,
        queue,
        kick: doorbell,
    }
}

fn watch(epoll: &Epoll, file: RawFd, events: EventSet, token: u64) -> io::Result<()> {
    epoll.ctl(ControlOperation::Add, file, EpollEvent::new(events, token))
}
