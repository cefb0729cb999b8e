//! A second opinion on images: a strict reader of the two directory trees, written from the specifications and not from the
//! writer. Shared by the tests and the fuzz target.

use std::collections::BTreeMap;

const SECTOR: usize = 2048;

/// What a tree of an image holds: contents by name.
pub(crate) type Files = BTreeMap<String, Vec<u8>>;

/// What is read from an image.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Image {
    /// The label of the primary volume descriptor.
    pub(crate) label: String,
    /// The label of the Joliet volume descriptor.
    pub(crate) joliet_label: String,
    /// Files by their Rock Ridge names.
    pub(crate) rock_ridge: Files,
    /// Files by their Joliet names.
    pub(crate) joliet: Files,
    /// Level 1 identifiers, in the directory's order.
    pub(crate) level_1: Vec<String>,
}

fn both_u32(bytes: &[u8]) -> Result<usize, String> {
    let little = u32::from_le_bytes(bytes[..4].try_into().map_err(|_| "short")?);
    let big = u32::from_be_bytes(bytes[4..8].try_into().map_err(|_| "short")?);
    if little == big {
        Ok(little as usize)
    } else {
        Err(format!("{little} little-endian, {big} big-endian"))
    }
}

fn ucs2(bytes: &[u8]) -> Result<String, String> {
    let units: Vec<u16> = bytes
        .chunks_exact(2)
        .map(|pair| u16::from_be_bytes([pair[0], pair[1]]))
        .collect();
    String::from_utf16(&units).map_err(|error| error.to_string())
}

/// Reads an image and everything in it.
pub(crate) fn read(image: &[u8]) -> Result<Image, String> {
    if !image.len().is_multiple_of(4096) || image[..16 * SECTOR].iter().any(|byte| *byte != 0) {
        return Err("size or system area".into());
    }
    let mut primary = None;
    let mut joliet = None;
    for number in 16.. {
        let sector = image
            .get(number * SECTOR..(number + 1) * SECTOR)
            .ok_or("no terminator")?;
        if &sector[1..7] != b"CD001\x01" {
            return Err(format!("sector {number} is not a volume descriptor"));
        }
        match sector[0] {
            1 => primary = Some(sector),
            2 if &sector[88..91] == b"%/E" && sector[91..120].iter().all(|byte| *byte == 0) => {
                joliet = Some(sector);
            }
            255 => break,
            other => return Err(format!("volume descriptor of type {other}")),
        }
    }
    let (primary, joliet) = primary
        .zip(joliet)
        .ok_or("a volume descriptor is missing")?;
    for volume in [primary, joliet] {
        if both_u32(&volume[80..88])? * SECTOR != image.len() {
            return Err("volume space size".into());
        }
        let root = both_u32(&volume[158..166])?;
        let table_l =
            u32::from_le_bytes(volume[140..144].try_into().map_err(|_| "short")?) as usize * SECTOR;
        let table_m =
            u32::from_be_bytes(volume[148..152].try_into().map_err(|_| "short")?) as usize * SECTOR;
        let little = u32::from_le_bytes(
            image[table_l + 2..table_l + 6]
                .try_into()
                .map_err(|_| "short")?,
        ) as usize;
        let big = u32::from_be_bytes(
            image[table_m + 2..table_m + 6]
                .try_into()
                .map_err(|_| "short")?,
        ) as usize;
        if (little, big) != (root, root) {
            return Err("a path table does not lead to its root directory".into());
        }
    }
    let mut level_1 = Vec::new();
    let rock_ridge = directory(image, primary, |id, system_use| {
        level_1.push(String::from_utf8_lossy(id).into_owned());
        rock_ridge_name(system_use)
    })?;
    Ok(Image {
        label: String::from_utf8_lossy(&primary[40..72])
            .trim_end()
            .to_owned(),
        joliet_label: ucs2(&joliet[40..72])?.trim_end().to_owned(),
        rock_ridge,
        joliet: directory(image, joliet, |id, _| ucs2(id))?,
        level_1,
    })
}

fn directory(
    image: &[u8],
    volume: &[u8],
    mut name: impl FnMut(&[u8], &[u8]) -> Result<String, String>,
) -> Result<Files, String> {
    let start = both_u32(&volume[158..166])? * SECTOR;
    let length = both_u32(&volume[166..174])?;
    let bytes = image
        .get(start..start + length)
        .ok_or("the root directory is outside the image")?;
    let mut files = Files::new();
    let mut at = 0;
    let mut index = 0;
    let mut previous = Vec::new();
    while at < bytes.len() {
        let size = usize::from(bytes[at]);
        if size == 0 {
            at = (at / SECTOR + 1) * SECTOR;
            continue;
        }
        if at / SECTOR != (at + size - 1) / SECTOR {
            return Err("a directory record crosses a sector".into());
        }
        let record = &bytes[at..at + size];
        at += size;
        let id_length = usize::from(record[32]);
        let id = &record[33..33 + id_length];
        let system_use = &record[33 + id_length + usize::from(id_length.is_multiple_of(2))..];
        index += 1;
        if index <= 2 {
            if id != [index - 1] || record[25] != 2 || both_u32(&record[2..10])? * SECTOR != start {
                return Err("'.' or '..' is wrong".into());
            }
            continue;
        }
        if previous.as_slice() >= id {
            return Err("the directory is not sorted".into());
        }
        previous = id.to_vec();
        let from = both_u32(&record[2..10])? * SECTOR;
        let contents = image
            .get(from..from + both_u32(&record[10..18])?)
            .ok_or("a file lies outside the image")?;
        if files
            .insert(name(id, system_use)?, contents.to_vec())
            .is_some()
        {
            return Err("a name is there twice".into());
        }
    }
    Ok(files)
}

fn rock_ridge_name(mut system_use: &[u8]) -> Result<String, String> {
    while system_use.len() >= 4 {
        let length = usize::from(system_use[2]);
        if length < 4 || length > system_use.len() {
            return Err("a system use entry is wrong".into());
        }
        if &system_use[..2] == b"NM" {
            return String::from_utf8(system_use[5..length].to_vec())
                .map_err(|error| error.to_string());
        }
        system_use = &system_use[length..];
    }
    Err("no NM entry".into())
}
