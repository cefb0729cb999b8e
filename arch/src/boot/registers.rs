//! The boot processor's registers at a kernel's entry, and the descriptor table that they refer to.
//!
//! | register | PVH | Linux, 64-bit entry |
//! |---|---|---|
//! | CR0 | PE | PE, PG |
//! | CR3 / CR4 | 0 / 0 | PML4 / PAE |
//! | EFER | 0 | LME, LMA |
//! | CS | 0x08, 32-bit flat | 0x10, 64-bit flat |
//! | DS, ES, SS | 0x10, flat | 0x18, flat |
//! | RBX / RSI | `hvm_start_info` / 0 | 0 / `boot_params` |
//! | RFLAGS | 0x2 | 0x2 |

use kvm_bindings::{kvm_dtable, kvm_regs, kvm_segment, kvm_sregs};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend};

use super::{BootError, EntryPoint, Protocol, spec};

mod bits {
    //! Control register bits (Intel SDM 3A §2.5, §2.2.1).
    pub(super) const CR0_PE: u64 = 1;
    /// Reads as one on every processor since the 486.
    pub(super) const CR0_ET: u64 = 1 << 4;
    pub(super) const CR0_PG: u64 = 1 << 31;
    pub(super) const CR4_PAE: u64 = 1 << 5;
    pub(super) const EFER_LME: u64 = 1 << 8;
    pub(super) const EFER_LMA: u64 = 1 << 10;
    /// Reads as one.
    pub(super) const RFLAGS_RESERVED: u64 = 1 << 1;
    /// Segment types (Intel SDM 3A tables 3-1 and 3-2).
    pub(super) const TYPE_CODE: u8 = 0xB;
    pub(super) const TYPE_DATA: u8 = 0x3;
    pub(super) const TYPE_TSS_BUSY: u8 = 0xB;
}

/// A segment and its place in the descriptor table.
fn segment(selector: u16, type_: u8, wide: bool) -> kvm_segment {
    kvm_segment {
        base: 0,
        limit: u32::MAX,
        selector,
        type_,
        present: 1,
        dpl: 0,
        db: u8::from(!wide),
        s: 1,
        l: u8::from(wide),
        g: 1,
        ..Default::default()
    }
}

struct Segments {
    code: kvm_segment,
    data: kvm_segment,
    task: kvm_segment,
}

impl Segments {
    fn of(protocol: Protocol) -> Self {
        let (code, data, task) = match protocol {
            Protocol::Pvh => (0x08, 0x10, 0x18),
            // The protocol asks for __BOOT_CS = 0x10 and __BOOT_DS = 0x18.
            Protocol::Linux64 => (0x10, 0x18, 0x20),
        };
        Self {
            code: segment(code, bits::TYPE_CODE, protocol == Protocol::Linux64),
            data: segment(data, bits::TYPE_DATA, false),
            task: kvm_segment {
                limit: 0x67,
                db: 0,
                s: 0,
                g: 0,
                ..segment(task, bits::TYPE_TSS_BUSY, false)
            },
        }
    }

    fn table(&self) -> Vec<u64> {
        let mut table = vec![0; 5];
        for segment in [&self.code, &self.data, &self.task] {
            table[usize::from(segment.selector) / 8] = descriptor(segment);
        }
        table
    }
}

/// A segment as the descriptor table holds it (Intel SDM 3A figure 3-8).
fn descriptor(segment: &kvm_segment) -> u64 {
    let limit = u64::from(if segment.g == 1 {
        segment.limit >> 12
    } else {
        segment.limit
    });
    let flags = u64::from(segment.type_)
        | u64::from(segment.s) << 4
        | u64::from(segment.dpl) << 5
        | u64::from(segment.present) << 7
        | u64::from(segment.avl) << 12
        | u64::from(segment.l) << 13
        | u64::from(segment.db) << 14
        | u64::from(segment.g) << 15;
    (limit & 0xFFFF)
        | (segment.base & 0xFF_FFFF) << 16
        | flags << 40
        | (limit >> 16 & 0xF) << 48
        | (segment.base >> 24 & 0xFF) << 56
}

/// Writes the descriptor table that the segments of [`apply_sregs`] come from.
pub(super) fn write_gdt(
    memory: &impl GuestMemoryBackend,
    protocol: Protocol,
) -> Result<(), BootError> {
    let bytes: Vec<u8> = Segments::of(protocol)
        .table()
        .into_iter()
        .flat_map(u64::to_le_bytes)
        .collect();
    Ok(memory.write_slice(&bytes, GuestAddress(spec::GDT))?)
}

/// General registers of the boot processor.
#[must_use]
pub fn regs(entry: &EntryPoint) -> kvm_regs {
    let mut regs = kvm_regs {
        rip: entry.rip,
        rsp: spec::STACK_TOP,
        rbp: spec::STACK_TOP,
        rflags: bits::RFLAGS_RESERVED,
        ..Default::default()
    };
    match entry.protocol {
        Protocol::Pvh => regs.rbx = spec::START_INFO,
        Protocol::Linux64 => regs.rsi = spec::ZERO_PAGE,
    }
    regs
}

/// Sets the special registers of the boot processor; `sregs` is what KVM reports after creation or reset, and what is not
/// the protocol's business (APIC base, pending interrupts) stays as it is.
pub fn apply_sregs(entry: &EntryPoint, sregs: &mut kvm_sregs) {
    let segments = Segments::of(entry.protocol);
    sregs.cs = segments.code;
    for segment in [
        &mut sregs.ds,
        &mut sregs.es,
        &mut sregs.fs,
        &mut sregs.gs,
        &mut sregs.ss,
    ] {
        *segment = segments.data;
    }
    sregs.tr = segments.task;
    sregs.gdt = kvm_dtable {
        base: spec::GDT,
        limit: (segments.table().len() * 8 - 1) as u16,
        ..Default::default()
    };
    sregs.idt = kvm_dtable::default();
    let protected = bits::CR0_PE | bits::CR0_ET;
    (sregs.cr0, sregs.cr3, sregs.cr4, sregs.efer) = match entry.protocol {
        Protocol::Pvh => (protected, 0, 0, 0),
        Protocol::Linux64 => (
            protected | bits::CR0_PG,
            spec::PML4,
            bits::CR4_PAE,
            bits::EFER_LME | bits::EFER_LMA,
        ),
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_are_the_usual_flat_ones() {
        assert_eq!(
            descriptor(&segment(8, bits::TYPE_CODE, false)),
            0x00CF_9B00_0000_FFFF
        );
        assert_eq!(
            descriptor(&segment(8, bits::TYPE_CODE, true)),
            0x00AF_9B00_0000_FFFF
        );
        assert_eq!(
            descriptor(&segment(16, bits::TYPE_DATA, false)),
            0x00CF_9300_0000_FFFF
        );
        assert_eq!(
            descriptor(&Segments::of(Protocol::Pvh).task),
            0x0000_8B00_0000_0067
        );
    }
}
