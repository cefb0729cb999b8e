//! One vCPU.

use kvm_bindings::{CpuId, KVM_MAX_CPUID_ENTRIES, kvm_cpuid_entry2, kvm_lapic_state, kvm_mp_state};
use kvm_ioctls::{Cap, VcpuFd, VmFd};
use serde::{Deserialize, Serialize};

use super::msrs::{self, IA32_TSC, IA32_TSC_DEADLINE, Msr};
use super::registers::{
    CpuidLeaf, DebugRegisters, ExtendedControl, GeneralRegisters, Special, VcpuEvents, from_xcrs,
    to_xcrs,
};
use super::vm::ClockReference;
use super::{StateError, raw, reading, setting};

/// Bytes of `kvm_lapic_state`: the register page as far as it is used.
pub const LAPIC_SIZE: usize = 1024;
/// Bytes of the legacy XSAVE area and its header, of which the largest known state is not more than a few pages.
const XSAVE_SIZES: std::ops::RangeInclusive<usize> = 4096..=64 << 10;

/// A part of [`VcpuState`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// CPUID leaves.
    Cpuid,
    /// Running, halted, waiting for INIT or SIPI.
    MpState,
    /// TSC frequency.
    TscFrequency,
    /// TSC, as an offset to the host's.
    TscOffset,
    /// General registers.
    Registers,
    /// Segments and control registers.
    Special,
    /// XCR0.
    ExtendedControl,
    /// FPU, SSE, AVX and so on.
    Xsave,
    /// Debug registers.
    Debug,
    /// All model-specific registers but those of time.
    Msrs,
    /// The local APIC.
    Lapic,
    /// The local APIC's deadline.
    TscDeadline,
    /// Pending exceptions, interrupts and NMIs.
    Events,
}

/// Order of reading.
pub const SAVE_ORDER: [Part; 13] = [
    Part::Cpuid,
    // Reading it processes a pending INIT or SIPI, which changes registers: before all of them.
    Part::MpState,
    Part::Registers,
    Part::Special,
    Part::ExtendedControl,
    Part::Xsave,
    Part::Debug,
    Part::Msrs,
    Part::TscFrequency,
    Part::TscOffset,
    // Before the local APIC: should the timer fire in between, its interrupt is pending there and the deadline, kept too, causes at
    // worst a second one. The other way round it would be lost.
    Part::TscDeadline,
    Part::Lapic,
    Part::Events,
];

/// Order of writing, to a vCPU that has not run.
pub const RESTORE_ORDER: [Part; 13] = [
    // Decides which registers and bits exist at all.
    Part::Cpuid,
    // Rescales the clock; the offset is counted in its ticks.
    Part::TscFrequency,
    Part::TscOffset,
    // Sets the mode (xAPIC or x2APIC) in which the local APIC's registers are read.
    Part::Special,
    Part::Registers,
    // Enables components before their content arrives.
    Part::ExtendedControl,
    Part::Xsave,
    Part::Debug,
    Part::Lapic,
    // After the local APIC, whose presence some paravirtual registers (PV EOI) depend on.
    Part::Msrs,
    // Arms the timer, which takes the local APIC's timer to be in deadline mode and the TSC to be right.
    Part::TscDeadline,
    // After the general registers: setting those drops pending exceptions.
    Part::Events,
    // Last: from here on the vCPU is what it was.
    Part::MpState,
];

/// One vCPU.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VcpuState {
    /// CPUID as the guest sees it; on another host this is what compatibility is checked against.
    pub cpuid: Vec<CpuidLeaf>,
    /// `KVM_MP_STATE_…`
    pub mp_state: u32,
    /// General registers.
    pub registers: GeneralRegisters,
    /// Segments and control registers.
    pub special: Special,
    /// Extended control registers; empty where the processor has none.
    pub extended_control: Vec<ExtendedControl>,
    /// XSAVE area in standard format.
    pub xsave: Vec<u8>,
    /// Debug registers.
    pub debug: DebugRegisters,
    /// Model-specific registers in the kernel's order, without the two of time below.
    pub msrs: Vec<Msr>,
    /// TSC frequency in kHz; none where the kernel does not tell.
    pub tsc_khz: Option<u32>,
    /// TSC minus the host's, where the kernel tells.
    pub tsc_offset: Option<u64>,
    /// TSC at the time of saving (IA32_TIME_STAMP_COUNTER).
    pub tsc: Option<u64>,
    /// IA32_TSC_DEADLINE; 0 is disarmed.
    pub tsc_deadline: Option<u64>,
    /// Register page of the local APIC, [`LAPIC_SIZE`] bytes.
    pub lapic: Vec<u8>,
    /// Pending events.
    pub events: VcpuEvents,
}

impl VcpuState {
    /// Reads a stopped vCPU. `msr_indices` are the kernel's (`KVM_GET_MSR_INDEX_LIST`).
    ///
    /// # Errors
    /// The kernel refused.
    pub fn save(vm: &VmFd, vcpu: &VcpuFd, msr_indices: &[u32]) -> Result<Self, StateError> {
        let mut state = Self::empty();
        for part in SAVE_ORDER {
            state.read(part, vm, vcpu, msr_indices)?;
        }
        Ok(state)
    }

    fn empty() -> Self {
        Self {
            cpuid: Vec::new(),
            mp_state: 0,
            registers: GeneralRegisters::default(),
            special: Special::Sregs(Default::default()),
            extended_control: Vec::new(),
            xsave: Vec::new(),
            debug: DebugRegisters::default(),
            msrs: Vec::new(),
            tsc_khz: None,
            tsc_offset: None,
            tsc: None,
            tsc_deadline: None,
            lapic: Vec::new(),
            events: VcpuEvents::default(),
        }
    }

    fn read(
        &mut self,
        part: Part,
        vm: &VmFd,
        vcpu: &VcpuFd,
        msr_indices: &[u32],
    ) -> Result<(), StateError> {
        match part {
            Part::Cpuid => {
                let leaves = vcpu
                    .get_cpuid2(KVM_MAX_CPUID_ENTRIES)
                    .map_err(reading("CPUID"))?;
                self.cpuid = leaves
                    .as_slice()
                    .iter()
                    .map(|leaf| (*leaf).into())
                    .collect();
            }
            Part::MpState => {
                self.mp_state = vcpu.get_mp_state().map_err(reading("MP state"))?.mp_state;
            }
            Part::TscFrequency => self.tsc_khz = vcpu.get_tsc_khz().ok().filter(|khz| *khz > 0),
            Part::TscOffset => {
                self.tsc_offset = raw::get_tsc_offset(vcpu).map_err(reading("the TSC offset"))?;
                self.tsc = read_one(vcpu, IA32_TSC)?;
            }
            Part::Registers => {
                self.registers = vcpu.get_regs().map_err(reading("registers"))?.into();
            }
            Part::Special => {
                self.special = if raw::has_sregs2(vm) {
                    let sregs = raw::get_sregs2(vcpu).map_err(reading("special registers"))?;
                    Special::Sregs2(sregs.into())
                } else {
                    let sregs = vcpu.get_sregs().map_err(reading("special registers"))?;
                    Special::Sregs(sregs.into())
                };
            }
            Part::ExtendedControl => {
                if vm.check_extension(Cap::Xcrs) {
                    let xcrs = vcpu
                        .get_xcrs()
                        .map_err(reading("extended control registers"))?;
                    self.extended_control = from_xcrs(&xcrs);
                }
            }
            Part::Xsave => {
                self.xsave = raw::get_xsave(vm, vcpu).map_err(reading("XSAVE state"))?;
            }
            Part::Debug => {
                self.debug = vcpu
                    .get_debug_regs()
                    .map_err(reading("debug registers"))?
                    .into();
            }
            Part::Msrs => {
                let indices: Vec<u32> = msr_indices
                    .iter()
                    .copied()
                    .filter(|index| !matches!(*index, IA32_TSC | IA32_TSC_DEADLINE))
                    .collect();
                self.msrs = msrs::read(vcpu, &indices)?;
            }
            Part::Lapic => {
                let lapic = vcpu.get_lapic().map_err(reading("the local APIC"))?;
                self.lapic = lapic.regs.iter().map(|byte| byte.cast_unsigned()).collect();
            }
            Part::TscDeadline => self.tsc_deadline = read_one(vcpu, IA32_TSC_DEADLINE)?,
            Part::Events => {
                self.events = vcpu
                    .get_vcpu_events()
                    .map_err(reading("pending events"))?
                    .into();
            }
        }
        Ok(())
    }

    /// Checks what can be checked without a vCPU.
    ///
    /// # Errors
    /// A piece has a size that KVM never gives.
    pub fn validate(&self) -> Result<(), StateError> {
        let wrong = |what, length: usize| {
            Err(StateError::Invalid {
                what,
                why: format!("has {length} bytes or entries"),
            })
        };
        if self.lapic.len() != LAPIC_SIZE {
            return wrong("local APIC", self.lapic.len());
        }
        if !XSAVE_SIZES.contains(&self.xsave.len()) || !self.xsave.len().is_multiple_of(4) {
            return wrong("XSAVE state", self.xsave.len());
        }
        if self.cpuid.is_empty() || self.cpuid.len() > KVM_MAX_CPUID_ENTRIES {
            return wrong("CPUID", self.cpuid.len());
        }
        if to_xcrs(&self.extended_control).is_none() {
            return wrong("extended control registers", self.extended_control.len());
        }
        Ok(())
    }

    /// Writes the state to a vCPU that has the same id and has not run. `reference` is [`super::vm::VmState::restore_clock`]'s.
    ///
    /// # Errors
    /// The state is not valid, is more than this host has, or the kernel refused.
    pub fn restore(
        &self,
        vm: &VmFd,
        vcpu: &VcpuFd,
        reference: Option<&ClockReference>,
    ) -> Result<(), StateError> {
        self.validate()?;
        let room = raw::xsave_size(vm);
        if self.xsave.len() > room {
            return Err(StateError::Invalid {
                what: "XSAVE state",
                why: format!("has {} bytes, this host takes {room}", self.xsave.len()),
            });
        }
        RESTORE_ORDER
            .into_iter()
            .try_for_each(|part| self.write(part, vm, vcpu, reference))
    }

    fn write(
        &self,
        part: Part,
        vm: &VmFd,
        vcpu: &VcpuFd,
        reference: Option<&ClockReference>,
    ) -> Result<(), StateError> {
        match part {
            Part::Cpuid => {
                let leaves: Vec<kvm_cpuid_entry2> =
                    self.cpuid.iter().map(|leaf| (*leaf).into()).collect();
                let leaves = CpuId::from_entries(&leaves).map_err(|error| StateError::Invalid {
                    what: "CPUID",
                    why: format!("{error:?}"),
                })?;
                vcpu.set_cpuid2(&leaves).map_err(setting("CPUID"))
            }
            Part::TscFrequency => match self.tsc_khz {
                // Without scaling hardware the kernel takes no other frequency than the host's: do not ask for what is there.
                Some(khz) if vcpu.get_tsc_khz().ok() != Some(khz) => {
                    vcpu.set_tsc_khz(khz).map_err(setting("the TSC frequency"))
                }
                _ => Ok(()),
            },
            Part::TscOffset => self.write_tsc(vcpu, reference),
            Part::Special => match self.special {
                Special::Sregs2(sregs) if raw::has_sregs2(vm) => {
                    raw::set_sregs2(vcpu, &sregs.into()).map_err(setting("special registers"))
                }
                special => {
                    let sregs = special.to_sregs().into();
                    vcpu.set_sregs(&sregs).map_err(setting("special registers"))
                }
            },
            Part::Registers => vcpu
                .set_regs(&self.registers.into())
                .map_err(setting("registers")),
            Part::ExtendedControl => match to_xcrs(&self.extended_control) {
                Some(xcrs) if xcrs.nr_xcrs > 0 => vcpu
                    .set_xcrs(&xcrs)
                    .map_err(setting("extended control registers")),
                _ => Ok(()),
            },
            Part::Xsave => raw::set_xsave(vm, vcpu, &self.xsave).map_err(setting("XSAVE state")),
            Part::Debug => vcpu
                .set_debug_regs(&self.debug.into())
                .map_err(setting("debug registers")),
            Part::Lapic => {
                let mut lapic = kvm_lapic_state::default();
                for (register, byte) in lapic.regs.iter_mut().zip(&self.lapic) {
                    *register = byte.cast_signed();
                }
                vcpu.set_lapic(&lapic).map_err(setting("the local APIC"))
            }
            Part::Msrs => msrs::write(vcpu, &self.msrs),
            Part::TscDeadline => match self.tsc_deadline {
                Some(data) => msrs::write(
                    vcpu,
                    &[Msr {
                        index: IA32_TSC_DEADLINE,
                        data,
                    }],
                ),
                None => Ok(()),
            },
            Part::Events => vcpu
                .set_vcpu_events(&self.events.into())
                .map_err(setting("pending events")),
            Part::MpState => vcpu
                .set_mp_state(kvm_mp_state {
                    mp_state: self.mp_state,
                })
                .map_err(setting("MP state")),
        }
    }

    /// Sets the TSC exactly where both kernels have offsets, else to its saved value, from which it goes on.
    fn write_tsc(
        &self,
        vcpu: &VcpuFd,
        reference: Option<&ClockReference>,
    ) -> Result<(), StateError> {
        if let (Some(reference), Some(offset), Some(khz)) =
            (reference, self.tsc_offset, self.tsc_khz)
            && raw::get_tsc_offset(vcpu)
                .map_err(reading("the TSC offset"))?
                .is_some()
        {
            let corrected = reference.tsc_offset(offset, khz);
            return raw::set_tsc_offset(vcpu, corrected).map_err(setting("the TSC offset"));
        }
        match self.tsc {
            Some(data) => msrs::write(
                vcpu,
                &[Msr {
                    index: IA32_TSC,
                    data,
                }],
            ),
            None => Ok(()),
        }
    }
}

/// Tells a guest with kvm-clock that it was paused, so that its watchdogs do not take the gap for a hang. For every vCPU, before it runs
/// again after a pause or a restore.
///
/// # Errors
/// The kernel refused. A guest that does not use kvm-clock is no error.
pub fn mark_paused(vcpu: &VcpuFd) -> Result<(), StateError> {
    match vcpu.kvmclock_ctrl() {
        Err(error) if error.errno() != libc::EINVAL => {
            Err(setting("the clock's pause mark")(error))
        }
        _ => Ok(()),
    }
}

fn read_one(vcpu: &VcpuFd, index: u32) -> Result<Option<u64>, StateError> {
    Ok(msrs::read(vcpu, &[index])?.first().map(|msr| msr.data))
}
