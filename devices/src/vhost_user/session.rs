//! What a client has said so far, and what follows from it: the back end of the vhost-user protocol for one disk.
//!
//! ```text
//!   ring:  stopped ──kick fd──> started ──enable──> served ──disable──> started ──get base──> stopped
//! ```
//!
//! A ring is served while it is started and enabled and the memory that it lies in is known. It stops being served without losing
//! a request: what is under way is answered first, and the ring is taken up again where it was left. So memory may be exchanged under
//! a running guest, as a VMM does while its firmware moves things about.

use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use vhost::VhostUserMemoryRegionBase;
use vhost::vhost_user::message::{
    VhostTransferStateDirection, VhostTransferStatePhase, VhostUserConfigFlags, VhostUserInflight,
    VhostUserLog, VhostUserMemoryRegion, VhostUserProtocolFeatures, VhostUserShMemConfig,
    VhostUserSharedMsg, VhostUserSingleMemoryRegion, VhostUserVringAddrFlags, VhostUserVringState,
};
use vhost::vhost_user::{
    Error, GpuBackend, Result, VhostUserBackendReqHandlerMut, VhostUserVirtioFeatures,
};
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::eventfd::EventFd;

use super::export::Crashes;
use super::record::Record;
use super::signals::{Calls, eventfd};
use super::table::{MAX_REGIONS, MemoryTable};
use crate::virtio::block::Block;
use crate::virtio::block::bits::feature;
use crate::virtio::journal::Tracking;
use crate::virtio::worker::Scope;
use crate::virtio::{Activation, ActiveQueue, VirtioDevice, VirtioInterrupt};

/// The greatest ring that a client may choose.
pub(super) const MAX_RING_SIZE: u16 = 1024;

/// Where `idx` lies in the used ring (virtio 1.2 §2.7.8).
const USED_IDX_OFFSET: u64 = 2;

/// A request that breaks a rule; it ends the client's session.
pub(super) fn refuse(why: &'static str) -> Error {
    Error::ReqHandlerError(io::Error::new(io::ErrorKind::InvalidInput, why))
}

/// Where a ring lies, in the client's own addresses.
#[derive(Clone, Copy)]
struct Places {
    descriptors: u64,
    available: u64,
    used: u64,
}

/// What is known of a ring.
#[derive(Default)]
struct Ring {
    size: u16,
    places: Option<Places>,
    /// The position in the available ring from which to go on.
    next_available: u16,
    /// Started.
    kick: Option<EventFd>,
    enabled: bool,
    served: bool,
}

/// A disk and the client that it is exported to.
pub(super) struct Session {
    device: Block,
    features: u64,
    table: MemoryTable,
    rings: Vec<Ring>,
    calls: Arc<Calls>,
    /// What is under way, in memory that the client keeps for whoever serves it next.
    record: Option<Record>,
    crashes: Crashes,
    /// The device is active, with the present features and memory.
    active: bool,
}

impl Session {
    pub(super) fn new(device: Block, crashes: Crashes) -> Self {
        let rings = device.queue_sizes().len();
        let count = u16::try_from(rings).unwrap_or(u16::MAX);
        Self {
            device,
            features: 0,
            table: MemoryTable::default(),
            rings: (0..rings).map(|_| Ring::default()).collect(),
            calls: Arc::new(Calls::new(count)),
            record: None,
            crashes,
            active: false,
        }
    }

    /// Forgets the client, after answering what is under way.
    pub(super) fn disconnect(&mut self) {
        self.halt(Scope::All);
        self.rings.fill_with(Ring::default);
        self.calls.clear();
        self.table = MemoryTable::default();
        self.record = None;
        self.features = 0;
    }

    /// Whether the device did not keep up with what was asked of it; for whoever decides how the process ends.
    pub(super) fn failures(&self) -> u64 {
        self.device.metrics().failed.load(Ordering::Relaxed)
    }

    fn offered(&self) -> u64 {
        self.device.features()
            | 1 << VIRTIO_F_VERSION_1
            | VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits()
    }

    fn ring(&mut self, index: u32) -> Result<&mut Ring> {
        usize::try_from(index)
            .ok()
            .and_then(|index| self.rings.get_mut(index))
            .ok_or_else(|| refuse("there is no such ring"))
    }

    /// A ring that is not being served and may be changed.
    fn resting_ring(&mut self, index: u32) -> Result<&mut Ring> {
        let ring = self.ring(index)?;
        if ring.served {
            return Err(refuse("a ring cannot be moved while it is served"));
        }
        Ok(ring)
    }

    /// Stops serving rings; each remembers where to go on.
    fn halt(&mut self, scope: Scope) {
        if !self.active {
            return;
        }
        // A device thread that is gone hands nothing back, and serves nothing either.
        let queues = self.device.halt(scope).recv().unwrap_or_default();
        for (index, queue) in queues {
            if let Some(ring) = self.rings.get_mut(usize::from(index)) {
                ring.next_available = queue.next_avail();
                ring.served = false;
            }
        }
        if scope == Scope::All {
            self.active = false;
        }
    }

    /// Makes a change that no ring may be served during.
    fn change<T>(&mut self, change: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        self.halt(Scope::All);
        let result = change(self)?;
        self.refresh_all()?;
        Ok(result)
    }

    fn refresh_all(&mut self) -> Result<()> {
        for index in 0..self.rings.len() {
            self.refresh(u16::try_from(index).unwrap_or(u16::MAX))?;
        }
        Ok(())
    }

    /// Serves a ring, or stops serving it, as its state asks for.
    fn refresh(&mut self, index: u16) -> Result<()> {
        let known = self.table.memory().is_some();
        let ring = self.ring(index.into())?;
        let wanted = known && ring.enabled && ring.kick.is_some() && ring.places.is_some();
        match (wanted, ring.served) {
            (true, false) => self.serve(index),
            (false, true) => {
                self.halt(Scope::Queue(index));
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn serve(&mut self, index: u16) -> Result<()> {
        let memory = self.table.memory().ok_or(Error::InvalidParam)?.clone();
        let ring = self
            .rings
            .get(usize::from(index))
            .ok_or(Error::InvalidParam)?;
        let (Some(places), Some(kick)) = (ring.places, &ring.kick) else {
            return Err(Error::InvalidParam);
        };
        let mut queue = Queue::new(MAX_RING_SIZE).map_err(|_| refuse("the ring's size"))?;
        queue.set_size(ring.size);
        let used = self.table.guest_address(places.used)?;
        let (low, high) = halves(self.table.guest_address(places.descriptors)?);
        queue.set_desc_table_address(low, high);
        let (low, high) = halves(self.table.guest_address(places.available)?);
        queue.set_avail_ring_address(low, high);
        let (low, high) = halves(used);
        queue.set_used_ring_address(low, high);
        let next_used: u16 = used
            .checked_add(USED_IDX_OFFSET)
            .and_then(|at| memory.load(GuestAddress(at), Ordering::Acquire).ok())
            .ok_or_else(|| refuse("the used ring is not in memory"))?;
        queue.set_next_avail(ring.next_available);
        queue.set_next_used(next_used);
        queue.set_ready(true);
        if queue.size() != ring.size || !queue.is_valid(&*memory) {
            return Err(refuse("the ring does not lie in memory"));
        }
        let doorbell = kick.try_clone().map_err(Error::ReqHandlerError)?;
        let tracking = match &self.record {
            Some(record) => {
                let mut journal = record.journal(index, queue.size())?;
                let heads = journal.recover(next_used).map_err(other)?;
                // What was under way was taken already, whatever the client believes.
                let taken = u16::try_from(heads.len()).unwrap_or(u16::MAX);
                queue.set_next_avail(next_used.wrapping_add(taken));
                let again = self.list_again(index, &queue, &heads)?;
                Some(Tracking { journal, again })
            }
            None => None,
        };
        let queue = ActiveQueue {
            index,
            queue,
            doorbell,
            tracking,
        };
        let started = if self.active {
            self.device.enable_queue(queue)
        } else {
            // To the device, a driver that does not flush: each write is durable when it is answered.
            let hidden = match self.crashes {
                Crashes::LoseCache => 0,
                Crashes::LoseNothing => feature::FLUSH,
            };
            self.device.activate(Activation {
                memory,
                features: self.features & !hidden,
                queues: vec![queue],
                interrupt: Arc::clone(&self.calls) as Arc<dyn VirtioInterrupt>,
            })
        };
        started.map_err(other)?;
        self.active = true;
        self.ring(index.into())?.served = true;
        Ok(())
    }

    /// A queue that consists of these heads only, over the descriptors of `queue`.
    fn list_again(&self, index: u16, queue: &Queue, heads: &[u16]) -> Result<Option<Queue>> {
        let Some(memory) = self.table.memory().filter(|_| !heads.is_empty()) else {
            return Ok(None);
        };
        tracing::info!(ring = index, requests = heads.len(), "begun again");
        let page = self.table.spare_page(index);
        // An available ring: flags, idx, heads (virtio 1.2 §2.7.6).
        let count = u16::try_from(heads.len()).map_err(|_| refuse("too many requests"))?;
        let words = [0, count].into_iter().chain(heads.iter().copied());
        let bytes: Vec<u8> = words.flat_map(u16::to_le_bytes).collect();
        memory.write_slice(&bytes, page).map_err(other)?;
        let mut again = Queue::new(MAX_RING_SIZE).map_err(other)?;
        again.set_size(queue.size());
        let (low, high) = halves(queue.desc_table());
        again.set_desc_table_address(low, high);
        let (low, high) = halves(page.0);
        again.set_avail_ring_address(low, high);
        let (low, high) = halves(queue.used_ring());
        again.set_used_ring_address(low, high);
        again.set_ready(true);
        Ok(Some(again))
    }

    /// All rings stopped, disabled and forgotten.
    fn stop(&mut self) {
        self.halt(Scope::All);
        self.rings.fill_with(Ring::default);
    }
}

pub(super) fn other(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Error {
    Error::ReqHandlerError(io::Error::other(error))
}

fn halves(address: u64) -> (Option<u32>, Option<u32>) {
    let [low, high] = [address & 0xffff_ffff, address >> 32];
    (u32::try_from(low).ok(), u32::try_from(high).ok())
}

fn ring_number(index: u32) -> Result<u16> {
    u16::try_from(index).map_err(|_| refuse("there is no such ring"))
}

impl VhostUserBackendReqHandlerMut for Session {
    fn set_owner(&mut self) -> Result<()> {
        Ok(())
    }

    fn reset_owner(&mut self) -> Result<()> {
        self.stop();
        Ok(())
    }

    fn reset_device(&mut self) -> Result<()> {
        self.stop();
        Ok(())
    }

    fn get_features(&mut self) -> Result<u64> {
        Ok(self.offered())
    }

    fn set_features(&mut self, features: u64) -> Result<()> {
        if features & !self.offered() != 0 {
            return Err(refuse("features that were not offered"));
        }
        self.change(|session| {
            session.features = features;
            // Without the protocol features there is no message that enables a ring.
            if features & VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits() == 0 {
                for ring in &mut session.rings {
                    ring.enabled = true;
                }
            }
            Ok(())
        })
    }

    fn set_mem_table(
        &mut self,
        regions: &[VhostUserMemoryRegion],
        files: Vec<File>,
        _postcopy_listening: Option<bool>,
    ) -> Result<Option<Vec<VhostUserMemoryRegionBase>>> {
        let table = MemoryTable::new(regions, files)?;
        self.change(|session| {
            session.table = table;
            Ok(None)
        })
    }

    fn set_vring_num(&mut self, index: u32, num: u32) -> Result<()> {
        let size = u16::try_from(num)
            .ok()
            .filter(|size| size.is_power_of_two() && (2..=MAX_RING_SIZE).contains(size))
            .ok_or_else(|| refuse("a ring has 2 to 1024 (2^n) entries"))?;
        self.resting_ring(index)?.size = size;
        Ok(())
    }

    fn set_vring_addr(
        &mut self,
        index: u32,
        flags: VhostUserVringAddrFlags,
        descriptor: u64,
        used: u64,
        available: u64,
        _log: u64,
    ) -> Result<()> {
        if !flags.is_empty() {
            return Err(refuse("logging was not offered"));
        }
        self.resting_ring(index)?.places = Some(Places {
            descriptors: descriptor,
            available,
            used,
        });
        self.refresh(ring_number(index)?)
    }

    fn set_vring_base(&mut self, index: u32, base: u32) -> Result<()> {
        let base = u16::try_from(base).map_err(|_| refuse("a base has 16 bits"))?;
        self.resting_ring(index)?.next_available = base;
        Ok(())
    }

    fn get_vring_base(&mut self, index: u32) -> Result<VhostUserVringState> {
        let number = ring_number(index)?;
        self.ring(index)?.kick = None;
        self.refresh(number)?;
        let ring = self.ring(index)?;
        Ok(VhostUserVringState::new(index, ring.next_available.into()))
    }

    fn set_vring_kick(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        let file = fd.ok_or_else(|| refuse("rings are not polled: a kick descriptor is needed"))?;
        let kick = eventfd(file)?;
        let number = u16::from(index);
        if self.ring(index.into())?.served {
            self.halt(Scope::Queue(number));
        }
        self.ring(index.into())?.kick = Some(kick);
        self.refresh(number)
    }

    fn set_vring_call(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        self.ring(index.into())?;
        self.calls
            .set_call(index.into(), fd.map(eventfd).transpose()?);
        Ok(())
    }

    fn set_vring_err(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        self.ring(index.into())?;
        self.calls
            .set_error(index.into(), fd.map(eventfd).transpose()?);
        Ok(())
    }

    fn get_protocol_features(&mut self) -> Result<VhostUserProtocolFeatures> {
        let features = VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS
            | VhostUserProtocolFeatures::RESET_DEVICE
            | VhostUserProtocolFeatures::REPLY_ACK;
        Ok(match self.crashes {
            Crashes::LoseCache => features,
            Crashes::LoseNothing => features | VhostUserProtocolFeatures::INFLIGHT_SHMFD,
        })
    }

    fn set_protocol_features(&mut self, features: u64) -> Result<()> {
        if features & !self.get_protocol_features()?.bits() != 0 {
            return Err(refuse("protocol features that were not offered"));
        }
        Ok(())
    }

    fn get_queue_num(&mut self) -> Result<u64> {
        Ok(self.rings.len() as u64)
    }

    fn set_vring_enable(&mut self, index: u32, enable: bool) -> Result<()> {
        self.ring(index)?.enabled = enable;
        self.refresh(ring_number(index)?)
    }

    fn get_config(
        &mut self,
        offset: u32,
        size: u32,
        _flags: VhostUserConfigFlags,
    ) -> Result<Vec<u8>> {
        // The size was checked against that of a message.
        let mut bytes = vec![0; usize::try_from(size).unwrap_or_default()];
        self.device.read_config(offset.into(), &mut bytes);
        Ok(bytes)
    }

    fn set_config(&mut self, offset: u32, buf: &[u8], _flags: VhostUserConfigFlags) -> Result<()> {
        self.device.write_config(offset.into(), buf);
        Ok(())
    }

    fn set_gpu_socket(&mut self, _gpu_backend: GpuBackend) -> Result<()> {
        Err(refuse("a disk has no GPU"))
    }

    fn get_shared_object(&mut self, _uuid: VhostUserSharedMsg) -> Result<File> {
        Err(refuse("a disk shares no objects"))
    }

    fn get_inflight_fd(
        &mut self,
        inflight: &VhostUserInflight,
    ) -> Result<(VhostUserInflight, File)> {
        Record::make(inflight)
    }

    fn set_inflight_fd(&mut self, inflight: &VhostUserInflight, file: File) -> Result<()> {
        let record = Record::map(inflight, file)?;
        self.change(|session| {
            session.record = Some(record);
            Ok(())
        })
    }

    fn get_max_mem_slots(&mut self) -> Result<u64> {
        Ok(MAX_REGIONS as u64)
    }

    fn add_mem_region(
        &mut self,
        region: &VhostUserSingleMemoryRegion,
        fd: File,
        _postcopy_listening: Option<bool>,
    ) -> Result<Option<VhostUserMemoryRegionBase>> {
        self.change(|session| session.table.add(region, fd))?;
        Ok(None)
    }

    fn remove_mem_region(&mut self, region: &VhostUserSingleMemoryRegion) -> Result<()> {
        self.change(|session| session.table.remove(region))
    }

    fn set_device_state_fd(
        &mut self,
        _direction: VhostTransferStateDirection,
        _phase: VhostTransferStatePhase,
        _fd: File,
    ) -> Result<Option<File>> {
        Err(refuse("a disk has no state of its own"))
    }

    fn check_device_state(&mut self) -> Result<()> {
        Err(refuse("a disk has no state of its own"))
    }

    fn get_shmem_config(&mut self) -> Result<VhostUserShMemConfig> {
        Err(refuse("a disk shares no memory"))
    }

    fn set_log_base(&mut self, _log: &VhostUserLog, _file: File) -> Result<()> {
        Err(refuse("logging was not offered"))
    }
}
