//! KVM's interrupt chips and timer as plain types.

use kvm_bindings::{
    KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, kvm_irqchip,
    kvm_pit_channel_state, kvm_pit_state2,
};
use kvm_ioctls::VmFd;
use serde::{Deserialize, Serialize};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

use super::{StateError, reading, setting};

/// Offset of the chip's state in `kvm_irqchip`, behind its id and padding.
const CHIP_OFFSET: usize = 8;

/// An 8259 (`kvm_pic_state`).
#[derive(
    Clone,
    Copy,
    Debug,
    PartialEq,
    Eq,
    Serialize,
    Deserialize,
    FromBytes,
    IntoBytes,
    Immutable,
    KnownLayout,
)]
#[serde(deny_unknown_fields)]
#[repr(C)]
#[allow(
    missing_docs,
    reason = "fields are KVM's, see the structure's own documentation"
)]
pub struct Pic {
    pub last_irr: u8,
    pub irr: u8,
    pub imr: u8,
    pub isr: u8,
    pub priority_add: u8,
    pub irq_base: u8,
    pub read_reg_select: u8,
    pub poll: u8,
    pub special_mask: u8,
    pub init_state: u8,
    pub auto_eoi: u8,
    pub rotate_on_auto_eoi: u8,
    pub special_fully_nested_mode: u8,
    pub init4: u8,
    pub elcr: u8,
    pub elcr_mask: u8,
}

/// The I/O APIC (`kvm_ioapic_state`).
#[derive(
    Clone,
    Copy,
    Debug,
    PartialEq,
    Eq,
    Serialize,
    Deserialize,
    FromBytes,
    IntoBytes,
    Immutable,
    KnownLayout,
)]
#[serde(deny_unknown_fields)]
#[repr(C)]
#[allow(
    missing_docs,
    reason = "fields are KVM's, see the structure's own documentation"
)]
pub struct IoApic {
    pub base_address: u64,
    pub ioregsel: u32,
    pub id: u32,
    pub irr: u32,
    #[serde(skip)]
    padding: u32,
    /// Redirection table entries (82093AA data sheet §3.2.4).
    pub redirtbl: [u64; 24],
}

/// One counter of the PIT (`kvm_pit_channel_state`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(
    missing_docs,
    reason = "fields are KVM's, see the structure's own documentation"
)]
pub struct PitChannel {
    pub count: u32,
    pub latched_count: u16,
    pub count_latched: u8,
    pub status_latched: u8,
    pub status: u8,
    pub read_state: u8,
    pub write_state: u8,
    pub write_latch: u8,
    pub rw_mode: u8,
    pub mode: u8,
    pub bcd: u8,
    pub gate: u8,
    pub count_load_time: i64,
}

impl From<kvm_pit_channel_state> for PitChannel {
    fn from(kvm: kvm_pit_channel_state) -> Self {
        Self {
            count: kvm.count,
            latched_count: kvm.latched_count,
            count_latched: kvm.count_latched,
            status_latched: kvm.status_latched,
            status: kvm.status,
            read_state: kvm.read_state,
            write_state: kvm.write_state,
            write_latch: kvm.write_latch,
            rw_mode: kvm.rw_mode,
            mode: kvm.mode,
            bcd: kvm.bcd,
            gate: kvm.gate,
            count_load_time: kvm.count_load_time,
        }
    }
}

impl From<PitChannel> for kvm_pit_channel_state {
    fn from(state: PitChannel) -> Self {
        Self {
            count: state.count,
            latched_count: state.latched_count,
            count_latched: state.count_latched,
            status_latched: state.status_latched,
            status: state.status,
            read_state: state.read_state,
            write_state: state.write_state,
            write_latch: state.write_latch,
            rw_mode: state.rw_mode,
            mode: state.mode,
            bcd: state.bcd,
            gate: state.gate,
            count_load_time: state.count_load_time,
        }
    }
}

/// The 8254 (`kvm_pit_state2`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pit {
    /// Its counters.
    pub channels: [PitChannel; 3],
    /// `KVM_PIT_FLAGS_…`
    pub flags: u32,
}

impl Pit {
    pub(super) fn save(vm: &VmFd) -> Result<Self, StateError> {
        let kvm = vm.get_pit2().map_err(reading("the PIT"))?;
        Ok(Self {
            channels: kvm.channels.map(Into::into),
            flags: kvm.flags,
        })
    }

    pub(super) fn restore(&self, vm: &VmFd) -> Result<(), StateError> {
        let kvm = kvm_pit_state2 {
            channels: self.channels.map(Into::into),
            flags: self.flags,
            ..Default::default()
        };
        vm.set_pit2(&kvm).map_err(setting("the PIT"))
    }
}

/// Which 8259.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PicId {
    Master,
    Slave,
}

impl PicId {
    fn chip(self) -> (u32, &'static str) {
        match self {
            Self::Master => (KVM_IRQCHIP_PIC_MASTER, "the master PIC"),
            Self::Slave => (KVM_IRQCHIP_PIC_SLAVE, "the slave PIC"),
        }
    }
}

impl Pic {
    pub(super) fn save(vm: &VmFd, id: PicId) -> Result<Self, StateError> {
        let (chip, what) = id.chip();
        get(vm, chip, what)
    }

    pub(super) fn restore(&self, vm: &VmFd, id: PicId) -> Result<(), StateError> {
        let (chip, what) = id.chip();
        set(vm, chip, what, self)
    }
}

impl IoApic {
    pub(super) fn save(vm: &VmFd) -> Result<Self, StateError> {
        get(vm, KVM_IRQCHIP_IOAPIC, "the I/O APIC")
    }

    pub(super) fn restore(&self, vm: &VmFd) -> Result<(), StateError> {
        set(vm, KVM_IRQCHIP_IOAPIC, "the I/O APIC", self)
    }
}

fn get<T: FromBytes>(vm: &VmFd, chip_id: u32, what: &'static str) -> Result<T, StateError> {
    let mut chip = kvm_irqchip {
        chip_id,
        ..Default::default()
    };
    vm.get_irqchip(&mut chip).map_err(reading(what))?;
    let state = chip.as_bytes().get(CHIP_OFFSET..).unwrap_or_default();
    T::read_from_prefix(state)
        .map(|(state, _)| state)
        .map_err(|_| StateError::Invalid {
            what,
            why: "does not fit into KVM's structure".into(),
        })
}

fn set<T: IntoBytes + Immutable>(
    vm: &VmFd,
    chip_id: u32,
    what: &'static str,
    state: &T,
) -> Result<(), StateError> {
    let mut bytes = [0; size_of::<kvm_irqchip>()];
    bytes[..4].copy_from_slice(&chip_id.to_ne_bytes());
    bytes[CHIP_OFFSET..CHIP_OFFSET + size_of::<T>()].copy_from_slice(state.as_bytes());
    let chip = kvm_irqchip::read_from_bytes(&bytes).unwrap_or_else(|_| kvm_irqchip::new_zeroed());
    vm.set_irqchip(&chip).map_err(setting(what))
}
