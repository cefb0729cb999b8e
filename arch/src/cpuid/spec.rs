//! CPUID leaves and bits (Intel SDM 2A, AMD APM 3 appendix E, Linux `Documentation/virt/kvm/x86/cpuid.rst`).

/// Largest leaf and vendor.
pub(super) const VENDOR: u32 = 0;
/// Version and features.
pub(super) const FEATURES: u32 = 1;
/// Leaf 1 ECX: Intel's virtual machine extensions.
pub(super) const VMX: u32 = 1 << 5;
/// Leaf 1 ECX: x2APIC.
pub(super) const X2APIC: u32 = 1 << 21;
/// Leaf 1 ECX: the APIC timer has a TSC-deadline mode.
pub(super) const TSC_DEADLINE: u32 = 1 << 24;
/// Leaf 1 ECX: CR4.OSXSAVE.
pub(super) const OSXSAVE: u32 = 1 << 27;
/// Leaf 1 ECX: runs under a hypervisor.
pub(super) const HYPERVISOR: u32 = 1 << 31;
/// Leaf 1 EDX: EBX[23:16] counts more than one.
pub(super) const HTT: u32 = 1 << 28;
/// Intel: deterministic cache parameters.
pub(super) const CACHES: u32 = 4;
/// Thermal and power management.
pub(super) const POWER: u32 = 6;
/// Leaf 6 EAX: the APIC timer always runs.
pub(super) const ARAT: u32 = 1 << 2;
/// Extended topology.
pub(super) const EXTENDED_TOPOLOGY: u32 = 0xB;
/// Intel: extended topology with dies.
pub(super) const EXTENDED_TOPOLOGY_V2: u32 = 0x1F;
/// Level types of leaves 0xB and 0x1F.
pub(super) const LEVEL_INVALID: u32 = 0;
/// Threads of a core.
pub(super) const LEVEL_THREAD: u32 = 1;
/// Cores.
pub(super) const LEVEL_CORE: u32 = 2;
/// Dies.
pub(super) const LEVEL_DIE: u32 = 5;

/// Hypervisor signature.
pub(super) const KVM_SIGNATURE: u32 = 0x4000_0000;
/// "KVMKVMKVM\0\0\0" in EBX, ECX, EDX.
pub(super) const KVM_SIGNATURE_TEXT: [u32; 3] = [0x4B4D_564B, 0x564B_4D56, 0x0000_004D];
/// KVM's paravirtual features.
pub(super) const KVM_FEATURES: u32 = 0x4000_0001;
/// TSC and APIC bus frequency in kHz, a convention shared by several hypervisors.
pub(super) const HYPERVISOR_TIMING: u32 = 0x4000_0010;
/// KVM's APIC timer counts nanoseconds.
pub(super) const KVM_APIC_BUS_KHZ: u32 = 1_000_000;

/// Largest extended leaf.
pub(super) const EXTENDED: u32 = 0x8000_0000;
/// Extended features.
pub(super) const EXTENDED_FEATURES: u32 = 0x8000_0001;
/// Leaf 0x8000_0001 EDX: 64-bit mode.
pub(super) const LONG_MODE: u32 = 1 << 29;
/// AMD, leaf 0x8000_0001 ECX: cores, not hyper-threads, are counted by leaf 1.
pub(super) const CMP_LEGACY: u32 = 1 << 1;
/// AMD, leaf 0x8000_0001 ECX: secure virtual machine.
pub(super) const SVM: u32 = 1 << 2;
/// AMD, leaf 0x8000_0001 ECX: leaves 0x8000_001D and 0x8000_001E exist.
pub(super) const TOPOEXT: u32 = 1 << 22;
/// AMD: L1 caches.
pub(super) const AMD_L1: u32 = 0x8000_0005;
/// AMD: L2 and L3 caches.
pub(super) const AMD_L2_L3: u32 = 0x8000_0006;
/// Address sizes; AMD: threads of the package.
pub(super) const ADDRESS_SIZES: u32 = 0x8000_0008;
/// AMD: features of secure virtual machine.
pub(super) const SVM_FEATURES: u32 = 0x8000_000A;
/// AMD: cache topology.
pub(super) const AMD_CACHES: u32 = 0x8000_001D;
/// AMD: extended APIC id, core and node.
pub(super) const AMD_TOPOLOGY: u32 = 0x8000_001E;
/// AMD: extended topology of Zen 4 and later, which KVM does not offer to guests.
pub(super) const AMD_EXTENDED_TOPOLOGY: u32 = 0x8000_0026;
