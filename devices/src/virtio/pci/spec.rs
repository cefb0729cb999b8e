//! Numbers of the virtio PCI transport (virtio 1.2 §2.1, §4.1, §6) and where this implementation puts its structures. No behaviour.

use bitflags::bitflags;

/// PCI vendor ID of virtio devices (§4.1.2).
pub(super) const VENDOR: u16 = 0x1af4;
/// PCI device ID of device type 0; the type is added (§4.1.2.1).
pub(super) const DEVICE_BASE: u16 = 0x1040;
/// Revision of a device without the legacy interface.
pub(super) const REVISION: u8 = 1;

bitflags! {
    /// The device status field (§2.1).
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub(super) struct DeviceStatus: u8 {
        const ACKNOWLEDGE = 1;
        const DRIVER = 2;
        const DRIVER_OK = 4;
        const FEATURES_OK = 8;
        const DEVICE_NEEDS_RESET = 64;
        const FAILED = 128;
    }
}

/// The device follows virtio 1.0 or later; a driver that does not accept it is refused (§6).
pub(super) const VIRTIO_F_VERSION_1: u64 = 1 << 32;
/// Queues can be reset one by one (§2.6.1).
pub(super) const VIRTIO_F_RING_RESET: u64 = 1 << 40;
/// Notification suppression by index (§2.7.10).
pub(super) const VIRTIO_RING_F_EVENT_IDX: u64 = 1 << 29;

/// "No vector" in `config_msix_vector` and `queue_msix_vector` (§4.1.5.1.2).
pub(super) const NO_VECTOR: u16 = 0xffff;

/// ISR status (§4.1.4.5): a queue has used buffers.
pub(super) const ISR_QUEUE: u8 = 1;
/// ISR status: the configuration changed.
pub(super) const ISR_CONFIG: u8 = 2;

/// Fields of the common configuration structure (§4.1.4.3).
pub(super) mod common {
    pub(crate) const DEVICE_FEATURE_SELECT: usize = 0;
    pub(crate) const DEVICE_FEATURE: usize = 4;
    pub(crate) const DRIVER_FEATURE_SELECT: usize = 8;
    pub(crate) const DRIVER_FEATURE: usize = 12;
    pub(crate) const CONFIG_MSIX_VECTOR: usize = 16;
    pub(crate) const NUM_QUEUES: usize = 18;
    pub(crate) const DEVICE_STATUS: usize = 20;
    pub(crate) const CONFIG_GENERATION: usize = 21;
    pub(crate) const QUEUE_SELECT: usize = 22;
    pub(crate) const QUEUE_SIZE: usize = 24;
    pub(crate) const QUEUE_MSIX_VECTOR: usize = 26;
    pub(crate) const QUEUE_ENABLE: usize = 28;
    pub(crate) const QUEUE_NOTIFY_OFF: usize = 30;
    pub(crate) const QUEUE_DESC: usize = 32;
    pub(crate) const QUEUE_DRIVER: usize = 40;
    pub(crate) const QUEUE_DEVICE: usize = 48;
    pub(crate) const QUEUE_NOTIFY_DATA: usize = 56;
    pub(crate) const QUEUE_RESET: usize = 58;
    /// Up to and with `queue_reset`: the administration queue fields behind it are not offered.
    pub(crate) const LENGTH: usize = 60;
}

/// The structures that capabilities point to (§4.1.4).
pub(super) mod capability {
    pub(crate) const COMMON: u8 = 1;
    pub(crate) const NOTIFY: u8 = 2;
    pub(crate) const ISR: u8 = 3;
    pub(crate) const DEVICE: u8 = 4;
    pub(crate) const PCI_CONFIG_ACCESS: u8 = 5;
    /// `struct virtio_pci_cap`.
    pub(crate) const LENGTH: u8 = 16;
    /// With `notify_off_multiplier` or `pci_cfg_data` behind it.
    pub(crate) const LONG_LENGTH: u8 = 20;
    pub(crate) const BAR: u8 = 4;
    pub(crate) const OFFSET: u8 = 8;
    pub(crate) const REGION_LENGTH: u8 = 12;
    pub(crate) const PCI_CONFIG_DATA: u8 = 16;
}

/// What lies where in the one BAR: each structure on a page of its own.
pub(super) mod bar {
    /// The BAR's number; it takes the next register too.
    pub(crate) const NUMBER: u8 = 0;
    pub(crate) const SIZE: u64 = 0x1_0000;
    pub(crate) const COMMON: u32 = 0x0000;
    pub(crate) const ISR: u32 = 0x1000;
    pub(crate) const ISR_LENGTH: u32 = 1;
    pub(crate) const DEVICE: u32 = 0x2000;
    pub(crate) const DEVICE_LENGTH: u32 = 0x1000;
    pub(crate) const NOTIFY: u32 = 0x3000;
    pub(crate) const NOTIFY_MULTIPLIER: u32 = 4;
    pub(crate) const MSIX_TABLE: u32 = 0x4000;
    pub(crate) const MSIX_PBA: u32 = 0xc000;
}

/// Most queues of one device: what the notification page has room for.
pub(super) const MAX_QUEUES: usize = 1024;
