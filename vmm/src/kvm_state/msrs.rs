//! Model-specific registers. The kernel lists what may be part of a vCPU's state; what of it a particular vCPU has depends on its CPUID
//! and on the host, so reading and writing go through the list and note what is refused.

use std::fmt;

use kvm_bindings::{Msrs, kvm_msr_entry};
use kvm_ioctls::VcpuFd;
use serde::{Deserialize, Serialize};

use super::{StateError, reading, setting};

/// IA32_TIME_STAMP_COUNTER: restored through the vCPU's TSC offset where the kernel has that.
pub const IA32_TSC: u32 = 0x10;
/// IA32_TSC_DEADLINE: arms the timer of the local APIC, which must be in deadline mode by then.
pub const IA32_TSC_DEADLINE: u32 = 0x6E0;

/// A register and its value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Msr {
    /// Its number.
    pub index: u32,
    /// Its value.
    pub data: u64,
}

/// A register that a host does not take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RefusedMsr {
    /// Its number.
    pub index: u32,
    /// What was to be written.
    pub wanted: u64,
    /// What it reads as; none where it cannot be read either.
    pub present: Option<u64>,
}

impl fmt::Display for RefusedMsr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MSR {:#x} = {:#x}", self.index, self.wanted)?;
        match self.present {
            Some(present) => write!(f, " (it is {present:#x})"),
            None => write!(f, " (it does not exist)"),
        }
    }
}

fn batch(entries: &[kvm_msr_entry]) -> Result<Msrs, StateError> {
    Msrs::from_entries(entries).map_err(|error| StateError::Invalid {
        what: "MSRs",
        why: format!("{} entries: {error:?}", entries.len()),
    })
}

/// Reads `indices`, leaving out what this vCPU does not have.
///
/// # Errors
/// The kernel refused the call altogether.
pub fn read(vcpu: &VcpuFd, indices: &[u32]) -> Result<Vec<Msr>, StateError> {
    let entries: Vec<kvm_msr_entry> = indices
        .iter()
        .map(|&index| kvm_msr_entry {
            index,
            ..Default::default()
        })
        .collect();
    let mut read = Vec::with_capacity(entries.len());
    let mut rest = &entries[..];
    while !rest.is_empty() {
        let mut msrs = batch(rest)?;
        let count = vcpu
            .get_msrs(&mut msrs)
            .map_err(reading("MSRs"))?
            .min(rest.len());
        let done = msrs.as_slice().iter().take(count);
        read.extend(done.map(|entry| Msr {
            index: entry.index,
            data: entry.data,
        }));
        // The kernel stops at the first register that the vCPU does not have.
        rest = rest.get(count + 1..).unwrap_or_default();
    }
    Ok(read)
}

/// Writes `msrs` in order. What is refused but already has its value is fine: feature registers are often read-only.
///
/// # Errors
/// Some registers keep another value; all of them are named. The others have been written.
pub fn write(vcpu: &VcpuFd, msrs: &[Msr]) -> Result<(), StateError> {
    let entries: Vec<kvm_msr_entry> = msrs
        .iter()
        .map(|msr| kvm_msr_entry {
            index: msr.index,
            data: msr.data,
            ..Default::default()
        })
        .collect();
    let mut refused = Vec::new();
    let mut rest = &entries[..];
    while !rest.is_empty() {
        let count = vcpu
            .set_msrs(&batch(rest)?)
            .map_err(setting("MSRs"))?
            .min(rest.len());
        if let Some(entry) = rest.get(count) {
            let present = read(vcpu, &[entry.index])?.first().map(|msr| msr.data);
            if present != Some(entry.data) {
                refused.push(RefusedMsr {
                    index: entry.index,
                    wanted: entry.data,
                    present,
                });
            }
        }
        rest = rest.get(count + 1..).unwrap_or_default();
    }
    if refused.is_empty() {
        Ok(())
    } else {
        Err(StateError::Msrs(refused))
    }
}

/// Which of `indices` this host reads but does not take back: they cannot be restored should their value differ. Probed on a vCPU that
/// has its CPUID and has not run; the time registers are left out, because writing them has effects.
///
/// # Errors
/// The kernel refused a call altogether.
pub fn probe_refused(vcpu: &VcpuFd, indices: &[u32]) -> Result<Vec<u32>, StateError> {
    let mut refused = Vec::new();
    for msr in read(vcpu, indices)? {
        if matches!(msr.index, IA32_TSC | IA32_TSC_DEADLINE) {
            continue;
        }
        let entry = kvm_msr_entry {
            index: msr.index,
            data: msr.data,
            ..Default::default()
        };
        if vcpu.set_msrs(&batch(&[entry])?).map_err(setting("MSRs"))? == 0 {
            refused.push(msr.index);
        }
    }
    Ok(refused)
}
