//! System Resource Affinity Table (ACPI 6.5 §5.2.16): which processors and which RAM are near each other.
//!
//! All RAM is one node, which is what a guest assumes without this table; with several sockets it is said.

use acpi_tables::sdt::Sdt;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes};

use super::{OEM_ID, OEM_REVISION, OEM_TABLE_ID};
use crate::layout::RamLayout;
use crate::topology::Topology;

const REVISION: u8 = 3;
const HEADER_LENGTH: u32 = 36;
const ENABLED: u32 = 1;
const DOMAIN: u32 = 0;

/// Must be 1, then 8 reserved bytes (table 5.56).
#[derive(IntoBytes, FromBytes, Immutable)]
#[repr(C)]
struct Fixed {
    revision: U32,
    reserved: [u8; 8],
}

/// §5.2.16.1.
#[derive(IntoBytes, FromBytes, Immutable)]
#[repr(C)]
struct ProcessorAffinity {
    kind: u8,
    length: u8,
    domain_low: u8,
    apic_id: u8,
    flags: U32,
    sapic_eid: u8,
    domain_high: [u8; 3],
    clock_domain: U32,
}

/// §5.2.16.2.
#[derive(IntoBytes, FromBytes, Immutable)]
#[repr(C, packed)]
struct MemoryAffinity {
    kind: u8,
    length: u8,
    domain: U32,
    reserved1: U16,
    base: U64,
    size: U64,
    reserved2: U32,
    flags: U32,
    reserved3: U64,
}

/// The table, or none where a single socket makes it pointless.
pub(super) fn build(topology: &Topology, ram: &RamLayout) -> Option<Vec<u8>> {
    if topology.sockets() == 1 {
        return None;
    }
    let mut srat = Sdt::new(
        *b"SRAT",
        HEADER_LENGTH,
        REVISION,
        OEM_ID,
        OEM_TABLE_ID,
        OEM_REVISION,
    );
    srat.append(Fixed {
        revision: U32::new(1),
        reserved: [0; 8],
    });
    for apic_id in topology.apic_ids() {
        srat.append(ProcessorAffinity {
            kind: 0,
            length: 16,
            domain_low: DOMAIN as u8,
            apic_id: apic_id as u8,
            flags: U32::new(ENABLED),
            sapic_eid: 0,
            domain_high: [0; 3],
            clock_domain: U32::ZERO,
        });
    }
    for range in ram.ranges() {
        srat.append(MemoryAffinity {
            kind: 1,
            length: 40,
            domain: U32::new(DOMAIN),
            reserved1: U16::ZERO,
            base: U64::new(range.start),
            size: U64::new(range.end - range.start),
            reserved2: U32::ZERO,
            flags: U32::new(ENABLED),
            reserved3: U64::ZERO,
        });
    }
    Some(srat.as_slice().to_vec())
}
