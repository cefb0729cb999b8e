//! The common configuration structure (virtio 1.2 §4.1.4.3) as a register file: it stores, checks and says what has to happen.
//! Acting on it is the transport's part.
//!
//! ```text
//! device_status   0 ──> ACKNOWLEDGE ──> DRIVER ──> FEATURES_OK ──> DRIVER_OK      0 written: Effect::Reset
//!                                                  │ refused unless the driver's   └ Effect::Activate
//!                                                  │ features are offered ones and
//!                                                  └ VERSION_1 is among them
//! ```
//!
//! Bits of `device_status` are only ever added; features freeze with FEATURES_OK, a queue's registers while it is enabled.

use serde::{Deserialize, Serialize};
use virtio_queue::{Queue, QueueState, QueueT};

use super::spec::{
    DeviceStatus, VIRTIO_F_RING_RESET, VIRTIO_F_VERSION_1, VIRTIO_RING_F_EVENT_IDX, common,
};
use crate::GuestMemory;

/// What a register write asks the transport to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Effect {
    /// Nothing more.
    None,
    /// The driver broke a rule; nothing was stored.
    DriverError,
    /// Reset the device.
    Reset,
    /// DRIVER_OK was set: start serving.
    Activate,
    /// The queue is to be enabled; its registers have not been checked yet.
    EnableQueue(u16),
    /// The queue is to be reset.
    ResetQueue(u16),
    /// Configuration changes go to this MSI-X vector.
    ConfigVector(u16),
    /// This queue's interrupts go to this MSI-X vector.
    QueueVector(u16, u16),
}

/// A queue's rings are not such that the device could use them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum QueueError {
    #[error("its size or the alignment of a ring is wrong")]
    Layout,
    #[error("a ring is not in guest memory")]
    NotInMemory,
}

/// One queue's registers.
#[derive(Clone, Debug)]
pub(super) struct QueueRegisters {
    pub(super) max_size: u16,
    pub(super) size: u16,
    pub(super) enabled: bool,
    pub(super) desc: u64,
    pub(super) driver: u64,
    pub(super) device: u64,
}

/// A queue's registers as they are saved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueueRegistersState {
    /// `queue_size`
    pub size: u16,
    /// `queue_enable`
    pub enabled: bool,
    /// `queue_desc`: guest physical address of the descriptor table.
    pub desc: u64,
    /// `queue_driver`: guest physical address of the available ring.
    pub driver: u64,
    /// `queue_device`: guest physical address of the used ring.
    pub device: u64,
}

/// The register file as it is saved. Vectors are saved with the interrupts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CommonConfigState {
    /// `device_feature_select`
    pub device_feature_select: u32,
    /// `driver_feature_select`
    pub driver_feature_select: u32,
    /// Features the driver has accepted so far.
    pub driver_features: u64,
    /// `device_status` without DEVICE_NEEDS_RESET.
    pub device_status: u8,
    /// `queue_select`
    pub queue_select: u16,
    /// One for each queue.
    pub queues: Vec<QueueRegistersState>,
}

/// What the driver reads but this file does not hold.
#[derive(Clone, Copy, Debug)]
pub(super) struct Live {
    pub(super) config_vector: u16,
    pub(super) queue_vector: u16,
    pub(super) generation: u8,
    pub(super) needs_reset: bool,
    pub(super) queue_resetting: bool,
}

#[derive(Clone, Debug)]
pub(super) struct CommonConfig {
    offered: u64,
    device_feature_select: u32,
    driver_feature_select: u32,
    driver_features: u64,
    status: DeviceStatus,
    queue_select: u16,
    queues: Vec<QueueRegisters>,
}

impl QueueRegisters {
    fn new(max_size: u16) -> QueueRegisters {
        QueueRegisters {
            max_size,
            size: max_size,
            enabled: false,
            desc: 0,
            driver: 0,
            device: 0,
        }
    }

    /// The queue these registers describe, if all of it lies in guest memory.
    pub(super) fn build(
        &self,
        memory: &GuestMemory,
        features: u64,
        next_avail: u16,
        next_used: u16,
    ) -> Result<Queue, QueueError> {
        let queue = Queue::try_from(QueueState {
            max_size: self.max_size,
            next_avail,
            next_used,
            event_idx_enabled: features & VIRTIO_RING_F_EVENT_IDX != 0,
            size: self.size,
            ready: true,
            desc_table: self.desc,
            avail_ring: self.driver,
            used_ring: self.device,
        })
        .map_err(|_| QueueError::Layout)?;
        if queue.is_valid(memory.as_ref()) {
            Ok(queue)
        } else {
            Err(QueueError::NotInMemory)
        }
    }
}

impl CommonConfig {
    pub(super) fn new(device_features: u64, queue_sizes: &[u16]) -> CommonConfig {
        CommonConfig {
            offered: device_features | VIRTIO_F_VERSION_1 | VIRTIO_F_RING_RESET,
            device_feature_select: 0,
            driver_feature_select: 0,
            driver_features: 0,
            status: DeviceStatus::empty(),
            queue_select: 0,
            queues: queue_sizes
                .iter()
                .map(|size| QueueRegisters::new(*size))
                .collect(),
        }
    }

    /// What both sides accepted; meaningful once FEATURES_OK is set.
    pub(super) fn negotiated(&self) -> u64 {
        self.driver_features & self.offered
    }

    pub(super) fn status(&self) -> DeviceStatus {
        self.status
    }

    pub(super) fn queues(&self) -> &[QueueRegisters] {
        &self.queues
    }

    pub(super) fn selected_queue(&self) -> u16 {
        self.queue_select
    }

    pub(super) fn set_enabled(&mut self, queue: u16) {
        if let Some(queue) = self.queues.get_mut(usize::from(queue)) {
            queue.enabled = true;
        }
    }

    pub(super) fn reset_queue(&mut self, queue: u16) {
        if let Some(queue) = self.queues.get_mut(usize::from(queue)) {
            *queue = QueueRegisters::new(queue.max_size);
        }
    }

    pub(super) fn reset(&mut self) {
        self.device_feature_select = 0;
        self.driver_feature_select = 0;
        self.driver_features = 0;
        self.status = DeviceStatus::empty();
        self.queue_select = 0;
        for queue in &mut self.queues {
            *queue = QueueRegisters::new(queue.max_size);
        }
    }

    /// Reads at any offset and width.
    pub(super) fn read(&self, live: Live, offset: usize, data: &mut [u8]) {
        let mut image = [0; common::LENGTH];
        let mut put = |at: usize, bytes: &[u8]| image[at..at + bytes.len()].copy_from_slice(bytes);
        let device_feature = half(self.offered, self.device_feature_select);
        let driver_feature = half(self.driver_features, self.driver_feature_select);
        let select = self.device_feature_select.to_le_bytes();
        put(common::DEVICE_FEATURE_SELECT, &select);
        put(common::DEVICE_FEATURE, &device_feature.to_le_bytes());
        let select = self.driver_feature_select.to_le_bytes();
        put(common::DRIVER_FEATURE_SELECT, &select);
        put(common::DRIVER_FEATURE, &driver_feature.to_le_bytes());
        put(
            common::CONFIG_MSIX_VECTOR,
            &live.config_vector.to_le_bytes(),
        );
        let count = u16::try_from(self.queues.len()).unwrap_or(u16::MAX);
        put(common::NUM_QUEUES, &count.to_le_bytes());
        let mut status = self.status;
        status.set(DeviceStatus::DEVICE_NEEDS_RESET, live.needs_reset);
        put(common::DEVICE_STATUS, &[status.bits()]);
        put(common::CONFIG_GENERATION, &[live.generation]);
        put(common::QUEUE_SELECT, &self.queue_select.to_le_bytes());
        // A queue that does not exist has size 0 (§4.1.4.3.2).
        if let Some(queue) = self.queues.get(usize::from(self.queue_select)) {
            put(common::QUEUE_SIZE, &queue.size.to_le_bytes());
            put(common::QUEUE_MSIX_VECTOR, &live.queue_vector.to_le_bytes());
            put(
                common::QUEUE_ENABLE,
                &u16::from(queue.enabled).to_le_bytes(),
            );
            put(common::QUEUE_NOTIFY_OFF, &self.queue_select.to_le_bytes());
            put(common::QUEUE_DESC, &queue.desc.to_le_bytes());
            put(common::QUEUE_DRIVER, &queue.driver.to_le_bytes());
            put(common::QUEUE_DEVICE, &queue.device.to_le_bytes());
            put(common::QUEUE_NOTIFY_DATA, &self.queue_select.to_le_bytes());
            let resetting = u16::from(live.queue_resetting);
            put(common::QUEUE_RESET, &resetting.to_le_bytes());
        }
        for (at, byte) in (offset..).zip(data) {
            *byte = image.get(at).copied().unwrap_or(0);
        }
    }

    /// Writes one field in its own width, or half of a 64-bit one (§4.1.3.1). Everything else has no effect.
    pub(super) fn write(&mut self, offset: usize, data: &[u8]) -> Effect {
        match (offset, data.len()) {
            (common::DEVICE_FEATURE_SELECT, 4) => self.device_feature_select = value(data) as u32,
            (common::DRIVER_FEATURE_SELECT, 4) => self.driver_feature_select = value(data) as u32,
            (common::DRIVER_FEATURE, 4) => return self.write_driver_feature(value(data) as u32),
            (common::CONFIG_MSIX_VECTOR, 2) => return Effect::ConfigVector(value(data) as u16),
            (common::DEVICE_STATUS, 1) => return self.write_status(value(data) as u8),
            (common::QUEUE_SELECT, 2) => self.queue_select = value(data) as u16,
            (common::QUEUE_MSIX_VECTOR, 2) => {
                let exists = usize::from(self.queue_select) < self.queues.len();
                return if exists {
                    Effect::QueueVector(self.queue_select, value(data) as u16)
                } else {
                    Effect::DriverError
                };
            }
            (common::QUEUE_ENABLE, 2) => return self.write_queue_enable(value(data) as u16),
            (common::QUEUE_RESET, 2) => return self.write_queue_reset(value(data) as u16),
            (common::QUEUE_SIZE, 2) => return self.write_queue_size(value(data) as u16),
            (common::QUEUE_DESC..common::QUEUE_NOTIFY_DATA, 4 | 8) => {
                return self.write_queue_address(offset, data);
            }
            _ => return Effect::DriverError,
        }
        Effect::None
    }

    fn write_driver_feature(&mut self, bits: u32) -> Effect {
        let shift = match self.driver_feature_select {
            0 => 0,
            1 => 32,
            // Nothing is offered there, and drivers may clear it.
            _ if bits == 0 => return Effect::None,
            _ => return Effect::DriverError,
        };
        if self.status.contains(DeviceStatus::FEATURES_OK) {
            return Effect::DriverError;
        }
        let others = self.driver_features & !(u64::from(u32::MAX) << shift);
        self.driver_features = others | u64::from(bits) << shift;
        Effect::None
    }

    fn write_status(&mut self, written: u8) -> Effect {
        if written == 0 {
            return Effect::Reset;
        }
        let written = DeviceStatus::from_bits_truncate(written) - DeviceStatus::DEVICE_NEEDS_RESET;
        let mut added = written - self.status;
        let mut effect = Effect::None;
        if added.contains(DeviceStatus::FEATURES_OK) && !self.features_are_acceptable() {
            added -= DeviceStatus::FEATURES_OK;
            effect = Effect::DriverError;
        }
        if added.contains(DeviceStatus::DRIVER_OK) {
            if (self.status | added).contains(DeviceStatus::FEATURES_OK) {
                effect = Effect::Activate;
            } else {
                added -= DeviceStatus::DRIVER_OK;
                effect = Effect::DriverError;
            }
        }
        self.status |= added;
        effect
    }

    fn features_are_acceptable(&self) -> bool {
        self.driver_features & !self.offered == 0 && self.driver_features & VIRTIO_F_VERSION_1 != 0
    }

    fn ring_reset_negotiated(&self) -> bool {
        self.status.contains(DeviceStatus::FEATURES_OK)
            && self.negotiated() & VIRTIO_F_RING_RESET != 0
    }

    fn write_queue_enable(&mut self, written: u16) -> Effect {
        let running = self.status.contains(DeviceStatus::DRIVER_OK);
        let may_enable = !running || self.ring_reset_negotiated();
        match self.queues.get(usize::from(self.queue_select)) {
            Some(queue) if written == 1 && queue.enabled => Effect::None,
            Some(_) if written == 1 && may_enable => Effect::EnableQueue(self.queue_select),
            _ => Effect::DriverError,
        }
    }

    fn write_queue_reset(&mut self, written: u16) -> Effect {
        match self.queues.get(usize::from(self.queue_select)) {
            Some(_) if written == 1 && self.ring_reset_negotiated() => {
                Effect::ResetQueue(self.queue_select)
            }
            _ => Effect::DriverError,
        }
    }

    fn write_queue_size(&mut self, size: u16) -> Effect {
        match self.configurable_queue() {
            Some(queue) if size.is_power_of_two() && size <= queue.max_size => {
                queue.size = size;
                Effect::None
            }
            _ => Effect::DriverError,
        }
    }

    fn write_queue_address(&mut self, offset: usize, data: &[u8]) -> Effect {
        let at = offset % 8;
        let Some(queue) = self.configurable_queue() else {
            return Effect::DriverError;
        };
        let field = match offset - at {
            common::QUEUE_DESC => &mut queue.desc,
            common::QUEUE_DRIVER => &mut queue.driver,
            _ => &mut queue.device,
        };
        let mut bytes = field.to_le_bytes();
        match bytes.get_mut(at..at + data.len()) {
            Some(part) if at.is_multiple_of(4) => part.copy_from_slice(data),
            _ => return Effect::DriverError,
        }
        *field = u64::from_le_bytes(bytes);
        Effect::None
    }

    /// The selected queue, if it exists and its registers may be changed.
    fn configurable_queue(&mut self) -> Option<&mut QueueRegisters> {
        let queue = self.queues.get_mut(usize::from(self.queue_select))?;
        (!queue.enabled).then_some(queue)
    }

    pub(super) fn save(&self) -> CommonConfigState {
        CommonConfigState {
            device_feature_select: self.device_feature_select,
            driver_feature_select: self.driver_feature_select,
            driver_features: self.driver_features,
            device_status: self.status.bits(),
            queue_select: self.queue_select,
            queues: self
                .queues
                .iter()
                .map(|queue| QueueRegistersState {
                    size: queue.size,
                    enabled: queue.enabled,
                    desc: queue.desc,
                    driver: queue.driver,
                    device: queue.device,
                })
                .collect(),
        }
    }

    /// Takes saved registers; says which rule they break without changing anything.
    pub(super) fn restore(&mut self, state: &CommonConfigState) -> Result<(), &'static str> {
        if state.queues.len() != self.queues.len() {
            return Err("the number of queues differs");
        }
        let status = DeviceStatus::from_bits(state.device_status)
            .ok_or("device_status has unknown bits")?
            - DeviceStatus::DEVICE_NEEDS_RESET;
        let mut restored = CommonConfig {
            device_feature_select: state.device_feature_select,
            driver_feature_select: state.driver_feature_select,
            driver_features: state.driver_features,
            status,
            queue_select: state.queue_select,
            ..self.clone()
        };
        if status.contains(DeviceStatus::FEATURES_OK) && !restored.features_are_acceptable() {
            return Err("a negotiated feature is not offered here");
        }
        for (queue, saved) in restored.queues.iter_mut().zip(&state.queues) {
            if !saved.size.is_power_of_two() || saved.size > queue.max_size {
                return Err("a queue is greater than is offered here");
            }
            queue.size = saved.size;
            queue.enabled = saved.enabled;
            queue.desc = saved.desc;
            queue.driver = saved.driver;
            queue.device = saved.device;
        }
        *self = restored;
        Ok(())
    }
}

/// The 32 feature bits that a select register chooses.
fn half(features: u64, select: u32) -> u32 {
    match select {
        0 => features as u32,
        1 => (features >> 32) as u32,
        _ => 0,
    }
}

/// At most eight little-endian bytes.
fn value(data: &[u8]) -> u64 {
    data.iter()
        .take(8)
        .rev()
        .fold(0, |value, byte| value << 8 | u64::from(*byte))
}
