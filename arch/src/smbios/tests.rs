//! Walks the structures as a guest would.

use super::*;
use crate::layout::SMBIOS_REGION;

fn config() -> SmbiosConfig {
    SmbiosConfig {
        product: "Worker".into(),
        version: "0.1.0".into(),
        serial: "ds=nocloud;s=http://10.0.0.1/".into(),
        uuid: [
            0x00, 0x11, 0x22, 0x33, 0x44, 0x55, 0x66, 0x77, 0x88, 0x99, 0xAA, 0xBB, 0xCC, 0xDD,
            0xEE, 0xFF,
        ],
        oem_strings: vec!["io.systemd.credential:a=b".into(), "second".into()],
        topology: Topology::new(2, 1, 4, 2).unwrap(),
        processor_id: 0x1783_FBFF_0080_0F12,
        ram: RamLayout::new(20 << 30),
    }
}

struct Structure {
    kind: u8,
    handle: u16,
    formatted: Vec<u8>,
    strings: Vec<String>,
}

/// The structures behind the entry point, whose checksum and length are verified.
fn walk(tables: &SmbiosTables) -> Vec<Structure> {
    let entry = &tables.blob[..24];
    assert_eq!(&entry[..5], b"_SM3_");
    assert_eq!(
        entry.iter().fold(0_u8, |sum, byte| sum.wrapping_add(*byte)),
        0
    );
    let address = u64::from_le_bytes(entry[16..24].try_into().unwrap());
    let mut rest = &tables.blob[(address - tables.address.0) as usize..];
    let size = u32::from_le_bytes(entry[12..16].try_into().unwrap());
    assert_eq!(rest.len(), size as usize);
    let mut structures = Vec::new();
    while !rest.is_empty() {
        let (formatted, tail) = rest.split_at(usize::from(rest[1]));
        let end = tail.windows(2).position(|pair| pair == [0, 0]).unwrap();
        structures.push(Structure {
            kind: formatted[0],
            handle: u16::from_le_bytes([formatted[2], formatted[3]]),
            formatted: formatted.to_vec(),
            strings: tail[..end]
                .split(|byte| *byte == 0)
                .map(|text| String::from_utf8(text.to_vec()).unwrap())
                .collect(),
        });
        rest = &tail[end + 2..];
    }
    structures
}

fn built(config: &SmbiosConfig) -> Vec<Structure> {
    walk(&SmbiosTables::build(config, SMBIOS_REGION).unwrap())
}

#[test]
fn all_structures_are_there_with_handles_of_their_own_and_an_end() {
    let structures = built(&config());
    let kinds: Vec<u8> = structures.iter().map(|structure| structure.kind).collect();
    assert_eq!(kinds, [0, 1, 3, 4, 4, 11, 16, 17, 17, 19, 19, 32, 127]);
    for (index, structure) in structures.iter().enumerate() {
        assert_eq!(usize::from(structure.handle), index);
    }
}

#[test]
fn lengths_are_those_of_the_specification() {
    let lengths: Vec<(u8, usize)> = built(&config())
        .iter()
        .map(|structure| (structure.kind, structure.formatted.len()))
        .collect();
    for expected in [
        (0, 0x18),
        (1, 0x1B),
        (3, 0x16),
        (4, 0x30),
        (11, 5),
        (16, 0x17),
        (17, 0x28),
        (19, 0x1F),
        (32, 11),
        (127, 4),
    ] {
        assert!(lengths.contains(&expected), "{expected:?} in {lengths:?}");
    }
}

#[test]
fn the_system_has_its_serial_number_and_uuid() {
    let structures = built(&config());
    let system = &structures[1];
    assert_eq!(
        system.strings[usize::from(system.formatted[7]) - 1],
        "ds=nocloud;s=http://10.0.0.1/"
    );
    assert_eq!(
        system.formatted[8..16],
        [0x33, 0x22, 0x11, 0x00, 0x55, 0x44, 0x77, 0x66]
    );
    assert_eq!(system.formatted[16..24], config().uuid[8..]);
}

#[test]
fn oem_strings_arrive_in_order() {
    let structures = built(&config());
    let oem = structures
        .iter()
        .find(|structure| structure.kind == 11)
        .unwrap();
    assert_eq!(oem.formatted[4], 2);
    assert_eq!(oem.strings, ["io.systemd.credential:a=b", "second"]);
}

#[test]
fn memory_devices_add_up_to_ram() {
    let structures = built(&config());
    let sizes: Vec<u16> = structures
        .iter()
        .filter(|structure| structure.kind == 17)
        .map(|device| u16::from_le_bytes([device.formatted[12], device.formatted[13]]))
        .collect();
    assert_eq!(sizes, [16384, 4096]);
    let ranges: Vec<[u8; 8]> = structures
        .iter()
        .filter(|structure| structure.kind == 19)
        .map(|mapped| mapped.formatted[4..12].try_into().unwrap())
        .collect();
    let mapped: Vec<(u32, u32)> = ranges
        .iter()
        .map(|bytes| {
            let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
            (word(0), word(4))
        })
        .collect();
    assert_eq!(mapped, [(0, (2 << 20) - 1), (4 << 20, (22 << 20) - 1)]);
}

#[test]
fn strings_that_cannot_be_said_are_refused_by_name() {
    let mut bad = config();
    bad.serial = "a\0b".into();
    let error = SmbiosTables::build(&bad, SMBIOS_REGION).unwrap_err();
    assert_eq!(error.to_string(), "SMBIOS serial: contains a NUL byte");
    let mut bad = config();
    bad.oem_strings = vec!["x".into(); 256];
    let error = SmbiosTables::build(&bad, SMBIOS_REGION).unwrap_err();
    assert_eq!(error, SmbiosError::TooManyStrings { count: 256 });
    let mut bad = config();
    bad.oem_strings = vec!["x".repeat(70_000)];
    let error = SmbiosTables::build(&bad, SMBIOS_REGION).unwrap_err();
    assert!(matches!(
        error,
        SmbiosError::TooLarge {
            available: 0x1_0000,
            ..
        }
    ));
}

#[test]
fn an_empty_serial_number_does_not_end_the_strings_early() {
    let mut empty = config();
    empty.serial = String::new();
    assert_eq!(built(&empty)[1].strings.len(), 4);
}
