//! ACPI tables (ACPI 6.5; MCFG: PCI Firmware Specification 3.3).
//!
//! ```text
//! RSDP ─ XSDT ┬ FADT (power management: PM1, timer, reset) ┬ DSDT (PCI host bridge, serial port)
//!             ├ MADT (processors, I/O APIC)                └ FACS
//!             ├ MCFG (ECAM)
//!             └ SRAT (with more than one socket)
//! ```
//!
//! One file builds one table. Every table says only what the machine has and what an operating system would act on: a guest
//! interprets, maps and probes whatever it is told of, and each register that it then touches is an exit to the VMM. So there is no
//! 8042, VGA, GPE block or processor object, and interrupt routes only for the slots in use.

mod dsdt;
mod fadt;
pub mod loader;
mod madt;
mod mcfg;
mod rsdp;
mod srat;
mod xsdt;

#[cfg(test)]
mod tests;

use std::ops::Range;

use acpi_tables::Aml;

use crate::Gpa;
use crate::layout::{
    ECAM_START, PCI_IO, PCI_MMIO32_HIGH, PCI_MMIO32_LOW, RamLayout, pci_mmio64, ports,
};
use crate::topology::Topology;

const OEM_ID: [u8; 6] = *b"DROVER";
const OEM_TABLE_ID: [u8; 8] = *b"DROVERVM";
const OEM_REVISION: u32 = 1;
/// Every table starts on such a boundary (the FACS must, §5.2.10).
const TABLE_ALIGNMENT: usize = 64;

/// A part of ECAM: the buses from 0 to `last_bus` in segment 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ecam {
    /// Where bus 0 is.
    pub base: u64,
    /// The last bus that can exist; a guest maps 1 MiB for each.
    pub last_bus: u8,
}

impl Ecam {
    /// Bytes of the described part.
    #[must_use]
    pub fn size_bytes(&self) -> u32 {
        (u32::from(self.last_bus) + 1) << 20
    }
}

/// What the tables describe.
#[derive(Clone, Debug)]
pub struct AcpiConfig {
    /// Processors.
    pub topology: Topology,
    /// RAM, for SRAT.
    pub ram: RamLayout,
    /// PMBASE: first port of the power-management block.
    pub pm_base: u16,
    /// PCI configuration space.
    pub ecam: Ecam,
    /// 32-bit memory windows of the host bridge.
    pub pci_mmio32: Vec<Range<u64>>,
    /// 64-bit memory window of the host bridge.
    pub pci_mmio64: Option<Range<u64>>,
    /// I/O window of the host bridge, inclusive end.
    pub pci_io: Range<u16>,
    /// Slots of bus 0 whose devices may use an interrupt pin.
    pub pci_slots: Vec<u8>,
    /// COM1 exists.
    pub serial: bool,
    /// Tell of the CMOS clock at ports 0x70 and 0x71. Without, the guest takes the time from kvm-clock alone and saves probing it.
    pub rtc: bool,
}

impl AcpiConfig {
    /// A machine as it stands after reset, without firmware: what direct kernel boot describes. `phys_bits` is
    /// [`crate::cpuid::CpuidPolicy::phys_bits`].
    #[must_use]
    pub fn direct_boot(topology: Topology, ram: RamLayout, phys_bits: u8) -> Self {
        Self {
            topology,
            ram,
            pm_base: ports::PM_BASE,
            ecam: Ecam {
                base: ECAM_START,
                last_bus: 0,
            },
            pci_mmio32: vec![PCI_MMIO32_LOW, PCI_MMIO32_HIGH],
            pci_mmio64: Some(pci_mmio64(phys_bits)),
            pci_io: PCI_IO,
            pci_slots: Vec::new(),
            serial: true,
            rtc: false,
        }
    }
}

/// Why no tables can be made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AcpiError {
    /// They are larger than their place.
    #[error("ACPI tables: {needed} bytes do not fit into {available}")]
    TooLarge {
        /// Bytes of all tables.
        needed: usize,
        /// Bytes of the region.
        available: u64,
    },
    /// ECAM lies where a 32-bit description cannot say it.
    #[error("ACPI tables: ECAM at {base:#x} is not below 4 GiB")]
    EcamTooHigh {
        /// Where it lies.
        base: u64,
    },
    /// A window is not what its descriptor can hold.
    #[error("ACPI tables: the PCI window {start:#x}..{end:#x} is empty or not below 4 GiB")]
    BadWindow {
        /// First address.
        start: u64,
        /// First address behind it.
        end: u64,
    },
    /// No such slot.
    #[error("ACPI tables: PCI slot {slot}, at most 31")]
    BadSlot {
        /// The slot.
        slot: u8,
    },
}

/// Tables laid out for one place in memory.
#[derive(Clone, Debug)]
pub struct AcpiTables {
    /// The root pointer, which a kernel is told of; the first byte of `blob`.
    pub rsdp: Gpa,
    /// All tables, to be written at `rsdp`.
    pub blob: Vec<u8>,
}

impl AcpiTables {
    /// Builds the tables for `region`, e.g. [`crate::layout::ACPI_REGION`].
    ///
    /// # Errors
    /// They do not fit, or `config` contradicts itself.
    pub fn build(config: &AcpiConfig, region: Range<u64>) -> Result<Self, AcpiError> {
        check(config)?;
        let mut blob = Blob {
            start: region.start,
            bytes: Vec::new(),
        };
        // The RSDP comes first and points at what comes last: hold its place.
        blob.append(&[0; rsdp::LENGTH]);
        let facs = blob.append(&bytes(&acpi_tables::facs::FACS::new()));
        let dsdt = blob.append(&dsdt::build(config));
        let tables: Vec<u64> = [
            Some(fadt::build(config, facs, dsdt)),
            Some(madt::build(&config.topology)),
            Some(mcfg::build(config.ecam)),
            srat::build(&config.topology, &config.ram),
        ]
        .into_iter()
        .flatten()
        .map(|table| blob.append(&table))
        .collect();
        let xsdt = blob.append(&xsdt::build(&tables));
        let rsdp = rsdp::build(xsdt);
        blob.bytes[..rsdp.len()].copy_from_slice(&rsdp);
        let available = region.end.saturating_sub(region.start);
        if blob.bytes.len() as u64 > available {
            return Err(AcpiError::TooLarge {
                needed: blob.bytes.len(),
                available,
            });
        }
        Ok(Self {
            rsdp: vm_memory::GuestAddress(region.start),
            blob: blob.bytes,
        })
    }
}

fn check(config: &AcpiConfig) -> Result<(), AcpiError> {
    let Ecam { base, .. } = config.ecam;
    if base
        .checked_add(u64::from(config.ecam.size_bytes()))
        .is_none_or(|end| end > 1 << 32)
    {
        return Err(AcpiError::EcamTooHigh { base });
    }
    for window in &config.pci_mmio32 {
        if window.is_empty() || window.end > 1 << 32 {
            return Err(AcpiError::BadWindow {
                start: window.start,
                end: window.end,
            });
        }
    }
    if let Some(window) = config
        .pci_mmio64
        .as_ref()
        .filter(|window| window.is_empty())
    {
        return Err(AcpiError::BadWindow {
            start: window.start,
            end: window.end,
        });
    }
    if let Some(&slot) = config.pci_slots.iter().find(|&&slot| slot > 31) {
        return Err(AcpiError::BadSlot { slot });
    }
    Ok(())
}

/// Tables one behind the other.
struct Blob {
    start: u64,
    bytes: Vec<u8>,
}

impl Blob {
    /// Appends a table and returns its guest-physical address.
    fn append(&mut self, table: &[u8]) -> u64 {
        self.bytes
            .resize(self.bytes.len().next_multiple_of(TABLE_ALIGNMENT), 0);
        let address = self.start + self.bytes.len() as u64;
        self.bytes.extend_from_slice(table);
        address
    }
}

fn bytes(table: &dyn Aml) -> Vec<u8> {
    let mut bytes = Vec::new();
    table.to_aml_bytes(&mut bytes);
    bytes
}
