//! What all vCPUs of a VM share: interrupt chips, timer and clock.

use kvm_bindings::{KVM_CLOCK_HOST_TSC, KVM_CLOCK_REALTIME, KVM_CLOCK_TSC_STABLE, kvm_clock_data};
use kvm_ioctls::{Cap, VmFd};
use serde::{Deserialize, Serialize};

use super::chips::{IoApic, Pic, PicId, Pit};
use super::{StateError, reading, setting};

/// A part of [`VmState`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// The PIT.
    Pit,
    /// The first 8259.
    MasterPic,
    /// The second 8259.
    SlavePic,
    /// The I/O APIC.
    IoApic,
    /// kvm-clock.
    Clock,
}

/// Order of reading, after the vCPUs.
pub const SAVE_ORDER: [Part; 5] = [
    // The timer raises interrupts, so it is read before the chips that would hold them.
    Part::Pit,
    Part::MasterPic,
    Part::SlavePic,
    Part::IoApic,
    // The moment that the guest's time goes on from.
    Part::Clock,
];

/// Order of writing the chips, after the vCPUs; the clock has its own place in [`super::RESTORE_ORDER`].
pub const CHIPS_RESTORE_ORDER: [Part; 4] = [
    // PICs before the I/O APIC: an interrupt pending in both goes out by the one that is unmasked.
    Part::MasterPic,
    Part::SlavePic,
    Part::IoApic,
    // Starts counting, and so raising interrupts, when it is set.
    Part::Pit,
];

/// What happens to the guest's clocks between save and restore.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TimeInGuest {
    /// They go on from where they stood, as after a pause.
    Stopped,
    /// They advance by the time that really passed, where the kernel (5.16 and later) can tell.
    Elapses,
}

/// kvm-clock (`kvm_clock_data`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Clock {
    /// Nanoseconds since the VM was created, as the guest sees them.
    pub clock: u64,
    /// The guest's TSCs were all in step (`KVM_CLOCK_TSC_STABLE`).
    pub tsc_stable: bool,
    /// Host CLOCK_REALTIME at that moment, in nanoseconds, if known.
    pub realtime: Option<u64>,
    /// Host TSC at that moment, if known.
    pub host_tsc: Option<u64>,
}

impl From<kvm_clock_data> for Clock {
    fn from(kvm: kvm_clock_data) -> Self {
        let has = |flag| kvm.flags & flag != 0;
        Self {
            clock: kvm.clock,
            tsc_stable: has(KVM_CLOCK_TSC_STABLE),
            realtime: has(KVM_CLOCK_REALTIME).then_some(kvm.realtime),
            host_tsc: has(KVM_CLOCK_HOST_TSC).then_some(kvm.host_tsc),
        }
    }
}

/// The same moment as the saved and as the new host see it: what a vCPU's TSC offset is corrected by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClockReference {
    /// Guest clock at saving, in nanoseconds.
    pub guest_before: u64,
    /// Host TSC at saving.
    pub host_tsc_before: u64,
    /// Guest clock after restoring, in nanoseconds.
    pub guest_now: u64,
    /// Host TSC at that reading.
    pub host_tsc_now: u64,
}

impl ClockReference {
    /// The offset with which the guest's TSC has advanced as its clock did (`devices/vcpu.rst`, KVM_VCPU_TSC_OFFSET).
    ///
    /// `offset` is the saved one, `tsc_khz` the guest's frequency.
    #[must_use]
    pub fn tsc_offset(&self, offset: u64, tsc_khz: u32) -> u64 {
        let elapsed_ns = i128::from(self.guest_now) - i128::from(self.guest_before);
        let guest_ticks = elapsed_ns * i128::from(tsc_khz) / 1_000_000;
        let host_ticks = i128::from(self.host_tsc_now) - i128::from(self.host_tsc_before);
        // Offsets are two's complement: only the low 64 bits count.
        let corrected = i128::from(offset) + guest_ticks - host_ticks;
        corrected as u64
    }
}

/// What all vCPUs share.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VmState {
    /// The first 8259.
    pub master_pic: Pic,
    /// The second 8259.
    pub slave_pic: Pic,
    /// The I/O APIC.
    pub io_apic: IoApic,
    /// The PIT.
    pub pit: Pit,
    /// kvm-clock.
    pub clock: Clock,
}

fn read_clock(vm: &VmFd) -> Result<Clock, StateError> {
    vm.get_clock().map(Into::into).map_err(reading("the clock"))
}

impl VmState {
    /// Reads the state of a VM whose vCPUs are stopped and already read.
    ///
    /// # Errors
    /// The kernel refused.
    pub fn save(vm: &VmFd) -> Result<Self, StateError> {
        let (mut master_pic, mut slave_pic, mut io_apic, mut pit, mut clock) =
            (None, None, None, None, None);
        for part in SAVE_ORDER {
            match part {
                Part::Pit => pit = Some(Pit::save(vm)?),
                Part::MasterPic => master_pic = Some(Pic::save(vm, PicId::Master)?),
                Part::SlavePic => slave_pic = Some(Pic::save(vm, PicId::Slave)?),
                Part::IoApic => io_apic = Some(IoApic::save(vm)?),
                Part::Clock => clock = Some(read_clock(vm)?),
            }
        }
        let all = (|| {
            Some(Self {
                master_pic: master_pic?,
                slave_pic: slave_pic?,
                io_apic: io_apic?,
                pit: pit?,
                clock: clock?,
            })
        })();
        all.ok_or_else(|| StateError::Invalid {
            what: "VM",
            why: "a part is not in the save order".into(),
        })
    }

    /// Sets the clock, and returns what vCPUs need to correct their TSC; none where either kernel cannot tell.
    ///
    /// # Errors
    /// The kernel refused.
    pub fn restore_clock(
        &self,
        vm: &VmFd,
        time: TimeInGuest,
    ) -> Result<Option<ClockReference>, StateError> {
        let mut kvm = kvm_clock_data {
            clock: self.clock.clock,
            ..Default::default()
        };
        let can_elapse = vm.check_extension_int(Cap::AdjustClock) as u32 & KVM_CLOCK_REALTIME != 0;
        if let (TimeInGuest::Elapses, Some(realtime), true) =
            (time, self.clock.realtime, can_elapse)
        {
            kvm.flags = KVM_CLOCK_REALTIME;
            kvm.realtime = realtime;
        }
        vm.set_clock(&kvm).map_err(setting("the clock"))?;
        let now = read_clock(vm)?;
        Ok(self
            .clock
            .host_tsc
            .zip(now.host_tsc)
            .map(|(host_tsc_before, host_tsc_now)| ClockReference {
                guest_before: self.clock.clock,
                host_tsc_before,
                guest_now: now.clock,
                host_tsc_now,
            }))
    }

    /// Sets the interrupt chips and the timer, after the vCPUs.
    ///
    /// # Errors
    /// The kernel refused.
    pub fn restore_chips(&self, vm: &VmFd) -> Result<(), StateError> {
        for part in CHIPS_RESTORE_ORDER {
            match part {
                Part::MasterPic => self.master_pic.restore(vm, PicId::Master)?,
                Part::SlavePic => self.slave_pic.restore(vm, PicId::Slave)?,
                Part::IoApic => self.io_apic.restore(vm)?,
                Part::Pit => self.pit.restore(vm)?,
                Part::Clock => {}
            }
        }
        Ok(())
    }
}
