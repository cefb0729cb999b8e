//! Interrupts into the guest: level lines of the I/O APIC, and message-signalled vectors through irqfd.
//!
//! ```text
//!  GSI 0..15   PIC pin 0..15 and I/O APIC pin          lines: KVM_IRQ_LINE, shared ones asserted while any share is
//!  GSI 16..23  I/O APIC pin 16..23 (PCI INTx)
//!  GSI 24..    one MSI route for each vector           vectors: write to an event descriptor (irqfd)
//! ```
//!
//! KVM_SET_GSI_ROUTING replaces the whole table and waits for every interrupt in flight, so it is the one slow call here. A guest
//! programs its vectors one after the other long before any of them fires. Hence **routes are written lazily**: programming a vector
//! marks the table dirty, and the first vector that fires afterwards writes all changes with one call.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use drover_devices::interrupt::{InterruptController, IrqLine, MsiMessage, MsiVector};
use kvm_bindings::{
    KVM_IRQ_ROUTING_IRQCHIP, KVM_IRQ_ROUTING_MSI, KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER,
    KVM_IRQCHIP_PIC_SLAVE, KvmIrqRouting, kvm_irq_routing_entry,
    kvm_irq_routing_entry__bindgen_ty_1, kvm_irq_routing_irqchip, kvm_irq_routing_msi,
};
use kvm_ioctls::{Cap, VmFd};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

/// Inputs of the I/O APIC.
const IOAPIC_PINS: u32 = 24;
/// Pins of both PICs together.
const PIC_PINS: u32 = 16;

/// [`InterruptController`] over KVM's in-kernel chips.
pub struct KvmInterrupts {
    shared: Arc<Shared>,
}

struct Shared {
    vm: Arc<VmFd>,
    lines: Mutex<[u32; IOAPIC_PINS as usize]>,
    vectors: Mutex<VectorTable>,
    /// Set under the `vectors` lock whenever the kernel's table no longer says what ours says.
    dirty: AtomicBool,
    route_writes: AtomicU64,
}

struct VectorTable {
    /// Vector of GSI `IOAPIC_PINS + index`; `None` where the GSI is free.
    slots: Vec<Option<Slot>>,
    limit: usize,
}

struct Slot {
    event: Arc<EventFd>,
    message: Option<MsiMessage>,
    irqfd: bool,
}

/// A lock's content even if another thread panicked while it held it: these tables are valid at every step.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl KvmInterrupts {
    /// Interrupts of `vm`, whose chips exist already.
    pub fn new(vm: Arc<VmFd>) -> Self {
        let routes = usize::try_from(vm.check_extension_int(Cap::IrqRouting)).unwrap_or(0);
        let limit = routes.saturating_sub((IOAPIC_PINS + PIC_PINS) as usize);
        let vectors = VectorTable {
            slots: Vec::new(),
            limit,
        };
        Self {
            shared: Arc::new(Shared {
                vm,
                lines: Mutex::new([0; IOAPIC_PINS as usize]),
                vectors: Mutex::new(vectors),
                // The kernel starts with `chip_routes`.
                dirty: AtomicBool::new(false),
                route_writes: AtomicU64::new(0),
            }),
        }
    }

    /// An event descriptor each write to which is one edge on the I/O APIC input `gsi`.
    ///
    /// # Errors
    /// The kernel refused, or no more descriptors.
    pub fn edge(&self, gsi: u32) -> io::Result<EventFd> {
        let event = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?;
        self.shared.vm.register_irqfd(&event, gsi)?;
        Ok(event)
    }

    /// How often the kernel's routing table was written.
    pub fn route_writes(&self) -> u64 {
        self.shared.route_writes.load(Ordering::Relaxed)
    }
}

impl InterruptController for KvmInterrupts {
    fn line(&self, gsi: u32) -> Arc<dyn IrqLine> {
        Arc::new(KvmLine {
            shared: self.shared.clone(),
            gsi: gsi.min(IOAPIC_PINS - 1),
            asserted: AtomicBool::new(false),
        })
    }

    fn msi_vectors(&self, count: u16) -> io::Result<Vec<Arc<dyn MsiVector>>> {
        let mut table = lock(&self.shared.vectors);
        let mut vectors: Vec<Arc<dyn MsiVector>> = Vec::with_capacity(usize::from(count));
        for _ in 0..count {
            let event = Arc::new(EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?);
            let slot = Slot {
                event: event.clone(),
                message: None,
                irqfd: false,
            };
            let Some(index) = table.insert(slot) else {
                // The vectors made so far lock the table when they are dropped.
                drop(table);
                return Err(io::Error::other(
                    "the kernel's interrupt routing table is full",
                ));
            };
            vectors.push(Arc::new(KvmVector {
                shared: self.shared.clone(),
                index,
                event,
            }));
        }
        Ok(vectors)
    }
}

impl VectorTable {
    fn insert(&mut self, slot: Slot) -> Option<usize> {
        if let Some(free) = self.slots.iter().position(Option::is_none) {
            self.slots[free] = Some(slot);
            return Some(free);
        }
        if self.slots.len() >= self.limit {
            return None;
        }
        self.slots.push(Some(slot));
        Some(self.slots.len() - 1)
    }
}

fn gsi_of(index: usize) -> u32 {
    IOAPIC_PINS + index as u32
}

impl Shared {
    /// Writes the routing table if it changed since it was last written.
    fn flush_routes(&self) -> io::Result<()> {
        let mut table = lock(&self.vectors);
        if !self.dirty.load(Ordering::Acquire) {
            return Ok(());
        }
        let mut entries = chip_routes();
        entries.extend(table.slots.iter().enumerate().filter_map(|(index, slot)| {
            let message = slot.as_ref()?.message?;
            Some(msi_route(gsi_of(index), message))
        }));
        let routing = KvmIrqRouting::from_entries(&entries)
            .map_err(|error| io::Error::other(format!("interrupt routes: {error:?}")))?;
        self.vm.set_gsi_routing(&routing)?;
        self.route_writes.fetch_add(1, Ordering::Relaxed);
        for (index, slot) in table.slots.iter_mut().enumerate() {
            if let Some(slot) = slot
                && slot.message.is_some()
                && !slot.irqfd
            {
                self.vm.register_irqfd(&slot.event, gsi_of(index))?;
                slot.irqfd = true;
            }
        }
        self.dirty.store(false, Ordering::Release);
        Ok(())
    }
}

/// Routes of the interrupt chips: the kernel's defaults, which each write of the table has to repeat.
fn chip_routes() -> Vec<kvm_irq_routing_entry> {
    let pic = (0..PIC_PINS).map(|gsi| {
        let chip = if gsi < 8 {
            KVM_IRQCHIP_PIC_MASTER
        } else {
            KVM_IRQCHIP_PIC_SLAVE
        };
        chip_route(gsi, chip, gsi % 8)
    });
    let ioapic = (0..IOAPIC_PINS).map(|gsi| chip_route(gsi, KVM_IRQCHIP_IOAPIC, gsi));
    pic.chain(ioapic).collect()
}

fn chip_route(gsi: u32, irqchip: u32, pin: u32) -> kvm_irq_routing_entry {
    kvm_irq_routing_entry {
        gsi,
        type_: KVM_IRQ_ROUTING_IRQCHIP,
        u: kvm_irq_routing_entry__bindgen_ty_1 {
            irqchip: kvm_irq_routing_irqchip { irqchip, pin },
        },
        ..Default::default()
    }
}

fn msi_route(gsi: u32, message: MsiMessage) -> kvm_irq_routing_entry {
    let msi = kvm_irq_routing_msi {
        address_lo: message.address as u32,
        address_hi: (message.address >> 32) as u32,
        data: message.data,
        ..Default::default()
    };
    kvm_irq_routing_entry {
        gsi,
        type_: KVM_IRQ_ROUTING_MSI,
        u: kvm_irq_routing_entry__bindgen_ty_1 { msi },
        ..Default::default()
    }
}

/// One device's share of an interrupt line: the line is asserted while any share is (PCI 3.0 §2.2.6).
struct KvmLine {
    shared: Arc<Shared>,
    gsi: u32,
    asserted: AtomicBool,
}

impl IrqLine for KvmLine {
    fn set(&self, asserted: bool) {
        if self.asserted.load(Ordering::Acquire) == asserted {
            return;
        }
        let mut lines = lock(&self.shared.lines);
        // Decided under the lock, so that two threads moving the same share count it once.
        if self.asserted.swap(asserted, Ordering::AcqRel) == asserted {
            return;
        }
        let shares = &mut lines[self.gsi as usize];
        let before = *shares;
        *shares = if asserted { before + 1 } else { before - 1 };
        if (before == 0) != (*shares == 0)
            && let Err(error) = self.shared.vm.set_irq_line(self.gsi, asserted)
        {
            tracing::warn!(gsi = self.gsi, asserted, %error, "an interrupt line could not be moved");
        }
    }
}

impl Drop for KvmLine {
    fn drop(&mut self) {
        self.set(false);
    }
}

struct KvmVector {
    shared: Arc<Shared>,
    index: usize,
    event: Arc<EventFd>,
}

impl MsiVector for KvmVector {
    fn route(&self, message: MsiMessage) -> io::Result<()> {
        let mut table = lock(&self.shared.vectors);
        if let Some(Some(slot)) = table.slots.get_mut(self.index)
            && slot.message != Some(message)
        {
            slot.message = Some(message);
            self.shared.dirty.store(true, Ordering::Release);
        }
        Ok(())
    }

    fn trigger(&self) -> io::Result<()> {
        if self.shared.dirty.load(Ordering::Acquire) {
            self.shared.flush_routes()?;
        }
        self.event.write(1)
    }
}

impl Drop for KvmVector {
    fn drop(&mut self) {
        let mut table = lock(&self.shared.vectors);
        let Some(slot) = table.slots.get_mut(self.index).and_then(Option::take) else {
            return;
        };
        if slot.irqfd {
            // The descriptor is closed right after, which undoes the registration too, should this fail.
            let _ = self
                .shared
                .vm
                .unregister_irqfd(&self.event, gsi_of(self.index));
            self.shared.dirty.store(true, Ordering::Release);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kvm::Vm;
    use crate::testing::kvm_or_skip;

    #[test]
    fn programming_many_vectors_writes_the_routing_table_once_when_the_first_fires() {
        if !kvm_or_skip() {
            return;
        }
        let vm = Vm::create().unwrap();
        let interrupts = KvmInterrupts::new(vm.fd().clone());
        let vectors = interrupts.msi_vectors(20).unwrap();
        for (data, vector) in (0x30..).zip(&vectors) {
            vector
                .route(MsiMessage {
                    address: 0xfee0_0000,
                    data,
                })
                .unwrap();
        }
        assert_eq!(interrupts.route_writes(), 0);
        let _vcpu = vm.create_vcpu(0).unwrap();
        vectors[3].trigger().unwrap();
        vectors[4].trigger().unwrap();
        assert_eq!(interrupts.route_writes(), 1);
        vectors[4]
            .route(MsiMessage {
                address: 0xfee0_0000,
                data: 0x34,
            })
            .unwrap();
        vectors[4].trigger().unwrap();
        assert_eq!(
            interrupts.route_writes(),
            1,
            "an unchanged route is not written again"
        );
        vectors[4]
            .route(MsiMessage {
                address: 0xfee0_0000,
                data: 0x77,
            })
            .unwrap();
        vectors[4].trigger().unwrap();
        assert_eq!(interrupts.route_writes(), 2);
    }

    #[test]
    fn vectors_are_reused_after_their_device_is_gone_and_run_out_with_an_error() {
        if !kvm_or_skip() {
            return;
        }
        let vm = Vm::create().unwrap();
        let interrupts = KvmInterrupts::new(vm.fd().clone());
        lock(&interrupts.shared.vectors).limit = 4;
        let first = interrupts.msi_vectors(3).unwrap();
        assert!(interrupts.msi_vectors(2).is_err());
        drop(first);
        assert_eq!(interrupts.msi_vectors(4).unwrap().len(), 4);
    }

    #[test]
    fn a_shared_line_stays_asserted_until_the_last_device_releases_it() {
        if !kvm_or_skip() {
            return;
        }
        let vm = Vm::create().unwrap();
        let interrupts = KvmInterrupts::new(vm.fd().clone());
        let (one, two) = (interrupts.line(16), interrupts.line(16));
        let shares = || lock(&interrupts.shared.lines)[16];
        one.set(true);
        one.set(true);
        two.set(true);
        assert_eq!(shares(), 2);
        one.set(false);
        assert_eq!(shares(), 1);
        drop(two);
        assert_eq!(shares(), 0);
    }
}
