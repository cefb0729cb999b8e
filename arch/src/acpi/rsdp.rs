//! Root System Description Pointer (ACPI 6.5 §5.2.5).

use acpi_tables::rsdp::Rsdp;

use super::{OEM_ID, bytes};

/// Bytes of a revision 2 RSDP.
pub(super) const LENGTH: usize = 36;

pub(super) fn build(xsdt: u64) -> Vec<u8> {
    bytes(&Rsdp::new(OEM_ID, xsdt))
}
