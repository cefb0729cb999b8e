//! Boots a bzImage through its 64-bit entry: zero page, identity page tables, GDT.

use std::fs::File;

use linux_loader::configurator::linux::LinuxBootConfigurator;
use linux_loader::configurator::{BootConfigurator, BootParams};
use linux_loader::loader::bootparam::{boot_e820_entry, boot_params, setup_header};
use linux_loader::loader::{BzImage, KernelLoader};
use vm_memory::{Address, Bytes, GuestAddress, GuestMemoryBackend};

use super::{
    BootError, EntryPoint, Plan, Protocol, bzimage, load_initrd, registers, spec, write_cmdline,
};

/// First boot protocol with `kernel_info_offset`: 2.15.
const PROTOCOL_KERNEL_INFO: u16 = 0x020F;

pub(super) fn load(
    memory: &impl GuestMemoryBackend,
    kernel: &mut File,
    initrd: Option<&mut File>,
    plan: &Plan<'_>,
) -> Result<EntryPoint, BootError> {
    let inspected = bzimage::inspect(kernel, plan.low_end)?;
    let span = inspected.span.clone();
    let loaded = BzImage::load(memory, Some(GuestAddress(span.start)), kernel, None)?;
    let mut header = loaded.setup_header.unwrap_or_default();
    if inspected.protocol < PROTOCOL_KERNEL_INFO {
        // Set-up code, not a header field, in older images.
        header.kernel_info_offset = 0;
    }
    let kernel_end = span.end.next_multiple_of(spec::PAGE);
    let initrd_end = plan.low_end.min(inspected.initrd_end_max);
    let initrd = initrd
        .map(|file| load_initrd(memory, file, kernel_end..initrd_end))
        .transpose()?;
    write_cmdline(
        memory,
        plan.cmdline,
        spec::COMMAND_LINE_MAX.min(inspected.cmdline_max),
    )?;

    header.type_of_loader = spec::LOADER_UNDEFINED;
    header.cmd_line_ptr = spec::COMMAND_LINE as u32;
    if let Some(range) = &initrd {
        // Below 4 GiB, for `initrd_addr_max` has 32 bits.
        header.ramdisk_image = range.start as u32;
        header.ramdisk_size = (range.end - range.start) as u32;
    }
    let zero_page = zero_page(header, plan);
    let params = BootParams::new(&zero_page, GuestAddress(spec::ZERO_PAGE));
    LinuxBootConfigurator::write_bootparams(&params, memory)?;
    write_page_tables(memory)?;
    registers::write_gdt(memory, Protocol::Linux64)?;
    Ok(EntryPoint {
        protocol: Protocol::Linux64,
        rip: span.start + spec::STARTUP_64_OFFSET,
        kernel: span.start..kernel_end,
        initrd,
    })
}

fn zero_page(header: setup_header, plan: &Plan<'_>) -> boot_params {
    let mut table = [boot_e820_entry::default(); spec::ZERO_PAGE_E820_MAX];
    for (slot, entry) in table.iter_mut().zip(plan.e820) {
        *slot = boot_e820_entry {
            addr: entry.base,
            size: entry.size_bytes,
            r#type: entry.kind as u32,
        };
    }
    boot_params {
        hdr: header,
        acpi_rsdp_addr: plan.rsdp.raw_value(),
        e820_entries: plan.e820.len() as u8,
        e820_table: table,
        ..boot_params::default()
    }
}

/// Maps the first 4 GiB to themselves in pages of 2 MiB (Intel SDM 3A §4.5).
fn write_page_tables(memory: &impl GuestMemoryBackend) -> Result<(), BootError> {
    const PRESENT_WRITABLE: u64 = 0b11;
    const LARGE: u64 = 1 << 7;
    const DIRECTORIES: u64 = 4;
    const ENTRIES: u64 = 512;

    let mut pml4 = [0_u64; ENTRIES as usize];
    pml4[0] = spec::PDPT | PRESENT_WRITABLE;
    let pdpt: [u64; ENTRIES as usize] = std::array::from_fn(|index| match index as u64 {
        directory @ 0..DIRECTORIES => {
            (spec::PAGE_DIRECTORIES + directory * spec::PAGE) | PRESENT_WRITABLE
        }
        _ => 0,
    });
    let directories =
        (0..DIRECTORIES * ENTRIES).map(|index| (index << 21) | PRESENT_WRITABLE | LARGE);
    let bytes: Vec<u8> = pml4
        .into_iter()
        .chain(pdpt)
        .chain(directories)
        .flat_map(u64::to_le_bytes)
        .collect();
    Ok(memory.write_slice(&bytes, GuestAddress(spec::PML4))?)
}
