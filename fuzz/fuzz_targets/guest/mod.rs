//! A guest whose RAM is the fuzzer's input: a queue of 16 at fixed places, everything else as it falls.

use drover_devices::virtio::queue::Chain;
use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

/// Bytes of RAM, in two regions.
pub const RAM_BYTES: u64 = 0x10000;

const SIZE: u16 = 16;
const DESCRIPTORS: u32 = 0x100;
const AVAILABLE: u32 = 0x200;
const USED: u32 = 0x240;

/// RAM with `data` where the descriptors start, as far as it reaches, and 16 available chains.
pub fn memory(data: &[u8]) -> GuestMemoryMmap<()> {
    let half = (RAM_BYTES / 2) as usize;
    let ranges = [(GuestAddress(0), half), (GuestAddress(RAM_BYTES / 2), half)];
    let memory = GuestMemoryMmap::from_ranges(&ranges).expect("RAM");
    let data = &data[..data.len().min(RAM_BYTES as usize - DESCRIPTORS as usize)];
    memory.write_slice(data, GuestAddress(DESCRIPTORS.into())).expect("input in RAM");
    memory.write_obj(SIZE, GuestAddress(u64::from(AVAILABLE) + 2)).expect("index");
    memory
}

/// Calls `each` for every available chain.
pub fn for_each_chain(memory: &GuestMemoryMmap<()>, mut each: impl FnMut(Chain<'_>)) {
    let mut queue = Queue::new(SIZE).expect("queue");
    queue.set_desc_table_address(Some(DESCRIPTORS), Some(0));
    queue.set_avail_ring_address(Some(AVAILABLE), Some(0));
    queue.set_used_ring_address(Some(USED), Some(0));
    queue.set_ready(true);
    for chain in queue.iter(memory).expect("ready") {
        each(chain);
    }
}
