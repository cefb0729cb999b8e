//! Memory-mapped configuration space (PCI Firmware Specification 3.3 §4.1.2).

use acpi_tables::mcfg::MCFG;

use super::{Ecam, OEM_ID, OEM_REVISION, OEM_TABLE_ID, bytes};

pub(super) fn build(ecam: Ecam) -> Vec<u8> {
    let mut mcfg = MCFG::new(OEM_ID, OEM_TABLE_ID, OEM_REVISION);
    mcfg.add_ecam(ecam.base, 0, 0, ecam.last_bus);
    bytes(&mcfg)
}
