//! The control thread: the one owner of the [`Machine`].
//!
//! ```text
//!  api ── messages ──┐
//!  vCPUs ─ messages ─┤            ┌── lifecycle table ──> Machine (build, run, reset, remove)
//!  serial port ──────┼─> event ───┤
//!  serial back end ──┤   loop     └── events (SSE), published state, exit code
//!  deadline, signals ┘
//! ```
//!
//! Nothing of the guest's data path passes here, except the serial console, whose bytes come in batches.

mod clock;
mod disks;
mod exchange;
mod jobs;

use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use drover_api::definition::VmConfig;
use drover_api::server::{Created, Reply};
use drover_api::types::{
    ApiError, Event, EventKind, PauseReason, ShutdownRequest, StopReason, VmState, VmView,
};
use drover_devices::platform::PowerRequest;
use event_manager::{EventManager, EventOps, EventSet, Events, MutEventSubscriber, SubscriberOps};
use tokio::sync::broadcast;

use self::clock::Clock;
use self::exchange::Exchanges;
use self::jobs::Jobs;
use crate::console::ConsoleWatch;
use crate::lifecycle::{self, Action, Input};
use crate::machine::{BuildError, Machine};
use crate::mailbox::{DiskMessage, Inbox, Mailbox, Message};
use crate::metrics::Timeline;
use crate::process::TerminationSignals;
use crate::service::PublishedState;
use crate::threads::ThreadStarter;

/// How a VM that SIGTERM ends is treated; a second signal forces it at once.
const SIGTERM_TIMEOUT: Duration = Duration::from_secs(30);

/// How the process ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The guest powered off or was shut down, or there was none. Exit code 0.
    Clean,
    /// The virtual machine could not go on. Exit code 3.
    Crashed,
}

/// The control thread could not do its work.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// The event loop.
    #[error("event loop: {0}")]
    EventLoop(event_manager::Error),
    /// A timer or signal descriptor.
    #[error("cannot create a {0}: {1}")]
    Descriptor(&'static str, #[source] std::io::Error),
}

/// What the event loop waits for, as the number that comes back with an event.
mod source {
    pub(super) const MESSAGES: u32 = 1;
    pub(super) const DEADLINE: u32 = 2;
    pub(super) const SIGNALS: u32 = 3;
    pub(super) const CONSOLE: u32 = 4;
    pub(super) const JOBS: u32 = 5;
}

/// The state of the control thread.
pub struct Control {
    machine: Option<Machine>,
    state: Option<VmState>,
    stop_reason: Option<StopReason>,
    pause_reason: Option<PauseReason>,
    resets: u64,
    exchanges: Exchanges,
    jobs: Jobs,

    mailbox: Mailbox,
    inbox: Inbox,
    signals: TerminationSignals,
    deadline: Clock,
    deadline_at: Option<Instant>,
    threads: ThreadStarter,
    timeline: Timeline,

    published: Arc<PublishedState>,
    events: broadcast::Sender<Event>,
    console: ConsoleWatch,
    outcome: Option<Outcome>,
}

/// What [`Control`] is given.
pub struct Setup {
    /// Handed to everything that reports back.
    pub mailbox: Mailbox,
    /// Its other end.
    pub inbox: Inbox,
    /// SIGTERM and SIGINT.
    pub signals: TerminationSignals,
    /// Starts the machine's threads.
    pub threads: ThreadStarter,
    /// Where the state is published.
    pub published: Arc<PublishedState>,
    /// Where events go.
    pub events: broadcast::Sender<Event>,
    /// When the process started.
    pub timeline: Timeline,
}

impl Control {
    /// A control thread without a VM.
    ///
    /// # Errors
    /// No more descriptors.
    pub fn new(setup: Setup) -> Result<Self, ControlError> {
        let timer = || Clock::new().map_err(|error| ControlError::Descriptor("timer", error));
        let (deadline, ticks) = (timer()?, timer()?);
        let console = ConsoleWatch::new()
            .map_err(|error| ControlError::Descriptor("descriptor for the console", error))?;
        Ok(Self {
            machine: None,
            state: None,
            stop_reason: None,
            pause_reason: None,
            resets: 0,
            exchanges: Exchanges::default(),
            jobs: Jobs::new(ticks),
            mailbox: setup.mailbox,
            inbox: setup.inbox,
            signals: setup.signals,
            deadline,
            deadline_at: None,
            threads: setup.threads,
            timeline: setup.timeline,
            published: setup.published,
            events: setup.events,
            console,
            outcome: None,
        })
    }

    /// Builds the VM that the process was started with and lets it run.
    ///
    /// # Errors
    /// It cannot be built.
    pub fn boot(&mut self, config: VmConfig) -> Result<(), BuildError> {
        self.build(config)?;
        self.enter(Some(VmState::Created));
        if let Err(error) = self.input(Input::Start) {
            tracing::error!(%error, "the VM that was just created cannot be started");
        }
        Ok(())
    }

    /// Runs the event loop until the VM, and with it the process, has ended.
    ///
    /// # Errors
    /// The loop itself fails, which means that descriptors or memory ran out.
    pub fn run(self) -> Result<Outcome, ControlError> {
        let mut manager = EventManager::new_with_capacity(8).map_err(ControlError::EventLoop)?;
        let id = manager.add_subscriber(self);
        loop {
            manager.run().map_err(ControlError::EventLoop)?;
            let control = manager
                .subscriber_mut(id)
                .map_err(ControlError::EventLoop)?;
            if let Some(outcome) = control.outcome {
                // Dropping the control state drops the machine: threads end, descriptors and locks are released.
                drop(manager.remove_subscriber(id));
                return Ok(outcome);
            }
        }
    }

    fn handle(&mut self, message: Message) {
        match message {
            Message::View(answer) => {
                let _ = answer.send(self.view());
            }
            Message::Create(config, answer) => {
                let _ = answer.send(self.create(*config));
            }
            Message::Delete(answer) => {
                let _ = answer.send(self.input(Input::Delete));
            }
            Message::Start(answer) => {
                let reply = self.input(Input::Start).and_then(|()| self.view());
                let _ = answer.send(reply);
            }
            Message::Shutdown(request, answer) => {
                let _ = answer.send(self.shutdown(request).and_then(|()| self.view()));
            }
            Message::Reset(answer) => {
                let reply = self.input(Input::Reset).and_then(|()| self.view());
                let _ = answer.send(reply);
            }
            Message::Pause(answer) => {
                let reply = self.input(Input::Pause).and_then(|()| self.view());
                let _ = answer.send(reply);
            }
            Message::Resume(answer) => self.resume(answer),
            Message::Disk(message) => self.disk_message(message),
            Message::Metrics(answer) => {
                let _ = answer.send(Ok(self.metrics()));
            }
            Message::Power(request) => {
                let input = match request {
                    PowerRequest::Reset => Input::GuestReset,
                    PowerRequest::PowerOff => Input::GuestOff,
                };
                self.internal(input);
            }
            Message::Crashed(reason) => {
                tracing::error!(%reason, "the VM cannot go on");
                self.emit(EventKind::Crashed {
                    reason: reason.to_string(),
                });
                self.internal(Input::Crash);
            }
        }
    }

    fn view(&self) -> Reply<VmView> {
        let (Some(machine), Some(state)) = (&self.machine, self.state) else {
            return Err(ApiError::no_vm());
        };
        Ok(VmView {
            state,
            stop_reason: self.stop_reason,
            pause_reason: self.pause_reason,
            resets: self.resets,
            pty: machine.pty(),
            config: machine.config().clone(),
        })
    }

    fn create(&mut self, config: VmConfig) -> Reply<Created> {
        if self
            .machine
            .as_ref()
            .is_some_and(|machine| *machine.config() == config)
        {
            return self.view().map(Created::Existing);
        }
        let step = lifecycle::step(self.state, Input::Create)?;
        self.build(config).map_err(|error| {
            tracing::warn!(%error, "the VM cannot be created");
            error.into_api_error()
        })?;
        self.enter(step.next);
        self.view().map(Created::New)
    }

    fn build(&mut self, config: VmConfig) -> Result<(), BuildError> {
        let mut machine = Machine::build(config, &self.mailbox, self.threads)?;
        self.timeline.mark_created();
        self.console.follow(Some(machine.console()));
        for (index, (disk, live)) in machine
            .config()
            .disks
            .iter()
            .zip(machine.disks())
            .enumerate()
        {
            let mailbox = self.mailbox.clone();
            let observer = Arc::new(move |stopped| {
                mailbox.send(Message::Disk(DiskMessage::Stopped { index, stopped }));
            });
            let policy = crate::machine::disks::error_policy(disk);
            live.handle.set_error_policy(policy, observer);
        }
        self.machine = Some(machine);
        self.stop_reason = None;
        self.resets = 0;
        Ok(())
    }

    fn shutdown(&mut self, request: ShutdownRequest) -> Reply<()> {
        self.input(Input::Shutdown)?;
        if self.state == Some(VmState::ShuttingDown) {
            self.set_deadline(Duration::from_millis(request.timeout_ms));
        }
        Ok(())
    }

    /// Arms the deadline; of two, the earlier one counts.
    fn set_deadline(&mut self, timeout: Duration) {
        let at = Instant::now() + timeout;
        if self.deadline_at.is_some_and(|present| present <= at) {
            return;
        }
        self.deadline_at = Some(at);
        if let Err(error) = self.deadline.set(timeout, None) {
            tracing::error!(%error, "no timer for the shutdown's deadline, forcing it now");
            self.internal(Input::Deadline);
        }
    }

    /// An input that nobody waits for an answer to.
    fn internal(&mut self, input: Input) {
        if let Err(error) = self.input(input) {
            tracing::debug!(%error, ?input, "ignored");
        }
    }

    /// Does what the lifecycle table says.
    fn input(&mut self, input: Input) -> Reply<()> {
        let step = lifecycle::step(self.state, input)?;
        match step.action {
            Action::Nothing => return Ok(()),
            // `create` builds by itself, since it needs the definition.
            Action::Build => {}
            Action::Remove => {
                self.console.follow(None);
                self.end_exchanges();
                self.jobs.forget_all();
                self.machine = None;
                self.emit(EventKind::Deleted);
            }
            Action::Run => {
                if let Some(machine) = &mut self.machine {
                    machine.run();
                    self.timeline.mark_started();
                }
            }
            Action::Pause => {
                let disk = input == Input::DiskStopped;
                if !self.pause() {
                    return Ok(());
                }
                self.pause_reason = Some(if disk {
                    PauseReason::IoError
                } else {
                    PauseReason::Requested
                });
            }
            Action::Resume => self.run_on(),
            Action::PressPowerButton => self.press_power_button(),
            Action::ResumeAndPressPowerButton => {
                self.retry_disks();
                self.run_on();
                self.press_power_button();
            }
            Action::Reset | Action::ResetParked => {
                let run = step.action == Action::Reset;
                if !self.reset(run) {
                    return Ok(());
                }
                if run {
                    self.pause_reason = None;
                }
            }
            Action::ReportFailures => self.report_failures(),
            Action::Finish(reason) => {
                self.stop_reason = Some(reason);
                if input == Input::Deadline {
                    self.emit(EventKind::ShutdownForced);
                }
                self.finish(reason);
            }
        }
        self.enter(step.next);
        Ok(())
    }

    /// Parks the processors; false if that ended the VM instead.
    fn pause(&mut self) -> bool {
        let stopped = self.machine.as_mut().map_or(Ok(()), Machine::stop);
        let Err(error) = stopped else {
            return true;
        };
        tracing::error!(%error, "the processors cannot be paused");
        self.emit(EventKind::Crashed {
            reason: format!("pause: {error}"),
        });
        self.internal(Input::Crash);
        false
    }

    fn run_on(&mut self) {
        self.pause_reason = None;
        if let Some(machine) = &mut self.machine {
            machine.resume();
        }
    }

    fn press_power_button(&self) {
        if let Some(machine) = &self.machine
            && !machine.press_power_button()
        {
            tracing::info!("the guest does not listen to its power button yet");
        }
    }

    /// Resets in place; false if that ended the VM instead.
    fn reset(&mut self, run: bool) -> bool {
        // What was kept for the guest that is gone is forgotten by its queues; nothing is to stay stopped.
        self.retry_disks();
        let Some(machine) = &mut self.machine else {
            return true;
        };
        match machine.reset(run) {
            Ok(()) => {
                self.resets += 1;
                // A guest can do nothing but reset all day.
                if self.resets.is_power_of_two() {
                    tracing::info!(resets = self.resets, "the machine was reset");
                }
                self.emit(EventKind::Reset);
                true
            }
            Err(error) => {
                tracing::error!(%error, "the machine cannot be reset");
                self.emit(EventKind::Crashed {
                    reason: format!("reset: {error}"),
                });
                self.internal(Input::Crash);
                false
            }
        }
    }

    fn finish(&mut self, reason: StopReason) {
        self.pause_reason = None;
        self.end_exchanges();
        if let Some(machine) = &mut self.machine {
            if let Err(error) = machine.stop() {
                tracing::warn!(%error, "a processor did not stop in time");
            }
            // What the guest said last is worth most.
            machine.console().drain();
        }
        self.outcome = Some(match reason {
            StopReason::PoweredOff | StopReason::Forced => Outcome::Clean,
            StopReason::Crashed => Outcome::Crashed,
        });
    }

    fn enter(&mut self, state: Option<VmState>) {
        if self.state == state {
            return;
        }
        self.state = state;
        self.published.set(state);
        if let Some(state) = state {
            tracing::info!(%state, "the VM's state changed");
            self.emit(EventKind::State {
                state,
                stop_reason: self.stop_reason,
            });
        }
    }

    fn emit(&self, kind: EventKind) {
        let since_epoch = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        let time_ms = u64::try_from(since_epoch.as_millis()).unwrap_or(u64::MAX);
        // Without a subscriber there is nobody to tell.
        let _ = self.events.send(Event { time_ms, kind });
    }

    fn metrics(&self) -> String {
        crate::metrics::render(
            self.machine.as_ref().map(Machine::metrics).as_ref(),
            self.state,
            self.resets,
            &self.timeline,
        )
    }

    fn signalled(&mut self) {
        for _ in 0..self.signals.received() {
            let forced = Duration::from_millis(0);
            match self.state {
                Some(VmState::Running | VmState::Paused) => {
                    let timeout_ms = SIGTERM_TIMEOUT.as_millis() as u64;
                    let _ = self.shutdown(ShutdownRequest { timeout_ms });
                }
                Some(VmState::ShuttingDown) => self.set_deadline(forced),
                None | Some(VmState::Created | VmState::Stopped) => {
                    self.outcome = self.outcome.or(Some(Outcome::Clean));
                }
            }
        }
    }
}

impl MutEventSubscriber for Control {
    fn process(&mut self, events: Events, _ops: &mut EventOps<'_>) {
        match events.data() {
            source::MESSAGES => {
                self.inbox.acknowledge();
                while let Some(message) = self.inbox.next() {
                    self.handle(message);
                }
            }
            source::DEADLINE if self.deadline.rang() => {
                self.deadline_at = None;
                self.internal(Input::Deadline);
            }
            source::JOBS => self.tick_jobs(),
            source::SIGNALS => self.signalled(),
            source::CONSOLE => {
                if let Some(machine) = &mut self.machine {
                    self.console.process(machine.console());
                }
            }
            _ => {}
        }
    }

    fn init(&mut self, ops: &mut EventOps<'_>) {
        let permanent = [
            (self.inbox.wake().as_raw_fd(), source::MESSAGES),
            (self.deadline.as_raw_fd(), source::DEADLINE),
            (self.signals.as_raw_fd(), source::SIGNALS),
            (self.console.as_raw_fd(), source::CONSOLE),
            (self.jobs.timer_fd(), source::JOBS),
        ];
        for (descriptor, source) in permanent {
            if let Err(error) = ops.add(Events::with_data_raw(descriptor, source, EventSet::IN)) {
                // Without these the process could be neither commanded nor ended: do not start.
                tracing::error!(?error, "the event loop cannot wait");
                self.outcome = Some(Outcome::Crashed);
            }
        }
    }
}
