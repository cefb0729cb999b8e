use std::io::Write;
use std::sync::atomic::{AtomicU64, Ordering};

use vm_memory::GuestMemoryMmap;
use zerocopy::byteorder::big_endian::U64;

use super::*;

const REQUEST: u64 = 0x1000;
const BUFFER: u64 = 0x2000;

fn device(items: FwCfgItems) -> (GuestMemory, Arc<FwCfg>) {
    let ranges = [(GuestAddress(0), 1 << 20)];
    let memory: GuestMemory = Arc::new(GuestMemoryMmap::from_ranges(&ranges).unwrap());
    (memory.clone(), FwCfg::new(items, memory))
}

fn select(device: &FwCfg, key: u16) {
    device.write(0, &key.to_le_bytes());
}

fn bytes(device: &FwCfg, count: usize) -> Vec<u8> {
    let mut seen = vec![0; count];
    for byte in seen.chunks_mut(1) {
        device.read(1, byte);
    }
    seen
}

/// Performs a request; the control word afterwards.
fn dma(memory: &GuestMemory, device: &FwCfg, order: u32, length: u32, address: u64) -> u32 {
    let request = DmaAccess {
        control: U32::new(order),
        length: U32::new(length),
        address: U64::new(address),
    };
    memory
        .write_slice(request.as_bytes(), GuestAddress(REQUEST))
        .unwrap();
    device.write(4, &0u32.to_be_bytes());
    device.write(8, &(REQUEST as u32).to_be_bytes());
    let mut answer = U32::new(0);
    memory
        .read_slice(answer.as_mut_bytes(), GuestAddress(REQUEST))
        .unwrap();
    answer.get()
}

fn buffer(memory: &GuestMemory, count: usize) -> Vec<u8> {
    let mut seen = vec![0; count];
    memory.read_slice(&mut seen, GuestAddress(BUFFER)).unwrap();
    seen
}

#[test]
fn firmware_finds_the_device_and_its_files() {
    let mut items = FwCfgItems::new();
    items.set(number::CPU_COUNT, Item::u16(4));
    items
        .add_file("etc/e820", Item::Bytes(vec![1, 2, 3]))
        .unwrap();
    items.add_file("bootorder", Item::Bytes(vec![9])).unwrap();
    let (_, device) = device(items);
    select(&device, 0);
    assert_eq!(bytes(&device, 5), b"QEMU\0");
    select(&device, 1);
    assert_eq!(bytes(&device, 4), [3, 0, 0, 0]);
    select(&device, number::CPU_COUNT);
    assert_eq!(bytes(&device, 2), [4, 0]);
    select(&device, 0x19);
    let directory = bytes(&device, 4 + 2 * 64);
    assert_eq!(directory[..4], [0, 0, 0, 2]);
    assert_eq!(directory[4..12], [0, 0, 0, 3, 0, 0x20, 0, 0]);
    assert_eq!(&directory[12..21], b"etc/e820\0");
    select(&device, 0x21);
    assert_eq!(bytes(&device, 2), [9, 0], "zero past the end");
    let mut signature = [0; 4];
    device.read(4, &mut signature);
    assert_eq!(&signature, b"QEMU");
    device.read(8, &mut signature);
    assert_eq!(&signature, b" CFG");
}

#[test]
fn dma_selects_reads_and_skips() {
    let mut items = FwCfgItems::new();
    items
        .add_file("a", Item::Bytes((0..=255).collect()))
        .unwrap();
    let (memory, device) = device(items);
    let select = control::SELECT | 0x20 << 16;
    assert_eq!(dma(&memory, &device, select | control::READ, 4, BUFFER), 0);
    assert_eq!(buffer(&memory, 4), [0, 1, 2, 3]);
    assert_eq!(dma(&memory, &device, control::SKIP, 250, 0), 0);
    assert_eq!(dma(&memory, &device, control::READ, 4, BUFFER), 0);
    assert_eq!(buffer(&memory, 4), [254, 255, 0, 0]);
}

#[test]
fn bad_requests_are_answered_with_an_error_and_change_nothing() {
    let mut items = FwCfgItems::new();
    items.add_file("a", Item::Bytes(vec![7])).unwrap();
    let (memory, device) = device(items);
    let select = control::SELECT | 0x20 << 16;
    let error = control::ERROR;
    let read = select | control::READ;
    assert_eq!(dma(&memory, &device, read, 4, 1 << 20), error, "no RAM");
    assert_eq!(dma(&memory, &device, read, 4, u64::MAX - 1), error);
    assert_eq!(dma(&memory, &device, read, u32::MAX, BUFFER), error);
    let write = select | control::WRITE;
    assert_eq!(dma(&memory, &device, write, 1, BUFFER), error, "read-only");
    // A request outside of RAM has no answer, and none of these ends anything.
    device.write(4, &u32::MAX.to_be_bytes());
    device.write(8, &u32::MAX.to_be_bytes());
    device.write(2, &[1]);
    device.write(11, &[1, 2, 3, 4]);
    device.read(11, &mut [0; 8]);
    assert_eq!(dma(&memory, &device, read, 1, BUFFER), 0);
    assert_eq!(buffer(&memory, 1), [7]);
}

#[test]
fn a_built_item_is_made_when_it_is_selected() {
    let counter = Arc::new(AtomicU64::new(0));
    let made = counter.clone();
    let mut items = FwCfgItems::new();
    let build = move || vec![made.fetch_add(1, Ordering::Relaxed) as u8 + 1];
    items.add_file("a", Item::built(4, build)).unwrap();
    let (_, device) = device(items);
    select(&device, 0x19);
    assert_eq!(bytes(&device, 8)[4..], [0, 0, 0, 4]);
    assert_eq!(counter.load(Ordering::Relaxed), 0);
    select(&device, 0x20);
    assert_eq!(bytes(&device, 5), [1, 0, 0, 0, 0]);
    select(&device, 0x20);
    assert_eq!(bytes(&device, 1), [2]);
}

#[test]
fn a_writable_item_tells_what_the_guest_wrote() {
    let heard = Arc::new(AtomicU64::new(0));
    let told = heard.clone();
    let mut items = FwCfgItems::new();
    let item = Item::Writable {
        bytes: vec![0; 8],
        written: Box::new(move |bytes| {
            let address = <[u8; 8]>::try_from(bytes).map_or(0, u64::from_le_bytes);
            told.store(address, Ordering::Relaxed);
        }),
    };
    items.add_file("etc/vmgenid_addr", item).unwrap();
    let (memory, device) = device(items);
    memory
        .write_slice(&0x7fe0_0000u64.to_le_bytes(), GuestAddress(BUFFER))
        .unwrap();
    let write = control::SELECT | 0x20 << 16 | control::WRITE;
    assert_eq!(dma(&memory, &device, write, 8, BUFFER), 0);
    assert_eq!(heard.load(Ordering::Relaxed), 0x7fe0_0000);
    assert_eq!(dma(&memory, &device, write, 9, BUFFER), control::ERROR);
}

#[test]
fn a_file_is_read_in_pieces() {
    let mut file = tempfile::tempfile().unwrap();
    let contents: Vec<u8> = (0..200_000u32).map(|n| n as u8).collect();
    file.write_all(&contents).unwrap();
    let mut items = FwCfgItems::new();
    items.set(
        number::KERNEL_DATA,
        Item::File {
            file,
            from: 0,
            length: 200_010,
        },
    );
    let (memory, device) = device(items);
    let read = control::SELECT | control::READ | u32::from(number::KERNEL_DATA) << 16;
    assert_eq!(dma(&memory, &device, read, 200_010, BUFFER), 0);
    let seen = buffer(&memory, 200_010);
    assert_eq!(seen[..200_000], contents);
    assert_eq!(seen[200_000..], [0; 10]);
}

#[test]
fn names_are_checked() {
    let mut items = FwCfgItems::new();
    let long = "x".repeat(56);
    for name in ["", "a\0b", &long] {
        let added = items.add_file(name, Item::u16(0));
        assert!(matches!(added, Err(FwCfgError::Name(_))));
    }
    items.add_file("a", Item::u16(0)).unwrap();
    let twice = items.add_file("a", Item::u16(0));
    assert_eq!(twice, Err(FwCfgError::Twice("a".into())));
}

#[test]
fn a_state_comes_back() {
    let mut items = FwCfgItems::new();
    items
        .add_file("a", Item::built(4, || vec![1, 2, 3]))
        .unwrap();
    let (_, device) = device(items);
    select(&device, 0x20);
    bytes(&device, 1);
    let state = device.state();
    device.reset();
    assert_eq!(device.state(), FwCfgState::default());
    device.restore(&state);
    assert_eq!(bytes(&device, 2), [2, 3]);
}
