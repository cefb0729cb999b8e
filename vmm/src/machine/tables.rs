//! The tables that describe the machine: written to guest memory for a kernel that we start, made on demand for firmware.

use std::sync::Arc;

use drover_api::definition::VmConfig;
use drover_arch::acpi::{AcpiConfig, AcpiTables};
use drover_arch::cpuid::CpuidPolicy;
use drover_arch::layout::{
    ACPI_REGION, ECAM_START, LOW_RAM_LIMIT, PCI_MMIO32_HIGH, RamLayout, SMBIOS_REGION, pci_mmio64,
};
use drover_arch::smbios::{SmbiosConfig, SmbiosTables};
use drover_arch::topology::Topology;
use drover_devices::GuestMemory;
use drover_devices::pci::host::HostBridge;
use drover_devices::pci::lpc::Lpc;
use drover_devices::pci::{PciBus, Space};
use vm_memory::Bytes;

use super::BuildError;

/// What tables are made from.
pub(super) struct Facts<'a> {
    pub(super) config: &'a VmConfig,
    pub(super) topology: Topology,
    pub(super) ram: &'a RamLayout,
    pub(super) cpuid: &'a CpuidPolicy,
    pub(super) pci_slots: Vec<u8>,
}

impl Facts<'_> {
    fn acpi(&self) -> AcpiConfig {
        AcpiConfig {
            pci_slots: self.pci_slots.clone(),
            ..AcpiConfig::direct_boot(self.topology, self.ram.clone(), self.cpuid.phys_bits())
        }
    }

    pub(super) fn smbios(&self) -> SmbiosConfig {
        SmbiosConfig {
            product: "Drover".to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            serial: self.config.name.clone(),
            uuid: *self.config.system_uuid().as_bytes(),
            oem_strings: Vec::new(),
            topology: self.topology,
            processor_id: self.cpuid.processor_id(),
            ram: self.ram.clone(),
        }
    }

    /// The tables of a machine whose kernel we start ourselves.
    pub(super) fn direct_boot(&self) -> Result<FirmwareTables, BuildError> {
        let (acpi, smbios) = (self.acpi(), self.smbios());
        Ok(FirmwareTables {
            acpi: AcpiTables::build(&acpi, ACPI_REGION).map_err(BuildError::host)?,
            smbios: SmbiosTables::build(&smbios, SMBIOS_REGION).map_err(BuildError::host)?,
        })
    }

    /// Describes the machine as firmware has set it up by then.
    pub(super) fn as_programmed(
        &self,
        pci: &Arc<PciBus>,
        bridge: &Arc<HostBridge>,
        lpc: &Arc<Lpc>,
    ) -> impl Fn() -> AcpiConfig + Send + Sync + use<> {
        let base = AcpiConfig {
            rtc: true,
            ..self.acpi()
        };
        let (pci, bridge, lpc) = (
            Arc::downgrade(pci),
            Arc::downgrade(bridge),
            Arc::downgrade(lpc),
        );
        let low_ram_end = self.ram.low.end;
        let phys_bits = self.cpuid.phys_bits();
        move || {
            let mut acpi = base.clone();
            let (Some(pci), Some(bridge), Some(lpc)) =
                (pci.upgrade(), bridge.upgrade(), lpc.upgrade())
            else {
                // The machine is going away.
                return acpi;
            };
            acpi.pm_base = lpc.pm_base();
            let ecam = bridge.ecam();
            let (base, size) = ecam.map_or((ECAM_START, 1 << 20), |e| (e.base, e.size));
            acpi.ecam.base = base;
            // Below 4 GiB, whatever is neither RAM nor ECAM up to the chips is the host bridge's.
            let start = low_ram_end.max(LOW_RAM_LIMIT);
            let end = PCI_MMIO32_HIGH.end;
            let windows = [
                start..base.clamp(start, end),
                (base + size).clamp(start, end)..end,
            ];
            acpi.pci_mmio32 = windows.into_iter().filter(|w| !w.is_empty()).collect();
            // Above, firmware has the top eighth of the address space, as far as is known; where it has put something says more.
            let mut high = pci_mmio64(phys_bits);
            for (_, function) in pci.functions() {
                for region in function.regions() {
                    if region.space == Space::Memory && region.base >= 1 << 32 {
                        high.start = high.start.min(region.base);
                        high.end = high.end.max(region.base.saturating_add(region.size));
                    }
                }
            }
            acpi.pci_mmio64 = Some(high);
            acpi
        }
    }
}

/// ACPI and SMBIOS of one machine, ready to be written at every boot.
pub(super) struct FirmwareTables {
    acpi: AcpiTables,
    smbios: SmbiosTables,
}

impl FirmwareTables {
    /// Address of the ACPI root pointer.
    pub(super) fn rsdp(&self) -> u64 {
        self.acpi.rsdp.0
    }

    /// Writes them where they belong.
    pub(super) fn write(&self, memory: &GuestMemory) -> Result<(), BuildError> {
        memory
            .write_slice(&self.acpi.blob, self.acpi.rsdp)
            .map_err(BuildError::host)?;
        memory
            .write_slice(&self.smbios.blob, self.smbios.address)
            .map_err(BuildError::host)
    }
}
