//! Lays out the configuration space of a virtio PCI function: identity, BAR and capabilities (virtio 1.2 §4.1.2, §4.1.4).
//!
//! It is a conventional PCI function on the root bus: without a PCI Express capability the guest has no extended configuration space
//! to look through; and there are no optional capabilities, as guests walk the list many times at boot. Both save exits.

use super::spec::{DEVICE_BASE, MAX_QUEUES, NO_VECTOR, REVISION, VENDOR, bar, capability, common};
use crate::pci::IntxPin;
use crate::pci::bits::CAPABILITY_VENDOR;
use crate::pci::config::{BarKind, ConfigSpace, Identity, LayoutError};
use crate::pci::msix::{self, MsixLayout};
use crate::virtio::DeviceType;

/// A configuration space and where to find in it what the transport looks at.
pub(super) struct Layout {
    pub(super) config: ConfigSpace,
    /// MSI-X Message Control.
    pub(super) message_control: u8,
    /// The capability for access through configuration space (§4.1.4.9).
    pub(super) config_access: u8,
}

/// A vector for each queue and one for configuration changes, as far as the table has room.
pub(super) fn vectors(queues: usize) -> u16 {
    u16::try_from(queues.min(MAX_QUEUES) + 1).unwrap_or(NO_VECTOR)
}

pub(super) fn build(device_type: DeviceType, queues: usize) -> Result<Layout, LayoutError> {
    let id = device_type as u16;
    let mut config = ConfigSpace::new(Identity {
        vendor: VENDOR,
        device: DEVICE_BASE + id,
        revision: REVISION,
        class: class(device_type),
        subsystem_vendor: VENDOR,
        subsystem: DEVICE_BASE + id,
    });
    config.add_bar(bar::NUMBER, BarKind::Memory64, bar::SIZE)?;
    config.set_interrupt_pin(IntxPin::A);
    let layout = MsixLayout {
        bar: bar::NUMBER,
        table_offset: bar::MSIX_TABLE,
        pba_offset: bar::MSIX_PBA,
    };
    let message_control = msix::add_capability(&mut config, layout, vectors(queues))?;
    let notify_length = bar::NOTIFY_MULTIPLIER * queues as u32;
    let structures = [
        (capability::COMMON, bar::COMMON, common::LENGTH as u32),
        (capability::ISR, bar::ISR, bar::ISR_LENGTH),
        (capability::DEVICE, bar::DEVICE, bar::DEVICE_LENGTH),
    ];
    // Only devices that have a configuration of their own announce it (§4.1.4.6.1).
    let has_config = !matches!(device_type, DeviceType::Rng);
    let announced = |kind| has_config || kind != capability::DEVICE;
    for (kind, offset, length) in structures.into_iter().filter(|(kind, ..)| announced(*kind)) {
        let body = structure(kind, capability::LENGTH, offset, length);
        config.add_capability(CAPABILITY_VENDOR, &body, &[])?;
    }
    let mut notify = structure(
        capability::NOTIFY,
        capability::LONG_LENGTH,
        bar::NOTIFY,
        notify_length,
    )
    .to_vec();
    notify.extend(bar::NOTIFY_MULTIPLIER.to_le_bytes());
    config.add_capability(CAPABILITY_VENDOR, &notify, &[])?;
    let config_access = add_config_access(&mut config)?;
    Ok(Layout {
        config,
        message_control,
        config_access,
    })
}

/// `struct virtio_pci_cap` behind capability ID and next pointer.
fn structure(kind: u8, cap_length: u8, offset: u32, length: u32) -> [u8; 14] {
    let mut body = [0; 14];
    body[0] = cap_length;
    body[1] = kind;
    body[2] = bar::NUMBER;
    body[usize::from(capability::OFFSET) - 2..][..4].copy_from_slice(&offset.to_le_bytes());
    body[usize::from(capability::REGION_LENGTH) - 2..][..4].copy_from_slice(&length.to_le_bytes());
    body
}

/// The window onto the BAR: the driver writes bar, offset, length and data.
fn add_config_access(config: &mut ConfigSpace) -> Result<u8, LayoutError> {
    let kind = capability::PCI_CONFIG_ACCESS;
    let mut body = structure(kind, capability::LONG_LENGTH, 0, 0).to_vec();
    body.extend([0; 4]);
    let mut writable = vec![0; body.len()];
    writable[usize::from(capability::BAR) - 2] = 0xff;
    writable[usize::from(capability::OFFSET) - 2..].fill(0xff);
    config.add_capability(CAPABILITY_VENDOR, &body, &writable)
}

/// The class code, `0xCCSSPP`, which drivers do not look at but people do.
fn class(device_type: DeviceType) -> u32 {
    match device_type {
        DeviceType::Net => 0x02_00_00,
        DeviceType::Block => 0x01_80_00,
        DeviceType::Console => 0x07_80_00,
        DeviceType::Rng => 0x10_80_00,
        DeviceType::Balloon => 0x05_00_00,
        DeviceType::Vsock => 0x07_80_00,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pci::bits::CAPABILITIES_POINTER;

    /// Types of the virtio structures in list order.
    fn structures(device_type: DeviceType) -> Vec<u8> {
        let config = build(device_type, 1).unwrap().config;
        let byte = |at: u8| {
            let mut data = [0];
            config.read(at.into(), &mut data);
            data[0]
        };
        let first = Some(byte(CAPABILITIES_POINTER));
        let list = std::iter::successors(first, |at| Some(byte(at + 1)).filter(|next| *next != 0));
        list.filter(|at| byte(*at) == CAPABILITY_VENDOR)
            .map(|at| byte(at + 3))
            .collect()
    }

    #[test]
    fn only_a_device_with_a_configuration_of_its_own_announces_one() {
        assert_eq!(structures(DeviceType::Net), [1, 3, 4, 2, 5]);
        assert_eq!(structures(DeviceType::Rng), [1, 3, 2, 5]);
    }
}
