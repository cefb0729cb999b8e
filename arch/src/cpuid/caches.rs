//! Which vCPUs share which cache: L1 and L2 belong to a core, L3 to a die.

use kvm_bindings::{KVM_CPUID_FLAG_SIGNIFCANT_INDEX, kvm_cpuid_entry2};

use super::spec;
use crate::topology::Topology;

/// EAX[4:0] of leaves 4 and 0x8000_001D.
const TYPE_DATA: u32 = 1;
const TYPE_INSTRUCTION: u32 = 2;
const TYPE_UNIFIED: u32 = 3;

/// Threads that share a cache of `level`, as the id space they occupy.
fn sharing_ids(level: u32, topology: &Topology) -> u32 {
    1 << if level < 3 {
        topology.thread_bits()
    } else {
        topology.die_bits()
    }
}

/// Rewrites a subleaf of leaf 4: EAX[25:14] is the ids that share the cache, EAX[31:26] the core ids of the package, each less one.
pub(super) fn arrange_intel(entry: &mut kvm_cpuid_entry2, topology: &Topology) {
    if entry.eax & 0x1F == 0 {
        return;
    }
    let level = entry.eax >> 5 & 7;
    let sharing = (sharing_ids(level, topology) - 1).min(0xFFF);
    let cores = ((1 << (topology.socket_bits() - topology.thread_bits())) - 1_u32).min(0x3F);
    entry.eax = entry.eax & 0x3FFF | sharing << 14 | cores << 26;
}

/// A cache as leaves 0x8000_0005 and 0x8000_0006 describe it.
struct Cache {
    kind: u32,
    level: u32,
    size_bytes: u32,
    ways: u32,
    line_bytes: u32,
}

/// Leaf 0x8000_001D made from the older leaves, whose numbers KVM takes from the host while it leaves this one empty.
pub(super) fn amd(
    l1: kvm_cpuid_entry2,
    l2_l3: kvm_cpuid_entry2,
    topology: &Topology,
) -> Vec<kvm_cpuid_entry2> {
    let first_level = |kind, register: u32| Cache {
        kind,
        level: 1,
        size_bytes: (register >> 24) << 10,
        ways: register >> 16 & 0xFF,
        line_bytes: register & 0xFF,
    };
    let caches = [
        first_level(TYPE_DATA, l1.ecx),
        first_level(TYPE_INSTRUCTION, l1.edx),
        Cache {
            kind: TYPE_UNIFIED,
            level: 2,
            size_bytes: (l2_l3.ecx >> 16) << 10,
            ways: ways(l2_l3.ecx >> 12 & 0xF),
            line_bytes: l2_l3.ecx & 0xFF,
        },
        Cache {
            kind: TYPE_UNIFIED,
            level: 3,
            // Units of 512 KiB.
            size_bytes: (l2_l3.edx >> 18).saturating_mul(512 << 10),
            ways: ways(l2_l3.edx >> 12 & 0xF),
            line_bytes: l2_l3.edx & 0xFF,
        },
    ];
    caches
        .iter()
        .filter_map(|cache| {
            let sets = cache
                .size_bytes
                .checked_div(cache.ways.checked_mul(cache.line_bytes)?)?;
            let sets_less_one = sets.checked_sub(1)?;
            let sharing = sharing_ids(cache.level, topology) - 1;
            Some(kvm_cpuid_entry2 {
                eax: cache.kind | cache.level << 5 | 1 << 8 | sharing << 14,
                ebx: (cache.line_bytes - 1) | (cache.ways - 1) << 22,
                ecx: sets_less_one,
                ..Default::default()
            })
        })
        .chain(std::iter::once(kvm_cpuid_entry2::default()))
        .enumerate()
        .map(|(index, entry)| kvm_cpuid_entry2 {
            function: spec::AMD_CACHES,
            index: index as u32,
            flags: KVM_CPUID_FLAG_SIGNIFCANT_INDEX,
            ..entry
        })
        .collect()
}

/// Associativity codes of leaf 0x8000_0006 (AMD APM 3 table E-4); fully associative and reserved codes count as 16 ways, the
/// nearest that leaf 0x8000_001D can say without knowing the number of lines.
fn ways(code: u32) -> u32 {
    match code {
        1 => 1,
        2 => 2,
        3 => 3,
        4 => 4,
        5 => 6,
        6 => 8,
        8 => 16,
        0xA => 32,
        0xB => 48,
        0xC => 64,
        0xD => 96,
        0xE => 128,
        _ => 16,
    }
}
