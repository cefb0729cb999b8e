//! The state in which KVM creates a vCPU, kept so that a guest's reboot can return to it: KVM has no call that resets a vCPU.
//!
//! Unlike [`crate::kvm_state`], which moves a guest in flight to a vCPU that has not run, this goes back on a vCPU that has: CPUID and
//! clock rates stay, which the kernel would refuse to set again.

use kvm_bindings::{
    Msrs, kvm_debugregs, kvm_lapic_state, kvm_mp_state, kvm_msr_entry, kvm_regs, kvm_sregs,
    kvm_vcpu_events, kvm_xcrs,
};
use kvm_ioctls::{VcpuFd, VmFd};

use crate::kvm::{KvmError, step};
use crate::kvm_state::raw;

/// Everything about a vCPU that a reset has to undo.
pub struct PowerOnState {
    regs: kvm_regs,
    sregs: kvm_sregs,
    xsave: Vec<u8>,
    xcrs: Option<kvm_xcrs>,
    lapic: kvm_lapic_state,
    events: kvm_vcpu_events,
    debug: kvm_debugregs,
    mp_state: kvm_mp_state,
    msrs: Vec<kvm_msr_entry>,
}

impl PowerOnState {
    /// Reads the state of a vCPU that has its CPUID and has not run.
    ///
    /// # Errors
    /// The kernel refused.
    pub fn capture(vm: &VmFd, vcpu: &VcpuFd, msr_indices: &[u32]) -> Result<Self, KvmError> {
        Ok(Self {
            regs: vcpu.get_regs().map_err(step("read registers"))?,
            sregs: vcpu.get_sregs().map_err(step("read system registers"))?,
            xsave: raw::get_xsave(vm, vcpu).map_err(step("read the FPU"))?,
            // Processors without XSAVE have none.
            xcrs: vcpu.get_xcrs().ok(),
            lapic: vcpu.get_lapic().map_err(step("read the local APIC"))?,
            events: vcpu
                .get_vcpu_events()
                .map_err(step("read pending events"))?,
            debug: vcpu
                .get_debug_regs()
                .map_err(step("read debug registers"))?,
            mp_state: vcpu
                .get_mp_state()
                .map_err(step("read the processor's state"))?,
            msrs: read_msrs(vcpu, msr_indices),
        })
    }

    /// Returns the vCPU to this state.
    ///
    /// # Errors
    /// The kernel refused.
    pub fn restore(&self, vm: &VmFd, vcpu: &VcpuFd) -> Result<(), KvmError> {
        vcpu.set_mp_state(self.mp_state)
            .map_err(step("set the processor's state"))?;
        vcpu.set_sregs(&self.sregs)
            .map_err(step("set system registers"))?;
        vcpu.set_regs(&self.regs).map_err(step("set registers"))?;
        if let Some(xcrs) = &self.xcrs {
            vcpu.set_xcrs(xcrs)
                .map_err(step("set extended control registers"))?;
        }
        raw::set_xsave(vm, vcpu, &self.xsave).map_err(step("set the FPU"))?;
        vcpu.set_vcpu_events(&self.events)
            .map_err(step("set pending events"))?;
        vcpu.set_debug_regs(&self.debug)
            .map_err(step("set debug registers"))?;
        vcpu.set_lapic(&self.lapic)
            .map_err(step("set the local APIC"))?;
        write_msrs(vcpu, &self.msrs);
        Ok(())
    }
}

/// Reads `indices`, leaving out what this kernel lists but does not give.
fn read_msrs(vcpu: &VcpuFd, indices: &[u32]) -> Vec<kvm_msr_entry> {
    let mut wanted: Vec<kvm_msr_entry> = indices
        .iter()
        .map(|&index| kvm_msr_entry {
            index,
            ..Default::default()
        })
        .collect();
    let mut read = Vec::with_capacity(wanted.len());
    while !wanted.is_empty() {
        let Ok(mut msrs) = Msrs::from_entries(&wanted) else {
            break;
        };
        let Ok(count) = vcpu.get_msrs(&mut msrs) else {
            break;
        };
        read.extend_from_slice(&msrs.as_slice()[..count.min(wanted.len())]);
        // The kernel stops at the first one that it refuses.
        wanted.drain(..(count + 1).min(wanted.len()));
    }
    read
}

/// Writes `entries`, passing over those that can be read but not written.
fn write_msrs(vcpu: &VcpuFd, entries: &[kvm_msr_entry]) {
    let mut rest = entries;
    while !rest.is_empty() {
        let Ok(msrs) = Msrs::from_entries(rest) else {
            break;
        };
        let Ok(count) = vcpu.set_msrs(&msrs) else {
            break;
        };
        rest = &rest[(count + 1).min(rest.len())..];
    }
}
