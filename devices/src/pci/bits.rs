//! Register layouts of a type 0 configuration header (PCI Local Bus 3.0 §6.1) and of MSI-X (§6.8.2). Layout only, no behaviour.

use bitflags::bitflags;

/// Bytes of configuration space of a conventional PCI function.
pub const CONFIG_SPACE_SIZE: usize = 256;
/// Bytes of configuration space of a function as ECAM addresses it (PCI Express 4.0 §7.2.2).
pub const EXTENDED_CONFIG_SPACE_SIZE: u16 = 4096;

/// Vendor ID, 16 bits.
pub const VENDOR_ID: u8 = 0x00;
/// Device ID, 16 bits.
pub const DEVICE_ID: u8 = 0x02;
/// [`Command`], 16 bits.
pub const COMMAND: u8 = 0x04;
/// [`Status`], 16 bits.
pub const STATUS: u8 = 0x06;
/// Revision ID, 8 bits.
pub const REVISION_ID: u8 = 0x08;
/// Programming interface, sub-class and class, one byte each.
pub const CLASS_CODE: u8 = 0x09;
/// First of six 32-bit base address registers.
pub const BAR0: u8 = 0x10;
/// Subsystem vendor ID, 16 bits.
pub const SUBSYSTEM_VENDOR_ID: u8 = 0x2c;
/// Subsystem ID, 16 bits.
pub const SUBSYSTEM_ID: u8 = 0x2e;
/// Offset of the first capability, 8 bits.
pub const CAPABILITIES_POINTER: u8 = 0x34;
/// Written by firmware, read by drivers, without meaning to the function; 8 bits.
pub const INTERRUPT_LINE: u8 = 0x3c;
/// 1 for INTA# … 4 for INTD#, 0 for none; 8 bits.
pub const INTERRUPT_PIN: u8 = 0x3d;
/// First byte behind the predefined header.
pub const HEADER_END: u8 = 0x40;

/// Number of base address registers in a type 0 header.
pub const BAR_COUNT: usize = 6;
/// BAR bit 0: the range is in I/O space.
pub const BAR_IO: u32 = 1 << 0;
/// BAR bits 2:1 = 10b: the BAR takes this register and the next.
pub const BAR_MEMORY_64: u32 = 0b10 << 1;
/// BAR bit 3: reads have no side effects.
pub const BAR_PREFETCHABLE: u32 = 1 << 3;
/// Address bits of an I/O BAR.
pub const BAR_IO_ADDRESS: u32 = !0b11;
/// Address bits of a memory BAR.
pub const BAR_MEMORY_ADDRESS: u32 = !0b1111;

bitflags! {
    /// What the function may do (§6.2.2).
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Command: u16 {
        /// Answer in I/O space.
        const IO = 1 << 0;
        /// Answer in memory space.
        const MEMORY = 1 << 1;
        /// Read and write memory, send message-signalled interrupts.
        const BUS_MASTER = 1 << 2;
        /// Report parity errors; stored, without effect.
        const PARITY_ERROR_RESPONSE = 1 << 6;
        /// Report system errors; stored, without effect.
        const SERR_ENABLE = 1 << 8;
        /// Keep INTx# released.
        const INTERRUPT_DISABLE = 1 << 10;
    }
}

bitflags! {
    /// What happened to the function (§6.2.3).
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Status: u16 {
        /// The function wants INTx# asserted, disabled or not.
        const INTERRUPT = 1 << 3;
        /// There is a capability list.
        const CAPABILITIES_LIST = 1 << 4;
    }
}

/// Capability ID of MSI-X.
pub const CAPABILITY_MSIX: u8 = 0x11;
/// Vendor-specific capability ID.
pub const CAPABILITY_VENDOR: u8 = 0x09;

/// MSI-X: most vectors of one function.
pub const MSIX_MAX_VECTORS: u16 = 2048;
/// MSI-X: bytes of a table entry: address low, address high, data, vector control.
pub const MSIX_ENTRY_SIZE: u64 = 16;
/// MSI-X: Message Control, from the start of the capability.
pub const MSIX_MESSAGE_CONTROL: u8 = 2;
/// MSI-X Message Control: all vectors are masked.
pub const MSIX_FUNCTION_MASK: u16 = 1 << 14;
/// MSI-X Message Control: MSI-X is used, INTx# is not.
pub const MSIX_ENABLE: u16 = 1 << 15;
/// MSI-X Vector Control: this vector is masked.
pub const MSIX_VECTOR_MASKED: u32 = 1 << 0;
