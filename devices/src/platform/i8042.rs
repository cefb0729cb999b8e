//! Keyboard controller at ports 0x60 and 0x64: just enough for a guest that resets through it. No keyboard, no mouse.
//!
//! A reset comes as command 0xfe (pulse the reset line), or as command 0xd1 followed by an output-port byte with bit 0 clear.

use std::sync::{Arc, Mutex};

use super::{PowerRequest, PowerSink, lock};
use crate::bus::BusDevice;

mod spec {
    /// The data port; the command and status port is 4 above it.
    pub(super) const PORT: u16 = 0x60;
    pub(super) const DATA: u64 = 0;
    pub(super) const STATUS: u64 = 4;
    /// Status: output buffer full.
    pub(super) const OBF: u8 = 1 << 0;
    /// Status: self-test passed.
    pub(super) const SYSTEM_FLAG: u8 = 1 << 2;
    pub(super) const CMD_READ_CTR: u8 = 0x20;
    pub(super) const CMD_WRITE_CTR: u8 = 0x60;
    pub(super) const CMD_SELF_TEST: u8 = 0xaa;
    pub(super) const CMD_WRITE_OUTPUT: u8 = 0xd1;
    /// 0xf0–0xff pulse output-port bits that are 0 in the low nibble; bit 0 is the reset line.
    pub(super) const CMD_PULSE: u8 = 0xf0;
    pub(super) const SELF_TEST_OK: u8 = 0x55;
    /// Output port bit 0: the reset line, active low.
    pub(super) const OUTPUT_RESET: u8 = 1 << 0;
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Registers {
    control: u8,
    answer: Option<u8>,
    command: Option<u8>,
}

/// The keyboard controller.
pub struct KeyboardController {
    registers: Mutex<Registers>,
    power: Arc<dyn PowerSink>,
}

impl KeyboardController {
    /// Its first port; [`KeyboardController::LEN`] ports belong to the range, of which it answers the first and the last.
    pub const PORT: u16 = spec::PORT;
    /// Ports in its range.
    pub const LEN: u16 = 5;

    /// A controller in its power-on state.
    #[must_use]
    pub fn new(power: Arc<dyn PowerSink>) -> Self {
        Self {
            registers: Mutex::default(),
            power,
        }
    }

    /// Returns to the power-on state.
    pub fn reset(&self) {
        *lock(&self.registers) = Registers::default();
    }
}

impl BusDevice for KeyboardController {
    fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0xff);
        let Some(first) = data.first_mut() else {
            return;
        };
        let mut registers = lock(&self.registers);
        match offset {
            spec::DATA => *first = registers.answer.take().unwrap_or(0),
            spec::STATUS => {
                let full = if registers.answer.is_some() {
                    spec::OBF
                } else {
                    0
                };
                *first = spec::SYSTEM_FLAG | full;
            }
            _ => {}
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        let Some(&value) = data.first() else { return };
        let mut registers = lock(&self.registers);
        let reset = match (offset, registers.command.take()) {
            (spec::DATA, Some(spec::CMD_WRITE_CTR)) => {
                registers.control = value;
                false
            }
            (spec::DATA, Some(spec::CMD_WRITE_OUTPUT)) => value & spec::OUTPUT_RESET == 0,
            (spec::STATUS, _) => match value {
                spec::CMD_READ_CTR => {
                    registers.answer = Some(registers.control);
                    false
                }
                spec::CMD_SELF_TEST => {
                    registers.answer = Some(spec::SELF_TEST_OK);
                    false
                }
                spec::CMD_WRITE_CTR | spec::CMD_WRITE_OUTPUT => {
                    registers.command = Some(value);
                    false
                }
                pulse => pulse & spec::CMD_PULSE == spec::CMD_PULSE && pulse & 1 == 0,
            },
            _ => false,
        };
        drop(registers);
        if reset {
            self.power.request(PowerRequest::Reset);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::platform::testing::PowerLog;

    fn controller() -> (KeyboardController, Arc<PowerLog>) {
        let log = Arc::new(PowerLog::default());
        (KeyboardController::new(log.clone()), log)
    }

    #[test]
    fn pulsing_the_reset_line_resets() {
        let (controller, log) = controller();
        controller.write(4, &[0xfe]);
        assert_eq!(log.take(), [PowerRequest::Reset]);
        controller.write(4, &[0xff]);
        assert_eq!(log.take(), []);
    }

    #[test]
    fn clearing_the_output_ports_reset_bit_resets() {
        let (controller, log) = controller();
        controller.write(4, &[0xd1]);
        controller.write(0, &[0x03]);
        assert_eq!(log.take(), []);
        controller.write(4, &[0xd1]);
        controller.write(0, &[0x02]);
        assert_eq!(log.take(), [PowerRequest::Reset]);
    }

    #[test]
    fn a_driver_that_waits_for_the_input_buffer_never_waits() {
        let (controller, _) = controller();
        let mut status = [0];
        controller.read(4, &mut status);
        assert_eq!(status[0] & 0x02, 0);
        controller.write(4, &[0xaa]);
        controller.read(4, &mut status);
        assert_eq!(status[0] & 0x01, 1);
        let mut answer = [0];
        controller.read(0, &mut answer);
        assert_eq!(answer, [0x55]);
    }
}
