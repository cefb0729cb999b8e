//! What the owner of a disk may do while it is served.

use std::sync::mpsc::channel;

use super::*;
use crate::virtio::block::handle::{ErrorPolicy, OnError, Stopped};

const NO_SPACE: Result<(), IoError> = Err(IoError::NoSpace);

/// Takes a device's disk.
fn take(device: &Block) -> Disk {
    let (sender, receiver) = channel();
    device
        .handle()
        .take(move |disk, flushed| sender.send((disk, flushed)).unwrap());
    let (disk, flushed) = receiver.recv_timeout(PATIENCE).unwrap();
    flushed.unwrap();
    disk
}

#[test]
fn requests_wait_while_the_disk_is_away_and_are_served_from_the_disk_that_comes_back() {
    let (file, other) = (image(), image());
    other.as_file().write_all_at(&[0xab; 512], 0).unwrap();
    let mut guest = Guest::new();
    let mut queue = guest.queue(0, 16);
    let mut device = device(&file);
    device
        .activate(guest.activation(device.features(), &[&queue]))
        .unwrap();
    take(&device).close().unwrap();

    let into = guest.allocate(512);
    let laid = Laid::new(&mut guest, kind::IN, 0);
    queue.offer(&laid.parts(&[writable(into, 512)]));
    queue.ring();
    std::thread::sleep(std::time::Duration::from_millis(20));
    assert!(queue.used().is_none(), "served without a disk");

    device.handle().give(disk(&other, false, true));
    assert_eq!(queue.wait().1, 513);
    assert_eq!(guest.read(into, 512), [0xab; 512]);
}

#[test]
fn a_disk_that_comes_back_larger_tells_the_driver() {
    let file = image();
    let mut guest = Guest::new();
    let mut queue = guest.queue(0, 16);
    let mut device = device(&file);
    device
        .activate(guest.activation(device.features(), &[&queue]))
        .unwrap();
    let old = take(&device);
    let changes = guest.config_changes();
    old.close().unwrap();
    file.as_file().set_len(2 * DISK_BYTES).unwrap();
    device.handle().give(disk(&file, false, true));
    eventually("the driver to be told", || {
        guest.config_changes() == changes + 1
    });
    let mut bytes = [0; 8];
    device.read_config(0, &mut bytes);
    let sectors = u64::from_le_bytes(bytes);
    assert_eq!(sectors, 2 * DISK_BYTES / 512);
    let into = guest.allocate(512);
    let last = [writable(into, 512)];
    assert_eq!(
        request(&mut guest, &mut queue, kind::IN, sectors - 1, &last),
        (status::OK, 513)
    );
}

#[test]
fn a_device_whose_disk_is_away_is_reset_activated_and_dropped_like_any() {
    let file = image();
    let mut guest = Guest::new();
    let mut queue = guest.queue(0, 16);
    let mut device = device(&file);
    for round in 0..3 {
        queue.clear();
        device
            .activate(guest.activation(device.features(), &[&queue]))
            .unwrap();
        let taken = take(&device);
        let laid = Laid::new(&mut guest, kind::FLUSH, 0);
        queue.offer(&laid.parts(&[]));
        queue.ring();
        reset(&mut device);
        queue.clear();
        if round == 1 {
            device
                .activate(guest.activation(device.features(), &[&queue]))
                .unwrap();
            device.handle().give(taken);
            assert_eq!(
                request(&mut guest, &mut queue, kind::FLUSH, 0, &[]),
                (status::OK, 1)
            );
            reset(&mut device);
        } else if round == 2 {
            let handle = device.handle();
            drop(device);
            handle.give(taken);
            // Nobody keeps it open: the lock is free.
            drop(disk(&file, false, true));
            return;
        } else {
            device.handle().give(taken);
        }
    }
}

#[test]
fn a_disk_leaves_only_when_nothing_is_under_way_and_all_is_flushed() {
    let puppet = Puppet::new();
    let mut device = puppet.device(&options(1));
    let mut guest = Guest::new();
    let mut queue = guest.queue(0, 16);
    device
        .activate(guest.activation(device.features(), &[&queue]))
        .unwrap();
    let out = guest.place(&[1; 512]);
    let laid = Laid::new(&mut guest, kind::OUT, 0);
    queue.offer(&laid.parts(&[readable(out, 512)]));
    queue.ring();
    puppet.wait_held(1);
    let (sender, left) = channel();
    device
        .handle()
        .calls
        .send(Call::Take(Box::new(move |_, flushed| {
            sender.send(flushed).unwrap();
        })))
        .unwrap();
    device.handle().caller.call().unwrap();
    queue.offer(&Laid::new(&mut guest, kind::OUT, 1).parts(&[readable(out, 512)]));
    queue.ring();
    std::thread::sleep(std::time::Duration::from_millis(20));
    assert_eq!(puppet.0.held.lock().unwrap().len(), 1, "more was started");
    assert!(left.try_recv().is_err());
    puppet.finish_one(Ok(()));
    queue.wait();
    puppet.wait_held(1);
    assert!(matches!(puppet.0.held.lock().unwrap()[0].1, Op::Flush));
    puppet.finish_one(NO_SPACE);
    let flushed = left.recv_timeout(PATIENCE).unwrap();
    assert_eq!(flushed, NO_SPACE, "a failed flush is told");
}

/// A puppet's device that stops when there is no space, and where it says so.
fn stopping(puppet: &Puppet) -> (Block, std::sync::mpsc::Receiver<Stopped>) {
    let device = puppet.device(&options(2));
    let policy = ErrorPolicy {
        no_space: OnError::Stop,
        io: OnError::Report,
    };
    let (sender, stops) = channel();
    let observer = Arc::new(move |stopped| sender.send(stopped).unwrap());
    device.handle().set_error_policy(policy, observer);
    (device, stops)
}

#[test]
fn a_request_without_space_is_kept_and_tried_again() {
    let puppet = Puppet::new();
    let (mut device, stops) = stopping(&puppet);
    let mut guest = Guest::new();
    let mut queue = guest.queue(0, 16);
    device
        .activate(guest.activation(device.features(), &[&queue]))
        .unwrap();
    let out = guest.place(&[1; 512]);
    let laid = [
        Laid::new(&mut guest, kind::OUT, 8),
        Laid::new(&mut guest, kind::OUT, 9),
    ];
    for laid in &laid {
        queue.offer(&laid.parts(&[readable(out, 512)]));
    }
    queue.ring();
    puppet.wait_held(2);
    puppet.finish_one(NO_SPACE);
    puppet.finish_one(NO_SPACE);
    let stopped = stops.recv_timeout(PATIENCE).unwrap();
    assert_eq!(
        (stopped.operation, stopped.offset, stopped.error),
        ("write", Some(8 * 512), IoError::NoSpace)
    );
    queue.offer(&Laid::new(&mut guest, kind::FLUSH, 0).parts(&[]));
    queue.ring();
    std::thread::sleep(std::time::Duration::from_millis(20));
    assert!(queue.used().is_none(), "the guest was told");
    assert!(puppet.0.held.lock().unwrap().is_empty(), "went on");
    assert!(stops.try_recv().is_err(), "one stop is told once");

    device.handle().retry();
    puppet.wait_held(3);
    for _ in 0..3 {
        puppet.finish_one(Ok(()));
    }
    for _ in 0..3 {
        queue.wait();
    }
    assert!(
        laid.iter()
            .all(|laid| guest.byte(laid.status) == status::OK)
    );
    assert_eq!(device.metrics().kept.load(Ordering::Relaxed), 2);
    assert_eq!(device.metrics().failed.load(Ordering::Relaxed), 0);
}

#[test]
fn failures_that_were_kept_can_be_reported_after_all() {
    let puppet = Puppet::new();
    let (mut device, stops) = stopping(&puppet);
    let mut guest = Guest::new();
    let mut queue = guest.queue(0, 16);
    device
        .activate(guest.activation(device.features(), &[&queue]))
        .unwrap();
    for _ in 0..2 {
        let laid = Laid::new(&mut guest, kind::FLUSH, 0);
        queue.offer(&laid.parts(&[]));
        queue.ring();
        puppet.wait_held(1);
        puppet.finish_one(NO_SPACE);
        if stops.recv_timeout(PATIENCE).is_ok() {
            device.handle().report();
        }
        queue.wait();
        assert_eq!(guest.byte(laid.status), status::IOERR);
        device.handle().retry();
    }
}

#[test]
fn a_reset_forgets_what_was_kept() {
    let puppet = Puppet::new();
    let (mut device, stops) = stopping(&puppet);
    let mut guest = Guest::new();
    let mut queues = [guest.queue(0, 16), guest.queue(1, 16)];
    let [first, second] = &mut queues;
    device
        .activate(guest.activation(device.features(), &[first, second]))
        .unwrap();
    let two = guest.place(&[segment(0, 8, 0), segment(16, 8, 0)].concat());
    let laid = Laid::new(&mut guest, kind::DISCARD, 0);
    first.offer(&laid.parts(&[readable(two, 32)]));
    first.ring();
    puppet.wait_held(2);
    second.offer(&Laid::new(&mut guest, kind::FLUSH, 0).parts(&[]));
    second.ring();
    puppet.wait_held(3);
    for _ in 0..3 {
        puppet.finish_one(NO_SPACE);
    }
    stops.recv_timeout(PATIENCE).unwrap();
    eventually("all to be kept", || {
        device.metrics().kept.load(Ordering::Relaxed) == 3
    });
    reset_queue(&mut device, 0);
    device.handle().retry();
    puppet.wait_held(1);
    puppet.finish_one(Ok(()));
    second.wait();
    reset(&mut device);
}
