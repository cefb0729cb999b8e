//! A guest of a few bytes: an ELF file with a PVH note whose first instruction writes to the serial port.

/// Where its code is loaded and entered: 32-bit protected mode, paging off (Xen: docs/misc/pvh.pandoc).
const LOAD_ADDRESS: u32 = 0x0010_0000;
/// The note that names the entry point.
const XEN_ELFNOTE_PHYS32_ENTRY: u32 = 18;

/// What the guest writes to the first serial port.
pub const GREETING: u8 = b'!';

/// The ELF image.
#[must_use]
pub fn image() -> Vec<u8> {
    let code = [
        0x66, 0xba, 0xf8, 0x03, // mov dx, 0x3f8
        0xb0, GREETING, // mov al, '!'
        0xee,     // out dx, al
        0xf4,     // hlt
        0xeb, 0xfd, // jmp to the hlt
    ];
    let mut note = Vec::new();
    for word in [4_u32, 4, XEN_ELFNOTE_PHYS32_ENTRY] {
        note.extend_from_slice(&word.to_le_bytes());
    }
    note.extend_from_slice(b"Xen\0");
    note.extend_from_slice(&LOAD_ADDRESS.to_le_bytes());

    const HEADER: u64 = 64;
    const PROGRAM_HEADER: u64 = 56;
    let note_at = HEADER + 2 * PROGRAM_HEADER;
    let code_at = 0x1000_u64;
    let mut elf = Vec::new();
    elf.extend_from_slice(&[0x7f, b'E', b'L', b'F', 2, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    for (value, size) in [
        (2_u64, 2_usize), // ET_EXEC
        (62, 2),          // EM_X86_64
        (1, 4),           // EV_CURRENT
        (u64::from(LOAD_ADDRESS), 8),
        (HEADER, 8), // program headers
        (0, 8),      // no sections
        (0, 4),
        (HEADER, 2),
        (PROGRAM_HEADER, 2),
        (2, 2),
        (64, 2),
        (0, 2),
        (0, 2),
    ] {
        elf.extend_from_slice(&value.to_le_bytes()[..size]);
    }
    let code_size = code.len() as u64;
    let note_size = note.len() as u64;
    let address = u64::from(LOAD_ADDRESS);
    // PT_LOAD (readable, executable) and PT_NOTE.
    for (kind, flags, offset, address, size, alignment) in [
        (1_u32, 5_u32, code_at, address, code_size, 0x1000_u64),
        (4, 4, note_at, 0, note_size, 4),
    ] {
        elf.extend_from_slice(&kind.to_le_bytes());
        elf.extend_from_slice(&flags.to_le_bytes());
        for value in [offset, address, address, size, size, alignment] {
            elf.extend_from_slice(&value.to_le_bytes());
        }
    }
    elf.extend_from_slice(&note);
    elf.resize(0x1000, 0);
    elf.extend_from_slice(&code);
    elf
}
