//! Checks a bzImage's setup header (Linux `Documentation/arch/x86/boot.rst`).

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::ops::Range;

use super::BootError;
use super::spec::{HDRS, LOADED_HIGH, PROTOCOL_64BIT, STARTUP_64_OFFSET, XLF_KERNEL_64};
use crate::layout::LEGACY_HOLE_END;

/// Offsets of setup header fields in the file.
mod field {
    pub(super) const SETUP_SECTS: usize = 0x1F1;
    pub(super) const VERSION: usize = 0x206;
    pub(super) const LOADFLAGS: usize = 0x211;
    pub(super) const CODE32_START: usize = 0x214;
    pub(super) const INITRD_ADDR_MAX: usize = 0x22C;
    pub(super) const RELOCATABLE: usize = 0x234;
    pub(super) const XLOADFLAGS: usize = 0x236;
    pub(super) const CMDLINE_SIZE: usize = 0x238;
    pub(super) const PREF_ADDRESS: usize = 0x258;
    pub(super) const INIT_SIZE: usize = 0x260;
    /// Behind the last field that protocol 2.12 defines.
    pub(super) const END: usize = 0x268;
}

/// What the setup header says, checked.
#[derive(Debug)]
pub(super) struct Kernel {
    /// Boot protocol version, major in the high byte.
    pub(super) protocol: u16,
    /// Where the protected-mode code goes, and the memory that it needs from there to decompress itself.
    pub(super) span: Range<u64>,
    /// First address that the initial RAM disk may not touch.
    pub(super) initrd_end_max: u64,
    /// Bytes of command line, without NUL.
    pub(super) cmdline_max: usize,
}

fn wrong<T>(what: impl Into<String>) -> Result<T, BootError> {
    Err(BootError::BzImage { what: what.into() })
}

fn array<const N: usize>(header: &[u8; field::END], at: usize) -> [u8; N] {
    std::array::from_fn(|index| header[at + index])
}

/// Reads and checks the setup header of `file`, which must fit into RAM from 1 MiB to `low_end`.
pub(super) fn inspect(file: &mut File, low_end: u64) -> Result<Kernel, BootError> {
    let length = file.seek(SeekFrom::End(0)).map_err(BootError::ReadKernel)?;
    file.rewind().map_err(BootError::ReadKernel)?;
    if length < field::END as u64 {
        return Err(BootError::UnknownFormat);
    }
    let mut header = [0; field::END];
    file.read_exact(&mut header)
        .map_err(BootError::ReadKernel)?;
    check(&header, length, low_end)
}

fn check(header: &[u8; field::END], length: u64, low_end: u64) -> Result<Kernel, BootError> {
    let u16_at = |at| u16::from_le_bytes(array(header, at));
    let u32_at = |at| u32::from_le_bytes(array(header, at));
    let u64_at = |at| u64::from_le_bytes(array(header, at));

    if array(header, HDRS) != *b"HdrS" {
        return Err(BootError::UnknownFormat);
    }
    let protocol = u16_at(field::VERSION);
    if protocol < PROTOCOL_64BIT {
        return wrong(format!(
            "version: boot protocol {}.{:02} has no 64-bit entry; 2.12 (Linux 3.8) or later is needed",
            protocol >> 8,
            protocol & 0xFF
        ));
    }
    if u16_at(field::XLOADFLAGS) & XLF_KERNEL_64 == 0 {
        return wrong("xloadflags: not a 64-bit kernel");
    }
    if header[field::LOADFLAGS] & LOADED_HIGH == 0 {
        return wrong("loadflags: a zImage that loads low, not a bzImage");
    }
    // 0 means 4 for the oldest images; one more sector is the boot sector itself.
    let setup_sectors = match header[field::SETUP_SECTS] {
        0 => 4,
        sectors => u64::from(sectors),
    };
    let setup_size = (setup_sectors + 1) * 512;
    let Some(code_size) = length
        .checked_sub(setup_size)
        .filter(|&size| size > STARTUP_64_OFFSET)
    else {
        return wrong(format!(
            "setup_sects: {setup_sectors} sectors of set-up code leave no kernel in {length} bytes"
        ));
    };
    let start = match (header[field::RELOCATABLE], u64_at(field::PREF_ADDRESS)) {
        (0, _) | (_, 0) => u64::from(u32_at(field::CODE32_START)),
        (_, preferred) => preferred,
    };
    if start < LEGACY_HOLE_END {
        return wrong(format!("pref_address: {start:#x} is below 1 MiB"));
    }
    let needed = code_size.max(u64::from(u32_at(field::INIT_SIZE)));
    let Some(end) = start.checked_add(needed) else {
        return wrong(format!(
            "init_size: {needed:#x} bytes from {start:#x} overflow"
        ));
    };
    if end > low_end {
        return Err(BootError::KernelTooBig {
            needed: end,
            end: low_end,
        });
    }
    Ok(Kernel {
        protocol,
        span: start..end,
        initrd_end_max: u64::from(u32_at(field::INITRD_ADDR_MAX)) + 1,
        cmdline_max: u32_at(field::CMDLINE_SIZE) as usize,
    })
}
