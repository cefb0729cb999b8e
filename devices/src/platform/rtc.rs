//! Real-time clock and CMOS memory at ports 0x70–0x71 (MC146818A data sheet; ICH9 data sheet §13.6).
//!
//! The clock shows the host's UTC time plus what the guest has set. Alarms and periodic interrupts are stored but never fire; a worker
//! keeps time by kvm-clock. RAM size is where firmware looks for it: 0x34–0x35 (64 KiB units above 16 MiB) and 0x5b–0x5d (above 4 GiB).

use std::sync::Mutex;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use super::lock;
use crate::bus::BusDevice;

mod spec {
    pub(super) const PORT: u16 = 0x70;
    pub(super) const INDEX: u64 = 0;
    pub(super) const DATA: u64 = 1;
    /// The index's low seven bits; the top one gates NMI.
    pub(super) const INDEX_MASK: u8 = 0x7f;

    pub(super) const SECONDS: u8 = 0x00;
    pub(super) const MINUTES: u8 = 0x02;
    pub(super) const HOURS: u8 = 0x04;
    pub(super) const WEEKDAY: u8 = 0x06;
    pub(super) const DAY: u8 = 0x07;
    pub(super) const MONTH: u8 = 0x08;
    pub(super) const YEAR: u8 = 0x09;
    pub(super) const CENTURY: u8 = 0x32;
    pub(super) const REG_A: u8 = 0x0a;
    pub(super) const REG_B: u8 = 0x0b;
    pub(super) const REG_C: u8 = 0x0c;
    pub(super) const REG_D: u8 = 0x0d;
    pub(super) const MEM_ABOVE_16M: u8 = 0x34;
    pub(super) const MEM_ABOVE_4G: u8 = 0x5b;

    /// Register A: 32.768 kHz divider, 1024 Hz rate; update-in-progress never shows.
    pub(super) const A_DEFAULT: u8 = 0x26;
    /// Register B: no updates while the guest sets the clock.
    pub(super) const B_SET: u8 = 1 << 7;
    /// Register B: binary, not BCD.
    pub(super) const B_BINARY: u8 = 1 << 2;
    /// Register B: 24-hour mode.
    pub(super) const B_24H: u8 = 1 << 1;
    /// Hours in 12-hour mode: afternoon.
    pub(super) const PM: u8 = 1 << 7;
    /// Register D: contents valid.
    pub(super) const D_VALID: u8 = 1 << 7;
}

/// What survives a snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RtcState {
    /// The index last written.
    pub index: u8,
    /// All 128 bytes of CMOS memory; those of the clock are unused.
    pub memory: Vec<u8>,
    /// Seconds that the guest's clock is ahead of the host's UTC.
    pub offset_seconds: i64,
}

struct Registers {
    index: u8,
    memory: [u8; 128],
    offset_seconds: i64,
    /// Fields as the guest is writing them, while register B's SET bit is on.
    setting: Option<CivilTime>,
}

/// The clock and its memory.
pub struct Rtc {
    registers: Mutex<Registers>,
}

impl Rtc {
    /// Its first port.
    pub const PORT: u16 = spec::PORT;
    /// Ports in its range.
    pub const LEN: u16 = 2;

    /// A clock at the host's UTC, telling firmware of `low_ram` bytes below 4 GiB and `high_ram` above.
    #[must_use]
    pub fn new(low_ram: u64, high_ram: u64) -> Self {
        let mut memory = [0; 128];
        memory[usize::from(spec::REG_A)] = spec::A_DEFAULT;
        memory[usize::from(spec::REG_B)] = spec::B_24H;
        memory[usize::from(spec::REG_D)] = spec::D_VALID;
        let units = |bytes: u64| (bytes >> 16).to_le_bytes();
        let above_16m = units(low_ram.saturating_sub(16 << 20));
        let at = usize::from(spec::MEM_ABOVE_16M);
        memory[at..at + 2].copy_from_slice(&above_16m[..2]);
        let above_4g = units(high_ram);
        let at = usize::from(spec::MEM_ABOVE_4G);
        memory[at..at + 3].copy_from_slice(&above_4g[..3]);
        Self {
            registers: Mutex::new(Registers {
                index: 0,
                memory,
                offset_seconds: 0,
                setting: None,
            }),
        }
    }

    /// What a snapshot keeps.
    #[must_use]
    pub fn state(&self) -> RtcState {
        let registers = lock(&self.registers);
        RtcState {
            index: registers.index,
            memory: registers.memory.to_vec(),
            offset_seconds: registers.offset_seconds,
        }
    }

    /// Takes over a snapshot's state; memory of another length is cut or keeps its rest.
    pub fn restore(&self, state: &RtcState) {
        let mut registers = lock(&self.registers);
        registers.index = state.index & spec::INDEX_MASK;
        registers.offset_seconds = state.offset_seconds;
        registers.setting = None;
        for (to, from) in registers.memory.iter_mut().zip(&state.memory) {
            *to = *from;
        }
    }
}

impl Registers {
    fn now(&self) -> CivilTime {
        let host = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |d| d.as_secs());
        let host = i64::try_from(host).unwrap_or(i64::MAX);
        CivilTime::from_unix(host.saturating_add(self.offset_seconds))
    }

    fn mode(&self) -> u8 {
        self.memory[usize::from(spec::REG_B)]
    }

    fn read(&mut self) -> u8 {
        let time = || self.setting.unwrap_or_else(|| self.now());
        let value = match self.index {
            spec::SECONDS => time().second,
            spec::MINUTES => time().minute,
            spec::HOURS => return encode_hour(time().hour, self.mode()),
            spec::WEEKDAY => time().weekday,
            spec::DAY => time().day,
            spec::MONTH => time().month,
            spec::YEAR => (time().year % 100) as u8,
            spec::CENTURY => (time().year / 100) as u8,
            spec::REG_C => return 0,
            other => return self.memory[usize::from(other)],
        };
        encode(value, self.mode())
    }

    fn write(&mut self, value: u8) {
        let mode = self.mode();
        match self.index {
            spec::REG_A => self.memory[usize::from(spec::REG_A)] = value & 0x7f,
            spec::REG_B => {
                if value & spec::B_SET != 0 {
                    self.setting = Some(self.setting.unwrap_or_else(|| self.now()));
                } else if let Some(time) = self.setting.take() {
                    self.set_clock(time);
                }
                self.memory[usize::from(spec::REG_B)] = value;
            }
            spec::REG_C | spec::REG_D => {}
            spec::SECONDS
            | spec::MINUTES
            | spec::HOURS
            | spec::WEEKDAY
            | spec::DAY
            | spec::MONTH
            | spec::YEAR
            | spec::CENTURY => {
                let mut time = self.setting.unwrap_or_else(|| self.now());
                let plain = decode(value, mode);
                match self.index {
                    spec::SECONDS => time.second = plain.min(59),
                    spec::MINUTES => time.minute = plain.min(59),
                    spec::HOURS => time.hour = decode_hour(value, mode).min(23),
                    spec::WEEKDAY => time.weekday = plain.clamp(1, 7),
                    spec::DAY => time.day = plain.clamp(1, 31),
                    spec::MONTH => time.month = plain.clamp(1, 12),
                    spec::YEAR => time.year = time.year / 100 * 100 + u16::from(plain.min(99)),
                    _ => time.year = u16::from(plain.min(99)) * 100 + time.year % 100,
                }
                if self.setting.is_some() {
                    self.setting = Some(time);
                } else {
                    self.set_clock(time);
                }
            }
            other => self.memory[usize::from(other)] = value,
        }
    }

    fn set_clock(&mut self, time: CivilTime) {
        let change = time.to_unix().saturating_sub(self.now().to_unix());
        self.offset_seconds = self.offset_seconds.saturating_add(change);
    }
}

impl BusDevice for Rtc {
    fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0xff);
        if let (spec::DATA, Some(first)) = (offset, data.first_mut()) {
            *first = lock(&self.registers).read();
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        let Some(&value) = data.first() else { return };
        let mut registers = lock(&self.registers);
        match offset {
            spec::INDEX => registers.index = value & spec::INDEX_MASK,
            spec::DATA => registers.write(value),
            _ => {}
        }
    }
}

fn encode(value: u8, mode: u8) -> u8 {
    if mode & spec::B_BINARY != 0 {
        value
    } else {
        ((value / 10) << 4) | (value % 10)
    }
}

fn decode(value: u8, mode: u8) -> u8 {
    if mode & spec::B_BINARY != 0 {
        value
    } else {
        (value >> 4) * 10 + (value & 0x0f)
    }
}

fn encode_hour(hour: u8, mode: u8) -> u8 {
    if mode & spec::B_24H != 0 {
        return encode(hour, mode);
    }
    let afternoon = if hour >= 12 { spec::PM } else { 0 };
    let twelve = if hour.is_multiple_of(12) {
        12
    } else {
        hour % 12
    };
    encode(twelve, mode) | afternoon
}

fn decode_hour(value: u8, mode: u8) -> u8 {
    if mode & spec::B_24H != 0 {
        return decode(value, mode);
    }
    decode(value & !spec::PM, mode) % 12 + if value & spec::PM != 0 { 12 } else { 0 }
}

/// A date and time of the proleptic Gregorian calendar, UTC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct CivilTime {
    year: u16,
    month: u8,
    day: u8,
    /// 1 is Sunday.
    weekday: u8,
    hour: u8,
    minute: u8,
    second: u8,
}

const SECONDS_A_DAY: i64 = 86_400;
/// Days in 400 years.
const DAYS_AN_ERA: i64 = 146_097;
/// Days from 0000-03-01 to 1970-01-01. Years that begin in March put the leap day last.
const EPOCH_FROM_MARCH_0: i64 = 719_468;

impl CivilTime {
    fn from_unix(seconds: i64) -> Self {
        let days = seconds.div_euclid(SECONDS_A_DAY);
        let second_of_day = seconds.rem_euclid(SECONDS_A_DAY);
        let shifted = days + EPOCH_FROM_MARCH_0;
        let era = shifted.div_euclid(DAYS_AN_ERA);
        let day_of_era = shifted.rem_euclid(DAYS_AN_ERA);
        let year_of_era =
            (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let month_from_march = (5 * day_of_year + 2) / 153;
        let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
        let month = if month_from_march < 10 {
            month_from_march + 3
        } else {
            month_from_march - 9
        };
        let year = era * 400 + year_of_era + i64::from(month <= 2);
        Self {
            year: year.clamp(0, 9999) as u16,
            month: month as u8,
            day: day as u8,
            weekday: ((days + 4).rem_euclid(7) + 1) as u8,
            hour: (second_of_day / 3600) as u8,
            minute: (second_of_day / 60 % 60) as u8,
            second: (second_of_day % 60) as u8,
        }
    }

    fn to_unix(self) -> i64 {
        let month = i64::from(self.month);
        let year = i64::from(self.year) - i64::from(month <= 2);
        let era = year.div_euclid(400);
        let year_of_era = year.rem_euclid(400);
        let month_from_march = (month + 9) % 12;
        let day_of_year = (153 * month_from_march + 2) / 5 + i64::from(self.day) - 1;
        let day_of_era = year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year;
        let days = era * DAYS_AN_ERA + day_of_era - EPOCH_FROM_MARCH_0;
        days * SECONDS_A_DAY
            + i64::from(self.hour) * 3600
            + i64::from(self.minute) * 60
            + i64::from(self.second)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn read(rtc: &Rtc, index: u8) -> u8 {
        rtc.write(0, &[index]);
        let mut value = [0];
        rtc.read(1, &mut value);
        value[0]
    }

    fn write(rtc: &Rtc, index: u8, value: u8) {
        rtc.write(0, &[index]);
        rtc.write(1, &[value]);
    }

    #[test]
    fn known_dates_convert_both_ways() {
        for (unix, (year, month, day, weekday)) in [
            (0, (1970, 1, 1, 5)),
            (951_782_400, (2000, 2, 29, 3)),
            (1_796_083_199, (2026, 11, 30, 2)),
            (4_107_542_400, (2100, 3, 1, 2)),
        ] {
            let time = CivilTime::from_unix(unix);
            assert_eq!(
                (time.year, time.month, time.day, time.weekday),
                (year, month, day, weekday)
            );
            assert_eq!(time.to_unix(), unix);
        }
    }

    proptest! {
        #[test]
        fn every_second_of_four_thousand_years_round_trips(unix in -60_000_000_000_i64..60_000_000_000) {
            prop_assert_eq!(CivilTime::from_unix(unix).to_unix(), unix);
        }

        #[test]
        fn no_sequence_of_port_accesses_panics(accesses in prop::collection::vec((0_u64..3, any::<u8>()), 0..200)) {
            let rtc = Rtc::new(1 << 30, 0);
            for (offset, value) in accesses {
                rtc.write(offset, &[value]);
                rtc.read(offset, &mut [0]);
            }
        }
    }

    #[test]
    fn the_clock_shows_bcd_utc_and_can_be_set() {
        let rtc = Rtc::new(1 << 30, 0);
        write(&rtc, 0x0b, 0x82);
        for (index, value) in [
            (0x32, 0x20),
            (0x09, 0x31),
            (0x08, 0x12),
            (0x07, 0x25),
            (0x04, 0x13),
            (0x02, 0x59),
            (0x00, 0x07),
        ] {
            write(&rtc, index, value);
        }
        write(&rtc, 0x0b, 0x02);
        assert_eq!(read(&rtc, 0x09), 0x31);
        assert_eq!(read(&rtc, 0x04), 0x13);
        assert_eq!(read(&rtc, 0x02), 0x59);
        write(&rtc, 0x0b, 0x00);
        assert_eq!(read(&rtc, 0x04), 0x81, "one in the afternoon, 12-hour mode");
    }

    #[test]
    fn firmware_finds_the_size_of_ram() {
        let rtc = Rtc::new(2 << 30, 1 << 30);
        let above_16m = u32::from(read(&rtc, 0x34)) | u32::from(read(&rtc, 0x35)) << 8;
        assert_eq!((u64::from(above_16m) << 16) + (16 << 20), 2 << 30);
        let above_4g = u32::from(read(&rtc, 0x5b))
            | u32::from(read(&rtc, 0x5c)) << 8
            | u32::from(read(&rtc, 0x5d)) << 16;
        assert_eq!(u64::from(above_4g) << 16, 1 << 30);
    }

    #[test]
    fn cmos_memory_and_the_set_time_survive_a_round_trip() {
        let rtc = Rtc::new(1 << 30, 0);
        write(&rtc, 0x40, 0x5a);
        write(&rtc, 0x09, 0x40);
        let other = Rtc::new(1 << 30, 0);
        other.restore(&rtc.state());
        assert_eq!(read(&other, 0x40), 0x5a);
        assert_eq!(read(&other, 0x09), 0x40);
    }
}
