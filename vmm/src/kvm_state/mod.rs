//! Everything that KVM keeps of a VM, as plain versioned data, and the order in which it is read and written.
//!
//! KVM's calls are not independent of each other: reading one piece of state can change another, and writing one can discard
//! another. The orders are therefore data ([`vcpu::SAVE_ORDER`], [`vcpu::RESTORE_ORDER`], [`vm::SAVE_ORDER`],
//! [`RESTORE_ORDER`]), each entry with its reason beside it, and the code walks them.
//!
//! | module | what |
//! |---|---|
//! | here | the whole VM: version, save, restore |
//! | [`vcpu`] | one vCPU |
//! | [`msrs`] | model-specific registers: which of them a host reads and writes |
//! | [`vm`] | interrupt chips, timer, clock |
//! | [`registers`], [`chips`] | KVM's structures as plain types |
//! | [`raw`] | calls that the kvm-ioctls crate does not have (the only unsafe code here) |
//!
//! Rules for the schema: a field is never reused for something else; a new field has a default that means "as before"; whatever
//! cannot be bridged so raises [`VERSION`]. Nested virtualisation has no state here, because guests are not offered it. What does not
//! fit is an error before anything of the VM changes, where it can be known before.
//!
//! A vCPU that is saved must have no half-done exit: after a port or memory exit the instruction is completed by the next `KVM_RUN`, so
//! run once more with `immediate_exit` set (it returns EINTR) before saving.
//!
//! Interface: `Documentation/virt/kvm/api.rst` and `devices/vcpu.rst` of the kernel.

pub mod chips;
pub mod msrs;
pub mod raw;
pub mod registers;
pub mod vcpu;
pub mod vm;

#[cfg(test)]
mod tests;

use std::io;

use kvm_ioctls::{VcpuFd, VmFd};
use serde::{Deserialize, Serialize};

use self::msrs::RefusedMsr;
use self::vcpu::VcpuState;
use self::vm::{TimeInGuest, VmState};

/// Version of the schema that this build writes.
pub const VERSION: u32 = 1;

/// Why state could not be saved or restored.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// The kernel refused to give or take a piece of state.
    #[error("KVM state: cannot {action} {what}: {source}")]
    Kvm {
        /// "read" or "set".
        action: &'static str,
        /// Which piece.
        what: &'static str,
        /// The kernel's answer.
        source: io::Error,
    },
    /// Saved by another version.
    #[error("KVM state: version {found}, but this build reads version {VERSION}")]
    Version {
        /// The version found.
        found: u32,
    },
    /// Saved data that cannot be what was saved.
    #[error("KVM state: {what}: {why}")]
    Invalid {
        /// Which piece.
        what: &'static str,
        /// What is wrong with it.
        why: String,
    },
    /// This host cannot take some model-specific registers.
    #[error("KVM state: this host refuses {}", refused_list(.0))]
    Msrs(Vec<RefusedMsr>),
}

fn refused_list(refused: &[RefusedMsr]) -> String {
    let list: Vec<String> = refused.iter().map(ToString::to_string).collect();
    list.join(", ")
}

/// Makes a [`StateError::Kvm`] of the kernel's answer to reading `what`.
fn reading(what: &'static str) -> impl FnOnce(kvm_ioctls::Error) -> StateError {
    move |error| StateError::Kvm {
        action: "read",
        what,
        source: error.into(),
    }
}

/// Makes a [`StateError::Kvm`] of the kernel's answer to setting `what`.
fn setting(what: &'static str) -> impl FnOnce(kvm_ioctls::Error) -> StateError {
    move |error| StateError::Kvm {
        action: "set",
        what,
        source: error.into(),
    }
}

/// What is restored in which order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Piece {
    /// kvm-clock of the VM.
    Clock,
    /// All vCPUs, in any order or at the same time.
    Vcpus,
    /// PIT, PICs and I/O APIC.
    Chips,
}

/// Order of restoring a VM whose vCPUs exist and have not run.
pub const RESTORE_ORDER: [Piece; 3] = [
    // First, because each vCPU's TSC offset is computed from the clock that was really set.
    Piece::Clock,
    Piece::Vcpus,
    // Last, because setting the I/O APIC delivers what it has pending to the local APICs, which must be the restored ones.
    Piece::Chips,
];

/// KVM's part of a VM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KvmState {
    /// [`VERSION`] of the build that wrote it.
    pub version: u32,
    /// What all vCPUs share.
    pub vm: VmState,
    /// The vCPUs, by index.
    pub vcpus: Vec<VcpuState>,
}

impl KvmState {
    /// Reads the state of a VM whose vCPUs are all stopped. `msr_indices` are the kernel's (`KVM_GET_MSR_INDEX_LIST`).
    ///
    /// # Errors
    /// The kernel refused.
    pub fn save(vm: &VmFd, vcpus: &[VcpuFd], msr_indices: &[u32]) -> Result<Self, StateError> {
        let vcpus = vcpus
            .iter()
            .map(|vcpu| VcpuState::save(vm, vcpu, msr_indices))
            .collect::<Result<_, _>>()?;
        // The clock is read last: it stands for the moment from which the guest's time does not advance.
        Ok(Self {
            version: VERSION,
            vm: VmState::save(vm)?,
            vcpus,
        })
    }

    /// Checks what can be checked without a VM.
    ///
    /// # Errors
    /// Another version, or sizes that are not KVM's.
    pub fn validate(&self) -> Result<(), StateError> {
        if self.version != VERSION {
            return Err(StateError::Version {
                found: self.version,
            });
        }
        self.vcpus.iter().try_for_each(VcpuState::validate)
    }

    /// Writes the state into a new VM with as many vCPUs, created with the same ids, its interrupt chips created.
    ///
    /// # Errors
    /// The state is not valid, is for another number of vCPUs, or the kernel refused.
    pub fn restore(
        &self,
        vm: &VmFd,
        vcpus: &[VcpuFd],
        time: TimeInGuest,
    ) -> Result<(), StateError> {
        self.validate()?;
        if vcpus.len() != self.vcpus.len() {
            return Err(StateError::Invalid {
                what: "vCPUs",
                why: format!("{} saved, the VM has {}", self.vcpus.len(), vcpus.len()),
            });
        }
        let mut reference = None;
        for piece in RESTORE_ORDER {
            match piece {
                Piece::Clock => reference = self.vm.restore_clock(vm, time)?,
                Piece::Vcpus => {
                    for (state, vcpu) in self.vcpus.iter().zip(vcpus) {
                        state.restore(vm, vcpu, reference.as_ref())?;
                    }
                }
                Piece::Chips => self.vm.restore_chips(vm)?,
            }
        }
        Ok(())
    }
}
