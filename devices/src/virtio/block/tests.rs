//! The disk driven through its queues: against a real image, and against an engine that fails and dawdles on demand.

mod owner;

use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use drover_block::{Backing, Cache, Completion, Disk, DiskSpec, Format, IoError, Layer, Op};
use proptest::prelude::*;
use rustix::event::{EventfdFlags, eventfd};
use tempfile::NamedTempFile;
use vm_memory::{Bytes, GuestAddress};

use super::*;
use crate::virtio::block::bits::{kind, status};
use crate::virtio::block::handle::Call;
use crate::virtio::testing::{
    DriverQueue, Guest, PATIENCE, Part, PlainThreads, RAM_BYTES, eventually, readable, reset,
    reset_queue, writable,
};

const DISK_BYTES: u64 = 1 << 20;

fn options(queues: u16) -> BlockOptions {
    BlockOptions {
        id: "a-rather-long-disk-name".into(),
        serial: "serial-0123456789-abcdef".into(),
        queues,
        queue_size: 128,
        discard_granularity: 4096,
    }
}

/// An image in which each sector is full of its number, and the disk on it.
fn image() -> NamedTempFile {
    let file = NamedTempFile::new().unwrap();
    for sector in 0..DISK_BYTES / SECTOR_BYTES {
        let byte = u8::try_from(sector % 251).unwrap();
        file.as_file()
            .write_all_at(&[byte; 512], sector * SECTOR_BYTES)
            .unwrap();
    }
    file
}

fn disk(file: &NamedTempFile, read_only: bool, discard: bool) -> Disk {
    let top = Layer {
        path: file.path().into(),
        format: Format::Raw,
        cache: Cache::Buffered,
    };
    Disk::open(&DiskSpec {
        top,
        backing: Backing::Explicit(Vec::new()),
        read_only,
        discard,
    })
    .unwrap()
}

fn device(file: &NamedTempFile) -> Block {
    Block::new(disk(file, false, true), &options(1), &PlainThreads).unwrap()
}

/// A request in guest memory.
struct Laid {
    header: u64,
    status: u64,
}

impl Laid {
    fn new(guest: &mut Guest, kind: u32, sector: u64) -> Self {
        let mut header = [0; 16];
        header[..4].copy_from_slice(&kind.to_le_bytes());
        header[8..].copy_from_slice(&sector.to_le_bytes());
        Self {
            header: guest.place(&header),
            status: guest.place(&[0xee]),
        }
    }

    fn parts(&self, data: &[Part]) -> Vec<Part> {
        let mut parts = vec![readable(self.header, 16)];
        parts.extend(data);
        parts.push(writable(self.status, 1));
        parts
    }
}

/// Sends one request and returns its status and the length in the used ring.
fn request(
    guest: &mut Guest,
    queue: &mut DriverQueue,
    kind: u32,
    sector: u64,
    data: &[Part],
) -> (u8, u32) {
    let laid = Laid::new(guest, kind, sector);
    let head = queue.offer(&laid.parts(data));
    queue.ring();
    let (used, length) = queue.wait();
    assert_eq!(used, head);
    (guest.byte(laid.status), length)
}

fn segment(sector: u64, sectors: u32, flags: u32) -> Vec<u8> {
    [
        &sector.to_le_bytes()[..],
        &sectors.to_le_bytes(),
        &flags.to_le_bytes(),
    ]
    .concat()
}

#[test]
fn what_is_written_is_read_back_and_is_in_the_image() {
    let file = image();
    let mut guest = Guest::new();
    let mut queue = guest.queue(0, 16);
    let mut device = device(&file);
    device
        .activate(guest.activation(device.features(), &[&queue]))
        .unwrap();

    let bytes: Vec<u8> = (0..1536_u32).map(|n| (n % 241) as u8).collect();
    let out = guest.place(&bytes);
    // The driver may cut the data as it likes.
    let cut = [
        readable(out, 100),
        readable(out + 100, 924),
        readable(out + 1024, 512),
    ];
    assert_eq!(
        request(&mut guest, &mut queue, kind::OUT, 3, &cut),
        (status::OK, 1)
    );
    assert_eq!(
        request(&mut guest, &mut queue, kind::FLUSH, 0, &[]),
        (status::OK, 1)
    );
    let into = guest.allocate(2048);
    let data = [writable(into, 2048)];
    assert_eq!(
        request(&mut guest, &mut queue, kind::IN, 3, &data),
        (status::OK, 2049)
    );
    assert_eq!(guest.read(into, 1536), bytes);
    assert_eq!(guest.read(into + 1536, 512), [6; 512]);

    let mut on_disk = vec![0; 1536];
    file.as_file()
        .read_exact_at(&mut on_disk, 3 * SECTOR_BYTES)
        .unwrap();
    assert_eq!(on_disk, bytes);
    let metrics = device.metrics();
    assert_eq!(metrics.written_bytes.load(Ordering::Relaxed), 1536);
    assert_eq!(metrics.flushes.load(Ordering::Relaxed), 1);
}

#[test]
fn a_header_and_a_status_may_share_descriptors_with_data() {
    let file = image();
    let mut guest = Guest::new();
    let mut queue = guest.queue(0, 16);
    let mut device = device(&file);
    device
        .activate(guest.activation(device.features(), &[&queue]))
        .unwrap();
    let mut bytes = vec![0; 16];
    bytes[0] = 1;
    bytes.extend([0x5a; 512]);
    let out = guest.place(&bytes);
    let answer = guest.place(&[0xee]);
    queue.offer(&[
        readable(out, 10),
        readable(out + 10, 518),
        writable(answer, 1),
    ]);
    queue.ring();
    queue.wait();
    assert_eq!(guest.byte(answer), status::OK);

    let header = guest.place(&[0; 16]);
    let into = guest.allocate(513);
    queue.offer(&[readable(header, 16), writable(into, 513)]);
    queue.ring();
    assert_eq!(queue.wait().1, 513);
    assert_eq!(guest.read(into, 512), [0x5a; 512]);
    assert_eq!(guest.byte(into + 512), status::OK);
}

#[test]
fn an_indirect_table_is_as_good_as_a_chain() {
    let file = image();
    let mut guest = Guest::new();
    let mut queue = guest.queue(0, 16);
    let mut device = device(&file);
    device
        .activate(guest.activation(device.features(), &[&queue]))
        .unwrap();
    let into = guest.allocate(512 * 100);
    let table = guest.allocate(16 * 128);
    let laid = Laid::new(&mut guest, kind::IN, 7);
    let data: Vec<Part> = (0..100).map(|n| writable(into + n * 512, 512)).collect();
    queue.offer_indirect(table, &laid.parts(&data));
    queue.ring();
    assert_eq!(queue.wait().1, 512 * 100 + 1);
    assert_eq!(guest.byte(laid.status), status::OK);
    assert_eq!(
        guest.read(into, 1024),
        [vec![7; 512], vec![8; 512]].concat()
    );
}

#[test]
fn data_across_two_regions_of_ram_arrive_whole() {
    let file = image();
    let mut guest = Guest::new();
    let mut queue = guest.queue(0, 16);
    let mut device = device(&file);
    device
        .activate(guest.activation(device.features(), &[&queue]))
        .unwrap();
    let into = RAM_BYTES / 2 - 256;
    let data = [writable(into, 512)];
    assert_eq!(
        request(&mut guest, &mut queue, kind::IN, 9, &data),
        (status::OK, 513)
    );
    assert_eq!(guest.read(into, 512), [9; 512]);
}

#[test]
fn the_serial_number_is_cut_at_twenty_bytes() {
    let file = image();
    let mut guest = Guest::new();
    let mut queue = guest.queue(0, 16);
    let mut device = device(&file);
    device
        .activate(guest.activation(device.features(), &[&queue]))
        .unwrap();
    let into = guest.allocate(20);
    let data = [writable(into, 20)];
    assert_eq!(
        request(&mut guest, &mut queue, kind::GET_ID, 0, &data),
        (status::OK, 21)
    );
    assert_eq!(guest.read(into, 20), b"serial-0123456789-ab");
}

#[test]
fn discard_gives_blocks_back_and_write_zeroes_reads_as_zero() {
    let file = image();
    let before = file.as_file().metadata().unwrap().blocks();
    let mut guest = Guest::new();
    let mut queue = guest.queue(0, 16);
    let mut device = device(&file);
    device
        .activate(guest.activation(device.features(), &[&queue]))
        .unwrap();

    let two = guest.place(&[segment(0, 512, 0), segment(1024, 8, 0)].concat());
    let data = [readable(two, 32)];
    assert_eq!(
        request(&mut guest, &mut queue, kind::DISCARD, 0, &data),
        (status::OK, 1)
    );
    assert!(file.as_file().metadata().unwrap().blocks() <= before - 512);

    for flags in [0, 1] {
        let one = guest.place(&segment(600, 3, flags));
        let data = [readable(one, 16)];
        let answer = request(&mut guest, &mut queue, kind::WRITE_ZEROES, 0, &data);
        assert_eq!(answer, (status::OK, 1));
    }
    let mut sectors = [0xff; 512 * 5];
    file.as_file()
        .read_exact_at(&mut sectors, 599 * SECTOR_BYTES)
        .unwrap();
    assert_eq!(sectors[..512], [(599 % 251) as u8; 512]);
    assert_eq!(sectors[512..2048], [0; 1536]);
    assert_eq!(sectors[2048..], [(603 % 251) as u8; 512]);
}

#[test]
fn requests_that_break_a_rule_fail_without_touching_the_disk() {
    let file = image();
    let mut guest = Guest::new();
    let mut queue = guest.queue(0, 64);
    let mut device = device(&file);
    device
        .activate(guest.activation(device.features(), &[&queue]))
        .unwrap();
    let end = DISK_BYTES / SECTOR_BYTES;
    let buffer = guest.place(&[0xaa; 4096]);
    let many: Vec<u8> = (0..33).flat_map(|n| segment(n, 1, 0)).collect();
    let many = readable(guest.place(&many), 33 * 16);
    let cases: Vec<(&str, u32, u64, Vec<Part>, u8)> = vec![
        (
            "past the end",
            kind::OUT,
            end,
            vec![readable(buffer, 512)],
            status::IOERR,
        ),
        (
            "across the end",
            kind::OUT,
            end - 1,
            vec![readable(buffer, 1024)],
            status::IOERR,
        ),
        (
            "far past",
            kind::OUT,
            u64::MAX,
            vec![readable(buffer, 512)],
            status::IOERR,
        ),
        (
            "wrapping offset",
            kind::IN,
            1 << 55,
            vec![writable(buffer, 512)],
            status::IOERR,
        ),
        (
            "odd length",
            kind::OUT,
            0,
            vec![readable(buffer, 511)],
            status::IOERR,
        ),
        (
            "writing into a write",
            kind::OUT,
            0,
            vec![writable(buffer, 512)],
            status::IOERR,
        ),
        (
            "reading out of a read",
            kind::IN,
            0,
            vec![readable(buffer, 512)],
            status::IOERR,
        ),
        (
            "no RAM",
            kind::OUT,
            0,
            vec![readable(RAM_BYTES - 256, 512)],
            status::IOERR,
        ),
        (
            "address wraps",
            kind::OUT,
            0,
            vec![readable(u64::MAX - 255, 512)],
            status::IOERR,
        ),
        ("unknown", 99, 0, vec![], status::UNSUPP),
        ("secure erase", 14, 0, vec![], status::UNSUPP),
        (
            "discard past the end",
            kind::DISCARD,
            0,
            vec![readable(guest.place(&segment(end - 1, 2, 0)), 16)],
            status::IOERR,
        ),
        (
            "discard with a flag",
            kind::DISCARD,
            0,
            vec![readable(guest.place(&segment(0, 1, 1)), 16)],
            status::UNSUPP,
        ),
        (
            "zeroes with an unknown flag",
            kind::WRITE_ZEROES,
            0,
            vec![readable(guest.place(&segment(0, 1, 2)), 16)],
            status::UNSUPP,
        ),
        (
            "half a segment",
            kind::DISCARD,
            0,
            vec![readable(buffer, 24)],
            status::IOERR,
        ),
        ("no segment", kind::DISCARD, 0, vec![], status::IOERR),
        (
            "too many segments",
            kind::DISCARD,
            0,
            vec![many],
            status::IOERR,
        ),
    ];
    let refused = cases.len();
    for (name, kind, sector, data, code) in cases {
        let answer = request(&mut guest, &mut queue, kind, sector, &data);
        assert_eq!(answer, (code, 1), "{name}");
    }
    assert_eq!(
        device.metrics().refused.load(Ordering::Relaxed),
        refused as u64
    );
    drop(device);
    let mut now = vec![0; usize::try_from(DISK_BYTES).unwrap()];
    let mut before = now.clone();
    file.as_file().read_exact_at(&mut now, 0).unwrap();
    image().as_file().read_exact_at(&mut before, 0).unwrap();
    assert!(now == before);
}

#[test]
fn a_readable_descriptor_after_a_writable_one_is_refused() {
    let file = image();
    let mut guest = Guest::new();
    let mut queue = guest.queue(0, 16);
    let mut device = device(&file);
    device
        .activate(guest.activation(device.features(), &[&queue]))
        .unwrap();
    let laid = Laid::new(&mut guest, kind::OUT, 0);
    let data = guest.allocate(512);
    queue.offer(&[
        readable(laid.header, 16),
        writable(laid.status, 1),
        readable(data, 512),
    ]);
    queue.ring();
    queue.wait();
    assert_eq!(guest.byte(laid.status), status::IOERR);
}

#[test]
fn a_chain_that_cannot_be_answered_needs_a_reset_and_works_after_it() {
    let file = image();
    for case in 0..3 {
        let mut guest = Guest::new();
        let mut queue = guest.queue(0, 16);
        let mut device = device(&file);
        device
            .activate(guest.activation(device.features(), &[&queue]))
            .unwrap();
        let laid = Laid::new(&mut guest, kind::FLUSH, 0);
        match case {
            // No status byte.
            0 => drop(queue.offer(&[readable(laid.header, 16)])),
            // A chain that comes back to itself.
            1 => {
                queue.descriptor(0, readable(laid.header, 16), 1, 0);
                queue.publish(0);
            }
            // A status byte that is not RAM.
            _ => drop(queue.offer(&[readable(laid.header, 16), writable(RAM_BYTES, 1)])),
        }
        queue.ring();
        eventually("the device to ask for a reset", || guest.needs_reset());
        reset(&mut device);
        queue.clear();
        device
            .activate(guest.activation(device.features(), &[&queue]))
            .unwrap();
        assert_eq!(
            request(&mut guest, &mut queue, kind::FLUSH, 0, &[]),
            (status::OK, 1)
        );
    }
}

#[test]
fn a_read_only_disk_says_so_and_refuses_changes() {
    let file = image();
    let mut device = Block::new(disk(&file, true, true), &options(1), &PlainThreads).unwrap();
    let features = device.features();
    assert_ne!(features & feature::RO, 0);
    assert_eq!(features & (feature::DISCARD | feature::WRITE_ZEROES), 0);
    let mut guest = Guest::new();
    let mut queue = guest.queue(0, 16);
    device
        .activate(guest.activation(features, &[&queue]))
        .unwrap();
    let buffer = guest.allocate(512);
    let out = [readable(buffer, 512)];
    assert_eq!(
        request(&mut guest, &mut queue, kind::OUT, 0, &out),
        (status::IOERR, 1)
    );
    let zeroes = [readable(guest.place(&segment(0, 1, 0)), 16)];
    assert_eq!(
        request(&mut guest, &mut queue, kind::WRITE_ZEROES, 0, &zeroes),
        (status::IOERR, 1)
    );
    assert_eq!(
        request(&mut guest, &mut queue, kind::DISCARD, 0, &zeroes),
        (status::UNSUPP, 1)
    );
    let into = [writable(buffer, 512)];
    assert_eq!(
        request(&mut guest, &mut queue, kind::IN, 5, &into),
        (status::OK, 513)
    );
    assert_eq!(guest.read(buffer, 512), [5; 512]);
}

#[test]
fn limits_in_the_configuration_agree_with_the_features_offered() {
    let file = image();
    let read_config = |device: &Block| {
        let mut bytes = [0xff; 64];
        device.read_config(0, &mut bytes);
        assert_eq!(bytes[60..], [0; 4], "past the end reads as zero");
        bytes
    };
    let word = |bytes: &[u8], at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());

    let full = Block::new(disk(&file, false, true), &options(4), &PlainThreads).unwrap();
    let bytes = read_config(&full);
    assert_ne!(full.features() & feature::MQ, 0);
    assert_eq!(full.queue_sizes(), [128; 4]);
    assert_eq!(
        u64::from_le_bytes(bytes[..8].try_into().unwrap()),
        DISK_BYTES / 512
    );
    assert_eq!(word(&bytes, 12), 126);
    assert_eq!(word(&bytes, 20), 512);
    assert_eq!(bytes[24], 3);
    assert_eq!(bytes[34..36], [4, 0]);
    assert_eq!(word(&bytes, 36), MAX_DISCARD_SECTORS);
    assert_eq!(word(&bytes, 40), 32);
    assert_eq!(word(&bytes, 44), 8);
    assert_eq!(word(&bytes, 48), MAX_DISCARD_SECTORS);
    assert_eq!(bytes[56], 1);
    drop(full);

    let plain = Block::new(disk(&file, false, false), &options(1), &PlainThreads).unwrap();
    let bytes = read_config(&plain);
    assert_eq!(plain.features() & (feature::MQ | feature::DISCARD), 0);
    assert_eq!(word(&bytes, 36), 0);
    assert_eq!(word(&bytes, 40), 0);
    assert_ne!(plain.features() & feature::WRITE_ZEROES, 0);
    assert_eq!(bytes[56], 0);
}

#[test]
fn a_driver_may_use_two_queues_of_four_and_reset_one_of_them() {
    let file = image();
    let mut guest = Guest::new();
    let mut queues = [guest.queue(1, 16), guest.queue(3, 16)];
    let mut device = Block::new(disk(&file, false, true), &options(4), &PlainThreads).unwrap();
    let [first, second] = &queues;
    device
        .activate(guest.activation(device.features(), &[first, second]))
        .unwrap();
    for queue in &mut queues {
        assert_eq!(
            request(&mut guest, queue, kind::FLUSH, 0, &[]),
            (status::OK, 1)
        );
    }
    reset_queue(&mut device, 3);
    let [first, second] = &mut queues;
    let laid = Laid::new(&mut guest, kind::FLUSH, 0);
    second.offer(&laid.parts(&[]));
    second.ring();
    assert_eq!(
        request(&mut guest, first, kind::FLUSH, 0, &[]),
        (status::OK, 1)
    );
    assert!(
        second.used().is_none(),
        "a queue was served after its reset"
    );
    second.clear();
    device.enable_queue(second.active()).unwrap();
    assert_eq!(
        request(&mut guest, second, kind::FLUSH, 0, &[]),
        (status::OK, 1)
    );
}

#[test]
fn reset_and_activation_may_repeat_without_end() {
    let file = image();
    let mut guest = Guest::new();
    let mut queue = guest.queue(0, 16);
    let mut device = device(&file);
    for _ in 0..50 {
        queue.clear();
        device
            .activate(guest.activation(device.features(), &[&queue]))
            .unwrap();
        assert_eq!(
            request(&mut guest, &mut queue, kind::FLUSH, 0, &[]).0,
            status::OK
        );
        reset(&mut device);
    }
}

#[test]
fn dropping_the_device_closes_the_image() {
    let file = image();
    let mut device = device(&file);
    let guest = Guest::new();
    let queue = guest_queue(guest);
    device
        .activate(queue.1.activation(device.features(), &[&queue.0]))
        .unwrap();
    drop(device);
    // The lock is free again.
    drop(disk(&file, false, true));
}

fn guest_queue(mut guest: Guest) -> (DriverQueue, Guest) {
    let queue = guest.queue(0, 16);
    (queue, guest)
}

/// An engine whose requests end when, and as, the test says.
#[derive(Clone)]
struct Puppet(Arc<Strings>);

struct Strings {
    event: std::os::fd::OwnedFd,
    held: Mutex<Vec<(u64, Op)>>,
    done: Mutex<Vec<Completion>>,
    flushes: AtomicUsize,
    closed: AtomicBool,
}

impl Puppet {
    fn new() -> Self {
        Self(Arc::new(Strings {
            event: eventfd(0, EventfdFlags::NONBLOCK).unwrap(),
            held: Mutex::default(),
            done: Mutex::default(),
            flushes: AtomicUsize::new(0),
            closed: AtomicBool::new(false),
        }))
    }

    fn device(&self, options: &BlockOptions) -> Block {
        let facts = DiskFacts {
            size_bytes: DISK_BYTES,
            read_only: false,
            discard: true,
        };
        Block::with_engine(Box::new(self.clone()), &facts, options, &PlainThreads).unwrap()
    }

    fn wait_held(&self, count: usize) {
        eventually("the engine to hold requests", || {
            self.0.held.lock().unwrap().len() == count
        });
    }

    fn finish_one(&self, result: Result<(), IoError>) {
        let (tag, op) = self.0.held.lock().unwrap().remove(0);
        if matches!(op, Op::Flush) {
            self.0.flushes.fetch_add(1, Ordering::SeqCst);
        }
        let op = result.is_err().then_some(op);
        self.0
            .done
            .lock()
            .unwrap()
            .push(Completion { tag, result, op });
        rustix::io::write(&self.0.event, &1_u64.to_ne_bytes()).unwrap();
    }
}

impl Engine for Puppet {
    fn submit(&mut self, tag: u64, op: Op) {
        self.0.held.lock().unwrap().push((tag, op));
    }

    fn poll(&mut self, completions: &mut Vec<Completion>) {
        let _ = rustix::io::read(&self.0.event, &mut [0; 8]);
        completions.append(&mut self.0.done.lock().unwrap());
    }

    fn event(&self) -> Option<BorrowedFd<'_>> {
        Some(self.0.event.as_fd())
    }

    fn close(self: Box<Self>) -> Result<(), drover_block::Error> {
        self.0.closed.store(true, Ordering::SeqCst);
        Ok(())
    }
}

#[test]
fn a_reset_is_answered_only_when_the_disk_no_longer_touches_guest_memory() {
    let puppet = Puppet::new();
    let mut device = puppet.device(&options(2));
    let mut guest = Guest::new();
    let mut queues = [guest.queue(0, 16), guest.queue(1, 16)];
    let [first, second] = &mut queues;
    device
        .activate(guest.activation(device.features(), &[first, second]))
        .unwrap();
    let buffer = guest.allocate(512);
    let reading = Laid::new(&mut guest, kind::IN, 0);
    first.offer(&reading.parts(&[writable(buffer, 512)]));
    first.ring();
    puppet.wait_held(1);
    let flushing = Laid::new(&mut guest, kind::FLUSH, 0);
    second.offer(&flushing.parts(&[]));
    second.ring();
    puppet.wait_held(2);

    let pending = device.reset_queue(0);
    assert!(!pending.wait(std::time::Duration::from_millis(50)));
    puppet.finish_one(Ok(()));
    assert!(pending.wait(PATIENCE));
    assert!(first.used().is_none(), "an answer came after the reset");
    assert_eq!(guest.byte(reading.status), 0xee);

    // The other queue did not notice, and the first works again.
    puppet.finish_one(Ok(()));
    assert_eq!(second.wait().1, 1);
    first.clear();
    device.enable_queue(first.active()).unwrap();
    first.offer(&reading.parts(&[writable(buffer, 512)]));
    first.ring();
    puppet.wait_held(1);
    puppet.finish_one(Ok(()));
    assert_eq!(first.wait().1, 513);
}

#[test]
fn an_answer_to_a_request_of_before_the_reset_never_reaches_the_queue_of_after() {
    let puppet = Puppet::new();
    let mut device = puppet.device(&options(1));
    let mut guest = Guest::new();
    let mut queue = guest.queue(0, 16);
    device
        .activate(guest.activation(device.features(), &[&queue]))
        .unwrap();
    let old = Laid::new(&mut guest, kind::FLUSH, 0);
    queue.offer(&old.parts(&[]));
    queue.ring();
    puppet.wait_held(1);
    // A transport that is in a hurry.
    let pending = device.reset();
    queue.clear();
    device
        .activate(guest.activation(device.features(), &[&queue]))
        .unwrap();
    let new = Laid::new(&mut guest, kind::FLUSH, 0);
    queue.offer(&new.parts(&[]));
    queue.ring();
    puppet.wait_held(2);
    puppet.finish_one(Ok(()));
    puppet.finish_one(Ok(()));
    queue.wait();
    assert!(pending.wait(PATIENCE));
    assert!(queue.used().is_none());
    assert_eq!(guest.byte(old.status), 0xee);
    assert_eq!(guest.byte(new.status), status::OK);
}

#[test]
fn failures_of_the_disk_become_status_bytes() {
    let puppet = Puppet::new();
    let mut device = puppet.device(&options(1));
    let mut guest = Guest::new();
    let mut queue = guest.queue(0, 16);
    device
        .activate(guest.activation(device.features(), &[&queue]))
        .unwrap();
    let cases = [
        (IoError::NoSpace, status::IOERR),
        (IoError::Unsupported("x"), status::UNSUPP),
    ];
    for (error, code) in cases {
        let laid = Laid::new(&mut guest, kind::IN, 0);
        let buffer = guest.allocate(512);
        queue.offer(&laid.parts(&[writable(buffer, 512)]));
        queue.ring();
        puppet.wait_held(1);
        puppet.finish_one(Err(error));
        assert_eq!(queue.wait().1, 1);
        assert_eq!(guest.byte(laid.status), code);
    }
    assert_eq!(device.metrics().failed.load(Ordering::Relaxed), 2);
}

#[test]
fn one_failed_segment_fails_the_discard_once_all_are_over() {
    let puppet = Puppet::new();
    let mut device = puppet.device(&options(1));
    let mut guest = Guest::new();
    let mut queue = guest.queue(0, 16);
    device
        .activate(guest.activation(device.features(), &[&queue]))
        .unwrap();
    let segments = [segment(0, 1, 0), segment(8, 0, 0), segment(16, 1, 0)].concat();
    let data = readable(guest.place(&segments), 48);
    let laid = Laid::new(&mut guest, kind::DISCARD, 0);
    queue.offer(&laid.parts(&[data]));
    queue.ring();
    puppet.wait_held(2);
    puppet.finish_one(Err(IoError::NoSpace));
    assert!(queue.used().is_none());
    puppet.finish_one(Ok(()));
    queue.wait();
    assert_eq!(guest.byte(laid.status), status::IOERR);
}

#[test]
fn a_driver_that_cannot_flush_is_answered_when_its_write_is_durable() {
    let puppet = Puppet::new();
    let mut device = puppet.device(&options(1));
    let mut guest = Guest::new();
    let mut queue = guest.queue(0, 16);
    let features = device.features() & !feature::FLUSH;
    device
        .activate(guest.activation(features, &[&queue]))
        .unwrap();
    let buffer = guest.allocate(512);
    let laid = Laid::new(&mut guest, kind::OUT, 0);
    queue.offer(&laid.parts(&[readable(buffer, 512)]));
    queue.ring();
    puppet.wait_held(1);
    puppet.finish_one(Ok(()));
    puppet.wait_held(1);
    assert!(queue.used().is_none());
    puppet.finish_one(Ok(()));
    queue.wait();
    assert_eq!(puppet.0.flushes.load(Ordering::SeqCst), 1);
}

#[test]
fn a_driver_that_offers_more_than_its_queue_holds_is_served_in_turn() {
    let puppet = Puppet::new();
    let mut device = puppet.device(&options(1));
    let mut guest = Guest::new();
    let mut queue = guest.queue(0, 4);
    device
        .activate(guest.activation(device.features(), &[&queue]))
        .unwrap();
    let laid = Laid::new(&mut guest, kind::FLUSH, 0);
    let head = queue.offer(&laid.parts(&[]));
    queue.ring();
    puppet.wait_held(1);
    // The same chain again and again, without waiting for it to be used.
    for _ in 0..7 {
        queue.publish(head);
        queue.ring();
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
    puppet.wait_held(4);
    for _ in 0..8 {
        eventually("a request", || !puppet.0.held.lock().unwrap().is_empty());
        puppet.finish_one(Ok(()));
        queue.wait();
    }
}

#[test]
fn a_dropped_device_waits_for_its_requests_and_closes_the_disk() {
    let puppet = Puppet::new();
    let mut device = puppet.device(&options(1));
    let mut guest = Guest::new();
    let mut queue = guest.queue(0, 16);
    device
        .activate(guest.activation(device.features(), &[&queue]))
        .unwrap();
    let laid = Laid::new(&mut guest, kind::FLUSH, 0);
    queue.offer(&laid.parts(&[]));
    queue.ring();
    puppet.wait_held(1);
    let dropping = std::thread::spawn(move || drop(device));
    std::thread::sleep(std::time::Duration::from_millis(50));
    assert!(!puppet.0.closed.load(Ordering::SeqCst));
    puppet.finish_one(Ok(()));
    dropping.join().unwrap();
    assert!(puppet.0.closed.load(Ordering::SeqCst));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Whatever lies in the rings and descriptors, the device answers or asks for a reset, and then works again.
    #[test]
    fn no_descriptor_table_breaks_more_than_its_queue(
        table in proptest::collection::vec((any::<u16>(), 0_u64..0x1_0000, 0_u32..0x900, 0_u16..8), 8),
        heads in proptest::collection::vec(0_u16..12, 1..6),
        kinds in proptest::collection::vec(0_u32..15, 8),
    ) {
        let file = image();
        let mut guest = Guest::new();
        let mut queue = guest.queue(0, 8);
        let mut device = device(&file);
        for (number, kind) in kinds.iter().enumerate() {
            let mut header = [0; 16];
            header[..4].copy_from_slice(&kind.to_le_bytes());
            let address = 0x8000 + number as u64 * 16;
            guest.memory.write_slice(&header, GuestAddress(address)).unwrap();
        }
        for (index, (next, address, length, flags)) in table.iter().enumerate() {
            let address = 0x8000 + address / 16;
            let part = Part { address, length: *length, writable: flags & 2 != 0 };
            queue.descriptor(u16::try_from(index).unwrap(), part, *flags, next % 10);
        }
        for head in &heads {
            queue.publish(*head);
        }
        device.activate(guest.activation(device.features(), &[&queue])).unwrap();
        let mut answered = 0;
        eventually("an answer or a request for a reset", || {
            while queue.used().is_some() {
                answered += 1;
            }
            answered == heads.len() || guest.needs_reset()
        });
        reset(&mut device);
        queue.clear();
        device.activate(guest.activation(device.features(), &[&queue])).unwrap();
        prop_assert_eq!(request(&mut guest, &mut queue, kind::FLUSH, 0, &[]), (status::OK, 1));
    }
}
