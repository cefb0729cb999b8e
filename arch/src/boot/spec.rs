//! Numbers of the two boot protocols, and where their structures go in low memory.
//!
//! PVH: Xen `docs/misc/pvh.pandoc`, `public/arch-x86/hvm/start_info.h`. Linux: `Documentation/arch/x86/boot.rst`.

/// Global descriptor table: four entries.
pub(super) const GDT: u64 = 0x500;
/// `hvm_start_info`.
pub(super) const START_INFO: u64 = 0x6000;
/// Its module list (one entry: the initial RAM disk).
pub(super) const MODULE_LIST: u64 = 0x6040;
/// Its memory map.
pub(super) const MEMORY_MAP: u64 = 0x6080;
/// Linux's zero page (`boot_params`).
pub(super) const ZERO_PAGE: u64 = 0x7000;
/// Stack for whatever runs before the kernel sets its own; grows down.
pub(super) const STACK_TOP: u64 = 0x8FF0;
/// Page-map level 4 table; the page-directory-pointer table and four page directories follow.
pub(super) const PML4: u64 = 0x9000;
/// Page-directory-pointer table.
pub(super) const PDPT: u64 = 0xA000;
/// First of four page directories: 4 GiB in pages of 2 MiB.
pub(super) const PAGE_DIRECTORIES: u64 = 0xB000;
/// Kernel command line, NUL-terminated.
pub(super) const COMMAND_LINE: u64 = 0x2_0000;

/// Bytes of the command line that Linux keeps, without the NUL (`COMMAND_LINE_SIZE` - 1).
pub(super) const COMMAND_LINE_MAX: usize = 2047;
/// Page size.
pub(super) const PAGE: u64 = 4096;

/// First four bytes of an ELF file.
pub(super) const ELF_MAGIC: [u8; 4] = *b"\x7fELF";
/// Note type that holds the 32-bit PVH entry (`XEN_ELFNOTE_PHYS32_ENTRY`).
pub(super) const XEN_ELFNOTE_PHYS32_ENTRY: u32 = 18;

/// Offset of the "HdrS" magic.
pub(super) const HDRS: usize = 0x202;
/// First boot protocol with `xloadflags` and so with a declared 64-bit entry: 2.12.
pub(super) const PROTOCOL_64BIT: u16 = 0x020C;
/// `xloadflags`: the kernel has the 64-bit entry at 0x200.
pub(super) const XLF_KERNEL_64: u16 = 1;
/// `loadflags`: the protected-mode code is loaded at 1 MiB or above.
pub(super) const LOADED_HIGH: u8 = 1;
/// Offset of `startup_64` from where the protected-mode code is loaded.
pub(super) const STARTUP_64_OFFSET: u64 = 0x200;
/// `type_of_loader` of boot loaders without an assigned number.
pub(super) const LOADER_UNDEFINED: u8 = 0xFF;
/// Entries of the zero page's memory map.
pub(super) const ZERO_PAGE_E820_MAX: usize = 128;
