//! ACPI power management block of the ICH9 (data sheet §13.8.3; ACPI 6.5 §4.8.3), at PMBASE.
//!
//! | offset | register | here |
//! |---|---|---|
//! | 0x00 | PM1_STS | power-button and timer status, write one to clear |
//! | 0x02 | PM1_EN | which of them raise the SCI |
//! | 0x04 | PM1_CNT | SCI_EN reads 1 (there is no SMI to leave ACPI mode with); SLP_EN with SLP_TYP 0 turns off |
//! | 0x08 | PM1_TMR | 24 bits at 3.579545 MHz |
//! | 0x20 | GPE0_STS, GPE0_EN | stored; nothing raises a general-purpose event yet |
//! | 0x30 | SMI_EN | stored |
//!
//! The timer's overflow sets TMR_STS when the guest looks; it raises no interrupt by itself, which no guest relies on: the register
//! is read as a clock.

use std::sync::{Arc, Mutex};
use std::time::Instant;

use serde::{Deserialize, Serialize};

use super::{PowerRequest, PowerSink, lock};
use crate::bus::BusDevice;
use crate::interrupt::IrqLine;

mod spec {
    pub(super) const PM1_STS: u64 = 0x00;
    pub(super) const PM1_EN: u64 = 0x02;
    pub(super) const PM1_CNT: u64 = 0x04;
    pub(super) const PM1_TMR: u64 = 0x08;
    pub(super) const GPE0_STS: u64 = 0x20;
    pub(super) const GPE0_EN: u64 = 0x28;
    pub(super) const SMI_EN: u64 = 0x30;
    pub(super) const LEN: u64 = 0x80;

    /// PM1_STS/PM1_EN: the timer's top bit changed.
    pub(super) const TMR: u16 = 1 << 0;
    /// PM1_STS/PM1_EN: global lock released.
    pub(super) const GBL: u16 = 1 << 5;
    /// PM1_STS/PM1_EN: power button pressed.
    pub(super) const PWRBTN: u16 = 1 << 8;
    /// PM1_STS/PM1_EN: RTC alarm.
    pub(super) const RTC: u16 = 1 << 10;
    pub(super) const STATUS_BITS: u16 = TMR | GBL | PWRBTN | RTC;

    pub(super) const SCI_EN: u16 = 1 << 0;
    pub(super) const SLP_TYP_SHIFT: u16 = 10;
    pub(super) const SLP_TYP: u16 = 7 << SLP_TYP_SHIFT;
    pub(super) const SLP_EN: u16 = 1 << 13;
    /// SLP_TYP of soft-off, as the DSDT's `\_S5` says.
    pub(super) const S5: u16 = 0;

    /// The timer's rate in Hz.
    pub(super) const TIMER_HZ: u128 = 3_579_545;
    pub(super) const TIMER_MASK: u64 = 0x00ff_ffff;
    /// The timer's top bit changes every 2^23 ticks.
    pub(super) const TIMER_HALF: u64 = 1 << 23;
}

/// What survives a snapshot.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PowerManagementState {
    /// PM1_STS.
    pub status: u16,
    /// PM1_EN.
    pub enable: u16,
    /// PM1_CNT without its write-only bit.
    pub control: u16,
    /// Ticks of the timer since power-on.
    pub timer_ticks: u64,
    /// GPE0_EN.
    pub gpe_enable: u64,
    /// SMI_EN.
    pub smi_enable: u32,
}

struct Registers {
    status: u16,
    enable: u16,
    control: u16,
    gpe_enable: u64,
    smi_enable: u32,
    /// When the timer stood at `base_ticks`.
    base: Instant,
    base_ticks: u64,
    /// `ticks / TIMER_HALF` when the timer was last looked at.
    seen_half: u64,
}

impl Registers {
    fn ticks(&self) -> u64 {
        let elapsed = self.base.elapsed().as_nanos() * spec::TIMER_HZ / 1_000_000_000;
        self.base_ticks
            .wrapping_add(u64::try_from(elapsed).unwrap_or(u64::MAX))
    }

    fn note_overflow(&mut self) {
        let half = self.ticks() / spec::TIMER_HALF;
        if half != self.seen_half {
            self.seen_half = half;
            self.status |= spec::TMR;
        }
    }

    fn sci(&self) -> bool {
        self.status & self.enable & spec::STATUS_BITS != 0
    }

    /// The block as bytes, so that any width at any offset reads right.
    fn image(&mut self) -> [u8; spec::LEN as usize] {
        self.note_overflow();
        let mut image = [0; spec::LEN as usize];
        let mut put = |offset: u64, bytes: &[u8]| {
            let start = offset as usize;
            image[start..start + bytes.len()].copy_from_slice(bytes);
        };
        put(spec::PM1_STS, &self.status.to_le_bytes());
        put(spec::PM1_EN, &self.enable.to_le_bytes());
        put(
            spec::PM1_CNT,
            &u32::from(self.control | spec::SCI_EN).to_le_bytes(),
        );
        put(
            spec::PM1_TMR,
            &((self.ticks() & spec::TIMER_MASK) as u32).to_le_bytes(),
        );
        put(spec::GPE0_STS, &0_u64.to_le_bytes());
        put(spec::GPE0_EN, &self.gpe_enable.to_le_bytes());
        put(spec::SMI_EN, &self.smi_enable.to_le_bytes());
        image
    }
}

/// The power management block and the power button.
pub struct PowerManagement {
    registers: Mutex<Registers>,
    sci: Arc<dyn IrqLine>,
    power: Arc<dyn PowerSink>,
}

impl PowerManagement {
    /// Ports in the block.
    pub const LEN: u16 = spec::LEN as u16;

    /// A block in its power-on state, its timer starting now.
    #[must_use]
    pub fn new(sci: Arc<dyn IrqLine>, power: Arc<dyn PowerSink>) -> Self {
        Self {
            registers: Mutex::new(Self::from_state(&PowerManagementState::default())),
            sci,
            power,
        }
    }

    fn from_state(state: &PowerManagementState) -> Registers {
        Registers {
            status: state.status,
            enable: state.enable,
            control: state.control,
            gpe_enable: state.gpe_enable,
            smi_enable: state.smi_enable,
            base: Instant::now(),
            base_ticks: state.timer_ticks,
            seen_half: state.timer_ticks / spec::TIMER_HALF,
        }
    }

    /// Presses the power button; false if the guest does not listen to it (no ACPI driver has enabled it yet).
    pub fn press_power_button(&self) -> bool {
        let mut registers = lock(&self.registers);
        registers.status |= spec::PWRBTN;
        let listening = registers.enable & spec::PWRBTN != 0;
        self.sci.set(registers.sci());
        listening
    }

    /// Returns to the power-on state.
    pub fn reset(&self) {
        self.restore(&PowerManagementState::default());
    }

    /// What a snapshot keeps.
    #[must_use]
    pub fn state(&self) -> PowerManagementState {
        let registers = lock(&self.registers);
        PowerManagementState {
            status: registers.status,
            enable: registers.enable,
            control: registers.control,
            timer_ticks: registers.ticks(),
            gpe_enable: registers.gpe_enable,
            smi_enable: registers.smi_enable,
        }
    }

    /// Takes over a snapshot's state; the timer goes on from where it stood.
    pub fn restore(&self, state: &PowerManagementState) {
        let mut registers = lock(&self.registers);
        *registers = Self::from_state(state);
        self.sci.set(registers.sci());
    }

    fn write_byte(registers: &mut Registers, offset: u64, value: u8) -> Option<PowerRequest> {
        let shift = 8 * (offset % 2);
        let wide = u16::from(value) << shift;
        let keep = !(0xff_u16 << shift);
        match offset & !1 {
            spec::PM1_STS => registers.status &= !wide,
            spec::PM1_EN => {
                registers.enable = (registers.enable & keep) | (wide & spec::STATUS_BITS);
            }
            spec::PM1_CNT => {
                let control = (registers.control & keep) | wide;
                registers.control = control & !spec::SLP_EN;
                let sleep_type = (control & spec::SLP_TYP) >> spec::SLP_TYP_SHIFT;
                if control & spec::SLP_EN != 0 && sleep_type == spec::S5 {
                    return Some(PowerRequest::PowerOff);
                }
            }
            _ if (spec::GPE0_EN..spec::GPE0_EN + 8).contains(&offset) => {
                let mut bytes = registers.gpe_enable.to_le_bytes();
                bytes[(offset - spec::GPE0_EN) as usize] = value;
                registers.gpe_enable = u64::from_le_bytes(bytes);
            }
            _ if (spec::SMI_EN..spec::SMI_EN + 4).contains(&offset) => {
                let mut bytes = registers.smi_enable.to_le_bytes();
                bytes[(offset - spec::SMI_EN) as usize] = value;
                registers.smi_enable = u32::from_le_bytes(bytes);
            }
            _ => {}
        }
        None
    }
}

impl BusDevice for PowerManagement {
    fn read(&self, offset: u64, data: &mut [u8]) {
        let image = lock(&self.registers).image();
        for (index, byte) in data.iter_mut().enumerate() {
            let at = usize::try_from(offset)
                .unwrap_or(usize::MAX)
                .saturating_add(index);
            *byte = image.get(at).copied().unwrap_or(0xff);
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        let mut request = None;
        let mut registers = lock(&self.registers);
        registers.note_overflow();
        for (index, &byte) in data.iter().enumerate() {
            let at = offset.saturating_add(index as u64);
            request = request.or(Self::write_byte(&mut registers, at, byte));
        }
        self.sci.set(registers.sci());
        drop(registers);
        if let Some(request) = request {
            self.power.request(request);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::platform::testing::{LineLevel, PowerLog};

    fn block() -> (PowerManagement, Arc<LineLevel>, Arc<PowerLog>) {
        let (line, log) = (
            Arc::new(LineLevel::default()),
            Arc::new(PowerLog::default()),
        );
        (PowerManagement::new(line.clone(), log.clone()), line, log)
    }

    fn read_u16(block: &PowerManagement, offset: u64) -> u16 {
        let mut data = [0; 2];
        block.read(offset, &mut data);
        u16::from_le_bytes(data)
    }

    #[test]
    fn the_power_button_raises_the_sci_until_its_status_is_cleared() {
        let (block, line, _) = block();
        assert!(
            !block.press_power_button(),
            "nobody listens before PM1_EN is written"
        );
        assert!(!line.asserted());
        block.write(0, &0x0100_u16.to_le_bytes());
        block.write(2, &0x0100_u16.to_le_bytes());
        assert!(block.press_power_button());
        assert!(line.asserted());
        assert_eq!(read_u16(&block, 0) & 0x100, 0x100);
        block.write(0, &0x0100_u16.to_le_bytes());
        assert!(!line.asserted());
    }

    #[test]
    fn sleep_type_five_turns_off_and_other_types_do_not() {
        let (block, _, log) = block();
        block.write(4, &((1_u16 << 13) | (1 << 10)).to_le_bytes());
        assert_eq!(log.take(), []);
        block.write(4, &(1_u16 << 13).to_le_bytes());
        assert_eq!(log.take(), [PowerRequest::PowerOff]);
        assert_eq!(
            read_u16(&block, 4),
            1,
            "SCI_EN reads one, SLP_EN is write-only"
        );
    }

    #[test]
    fn the_timer_advances_at_its_rate_within_24_bits() {
        let (block, _, _) = block();
        let read = || {
            let mut data = [0; 4];
            block.read(8, &mut data);
            u32::from_le_bytes(data)
        };
        let (before, start) = (read(), Instant::now());
        std::thread::sleep(std::time::Duration::from_millis(20));
        let (after, elapsed) = (read(), start.elapsed());
        let ticks = after.wrapping_sub(before) & 0x00ff_ffff;
        assert!(f64::from(ticks) >= 0.020 * 3_579_545.0 - 2.0);
        assert!(f64::from(ticks) <= elapsed.as_secs_f64() * 3_579_545.0 + 2000.0);
        assert_eq!(after >> 24, 0);
    }

    #[test]
    fn state_survives_a_round_trip_through_bytes() {
        let (block, _, _) = block();
        block.write(2, &0x0100_u16.to_le_bytes());
        block.write(0x28, &[7]);
        let saved = serde_json_like(&block.state());
        let (other, line, _) = self::block();
        other.restore(&saved);
        assert_eq!(read_u16(&other, 2), 0x100);
        other.press_power_button();
        assert!(line.asserted());
    }

    fn serde_json_like(state: &PowerManagementState) -> PowerManagementState {
        let bytes = serde_json::to_vec(state).expect("plain data");
        serde_json::from_slice(&bytes).expect("its own output")
    }

    #[test]
    fn accesses_of_any_width_at_any_offset_are_harmless() {
        let (block, _, _) = block();
        for offset in 0..0x90 {
            for width in [1, 2, 4, 8] {
                let mut data = vec![0; width];
                block.read(offset, &mut data);
                if !(3..6).contains(&offset) {
                    block.write(offset, &data);
                }
            }
        }
    }
}
