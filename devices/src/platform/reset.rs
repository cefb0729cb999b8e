//! Reset control register, port 0xcf9 (ICH9 data sheet §13.7.5). ACPI's reset register points here, with value 6.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use super::{PowerRequest, PowerSink};
use crate::bus::BusDevice;

mod spec {
    /// The port.
    pub(super) const PORT: u16 = 0xcf9;
    /// SYS_RST: makes the next reset a hard one.
    pub(super) const SYS_RST: u8 = 1 << 1;
    /// RST_CPU: a rising edge resets.
    pub(super) const RST_CPU: u8 = 1 << 2;
    /// FULL_RST: power-cycles at the next reset.
    pub(super) const FULL_RST: u8 = 1 << 3;
}

/// The reset control register.
pub struct ResetControl {
    value: AtomicU8,
    power: Arc<dyn PowerSink>,
}

impl ResetControl {
    /// Its port; one byte.
    pub const PORT: u16 = spec::PORT;

    /// A register in its power-on state.
    #[must_use]
    pub fn new(power: Arc<dyn PowerSink>) -> Self {
        Self {
            value: AtomicU8::new(0),
            power,
        }
    }

    /// Returns to the power-on state.
    pub fn reset(&self) {
        self.value.store(0, Ordering::Relaxed);
    }
}

impl BusDevice for ResetControl {
    fn read(&self, _offset: u64, data: &mut [u8]) {
        data.fill(0xff);
        if let Some(first) = data.first_mut() {
            *first = self.value.load(Ordering::Relaxed);
        }
    }

    fn write(&self, _offset: u64, data: &[u8]) {
        let Some(&new) = data.first() else { return };
        let new = new & (spec::SYS_RST | spec::RST_CPU | spec::FULL_RST);
        let old = self.value.swap(new, Ordering::Relaxed);
        if new & !old & spec::RST_CPU != 0 {
            self.power.request(PowerRequest::Reset);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::platform::testing::PowerLog;

    #[test]
    fn a_rising_reset_bit_resets_once() {
        let log = Arc::new(PowerLog::default());
        let register = ResetControl::new(log.clone());
        register.write(0, &[0x02]);
        assert_eq!(log.take(), []);
        register.write(0, &[0x06]);
        register.write(0, &[0x06]);
        assert_eq!(log.take(), [PowerRequest::Reset]);
        let mut value = [0];
        register.read(0, &mut value);
        assert_eq!(value, [0x06]);
        register.reset();
        register.write(0, &[0x0e]);
        assert_eq!(log.take(), [PowerRequest::Reset]);
    }
}
