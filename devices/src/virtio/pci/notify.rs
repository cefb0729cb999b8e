//! Doorbells: how the driver's notifications reach the device's thread (virtio 1.2 §4.1.4.4).
//!
//! Each queue has a 4-byte doorbell in the notification page. While the BAR is mapped and a queue is served, its doorbell is attached
//! to the queue's event descriptor inside the kernel; a notification then costs no userspace exit. At any other time, or if the
//! hypervisor refuses, the write arrives as an exit and [`DoorbellSet::ring`] signals the same descriptor.

use std::io;
use std::sync::{Arc, Mutex, Once, PoisonError};

use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::spec::bar;
use crate::bus::Doorbells;

pub(super) struct DoorbellSet {
    events: Box<[EventFd]>,
    controller: Arc<dyn Doorbells>,
    placement: Mutex<Placement>,
    /// The guest decides how often a refusal comes, so only the first is logged; all are counted.
    refusal: Once,
}

struct Placement {
    /// Where the BAR is mapped.
    base: Option<u64>,
    /// Where each doorbell is attached.
    attached: Box<[Option<u64>]>,
}

impl DoorbellSet {
    pub(super) fn new(queues: usize, controller: Arc<dyn Doorbells>) -> io::Result<DoorbellSet> {
        let events = (0..queues).map(|_| EventFd::new(EFD_NONBLOCK));
        Ok(DoorbellSet {
            events: events.collect::<io::Result<_>>()?,
            controller,
            placement: Mutex::new(Placement {
                base: None,
                attached: vec![None; queues].into_boxed_slice(),
            }),
            refusal: Once::new(),
        })
    }

    /// A descriptor of the queue's own, without notifications from before.
    pub(super) fn fresh(&self, queue: u16) -> io::Result<EventFd> {
        let event = self
            .events
            .get(usize::from(queue))
            .ok_or(io::ErrorKind::NotFound)?;
        match event.read() {
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
        event.try_clone()
    }

    /// Notifies a queue by hand. False if there is no such queue.
    pub(super) fn ring(&self, queue: u16) -> bool {
        let Some(event) = self.events.get(usize::from(queue)) else {
            return false;
        };
        // The counter can only be full, and then the thread has not even seen the last notification.
        let _ = event.write(1);
        true
    }

    /// Notes where the BAR is mapped.
    pub(super) fn place(&self, base: Option<u64>) {
        let mut placement = self
            .placement
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        placement.base = base;
    }

    /// Attaches what is served and mapped, detaches all else. `served` is asked under the lock that orders concurrent changes, so that
    /// the last one to come sees the latest state. Returns how often the hypervisor refused.
    pub(super) fn update(&self, served: impl FnOnce() -> Vec<bool>) -> u64 {
        let mut placement = self
            .placement
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let placement = &mut *placement;
        let mut refused = 0;
        let served = served();
        let each = self.events.iter().zip(placement.attached.iter_mut());
        for (index, ((event, attached), served)) in (0_u64..).zip(each.zip(served)) {
            let offset = u64::from(bar::NOTIFY) + index * u64::from(bar::NOTIFY_MULTIPLIER);
            let base = placement.base.filter(|_| served);
            let wanted = base.and_then(|base| base.checked_add(offset));
            if *attached == wanted {
                continue;
            }
            if let Some(address) = attached.take()
                && let Err(error) = self.controller.detach(address, event)
            {
                self.refused(address, &error);
                refused += 1;
            }
            if let Some(address) = wanted {
                match self.controller.attach(address, event) {
                    Ok(()) => *attached = Some(address),
                    Err(error) => {
                        self.refused(address, &error);
                        refused += 1;
                    }
                }
            }
        }
        refused
    }

    fn refused(&self, address: u64, error: &io::Error) {
        self.refusal.call_once(|| {
            tracing::warn!(address, %error, "a doorbell could not be attached or detached");
        });
    }
}
