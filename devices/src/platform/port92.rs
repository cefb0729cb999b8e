//! System control port A, 0x92 (ICH9 data sheet §13.7.3): the A20 gate, which is always open here, and the fast reset.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use super::{PowerRequest, PowerSink};
use crate::bus::BusDevice;

mod spec {
    /// The port.
    pub(super) const PORT: u16 = 0x92;
    /// INIT_NOW: a rising edge resets the processor.
    pub(super) const INIT_NOW: u8 = 1 << 0;
    /// ALT_A20_GATE: address line 20 passes.
    pub(super) const ALT_A20_GATE: u8 = 1 << 1;
}

/// System control port A.
pub struct SystemControlPortA {
    value: AtomicU8,
    power: Arc<dyn PowerSink>,
}

impl SystemControlPortA {
    /// Its port; one byte.
    pub const PORT: u16 = spec::PORT;

    /// A port with the A20 gate open.
    #[must_use]
    pub fn new(power: Arc<dyn PowerSink>) -> Self {
        Self {
            value: AtomicU8::new(spec::ALT_A20_GATE),
            power,
        }
    }

    /// Returns to the power-on state.
    pub fn reset(&self) {
        self.value.store(spec::ALT_A20_GATE, Ordering::Relaxed);
    }
}

impl BusDevice for SystemControlPortA {
    fn read(&self, _offset: u64, data: &mut [u8]) {
        data.fill(0xff);
        if let Some(first) = data.first_mut() {
            *first = self.value.load(Ordering::Relaxed);
        }
    }

    fn write(&self, _offset: u64, data: &[u8]) {
        let Some(&new) = data.first() else { return };
        let old = self.value.swap(
            new & (spec::INIT_NOW | spec::ALT_A20_GATE),
            Ordering::Relaxed,
        );
        if new & !old & spec::INIT_NOW != 0 {
            self.power.request(PowerRequest::Reset);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::platform::testing::PowerLog;

    #[test]
    fn the_fast_reset_bit_resets_and_a20_reads_open() {
        let log = Arc::new(PowerLog::default());
        let port = SystemControlPortA::new(log.clone());
        let mut value = [0];
        port.read(0, &mut value);
        assert_eq!(value, [2]);
        port.write(0, &[3]);
        assert_eq!(log.take(), [PowerRequest::Reset]);
    }
}
