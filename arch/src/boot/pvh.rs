//! Boots an ELF kernel by the PVH protocol.

use std::fs::File;

use linux_loader::configurator::pvh::PvhBootConfigurator;
use linux_loader::configurator::{BootConfigurator, BootParams};
use linux_loader::loader::elf::start_info::{
    hvm_memmap_table_entry, hvm_modlist_entry, hvm_start_info,
};
use linux_loader::loader::{Elf, KernelLoader};
use linux_loader::start_info::XEN_HVM_START_MAGIC_VALUE;
use vm_memory::{Address, GuestAddress, GuestMemoryBackend};

use super::{
    BootError, EntryPoint, Plan, Protocol, RamContent, clear, elf, load_initrd, registers, spec,
    write_cmdline,
};

/// First version of `hvm_start_info` with a memory map.
const START_INFO_VERSION: u32 = 1;

pub(super) fn load(
    memory: &impl GuestMemoryBackend,
    kernel: &mut File,
    initrd: Option<&mut File>,
    plan: &Plan<'_>,
) -> Result<EntryPoint, BootError> {
    let inspected = elf::inspect(kernel, plan.low_end)?;
    Elf::load(memory, None, kernel, None)?;
    if plan.ram == RamContent::Used {
        for range in inspected.zero {
            clear(memory, range)?;
        }
    }
    let kernel_end = inspected.span.end.next_multiple_of(spec::PAGE);
    let initrd = initrd
        .map(|file| load_initrd(memory, file, kernel_end..plan.low_end))
        .transpose()?;
    write_cmdline(memory, plan.cmdline, spec::COMMAND_LINE_MAX)?;

    let modules: Vec<_> = initrd
        .iter()
        .map(|range| hvm_modlist_entry {
            paddr: range.start,
            size: range.end - range.start,
            ..Default::default()
        })
        .collect();
    let memory_map: Vec<_> = plan
        .e820
        .iter()
        .map(|entry| hvm_memmap_table_entry {
            addr: entry.base,
            size: entry.size_bytes,
            type_: entry.kind as u32,
            reserved: 0,
        })
        .collect();
    let start_info = hvm_start_info {
        magic: XEN_HVM_START_MAGIC_VALUE,
        version: START_INFO_VERSION,
        nr_modules: modules.len() as u32,
        modlist_paddr: if modules.is_empty() {
            0
        } else {
            spec::MODULE_LIST
        },
        cmdline_paddr: spec::COMMAND_LINE,
        rsdp_paddr: plan.rsdp.raw_value(),
        memmap_paddr: spec::MEMORY_MAP,
        memmap_entries: memory_map.len() as u32,
        ..Default::default()
    };
    let mut params = BootParams::new(&start_info, GuestAddress(spec::START_INFO));
    params.set_sections(&memory_map, GuestAddress(spec::MEMORY_MAP));
    if !modules.is_empty() {
        params.set_modules(&modules, GuestAddress(spec::MODULE_LIST));
    }
    PvhBootConfigurator::write_bootparams(&params, memory)?;
    registers::write_gdt(memory, Protocol::Pvh)?;
    Ok(EntryPoint {
        protocol: Protocol::Pvh,
        rip: inspected.entry,
        kernel: inspected.span.start..kernel_end,
        initrd,
    })
}
