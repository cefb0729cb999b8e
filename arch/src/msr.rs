//! Model-specific registers of a vCPU before its first instruction: what firmware would have left behind.

use kvm_bindings::kvm_msr_entry;

/// Register numbers and values (Intel SDM 4 table 2-2, AMD APM 2 appendix A).
pub mod spec {
    /// IA32_PAT.
    pub const IA32_PAT: u32 = 0x277;
    /// Reset value of IA32_PAT: WB, WT, UC-, UC, twice (Intel SDM 3A §12.12.4).
    pub const PAT_RESET: u64 = 0x0007_0406_0007_0406;
    /// IA32_MTRR_DEF_TYPE.
    pub const IA32_MTRR_DEF_TYPE: u32 = 0x2FF;
    /// MTRRs enabled.
    pub const MTRR_ENABLE: u64 = 1 << 11;
    /// Memory type write-back.
    pub const MTRR_WRITE_BACK: u64 = 6;
    /// IA32_MISC_ENABLE (Intel; KVM accepts it for every vendor).
    pub const IA32_MISC_ENABLE: u32 = 0x1A0;
    /// Fast string operations.
    pub const FAST_STRING: u64 = 1;
}

/// The registers that every vCPU starts with, whatever boots.
///
/// Without firmware to program MTRRs, write-back as the default type is what makes RAM cacheable; device memory is uncached
/// through the guest's page attributes. The rest of the machine's reset state is KVM's own.
#[must_use]
pub fn boot_msrs() -> Vec<kvm_msr_entry> {
    let entry = |index, data| kvm_msr_entry {
        index,
        data,
        ..Default::default()
    };
    vec![
        entry(spec::IA32_PAT, spec::PAT_RESET),
        entry(
            spec::IA32_MTRR_DEF_TYPE,
            spec::MTRR_ENABLE | spec::MTRR_WRITE_BACK,
        ),
        entry(spec::IA32_MISC_ENABLE, spec::FAST_STRING),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_write_back_before_anyone_programs_mtrrs() {
        let msrs = boot_msrs();
        let default = msrs.iter().find(|msr| msr.index == 0x2FF).unwrap();
        assert_eq!(default.data, 0x806);
    }
}
