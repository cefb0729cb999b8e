//! One vCPU: its thread, its KVM_RUN loop, and how the control thread commands it.
//!
//! ```text
//!            Run, Resume               Pause, power request, crash
//!  parked ───────────▶ running (KVM_RUN) ───────────▶ parked ── Reset ──▶ parked       Exit: thread ends
//! ```
//!
//! A vCPU is parked unless told to run. While parked its thread waits for commands and owns the vCPU's registers; nobody else touches
//! them. While it runs, exits are dispatched to the buses on this thread. It parks by itself right after an access by which the guest
//! reset or turned off the machine, so that the guest executes nothing beyond that access.

pub mod exits;
pub mod power_on;
pub mod run_page;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use drover_devices::bus::Bus;
use drover_devices::platform::{PowerRequest, PowerSink};
use drover_devices::seldom::Seldom;
use kvm_ioctls::{VcpuExit, VcpuFd, VmFd};
use vmm_sys_util::signal::Killable;

use self::exits::{ExitCounters, count};
use self::power_on::PowerOnState;
use self::run_page::{Attached, PageView, RunPage, kick_signal};
use crate::kvm::KvmError;
use crate::threads::{Role, ThreadStarter};

/// Resets by triple fault, in the whole process.
static TRIPLE_FAULTS: Seldom = Seldom::new();

/// Why a vCPU cannot go on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CrashReason {
    /// KVM gave up emulating.
    #[error("vCPU {vcpu}: KVM internal error {suberror} ({}){}",
        internal_error_name(*suberror),
        data.map_or_else(String::new, |data| format!(", data {data:#x}")))]
    Internal {
        /// Which.
        vcpu: u8,
        /// KVM_INTERNAL_ERROR_…
        suberror: u32,
        /// The kernel's first datum.
        data: Option<u64>,
    },
    /// The processor refused the guest's state.
    #[error("vCPU {vcpu}: the processor refused to enter the guest, reason {reason:#x}")]
    FailEntry {
        /// Which.
        vcpu: u8,
        /// The hardware's reason.
        reason: u64,
    },
    /// KVM_RUN itself failed.
    #[error("vCPU {vcpu}: KVM_RUN: {error}")]
    Run {
        /// Which.
        vcpu: u8,
        /// The kernel's answer.
        error: String,
    },
    /// An exit that nothing here asks for.
    #[error("vCPU {vcpu}: unexpected exit: {exit}")]
    Unexpected {
        /// Which.
        vcpu: u8,
        /// The exit.
        exit: String,
    },
    /// The state for a reboot could not be set.
    #[error("vCPU {vcpu}: {error}")]
    Reset {
        /// Which.
        vcpu: u8,
        /// What failed.
        error: String,
    },
}

fn internal_error_name(suberror: u32) -> &'static str {
    match suberror {
        1 => "emulation failed",
        2 => "simultaneous exceptions",
        3 => "unexpected exit while delivering an event",
        4 => "unexpected exit reason",
        _ => "unknown",
    }
}

/// Brings a vCPU that has its power-on state into the state in which its boot protocol starts it.
pub trait BootState: Send + Sync {
    /// Sets up vCPU `index`.
    ///
    /// # Errors
    /// The kernel refused.
    fn apply(&self, index: u8, vcpu: &VcpuFd) -> Result<(), KvmError>;
}

/// What the vCPUs of a machine share.
pub struct Surroundings {
    /// The VM that the vCPUs belong to.
    pub vm: Arc<VmFd>,
    /// Port space.
    pub ports: Arc<Bus>,
    /// Device memory.
    pub mmio: Arc<Bus>,
    /// Takes triple faults, as resets.
    pub power: Arc<dyn PowerSink>,
    /// Set once the guest asked for a reset or power-off: running vCPUs park at their next exit.
    pub park: Arc<AtomicBool>,
    /// Told when a vCPU cannot go on.
    pub crashed: Box<dyn Fn(CrashReason) + Send + Sync>,
    /// The MSRs to keep for a reset.
    pub msr_indices: Vec<u32>,
}

enum Command {
    Run,
    /// As run, after a pause that the guest's watchdogs must not take for a hang.
    Resume,
    /// Park, and say so.
    Pause(Sender<u8>),
    /// Return to power-on state, then apply the boot state, then say whether it worked.
    Reset(Arc<dyn BootState>, Sender<Result<(), CrashReason>>),
    Exit,
}

struct Vcpu {
    index: u8,
    commands: Sender<Command>,
    page: Arc<RunPage>,
    thread: Option<JoinHandle<()>>,
    counters: Arc<ExitCounters>,
}

/// A vCPU did not answer in time, or its thread is gone.
#[derive(Debug, thiserror::Error)]
pub enum VcpuError {
    /// No answer before the deadline.
    #[error("{missing} of {count} vCPUs did not stop within {} ms", timeout.as_millis())]
    Timeout {
        /// vCPUs without an answer.
        missing: usize,
        /// All vCPUs.
        count: usize,
        /// How long they were given.
        timeout: Duration,
    },
    /// A vCPU could not be set up.
    #[error(transparent)]
    Crash(#[from] CrashReason),
    /// The thread could not be started.
    #[error("cannot start a vCPU thread: {0}")]
    Thread(#[source] std::io::Error),
}

/// All vCPUs of a machine, as the control thread commands them.
pub struct Vcpus {
    all: Vec<Vcpu>,
}

/// How long a vCPU may take to leave the guest. It does so within microseconds unless the host is overloaded.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

impl Vcpus {
    /// Starts a parked thread for each of `vcpus`, whose CPUID is set. `boot` is applied before this returns.
    ///
    /// # Errors
    /// A thread cannot be started, or the kernel refuses the state.
    pub fn start(
        vcpus: Vec<VcpuFd>,
        surroundings: &Arc<Surroundings>,
        threads: &ThreadStarter,
        boot: &Arc<dyn BootState>,
    ) -> Result<Self, VcpuError> {
        let mut all = Self {
            all: Vec::with_capacity(vcpus.len()),
        };
        let (replies, outcome) = channel();
        for (index, fd) in (0u8..).zip(vcpus) {
            let (commands, inbox) = channel();
            let page = Arc::new(RunPage::default());
            let counters = Arc::new(ExitCounters::default());
            let runner = Runner {
                index,
                surroundings: surroundings.clone(),
                inbox,
                counters: counters.clone(),
            };
            let (its_page, its_boot, its_reply) = (page.clone(), boot.clone(), replies.clone());
            let thread = threads
                .start(&format!("vcpu-{index}"), Role::Vcpu, move || {
                    runner.body(fd, &its_page, &*its_boot, &its_reply);
                })
                .map_err(VcpuError::Thread)?;
            all.all.push(Vcpu {
                index,
                commands,
                page,
                thread: Some(thread),
                counters,
            });
        }
        drop(replies);
        all.collect(&outcome, |reply: Result<(), CrashReason>| reply)?;
        Ok(all)
    }

    /// How many.
    pub fn count(&self) -> usize {
        self.all.len()
    }

    /// Exit counters, by vCPU.
    pub fn counters(&self) -> Vec<(u8, Arc<ExitCounters>)> {
        self.all
            .iter()
            .map(|vcpu| (vcpu.index, vcpu.counters.clone()))
            .collect()
    }

    /// Lets all of them run.
    pub fn run(&self) {
        for vcpu in &self.all {
            // The others first would gain nothing: an application processor waits in the kernel until the boot processor wakes it.
            let _ = vcpu.commands.send(Command::Run);
        }
    }

    /// Lets all of them run on after a pause.
    pub fn resume(&self) {
        for vcpu in &self.all {
            let _ = vcpu.commands.send(Command::Resume);
        }
    }

    /// Parks all of them; when this returns, no guest code runs and no exit is being handled.
    ///
    /// # Errors
    /// One of them did not park in time.
    pub fn pause(&self) -> Result<(), VcpuError> {
        let (reply, answers) = channel();
        for vcpu in &self.all {
            let _ = vcpu.commands.send(Command::Pause(reply.clone()));
            vcpu.kick();
        }
        drop(reply);
        self.collect(&answers, |_index: u8| Ok(()))
    }

    /// Brings all of them, parked, to where `boot` starts them.
    ///
    /// # Errors
    /// The kernel refused, or one of them did not answer in time.
    pub fn reset(&self, boot: &Arc<dyn BootState>) -> Result<(), VcpuError> {
        let (reply, answers) = channel();
        for vcpu in &self.all {
            let _ = vcpu
                .commands
                .send(Command::Reset(boot.clone(), reply.clone()));
        }
        drop(reply);
        self.collect(&answers, |answer| answer)
    }

    fn collect<T>(
        &self,
        answers: &Receiver<T>,
        check: impl Fn(T) -> Result<(), CrashReason>,
    ) -> Result<(), VcpuError> {
        let deadline = Instant::now() + ANSWER_TIMEOUT;
        for done in 0..self.all.len() {
            let left = deadline.saturating_duration_since(Instant::now());
            match answers.recv_timeout(left) {
                Ok(answer) => check(answer)?,
                Err(_) => {
                    return Err(VcpuError::Timeout {
                        missing: self.all.len() - done,
                        count: self.all.len(),
                        timeout: ANSWER_TIMEOUT,
                    });
                }
            }
        }
        Ok(())
    }
}

impl Drop for Vcpus {
    fn drop(&mut self) {
        for vcpu in &self.all {
            let _ = vcpu.commands.send(Command::Exit);
            vcpu.kick();
        }
        for vcpu in &mut self.all {
            if let Some(thread) = vcpu.thread.take() {
                let _ = thread.join();
            }
        }
    }
}

impl Vcpu {
    fn kick(&self) {
        self.page.request_exit();
        if let Some(thread) = &self.thread {
            // Fails only once the thread has ended, when there is nobody to kick.
            let _ = thread.kill(kick_signal());
        }
    }
}

/// The vCPU's thread.
struct Runner {
    index: u8,
    surroundings: Arc<Surroundings>,
    inbox: Receiver<Command>,
    counters: Arc<ExitCounters>,
}

/// Why the KVM_RUN loop ended.
enum Parked {
    ByCommand(Command),
    /// The guest asked for a reset or power-off, or crashed: wait for what control makes of it.
    ByGuest,
}

impl Runner {
    fn body(
        self,
        fd: VcpuFd,
        page: &RunPage,
        boot: &dyn BootState,
        started: &Sender<Result<(), CrashReason>>,
    ) {
        let mut vcpu = Attached::new(fd, page);
        let power_on = PowerOnState::capture(
            &self.surroundings.vm,
            vcpu.fd(),
            &self.surroundings.msr_indices,
        );
        let power_on = power_on.and_then(|state| boot.apply(self.index, vcpu.fd()).map(|()| state));
        let power_on = match power_on {
            Ok(state) => state,
            Err(error) => {
                let _ = started.send(Err(self.reset_failed(&error)));
                return;
            }
        };
        let _ = started.send(Ok(()));
        let mut next = None;
        loop {
            // The channel closes when the machine is dropped.
            let Some(command) = next.take().or_else(|| self.inbox.recv().ok()) else {
                return;
            };
            match command {
                Command::Run | Command::Resume => {
                    if matches!(command, Command::Resume) {
                        // EINVAL: this guest has no kvm-clock to be told.
                        let _ = vcpu.fd().kvmclock_ctrl();
                    }
                    match self.run(&mut vcpu) {
                        Parked::ByCommand(command) => next = Some(command),
                        Parked::ByGuest => {}
                    }
                }
                Command::Pause(reply) => {
                    let _ = reply.send(self.index);
                }
                Command::Reset(boot, reply) => {
                    let outcome = power_on
                        .restore(&self.surroundings.vm, vcpu.fd())
                        .and_then(|()| boot.apply(self.index, vcpu.fd()));
                    let _ = reply.send(outcome.map_err(|error| self.reset_failed(&error)));
                }
                Command::Exit => return,
            }
        }
    }

    fn reset_failed(&self, error: &KvmError) -> CrashReason {
        CrashReason::Reset {
            vcpu: self.index,
            error: error.to_string(),
        }
    }

    fn run(&self, vcpu: &mut Attached<'_>) -> Parked {
        let (fd, page) = vcpu.split();
        let Surroundings {
            ports, mmio, park, ..
        } = &*self.surroundings;
        let counters = &*self.counters;
        loop {
            match fd.run() {
                Ok(VcpuExit::IoOut(port, data)) => {
                    count(&counters.port_out);
                    for chunk in data.chunks(page.port_access_width()) {
                        ports.write(u64::from(port), chunk);
                    }
                }
                Ok(VcpuExit::IoIn(port, data)) => {
                    count(&counters.port_in);
                    for chunk in data.chunks_mut(page.port_access_width()) {
                        ports.read(u64::from(port), chunk);
                    }
                }
                Ok(VcpuExit::MmioRead(address, data)) => {
                    count(&counters.mmio_read);
                    mmio.read(address, data);
                }
                Ok(VcpuExit::MmioWrite(address, data)) => {
                    count(&counters.mmio_write);
                    mmio.write(address, data);
                }
                Ok(VcpuExit::Intr) => {
                    if let Some(parked) = self.interrupted(&page) {
                        return parked;
                    }
                }
                Ok(VcpuExit::Shutdown) => {
                    count(&counters.shutdown);
                    if let Some(times) = TRIPLE_FAULTS.again() {
                        let vcpu = self.index;
                        tracing::info!(vcpu, times, "triple fault, the machine resets");
                    }
                    self.surroundings.power.request(PowerRequest::Reset);
                    return Parked::ByGuest;
                }
                Ok(VcpuExit::InternalError) => {
                    let details = page.internal_error();
                    return self.crash(CrashReason::Internal {
                        vcpu: self.index,
                        suberror: details.suberror,
                        data: details.data,
                    });
                }
                Ok(VcpuExit::FailEntry(reason, _cpu)) => {
                    return self.crash(CrashReason::FailEntry {
                        vcpu: self.index,
                        reason,
                    });
                }
                Ok(exit) => {
                    count(&counters.other);
                    let exit = format!("{exit:?}");
                    return self.crash(CrashReason::Unexpected {
                        vcpu: self.index,
                        exit,
                    });
                }
                // EAGAIN: an application processor was kicked before it was started.
                Err(error) if matches!(error.errno(), libc::EINTR | libc::EAGAIN) => {
                    if let Some(parked) = self.interrupted(&page) {
                        return parked;
                    }
                }
                Err(error) => {
                    let error = error.to_string();
                    return self.crash(CrashReason::Run {
                        vcpu: self.index,
                        error,
                    });
                }
            }
            if park.load(Ordering::Acquire) {
                return Parked::ByGuest;
            }
        }
    }

    /// After a kick: what control wants, if it wants anything.
    fn interrupted(&self, page: &PageView<'_>) -> Option<Parked> {
        count(&self.counters.interrupted);
        page.clear_exit_request();
        self.inbox.try_recv().ok().map(Parked::ByCommand)
    }

    fn crash(&self, reason: CrashReason) -> Parked {
        (self.surroundings.crashed)(reason);
        Parked::ByGuest
    }
}
