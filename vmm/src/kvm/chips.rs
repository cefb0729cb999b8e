//! The interrupt chips and the timer as KVM creates them, kept for resets of the machine.

use kvm_bindings::{
    KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, kvm_irqchip, kvm_pit_state2,
};
use kvm_ioctls::VmFd;

use super::{KvmError, step};

/// PICs, I/O APIC and PIT.
pub struct ChipState {
    chips: Vec<kvm_irqchip>,
    pit: kvm_pit_state2,
}

impl ChipState {
    /// Reads the present state.
    ///
    /// # Errors
    /// The kernel refused.
    pub fn capture(vm: &VmFd) -> Result<Self, KvmError> {
        let chip = |chip_id| {
            let mut chip = kvm_irqchip { chip_id, ..Default::default() };
            vm.get_irqchip(&mut chip).map_err(step("read an interrupt chip"))?;
            Ok(chip)
        };
        let ids = [KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, KVM_IRQCHIP_IOAPIC];
        Ok(Self {
            chips: ids.into_iter().map(chip).collect::<Result<_, KvmError>>()?,
            pit: vm.get_pit2().map_err(step("read the timer"))?,
        })
    }

    /// Writes this state back.
    ///
    /// # Errors
    /// The kernel refused.
    pub fn restore(&self, vm: &VmFd) -> Result<(), KvmError> {
        for chip in &self.chips {
            vm.set_irqchip(chip).map_err(step("set an interrupt chip"))?;
        }
        vm.set_pit2(&self.pit).map_err(step("set the timer"))
    }
}
