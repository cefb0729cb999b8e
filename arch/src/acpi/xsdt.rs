//! Extended System Description Table (ACPI 6.5 §5.2.8): the addresses of the others.

use acpi_tables::xsdt::XSDT;

use super::{OEM_ID, OEM_REVISION, OEM_TABLE_ID, bytes};

pub(super) fn build(tables: &[u64]) -> Vec<u8> {
    let mut xsdt = XSDT::new(OEM_ID, OEM_TABLE_ID, OEM_REVISION);
    for &table in tables {
        xsdt.add_entry(table);
    }
    bytes(&xsdt)
}
