//! What an x86-64 Drover machine looks like, as bytes: this crate turns a description into memory maps, boot structures,
//! processor identification and firmware tables. It opens nothing and knows no hypervisor; whoever calls it places the result.
//!
//! | module | what | specification |
//! |---|---|---|
//! | [`layout`] | guest-physical memory map, ports, interrupt numbers | ICH9 and Q35 data sheets |
//! | [`boot`] | ELF + PVH and bzImage loading, entry registers | Xen PVH ABI, Linux x86 boot protocol |
//! | [`topology`] | sockets, dies, cores, threads and their x2APIC ids | Intel SDM 3A §9.9 |
//! | [`cpuid`] | what the processor says of itself | Intel SDM 2A CPUID, AMD APM 3 appendix E, KVM CPUID bits |
//! | [`msr`] | model-specific registers at reset | Intel SDM 4 |
//! | [`acpi`] | RSDP to DSDT | ACPI 6.5, PCI Firmware 3.3 |
//! | [`smbios`] | system, chassis, processor and memory inventory | SMBIOS 3.6 |
//!
//! A machine is described once and every table derives from that: [`topology::Topology`] feeds CPUID leaves, MADT, SRAT and
//! SMBIOS alike, [`layout::RamLayout`] feeds e820, SRAT and SMBIOS.

#![forbid(unsafe_code)]

pub mod acpi;
pub mod boot;
pub mod cpuid;
pub mod layout;
pub mod msr;
pub mod smbios;
pub mod topology;

/// A guest-physical address.
pub use vm_memory::GuestAddress as Gpa;
