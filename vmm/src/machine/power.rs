//! What the guest says about the whole machine, on its way to the control thread.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use drover_devices::platform::{PowerRequest, PowerSink};

use crate::mailbox::{Mailbox, Message};

/// Closes when the guest asks for a reset or power-off, which parks all vCPUs at their next exit, and opens again after the reset.
/// Requests made while it is closed are part of the one that closed it: guests try one way of resetting after the other.
pub(super) struct PowerGate {
    closed: Arc<AtomicBool>,
    mailbox: Mailbox,
}

impl PowerGate {
    pub(super) fn new(mailbox: Mailbox) -> Self {
        Self {
            closed: Arc::default(),
            mailbox,
        }
    }

    /// True while closed.
    pub(super) fn closed(&self) -> Arc<AtomicBool> {
        self.closed.clone()
    }

    pub(super) fn open(&self) {
        self.closed.store(false, Ordering::Release);
    }
}

impl PowerSink for PowerGate {
    fn request(&self, request: PowerRequest) {
        if !self.closed.swap(true, Ordering::AcqRel) {
            self.mailbox.send(Message::Power(request));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mailbox::mailbox;

    #[test]
    fn a_guest_that_resets_in_three_ways_at_once_resets_once() {
        let (sender, inbox) = mailbox().unwrap();
        let gate = PowerGate::new(sender);
        for request in [
            PowerRequest::Reset,
            PowerRequest::Reset,
            PowerRequest::PowerOff,
        ] {
            gate.request(request);
        }
        assert!(matches!(
            inbox.next(),
            Some(Message::Power(PowerRequest::Reset))
        ));
        assert!(inbox.next().is_none());
        gate.open();
        gate.request(PowerRequest::PowerOff);
        assert!(matches!(
            inbox.next(),
            Some(Message::Power(PowerRequest::PowerOff))
        ));
    }
}
