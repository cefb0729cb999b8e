//! How a virtio PCI function interrupts the guest (virtio 1.2 §4.1.4.5, §4.1.5.3–5.4).
//!
//! ```text
//! device thread ── queue(i) ──> MSI-X on?  ──yes──> vector of queue i ──> Msix (no lock) ──> irqfd
//!                                  │no
//!                                  └──> ISR |= 1, INTx# asserted until the driver reads ISR
//! ```
//!
//! Device threads call while vCPU threads reprogram; only the INTx path takes a lock.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU16, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::spec::{ISR_CONFIG, ISR_QUEUE, NO_VECTOR};
use crate::interrupt::IrqLine;
use crate::pci::msix::{MessageControl, Msix};
use crate::virtio::VirtioInterrupt;

pub(super) struct Interrupts {
    pub(super) msix: Msix,
    /// Cleared from the start of a reset to the next activation: a device that is about to stop stays silent.
    live: AtomicBool,
    msix_enabled: AtomicBool,
    config_vector: AtomicU16,
    queue_vectors: Box<[AtomicU16]>,
    generation: AtomicU8,
    needs_reset: AtomicBool,
    intx: Mutex<Intx>,
}

struct Intx {
    line: Arc<dyn IrqLine>,
    isr: u8,
    /// COMMAND's Interrupt Disable.
    disabled: bool,
    asserted: bool,
}

impl Interrupts {
    pub(super) fn new(msix: Msix, queues: usize, line: Arc<dyn IrqLine>) -> Interrupts {
        Interrupts {
            msix,
            live: AtomicBool::new(false),
            msix_enabled: AtomicBool::new(false),
            config_vector: AtomicU16::new(NO_VECTOR),
            queue_vectors: (0..queues).map(|_| AtomicU16::new(NO_VECTOR)).collect(),
            generation: AtomicU8::new(0),
            needs_reset: AtomicBool::new(false),
            intx: Mutex::new(Intx {
                line,
                isr: 0,
                disabled: false,
                asserted: false,
            }),
        }
    }

    /// Lets the device's interrupts through, or holds them off.
    pub(super) fn set_live(&self, live: bool) {
        self.live.store(live, Ordering::SeqCst);
    }

    /// Applies COMMAND and MSI-X Message Control.
    pub(super) fn set_control(&self, control: MessageControl, may_send: bool, intx_disabled: bool) {
        self.msix_enabled.store(control.enabled, Ordering::SeqCst);
        // A function that may not master the bus cannot send messages; they wait as if masked.
        self.msix.set_control(MessageControl {
            function_masked: control.function_masked || !may_send,
            ..control
        });
        let mut intx = self.intx();
        intx.disabled = intx_disabled;
        self.drive(&mut intx);
    }

    pub(super) fn config_vector(&self) -> u16 {
        self.config_vector.load(Ordering::SeqCst)
    }

    pub(super) fn queue_vector(&self, queue: u16) -> u16 {
        self.queue_vectors
            .get(usize::from(queue))
            .map_or(NO_VECTOR, |vector| vector.load(Ordering::SeqCst))
    }

    /// Maps configuration changes to a vector; one that does not exist reads back as NO_VECTOR (§4.1.5.1.2.1).
    pub(super) fn set_config_vector(&self, vector: u16) {
        let vector = self.existing(vector);
        self.config_vector.store(vector, Ordering::SeqCst);
    }

    pub(super) fn set_queue_vector(&self, queue: u16, vector: u16) {
        let vector = self.existing(vector);
        if let Some(slot) = self.queue_vectors.get(usize::from(queue)) {
            slot.store(vector, Ordering::SeqCst);
        }
    }

    pub(super) fn generation(&self) -> u8 {
        self.generation.load(Ordering::SeqCst)
    }

    pub(super) fn set_generation(&self, generation: u8) {
        self.generation.store(generation, Ordering::SeqCst);
    }

    pub(super) fn device_needs_reset(&self) -> bool {
        self.needs_reset.load(Ordering::SeqCst)
    }

    /// ISR status, which reading clears (§4.1.4.5.1).
    pub(super) fn take_isr(&self) -> u8 {
        let mut intx = self.intx();
        let isr = std::mem::take(&mut intx.isr);
        self.drive(&mut intx);
        isr
    }

    pub(super) fn isr(&self) -> u8 {
        self.intx().isr
    }

    /// Whether INTx# is wanted, disabled or not: STATUS bit 3.
    pub(super) fn intx_wanted(&self) -> bool {
        self.isr() != 0 && !self.msix_enabled.load(Ordering::SeqCst)
    }

    /// What a device reset does (§4.1.4.3.1): no vectors, nothing pending. MSI-X itself is PCI's and stays.
    pub(super) fn device_reset(&self) {
        self.set_live(false);
        self.needs_reset.store(false, Ordering::SeqCst);
        self.config_vector.store(NO_VECTOR, Ordering::SeqCst);
        for vector in &self.queue_vectors {
            vector.store(NO_VECTOR, Ordering::SeqCst);
        }
        let mut intx = self.intx();
        intx.isr = 0;
        self.drive(&mut intx);
    }

    /// Takes saved ISR and DEVICE_NEEDS_RESET.
    pub(super) fn restore(&self, isr: u8, needs_reset: bool) {
        self.needs_reset.store(needs_reset, Ordering::SeqCst);
        let mut intx = self.intx();
        intx.isr = isr & (ISR_QUEUE | ISR_CONFIG);
        self.drive(&mut intx);
    }

    fn existing(&self, vector: u16) -> u16 {
        if usize::from(vector) < self.msix.len() {
            vector
        } else {
            NO_VECTOR
        }
    }

    fn raise(&self, bit: u8) {
        let mut intx = self.intx();
        intx.isr |= bit;
        self.drive(&mut intx);
    }

    fn drive(&self, intx: &mut Intx) {
        let wanted = intx.isr != 0 && !intx.disabled && !self.msix_enabled.load(Ordering::SeqCst);
        if wanted != intx.asserted {
            intx.asserted = wanted;
            intx.line.set(wanted);
        }
    }

    fn signal_config(&self) {
        if !self.live.load(Ordering::SeqCst) {
            return;
        }
        // ISR tells of configuration changes even with MSI-X (§4.1.4.5.1).
        self.raise(ISR_CONFIG);
        if self.msix_enabled.load(Ordering::SeqCst) {
            self.msix.trigger(self.config_vector());
        }
    }

    fn intx(&self) -> MutexGuard<'_, Intx> {
        self.intx.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl VirtioInterrupt for Interrupts {
    fn queue(&self, index: u16) {
        if !self.live.load(Ordering::SeqCst) {
            return;
        }
        if self.msix_enabled.load(Ordering::SeqCst) {
            // NO_VECTOR is no vector of the table, so nothing is sent.
            self.msix.trigger(self.queue_vector(index));
        } else {
            self.raise(ISR_QUEUE);
        }
    }

    fn config(&self) {
        self.generation.fetch_add(1, Ordering::SeqCst);
        self.signal_config();
    }

    fn needs_reset(&self) {
        self.needs_reset.store(true, Ordering::SeqCst);
        self.signal_config();
    }
}
