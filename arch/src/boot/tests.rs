//! Loads kernels made here, and damaged ones, into a small guest memory.

use std::io::Write;

use linux_loader::loader::bootparam::boot_params;
use vm_memory::GuestMemoryMmap;
use zerocopy::{FromZeros, IntoBytes};

use super::elf::{
    CLASS_64, DATA_LITTLE_ENDIAN, FileHeader, MACHINE_X86_64, PT_LOAD, PT_NOTE, ProgramHeader,
};
use super::*;
use crate::layout::RamLayout;

const MIB: u64 = 1 << 20;
const RAM: u64 = 64 * MIB;
const CODE: &[u8] = b"\xf4code";
const LOAD_ADDRESS: u64 = 16 * MIB;
const RSDP: Gpa = GuestAddress(0xE_0000);

fn file(bytes: &[u8]) -> File {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(bytes).unwrap();
    file
}

fn memory() -> GuestMemoryMmap<()> {
    GuestMemoryMmap::from_ranges(&[(GuestAddress(0), RAM as usize)]).unwrap()
}

fn boot(
    memory: &GuestMemoryMmap<()>,
    kernel: &[u8],
    initrd: Option<&[u8]>,
    cmdline: &str,
) -> Result<EntryPoint, BootError> {
    let e820 = RamLayout::new(RAM).e820();
    let mut initrd = initrd.map(file);
    load(
        memory,
        &mut file(kernel),
        initrd.as_mut(),
        cmdline,
        &e820,
        RSDP,
        RamContent::Used,
    )
}

fn refusal(kernel: &[u8]) -> String {
    boot(&memory(), kernel, None, "").unwrap_err().to_string()
}

struct ElfFile {
    header: FileHeader,
    load: ProgramHeader,
    note: ProgramHeader,
    entry: u32,
}

impl ElfFile {
    /// A kernel of a few bytes and 4 KiB of BSS.
    fn new() -> Self {
        let mut header = FileHeader::new_zeroed();
        header.magic = spec::ELF_MAGIC;
        header.class = CLASS_64;
        header.data = DATA_LITTLE_ENDIAN;
        header.machine = MACHINE_X86_64.into();
        header.phoff = 64.into();
        header.phentsize = 56.into();
        header.phnum = 2.into();
        let mut load = ProgramHeader::new_zeroed();
        load.segment_type = PT_LOAD.into();
        load.offset = 200.into();
        load.paddr = LOAD_ADDRESS.into();
        load.filesz = (CODE.len() as u64).into();
        load.memsz = 4096.into();
        let mut note = ProgramHeader::new_zeroed();
        note.segment_type = PT_NOTE.into();
        note.offset = 176.into();
        note.filesz = 20.into();
        Self {
            header,
            load,
            note,
            entry: LOAD_ADDRESS as u32,
        }
    }

    fn bytes(&self) -> Vec<u8> {
        let mut bytes = self.header.as_bytes().to_vec();
        bytes.extend(self.load.as_bytes());
        bytes.extend(self.note.as_bytes());
        assert_eq!(bytes.len(), 176);
        for word in [4, 4, spec::XEN_ELFNOTE_PHYS32_ENTRY] {
            bytes.extend(word.to_le_bytes());
        }
        bytes.extend(b"Xen\0");
        bytes.extend(self.entry.to_le_bytes());
        bytes.resize(200, 0);
        bytes.extend(CODE);
        bytes
    }

    fn with(change: impl FnOnce(&mut Self)) -> Vec<u8> {
        let mut file = Self::new();
        change(&mut file);
        file.bytes()
    }
}

/// A bzImage of one set-up sector and 1 KiB of kernel.
fn bzimage(change: impl FnOnce(&mut [u8])) -> Vec<u8> {
    let mut bytes = vec![0; 2048];
    let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
    put(0x1F1, &[1]);
    put(0x1FE, &[0x55, 0xAA]);
    put(0x202, b"HdrS");
    put(0x206, &0x020F_u16.to_le_bytes());
    put(0x211, &[1]);
    put(0x214, &0x10_0000_u32.to_le_bytes());
    put(0x22C, &0x7FFF_FFFF_u32.to_le_bytes());
    put(0x234, &[1]);
    put(0x236, &1_u16.to_le_bytes());
    put(0x238, &2047_u32.to_le_bytes());
    put(0x258, &LOAD_ADDRESS.to_le_bytes());
    put(0x260, &(8 * MIB as u32).to_le_bytes());
    put(1024, CODE);
    change(&mut bytes);
    bytes
}

fn read(memory: &GuestMemoryMmap<()>, at: u64, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    memory.read_slice(&mut bytes, GuestAddress(at)).unwrap();
    bytes
}

fn words(bytes: &[u8]) -> Vec<u64> {
    bytes
        .chunks_exact(8)
        .map(|word| u64::from_le_bytes(word.try_into().unwrap()))
        .collect()
}

#[test]
fn an_elf_kernel_is_entered_with_the_start_info_in_rbx() {
    let memory = memory();
    let entry = boot(
        &memory,
        &ElfFile::new().bytes(),
        Some(b"initrd"),
        "console=ttyS0",
    )
    .unwrap();
    assert_eq!((entry.protocol, entry.rip), (Protocol::Pvh, LOAD_ADDRESS));
    assert_eq!(read(&memory, LOAD_ADDRESS, CODE.len()), CODE);

    let start_info = read(&memory, regs(&entry).rbx, 56);
    assert_eq!(start_info[..4], 0x336E_C578_u32.to_le_bytes());
    let [_, modules_count, modules, cmdline, rsdp, map, count] = words(&start_info)[..] else {
        panic!("56 bytes are seven words");
    };
    assert_eq!(modules_count >> 32, 1);
    assert_eq!(rsdp, RSDP.0);
    assert_eq!(read(&memory, cmdline, 14), b"console=ttyS0\0");
    let module = words(&read(&memory, modules, 16));
    assert_eq!(read(&memory, module[0], 6), b"initrd");
    assert_eq!(module, [RAM - 4096, 6]);
    let e820 = RamLayout::new(RAM).e820();
    assert_eq!(count as usize, e820.len());
    for (index, entry) in e820.iter().enumerate() {
        let words = words(&read(&memory, map + 24 * index as u64, 24));
        assert_eq!(words, [entry.base, entry.size_bytes, entry.kind as u64]);
    }

    let mut sregs = kvm_bindings::kvm_sregs::default();
    apply_sregs(&entry, &mut sregs);
    assert_eq!((sregs.cr0 & 0x8000_0001, sregs.cr4, sregs.efer), (1, 0, 0));
    assert_eq!((sregs.cs.db, sregs.cs.l, sregs.cs.limit), (1, 0, u32::MAX));
}

#[test]
fn the_bss_of_a_rebooted_kernel_is_zero_again() {
    let memory = memory();
    let dirty = vec![0xAA; 8192];
    memory
        .write_slice(&dirty, GuestAddress(LOAD_ADDRESS))
        .unwrap();
    boot(&memory, &ElfFile::new().bytes(), None, "").unwrap();
    let loaded = read(&memory, LOAD_ADDRESS, 4097);
    assert!(loaded[CODE.len()..4096].iter().all(|byte| *byte == 0));
    assert_eq!(
        loaded[4096], 0xAA,
        "memory behind the kernel is not touched"
    );
}

#[test]
fn a_bzimage_is_entered_in_64_bit_mode_with_the_zero_page_in_rsi() {
    let memory = memory();
    let entry = boot(&memory, &bzimage(|_| {}), Some(b"initrd"), "quiet").unwrap();
    assert_eq!(
        (entry.protocol, entry.rip),
        (Protocol::Linux64, LOAD_ADDRESS + 0x200)
    );
    assert_eq!(read(&memory, LOAD_ADDRESS, CODE.len()), CODE);

    let zero_page: boot_params = memory.read_obj(GuestAddress(regs(&entry).rsi)).unwrap();
    let header = zero_page.hdr;
    assert_eq!({ header.header }, 0x5372_6448);
    assert_eq!({ header.type_of_loader }, 0xFF);
    assert_eq!(read(&memory, u64::from(header.cmd_line_ptr), 6), b"quiet\0");
    assert_eq!(read(&memory, u64::from(header.ramdisk_image), 6), b"initrd");
    assert_eq!({ header.ramdisk_size }, 6);
    assert_eq!({ zero_page.acpi_rsdp_addr }, RSDP.0);
    assert_eq!(
        usize::from(zero_page.e820_entries),
        RamLayout::new(RAM).e820().len()
    );

    let mut sregs = kvm_bindings::kvm_sregs::default();
    apply_sregs(&entry, &mut sregs);
    assert_eq!(
        (sregs.cs.selector, sregs.ds.selector, sregs.cs.l),
        (0x10, 0x18, 1)
    );
    assert_eq!((sregs.efer, sregs.cr4), (0x500, 0x20));
}

#[test]
fn the_page_tables_map_four_gib_to_themselves() {
    let memory = memory();
    let entry = boot(&memory, &bzimage(|_| {}), None, "").unwrap();
    let mut sregs = kvm_bindings::kvm_sregs::default();
    apply_sregs(&entry, &mut sregs);
    let walk = |address: u64| {
        let mut table = sregs.cr3;
        for shift in [39, 30, 21] {
            let at = table + (address >> shift & 511) * 8;
            let entry: u64 = memory.read_obj(GuestAddress(at)).unwrap();
            if entry & 1 == 0 {
                return None;
            }
            table = entry & 0x000F_FFFF_FFFF_F000;
        }
        Some(table | address & 0x1F_FFFF)
    };
    for address in [0, 0x20_0000, 0x1234_5678, 0xFFFF_FFFF] {
        assert_eq!(walk(address), Some(address));
    }
    assert_eq!(walk(1 << 32), None);
}

#[test]
fn the_initrd_stays_below_the_kernels_own_limit() {
    let memory = memory();
    let image =
        bzimage(|bytes| bytes[0x22C..0x230].copy_from_slice(&(32 * MIB as u32 - 1).to_le_bytes()));
    let entry = boot(&memory, &image, Some(&[7; 5000]), "").unwrap();
    assert_eq!(entry.initrd, Some(32 * MIB - 8192..32 * MIB - 8192 + 5000));
}

#[test]
fn an_initrd_that_would_overlap_the_kernel_is_refused() {
    let image = bzimage(|bytes| {
        bytes[0x22C..0x230].copy_from_slice(&(24 * MIB as u32 + 4095).to_le_bytes());
    });
    let error = boot(&memory(), &image, Some(&[7; 5000]), "").unwrap_err();
    assert!(
        matches!(
            error,
            BootError::InitrdTooBig {
                size_bytes: 5000,
                ..
            }
        ),
        "{error}"
    );
    let error = boot(&memory(), &image, Some(&[]), "").unwrap_err();
    assert!(matches!(error, BootError::InitrdEmpty), "{error}");
}

#[test]
fn a_command_line_that_linux_would_cut_is_refused() {
    let long = "x".repeat(2048);
    let error = boot(&memory(), &ElfFile::new().bytes(), None, &long).unwrap_err();
    assert_eq!(error.to_string(), "cmdline: 2048 bytes, at most 2047");
    let error = boot(
        &memory(),
        &bzimage(|bytes| bytes[0x238..0x23C].fill(0)),
        None,
        "a",
    )
    .unwrap_err();
    assert_eq!(error.to_string(), "cmdline: 1 bytes, at most 0");
    let error = boot(&memory(), &ElfFile::new().bytes(), None, "a\0b").unwrap_err();
    assert!(matches!(error, BootError::CommandLineNul));
}

#[test]
fn files_that_are_no_kernels_are_refused() {
    for bytes in [&b""[..], b"\x7fE", b"#!/bin/sh\n", &[0; 4096]] {
        assert!(refusal(bytes).contains("neither an ELF file"), "{bytes:x?}");
    }
    assert!(refusal(b"\x7fELF").contains("only 4 bytes"));
}

#[test]
fn impossible_numbers_in_an_elf_file_are_named() {
    let cases: [(&str, Vec<u8>); 11] = [
        ("e_ident", ElfFile::with(|elf| elf.header.class = 1)),
        (
            "e_machine: 183",
            ElfFile::with(|elf| elf.header.machine = 183.into()),
        ),
        (
            "e_phentsize: 32",
            ElfFile::with(|elf| elf.header.phentsize = 32.into()),
        ),
        (
            "e_phoff",
            ElfFile::with(|elf| elf.header.phoff = u64::MAX.into()),
        ),
        (
            "e_phnum: 65535",
            ElfFile::with(|elf| elf.header.phnum = u16::MAX.into()),
        ),
        (
            "p_offset",
            ElfFile::with(|elf| elf.load.offset = u64::MAX.into()),
        ),
        (
            "exceeds p_memsz",
            ElfFile::with(|elf| elf.load.memsz = 1.into()),
        ),
        (
            "below 1 MiB",
            ElfFile::with(|elf| elf.load.paddr = 0x9000.into()),
        ),
        (
            "overflows",
            ElfFile::with(|elf| elf.load.memsz = u64::MAX.into()),
        ),
        (
            "is in no PT_LOAD segment",
            ElfFile::with(|elf| elf.entry = 0x1000),
        ),
        ("program header 1: 65537 bytes of notes", {
            let mut bytes = ElfFile::with(|elf| elf.note.filesz = 65537.into());
            bytes.resize(70_000, 0);
            bytes
        }),
    ];
    for (expected, kernel) in cases {
        let message = refusal(&kernel);
        assert!(
            message.contains(expected),
            "{message:?} does not name {expected:?}"
        );
    }
}

#[test]
fn a_kernel_without_the_pvh_note_is_told_what_it_lacks() {
    assert!(refusal(&ElfFile::with(|elf| elf.note.segment_type = 0.into())).contains("CONFIG_PVH"));
}

#[test]
fn a_kernel_that_exceeds_ram_says_how_much_it_needs() {
    let elf = ElfFile::with(|elf| elf.load.memsz = RAM.into());
    assert!(refusal(&elf).contains("needs memory up to 0x5000000, but low RAM ends at 0x4000000"));
    let image = bzimage(|bytes| bytes[0x260..0x264].copy_from_slice(&(RAM as u32).to_le_bytes()));
    assert!(refusal(&image).contains("needs memory up to 0x5000000"));
}

#[test]
fn impossible_numbers_in_a_bzimage_are_named() {
    type Change = fn(&mut [u8]);
    let cases: [(&str, Change); 6] = [
        ("boot protocol 2.06", |bytes| bytes[0x206] = 6),
        ("xloadflags", |bytes| bytes[0x236] = 0),
        ("loadflags", |bytes| bytes[0x211] = 0),
        ("setup_sects: 255", |bytes| bytes[0x1F1] = 255),
        ("pref_address: 0x1000", |bytes| {
            bytes[0x258..0x260].copy_from_slice(&0x1000_u64.to_le_bytes());
        }),
        ("init_size", |bytes| bytes[0x258..0x260].fill(0xFF)),
    ];
    for (expected, change) in cases {
        let message = refusal(&bzimage(change));
        assert!(
            message.contains(expected),
            "{message:?} does not name {expected:?}"
        );
    }
}

#[test]
fn a_memory_map_without_ram_at_one_mib_is_refused() {
    let map = [E820Entry::new(0..0xA_0000, E820Kind::Ram)];
    let mut kernel = file(&ElfFile::new().bytes());
    let error = load(
        &memory(),
        &mut kernel,
        None,
        "",
        &map,
        RSDP,
        RamContent::Zeroed,
    )
    .unwrap_err();
    assert!(matches!(error, BootError::NoLowRam));
}

mod damaged {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(128))]

        #[test]
        fn a_kernel_with_overwritten_headers_is_loaded_or_refused_but_never_panics(
            patches in proptest::collection::vec((0_usize..700, any::<[u8; 8]>()), 1..4),
            elf in any::<bool>(),
        ) {
            let mut kernel = if elf { ElfFile::new().bytes() } else { bzimage(|_| {}) };
            for (at, patch) in patches {
                let at = at % (kernel.len() - patch.len());
                kernel[at..at + patch.len()].copy_from_slice(&patch);
            }
            let _ = boot(&memory(), &kernel, Some(b"initrd"), "quiet");
        }
    }
}
