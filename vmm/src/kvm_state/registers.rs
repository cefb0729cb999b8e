//! KVM's register structures as plain types: the same fields under the same names, without padding, serializable.

use kvm_bindings::{
    kvm_cpuid_entry2, kvm_debugregs, kvm_dtable, kvm_regs, kvm_segment, kvm_sregs, kvm_sregs2,
    kvm_vcpu_events, kvm_vcpu_events__bindgen_ty_1, kvm_vcpu_events__bindgen_ty_2,
    kvm_vcpu_events__bindgen_ty_3, kvm_vcpu_events__bindgen_ty_4, kvm_vcpu_events__bindgen_ty_5,
    kvm_xcr, kvm_xcrs,
};
use serde::{Deserialize, Serialize};

/// Declares a plain type with the fields of a KVM structure, and the conversions both ways.
macro_rules! mirror {
    ($(#[$meta:meta])* $name:ident of $kvm:ident { $($field:ident: $type:ty,)* }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
        #[serde(deny_unknown_fields)]
        #[allow(missing_docs, reason = "fields are KVM's, see the structure's own documentation")]
        pub struct $name {
            $(pub $field: $type,)*
        }

        impl From<$kvm> for $name {
            fn from(kvm: $kvm) -> Self {
                Self { $($field: kvm.$field.into(),)* }
            }
        }

        impl From<$name> for $kvm {
            #[allow(clippy::needless_update, reason = "only some of KVM's structures have padding")]
            fn from(state: $name) -> Self {
                Self { $($field: state.$field.into(),)* ..Default::default() }
            }
        }
    };
}

mirror! {
    /// A segment register with its descriptor (`kvm_segment`).
    Segment of kvm_segment {
        base: u64, limit: u32, selector: u16, type_: u8, present: u8, dpl: u8, db: u8, s: u8, l: u8, g: u8, avl: u8,
        unusable: u8,
    }
}

mirror! {
    /// GDTR or IDTR (`kvm_dtable`).
    DescriptorTable of kvm_dtable { base: u64, limit: u16, }
}

mirror! {
    /// General registers (`kvm_regs`).
    GeneralRegisters of kvm_regs {
        rax: u64, rbx: u64, rcx: u64, rdx: u64, rsi: u64, rdi: u64, rsp: u64, rbp: u64, r8: u64, r9: u64, r10: u64,
        r11: u64, r12: u64, r13: u64, r14: u64, r15: u64, rip: u64, rflags: u64,
    }
}

mirror! {
    /// Special registers with the interrupt that is about to be injected (`kvm_sregs`).
    SpecialRegisters of kvm_sregs {
        cs: Segment, ds: Segment, es: Segment, fs: Segment, gs: Segment, ss: Segment, tr: Segment, ldt: Segment,
        gdt: DescriptorTable, idt: DescriptorTable, cr0: u64, cr2: u64, cr3: u64, cr4: u64, cr8: u64, efer: u64,
        apic_base: u64, interrupt_bitmap: [u64; 4],
    }
}

mirror! {
    /// Special registers with the page-directory pointers of PAE paging (`kvm_sregs2`).
    SpecialRegisters2 of kvm_sregs2 {
        cs: Segment, ds: Segment, es: Segment, fs: Segment, gs: Segment, ss: Segment, tr: Segment, ldt: Segment,
        gdt: DescriptorTable, idt: DescriptorTable, cr0: u64, cr2: u64, cr3: u64, cr4: u64, cr8: u64, efer: u64,
        apic_base: u64, flags: u64, pdptrs: [u64; 4],
    }
}

mirror! {
    /// A pending or injected exception.
    ExceptionEvent of kvm_vcpu_events__bindgen_ty_1 {
        injected: u8, nr: u8, has_error_code: u8, pending: u8, error_code: u32,
    }
}

mirror! {
    /// An injected interrupt.
    InterruptEvent of kvm_vcpu_events__bindgen_ty_2 { injected: u8, nr: u8, soft: u8, shadow: u8, }
}

mirror! {
    /// Non-maskable interrupts.
    NmiEvent of kvm_vcpu_events__bindgen_ty_3 { injected: u8, pending: u8, masked: u8, }
}

mirror! {
    /// System-management mode.
    SmiEvent of kvm_vcpu_events__bindgen_ty_4 { smm: u8, pending: u8, smm_inside_nmi: u8, latched_init: u8, }
}

mirror! {
    /// A triple fault about to happen.
    TripleFaultEvent of kvm_vcpu_events__bindgen_ty_5 { pending: u8, }
}

mirror! {
    /// What is about to happen to a vCPU (`kvm_vcpu_events`).
    VcpuEvents of kvm_vcpu_events {
        exception: ExceptionEvent, interrupt: InterruptEvent, nmi: NmiEvent, sipi_vector: u32, flags: u32, smi: SmiEvent,
        triple_fault: TripleFaultEvent, exception_has_payload: u8, exception_payload: u64,
    }
}

mirror! {
    /// Debug registers (`kvm_debugregs`).
    DebugRegisters of kvm_debugregs { db: [u64; 4], dr6: u64, dr7: u64, flags: u64, }
}

mirror! {
    /// A CPUID leaf (`kvm_cpuid_entry2`).
    CpuidLeaf of kvm_cpuid_entry2 {
        function: u32, index: u32, flags: u32, eax: u32, ebx: u32, ecx: u32, edx: u32,
    }
}

/// Special registers by the newer call, or by the older one where the kernel (before 5.14) has no other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Special {
    /// `KVM_GET_SREGS`.
    Sregs(SpecialRegisters),
    /// `KVM_GET_SREGS2`.
    Sregs2(SpecialRegisters2),
}

impl Special {
    /// What both calls have in common, for a kernel without the newer one.
    #[must_use]
    pub fn to_sregs(self) -> SpecialRegisters {
        match self {
            Self::Sregs(sregs) => sregs,
            Self::Sregs2(two) => SpecialRegisters {
                cs: two.cs,
                ds: two.ds,
                es: two.es,
                fs: two.fs,
                gs: two.gs,
                ss: two.ss,
                tr: two.tr,
                ldt: two.ldt,
                gdt: two.gdt,
                idt: two.idt,
                cr0: two.cr0,
                cr2: two.cr2,
                cr3: two.cr3,
                cr4: two.cr4,
                cr8: two.cr8,
                efer: two.efer,
                apic_base: two.apic_base,
                // An injected interrupt is among the vCPU's events too.
                interrupt_bitmap: [0; 4],
            },
        }
    }
}

/// An extended control register.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExtendedControl {
    /// Which; 0 is XCR0.
    pub xcr: u32,
    /// Its value.
    pub value: u64,
}

/// The valid entries of `kvm_xcrs`.
pub(super) fn from_xcrs(xcrs: &kvm_xcrs) -> Vec<ExtendedControl> {
    xcrs.xcrs
        .iter()
        .take(xcrs.nr_xcrs as usize)
        .map(|entry| ExtendedControl {
            xcr: entry.xcr,
            value: entry.value,
        })
        .collect()
}

/// `kvm_xcrs` of at most 16 entries.
pub(super) fn to_xcrs(entries: &[ExtendedControl]) -> Option<kvm_xcrs> {
    let nr_xcrs = u32::try_from(entries.len()).ok()?;
    let mut xcrs = kvm_xcrs {
        nr_xcrs,
        ..Default::default()
    };
    for (index, entry) in entries.iter().enumerate() {
        *xcrs.xcrs.get_mut(index)? = kvm_xcr {
            xcr: entry.xcr,
            value: entry.value,
            reserved: 0,
        };
    }
    Some(xcrs)
}
