//! ACPI tables that firmware places: blobs with offsets instead of addresses, and a script that says where addresses go.
//!
//! ```text
//!  etc/acpi/rsdp     RSDP            ──xsdt──>┐
//!  etc/acpi/tables   FACS DSDT FADT MADT MCFG XSDT     addresses count from the blob's start
//!  etc/table-loader  allocate tables, allocate rsdp, add pointer …, add checksum …
//! ```
//!
//! Firmware downloads each file, allocates memory for it, adds the address of one file to fields of another, and then makes checksums
//! right (QEMU `hw/acpi/bios-linker-loader`; edk2 `OvmfPkg/AcpiPlatformDxe`). A command takes 128 bytes.

use acpi_tables::Aml;

use super::{AcpiConfig, AcpiError, Blob, bytes, check, dsdt, fadt, madt, mcfg, rsdp, srat, xsdt};

/// Name of the file with the root pointer.
pub const RSDP_FILE: &str = "etc/acpi/rsdp";
/// Name of the file with all other tables.
pub const TABLES_FILE: &str = "etc/acpi/tables";
/// Name of the file with the script.
pub const LOADER_FILE: &str = "etc/table-loader";

/// Where the fields are that hold addresses and checksums.
mod field {
    /// Checksum of every table with a standard header (ACPI 6.5 table 5.4).
    pub(super) const CHECKSUM: u32 = 9;
    /// Bytes of the standard header; the XSDT's entries follow it.
    pub(super) const HEADER_BYTES: u32 = 36;
    /// FADT: FIRMWARE_CTRL, DSDT and X_DSDT (table 5.9).
    pub(super) const FADT_FIRMWARE_CTRL: u32 = 36;
    pub(super) const FADT_DSDT: u32 = 40;
    pub(super) const FADT_X_DSDT: u32 = 140;
    /// RSDP: checksum of the first 20 bytes, XSDT address, checksum of all (table 5.3).
    pub(super) const RSDP_CHECKSUM: u32 = 8;
    pub(super) const RSDP_FIRST_BYTES: u32 = 20;
    pub(super) const RSDP_XSDT: u32 = 24;
    pub(super) const RSDP_EXTENDED_CHECKSUM: u32 = 32;
}

/// Commands of the script.
mod command {
    pub(super) const BYTES: usize = 128;
    pub(super) const NAME_BYTES: usize = 56;
    pub(super) const ALLOCATE: u32 = 1;
    pub(super) const ADD_POINTER: u32 = 2;
    pub(super) const ADD_CHECKSUM: u32 = 3;
    /// Zones of an allocation: anywhere, or where a BIOS would look for an RSDP.
    pub(super) const ZONE_HIGH: u8 = 1;
    pub(super) const ZONE_FSEG: u8 = 2;
}

/// Tables for firmware to place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadableTables {
    /// Contents of [`RSDP_FILE`].
    pub rsdp: Vec<u8>,
    /// Contents of [`TABLES_FILE`].
    pub tables: Vec<u8>,
    /// Contents of [`LOADER_FILE`].
    pub loader: Vec<u8>,
}

impl LoadableTables {
    /// Builds the tables of a machine.
    ///
    /// # Errors
    /// `config` contradicts itself.
    pub fn build(config: &AcpiConfig) -> Result<Self, AcpiError> {
        check(config)?;
        let mut blob = Blob {
            start: 0,
            bytes: Vec::new(),
        };
        let mut script = Script::default();
        script.allocate(
            TABLES_FILE,
            super::TABLE_ALIGNMENT as u32,
            command::ZONE_HIGH,
        );
        script.allocate(RSDP_FILE, 16, command::ZONE_FSEG);

        let facs = blob.append(&bytes(&acpi_tables::facs::FACS::new() as &dyn Aml));
        let dsdt = blob.append(&dsdt::build(config));
        let fadt = blob.append(&fadt::build(config, facs, dsdt));
        let at = fadt as u32;
        script.add_pointer(TABLES_FILE, at + field::FADT_FIRMWARE_CTRL, 4);
        script.add_pointer(TABLES_FILE, at + field::FADT_DSDT, 4);
        script.add_pointer(TABLES_FILE, at + field::FADT_X_DSDT, 8);
        script.checksum_table(fadt, blob.bytes.len());
        let mut tables = vec![fadt];
        let others = [
            Some(madt::build(&config.topology)),
            Some(mcfg::build(config.ecam)),
            srat::build(&config.topology, &config.ram),
        ];
        tables.extend(others.iter().flatten().map(|table| blob.append(table)));
        let xsdt = blob.append(&xsdt::build(&tables));
        for n in 0..tables.len() as u32 {
            script.add_pointer(TABLES_FILE, xsdt as u32 + field::HEADER_BYTES + 8 * n, 8);
        }
        script.checksum_table(xsdt, blob.bytes.len());

        let mut rsdp = rsdp::build(xsdt);
        script.add_pointer(RSDP_FILE, field::RSDP_XSDT, 8);
        for (at, length) in [
            (field::RSDP_CHECKSUM, field::RSDP_FIRST_BYTES),
            (field::RSDP_EXTENDED_CHECKSUM, rsdp::LENGTH as u32),
        ] {
            if let Some(checksum) = rsdp.get_mut(at as usize) {
                *checksum = 0;
            }
            script.add_checksum(RSDP_FILE, at, 0, length);
        }
        // Firmware adds all bytes up, the old checksum included.
        for table in [fadt, xsdt] {
            if let Some(checksum) = blob
                .bytes
                .get_mut((table as u32 + field::CHECKSUM) as usize)
            {
                *checksum = 0;
            }
        }
        Ok(Self {
            rsdp,
            tables: blob.bytes,
            loader: script.0,
        })
    }
}

/// The script.
#[derive(Default)]
struct Script(Vec<u8>);

impl Script {
    fn push(&mut self, fields: &[&[u8]]) {
        let start = self.0.len();
        for field in fields {
            self.0.extend_from_slice(field);
        }
        self.0.resize(start + command::BYTES, 0);
    }

    fn allocate(&mut self, file: &str, alignment: u32, zone: u8) {
        self.push(&[
            &command::ALLOCATE.to_le_bytes(),
            &name(file),
            &alignment.to_le_bytes(),
            &[zone],
        ]);
    }

    /// Adds the address of the tables to a field of `size` bytes.
    fn add_pointer(&mut self, file: &str, at: u32, size: u8) {
        self.push(&[
            &command::ADD_POINTER.to_le_bytes(),
            &name(file),
            &name(TABLES_FILE),
            &at.to_le_bytes(),
            &[size],
        ]);
    }

    fn add_checksum(&mut self, file: &str, at: u32, from: u32, length: u32) {
        self.push(&[
            &command::ADD_CHECKSUM.to_le_bytes(),
            &name(file),
            &at.to_le_bytes(),
            &from.to_le_bytes(),
            &length.to_le_bytes(),
        ]);
    }

    /// Makes the checksum of the table right that lies from `from` to `end` of the tables.
    fn checksum_table(&mut self, from: u64, end: usize) {
        let start = from as u32;
        self.add_checksum(
            TABLES_FILE,
            start + field::CHECKSUM,
            start,
            end as u32 - start,
        );
    }
}

fn name(file: &str) -> [u8; command::NAME_BYTES] {
    let mut name = [0; command::NAME_BYTES];
    for (to, from) in name.iter_mut().zip(file.bytes()) {
        *to = from;
    }
    name
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;
    use crate::layout::RamLayout;
    use crate::topology::Topology;

    const TABLES_AT: u64 = 0x7f00_0000;
    const RSDP_AT: u64 = 0x7e00_0000;

    fn config() -> AcpiConfig {
        let ram = RamLayout::new(512 << 20);
        AcpiConfig::direct_boot(Topology::new(2, 1, 2, 1).unwrap(), ram, 40)
    }

    fn number(bytes: &[u8]) -> u64 {
        bytes.iter().rev().fold(0, |n, b| n << 8 | u64::from(*b))
    }

    fn text(bytes: &[u8]) -> String {
        let end = bytes.iter().position(|b| *b == 0).unwrap();
        String::from_utf8(bytes[..end].to_vec()).unwrap()
    }

    /// What firmware does with the script.
    fn place(tables: &LoadableTables) -> HashMap<String, (u64, Vec<u8>)> {
        let mut files = HashMap::new();
        for line in tables.loader.chunks_exact(128) {
            let file = text(&line[4..60]);
            match number(&line[..4]) {
                1 => {
                    let (at, bytes) = match file.as_str() {
                        RSDP_FILE => (RSDP_AT, tables.rsdp.clone()),
                        _ => (TABLES_AT, tables.tables.clone()),
                    };
                    assert!(at.is_multiple_of(number(&line[60..64])));
                    files.insert(file, (at, bytes));
                }
                2 => {
                    let (address, _) = files[&text(&line[60..116])];
                    let at = number(&line[116..120]) as usize;
                    let size = line[120] as usize;
                    let field = &mut files.get_mut(&file).unwrap().1[at..at + size];
                    let value = number(field) + address;
                    field.copy_from_slice(&value.to_le_bytes()[..size]);
                }
                3 => {
                    let field = |n: usize| number(&line[60 + 4 * n..64 + 4 * n]) as usize;
                    let bytes = &mut files.get_mut(&file).unwrap().1;
                    let sum = bytes[field(1)..field(1) + field(2)]
                        .iter()
                        .fold(0u8, |sum, b| sum.wrapping_add(*b));
                    bytes[field(0)] = bytes[field(0)].wrapping_sub(sum);
                }
                other => panic!("command {other}"),
            }
        }
        files
    }

    fn sum(bytes: &[u8]) -> u8 {
        bytes.iter().fold(0, |sum, b| sum.wrapping_add(*b))
    }

    #[test]
    fn placed_by_firmware_they_are_a_valid_tree() {
        let files = place(&LoadableTables::build(&config()).unwrap());
        let (_, rsdp) = &files[RSDP_FILE];
        let (start, tables) = &files[TABLES_FILE];
        assert_eq!(&rsdp[..8], b"RSD PTR ");
        assert_eq!((sum(&rsdp[..20]), sum(rsdp)), (0, 0));
        let table = |address: u64| {
            let at = (address - start) as usize;
            let length = number(&tables[at + 4..at + 8]) as usize;
            &tables[at..at + length]
        };
        let xsdt = table(number(&rsdp[24..32]));
        assert_eq!(&xsdt[..4], b"XSDT");
        let mut seen = Vec::new();
        for entry in xsdt[36..].chunks_exact(8) {
            let table = table(number(entry));
            assert_eq!(sum(table), 0, "{:?}", &table[..4]);
            seen.push(String::from_utf8(table[..4].to_vec()).unwrap());
        }
        assert_eq!(sum(xsdt), 0);
        assert_eq!(seen, ["FACP", "APIC", "MCFG", "SRAT"]);
        let fadt = table(number(&xsdt[36..44]));
        let facs = number(&fadt[36..40]);
        assert_eq!(&table(facs)[..4], b"FACS");
        assert!(facs.is_multiple_of(64));
        let dsdt = number(&fadt[40..44]);
        assert_eq!(number(&fadt[140..148]), dsdt);
        assert_eq!(&table(dsdt)[..4], b"DSDT");
        assert_eq!(sum(table(dsdt)), 0);
    }
}
