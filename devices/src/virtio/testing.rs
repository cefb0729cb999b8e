//! A driver for tests: builds rings in guest memory and plays the guest's side.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::GuestMemory;
use crate::thread::{ThreadRole, Threads};
use crate::virtio::{Activation, ActiveQueue, Pending, VirtioDevice, VirtioInterrupt};

/// How long a test waits for what must happen.
pub(crate) const PATIENCE: Duration = Duration::from_secs(10);

/// Starts plain threads.
pub(crate) struct PlainThreads;

impl Threads for PlainThreads {
    fn spawn(
        &self,
        name: &str,
        _role: ThreadRole,
        body: Box<dyn FnOnce() + Send>,
    ) -> std::io::Result<JoinHandle<()>> {
        assert!(name.len() <= 15, "{name:?} is too long for a thread name");
        std::thread::Builder::new().name(name.into()).spawn(body)
    }
}

/// Counts interrupts.
#[derive(Default)]
pub(crate) struct Interrupts {
    pub(crate) queue: AtomicU64,
    pub(crate) config: AtomicU64,
    pub(crate) needs_reset: AtomicBool,
}

impl VirtioInterrupt for Interrupts {
    fn queue(&self, _index: u16) {
        self.queue.fetch_add(1, Ordering::SeqCst);
    }

    fn config(&self) {
        self.config.fetch_add(1, Ordering::SeqCst);
    }

    fn needs_reset(&self) {
        self.needs_reset.store(true, Ordering::SeqCst);
    }
}

/// RAM and what is left of it to hand out.
pub(crate) struct Guest {
    pub(crate) memory: GuestMemory,
    pub(crate) interrupts: Arc<Interrupts>,
    next: u64,
}

pub(crate) const RAM_BYTES: u64 = 8 << 20;

impl Guest {
    pub(crate) fn new() -> Self {
        let half = usize::try_from(RAM_BYTES / 2).unwrap();
        let ranges = [(GuestAddress(0), half), (GuestAddress(RAM_BYTES / 2), half)];
        Self {
            memory: Arc::new(GuestMemoryMmap::from_ranges(&ranges).unwrap()),
            interrupts: Arc::default(),
            next: 0x1000,
        }
    }

    /// RAM that other processes can map.
    pub(crate) fn shared() -> Self {
        let file = rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let file = Arc::new(std::fs::File::from(file));
        file.set_len(RAM_BYTES).unwrap();
        let half = RAM_BYTES / 2;
        let ranges = [0, half].map(|start| {
            let place = vm_memory::FileOffset::from_arc(Arc::clone(&file), start);
            (
                GuestAddress(start),
                usize::try_from(half).unwrap(),
                Some(place),
            )
        });
        Self {
            memory: Arc::new(GuestMemoryMmap::from_ranges_with_files(ranges).unwrap()),
            ..Self::new()
        }
    }

    pub(crate) fn allocate(&mut self, bytes: u64) -> u64 {
        let address = self.next;
        self.next = (address + bytes).next_multiple_of(64);
        assert!(self.next < RAM_BYTES);
        address
    }

    /// Allocates and fills a buffer.
    pub(crate) fn place(&mut self, bytes: &[u8]) -> u64 {
        let address = self.allocate(bytes.len() as u64);
        self.memory
            .write_slice(bytes, GuestAddress(address))
            .unwrap();
        address
    }

    pub(crate) fn read(&self, address: u64, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        self.memory
            .read_slice(&mut bytes, GuestAddress(address))
            .unwrap();
        bytes
    }

    pub(crate) fn byte(&self, address: u64) -> u8 {
        self.memory.read_obj(GuestAddress(address)).unwrap()
    }

    pub(crate) fn queue(&mut self, index: u16, size: u16) -> DriverQueue {
        let entries = u64::from(size);
        DriverQueue {
            index,
            size,
            descriptors: self.allocate(entries * 16),
            available: self.allocate(entries * 2 + 6),
            used: self.allocate(entries * 8 + 6),
            memory: Arc::clone(&self.memory),
            doorbell: EventFd::new(EFD_NONBLOCK).unwrap(),
            next_descriptor: 0,
            next_available: 0,
            next_used: 0,
        }
    }

    pub(crate) fn activation(&self, features: u64, queues: &[&DriverQueue]) -> Activation {
        Activation {
            memory: Arc::clone(&self.memory),
            features,
            queues: queues.iter().map(|queue| queue.active()).collect(),
            interrupt: Arc::clone(&self.interrupts) as Arc<dyn VirtioInterrupt>,
        }
    }

    pub(crate) fn config_changes(&self) -> u64 {
        self.interrupts.config.load(Ordering::SeqCst)
    }

    pub(crate) fn needs_reset(&self) -> bool {
        self.interrupts.needs_reset.load(Ordering::SeqCst)
    }
}

/// A buffer of a chain.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Part {
    pub(crate) address: u64,
    pub(crate) length: u32,
    pub(crate) writable: bool,
}

pub(crate) fn readable(address: u64, length: usize) -> Part {
    Part {
        address,
        length: u32::try_from(length).unwrap(),
        writable: false,
    }
}

pub(crate) fn writable(address: u64, length: usize) -> Part {
    Part {
        address,
        length: u32::try_from(length).unwrap(),
        writable: true,
    }
}

/// The driver's end of a queue. Descriptors are handed out round and round, never checked for being free.
pub(crate) struct DriverQueue {
    pub(crate) index: u16,
    size: u16,
    descriptors: u64,
    available: u64,
    used: u64,
    memory: GuestMemory,
    doorbell: EventFd,
    next_descriptor: u16,
    next_available: u16,
    next_used: u16,
}

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

impl DriverQueue {
    pub(crate) fn active(&self) -> ActiveQueue {
        let mut queue = Queue::new(1024).unwrap();
        queue.set_size(self.size);
        let halves = |address: u64| {
            (
                Some(address as u32),
                Some(u32::try_from(address >> 32).unwrap()),
            )
        };
        let (low, high) = halves(self.descriptors);
        queue.set_desc_table_address(low, high);
        let (low, high) = halves(self.available);
        queue.set_avail_ring_address(low, high);
        let (low, high) = halves(self.used);
        queue.set_used_ring_address(low, high);
        queue.set_ready(true);
        assert!(queue.is_valid(&*self.memory));
        ActiveQueue {
            index: self.index,
            queue,
            doorbell: self.doorbell.try_clone().unwrap(),
            tracking: None,
        }
    }

    /// Back to empty rings, as a driver does before it enables the queue again.
    pub(crate) fn clear(&mut self) {
        self.next_descriptor = 0;
        self.next_available = 0;
        self.next_used = 0;
        let entries = u64::from(self.size);
        for (address, bytes) in [
            (self.available, entries * 2 + 6),
            (self.used, entries * 8 + 6),
        ] {
            let zeros = vec![0; usize::try_from(bytes).unwrap()];
            self.memory
                .write_slice(&zeros, GuestAddress(address))
                .unwrap();
        }
    }

    /// Writes a descriptor as raw as the device finds it.
    pub(crate) fn descriptor(&self, index: u16, part: Part, flags: u16, next: u16) {
        write_descriptor(&self.memory, self.descriptors, index, part, flags, next);
    }

    /// Makes a chain available without ringing; returns its head.
    pub(crate) fn offer(&mut self, parts: &[Part]) -> u16 {
        let head = self.next_descriptor;
        for (number, part) in parts.iter().enumerate() {
            let index = self.next_descriptor;
            self.next_descriptor = (index + 1) % self.size;
            let more = if number + 1 < parts.len() { NEXT } else { 0 };
            self.descriptor(index, *part, more, self.next_descriptor);
        }
        self.publish(head);
        head
    }

    /// Makes a chain available through an indirect table at `table`.
    pub(crate) fn offer_indirect(&mut self, table: u64, parts: &[Part]) -> u16 {
        for (number, part) in parts.iter().enumerate() {
            let index = u16::try_from(number).unwrap();
            let more = if number + 1 < parts.len() { NEXT } else { 0 };
            write_descriptor(&self.memory, table, index, *part, more, index + 1);
        }
        let head = self.next_descriptor;
        self.next_descriptor = (head + 1) % self.size;
        self.descriptor(head, readable(table, parts.len() * 16), INDIRECT, 0);
        self.publish(head);
        head
    }

    /// Puts a head into the available ring.
    pub(crate) fn publish(&mut self, head: u16) {
        let slot = u64::from(self.next_available % self.size);
        self.memory
            .write_obj(head, GuestAddress(self.available + 4 + slot * 2))
            .unwrap();
        self.next_available = self.next_available.wrapping_add(1);
        self.set_available(self.next_available);
    }

    /// Writes the available ring's index, right or wrong.
    pub(crate) fn set_available(&self, index: u16) {
        self.memory
            .store(index, GuestAddress(self.available + 2), Ordering::Release)
            .unwrap();
    }

    /// VIRTQ_AVAIL_F_NO_INTERRUPT and the like.
    pub(crate) fn set_flags(&self, flags: u16) {
        self.memory
            .store(flags, GuestAddress(self.available), Ordering::Release)
            .unwrap();
    }

    /// With EVENT_IDX: interrupt once the used index passes this.
    pub(crate) fn set_used_event(&self, index: u16) {
        let address = GuestAddress(self.available + 4 + u64::from(self.size) * 2);
        self.memory
            .store(index, address, Ordering::Release)
            .unwrap();
    }

    pub(crate) fn ring(&self) {
        fence(Ordering::SeqCst);
        self.doorbell.write(1).unwrap();
    }

    /// The next used chain, if there is one: head and bytes written.
    pub(crate) fn used(&mut self) -> Option<(u16, u32)> {
        let index: u16 = self
            .memory
            .load(GuestAddress(self.used + 2), Ordering::Acquire)
            .unwrap();
        if index == self.next_used {
            return None;
        }
        let slot = u64::from(self.next_used % self.size);
        let address = self.used + 4 + slot * 8;
        self.next_used = self.next_used.wrapping_add(1);
        let element: u64 = self.memory.read_obj(GuestAddress(address)).unwrap();
        Some((
            u16::try_from(element & 0xffff_ffff).unwrap(),
            (element >> 32) as u32,
        ))
    }

    /// The next used chain; fails the test if it does not come.
    pub(crate) fn wait(&mut self) -> (u16, u32) {
        let mut found = None;
        eventually("a chain to be used", || {
            found = self.used();
            found.is_some()
        });
        found.unwrap()
    }
}

pub(crate) fn write_descriptor(
    memory: &GuestMemory,
    table: u64,
    index: u16,
    part: Part,
    flags: u16,
    next: u16,
) {
    let flags = flags | if part.writable { WRITE } else { 0 };
    let address = table + u64::from(index) * 16;
    let words = u64::from(part.length) | u64::from(flags) << 32 | u64::from(next) << 48;
    memory
        .write_obj(part.address, GuestAddress(address))
        .unwrap();
    memory.write_obj(words, GuestAddress(address + 8)).unwrap();
}

/// Waits for a condition that must come true.
pub(crate) fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < deadline, "waited in vain for {what}");
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// Resets a device and waits for its answer.
pub(crate) fn reset(device: &mut dyn VirtioDevice) {
    assert!(
        device.reset().wait(PATIENCE),
        "the device did not let go of its queues"
    );
}

/// Resets a queue and waits for the answer.
pub(crate) fn reset_queue(device: &mut dyn VirtioDevice, index: u16) {
    let pending: Box<dyn Pending> = device.reset_queue(index);
    assert!(
        pending.wait(PATIENCE),
        "the device did not let go of queue {index}"
    );
    assert!(pending.is_done());
}
