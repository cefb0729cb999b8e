//! The life of a device behind its transport: activation, reset, queue reset (virtio 1.2 §2.4, §2.6.1, §3.1).
//!
//! ```text
//!             DRIVER_OK, no bus mastering yet
//!  Inactive ───────────────────────────────────> Waiting
//!    │  ▲                                          │ bus mastering on
//!    │  │ DRIVER_OK                                ▼
//!    │  └───────────────────────────────────────> Active ──── bus mastering off, or did not start ───> Halted (NEEDS_RESET)
//!    │                                             │ status = 0                                          │ status = 0
//!    └<── the device has let go of its queues ── Resetting <─────────────────────────────────────────────┘
//! ```

use std::sync::Arc;
use std::time::Duration;

use super::common::{CommonConfig, Effect, Live};
use super::interrupts::Interrupts;
use super::metrics::{VirtioPciMetrics, count};
use super::notify::DoorbellSet;
use super::spec::DeviceStatus;
use super::state::QueuePosition;
use crate::GuestMemory;
use crate::pci::bits::Command;
use crate::pci::config::ConfigSpace;
use crate::seldom::Seldom;
use crate::virtio::{
    ActivateError, Activation, ActiveQueue, Pending, VirtioDevice, VirtioInterrupt,
};

/// How often devices did not start, in the whole process.
static NOT_STARTED: Seldom = Seldom::new();

/// A [`Pending`] that several can wait for, all at once.
#[derive(Clone)]
pub(super) struct SharedPending(Arc<dyn Pending>);

impl SharedPending {
    fn new(pending: Box<dyn Pending>) -> SharedPending {
        SharedPending(pending.into())
    }
}

impl Pending for SharedPending {
    fn is_done(&self) -> bool {
        self.0.is_done()
    }

    fn wait(&self, timeout: Duration) -> bool {
        self.0.wait(timeout)
    }
}

enum Lifecycle {
    Inactive,
    /// DRIVER_OK is set, but the function may not access memory yet.
    Waiting,
    Active,
    /// The device serves nothing until it is reset; it may still be letting go.
    Halted(Option<SharedPending>),
    Resetting(SharedPending),
}

/// Everything behind the transport's lock.
pub(super) struct Registers {
    pub(super) config: ConfigSpace,
    pub(super) common: CommonConfig,
    pub(super) device: Box<dyn VirtioDevice>,
    memory: GuestMemory,
    interrupts: Arc<Interrupts>,
    doorbells: Arc<DoorbellSet>,
    metrics: Arc<VirtioPciMetrics>,
    lifecycle: Lifecycle,
    /// For each queue the reset under way.
    queue_resets: Box<[Option<Box<dyn Pending>>]>,
}

impl Registers {
    pub(super) fn new(
        config: ConfigSpace,
        device: Box<dyn VirtioDevice>,
        memory: GuestMemory,
        interrupts: Arc<Interrupts>,
        doorbells: Arc<DoorbellSet>,
        metrics: Arc<VirtioPciMetrics>,
    ) -> Registers {
        let common = CommonConfig::new(device.features(), device.queue_sizes());
        let queue_resets = common.queues().iter().map(|_| None).collect();
        Registers {
            config,
            common,
            device,
            memory,
            interrupts,
            doorbells,
            metrics,
            lifecycle: Lifecycle::Inactive,
            queue_resets,
        }
    }

    pub(super) fn is_inactive(&self) -> bool {
        matches!(self.lifecycle, Lifecycle::Inactive)
    }

    /// For each queue whether the device serves it.
    pub(super) fn served_queues(&self) -> Vec<bool> {
        let active = matches!(self.lifecycle, Lifecycle::Active);
        let queues = self.common.queues().iter().zip(&self.queue_resets);
        queues
            .map(|(queue, reset)| active && queue.enabled && reset.is_none())
            .collect()
    }

    pub(super) fn read_common(&self, offset: u64, data: &mut [u8]) {
        let queue = self.common.selected_queue();
        let reset = self.queue_resets.get(usize::from(queue));
        let live = Live {
            config_vector: self.interrupts.config_vector(),
            queue_vector: self.interrupts.queue_vector(queue),
            generation: self.interrupts.generation(),
            needs_reset: self.interrupts.device_needs_reset(),
            queue_resetting: reset.is_some_and(Option::is_some),
        };
        let offset = usize::try_from(offset).unwrap_or(usize::MAX - data.len());
        self.common.read(live, offset, data);
    }

    /// Stores a register and does what that asks for.
    pub(super) fn write_common(&mut self, offset: u64, data: &[u8]) -> Effect {
        if matches!(self.lifecycle, Lifecycle::Resetting(_)) {
            // The device did not stop in all the time it was given. Its registers stay as they are.
            count(&self.metrics.driver_errors);
            return Effect::DriverError;
        }
        let effect = match usize::try_from(offset) {
            Ok(offset) => self.common.write(offset, data),
            Err(_) => Effect::DriverError,
        };
        match effect {
            Effect::None => {}
            Effect::DriverError => count(&self.metrics.driver_errors),
            Effect::Reset => {
                self.start_reset();
                self.poll_reset();
            }
            Effect::Activate => self.activate_when_allowed(&[]),
            Effect::EnableQueue(queue) => self.enable_queue(queue),
            Effect::ResetQueue(queue) => self.start_queue_reset(queue),
            Effect::ConfigVector(vector) => self.interrupts.set_config_vector(vector),
            Effect::QueueVector(queue, vector) => self.interrupts.set_queue_vector(queue, vector),
        }
        effect
    }

    /// Starts the device after a restore, if it was running. False if it did not start.
    pub(super) fn resume(&mut self, positions: &[QueuePosition]) -> bool {
        if self.common.status().contains(DeviceStatus::DRIVER_OK) {
            if self.interrupts.device_needs_reset() {
                self.lifecycle = Lifecycle::Halted(None);
                return true;
            }
            self.activate_when_allowed(positions);
        }
        !matches!(self.lifecycle, Lifecycle::Halted(_))
    }

    /// COMMAND may have changed: starts a device that waited for bus mastering, stops one that lost it.
    pub(super) fn bus_mastering_changed(&mut self) {
        let allowed = self.config.command().contains(Command::BUS_MASTER);
        match self.lifecycle {
            Lifecycle::Waiting if allowed => self.activate(&[]),
            Lifecycle::Active if !allowed => {
                // Queue positions are lost with the reset, so the device cannot go on by itself when mastering returns.
                count(&self.metrics.driver_errors);
                self.interrupts.needs_reset();
                self.interrupts.set_live(false);
                let pending = SharedPending::new(self.device.reset());
                self.lifecycle = Lifecycle::Halted(Some(pending));
                self.forget_queue_resets();
            }
            _ => {}
        }
    }

    fn activate_when_allowed(&mut self, positions: &[QueuePosition]) {
        if self.config.command().contains(Command::BUS_MASTER) {
            self.activate(positions);
        } else {
            self.lifecycle = Lifecycle::Waiting;
        }
    }

    fn activate(&mut self, positions: &[QueuePosition]) {
        self.interrupts.set_live(true);
        let result = self.start_device(positions);
        match result {
            Ok(()) => {
                count(&self.metrics.activations);
                self.lifecycle = Lifecycle::Active;
            }
            Err(error) => {
                // A driver that leaves out a queue can do this as often as it likes.
                if let Some(times) = NOT_STARTED.again() {
                    let device = self.device.device_type();
                    tracing::warn!(?device, times, %error, "a device did not start");
                }
                self.lifecycle = Lifecycle::Halted(None);
                self.interrupts.needs_reset();
            }
        }
    }

    fn start_device(&mut self, positions: &[QueuePosition]) -> Result<(), ActivateError> {
        let mut queues = Vec::new();
        for (index, registers) in (0_u16..).zip(self.common.queues()) {
            if registers.enabled {
                let position = positions.iter().find(|position| position.index == index);
                queues.push(self.active_queue(index, position)?);
            }
        }
        self.device.activate(Activation {
            memory: Arc::clone(&self.memory),
            features: self.common.negotiated(),
            queues,
            interrupt: Arc::clone(&self.interrupts) as Arc<dyn VirtioInterrupt>,
        })
    }

    fn active_queue(
        &self,
        index: u16,
        position: Option<&QueuePosition>,
    ) -> Result<ActiveQueue, ActivateError> {
        let (next_avail, next_used) = position.map_or((0, 0), |at| (at.next_avail, at.next_used));
        let registers = &self.common.queues()[usize::from(index)];
        let queue = registers
            .build(
                &self.memory,
                self.common.negotiated(),
                next_avail,
                next_used,
            )
            .map_err(|error| ActivateError::Host("a queue", std::io::Error::other(error)))?;
        let doorbell = self
            .doorbells
            .fresh(index)
            .map_err(|error| ActivateError::Host("a doorbell", error))?;
        Ok(ActiveQueue {
            index,
            queue,
            doorbell,
            tracking: None,
        })
    }

    /// Checks a queue's registers and enables it; a running device gets it at once.
    fn enable_queue(&mut self, index: u16) {
        if self.queue_resets[usize::from(index)].is_some() {
            // Registers of a queue are frozen until its reset has ended.
            count(&self.metrics.driver_errors);
            return;
        }
        let running = matches!(self.lifecycle, Lifecycle::Active);
        let enabled = if running {
            self.active_queue(index, None)
                .and_then(|queue| self.device.enable_queue(queue))
        } else {
            let registers = &self.common.queues()[usize::from(index)];
            registers
                .build(&self.memory, 0, 0, 0)
                .map(drop)
                .map_err(|error| ActivateError::Host("a queue", std::io::Error::other(error)))
        };
        match enabled {
            Ok(()) => self.common.set_enabled(index),
            Err(error) => {
                tracing::debug!(queue = index, %error, "the driver's queue cannot be used");
                count(&self.metrics.driver_errors);
                self.interrupts.needs_reset();
            }
        }
    }

    fn start_queue_reset(&mut self, index: u16) {
        let at = usize::from(index);
        if self.queue_resets[at].is_some() {
            return;
        }
        count(&self.metrics.queue_resets);
        let enabled = self.common.queues()[at].enabled;
        if enabled && matches!(self.lifecycle, Lifecycle::Active) {
            self.queue_resets[at] = Some(self.device.reset_queue(index));
            self.poll_queue_resets();
        } else {
            self.finish_queue_reset(index);
        }
    }

    /// Ends queue resets that the device has answered.
    pub(super) fn poll_queue_resets(&mut self) {
        for index in 0..self.queue_resets.len() {
            let reset = &mut self.queue_resets[index];
            if reset.as_ref().is_some_and(|pending| pending.is_done()) {
                *reset = None;
                self.finish_queue_reset(index as u16);
            }
        }
    }

    fn finish_queue_reset(&mut self, index: u16) {
        self.common.reset_queue(index);
        self.interrupts
            .set_queue_vector(index, super::spec::NO_VECTOR);
    }

    /// Begins a device reset. The registers keep their values, so that status reads non-zero, until [`Registers::poll_reset`] finds it
    /// done.
    pub(super) fn start_reset(&mut self) {
        count(&self.metrics.resets);
        self.interrupts.set_live(false);
        self.forget_queue_resets();
        let pending = match std::mem::replace(&mut self.lifecycle, Lifecycle::Inactive) {
            Lifecycle::Active => Some(SharedPending::new(self.device.reset())),
            Lifecycle::Halted(pending) => pending,
            Lifecycle::Resetting(pending) => Some(pending),
            Lifecycle::Inactive | Lifecycle::Waiting => None,
        };
        match pending {
            Some(pending) => self.lifecycle = Lifecycle::Resetting(pending),
            None => self.finish_reset(),
        }
    }

    /// Ends a reset that the device has answered; returns one that it has not.
    pub(super) fn poll_reset(&mut self) -> Option<SharedPending> {
        let Lifecycle::Resetting(pending) = &self.lifecycle else {
            return None;
        };
        if !pending.is_done() {
            return Some(pending.clone());
        }
        self.finish_reset();
        None
    }

    fn finish_reset(&mut self) {
        self.lifecycle = Lifecycle::Inactive;
        self.common.reset();
        self.interrupts.device_reset();
    }

    /// A device reset covers resets of single queues.
    fn forget_queue_resets(&mut self) {
        self.queue_resets.fill_with(|| None);
    }
}
