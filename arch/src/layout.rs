//! Where everything is in guest-physical memory and in port space.
//!
//! ```text
//! 0                    boot structures (GDT, start info, zero page, page tables, command line)
//! 0x000E_0000          ACPI tables (direct kernel boot)
//! 0x000F_0000          SMBIOS entry point and table (direct kernel boot)
//! 0x0010_0000          kernel … initial RAM disk at the top of low RAM
//! min(RAM, 2 GiB)      end of low RAM
//! 0x8000_0000          32-bit PCI window, below ECAM
//! 0xE000_0000          ECAM, 256 MiB
//! 0xF000_0000          32-bit PCI window, above ECAM
//! 0xFC00_0000          end of the 32-bit PCI window
//! 0xFEC0_0000          I/O APIC
//! 0xFEE0_0000          local APICs
//! 0xFEFF_C000          KVM identity map (one page) and TSS (three pages), below the flash
//! 0x1_0000_0000        high RAM: what did not fit below 2 GiB
//! top eighth           64-bit PCI window, of the physical address space that the processor offers
//! ```

use std::ops::Range;

/// End of low RAM at most, and start of the 32-bit PCI window: 2 GiB.
pub const LOW_RAM_LIMIT: u64 = 0x8000_0000;
/// Where RAM continues that did not fit below [`LOW_RAM_LIMIT`]: 4 GiB.
pub const HIGH_RAM_START: u64 = 0x1_0000_0000;

/// Start of memory that real-mode PCs reserve for video memory and option ROMs.
pub const LEGACY_HOLE_START: u64 = 0xA_0000;
/// End of the legacy hole; kernels are loaded from here on.
pub const LEGACY_HOLE_END: u64 = 0x10_0000;
/// ACPI tables of a direct kernel boot; the RSDP comes first, where a BIOS search looks for it.
pub const ACPI_REGION: Range<u64> = 0xE_0000..0xF_0000;
/// SMBIOS entry point and table of a direct kernel boot (SMBIOS 3.6 §5.2: searched on 16-byte boundaries).
pub const SMBIOS_REGION: Range<u64> = 0xF_0000..0x10_0000;

/// The 32-bit PCI window below the default ECAM.
pub const PCI_MMIO32_LOW: Range<u64> = 0x8000_0000..0xE000_0000;
/// ECAM as it stands after reset; firmware may move it through PCIEXBAR.
pub const ECAM_START: u64 = 0xE000_0000;
/// Bytes of ECAM: 256 buses of 1 MiB.
pub const ECAM_SIZE: u64 = 256 << 20;
/// The 32-bit PCI window above the default ECAM.
pub const PCI_MMIO32_HIGH: Range<u64> = 0xF000_0000..0xFC00_0000;
/// The PCI I/O window, above every fixed port.
pub const PCI_IO: Range<u16> = 0x6000..0xFFFF;

/// I/O APIC registers.
pub const IOAPIC_START: u64 = 0xFEC0_0000;
/// Bytes of I/O APIC registers.
pub const IOAPIC_SIZE: u64 = 0x1000;
/// Local APIC registers.
pub const LAPIC_START: u64 = 0xFEE0_0000;
/// KVM's identity-map page (used on Intel processors without unrestricted guest mode).
pub const KVM_IDENTITY_MAP: u64 = 0xFEFF_C000;
/// KVM's three TSS pages (likewise).
pub const KVM_TSS: u64 = 0xFEFF_D000;
/// Where the flash may begin: everything from here to 4 GiB belongs to firmware.
pub const FLASH_START: u64 = 0xFF00_0000;

/// Fixed legacy port numbers.
pub mod ports {
    use std::ops::Range;

    /// First serial port (COM1), 8 ports.
    pub const SERIAL: u16 = 0x3F8;
    /// How many ports a 16550 has.
    pub const SERIAL_LENGTH: u16 = 8;
    /// Keyboard controller data port.
    pub const I8042_DATA: u16 = 0x60;
    /// Keyboard controller command port: 0xFE resets the machine.
    pub const I8042_COMMAND: u16 = 0x64;
    /// CMOS/RTC index port.
    pub const CMOS_INDEX: u16 = 0x70;
    /// CMOS/RTC data port.
    pub const CMOS_DATA: u16 = 0x71;
    /// System control port A (fast reset).
    pub const SYSTEM_CONTROL_A: u16 = 0x92;
    /// Debug console of firmware builds.
    pub const DEBUGCON: u16 = 0x402;
    /// PCI configuration address, 4 ports; byte 1 of it is [`RESET`].
    pub const PCI_CONFIG_ADDRESS: u16 = 0xCF8;
    /// PCI configuration data, 4 ports.
    pub const PCI_CONFIG_DATA: u16 = 0xCFC;
    /// Reset control register (ICH9 §13.7.5).
    pub const RESET: u16 = 0xCF9;
    /// What written to [`RESET`] resets the whole machine: SYS_RST and RST_CPU.
    pub const RESET_VALUE: u8 = 0x06;
    /// The power-management block as firmware-less boots have it: PMBASE.
    pub const PM_BASE: u16 = 0x600;
    /// Ports of the power-management block.
    pub const PM_LENGTH: u16 = 0x80;
    /// PM1a event block (status, enable), relative to PMBASE; 4 ports.
    pub const PM1_EVENT_OFFSET: u16 = 0x00;
    /// PM1a control block, relative to PMBASE; 2 ports.
    pub const PM1_CONTROL_OFFSET: u16 = 0x04;
    /// Power-management timer, relative to PMBASE; 4 ports.
    pub const PM_TIMER_OFFSET: u16 = 0x08;
    /// General-purpose events 0, relative to PMBASE; 16 ports.
    pub const GPE0_OFFSET: u16 = 0x20;
    /// PCI configuration ports, which no window of the host bridge may produce.
    pub const PCI_CONFIG: Range<u16> = 0xCF8..0xD00;
}

/// Global system interrupts (I/O APIC inputs).
pub mod gsi {
    /// PIT, by identity like every ISA interrupt.
    pub const PIT: u32 = 0;
    /// First serial port.
    pub const SERIAL: u32 = 4;
    /// RTC alarm.
    pub const RTC: u32 = 8;
    /// System control interrupt.
    pub const SCI: u32 = 9;
    /// First of the eight inputs that PCI INTx pins share.
    pub const PCI_INTX: u32 = 16;
    /// How many inputs PCI INTx pins share.
    pub const PCI_INTX_COUNT: u32 = 8;
    /// Inputs of the one I/O APIC.
    pub const IOAPIC_PINS: u32 = 24;

    /// The input of a root-bus device's interrupt pin; `pin` 0 is INTA#. `_PRT` says the same.
    #[must_use]
    pub fn pci_intx(slot: u8, pin: u8) -> u32 {
        PCI_INTX + (u32::from(slot) + u32::from(pin)) % PCI_INTX_COUNT
    }
}

/// Where a VM's RAM is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RamLayout {
    /// From address 0, at most 2 GiB.
    pub low: Range<u64>,
    /// From 4 GiB; the rest, if any.
    pub high: Option<Range<u64>>,
}

impl RamLayout {
    /// Splits `size_bytes` of RAM around the hole for devices.
    #[must_use]
    pub fn new(size_bytes: u64) -> Self {
        let low = size_bytes.min(LOW_RAM_LIMIT);
        let rest = size_bytes - low;
        let high = (rest > 0).then(|| HIGH_RAM_START..HIGH_RAM_START.saturating_add(rest));
        Self { low: 0..low, high }
    }

    /// The ranges, in address order.
    pub fn ranges(&self) -> impl Iterator<Item = Range<u64>> + '_ {
        std::iter::once(self.low.clone()).chain(self.high.clone())
    }

    /// Bytes of RAM.
    #[must_use]
    pub fn size_bytes(&self) -> u64 {
        self.ranges().map(|range| range.end - range.start).sum()
    }

    /// First address behind all RAM.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.high.as_ref().map_or(self.low.end, |high| high.end)
    }

    /// The memory map that a directly booted kernel is given: conventional memory, the tables below 1 MiB, RAM, ECAM (which
    /// Linux ignores unless reserved here) and the chipset's fixed registers.
    #[must_use]
    pub fn e820(&self) -> Vec<E820Entry> {
        let mut map = vec![
            E820Entry::new(0..LEGACY_HOLE_START, E820Kind::Ram),
            E820Entry::new(ACPI_REGION, E820Kind::Acpi),
            E820Entry::new(SMBIOS_REGION, E820Kind::Reserved),
            E820Entry::new(
                LEGACY_HOLE_END..self.low.end.max(LEGACY_HOLE_END),
                E820Kind::Ram,
            ),
            E820Entry::new(ECAM_START..ECAM_START + ECAM_SIZE, E820Kind::Reserved),
            E820Entry::new(KVM_IDENTITY_MAP..HIGH_RAM_START, E820Kind::Reserved),
        ];
        map.extend(
            self.high
                .clone()
                .map(|high| E820Entry::new(high, E820Kind::Ram)),
        );
        map.retain(|entry| entry.size_bytes > 0);
        map
    }

    /// The memory map for firmware, which makes its own of it: RAM, and what KVM keeps for itself.
    #[must_use]
    pub fn firmware_e820(&self) -> Vec<E820Entry> {
        let kvm = KVM_IDENTITY_MAP..KVM_TSS + 3 * 4096;
        let mut map = vec![
            E820Entry::new(self.low.clone(), E820Kind::Ram),
            E820Entry::new(kvm, E820Kind::Reserved),
        ];
        map.extend(
            self.high
                .clone()
                .map(|high| E820Entry::new(high, E820Kind::Ram)),
        );
        map
    }
}

/// The 64-bit PCI window: the top eighth of a physical address space of `phys_bits`, where firmware puts it too.
///
/// `phys_bits` is clamped to 36..=52, what x86-64 processors have.
#[must_use]
pub fn pci_mmio64(phys_bits: u8) -> Range<u64> {
    let end = 1_u64 << phys_bits.clamp(36, 52);
    end / 8 * 7..end
}

/// What an e820 range is (ACPI 6.5 table 15.4; Xen's PVH memory map uses the same numbers).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum E820Kind {
    /// Usable RAM.
    Ram = 1,
    /// Not to be touched.
    Reserved = 2,
    /// ACPI tables: usable once they have been read.
    Acpi = 3,
}

/// One range of the memory map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct E820Entry {
    /// First address.
    pub base: u64,
    /// Length in bytes.
    pub size_bytes: u64,
    /// What it is.
    pub kind: E820Kind,
}

impl E820Entry {
    /// An entry for `range`.
    #[must_use]
    pub fn new(range: Range<u64>, kind: E820Kind) -> Self {
        Self {
            base: range.start,
            size_bytes: range.end.saturating_sub(range.start),
            kind,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn ram_up_to_two_gib_stays_low() {
        assert_eq!(
            RamLayout::new(2 * GIB),
            RamLayout {
                low: 0..2 * GIB,
                high: None
            }
        );
    }

    #[test]
    fn ram_beyond_two_gib_continues_at_four_gib() {
        let ram = RamLayout::new(3 * GIB);
        assert_eq!(ram.low, 0..2 * GIB);
        assert_eq!(ram.high, Some(4 * GIB..5 * GIB));
        assert_eq!(ram.end(), 5 * GIB);
    }

    #[test]
    fn the_64_bit_window_is_the_top_eighth_of_each_address_space() {
        assert_eq!(pci_mmio64(39), 0x70_0000_0000..0x80_0000_0000);
        assert_eq!(pci_mmio64(40), 0xE0_0000_0000..0x100_0000_0000);
        assert_eq!(pci_mmio64(46), 0x3800_0000_0000..0x4000_0000_0000);
        assert_eq!(pci_mmio64(48), 0xE000_0000_0000..0x1_0000_0000_0000);
        assert_eq!(pci_mmio64(52), 0xE_0000_0000_0000..0x10_0000_0000_0000);
    }

    #[test]
    fn interrupt_pins_swizzle_over_eight_inputs() {
        assert_eq!(gsi::pci_intx(0, 0), 16);
        assert_eq!(gsi::pci_intx(1, 3), 20);
        assert_eq!(gsi::pci_intx(31, 0), 23);
        assert_eq!(gsi::pci_intx(31, 1), 16);
    }

    proptest! {
        #[test]
        fn the_memory_map_is_sorted_disjoint_and_keeps_all_ram_but_the_legacy_hole(mib in 32_u64..1 << 20) {
            let ram = RamLayout::new(mib << 20);
            let map = ram.e820();
            for pair in map.windows(2) {
                prop_assert!(pair[0].base + pair[0].size_bytes <= pair[1].base, "{pair:x?}");
            }
            let usable: u64 = map.iter().filter(|e| e.kind == E820Kind::Ram).map(|e| e.size_bytes).sum();
            prop_assert_eq!(usable, (mib << 20) - (LEGACY_HOLE_END - LEGACY_HOLE_START));
            prop_assert_eq!(ram.size_bytes(), mib << 20);
        }
    }
}
