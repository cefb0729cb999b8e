//! Decodes topology from the leaves as an operating system would, and compares it with the arrangement and with the MADT's ids.

use proptest::prelude::*;

use super::*;
use crate::topology::Topology;

/// What KVM offers on a host of `vendor`, shortened; topology leaves hold a host's nonsense.
fn supported(vendor: &[u8; 12], phys_bits: u32) -> Vec<kvm_cpuid_entry2> {
    let word = |at: usize| u32::from_le_bytes(vendor[at..at + 4].try_into().unwrap());
    let leaf = |function, index, [eax, ebx, ecx, edx]: [u32; 4]| kvm_cpuid_entry2 {
        function,
        index,
        eax,
        ebx,
        ecx,
        edx,
        ..Default::default()
    };
    vec![
        leaf(0, 0, [0x0D, word(0), word(8), word(4)]),
        leaf(
            1,
            0,
            [0x0080_0F12, 0x3F40_0800, 1 << 27 | 1 << 5, 0x1783_FBFF],
        ),
        leaf(4, 0, [0xFC00_4121, 0x01C0_003F, 0x3F, 0]),
        leaf(4, 3, [0xFC0F_C163, 0x03C0_003F, 0x3FFF, 4]),
        leaf(4, 4, [0; 4]),
        leaf(0xB, 0, [1, 2, 0x100, 63]),
        leaf(
            0x4000_0000,
            0,
            [0x4000_0001, 0x4B4D_564B, 0x564B_4D56, 0x4D],
        ),
        leaf(0x4000_0001, 0, [0x0100_7EFB, 0, 0, 0]),
        leaf(0x8000_0000, 0, [0x8000_0021, 0, 0, 0]),
        leaf(0x8000_0001, 0, [0, 0, 1 << 2, 1 << 29]),
        leaf(0x8000_0005, 0, [0, 0, 0x2008_0140, 0x4004_0140]),
        leaf(0x8000_0006, 0, [0, 0, 0x0200_6140, 0x0040_9140]),
        leaf(0x8000_0008, 0, [0x3000 | phys_bits, 0, 0x703F, 0]),
        leaf(0x8000_000A, 0, [1, 0x8000, 0, 0xFF]),
        leaf(0x8000_001D, 0, [0; 4]),
        leaf(0x8000_001E, 0, [99, 99, 99, 0]),
    ]
}

const INTEL: &[u8; 12] = b"GenuineIntel";
const AMD: &[u8; 12] = b"AuthenticAMD";

fn policy(vendor: &[u8; 12], topology: Topology) -> CpuidPolicy {
    CpuidPolicy::host(&supported(vendor, 46), topology, Some(2_400_000)).unwrap()
}

fn leaf(entries: &[kvm_cpuid_entry2], function: u32, index: u32) -> kvm_cpuid_entry2 {
    *entries
        .iter()
        .find(|entry| entry.function == function && entry.index == index)
        .unwrap_or_else(|| panic!("leaf {function:#x}.{index} is missing"))
}

/// x2APIC id and the bits below (thread | die or core | socket) that leaf 0xB or 0x1F tells.
fn decode(entries: &[kvm_cpuid_entry2], function: u32) -> (u32, Vec<(u32, u32, u32)>) {
    let mut levels = Vec::new();
    loop {
        let entry = leaf(entries, function, levels.len() as u32);
        let kind = entry.ecx >> 8 & 0xFF;
        if kind == 0 {
            return (entry.edx, levels);
        }
        levels.push((kind, entry.eax, entry.ebx));
    }
}

#[test]
fn leaf_b_describes_two_sockets_of_three_cores_of_two_threads() {
    let topology = Topology::new(2, 1, 3, 2).unwrap();
    let entries = policy(INTEL, topology).for_vcpu(9);
    // Index 9 is socket 1, core 1, thread 1.
    assert_eq!(decode(&entries, 0xB), (0b1011, vec![(1, 1, 2), (2, 3, 6)]));
    assert_eq!(leaf(&entries, 1, 0).ebx >> 16, 0b1011 << 8 | 8);
    assert!(entries.iter().all(|entry| entry.function != 0x1F));
}

#[test]
fn dies_appear_in_leaf_1f_of_intel_processors() {
    let entries = policy(INTEL, Topology::new(1, 2, 2, 2).unwrap()).for_vcpu(7);
    assert_eq!(
        decode(&entries, 0x1F),
        (7, vec![(1, 1, 2), (2, 2, 4), (5, 3, 8)])
    );
    assert_eq!(leaf(&entries, 0, 0).eax, 0x1F);
}

#[test]
fn dies_appear_as_nodes_of_amd_processors() {
    let entries = policy(AMD, Topology::new(1, 2, 2, 2).unwrap()).for_vcpu(7);
    let topology = leaf(&entries, 0x8000_001E, 0);
    assert_eq!(topology.eax, 7);
    assert_eq!(topology.ebx, 1 << 8 | 3);
    assert_eq!(topology.ecx, 1 << 8 | 1);
    assert_eq!(leaf(&entries, 0x8000_0008, 0).ecx, 3 << 12 | 7);
    let features = leaf(&entries, 0x8000_0001, 0).ecx;
    assert_eq!(features & (1 << 22 | 1 << 1), 1 << 22 | 1 << 1);
}

#[test]
fn intel_caches_are_shared_within_a_core_and_within_a_die() {
    let entries = policy(INTEL, Topology::new(1, 1, 4, 2).unwrap()).for_vcpu(0);
    let l1 = leaf(&entries, 4, 0).eax;
    assert_eq!((l1 >> 14 & 0xFFF, l1 >> 26), (1, 3));
    let l3 = leaf(&entries, 4, 3).eax;
    assert_eq!((l3 >> 14 & 0xFFF, l3 >> 26), (7, 3));
    assert_eq!(
        leaf(&entries, 4, 4).eax,
        0,
        "the end of the list stays the end"
    );
}

#[test]
fn amd_caches_are_described_from_the_older_leaves() {
    let entries = policy(AMD, Topology::new(1, 1, 4, 2).unwrap()).for_vcpu(0);
    let cache = |index| leaf(&entries, 0x8000_001D, index);
    let size = |entry: kvm_cpuid_entry2| {
        ((entry.ebx >> 22) + 1) * ((entry.ebx & 0xFFF) + 1) * (entry.ecx + 1)
    };
    assert_eq!(size(cache(0)), 32 << 10);
    assert_eq!(size(cache(1)), 64 << 10);
    assert_eq!(size(cache(2)), 512 << 10);
    assert_eq!(size(cache(3)), 8 << 20);
    assert_eq!(cache(2).eax >> 14 & 0xFFF, 1);
    assert_eq!(cache(3).eax >> 14 & 0xFFF, 7);
    assert_eq!(cache(4).eax & 0x1F, 0);
}

#[test]
fn linux_is_spared_every_clock_calibration() {
    let entries = policy(AMD, Topology::flat(1).unwrap()).for_vcpu(0);
    let features = leaf(&entries, 1, 0).ecx;
    for (bit, name) in [(21, "x2APIC"), (24, "TSC deadline"), (31, "hypervisor")] {
        assert_ne!(features & 1 << bit, 0, "{name}");
    }
    assert_eq!(features & 1 << 27, 0, "OSXSAVE follows CR4");
    assert_ne!(leaf(&entries, 6, 0).eax & 1 << 2, 0, "ARAT");
    let signature = leaf(&entries, 0x4000_0000, 0);
    assert_eq!((signature.eax, signature.ebx), (0x4000_0010, 0x4B4D_564B));
    assert_eq!(leaf(&entries, 0x4000_0001, 0).eax, 0x0100_7EFB);
    let timing = leaf(&entries, 0x4000_0010, 0);
    assert_eq!((timing.eax, timing.ebx), (2_400_000, 1_000_000));
}

#[test]
fn nested_virtualisation_is_not_offered() {
    for vendor in [INTEL, AMD] {
        let entries = policy(vendor, Topology::flat(1).unwrap()).for_vcpu(0);
        assert_eq!(leaf(&entries, 1, 0).ecx & 1 << 5, 0, "VMX");
        assert_eq!(leaf(&entries, 0x8000_0001, 0).ecx & 1 << 2, 0, "SVM");
        assert!(entries.iter().all(|entry| entry.function != 0x8000_000A));
    }
}

#[test]
fn an_unknown_tsc_frequency_leaves_the_timing_leaf_out() {
    let policy = CpuidPolicy::host(&supported(AMD, 40), Topology::flat(1).unwrap(), None).unwrap();
    let entries = policy.for_vcpu(0);
    assert_eq!(leaf(&entries, 0x4000_0000, 0).eax, 0x4000_0001);
    assert!(entries.iter().all(|entry| entry.function != 0x4000_0010));
}

#[test]
fn address_bits_are_what_the_guest_can_reach() {
    let topology = Topology::flat(1).unwrap();
    for bits in [39, 40, 46, 48, 52] {
        let policy = CpuidPolicy::host(&supported(INTEL, bits), topology, None).unwrap();
        assert_eq!(u32::from(policy.phys_bits()), bits);
    }
    let limited = CpuidPolicy::host(&supported(INTEL, 48 << 16 | 52), topology, None).unwrap();
    assert_eq!(limited.phys_bits(), 48);
}

#[test]
fn a_host_without_64_bit_mode_is_refused() {
    let topology = Topology::flat(1).unwrap();
    let mut leaves = supported(INTEL, 46);
    leaves
        .iter_mut()
        .find(|entry| entry.function == 0x8000_0001)
        .unwrap()
        .edx = 0;
    assert_eq!(
        CpuidPolicy::host(&leaves, topology, None).unwrap_err(),
        CpuidError::No64Bit
    );
    leaves.retain(|entry| entry.function != 1);
    assert_eq!(
        CpuidPolicy::host(&leaves, topology, None).unwrap_err(),
        CpuidError::MissingLeaf { leaf: 1 }
    );
}

proptest! {
    #[test]
    fn every_leaf_tells_the_same_topology(
        sockets in 1_u32..5, dies in 1_u32..5, cores in 1_u32..9, threads in 1_u32..4, amd in any::<bool>(),
    ) {
        let Ok(topology) = Topology::new(sockets, dies, cores, threads) else { return Ok(()) };
        let policy = policy(if amd { AMD } else { INTEL }, topology);
        for index in 0..topology.count() {
            let id = topology.apic_id(index);
            let entries = policy.for_vcpu(index);
            let keys: Vec<_> = entries.iter().map(|entry| (entry.function, entry.index)).collect();
            prop_assert!(keys.windows(2).all(|pair| pair[0] < pair[1]), "sorted, no duplicates");

            let (x2apic, levels) = decode(&entries, 0xB);
            prop_assert_eq!(x2apic, id);
            prop_assert_eq!(leaf(&entries, 1, 0).ebx >> 24, id);
            // Same socket exactly where the shifted ids are the same.
            let shift = levels[1].1;
            for other in 0..topology.count() {
                let per_socket = topology.threads_per_socket();
                prop_assert_eq!(
                    topology.apic_id(other) >> shift == id >> shift,
                    other / per_socket == index / per_socket
                );
            }
            prop_assert_eq!(levels[1].2, topology.threads_per_socket());
            if amd {
                prop_assert_eq!(leaf(&entries, 0x8000_001E, 0).eax, id);
                prop_assert_eq!(leaf(&entries, 0x8000_0008, 0).ecx >> 12 & 0xF, shift);
            } else if dies > 1 {
                prop_assert_eq!(decode(&entries, 0x1F).0, id);
            }
        }
    }
}
