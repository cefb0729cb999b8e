//! Direct kernel boot: puts a kernel, an initial RAM disk and a command line into guest memory, and says how to enter.
//!
//! | kernel file | protocol | entered in | told by |
//! |---|---|---|---|
//! | ELF with a PVH note (`vmlinux`) | Xen PVH ABI | 32-bit protected mode, no paging | RBX = `hvm_start_info` |
//! | bzImage (`vmlinuz`) | Linux x86 boot protocol 2.12+ | 64-bit mode, 4 GiB identity-mapped | RSI = `boot_params` |
//!
//! The kernel file is input from outside: every number in it is checked before anything is written, against the file's length
//! and against the RAM that the memory map offers, and an error names the number. Loading itself is linux-loader's.

mod bzimage;
mod elf;
mod linux64;
mod pvh;
mod registers;
mod spec;

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::ops::Range;

use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryError};

use crate::Gpa;
use crate::layout::{E820Entry, E820Kind, LEGACY_HOLE_END};

pub use registers::{apply_sregs, regs};

/// Why a kernel cannot be booted. Messages are about the file's content; the caller knows its name.
#[derive(Debug, thiserror::Error)]
pub enum BootError {
    /// The kernel file cannot be read.
    #[error("kernel: cannot be read: {0}")]
    ReadKernel(#[source] io::Error),
    /// The initial RAM disk cannot be read.
    #[error("initrd: cannot be read: {0}")]
    ReadInitrd(#[source] io::Error),
    /// Neither an ELF nor a bzImage.
    #[error("kernel: neither an ELF file (vmlinux) nor a bzImage (vmlinuz)")]
    UnknownFormat,
    /// A number in the ELF file is impossible.
    #[error("kernel: ELF {what}")]
    Elf {
        /// What is wrong, naming the field.
        what: String,
    },
    /// An ELF kernel without the PVH entry.
    #[error("kernel: the ELF file has no PVH entry note; the kernel must be built with CONFIG_PVH")]
    NoPvhEntry,
    /// A number in the bzImage is impossible, or the kernel too old.
    #[error("kernel: bzImage {what}")]
    BzImage {
        /// What is wrong, naming the field.
        what: String,
    },
    /// linux-loader refused it.
    #[error("kernel: {0}")]
    Load(#[from] linux_loader::loader::Error),
    /// The boot structures could not be written.
    #[error("boot structures: {0}")]
    Configure(#[from] linux_loader::configurator::Error),
    /// A write into guest RAM failed.
    #[error("guest memory: {0}")]
    Memory(#[from] GuestMemoryError),
    /// The memory map has no RAM from 1 MiB on.
    #[error("memory map: no RAM at 1 MiB to load a kernel into")]
    NoLowRam,
    /// RAM is too small for the kernel.
    #[error(
        "kernel: needs memory up to {needed:#x}, but low RAM ends at {end:#x}: give the VM more memory"
    )]
    KernelTooBig {
        /// First address behind what the kernel needs.
        needed: u64,
        /// First address behind low RAM.
        end: u64,
    },
    /// The initial RAM disk does not fit behind the kernel.
    #[error(
        "initrd: {size_bytes} bytes do not fit between {start:#x} and {end:#x}: give the VM more memory"
    )]
    InitrdTooBig {
        /// Bytes of the file.
        size_bytes: u64,
        /// First address that it could use.
        start: u64,
        /// First address behind what it could use.
        end: u64,
    },
    /// The initial RAM disk is empty.
    #[error("initrd: the file is empty")]
    InitrdEmpty,
    /// The command line is too long.
    #[error("cmdline: {length} bytes, at most {max}")]
    CommandLineTooLong {
        /// Its bytes.
        length: usize,
        /// What the kernel accepts.
        max: usize,
    },
    /// The command line contains a NUL byte.
    #[error("cmdline: contains a NUL byte")]
    CommandLineNul,
    /// The memory map has too many entries for the zero page.
    #[error("memory map: {count} entries, at most {max}")]
    MemoryMapTooLong {
        /// Entries.
        count: usize,
        /// What the zero page holds.
        max: usize,
    },
}

/// How the kernel is entered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// Xen PVH: 32-bit protected mode.
    Pvh,
    /// Linux boot protocol: 64-bit mode.
    Linux64,
}

/// Where and how the boot processor starts; see [`regs`] and [`apply_sregs`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EntryPoint {
    /// The protocol.
    pub protocol: Protocol,
    /// First instruction.
    pub rip: u64,
    /// The kernel in memory, with what it needs before it reads the memory map (BSS, decompression).
    pub kernel: Range<u64>,
    /// The initial RAM disk in memory.
    pub initrd: Option<Range<u64>>,
}

/// Whether RAM is known to be zero, which spares clearing a kernel's BSS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RamContent {
    /// Fresh: reads as zeros.
    Zeroed,
    /// A guest ran in it.
    Used,
}

/// What the protocol-specific loaders need to know of the boot.
struct Plan<'a> {
    cmdline: &'a str,
    e820: &'a [E820Entry],
    rsdp: Gpa,
    ram: RamContent,
    /// First address behind the RAM that begins at or below 1 MiB.
    low_end: u64,
}

/// Loads a kernel with its initial RAM disk and command line, and writes the structures that its protocol asks for.
///
/// `e820` is the memory map to hand over ([`crate::layout::RamLayout::e820`]), `rsdp` where the ACPI root pointer is (0 for none).
/// Uses guest memory below 640 KiB for the boot structures, the kernel's own load address, and the top of low RAM for `initrd`.
///
/// # Errors
/// A file cannot be read, does not fit, or contains impossible numbers; guest memory may then be partly written.
pub fn load(
    memory: &impl GuestMemoryBackend,
    kernel: &mut File,
    initrd: Option<&mut File>,
    cmdline: &str,
    e820: &[E820Entry],
    rsdp: Gpa,
    ram: RamContent,
) -> Result<EntryPoint, BootError> {
    if e820.len() > spec::ZERO_PAGE_E820_MAX {
        return Err(BootError::MemoryMapTooLong {
            count: e820.len(),
            max: spec::ZERO_PAGE_E820_MAX,
        });
    }
    let plan = Plan {
        cmdline,
        e820,
        rsdp,
        ram,
        low_end: low_ram_end(e820)?,
    };
    let mut magic = [0; 4];
    kernel.rewind().map_err(BootError::ReadKernel)?;
    match kernel.read_exact(&mut magic) {
        Ok(()) if magic == spec::ELF_MAGIC => pvh::load(memory, kernel, initrd, &plan),
        Ok(()) => linux64::load(memory, kernel, initrd, &plan),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Err(BootError::UnknownFormat),
        Err(error) => Err(BootError::ReadKernel(error)),
    }
}

fn low_ram_end(e820: &[E820Entry]) -> Result<u64, BootError> {
    e820.iter()
        .filter(|entry| entry.kind == E820Kind::Ram)
        .map(|entry| (entry.base, entry.base.saturating_add(entry.size_bytes)))
        .find(|&(start, end)| start <= LEGACY_HOLE_END && LEGACY_HOLE_END < end)
        .map(|(_, end)| end)
        .ok_or(BootError::NoLowRam)
}

/// Writes the command line with its NUL.
fn write_cmdline(
    memory: &impl GuestMemoryBackend,
    cmdline: &str,
    max: usize,
) -> Result<(), BootError> {
    if cmdline.len() > max {
        return Err(BootError::CommandLineTooLong {
            length: cmdline.len(),
            max,
        });
    }
    if cmdline.as_bytes().contains(&0) {
        return Err(BootError::CommandLineNul);
    }
    let mut bytes = Vec::with_capacity(cmdline.len() + 1);
    bytes.extend_from_slice(cmdline.as_bytes());
    bytes.push(0);
    Ok(memory.write_slice(&bytes, GuestAddress(spec::COMMAND_LINE))?)
}

/// Reads the initial RAM disk to the highest page of `room` at which it fits.
fn load_initrd(
    memory: &impl GuestMemoryBackend,
    file: &mut File,
    room: Range<u64>,
) -> Result<Range<u64>, BootError> {
    let size_bytes = file.seek(SeekFrom::End(0)).map_err(BootError::ReadInitrd)?;
    file.rewind().map_err(BootError::ReadInitrd)?;
    if size_bytes == 0 {
        return Err(BootError::InitrdEmpty);
    }
    let too_big = || BootError::InitrdTooBig {
        size_bytes,
        start: room.start,
        end: room.end,
    };
    let start = room.end.checked_sub(size_bytes).ok_or_else(too_big)? & !(spec::PAGE - 1);
    if start < room.start {
        return Err(too_big());
    }
    let length = usize::try_from(size_bytes).map_err(|_| too_big())?;
    memory.read_exact_volatile_from(GuestAddress(start), file, length)?;
    Ok(start..start + size_bytes)
}

/// Makes `range` read as zeros.
fn clear(memory: &impl GuestMemoryBackend, range: Range<u64>) -> Result<(), BootError> {
    static ZEROS: [u8; 64 << 10] = [0; 64 << 10];
    let mut at = range.start;
    while at < range.end {
        let length = (range.end - at).min(ZEROS.len() as u64);
        memory.write_slice(&ZEROS[..length as usize], GuestAddress(at))?;
        at += length;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
