//! Multiple APIC Description Table (ACPI 6.5 §5.2.12): processors, the I/O APIC and what ISA interrupts became.

use acpi_tables::sdt::Sdt;
use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes};

use super::{OEM_ID, OEM_REVISION, OEM_TABLE_ID};
use crate::layout::{IOAPIC_START, LAPIC_START, gsi};
use crate::topology::Topology;

const REVISION: u8 = 5;
const HEADER_LENGTH: u32 = 36;
/// Two 8259 interrupt controllers exist too (§5.2.12, table 5.20).
const PCAT_COMPAT: u32 = 1;
/// Flags of an interrupt override (table 5.26): as the bus has it, or level and active high.
const CONFORMS: u16 = 0;
const LEVEL_ACTIVE_HIGH: u16 = 0b1101;
/// Non-maskable interrupts come in at this local APIC input.
const NMI_LINT: u8 = 1;

/// Local APIC and flags.
#[derive(IntoBytes, FromBytes, Immutable)]
#[repr(C)]
struct Fixed {
    lapic_address: U32,
    flags: U32,
}

/// §5.2.12.2. `flags` bit 0: enabled.
#[derive(IntoBytes, FromBytes, Immutable)]
#[repr(C)]
struct LocalApic {
    kind: u8,
    length: u8,
    processor_uid: u8,
    apic_id: u8,
    flags: U32,
}

/// §5.2.12.3.
#[derive(IntoBytes, FromBytes, Immutable)]
#[repr(C)]
struct IoApic {
    kind: u8,
    length: u8,
    id: u8,
    reserved: u8,
    address: U32,
    gsi_base: U32,
}

/// §5.2.12.5.
#[derive(IntoBytes, FromBytes, Immutable)]
#[repr(C, packed)]
struct InterruptSourceOverride {
    kind: u8,
    length: u8,
    bus: u8,
    source: u8,
    gsi: U32,
    flags: U16,
}

/// §5.2.12.7. `processor_uid` 0xFF: all of them.
#[derive(IntoBytes, FromBytes, Immutable)]
#[repr(C, packed)]
struct LocalApicNmi {
    kind: u8,
    length: u8,
    processor_uid: u8,
    flags: U16,
    lint: u8,
}

pub(super) fn build(topology: &Topology) -> Vec<u8> {
    let mut madt = Sdt::new(
        *b"APIC",
        HEADER_LENGTH,
        REVISION,
        OEM_ID,
        OEM_TABLE_ID,
        OEM_REVISION,
    );
    madt.append(Fixed {
        lapic_address: U32::new(LAPIC_START as u32),
        flags: U32::new(PCAT_COMPAT),
    });
    for (uid, apic_id) in topology.apic_ids().enumerate() {
        // A checked topology has at most 64 processors and ids up to 254.
        madt.append(LocalApic {
            kind: 0,
            length: 8,
            processor_uid: uid as u8,
            apic_id: apic_id as u8,
            flags: U32::new(1),
        });
    }
    madt.append(IoApic {
        kind: 1,
        length: 12,
        id: 0,
        reserved: 0,
        address: U32::new(IOAPIC_START as u32),
        gsi_base: U32::ZERO,
    });
    // ISA IRQ 0 has none: the PIT is on input 0, where KVM's own routing has it. Moving it to input 2, as on a board with a PIC
    // cascade, would cost a write of the routing table, which takes milliseconds, before every boot.
    madt.append(InterruptSourceOverride {
        kind: 2,
        length: 10,
        bus: 0,
        source: gsi::SCI as u8,
        gsi: U32::new(gsi::SCI),
        flags: U16::new(LEVEL_ACTIVE_HIGH),
    });
    madt.append(LocalApicNmi {
        kind: 4,
        length: 6,
        processor_uid: 0xFF,
        flags: U16::new(CONFORMS),
        lint: NMI_LINT,
    });
    madt.as_slice().to_vec()
}
