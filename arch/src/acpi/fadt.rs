//! Fixed ACPI Description Table (ACPI 6.5 §5.2.9).
//!
//! | register block | port | length |
//! |---|---|---|
//! | PM1a event (status, enable) | PMBASE + 0 | 4 |
//! | PM1a control | PMBASE + 4 | 2 |
//! | PM timer, 24 bits | PMBASE + 8 | 4 |
//! | reset register | 0xCF9 ← 6 | 1 |
//!
//! The power button is a fixed-feature one (its flag is clear), so it needs no AML. There is no SMI port: SMI_CMD is 0, which says
//! that the machine is in ACPI mode from the start. There are no general-purpose events.

use acpi_tables::fadt::{FADTBuilder, Flags, PmProfile};
use acpi_tables::gas::{AccessSize, AddressSpace, GAS};

use super::{AcpiConfig, OEM_ID, OEM_REVISION, OEM_TABLE_ID, bytes};
use crate::layout::{gsi, ports};

mod bits {
    //! IA-PC boot architecture flags (§5.2.9.3). The 8042 flag stays clear: the ports serve for reset only.
    pub(super) const LEGACY_DEVICES: u16 = 1 << 0;
    pub(super) const VGA_NOT_PRESENT: u16 = 1 << 2;
    pub(super) const PCIE_ASPM_CONTROLS: u16 = 1 << 4;
    pub(super) const CMOS_RTC_NOT_PRESENT: u16 = 1 << 5;
    /// Latencies that say "no C2" and "no C3" (table 5.9).
    pub(super) const NO_C2: u16 = 101;
    pub(super) const NO_C3: u16 = 1001;
    /// CMOS byte that holds the century.
    pub(super) const CMOS_CENTURY: u8 = 0x32;
}

const PM1_EVENT_LENGTH: u8 = 4;
const PM1_CONTROL_LENGTH: u8 = 2;
const PM_TIMER_LENGTH: u8 = 4;

fn port(port: u16, length: u8, access: AccessSize) -> GAS {
    GAS::new(
        AddressSpace::SystemIo,
        length * 8,
        0,
        access,
        u64::from(port),
    )
}

/// The table; `facs` and `dsdt` are guest-physical addresses.
pub(super) fn build(config: &AcpiConfig, facs: u64, dsdt: u64) -> Vec<u8> {
    let event = config.pm_base.wrapping_add(ports::PM1_EVENT_OFFSET);
    let control = config.pm_base.wrapping_add(ports::PM1_CONTROL_OFFSET);
    let timer = config.pm_base.wrapping_add(ports::PM_TIMER_OFFSET);

    let mut fadt = FADTBuilder::new(OEM_ID, OEM_TABLE_ID, OEM_REVISION)
        .preferred_pm_profile(PmProfile::EnterpriseServer)
        .flag(Flags::Wbinvd)
        .flag(Flags::ProcC1)
        .flag(Flags::SlpButton)
        .flag(Flags::FixRtc)
        .flag(Flags::ResetRegSup);
    fadt.firmware_ctrl = u32::try_from(facs).unwrap_or(0).into();
    fadt.x_firmware_ctrl = if facs > u64::from(u32::MAX) {
        facs.into()
    } else {
        0.into()
    };
    fadt.dsdt = u32::try_from(dsdt).unwrap_or(0).into();
    fadt.x_dsdt = dsdt.into();

    fadt.sci_int = (gsi::SCI as u16).into();
    fadt.pm1a_evt_blk = u32::from(event).into();
    fadt.pm1_evt_len = PM1_EVENT_LENGTH;
    fadt.x_pm1a_evt_blk = port(event, PM1_EVENT_LENGTH, AccessSize::WordAccess);
    fadt.pm1a_cnt_blk = u32::from(control).into();
    fadt.pm1_cnt_len = PM1_CONTROL_LENGTH;
    fadt.x_pm1a_cnt_blk = port(control, PM1_CONTROL_LENGTH, AccessSize::WordAccess);
    fadt.pm_tmr_blk = u32::from(timer).into();
    fadt.pm_tmr_len = PM_TIMER_LENGTH;
    fadt.x_pm_tmr_blk = port(timer, PM_TIMER_LENGTH, AccessSize::DwordAccess);
    fadt.p_lvl2_lat = bits::NO_C2.into();
    fadt.p_lvl3_lat = bits::NO_C3.into();

    fadt.reset_reg = port(ports::RESET, 1, AccessSize::ByteAccess);
    fadt.reset_value = ports::RESET_VALUE;
    let mut boot_arch = bits::VGA_NOT_PRESENT | bits::PCIE_ASPM_CONTROLS;
    if config.serial {
        boot_arch |= bits::LEGACY_DEVICES;
    }
    if config.rtc {
        fadt.century = bits::CMOS_CENTURY;
    } else {
        boot_arch |= bits::CMOS_RTC_NOT_PRESENT;
    }
    fadt.iapc_boot_arch = boot_arch.into();
    bytes(&fadt.finalize())
}
