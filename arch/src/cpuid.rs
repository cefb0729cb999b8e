//! What a vCPU says of itself: KVM's offer for this host, with the VM's own topology instead of the host's.
//!
//! | leaf | what is changed |
//! |---|---|
//! | 0 | at least 0xB (0x1F where there are dies), so that topology can be read |
//! | 1 | initial APIC id, threads of the package, hypervisor, TSC-deadline and x2APIC bits; no VMX |
//! | 4 | Intel: who shares each cache; cores of the package |
//! | 6 | the APIC timer keeps running in deep sleep (ARAT), which spares Linux the PIT |
//! | 0xB, 0x1F | extended topology |
//! | 0x4000_0000 .. 0x4000_0010 | KVM's signature, paravirtual features, TSC and APIC bus frequency |
//! | 0x8000_0001, 0x8000_000A | no SVM |
//! | 0x8000_0008 | AMD: threads of the package |
//! | 0x8000_001D, 0x8000_001E | AMD: who shares each cache; core and node id |
//!
//! Ids come from [`Topology::apic_id`], as those of the MADT do. Frequencies and the deadline timer matter for boot time: with
//! kvm-clock, a known TSC frequency and TSC-deadline, Linux calibrates nothing against the PIT. Nested virtualisation is not offered,
//! because its state is not among what is saved of a vCPU.

mod caches;
mod spec;
#[cfg(test)]
mod tests;

use kvm_bindings::{KVM_CPUID_FLAG_SIGNIFCANT_INDEX, kvm_cpuid_entry2};

use crate::topology::Topology;

/// Who made the processor: decides which topology leaves exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Vendor {
    /// GenuineIntel.
    Intel,
    /// AuthenticAMD and HygonGenuine.
    Amd,
    /// Anyone else.
    Other,
}

/// Why no policy can be made of what KVM offers.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CpuidError {
    /// A leaf that every 64-bit processor has is not offered.
    #[error("KVM offers no CPUID leaf {leaf:#x}: not a usable x86-64 host")]
    MissingLeaf {
        /// The leaf.
        leaf: u32,
    },
    /// The host has no 64-bit mode to give.
    #[error("KVM does not offer 64-bit mode to guests")]
    No64Bit,
}

/// One processor model for all vCPUs of a VM.
#[derive(Clone, Debug)]
pub struct CpuidPolicy {
    base: Vec<kvm_cpuid_entry2>,
    topology: Topology,
    vendor: Vendor,
    phys_bits: u8,
}

impl CpuidPolicy {
    /// The host's processor as KVM offers it (`KVM_GET_SUPPORTED_CPUID`), arranged as `topology`.
    ///
    /// `tsc_khz` is the guest's TSC frequency (`KVM_GET_TSC_KHZ`); without it the timing leaf is left out.
    ///
    /// # Errors
    /// `supported` lacks what every x86-64 processor has.
    pub fn host(
        supported: &[kvm_cpuid_entry2],
        topology: Topology,
        tsc_khz: Option<u32>,
    ) -> Result<Self, CpuidError> {
        let find = |leaf| {
            supported
                .iter()
                .find(|entry| entry.function == leaf)
                .ok_or(CpuidError::MissingLeaf { leaf })
        };
        let vendor = vendor(find(spec::VENDOR)?);
        find(spec::FEATURES)?;
        if find(spec::EXTENDED_FEATURES)?.edx & spec::LONG_MODE == 0 {
            return Err(CpuidError::No64Bit);
        }
        let phys_bits = find(spec::ADDRESS_SIZES).map_or(36, address_bits);
        let mut policy = Self {
            base: supported.to_vec(),
            topology,
            vendor,
            phys_bits,
        };
        policy.fix_features();
        policy.fix_hypervisor(tsc_khz);
        policy.fix_caches();
        Ok(policy)
    }

    /// Physical address bits that guest RAM and PCI windows may use.
    #[must_use]
    pub fn phys_bits(&self) -> u8 {
        self.phys_bits
    }

    /// The processor's vendor.
    #[must_use]
    pub fn vendor(&self) -> Vendor {
        self.vendor
    }

    /// The processor's signature (leaf 1 EAX) and feature bits (leaf 1 EDX), as SMBIOS type 4 repeats them.
    #[must_use]
    pub fn processor_id(&self) -> u64 {
        self.base
            .iter()
            .find(|entry| entry.function == spec::FEATURES)
            .map_or(0, |entry| u64::from(entry.eax) | u64::from(entry.edx) << 32)
    }

    /// The leaves of vCPU `index` (`KVM_SET_CPUID2`), in ascending order.
    #[must_use]
    pub fn for_vcpu(&self, index: u32) -> Vec<kvm_cpuid_entry2> {
        let apic_id = self.topology.apic_id(index);
        let mut entries = self.base.clone();
        for entry in &mut entries {
            match entry.function {
                spec::FEATURES => entry.ebx = entry.ebx & 0x00FF_FFFF | (apic_id & 0xFF) << 24,
                spec::AMD_TOPOLOGY if self.vendor == Vendor::Amd => {
                    let (ebx, ecx) = self.amd_topology(index);
                    (entry.eax, entry.ebx, entry.ecx, entry.edx) = (apic_id, ebx, ecx, 0);
                }
                _ => {}
            }
        }
        entries.extend(self.extended_topology(spec::EXTENDED_TOPOLOGY, apic_id));
        if self.has_die_leaf() {
            entries.extend(self.extended_topology(spec::EXTENDED_TOPOLOGY_V2, apic_id));
        }
        entries.sort_by_key(|entry| (entry.function, entry.index));
        entries
    }

    /// Leaf 0x1F exists to tell dies apart; without them leaf 0xB says everything.
    fn has_die_leaf(&self) -> bool {
        self.vendor == Vendor::Intel && self.topology.dies() > 1
    }

    fn fix_features(&mut self) {
        let last_leaf = if self.has_die_leaf() {
            spec::EXTENDED_TOPOLOGY_V2
        } else {
            spec::EXTENDED_TOPOLOGY
        };
        let package = self.topology.threads_per_socket();
        let (vendor, socket_bits) = (self.vendor, self.topology.socket_bits());
        // Host topology that no longer applies, and features of what is not offered.
        self.base.retain(|entry| {
            !matches!(
                entry.function,
                spec::EXTENDED_TOPOLOGY
                    | spec::EXTENDED_TOPOLOGY_V2
                    | spec::AMD_EXTENDED_TOPOLOGY
                    | spec::SVM_FEATURES
            )
        });
        for entry in &mut self.base {
            match entry.function {
                spec::VENDOR => entry.eax = entry.eax.max(last_leaf),
                spec::FEATURES => {
                    // The field has 8 bits and counts ids, not threads (Intel SDM 2A table 3-8).
                    entry.ebx = entry.ebx & 0x0000_FFFF | (1_u32 << socket_bits).min(255) << 16;
                    entry.ecx |= spec::X2APIC | spec::TSC_DEADLINE | spec::HYPERVISOR;
                    // KVM reflects CR4.OSXSAVE here by itself.
                    entry.ecx &= !(spec::OSXSAVE | spec::VMX);
                    entry.edx = set(entry.edx, spec::HTT, package > 1);
                }
                spec::POWER => entry.eax |= spec::ARAT,
                spec::EXTENDED if vendor == Vendor::Amd => {
                    entry.eax = entry
                        .eax
                        .clamp(spec::AMD_TOPOLOGY, spec::AMD_EXTENDED_TOPOLOGY - 1);
                }
                spec::EXTENDED_FEATURES if vendor == Vendor::Amd => {
                    entry.ecx = set(entry.ecx, spec::CMP_LEGACY, package > 1) | spec::TOPOEXT;
                }
                spec::ADDRESS_SIZES if vendor == Vendor::Amd => {
                    entry.ecx = entry.ecx & 0xFFFF_0000 | socket_bits << 12 | (package - 1);
                }
                _ => {}
            }
        }
        for entry in self
            .base
            .iter_mut()
            .filter(|entry| entry.function == spec::EXTENDED_FEATURES)
        {
            entry.ecx &= !spec::SVM;
        }
        self.ensure(spec::POWER, |entry| entry.eax |= spec::ARAT);
        if self.vendor == Vendor::Amd {
            self.ensure(spec::AMD_TOPOLOGY, |_| {});
        }
    }

    /// Adds leaf `function` where it is missing.
    fn ensure(&mut self, function: u32, set: impl FnOnce(&mut kvm_cpuid_entry2)) {
        if !self.base.iter().any(|entry| entry.function == function) {
            let mut entry = kvm_cpuid_entry2 {
                function,
                ..Default::default()
            };
            set(&mut entry);
            self.base.push(entry);
        }
    }

    fn fix_hypervisor(&mut self, tsc_khz: Option<u32>) {
        let features = self
            .base
            .iter()
            .find(|entry| entry.function == spec::KVM_FEATURES)
            .copied()
            .unwrap_or(kvm_cpuid_entry2 {
                function: spec::KVM_FEATURES,
                ..Default::default()
            });
        self.base
            .retain(|entry| entry.function & 0xFFFF_0000 != spec::KVM_SIGNATURE);
        let [ebx, ecx, edx] = spec::KVM_SIGNATURE_TEXT;
        let last = if tsc_khz.is_some() {
            spec::HYPERVISOR_TIMING
        } else {
            spec::KVM_FEATURES
        };
        self.base.push(kvm_cpuid_entry2 {
            function: spec::KVM_SIGNATURE,
            eax: last,
            ebx,
            ecx,
            edx,
            ..Default::default()
        });
        self.base.push(features);
        if let Some(khz) = tsc_khz {
            self.base.push(kvm_cpuid_entry2 {
                function: spec::HYPERVISOR_TIMING,
                eax: khz,
                ebx: spec::KVM_APIC_BUS_KHZ,
                ..Default::default()
            });
        }
    }

    fn fix_caches(&mut self) {
        match self.vendor {
            Vendor::Intel => {
                for entry in self
                    .base
                    .iter_mut()
                    .filter(|entry| entry.function == spec::CACHES)
                {
                    caches::arrange_intel(entry, &self.topology);
                }
            }
            Vendor::Amd => {
                self.base.retain(|entry| entry.function != spec::AMD_CACHES);
                let find = |leaf| self.base.iter().find(|entry| entry.function == leaf);
                let described = caches::amd(
                    find(spec::AMD_L1).copied().unwrap_or_default(),
                    find(spec::AMD_L2_L3).copied().unwrap_or_default(),
                    &self.topology,
                );
                self.base.extend(described);
            }
            Vendor::Other => {}
        }
    }

    /// EBX and ECX of leaf 0x8000_001E (AMD APM 3 §E.4.18): core and node of vCPU `index`.
    fn amd_topology(&self, index: u32) -> (u32, u32) {
        let topology = &self.topology;
        let core = topology.apic_id(index) >> topology.thread_bits()
            & ((1 << (topology.socket_bits() - topology.thread_bits())) - 1);
        let die = index / topology.threads_per_die() % topology.dies();
        let ebx = core & 0xFF | (topology.threads() - 1) << 8;
        let ecx = die & 0xFF | (topology.dies() - 1).min(7) << 8;
        (ebx, ecx)
    }

    /// Leaf 0xB or 0x1F (Intel SDM 2A table 3-8): one subleaf a level, then an empty one.
    fn extended_topology(&self, function: u32, apic_id: u32) -> Vec<kvm_cpuid_entry2> {
        let topology = &self.topology;
        let package = (topology.socket_bits(), topology.threads_per_socket());
        let thread = (
            spec::LEVEL_THREAD,
            topology.thread_bits(),
            topology.threads(),
        );
        let levels = if function == spec::EXTENDED_TOPOLOGY_V2 {
            vec![
                thread,
                (
                    spec::LEVEL_CORE,
                    topology.die_bits(),
                    topology.threads_per_die(),
                ),
                (spec::LEVEL_DIE, package.0, package.1),
            ]
        } else {
            vec![thread, (spec::LEVEL_CORE, package.0, package.1)]
        };
        levels
            .into_iter()
            .chain(std::iter::once((spec::LEVEL_INVALID, 0, 0)))
            .enumerate()
            .map(|(index, (level, shift, count))| kvm_cpuid_entry2 {
                function,
                index: index as u32,
                flags: KVM_CPUID_FLAG_SIGNIFCANT_INDEX,
                eax: shift,
                ebx: count,
                ecx: level << 8 | index as u32,
                edx: apic_id,
                ..Default::default()
            })
            .collect()
    }
}

fn set(register: u32, bit: u32, on: bool) -> u32 {
    if on { register | bit } else { register & !bit }
}

fn vendor(leaf0: &kvm_cpuid_entry2) -> Vendor {
    let mut name = [0; 12];
    for (part, register) in name
        .chunks_exact_mut(4)
        .zip([leaf0.ebx, leaf0.edx, leaf0.ecx])
    {
        part.copy_from_slice(&register.to_le_bytes());
    }
    match &name {
        b"GenuineIntel" => Vendor::Intel,
        b"AuthenticAMD" | b"HygonGenuine" => Vendor::Amd,
        _ => Vendor::Other,
    }
}

/// Physical address bits, or fewer where guests reach less than the processor does (GuestPhysAddrSize).
fn address_bits(leaf: &kvm_cpuid_entry2) -> u8 {
    let [host, _, guest, _] = leaf.eax.to_le_bytes();
    if guest == 0 { host } else { host.min(guest) }
}
