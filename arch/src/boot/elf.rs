//! Checks an ELF kernel's headers against its file and the guest's RAM, and finds the PVH entry (ELF-64 object file format 1.5).

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::ops::Range;

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

use super::BootError;
use super::spec::{ELF_MAGIC, XEN_ELFNOTE_PHYS32_ENTRY};
use crate::layout::LEGACY_HOLE_END;

/// `Elf64_Ehdr`.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Clone)]
#[repr(C)]
pub(super) struct FileHeader {
    pub(super) magic: [u8; 4],
    pub(super) class: u8,
    pub(super) data: u8,
    pub(super) ident_rest: [u8; 10],
    pub(super) object_type: U16,
    pub(super) machine: U16,
    pub(super) version: U32,
    pub(super) entry: U64,
    pub(super) phoff: U64,
    pub(super) shoff: U64,
    pub(super) flags: U32,
    pub(super) ehsize: U16,
    pub(super) phentsize: U16,
    pub(super) phnum: U16,
    pub(super) shentsize: U16,
    pub(super) shnum: U16,
    pub(super) shstrndx: U16,
}

/// `Elf64_Phdr`.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Clone)]
#[repr(C)]
pub(super) struct ProgramHeader {
    pub(super) segment_type: U32,
    pub(super) flags: U32,
    pub(super) offset: U64,
    pub(super) vaddr: U64,
    pub(super) paddr: U64,
    pub(super) filesz: U64,
    pub(super) memsz: U64,
    pub(super) align: U64,
}

/// `Elf64_Nhdr`.
#[derive(FromBytes, Immutable, KnownLayout)]
#[repr(C)]
struct NoteHeader {
    namesz: U32,
    descsz: U32,
    note_type: U32,
}

pub(super) const CLASS_64: u8 = 2;
pub(super) const DATA_LITTLE_ENDIAN: u8 = 1;
pub(super) const MACHINE_X86_64: u16 = 62;
pub(super) const PT_LOAD: u32 = 1;
pub(super) const PT_NOTE: u32 = 4;

/// More program headers than any kernel has; bounds what a hostile file makes us read.
const PROGRAM_HEADERS_MAX: u16 = 64;
/// Likewise for notes.
const NOTES_SIZE_MAX: u64 = 64 << 10;

/// What the headers say, checked.
#[derive(Debug)]
pub(super) struct Kernel {
    /// The PVH entry.
    pub(super) entry: u64,
    /// From the lowest loaded address to the first behind the highest.
    pub(super) span: Range<u64>,
    /// What must be zero and is not in the file.
    pub(super) zero: Vec<Range<u64>>,
}

fn wrong<T>(what: impl Into<String>) -> Result<T, BootError> {
    Err(BootError::Elf { what: what.into() })
}

/// Reads and checks the headers of `file`, which must fit into RAM from 1 MiB to `low_end`.
pub(super) fn inspect(file: &mut File, low_end: u64) -> Result<Kernel, BootError> {
    let length = file.seek(SeekFrom::End(0)).map_err(BootError::ReadKernel)?;
    let headers = program_headers(file, length)?;
    let mut segments = Vec::new();
    let mut zero = Vec::new();
    let mut entry = None;
    for (index, header) in headers.iter().enumerate() {
        let (offset, filesz) = (header.offset.get(), header.filesz.get());
        let kind = header.segment_type.get();
        if kind != PT_LOAD && kind != PT_NOTE {
            continue;
        }
        if offset.checked_add(filesz).is_none_or(|end| end > length) {
            return wrong(format!(
                "program header {index}: p_offset {offset:#x} + p_filesz {filesz:#x} is beyond the file's {length} bytes"
            ));
        }
        if kind == PT_NOTE {
            let found = find_pvh_note(file, index, offset, filesz)?;
            entry = entry.or(found);
        } else if let Some((segment, bss)) = check_segment(index, header, low_end)? {
            segments.push(segment);
            zero.extend(bss);
        }
    }
    let Some(span) = segments
        .iter()
        .cloned()
        .reduce(|all, segment| all.start.min(segment.start)..all.end.max(segment.end))
    else {
        return wrong("e_phnum: no PT_LOAD segment, nothing to load");
    };
    let entry = entry.ok_or(BootError::NoPvhEntry)?;
    if !segments.iter().any(|segment| segment.contains(&entry)) {
        return wrong(format!(
            "PVH note: entry {entry:#x} is in no PT_LOAD segment"
        ));
    }
    Ok(Kernel { entry, span, zero })
}

fn program_headers(file: &mut File, length: u64) -> Result<Vec<ProgramHeader>, BootError> {
    let mut header = FileHeader::new_zeroed();
    file.rewind().map_err(BootError::ReadKernel)?;
    if length < size_of::<FileHeader>() as u64 {
        return wrong(format!("header: the file has only {length} bytes"));
    }
    file.read_exact(header.as_mut_bytes())
        .map_err(BootError::ReadKernel)?;
    if header.magic != ELF_MAGIC {
        return Err(BootError::UnknownFormat);
    }
    if header.class != CLASS_64 || header.data != DATA_LITTLE_ENDIAN {
        return wrong("e_ident: not a 64-bit little-endian file");
    }
    if header.machine.get() != MACHINE_X86_64 {
        return wrong(format!("e_machine: {} is not x86-64 (62)", header.machine));
    }
    if usize::from(header.phentsize.get()) != size_of::<ProgramHeader>() {
        return wrong(format!("e_phentsize: {} is not 56", header.phentsize));
    }
    let (phoff, phnum) = (header.phoff.get(), header.phnum.get());
    if phnum > PROGRAM_HEADERS_MAX {
        return wrong(format!(
            "e_phnum: {phnum} program headers, at most {PROGRAM_HEADERS_MAX}"
        ));
    }
    let table = u64::from(phnum) * size_of::<ProgramHeader>() as u64;
    if phoff < size_of::<FileHeader>() as u64
        || phoff.checked_add(table).is_none_or(|end| end > length)
    {
        return wrong(format!(
            "e_phoff: {phnum} program headers at {phoff:#x} are not in the file"
        ));
    }
    file.seek(SeekFrom::Start(phoff))
        .map_err(BootError::ReadKernel)?;
    let mut headers = vec![ProgramHeader::new_zeroed(); usize::from(phnum)];
    file.read_exact(headers.as_mut_slice().as_mut_bytes())
        .map_err(BootError::ReadKernel)?;
    Ok(headers)
}

type Segment = (Range<u64>, Option<Range<u64>>);

/// The memory of a PT_LOAD segment and the part of it that is not in the file; none where it is empty.
fn check_segment(
    index: usize,
    header: &ProgramHeader,
    low_end: u64,
) -> Result<Option<Segment>, BootError> {
    let (paddr, filesz, memsz) = (header.paddr.get(), header.filesz.get(), header.memsz.get());
    if memsz == 0 && filesz == 0 {
        return Ok(None);
    }
    if filesz > memsz {
        return wrong(format!(
            "program header {index}: p_filesz {filesz:#x} exceeds p_memsz {memsz:#x}"
        ));
    }
    if paddr < LEGACY_HOLE_END {
        return wrong(format!(
            "program header {index}: p_paddr {paddr:#x} is below 1 MiB"
        ));
    }
    let Some(end) = paddr.checked_add(memsz) else {
        return wrong(format!(
            "program header {index}: p_paddr {paddr:#x} + p_memsz {memsz:#x} overflows"
        ));
    };
    if end > low_end {
        return Err(BootError::KernelTooBig {
            needed: end,
            end: low_end,
        });
    }
    let bss = (filesz < memsz).then(|| paddr + filesz..end);
    Ok(Some((paddr..end, bss)))
}

fn find_pvh_note(
    file: &mut File,
    index: usize,
    offset: u64,
    filesz: u64,
) -> Result<Option<u64>, BootError> {
    if filesz > NOTES_SIZE_MAX {
        return wrong(format!(
            "program header {index}: {filesz} bytes of notes, at most {NOTES_SIZE_MAX}"
        ));
    }
    file.seek(SeekFrom::Start(offset))
        .map_err(BootError::ReadKernel)?;
    let mut notes = vec![0; filesz as usize];
    file.read_exact(&mut notes).map_err(BootError::ReadKernel)?;
    pvh_entry(&notes).map_err(|what| BootError::Elf { what })
}

/// Finds the entry in a note segment. A note is a header, its name and its descriptor, the latter two padded to 4 bytes.
fn pvh_entry(mut notes: &[u8]) -> Result<Option<u64>, String> {
    while let Ok((header, rest)) = NoteHeader::read_from_prefix(notes) {
        let name_length = header.namesz.get() as usize;
        let description_length = header.descsz.get() as usize;
        let padded_name = name_length.next_multiple_of(4);
        let (Some(name), Some(description)) = (
            rest.get(..name_length),
            rest.get(padded_name..)
                .and_then(|rest| rest.get(..description_length)),
        ) else {
            return Err("notes: a note reaches beyond its segment".into());
        };
        if name == b"Xen\0" && header.note_type.get() == XEN_ELFNOTE_PHYS32_ENTRY {
            let Ok((entry, _)) = U32::read_from_prefix(description) else {
                return Err(format!(
                    "PVH note: a descriptor of {description_length} bytes"
                ));
            };
            return Ok(Some(u64::from(entry.get())));
        }
        // The last descriptor's padding may be cut off by the segment's end.
        let next = padded_name + description_length.next_multiple_of(4);
        notes = rest.get(next..).unwrap_or_default();
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn note(name: &[u8], note_type: u32, description: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::new();
        bytes.extend((name.len() as u32).to_le_bytes());
        bytes.extend((description.len() as u32).to_le_bytes());
        bytes.extend(note_type.to_le_bytes());
        for part in [name, description] {
            bytes.extend(part);
            bytes.resize(bytes.len().next_multiple_of(4), 0);
        }
        bytes
    }

    #[test]
    fn the_pvh_note_is_found_behind_others() {
        let mut notes = note(b"GNU\0", 3, &[7; 20]);
        notes.extend(note(b"Xen\0", 6, b"linux\0"));
        notes.extend(note(b"Xen\0", 18, &0x0100_0370_u32.to_le_bytes()));
        assert_eq!(pvh_entry(&notes), Ok(Some(0x0100_0370)));
    }

    #[test]
    fn a_note_that_leaves_its_segment_is_refused() {
        let mut notes = note(b"Xen\0", 18, &[0; 4]);
        notes[4..8].copy_from_slice(&u32::MAX.to_le_bytes());
        assert!(
            pvh_entry(&notes)
                .unwrap_err()
                .contains("beyond its segment")
        );
    }

    #[test]
    fn a_pvh_note_without_an_address_is_refused() {
        assert!(
            pvh_entry(&note(b"Xen\0", 18, &[1, 2]))
                .unwrap_err()
                .contains("2 bytes")
        );
    }

    proptest! {
        #[test]
        fn no_bytes_make_the_note_parser_panic(notes in proptest::collection::vec(any::<u8>(), 0..256)) {
            let _ = pvh_entry(&notes);
        }
    }
}
