//! A small deterministic writer of ISO 9660 images: a few files in one directory, readable by their own names.
//!
//! Follows ECMA-119 (3rd edition) with Rock Ridge (SUSP 1.09, RRIP 1.09) for Linux and the BSDs, and Joliet for the rest.
//! Equal input gives equal bytes: times are fixed, order is by name.
//!
//! ```text
//! sector  0..16  system area, zero
//!        16      primary volume descriptor          18      terminator
//!        17      Joliet volume descriptor
//!        19, 20  path tables L and M                21, 22  Joliet path tables L and M
//!        23..    root directory (Rock Ridge)        then    Joliet root directory
//!        then    continuation area (ER), then the files, each from a sector's start; padded to 4 KiB
//! ```

mod names;
mod rock_ridge;
mod spec;

use std::collections::BTreeSet;

use self::spec::{SECTOR, both_u16, both_u32, descriptor, ucs2};

/// An image ends on a multiple of this many bytes, so that it can be read past the page cache of 4 KiB-sector disks.
const ALIGNMENT: usize = 4096;

/// A file of the image.
#[derive(Clone, Copy, Debug)]
pub struct IsoFile<'a> {
    /// Its name: 1 to 64 characters of the basic multilingual plane and at most 120 bytes, without `* / : ; ? \` and control characters.
    pub name: &'a str,
    /// What it holds; less than 4 GiB.
    pub contents: &'a [u8],
}

/// Why an image cannot be written.
#[derive(Debug, thiserror::Error)]
pub enum IsoError {
    /// A file's name cannot be held by Rock Ridge and Joliet.
    #[error("file name {name:?} {reason}")]
    Name {
        /// The name.
        name: String,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// Two files have one name.
    #[error("file name {0:?} is used twice")]
    Duplicate(String),
    /// The volume label is not 1 to 16 letters, digits, `-` or `_`.
    #[error("volume label {0:?} is not 1 to 16 ASCII letters, digits, '-' or '_'")]
    Label(String),
    /// More than ISO 9660 can address.
    #[error("the files take more than an ISO 9660 image can hold")]
    TooLarge,
}

/// Where everything lies, in sectors.
struct Layout {
    root: u32,
    root_bytes: u32,
    joliet_root: u32,
    joliet_root_bytes: u32,
    continuation: u32,
    files: Vec<u32>,
    total: u32,
}

const PATH_TABLE_L: u32 = spec::FIRST_DESCRIPTOR + 3;
const PATH_TABLE_M: u32 = PATH_TABLE_L + 1;
const JOLIET_PATH_TABLE_L: u32 = PATH_TABLE_L + 2;
const JOLIET_PATH_TABLE_M: u32 = PATH_TABLE_L + 3;
const ROOT: u32 = PATH_TABLE_L + 4;

/// Builds an image with the volume label `label` and `files` in its root directory.
///
/// # Errors
/// A name or the label cannot be written, or the files are too large.
pub fn build(label: &str, files: &[IsoFile<'_>]) -> Result<Vec<u8>, IsoError> {
    let label_fits = (1..=16).contains(&label.len())
        && label
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || b == b'_' || b == b'-');
    if !label_fits {
        return Err(IsoError::Label(label.to_owned()));
    }
    let mut files = files.to_vec();
    files.sort_by_key(|file| file.name);
    for file in &files {
        names::check(file.name)?;
    }
    if let Some(pair) = files.windows(2).find(|pair| pair[0].name == pair[1].name) {
        return Err(IsoError::Duplicate(pair[0].name.to_owned()));
    }

    // The directories' sizes do not depend on where the files lie, so they are measured first and written second.
    let unplaced = vec![0; files.len()];
    let root_bytes = primary_directory(&files, &unplaced, 0, 0, 0)?.len();
    let joliet_bytes = joliet_directory(&files, &unplaced, 0, 0)?.len();
    let layout = place(&files, root_bytes, joliet_bytes)?;

    let total = usize::try_from(layout.total).map_err(|_| IsoError::TooLarge)?;
    let mut image = vec![0; total.checked_mul(SECTOR).ok_or(IsoError::TooLarge)?];
    let mut put = |sector: u32, bytes: &[u8]| {
        let start = sector as usize * SECTOR;
        image[start..start + bytes.len()].copy_from_slice(bytes);
    };
    put(
        spec::FIRST_DESCRIPTOR,
        &volume_descriptor(spec::PRIMARY, label, &layout),
    );
    put(
        spec::FIRST_DESCRIPTOR + 1,
        &volume_descriptor(spec::SUPPLEMENTARY, label, &layout),
    );
    put(spec::FIRST_DESCRIPTOR + 2, &header(spec::TERMINATOR));
    put(
        PATH_TABLE_L,
        &path_table(layout.root.to_le_bytes(), 1u16.to_le_bytes()),
    );
    put(
        PATH_TABLE_M,
        &path_table(layout.root.to_be_bytes(), 1u16.to_be_bytes()),
    );
    put(
        JOLIET_PATH_TABLE_L,
        &path_table(layout.joliet_root.to_le_bytes(), 1u16.to_le_bytes()),
    );
    put(
        JOLIET_PATH_TABLE_M,
        &path_table(layout.joliet_root.to_be_bytes(), 1u16.to_be_bytes()),
    );
    put(
        layout.root,
        &primary_directory(
            &files,
            &layout.files,
            layout.root,
            layout.root_bytes,
            layout.continuation,
        )?,
    );
    put(
        layout.joliet_root,
        &joliet_directory(
            &files,
            &layout.files,
            layout.joliet_root,
            layout.joliet_root_bytes,
        )?,
    );
    put(layout.continuation, &rock_ridge::continuation());
    for (file, sector) in files.iter().zip(&layout.files) {
        put(*sector, file.contents);
    }
    Ok(image)
}

fn sectors(bytes: usize) -> Result<u32, IsoError> {
    u32::try_from(bytes.div_ceil(SECTOR)).map_err(|_| IsoError::TooLarge)
}

fn place(files: &[IsoFile<'_>], root: usize, joliet: usize) -> Result<Layout, IsoError> {
    let too_large = IsoError::TooLarge;
    let joliet_root = ROOT + sectors(root)?;
    let continuation = joliet_root
        .checked_add(sectors(joliet)?)
        .ok_or(IsoError::TooLarge)?;
    let mut next = continuation + 1;
    let mut starts = Vec::with_capacity(files.len());
    for file in files {
        // An empty file has no sector of its own; the continuation area is a number every reader finds valid.
        starts.push(if file.contents.is_empty() {
            continuation
        } else {
            next
        });
        next = next
            .checked_add(sectors(file.contents.len())?)
            .ok_or(IsoError::TooLarge)?;
    }
    let total = next
        .checked_next_multiple_of((ALIGNMENT / SECTOR) as u32)
        .ok_or(too_large)?;
    Ok(Layout {
        root: ROOT,
        root_bytes: u32::try_from(root).map_err(|_| IsoError::TooLarge)?,
        joliet_root,
        joliet_root_bytes: u32::try_from(joliet).map_err(|_| IsoError::TooLarge)?,
        continuation,
        files: starts,
        total,
    })
}

fn header(kind: u8) -> Vec<u8> {
    let mut sector = vec![0; SECTOR];
    sector[0] = kind;
    sector[1..6].copy_from_slice(spec::STANDARD_ID);
    sector[6] = 1;
    sector
}

/// A primary or a Joliet volume descriptor (ECMA-119 8.4, 8.5).
fn volume_descriptor(kind: u8, label: &str, layout: &Layout) -> Vec<u8> {
    let joliet = kind == spec::SUPPLEMENTARY;
    let mut sector = header(kind);
    let text = |sector: &mut [u8], at: usize, length: usize, text: &str| {
        let bytes = if joliet {
            ucs2(text)
        } else {
            text.as_bytes().to_vec()
        };
        for (index, byte) in sector[at..at + length].iter_mut().enumerate() {
            let filler = if joliet && index % 2 == 0 { 0 } else { b' ' };
            *byte = bytes.get(index).copied().unwrap_or(filler);
        }
    };
    text(
        &mut sector,
        descriptor::SYSTEM_ID,
        descriptor::ID_BYTES,
        "LINUX",
    );
    text(
        &mut sector,
        descriptor::VOLUME_ID,
        descriptor::ID_BYTES,
        label,
    );
    text(
        &mut sector,
        descriptor::VOLUME_SET_ID,
        descriptor::IDENTIFIERS.len(),
        "",
    );
    text(
        &mut sector,
        descriptor::APPLICATION_ID,
        descriptor::LONG_ID_BYTES,
        "DROVER",
    );

    let mut put = |at: usize, bytes: &[u8]| sector[at..at + bytes.len()].copy_from_slice(bytes);
    if joliet {
        put(descriptor::ESCAPE_SEQUENCES, spec::UCS2_LEVEL_3);
    }
    let (table_l, table_m, root, root_bytes) = if joliet {
        (
            JOLIET_PATH_TABLE_L,
            JOLIET_PATH_TABLE_M,
            layout.joliet_root,
            layout.joliet_root_bytes,
        )
    } else {
        (PATH_TABLE_L, PATH_TABLE_M, layout.root, layout.root_bytes)
    };
    put(descriptor::VOLUME_SPACE_SIZE, &both_u32(layout.total));
    put(descriptor::VOLUME_SET_SIZE, &both_u16(1));
    put(descriptor::VOLUME_SEQUENCE_NUMBER, &both_u16(1));
    put(descriptor::LOGICAL_BLOCK_SIZE, &both_u16(SECTOR as u16));
    put(
        descriptor::PATH_TABLE_SIZE,
        &both_u32(spec::PATH_TABLE_BYTES as u32),
    );
    put(descriptor::TYPE_L_PATH_TABLE, &table_l.to_le_bytes());
    put(descriptor::TYPE_M_PATH_TABLE, &table_m.to_be_bytes());
    put(
        descriptor::ROOT_DIRECTORY_RECORD,
        &record(spec::SELF_ID, root, root_bytes, spec::FLAG_DIRECTORY, &[]).unwrap_or_default(),
    );
    for (at, time) in descriptor::DATES.into_iter().zip([
        spec::DESCRIPTOR_TIME,
        spec::DESCRIPTOR_TIME,
        spec::NO_DESCRIPTOR_TIME,
        spec::NO_DESCRIPTOR_TIME,
    ]) {
        put(at, time);
    }
    put(descriptor::FILE_STRUCTURE_VERSION, &[1]);
    sector
}

/// A path table with only the root directory, which is its own parent (ECMA-119 9.4).
fn path_table(root: [u8; 4], parent: [u8; 2]) -> Vec<u8> {
    let mut table = vec![1, 0];
    table.extend(root);
    table.extend(parent);
    table.extend([0, 0]);
    table
}

/// A directory record (ECMA-119 9.1).
fn record(
    id: &[u8],
    extent: u32,
    length: u32,
    flags: u8,
    system_use: &[u8],
) -> Result<Vec<u8>, IsoError> {
    let mut bytes = vec![0; spec::RECORD_FIXED];
    bytes[2..10].copy_from_slice(&both_u32(extent));
    bytes[10..18].copy_from_slice(&both_u32(length));
    bytes[18..25].copy_from_slice(&spec::RECORD_TIME);
    bytes[25] = flags;
    bytes[28..32].copy_from_slice(&both_u16(1));
    bytes[32] = u8::try_from(id.len()).map_err(|_| IsoError::TooLarge)?;
    bytes.extend_from_slice(id);
    if id.len().is_multiple_of(2) {
        bytes.push(0);
    }
    bytes.extend_from_slice(system_use);
    if !bytes.len().is_multiple_of(2) {
        bytes.push(0);
    }
    if bytes.len() > spec::RECORD_MAX {
        return Err(IsoError::TooLarge);
    }
    bytes[0] = bytes.len() as u8;
    Ok(bytes)
}

/// Joins records; none crosses a sector's end (ECMA-119 6.8.1.1).
fn directory(records: impl IntoIterator<Item = Vec<u8>>) -> Vec<u8> {
    let mut bytes = Vec::new();
    for record in records {
        let left = SECTOR - bytes.len() % SECTOR;
        if record.len() > left {
            bytes.resize(bytes.len() + left, 0);
        }
        bytes.extend(record);
    }
    bytes.resize(bytes.len().next_multiple_of(SECTOR), 0);
    bytes
}

fn length_of(file: &IsoFile<'_>) -> Result<u32, IsoError> {
    u32::try_from(file.contents.len()).map_err(|_| IsoError::TooLarge)
}

fn primary_directory(
    files: &[IsoFile<'_>],
    starts: &[u32],
    root: u32,
    root_bytes: u32,
    continuation: u32,
) -> Result<Vec<u8>, IsoError> {
    let mut taken = BTreeSet::new();
    let mut entries = Vec::with_capacity(files.len());
    for (file, start) in files.iter().zip(starts) {
        let id = names::level_1(file.name, &mut taken);
        let bytes = record(
            id.as_bytes(),
            *start,
            length_of(file)?,
            0,
            &rock_ridge::file(file.name),
        )?;
        entries.push((id, bytes));
    }
    entries.sort_by(|a, b| a.0.cmp(&b.0));
    let own = record(
        spec::SELF_ID,
        root,
        root_bytes,
        spec::FLAG_DIRECTORY,
        &rock_ridge::root(continuation),
    )?;
    let parent = record(
        spec::PARENT_ID,
        root,
        root_bytes,
        spec::FLAG_DIRECTORY,
        &rock_ridge::parent(),
    )?;
    Ok(directory(
        [own, parent]
            .into_iter()
            .chain(entries.into_iter().map(|entry| entry.1)),
    ))
}

fn joliet_directory(
    files: &[IsoFile<'_>],
    starts: &[u32],
    root: u32,
    root_bytes: u32,
) -> Result<Vec<u8>, IsoError> {
    let mut entries = Vec::with_capacity(files.len());
    for (file, start) in files.iter().zip(starts) {
        let id = ucs2(file.name);
        let bytes = record(&id, *start, length_of(file)?, 0, &[])?;
        entries.push((id, bytes));
    }
    entries.sort_by(|a, b| a.0.cmp(&b.0));
    let own = record(spec::SELF_ID, root, root_bytes, spec::FLAG_DIRECTORY, &[])?;
    let parent = record(spec::PARENT_ID, root, root_bytes, spec::FLAG_DIRECTORY, &[])?;
    Ok(directory(
        [own, parent]
            .into_iter()
            .chain(entries.into_iter().map(|entry| entry.1)),
    ))
}
