//! SMBIOS tables (DSP0134 3.6): what the machine calls itself, and its inventory.
//!
//! | type | structure | from |
//! |---|---|---|
//! | 0 | firmware | version of Drover |
//! | 1 | system | name, serial number, UUID |
//! | 3 | chassis | — |
//! | 4 | processor, one a socket | topology, CPUID signature |
//! | 11 | OEM strings | the definition (systemd credentials) |
//! | 16, 17, 19 | memory array, devices, mapped addresses | RAM |
//! | 32 | boot status | — |
//! | 127 | end of table | — |
//!
//! Strings follow their structure, numbered from 1, each NUL-terminated, and a further NUL ends the list (§6.1.3).

use std::ops::Range;

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::Gpa;
use crate::layout::RamLayout;
use crate::topology::Topology;

const MANUFACTURER: &str = "Drover";
/// Where the table starts behind the 24-byte entry point.
const TABLE_OFFSET: u64 = 32;
/// Largest memory device that a single structure describes here, so that sizes look like DIMMs: 16 GiB.
const MEMORY_DEVICE_SIZE: u64 = 16 << 30;

/// §5.2.2.
#[derive(IntoBytes, FromBytes, Immutable)]
#[repr(C, packed)]
struct EntryPoint {
    anchor: [u8; 5],
    checksum: u8,
    length: u8,
    major: u8,
    minor: u8,
    docrev: u8,
    revision: u8,
    reserved: u8,
    max_size: U32,
    address: U64,
}

/// What the tables say.
#[derive(Clone, Debug)]
pub struct SmbiosConfig {
    /// Product name of the system.
    pub product: String,
    /// Version of the VMM.
    pub version: String,
    /// Serial number of the system; may carry `ds=nocloud;…` for cloud-init.
    pub serial: String,
    /// System UUID, in the order in which it is written (RFC 4122).
    pub uuid: [u8; 16],
    /// OEM strings (type 11), such as `io.systemd.credential:…`.
    pub oem_strings: Vec<String>,
    /// Processors.
    pub topology: Topology,
    /// [`crate::cpuid::CpuidPolicy::processor_id`].
    pub processor_id: u64,
    /// RAM.
    pub ram: RamLayout,
}

/// Why no tables can be made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SmbiosError {
    /// A string that the format cannot hold.
    #[error("SMBIOS {field}: contains a NUL byte")]
    Nul {
        /// Which string.
        field: &'static str,
    },
    /// Strings are counted by a byte.
    #[error("SMBIOS OEM strings: {count}, at most 255")]
    TooManyStrings {
        /// How many there are.
        count: usize,
    },
    /// They are larger than their place.
    #[error("SMBIOS tables: {needed} bytes do not fit into {available}")]
    TooLarge {
        /// Bytes of entry point and table.
        needed: u64,
        /// Bytes of the region.
        available: u64,
    },
}

/// Entry point and table for one place in memory.
#[derive(Clone, Debug)]
pub struct SmbiosTables {
    /// Where `blob` goes.
    pub address: Gpa,
    /// The 64-bit entry point (`_SM3_`), then the structures.
    pub blob: Vec<u8>,
}

impl SmbiosTables {
    /// Builds the tables for `region`, e.g. [`crate::layout::SMBIOS_REGION`], where a guest without UEFI searches them.
    ///
    /// # Errors
    /// They do not fit, or a string cannot be said.
    pub fn build(config: &SmbiosConfig, region: Range<u64>) -> Result<Self, SmbiosError> {
        let table = structures(config)?;
        let needed = TABLE_OFFSET + table.len() as u64;
        let available = region.end.saturating_sub(region.start);
        if needed > available {
            return Err(SmbiosError::TooLarge { needed, available });
        }
        let mut entry = EntryPoint {
            anchor: *b"_SM3_",
            checksum: 0,
            length: size_of::<EntryPoint>() as u8,
            major: 3,
            minor: 6,
            docrev: 0,
            revision: 1,
            reserved: 0,
            max_size: U32::new(table.len() as u32),
            address: U64::new(region.start + TABLE_OFFSET),
        };
        let sum = entry
            .as_bytes()
            .iter()
            .fold(0_u8, |sum, byte| sum.wrapping_add(*byte));
        entry.checksum = sum.wrapping_neg();
        let mut blob = entry.as_bytes().to_vec();
        blob.resize(TABLE_OFFSET as usize, 0);
        blob.extend(table);
        Ok(Self {
            address: vm_memory::GuestAddress(region.start),
            blob,
        })
    }

    /// Entry point and structures apart, as firmware takes them; it says in the entry point where it puts the structures.
    #[must_use]
    pub fn into_parts(self) -> (Vec<u8>, Vec<u8>) {
        let mut anchor = self.blob;
        let structures = anchor.split_off((TABLE_OFFSET as usize).min(anchor.len()));
        anchor.truncate(size_of::<EntryPoint>());
        (anchor, structures)
    }
}

/// Structures, one behind the other, with ascending handles.
#[derive(Default)]
struct Table {
    bytes: Vec<u8>,
    next_handle: u16,
}

impl Table {
    /// Appends a structure and returns its handle. `body` is the formatted area behind the header.
    fn add(&mut self, kind: u8, body: &[&[u8]], strings: &[&str]) -> u16 {
        let handle = self.next_handle;
        self.next_handle += 1;
        let length = 4 + body.iter().map(|part| part.len()).sum::<usize>();
        // Formatted areas here are constant-sized and below 256 bytes.
        self.bytes.extend([kind, length as u8]);
        self.bytes.extend(handle.to_le_bytes());
        self.bytes.extend(body.iter().copied().flatten());
        for string in strings.iter().filter(|string| !string.is_empty()) {
            self.bytes.extend(string.as_bytes());
            self.bytes.push(0);
        }
        if strings.iter().all(|string| string.is_empty()) {
            self.bytes.push(0);
        }
        self.bytes.push(0);
        handle
    }
}

fn structures(config: &SmbiosConfig) -> Result<Vec<u8>, SmbiosError> {
    let named = [
        ("product", &config.product),
        ("version", &config.version),
        ("serial", &config.serial),
    ];
    for (field, text) in named
        .into_iter()
        .chain(config.oem_strings.iter().map(|text| ("OEM string", text)))
    {
        if text.contains('\0') {
            return Err(SmbiosError::Nul { field });
        }
    }
    let oem_strings: Vec<&str> = config
        .oem_strings
        .iter()
        .map(String::as_str)
        .filter(|text| !text.is_empty())
        .collect();
    let Ok(oem_count) = u8::try_from(oem_strings.len()) else {
        return Err(SmbiosError::TooManyStrings {
            count: oem_strings.len(),
        });
    };

    let mut table = Table::default();
    firmware(&mut table, config);
    system(&mut table, config);
    chassis(&mut table);
    for socket in 0..config.topology.sockets() {
        processor(&mut table, config, socket);
    }
    if oem_count > 0 {
        table.add(11, &[&[oem_count]], &oem_strings);
    }
    memory(&mut table, &config.ram);
    // Type 32: boot status 0, no errors detected (§7.33).
    table.add(32, &[&[0; 7]], &[]);
    table.add(127, &[], &[]);
    Ok(table.bytes)
}

/// Type 0 (§7.1): no features but "is a virtual machine".
fn firmware(table: &mut Table, config: &SmbiosConfig) {
    const NOT_SUPPORTED: u64 = 1 << 3;
    const VIRTUAL_MACHINE: u8 = 1 << 4;
    table.add(
        0,
        &[
            &[1, 2],                      // vendor, version
            &[0, 0],                      // starting segment: not in the first MiB
            &[0],                         // release date: none
            &[0],                         // ROM size
            &NOT_SUPPORTED.to_le_bytes(), // characteristics
            &[0, VIRTUAL_MACHINE],        // extension bytes
            &[0xFF; 4],                   // releases of firmware and embedded controller: none
        ],
        &[MANUFACTURER, or_dash(&config.version)],
    );
}

/// Type 1 (§7.2). The first three fields of the UUID are little-endian (§7.2.1).
fn system(table: &mut Table, config: &SmbiosConfig) {
    const WAKE_UP_POWER_SWITCH: u8 = 6;
    let mut uuid = config.uuid;
    uuid[0..4].reverse();
    uuid[4..6].reverse();
    uuid[6..8].reverse();
    table.add(
        1,
        &[
            &[1, 2, 3, 4], // manufacturer, product, version, serial number
            &uuid,
            &[WAKE_UP_POWER_SWITCH, 0, 0], // no SKU, no family
        ],
        &[
            MANUFACTURER,
            or_dash(&config.product),
            or_dash(&config.version),
            or_dash(&config.serial),
        ],
    );
}

/// Type 3 (§7.4).
fn chassis(table: &mut Table) {
    const OTHER: u8 = 1;
    const STATE_SAFE: u8 = 3;
    const SECURITY_UNKNOWN: u8 = 2;
    table.add(
        3,
        &[
            &[1, OTHER, 0, 0, 0], // manufacturer, type; no version, serial number, asset tag
            &[STATE_SAFE, STATE_SAFE, STATE_SAFE, SECURITY_UNKNOWN], // boot-up, power, thermal
            &[0; 4],              // OEM-defined
            &[0, 0, 0, 0, 0],     // height, power cords, contained elements, their length, SKU
        ],
        &[MANUFACTURER],
    );
}

/// Type 4 (§7.5).
fn processor(table: &mut Table, config: &SmbiosConfig, socket: u32) {
    const TYPE_CENTRAL: u8 = 3;
    const FAMILY_UNKNOWN: u8 = 2;
    const POPULATED_ENABLED: u8 = 0x41;
    const UPGRADE_OTHER: u8 = 1;
    const NO_HANDLE: u16 = 0xFFFF;
    /// 64-bit capable, multi-core, execute protection.
    const CHARACTERISTICS: u16 = 1 << 2 | 1 << 3 | 1 << 5;
    let topology = &config.topology;
    let cores = topology.dies() * topology.cores();
    let threads = topology.threads_per_socket();
    let name = format!("CPU {socket}");
    let caches: Vec<u8> = [NO_HANDLE; 3]
        .into_iter()
        .flat_map(u16::to_le_bytes)
        .collect();
    // At most 64 of each, so that the one-byte fields hold them.
    let counts = [cores as u8, cores as u8, threads as u8];
    let counts2: Vec<u8> = [cores, cores, threads]
        .into_iter()
        .flat_map(|count| (count as u16).to_le_bytes())
        .collect();
    table.add(
        4,
        &[
            &[1, TYPE_CENTRAL, FAMILY_UNKNOWN, 2], // socket, type, family, manufacturer
            &config.processor_id.to_le_bytes(),
            &[0],    // version
            &[0],    // voltage
            &[0; 6], // external clock, maximum and current speed: unknown
            &[POPULATED_ENABLED, UPGRADE_OTHER],
            &caches,
            &[0, 0, 0], // serial number, asset tag, part number
            &counts,
            &CHARACTERISTICS.to_le_bytes(),
            &u16::from(FAMILY_UNKNOWN).to_le_bytes(),
            &counts2,
        ],
        &[&name, MANUFACTURER],
    );
}

/// Types 16, 17 and 19 (§7.17, §7.18, §7.20).
fn memory(table: &mut Table, ram: &RamLayout) {
    const LOCATION_OTHER: u8 = 1;
    const USE_SYSTEM: u8 = 3;
    const CORRECTION_MULTI_BIT: u8 = 6;
    const NO_ERROR_HANDLE: u16 = 0xFFFE;
    const KIB: u64 = 1 << 10;
    const MIB: u64 = 1 << 20;

    let size = ram.size_bytes();
    let devices = size.div_ceil(MEMORY_DEVICE_SIZE).clamp(1, 0xFFFF);
    let array = table.add(
        16,
        &[
            &[LOCATION_OTHER, USE_SYSTEM, CORRECTION_MULTI_BIT],
            &0x8000_0000_u32.to_le_bytes(), // capacity: see the extended field
            &NO_ERROR_HANDLE.to_le_bytes(),
            &(devices as u16).to_le_bytes(),
            &size.to_le_bytes(),
        ],
        &[],
    );
    for index in 0..devices {
        let bytes = (size - index * MEMORY_DEVICE_SIZE).min(MEMORY_DEVICE_SIZE);
        memory_device(table, array, index, bytes / MIB);
    }
    for range in ram.ranges() {
        let (start, last) = (range.start / KIB, range.end / KIB - 1);
        // Addresses in KiB up to 4 TiB fit into the 32-bit fields; beyond, the extended ones are used.
        let fits = u32::try_from(start).ok().zip(u32::try_from(last).ok());
        let (short_start, short_last) = fits.unwrap_or((u32::MAX, u32::MAX));
        let extended = match fits {
            Some(_) => [0, 0],
            None => [range.start, range.end - 1],
        };
        table.add(
            19,
            &[
                &short_start.to_le_bytes(),
                &short_last.to_le_bytes(),
                &array.to_le_bytes(),
                &[1], // partition width
                &extended[0].to_le_bytes(),
                &extended[1].to_le_bytes(),
            ],
            &[],
        );
    }
}

/// Type 17.
fn memory_device(table: &mut Table, array: u16, index: u64, size_mib: u64) {
    const FORM_FACTOR_DIMM: u8 = 9;
    const TYPE_RAM: u8 = 7;
    const TYPE_DETAIL_OTHER: u16 = 1 << 1;
    const NO_ERROR_HANDLE: u16 = 0xFFFE;
    const UNKNOWN_WIDTH: u16 = 0xFFFF;
    let locator = format!("DIMM {index}");
    table.add(
        17,
        &[
            &array.to_le_bytes(),
            &NO_ERROR_HANDLE.to_le_bytes(),
            &UNKNOWN_WIDTH.to_le_bytes(),     // total width
            &UNKNOWN_WIDTH.to_le_bytes(),     // data width
            &(size_mib as u16).to_le_bytes(), // at most 16 GiB: fits, in MiB
            &[FORM_FACTOR_DIMM, 0, 1, 0],     // no set, locator, no bank
            &[TYPE_RAM],
            &TYPE_DETAIL_OTHER.to_le_bytes(),
            &[0; 2],       // speed: unknown
            &[2, 0, 0, 0], // manufacturer; no serial number, asset tag, part number
            &[0],          // attributes: rank unknown
            &[0; 4],       // extended size: unused
            &[0; 2],       // configured speed: unknown
            &[0; 6],       // voltages: unknown
        ],
        &[&locator, MANUFACTURER],
    );
}

/// An empty string would end the list of strings.
fn or_dash(text: &str) -> &str {
    if text.is_empty() { "-" } else { text }
}

#[cfg(test)]
mod tests;
