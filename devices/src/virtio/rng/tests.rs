//! The entropy device driven through its queue.

use std::fs::File;
use std::sync::atomic::Ordering;
use std::time::Instant;

use crate::virtio::VirtioDevice;
use crate::virtio::queue::RING_FEATURES;
use crate::virtio::rng::{BYTES_PER_SECOND, MAX_REQUEST_BYTES, Rng};
use crate::virtio::testing::{Guest, PlainThreads, eventually, readable, reset, writable};

fn device() -> Rng {
    Rng::new(File::open("/dev/urandom").unwrap(), &PlainThreads).unwrap()
}

#[test]
fn a_buffer_is_filled_with_bytes_that_differ_from_the_next() {
    let mut guest = Guest::new();
    let mut queue = guest.queue(0, 8);
    let mut device = device();
    device.activate(guest.activation(0, &[&queue])).unwrap();
    let buffers = [guest.allocate(64), guest.allocate(64)];
    for buffer in buffers {
        let head = queue.offer(&[writable(buffer, 64)]);
        queue.ring();
        assert_eq!(queue.wait(), (head, 64));
    }
    let [first, second] = buffers.map(|buffer| guest.read(buffer, 64));
    assert_ne!(first, vec![0; 64]);
    assert_ne!(first, second);
    eventually("two interrupts", || {
        guest.interrupts.queue.load(Ordering::SeqCst) == 2
    });
}

#[test]
fn a_large_request_is_given_a_bounded_part() {
    let mut guest = Guest::new();
    let mut queue = guest.queue(0, 8);
    let mut device = device();
    let buffer = guest.allocate(1 << 20);
    queue.offer(&[writable(buffer, 100), writable(buffer + 100, 1 << 19)]);
    device
        .activate(guest.activation(RING_FEATURES, &[&queue]))
        .unwrap();
    let (_, bytes) = queue.wait();
    assert_eq!(bytes as usize, MAX_REQUEST_BYTES);
    assert_eq!(guest.read(buffer + u64::from(bytes), 64), vec![0; 64]);
}

#[test]
fn a_guest_that_asks_without_end_is_given_no_more_than_the_rate_allows() {
    let start = Instant::now();
    let mut guest = Guest::new();
    let mut queue = guest.queue(0, 64);
    let mut device = device();
    device.activate(guest.activation(0, &[&queue])).unwrap();
    let buffer = guest.allocate(MAX_REQUEST_BYTES as u64);
    for _ in 0..5 {
        for _ in 0..64 {
            queue.offer(&[writable(buffer, MAX_REQUEST_BYTES)]);
        }
        queue.ring();
        for _ in 0..64 {
            queue.wait();
        }
    }
    let bytes = device.metrics().bytes.load(Ordering::Relaxed);
    assert_eq!(bytes, 5 * 64 * MAX_REQUEST_BYTES as u64);
    let allowed = BYTES_PER_SECOND as f64 * (1.0 + start.elapsed().as_secs_f64());
    assert!(
        bytes as f64 <= allowed,
        "{bytes} bytes where {allowed} were allowed"
    );
}

#[test]
fn a_readable_buffer_breaks_the_queue_until_reset() {
    let mut guest = Guest::new();
    let mut queue = guest.queue(0, 8);
    let mut device = device();
    let buffer = guest.allocate(64);
    queue.offer(&[readable(buffer, 64)]);
    device.activate(guest.activation(0, &[&queue])).unwrap();
    eventually("the device to ask for a reset", || guest.needs_reset());
    reset(&mut device);
    queue.clear();
    let head = queue.offer(&[writable(buffer, 64)]);
    device.activate(guest.activation(0, &[&queue])).unwrap();
    assert_eq!(queue.wait(), (head, 64));
}

#[test]
fn an_impossible_available_index_breaks_the_queue_only() {
    let mut guest = Guest::new();
    let queue = guest.queue(0, 8);
    let mut device = device();
    queue.set_available(9);
    device.activate(guest.activation(0, &[&queue])).unwrap();
    eventually("the device to ask for a reset", || guest.needs_reset());
    reset(&mut device);
}

#[test]
fn with_event_idx_only_the_awaited_entry_interrupts() {
    let mut guest = Guest::new();
    let mut queue = guest.queue(0, 8);
    let mut device = device();
    queue.set_used_event(2);
    device
        .activate(guest.activation(RING_FEATURES, &[&queue]))
        .unwrap();
    let buffer = guest.allocate(16);
    for _ in 0..2 {
        queue.offer(&[writable(buffer, 16)]);
        queue.ring();
        queue.wait();
    }
    assert_eq!(guest.interrupts.queue.load(Ordering::SeqCst), 0);
    queue.offer(&[writable(buffer, 16)]);
    queue.ring();
    queue.wait();
    eventually("the interrupt", || {
        guest.interrupts.queue.load(Ordering::SeqCst) == 1
    });
}

#[test]
fn without_event_idx_a_driver_can_ask_for_silence() {
    let mut guest = Guest::new();
    let mut queue = guest.queue(0, 8);
    let mut device = device();
    queue.set_flags(1);
    device.activate(guest.activation(0, &[&queue])).unwrap();
    let buffer = guest.allocate(16);
    queue.offer(&[writable(buffer, 16)]);
    queue.ring();
    queue.wait();
    // The reset is answered after the turn that used the chain, so an interrupt would have come by then.
    reset(&mut device);
    assert_eq!(guest.interrupts.queue.load(Ordering::SeqCst), 0);
}

#[test]
fn nothing_is_served_between_reset_and_activation() {
    let mut guest = Guest::new();
    let mut queue = guest.queue(0, 8);
    let mut device = device();
    device.activate(guest.activation(0, &[&queue])).unwrap();
    reset(&mut device);
    let buffer = guest.allocate(16);
    queue.offer(&[writable(buffer, 16)]);
    queue.ring();
    reset(&mut device);
    assert!(queue.used().is_none());
}
