//! Gives every BAR an address, as firmware would, for guests that boot without any.
//!
//! BARs are found and sized through configuration space alone (PCI Local Bus 3.0 §6.2.5.1), so that this works for every function.
//! Address spaces stay disabled in COMMAND: the guest's drivers enable them, and each enable before that would only move doorbells.
//! Greater BARs come first, which leaves no gaps between naturally aligned sizes.

use std::ops::Range;

use drover_arch::layout;

use super::bits::{
    BAR_COUNT, BAR_IO, BAR_IO_ADDRESS, BAR_MEMORY_64, BAR_MEMORY_ADDRESS, BAR0, COMMAND,
    INTERRUPT_LINE, INTERRUPT_PIN,
};
use super::{BusDeviceFunction, IntxPin, PciBus, PciError, intx_gsi};

/// The address ranges that BARs may be put into; what ACPI's `_CRS` tells the guest.
#[derive(Clone, Debug, Default)]
pub struct BarWindows {
    /// Memory below 4 GiB, tried in this order.
    pub memory32: Vec<Range<u64>>,
    /// Memory above, for 64-bit BARs that do not fit below.
    pub memory64: Option<Range<u64>>,
    /// I/O ports.
    pub io: Option<Range<u64>>,
}

impl BarWindows {
    /// The windows of the layout for a guest with `physical_address_bits`, as its ACPI tables tell them.
    #[must_use]
    pub fn from_layout(physical_address_bits: u8) -> BarWindows {
        let io = layout::PCI_IO;
        BarWindows {
            memory32: vec![layout::PCI_MMIO32_LOW, layout::PCI_MMIO32_HIGH],
            memory64: Some(layout::pci_mmio64(physical_address_bits)),
            io: Some(io.start.into()..io.end.into()),
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Io,
    Memory32,
    Memory64,
}

struct Request {
    at: BusDeviceFunction,
    bar: u8,
    kind: Kind,
    size: u64,
}

/// Assigns all BARs of all functions, and tells each its interrupt line. For the VMM, before the guest runs and after each
/// [`PciBus::reset_all`].
///
/// # Errors
/// The windows are too small for the BAR named.
pub fn assign_bars(bus: &PciBus, windows: &BarWindows) -> Result<(), PciError> {
    let mut requests = Vec::new();
    for (at, _) in bus.functions() {
        write_u16(bus, at, COMMAND, 0);
        find_bars(bus, at, &mut requests);
        assign_interrupt_line(bus, at);
    }
    // Stable, so that equal sizes stay in order of their functions.
    requests.sort_by_key(|request| std::cmp::Reverse(request.size));
    let mut windows = windows.clone();
    for request in requests {
        let candidates: Vec<&mut Range<u64>> = match request.kind {
            Kind::Io => windows.io.iter_mut().collect(),
            Kind::Memory32 => windows.memory32.iter_mut().collect(),
            Kind::Memory64 => {
                let below = windows.memory32.iter_mut();
                below.chain(windows.memory64.iter_mut()).collect()
            }
        };
        let Request { at, bar, size, .. } = request;
        let base = candidates
            .into_iter()
            .find_map(|window| take(window, size))
            .ok_or(PciError::NoRoom { at, bar, size })?;
        write_u32(bus, at, BAR0 + 4 * bar, base as u32);
        if request.kind == Kind::Memory64 {
            write_u32(bus, at, BAR0 + 4 * bar + 4, (base >> 32) as u32);
        }
    }
    Ok(())
}

fn find_bars(bus: &PciBus, at: BusDeviceFunction, requests: &mut Vec<Request>) {
    let mut registers = 0..BAR_COUNT as u8;
    while let Some(bar) = registers.next() {
        let sized = probe(bus, at, bar);
        if sized == 0 {
            continue;
        }
        let (kind, mask) = if sized & BAR_IO != 0 {
            // Bits 31:16 of an I/O BAR may be hard-wired to zero.
            let mask = u64::from(sized & BAR_IO_ADDRESS) | !0xffff;
            (Kind::Io, mask)
        } else if sized & BAR_MEMORY_64 != 0 {
            let upper = registers
                .next()
                .map_or(u32::MAX, |next| probe(bus, at, next));
            let mask = u64::from(upper) << 32 | u64::from(sized & BAR_MEMORY_ADDRESS);
            (Kind::Memory64, mask)
        } else {
            let mask = u64::from(sized & BAR_MEMORY_ADDRESS) | u64::from(u32::MAX) << 32;
            (Kind::Memory32, mask)
        };
        if let Some(size) = (!mask).checked_add(1) {
            requests.push(Request {
                at,
                bar,
                kind,
                size,
            });
        }
    }
}

/// Which bits of a BAR stick. The register reads 0 afterwards, apart from its type.
fn probe(bus: &PciBus, at: BusDeviceFunction, bar: u8) -> u32 {
    let offset = BAR0 + 4 * bar;
    write_u32(bus, at, offset, u32::MAX);
    let mut data = [0; 4];
    bus.config_read(at, offset.into(), &mut data);
    write_u32(bus, at, offset, 0);
    u32::from_le_bytes(data)
}

fn assign_interrupt_line(bus: &PciBus, at: BusDeviceFunction) {
    let mut register = [0];
    bus.config_read(at, INTERRUPT_PIN.into(), &mut register);
    let pins = [IntxPin::A, IntxPin::B, IntxPin::C, IntxPin::D];
    if let Some(pin) = pins.into_iter().find(|pin| pin.register() == register[0]) {
        bus.config_write(at, INTERRUPT_LINE.into(), &[intx_gsi(at, pin) as u8]);
    }
}

/// Takes `size` naturally aligned bytes from the start of a window.
fn take(window: &mut Range<u64>, size: u64) -> Option<u64> {
    let base = window.start.checked_next_multiple_of(size)?;
    let end = base.checked_add(size)?;
    if end > window.end {
        return None;
    }
    window.start = end;
    Some(base)
}

fn write_u16(bus: &PciBus, at: BusDeviceFunction, offset: u8, value: u16) {
    bus.config_write(at, offset.into(), &value.to_le_bytes());
}

fn write_u32(bus: &PciBus, at: BusDeviceFunction, offset: u8, value: u32) {
    bus.config_write(at, offset.into(), &value.to_le_bytes());
}
