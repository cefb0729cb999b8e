//! The tables, parsed back as a guest would.

use super::*;
use crate::layout::ACPI_REGION;

fn config(topology: Topology) -> AcpiConfig {
    let mut config = AcpiConfig::direct_boot(topology, RamLayout::new(3 << 30), 46);
    config.pci_slots = vec![1, 2, 31];
    config
}

fn built(config: &AcpiConfig) -> AcpiTables {
    AcpiTables::build(config, ACPI_REGION).unwrap()
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())
}

fn sum(bytes: &[u8]) -> u8 {
    bytes.iter().fold(0, |sum, byte| sum.wrapping_add(*byte))
}

impl AcpiTables {
    /// The table at a guest-physical address, with its checksum verified.
    fn at(&self, address: u64) -> &[u8] {
        let start = (address - self.rsdp.0) as usize;
        let length = u32_at(&self.blob, start + 4) as usize;
        let table = &self.blob[start..start + length];
        assert_eq!(&self.blob[start..start + 4], &table[..4]);
        if &table[..4] != b"FACS" {
            assert_eq!(sum(table), 0, "{}", String::from_utf8_lossy(&table[..4]));
        }
        table
    }

    fn find(&self, signature: &[u8; 4]) -> Option<&[u8]> {
        let xsdt = self.at(u64_at(&self.blob, 24));
        assert_eq!(&xsdt[..4], b"XSDT");
        xsdt[36..]
            .chunks_exact(8)
            .map(|entry| self.at(u64_at(entry, 0)))
            .find(|table| &table[..4] == signature)
    }
}

#[test]
fn the_root_pointer_leads_to_every_table_with_good_checksums() {
    let tables = built(&config(Topology::flat(4).unwrap()));
    assert_eq!(tables.rsdp.0, 0xE_0000);
    assert_eq!(&tables.blob[..8], b"RSD PTR ");
    assert_eq!(sum(&tables.blob[..20]), 0);
    assert_eq!(sum(&tables.blob[..36]), 0);
    for signature in [b"FACP", b"APIC", b"MCFG"] {
        assert!(tables.find(signature).is_some());
    }
    let fadt = tables.find(b"FACP").unwrap();
    assert_eq!(&tables.at(u64_at(fadt, 140))[..4], b"DSDT");
    let facs = u32_at(fadt, 36);
    assert_eq!(facs % 64, 0);
    assert_eq!(&tables.at(u64::from(facs))[..4], b"FACS");
}

#[test]
fn power_management_is_where_the_chipset_has_it() {
    let tables = built(&config(Topology::flat(1).unwrap()));
    let fadt = tables.find(b"FACP").unwrap();
    assert_eq!(fadt.len(), 276);
    assert_eq!(
        u32_at(fadt, 48),
        0,
        "no SMI port, so ACPI mode is on from the start"
    );
    assert_eq!((u32_at(fadt, 56), fadt[88]), (0x600, 4));
    assert_eq!((u32_at(fadt, 64), fadt[89]), (0x604, 2));
    assert_eq!((u32_at(fadt, 76), fadt[91]), (0x608, 4));
    assert_eq!((u64_at(fadt, 120), fadt[128]), (0xCF9, 6));
    let flags = u32_at(fadt, 112);
    assert_eq!(flags & 1 << 4, 0, "the power button is a fixed one");
    assert_ne!(flags & 1 << 10, 0, "the reset register is there");
    assert_eq!(flags & 1 << 20, 0, "not hardware-reduced");
    assert_eq!(u32_at(fadt, 80), 0, "no general-purpose events");
}

#[test]
fn the_legacy_devices_that_are_absent_are_said_to_be() {
    let boot_arch = |config: &AcpiConfig| {
        let tables = built(config);
        let fadt = tables.find(b"FACP").unwrap();
        u16::from_le_bytes([fadt[109], fadt[110]])
    };
    let mut config = config(Topology::flat(1).unwrap());
    assert_eq!(boot_arch(&config), 0b11_0101);
    config.rtc = true;
    config.serial = false;
    assert_eq!(boot_arch(&config), 0b01_0100);
}

#[test]
fn the_madt_lists_each_processor_by_its_x2apic_id() {
    let topology = Topology::new(2, 1, 3, 1).unwrap();
    let tables = built(&config(topology));
    let madt = tables.find(b"APIC").unwrap();
    let mut entries = &madt[44..];
    let (mut ids, mut kinds) = (Vec::new(), Vec::new());
    while let [kind, length, ..] = *entries {
        if kind == 0 {
            ids.push(u32::from(entries[3]));
        }
        kinds.push(kind);
        entries = &entries[usize::from(length)..];
    }
    assert_eq!(ids, topology.apic_ids().collect::<Vec<_>>());
    assert_eq!(kinds, [0, 0, 0, 0, 0, 0, 1, 2, 4]);
}

#[test]
fn the_mcfg_covers_only_the_buses_that_can_exist() {
    let tables = built(&config(Topology::flat(1).unwrap()));
    let mcfg = tables.find(b"MCFG").unwrap();
    assert_eq!(u64_at(mcfg, 44), 0xE000_0000);
    assert_eq!((mcfg[54], mcfg[55]), (0, 0));
}

#[test]
fn the_srat_appears_with_a_second_socket_and_covers_all_ram() {
    assert!(
        built(&config(Topology::flat(8).unwrap()))
            .find(b"SRAT")
            .is_none()
    );
    let tables = built(&config(Topology::new(2, 1, 2, 2).unwrap()));
    let srat = tables.find(b"SRAT").unwrap();
    let memory = &srat[48 + 8 * 16..];
    assert_eq!(memory.len(), 2 * 40);
    assert_eq!((u64_at(memory, 8), u64_at(memory, 16)), (0, 2 << 30));
    assert_eq!((u64_at(memory, 48), u64_at(memory, 56)), (4 << 30, 1 << 30));
}

#[test]
fn sixty_four_processors_and_every_slot_fit_into_the_region() {
    let mut config = config(Topology::new(2, 2, 8, 2).unwrap());
    config.pci_slots = (0..32).collect();
    config.rtc = true;
    let tables = built(&config);
    assert!((tables.blob.len() as u64) < ACPI_REGION.end - ACPI_REGION.start);
}

#[test]
fn a_region_that_is_too_small_is_refused() {
    let config = config(Topology::flat(1).unwrap());
    let error = AcpiTables::build(&config, 0xE_0000..0xE_0100).unwrap_err();
    assert!(
        matches!(error, AcpiError::TooLarge { available: 256, .. }),
        "{error}"
    );
}

#[test]
fn contradictions_are_refused_by_name() {
    let good = config(Topology::flat(1).unwrap());
    let build = |change: fn(&mut AcpiConfig)| {
        let mut config = good.clone();
        change(&mut config);
        AcpiTables::build(&config, ACPI_REGION).unwrap_err()
    };
    assert_eq!(
        build(|config| config.ecam.base = 0xFFFF_0000_0000),
        AcpiError::EcamTooHigh {
            base: 0xFFFF_0000_0000
        }
    );
    assert_eq!(
        build(|config| config.pci_slots.push(32)),
        AcpiError::BadSlot { slot: 32 }
    );
    assert_eq!(
        build(|config| config.pci_mmio32.push(0x1000..0x1000)),
        AcpiError::BadWindow {
            start: 0x1000,
            end: 0x1000
        }
    );
}

#[test]
fn the_64_bit_window_follows_the_address_width() {
    for (phys_bits, start) in [
        (39, 0x70_0000_0000_u64),
        (40, 0xE0_0000_0000),
        (46, 0x3800_0000_0000),
        (52, 0xE_0000_0000_0000),
    ] {
        let config = AcpiConfig::direct_boot(
            Topology::flat(1).unwrap(),
            RamLayout::new(1 << 30),
            phys_bits,
        );
        let tables = built(&config);
        let needle = start.to_le_bytes();
        assert!(
            tables.blob.windows(8).any(|window| window == needle),
            "{phys_bits} bits"
        );
    }
}

/// Disassembles the DSDT with ACPICA's own compiler where it is installed, and compiles the result again.
#[test]
fn acpica_reads_the_dsdt_without_complaint() {
    use std::process::Command;
    let mut config = config(Topology::flat(2).unwrap());
    config.rtc = true;
    let tables = built(&config);
    let fadt = tables.find(b"FACP").unwrap();
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(
        directory.path().join("dsdt.aml"),
        tables.at(u64_at(fadt, 140)),
    )
    .unwrap();
    let iasl = |arguments: &[&str]| {
        Command::new("iasl")
            .args(arguments)
            .current_dir(directory.path())
            .output()
    };
    let disassembled = iasl(&["-d", "dsdt.aml"]).expect("iasl; `cargo xtask setup` installs it");
    assert!(disassembled.status.success(), "{disassembled:?}");
    let compiled = iasl(&["-ve", "dsdt.dsl"]).unwrap();
    assert!(
        compiled.status.success(),
        "{}",
        String::from_utf8_lossy(&compiled.stdout)
    );
    let source = std::fs::read_to_string(directory.path().join("dsdt.dsl")).unwrap();
    for expected in [
        "PNP0A08",
        "_PRT",
        "_OSC",
        "Name (_S5, Package",
        "COM1",
        "RTC0",
    ] {
        assert!(source.contains(expected), "no {expected} in\n{source}");
    }
}
