//! The firmware tables of a direct kernel boot, in guest memory.

use drover_api::definition::VmConfig;
use drover_arch::acpi::{AcpiConfig, AcpiTables};
use drover_arch::cpuid::CpuidPolicy;
use drover_arch::layout::{ACPI_REGION, RamLayout, SMBIOS_REGION};
use drover_arch::smbios::{SmbiosConfig, SmbiosTables};
use drover_arch::topology::Topology;
use drover_devices::GuestMemory;
use vm_memory::Bytes;

use super::BuildError;

/// ACPI and SMBIOS of one machine, ready to be written at every boot.
pub(super) struct FirmwareTables {
    acpi: AcpiTables,
    smbios: SmbiosTables,
}

impl FirmwareTables {
    pub(super) fn build(
        config: &VmConfig,
        topology: Topology,
        ram: &RamLayout,
        cpuid: &CpuidPolicy,
        pci_slots: Vec<u8>,
    ) -> Result<Self, BuildError> {
        let acpi = AcpiConfig {
            pci_slots,
            ..AcpiConfig::direct_boot(topology, ram.clone(), cpuid.phys_bits())
        };
        let smbios = SmbiosConfig {
            product: "Drover".to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            serial: config.name.clone(),
            uuid: *config.system_uuid().as_bytes(),
            oem_strings: Vec::new(),
            topology,
            processor_id: cpuid.processor_id(),
            ram: ram.clone(),
        };
        Ok(Self {
            acpi: AcpiTables::build(&acpi, ACPI_REGION).map_err(BuildError::host)?,
            smbios: SmbiosTables::build(&smbios, SMBIOS_REGION).map_err(BuildError::host)?,
        })
    }

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
