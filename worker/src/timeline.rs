//! What happened to a worker, and when.

use std::time::{Duration, Instant};

use serde::{Serialize, Serializer};

/// Something that happened while a worker was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Step {
    /// Its disk is there.
    Overlay,
    /// Its seed and the files that describe it are there.
    Seed,
    /// Both are durable, and the worker is listed.
    Durable,
    /// The VMM's process answers and has built the machine.
    Vmm,
    /// Its tap is on the bridge.
    Tap,
    /// Its processors run.
    Started,
    /// The kernel speaks.
    Kernel,
    /// cloud-init works on the seed.
    CloudInit,
    /// All commands ran; there was no cluster to join.
    Configured,
    /// It joined its cluster.
    Joined,
}

impl Step {
    /// As a person reads it.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::Overlay => "overlay",
            Self::Seed => "seed",
            Self::Durable => "durable",
            Self::Vmm => "vmm",
            Self::Tap => "tap",
            Self::Started => "started",
            Self::Kernel => "kernel",
            Self::CloudInit => "cloud-init",
            Self::Configured => "configured",
            Self::Joined => "joined",
        }
    }
}

/// A step and when it was reached.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Reached {
    /// The step.
    pub step: Step,
    /// How long after the beginning, milliseconds.
    #[serde(rename = "at_ms", serialize_with = "milliseconds")]
    pub at: Duration,
}

fn milliseconds<S: Serializer>(at: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    // Microseconds are what the host can tell; more digits would be noise.
    serializer.serialize_f64((at.as_secs_f64() * 1e6).round() / 1e3)
}

/// Who wants to know while it happens.
pub trait Observer {
    /// A step was reached.
    fn reached(&mut self, reached: Reached);
    /// The guest wrote to its console.
    fn console(&mut self, bytes: &[u8]);
}

/// Everything that happened so far.
pub(crate) struct Timeline<'a> {
    began: Instant,
    reached: Vec<Reached>,
    observer: &'a mut dyn Observer,
}

impl<'a> Timeline<'a> {
    pub(crate) fn new(observer: &'a mut dyn Observer) -> Self {
        Self {
            began: Instant::now(),
            reached: Vec::new(),
            observer,
        }
    }

    pub(crate) fn elapsed(&self) -> Duration {
        self.began.elapsed()
    }

    pub(crate) fn reach(&mut self, step: Step) {
        self.reach_at(step, Instant::now());
    }

    /// Notes a step the first time it is reached; a guest that reboots reaches some again.
    pub(crate) fn reach_at(&mut self, step: Step, when: Instant) {
        if self.reached.iter().any(|reached| reached.step == step) {
            return;
        }
        let reached = Reached {
            step,
            at: when.saturating_duration_since(self.began),
        };
        self.reached.push(reached);
        self.observer.reached(reached);
    }

    pub(crate) fn console(&mut self, bytes: &[u8]) {
        self.observer.console(bytes);
    }

    pub(crate) fn finish(self) -> Vec<Reached> {
        self.reached
    }
}
