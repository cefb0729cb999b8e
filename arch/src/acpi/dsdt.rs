//! Differentiated System Description Table (ACPI 6.5 §5.2.11.1): the devices that cannot be enumerated, as AML.
//!
//! ```text
//! \_S5            soft off: SLP_TYP 0
//! \_SB.PCI0       host bridge: _CRS (buses, ports, memory), _PRT (interrupt pins), _OSC (native services)
//! \_SB.MBRD       what nothing else may use: ECAM, power-management ports
//! \_SB.COM1       16550
//! \_SB.RTC0       CMOS clock, if told of
//! ```

use acpi_tables::Aml;
use acpi_tables::aml::{
    AddressSpace, AddressSpaceCacheable, Arg, CreateDWordField, Device, EISAName, Else, Equal, IO,
    If, Interrupt, Memory32Fixed, Method, Name, Or, Package, PackageBuilder, Path,
    ResourceTemplate, Return, Scope, Uuid, ZERO,
};
use acpi_tables::sdt::Sdt;

use super::{AcpiConfig, OEM_ID, OEM_REVISION, OEM_TABLE_ID};
use crate::layout::{gsi, ports};

const REVISION: u8 = 2;
const HEADER_LENGTH: u32 = 36;
/// Interface of PCI host bridges' `_OSC` (PCI Firmware Specification 3.3 §4.5.1).
const PCI_OSC_UUID: &str = "33DB4D5B-1FF7-401C-9657-7441C03DD766";
/// `_OSC` status bit: unknown interface (ACPI 6.5 §6.2.11).
const OSC_UNRECOGNIZED_UUID: u8 = 1 << 2;
/// Low half of a `_PRT` address: all functions of the slot.
const ALL_FUNCTIONS: u32 = 0xFFFF;

pub(super) fn build(config: &AcpiConfig) -> Vec<u8> {
    let mut dsdt = Sdt::new(
        *b"DSDT",
        HEADER_LENGTH,
        REVISION,
        OEM_ID,
        OEM_TABLE_ID,
        OEM_REVISION,
    );
    let mut aml = Vec::new();
    Name::new(
        "_S5_".into(),
        &Package::new(vec![&ZERO, &ZERO, &ZERO, &ZERO]),
    )
    .to_aml_bytes(&mut aml);
    append_devices(config, &mut aml);
    dsdt.append_slice(&aml);
    dsdt.as_slice().to_vec()
}

fn append_devices(config: &AcpiConfig, aml: &mut Vec<u8>) {
    let mut devices = vec![host_bridge(config), motherboard(config)];
    if config.serial {
        devices.push(port_device(
            "COM1",
            "PNP0501",
            ports::SERIAL,
            8,
            gsi::SERIAL,
        ));
    }
    if config.rtc {
        devices.push(port_device(
            "RTC0",
            "PNP0B00",
            ports::CMOS_INDEX,
            2,
            gsi::RTC,
        ));
    }
    let raw: Vec<Raw> = devices.into_iter().map(Raw).collect();
    Scope::new(
        "_SB_".into(),
        raw.iter().map(|device| device as &dyn Aml).collect(),
    )
    .to_aml_bytes(aml);
}

/// AML that is already bytes.
struct Raw(Vec<u8>);

impl Aml for Raw {
    fn to_aml_bytes(&self, sink: &mut dyn acpi_tables::AmlSink) {
        sink.vec(&self.0);
    }
}

fn device(name: &str, children: Vec<&dyn Aml>) -> Vec<u8> {
    super::bytes(&Device::new(name.into(), children))
}

fn host_bridge(config: &AcpiConfig) -> Vec<u8> {
    let windows32: Vec<_> = config
        .pci_mmio32
        .iter()
        .map(|window| {
            AddressSpace::new_memory(
                AddressSpaceCacheable::NotCacheable,
                true,
                window.start as u32,
                (window.end - 1) as u32,
                None,
            )
        })
        .collect();
    let window64 = config.pci_mmio64.as_ref().map(|window| {
        AddressSpace::new_memory(
            AddressSpaceCacheable::NotCacheable,
            true,
            window.start,
            window.end - 1,
            None,
        )
    });
    let buses = AddressSpace::new_bus_number(0_u16, u16::from(config.ecam.last_bus));
    let config_ports = IO::new(ports::PCI_CONFIG_ADDRESS, ports::PCI_CONFIG_ADDRESS, 1, 8);
    let io = AddressSpace::new_io(config.pci_io.start, config.pci_io.end, None);
    let mut resources: Vec<&dyn Aml> = vec![&buses, &config_ports, &io];
    resources.extend(windows32.iter().map(|window| window as &dyn Aml));
    resources.extend(window64.iter().map(|window| window as &dyn Aml));

    device(
        "PCI0",
        vec![
            &Name::new("_HID".into(), &EISAName::new("PNP0A08")),
            &Name::new("_CID".into(), &EISAName::new("PNP0A03")),
            &Name::new("_UID".into(), &ZERO),
            &Name::new("_CRS".into(), &ResourceTemplate::new(resources)),
            &Name::new("_PRT".into(), &interrupt_routes(&config.pci_slots)),
            &Raw(osc()),
        ],
    )
}

/// `_PRT`: each pin is wired straight to an I/O APIC input (§6.2.13).
fn interrupt_routes(slots: &[u8]) -> PackageBuilder {
    let mut routes = PackageBuilder::new();
    for &slot in slots {
        for pin in 0..4_u8 {
            routes.add_element(&Package::new(vec![
                &(u32::from(slot) << 16 | ALL_FUNCTIONS),
                &pin,
                &ZERO,
                &(gsi::pci_intx(slot, pin) as u8),
            ]));
        }
    }
    routes
}

/// Grants every native PCIe service that is asked for: there is no firmware to keep one back.
fn osc() -> Vec<u8> {
    let (interface, buffer) = (Arg(0), Arg(3));
    super::bytes(&Method::new(
        "_OSC".into(),
        4,
        false,
        vec![
            &If::new(
                &Equal::new(&interface, &Uuid::new(PCI_OSC_UUID)),
                vec![&Return::new(&buffer)],
            ),
            &Else::new(vec![
                &CreateDWordField::new(&Path::new("CDW1"), &buffer, &ZERO),
                &Or::new(
                    &Path::new("CDW1"),
                    &Path::new("CDW1"),
                    &OSC_UNRECOGNIZED_UUID,
                ),
                &Return::new(&buffer),
            ]),
        ],
    ))
}

fn motherboard(config: &AcpiConfig) -> Vec<u8> {
    let ecam = Memory32Fixed::new(true, config.ecam.base as u32, config.ecam.size_bytes());
    let pm = IO::new(config.pm_base, config.pm_base, 1, ports::PM_LENGTH as u8);
    device(
        "MBRD",
        vec![
            &Name::new("_HID".into(), &EISAName::new("PNP0C02")),
            &Name::new("_CRS".into(), &ResourceTemplate::new(vec![&ecam, &pm])),
        ],
    )
}

/// A device with one range of ports and one edge-triggered interrupt.
fn port_device(name: &str, hid: &str, port: u16, length: u8, interrupt: u32) -> Vec<u8> {
    let io = IO::new(port, port, 1, length);
    let irq = Interrupt::new(true, true, false, false, interrupt);
    device(
        name,
        vec![
            &Name::new("_HID".into(), &EISAName::new(hid)),
            &Name::new("_UID".into(), &ZERO),
            &Name::new("_CRS".into(), &ResourceTemplate::new(vec![&io, &irq])),
        ],
    )
}
