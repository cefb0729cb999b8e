//! The balloon driven through its queues.

use std::sync::atomic::Ordering;

use super::*;
use crate::virtio::testing::{
    DriverQueue, Guest, PlainThreads, eventually, readable, reset, writable,
};

fn device() -> Balloon {
    let options = BalloonOptions {
        reporting: true,
        statistics: true,
    };
    Balloon::new(options, &PlainThreads).unwrap()
}

fn page_aligned(guest: &mut Guest, pages: u64) -> u64 {
    guest
        .allocate((pages + 1) * PAGE_BYTES)
        .next_multiple_of(PAGE_BYTES)
}

fn start(guest: &mut Guest, device: &mut Balloon, features: u64) -> Vec<DriverQueue> {
    let queues: Vec<DriverQueue> = (0..4).map(|n| guest.queue(n, 16)).collect();
    let all: Vec<&DriverQueue> = queues.iter().collect();
    device.activate(guest.activation(features, &all)).unwrap();
    queues
}

const ALL: u64 = feature::STATS_VQ | feature::PAGE_REPORTING;

fn numbers(pages: &[u64]) -> Vec<u8> {
    pages
        .iter()
        .flat_map(|page| ((page / PAGE_BYTES) as u32).to_le_bytes())
        .collect()
}

#[test]
fn pages_that_are_given_up_go_back_to_the_host_and_read_as_zero() {
    let mut guest = Guest::new();
    let mut device = device();
    let mut queues = start(&mut guest, &mut device, ALL);
    let area = page_aligned(&mut guest, 4);
    let fill = vec![7; 4 * PAGE_BYTES as usize];
    vm_memory::Bytes::write_slice(&*guest.memory, &fill, vm_memory::GuestAddress(area)).unwrap();
    let list = numbers(&[area + 2 * PAGE_BYTES, area, area + PAGE_BYTES]);
    let list_at = guest.place(&list);
    queues[0].offer(&[readable(list_at, list.len())]);
    queues[0].ring();
    queues[0].wait();
    assert_eq!(
        guest.read(area, 3 * PAGE_BYTES as usize),
        vec![0; 3 * PAGE_BYTES as usize]
    );
    assert_eq!(guest.byte(area + 3 * PAGE_BYTES), 7);
    let inflated = &device.metrics().inflated_bytes;
    assert_eq!(inflated.load(Ordering::Relaxed), 3 * PAGE_BYTES);
    queues[1].offer(&[readable(list_at, list.len())]);
    queues[1].ring();
    queues[1].wait();
    let deflated = &device.metrics().deflated_bytes;
    assert_eq!(deflated.load(Ordering::Relaxed), 3 * PAGE_BYTES);
}

#[test]
fn reported_pages_go_back_and_only_whole_ones() {
    let mut guest = Guest::new();
    let mut device = device();
    let mut queues = start(&mut guest, &mut device, ALL);
    let area = page_aligned(&mut guest, 4);
    let fill = vec![7; 4 * PAGE_BYTES as usize];
    vm_memory::Bytes::write_slice(&*guest.memory, &fill, vm_memory::GuestAddress(area)).unwrap();
    let length = 2 * PAGE_BYTES as usize;
    queues[3].offer(&[
        writable(area, length),
        writable(area + 2 * PAGE_BYTES + 8, 5000),
    ]);
    queues[3].ring();
    queues[3].wait();
    assert_eq!(guest.read(area, length), vec![0; length]);
    assert_eq!(guest.byte(area + 2 * PAGE_BYTES + 8), 7, "part of a page");
    let reported = &device.metrics().reported_bytes;
    assert_eq!(reported.load(Ordering::Relaxed), 2 * PAGE_BYTES);
}

#[test]
fn statistics_come_when_they_are_asked_for() {
    let mut guest = Guest::new();
    let mut device = device();
    let mut queues = start(&mut guest, &mut device, ALL);
    let mut entry = 4u16.to_le_bytes().to_vec();
    entry.extend(1234u64.to_le_bytes());
    let buffer = guest.place(&entry);
    queues[2].offer(&[readable(buffer, entry.len())]);
    queues[2].ring();
    let latest = device.latest();
    eventually("statistics", || {
        latest.get().is_some_and(|(_, s)| s.free == Some(1234))
    });
    assert_eq!(queues[2].used(), None, "the buffer is kept");
    device.request_statistics().unwrap();
    queues[2].wait();
}

#[test]
fn a_target_is_told_and_what_the_driver_reached_is_seen() {
    let mut guest = Guest::new();
    let mut device = device();
    let _queues = start(&mut guest, &mut device, ALL);
    device.set_target(10 * PAGE_BYTES + 1);
    let mut pages = [0; 4];
    device.read_config(0, &mut pages);
    assert_eq!(pages, [10, 0, 0, 0]);
    device.write_config(4, &[4, 0, 0, 0]);
    device.write_config(0, &[9, 0, 0, 0]);
    assert_eq!(device.actual_bytes(), 4 * PAGE_BYTES);
    let state = device.state();
    assert_eq!((state.num_pages, state.actual), (10, 4));
    reset(&mut device);
    assert_eq!(device.actual_bytes(), 0);
    device.restore(&state);
    assert_eq!(device.state(), state);
}

#[test]
fn pages_outside_of_ram_are_counted_and_harmless() {
    let mut guest = Guest::new();
    let mut device = device();
    let mut queues = start(&mut guest, &mut device, ALL);
    let list = [u32::MAX.to_le_bytes(), 0x8000u32.to_le_bytes()].concat();
    let list_at = guest.place(&list);
    queues[0].offer(&[readable(list_at, list.len())]);
    queues[3].offer(&[writable(u64::MAX - 4096, 8192)]);
    for n in [0, 3] {
        queues[n].ring();
        queues[n].wait();
    }
    assert_eq!(device.metrics().failed.load(Ordering::Relaxed), 3);
    assert!(!guest.needs_reset());
}

#[test]
fn malformed_lists_break_the_queue_and_not_the_process() {
    for (queue, part) in [
        (0, writable(0x1000, 8)),
        (1, readable(0x1000, 1 << 20)),
        (2, readable(u64::MAX - 4, 8)),
    ] {
        let mut guest = Guest::new();
        let mut device = device();
        let mut queues = start(&mut guest, &mut device, ALL);
        queues[queue].offer(&[part]);
        queues[queue].ring();
        eventually("the device to want a reset", || guest.needs_reset());
        reset(&mut device);
    }
}
