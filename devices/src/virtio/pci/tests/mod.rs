//! The transport, driven through configuration space and BAR as a guest's driver would.

mod driver;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use proptest::prelude::*;
use virtio_queue::QueueT;

use self::driver::{AT, DEVICE_FEATURE, Driver, MEMORY_SIZE, RING_RESET, VERSION_1, plug, probe};
use super::{QueuePosition, RestoreError, VirtioPciState};
use crate::pci::{PciDevice, PciError};

const NEEDS_RESET: u8 = 64;
const COMMAND: u16 = 4;

#[test]
fn a_driver_finds_every_structure_inside_the_bar() {
    let driver = probe(&[256, 256]);
    assert_eq!(driver.read_config(0, 4), 0x1042_1af4);
    assert_eq!(
        driver.read_config(8, 1),
        1,
        "revision of a non-transitional device"
    );
    assert_eq!(driver.read_config(0x3d, 1), 1, "INTA#");
    assert_eq!(driver.host.gsi.load(Ordering::SeqCst), 17);
    assert_eq!(
        driver.structures.keys().collect::<Vec<_>>(),
        [&1, &2, &3, &4, &5]
    );
    for kind in 1..=4 {
        let structure = driver.structures[&kind];
        assert!(structure.length > 0 && structure.offset + structure.length <= 0x1_0000);
    }
    assert_eq!(driver.structures[&1].length, 60, "no administration queue");
    assert_eq!(driver.notify_multiplier, 4);
    assert_eq!(driver.structures[&2].length, 8);
    assert_eq!(driver.read_config(driver.msix + 2, 2), 2, "three vectors");
    assert_eq!(driver.read(1, 18, 2), 2, "two queues");
}

#[test]
fn negotiation_accepts_offered_features_and_tells_the_device() {
    let driver = probe(&[16]);
    assert_eq!(
        driver.offered(),
        DEVICE_FEATURE | 1 << 29 | VERSION_1 | RING_RESET
    );
    driver.start(VERSION_1 | DEVICE_FEATURE, &[0]);
    assert_eq!(driver.status(), 15);
    assert_eq!(driver.script.take_events(), ["activate [0]"]);
    let features = driver.script.features.load(Ordering::SeqCst);
    assert_eq!(features, VERSION_1 | DEVICE_FEATURE);
    assert_eq!(driver.driver_errors(), 0);
}

#[test]
fn a_feature_that_was_not_offered_is_refused_by_clearing_features_ok() {
    let driver = probe(&[16]);
    driver.negotiate(VERSION_1 | 1 << 7);
    assert_eq!(driver.status(), 3);
    driver.accept(VERSION_1);
    driver.set_status(11);
    assert_eq!(driver.status(), 11, "a driver may try again with fewer");
}

#[test]
fn a_driver_without_version_1_is_refused() {
    let driver = probe(&[16]);
    driver.negotiate(DEVICE_FEATURE);
    assert_eq!(driver.status(), 3);
    driver.set_status(15);
    assert_eq!(driver.status(), 3, "DRIVER_OK needs FEATURES_OK");
    assert!(driver.script.take_events().is_empty());
}

#[test]
fn features_are_frozen_after_features_ok() {
    let driver = probe(&[16]);
    driver.negotiate(VERSION_1);
    driver.accept(VERSION_1 | DEVICE_FEATURE);
    driver.write32(8, 0);
    assert_eq!(driver.read(1, 12, 4), 0);
}

#[test]
fn any_subset_of_the_queues_may_be_enabled() {
    let driver = probe(&[16, 32, 64, 128]);
    driver.start(VERSION_1, &[1, 3]);
    assert_eq!(driver.script.take_events(), ["activate [1, 3]"]);
    assert_eq!(driver.attached(), [driver.doorbell(1), driver.doorbell(3)]);
}

#[test]
fn a_driver_may_enable_no_queue_at_all() {
    let driver = probe(&[16, 16]);
    driver.start(VERSION_1, &[]);
    assert_eq!(driver.status(), 15);
    assert_eq!(driver.script.take_events(), ["activate []"]);
}

#[test]
fn a_queue_gets_the_size_and_addresses_the_driver_wrote() {
    let driver = probe(&[16, 256]);
    driver.negotiate(VERSION_1 | 1 << 29);
    driver.write16(22, 1);
    assert_eq!(driver.read(1, 24, 2), 256);
    driver.enable_queue(1, 64);
    assert_eq!((driver.read(1, 24, 2), driver.read(1, 28, 2)), (64, 1));
    assert_eq!((driver.read(1, 30, 2), driver.read(1, 56, 2)), (1, 1));
    assert_eq!(driver.read(1, 32, 8), 0x1_4000);
    driver.set_status(15);
    let queues = driver.script.queues.lock().unwrap();
    let queue = &queues[&1].queue;
    assert_eq!((queue.size(), queue.desc_table()), (64, 0x1_4000));
    assert_eq!(
        (queue.avail_ring(), queue.used_ring()),
        (0x1_6000, 0x1_7000)
    );
    assert!(queue.event_idx_enabled());
}

#[test]
fn a_queue_that_does_not_exist_has_size_zero_and_cannot_be_enabled() {
    let driver = probe(&[16]);
    driver.negotiate(VERSION_1);
    driver.write16(22, 1);
    assert_eq!(driver.read(1, 24, 2), 0);
    driver.write16(28, 1);
    assert_eq!(driver.read(1, 28, 2), 0);
    driver.set_status(15);
    assert_eq!(driver.script.take_events(), ["activate []"]);
}

#[test]
fn sizes_that_no_queue_can_have_are_not_stored() {
    let driver = probe(&[64]);
    for size in [0, 3, 48, 128, 0x8000] {
        driver.write16(24, size);
        assert_eq!(driver.read(1, 24, 2), 64);
    }
}

#[test]
fn rings_outside_guest_memory_or_misaligned_break_only_the_device() {
    for (register, address) in [
        (32, MEMORY_SIZE - 0xf0),
        (32, 0x1_0008),
        (40, MEMORY_SIZE),
        (40, 0x1_2001),
        (48, u64::MAX - 3),
        (48, 0x1_3002),
    ] {
        let driver = probe(&[16]);
        driver.negotiate(VERSION_1);
        driver.set_queue(0, 16);
        driver.write(1, register, &address.to_le_bytes());
        driver.write16(28, 1);
        assert_eq!(driver.read(1, 28, 2), 0, "{register} {address:#x}");
        assert_eq!(driver.status() & NEEDS_RESET, NEEDS_RESET);
        driver.set_status(0);
        driver.start(VERSION_1, &[0]);
        assert_eq!(driver.status(), 15);
    }
}

#[test]
fn an_enabled_queues_registers_are_frozen() {
    let driver = probe(&[16]);
    driver.negotiate(VERSION_1);
    driver.enable_queue(0, 16);
    driver.write16(24, 8);
    driver.write32(32, 0);
    driver.write16(28, 0);
    assert_eq!(driver.read(1, 24, 2), 16);
    assert_eq!(driver.read(1, 32, 8), 0x1_0000);
    assert_eq!(driver.read(1, 28, 2), 1);
}

#[test]
fn registers_read_alike_in_every_width() {
    let driver = probe(&[16, 16]);
    driver.negotiate(VERSION_1);
    driver.enable_queue(1, 8);
    let bytes: Vec<u8> = (0..64).map(|at| driver.read(1, at, 1) as u8).collect();
    for width in [2_u64, 4, 8] {
        for at in (0..64).step_by(width as usize) {
            let mut expected = [0; 8];
            let from = at as usize;
            expected[..width as usize].copy_from_slice(&bytes[from..from + width as usize]);
            let read = driver.read(1, at, width as usize);
            assert_eq!(read, u64::from_le_bytes(expected), "{width} bytes at {at}");
        }
    }
}

#[test]
fn a_reset_while_active_reads_non_zero_until_the_device_has_let_go() {
    let driver = probe(&[16]);
    driver.start(VERSION_1, &[0]);
    driver.script.slow.store(true, Ordering::SeqCst);
    driver.set_status(0);
    assert_ne!(driver.status(), 0);
    assert!(
        driver.attached().is_empty(),
        "no doorbell of a stopping device"
    );
    driver.script.slow.store(false, Ordering::SeqCst);
    assert_eq!(driver.status(), 0);
    driver.write16(22, 0);
    assert_eq!(driver.read(1, 28, 2), 0);
    assert_eq!(driver.script.take_events(), ["activate [0]", "reset"]);
}

#[test]
fn a_device_can_be_reset_and_started_again_with_other_queues() {
    let driver = probe(&[16, 16, 16]);
    for queues in [&[0][..], &[0, 1, 2], &[2]] {
        driver.start(VERSION_1, queues);
        let expected: Vec<_> = queues
            .iter()
            .map(|q| driver.doorbell(u64::from(*q)))
            .collect();
        assert_eq!(driver.attached(), expected);
        assert_eq!(
            driver.script.take_events(),
            [format!("activate {queues:?}")]
        );
        driver.set_status(0);
        assert_eq!(driver.status(), 0);
        assert_eq!(driver.script.take_events(), ["reset"]);
    }
}

#[test]
fn a_driver_that_does_not_poll_the_reset_waits_for_it_and_then_goes_on() {
    let driver = probe(&[16]);
    driver.start(VERSION_1, &[0]);
    driver.script.slow.store(true, Ordering::SeqCst);
    driver.set_status(0);
    let slow = Arc::clone(&driver.script.slow);
    let release = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(20));
        slow.store(false, Ordering::SeqCst);
    });
    driver.start(VERSION_1, &[0]);
    release.join().unwrap();
    assert_eq!(driver.status(), 15);
    let events = driver.script.take_events();
    assert_eq!(events, ["activate [0]", "reset", "activate [0]"]);
}

#[test]
fn processors_that_wait_for_one_reset_wait_side_by_side() {
    let driver = probe(&[16]);
    driver.start(VERSION_1, &[0]);
    driver.script.slow.store(true, Ordering::SeqCst);
    driver.set_status(0);
    let began = std::time::Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| driver.write16(22, 0));
        }
    });
    let waited = began.elapsed();
    driver.script.slow.store(false, Ordering::SeqCst);
    assert!(waited >= super::RESET_PATIENCE, "{waited:?}");
    assert!(waited < 2 * super::RESET_PATIENCE, "{waited:?}");
}

#[test]
fn resetting_a_device_that_was_never_started_asks_nothing_of_it() {
    let driver = probe(&[16]);
    driver.negotiate(VERSION_1);
    driver.set_status(0);
    assert_eq!(driver.status(), 0);
    assert!(driver.script.take_events().is_empty());
}

#[test]
fn a_queue_can_be_reset_alone_and_enabled_again() {
    let driver = probe(&[64, 64]);
    driver.start(VERSION_1 | RING_RESET, &[0, 1]);
    driver.script.take_events();
    driver.script.slow.store(true, Ordering::SeqCst);
    driver.write16(22, 1);
    driver.write16(58, 1);
    assert_eq!((driver.read(1, 58, 2), driver.read(1, 28, 2)), (1, 1));
    assert_eq!(driver.attached(), [driver.doorbell(0)]);
    driver.write16(28, 1);
    driver.script.slow.store(false, Ordering::SeqCst);
    assert_eq!((driver.read(1, 58, 2), driver.read(1, 28, 2)), (0, 0));
    assert_eq!(driver.read(1, 24, 2), 64, "back at the greatest size");
    assert_eq!(driver.read(1, 26, 2), 0xffff);

    driver.enable_queue(1, 32);
    assert_eq!(driver.read(1, 28, 2), 1);
    assert_eq!(
        driver.script.take_events(),
        ["reset queue 1", "enable queue 1 of 32"]
    );
    assert_eq!(driver.attached(), [driver.doorbell(0), driver.doorbell(1)]);
    assert_eq!(driver.status(), 15);
}

#[test]
fn queue_reset_needs_its_feature() {
    let driver = probe(&[16]);
    driver.start(VERSION_1, &[0]);
    driver.write16(58, 1);
    assert_eq!(driver.read(1, 28, 2), 1);
    assert_eq!(driver.script.take_events(), ["activate [0]"]);
}

#[test]
fn a_device_reset_also_ends_a_queue_reset_under_way() {
    let driver = probe(&[16]);
    driver.start(VERSION_1 | RING_RESET, &[0]);
    driver.script.slow.store(true, Ordering::SeqCst);
    driver.write16(58, 1);
    driver.set_status(0);
    driver.script.slow.store(false, Ordering::SeqCst);
    assert_eq!(driver.status(), 0);
    driver.start(VERSION_1, &[0]);
    assert_eq!(driver.read(1, 58, 2), 0);
    assert_eq!(driver.status(), 15);
}

#[test]
fn a_device_that_cannot_start_asks_for_a_reset() {
    let driver = probe(&[16]);
    driver.script.refuse.store(true, Ordering::SeqCst);
    driver.start(VERSION_1, &[0]);
    assert_eq!(driver.status(), 15 | NEEDS_RESET);
    assert!(driver.attached().is_empty());
    driver.script.refuse.store(false, Ordering::SeqCst);
    driver.set_status(0);
    driver.start(VERSION_1, &[0]);
    assert_eq!(driver.status(), 15);
}

#[test]
fn a_device_that_fails_while_running_interrupts_with_needs_reset() {
    let driver = probe(&[16]);
    driver.enable_msix(1);
    driver.start(VERSION_1, &[0]);
    driver.script.interrupt().needs_reset();
    assert_eq!(driver.status(), 15 | NEEDS_RESET);
    assert_eq!(driver.fired(), [1, 0]);
    driver.set_status(0);
    assert_eq!(driver.status(), 0);
}

#[test]
fn queue_interrupts_use_the_vector_of_their_queue() {
    let driver = probe(&[16, 16]);
    driver.enable_msix(2);
    driver.start(VERSION_1, &[0, 1]);
    let interrupt = driver.script.interrupt();
    interrupt.queue(0);
    interrupt.queue(1);
    interrupt.queue(1);
    interrupt.config();
    assert_eq!(driver.fired(), [1, 1, 2]);
    assert!(!driver.line());
    let vectors = driver.host.vectors.lock().unwrap();
    assert_eq!(vectors[2].message.lock().unwrap().unwrap().data, 0x42);
}

#[test]
fn without_a_vector_nothing_is_sent_under_msix() {
    let driver = probe(&[16]);
    driver.enable_msix(1);
    driver.write16(22, 0);
    driver.write16(26, 0xffff);
    driver.start(VERSION_1, &[0]);
    driver.script.interrupt().queue(0);
    assert_eq!(driver.fired(), [0, 0]);
    assert!(!driver.line());
}

#[test]
fn a_vector_that_does_not_exist_reads_back_as_none() {
    let driver = probe(&[16]);
    driver.write16(16, 2);
    driver.write16(26, 7);
    assert_eq!(
        (driver.read(1, 16, 2), driver.read(1, 26, 2)),
        (0xffff, 0xffff)
    );
    driver.write16(26, 1);
    assert_eq!(driver.read(1, 26, 2), 1);
}

#[test]
fn without_msix_the_line_is_asserted_until_isr_is_read() {
    let driver = probe(&[16]);
    driver.start(VERSION_1, &[0]);
    let interrupt = driver.script.interrupt();
    interrupt.queue(0);
    assert!(driver.line());
    assert_eq!(driver.read_config(6, 2) & 8, 8, "interrupt status");
    interrupt.config();
    assert_eq!(driver.read(3, 0, 1), 3);
    assert!(!driver.line());
    assert_eq!(driver.read(3, 0, 1), 0);
    assert_eq!(driver.read_config(6, 2) & 8, 0);
}

#[test]
fn a_disabled_line_is_released_but_still_reported_in_status() {
    let driver = probe(&[16]);
    driver.start(VERSION_1, &[0]);
    driver.script.interrupt().queue(0);
    driver.write_config(COMMAND, &0x0406_u16.to_le_bytes());
    assert!(!driver.line());
    assert_eq!(driver.read_config(6, 2) & 8, 8);
    driver.write_config(COMMAND, &0x0006_u16.to_le_bytes());
    assert!(driver.line());
}

#[test]
fn a_reset_releases_the_line() {
    let driver = probe(&[16]);
    driver.start(VERSION_1, &[0]);
    driver.script.interrupt().queue(0);
    driver.set_status(0);
    assert!(!driver.line());
}

#[test]
fn doorbells_follow_the_bar_and_memory_decoding() {
    let mut driver = probe(&[16, 16]);
    driver.start(VERSION_1, &[0, 1]);
    let old = driver.attached();
    driver.write_config(0x10, &0xa000_0000_u32.to_le_bytes());
    driver.find_structures();
    assert_eq!(driver.bar, 0xa000_0000);
    assert_eq!(driver.attached(), [driver.doorbell(0), driver.doorbell(1)]);
    assert_ne!(driver.attached(), old);
    assert_eq!(driver.status(), 15);

    driver.write_config(COMMAND, &0x0004_u16.to_le_bytes());
    assert!(driver.attached().is_empty());
    driver.write_config(COMMAND, &0x0006_u16.to_le_bytes());
    assert_eq!(driver.attached(), [driver.doorbell(0), driver.doorbell(1)]);
}

#[test]
fn a_notification_that_comes_as_an_exit_rings_the_same_doorbell() {
    let driver = probe(&[16, 16]);
    driver.host.refuse_doorbells.store(true, Ordering::SeqCst);
    driver.start(VERSION_1, &[0, 1]);
    assert!(driver.attached().is_empty());
    driver.write(2, 4, &1_u16.to_le_bytes());
    let queues = driver.script.queues.lock().unwrap();
    assert_eq!(queues[&1].doorbell.read().unwrap(), 1);
    assert!(queues[&0].doorbell.read().is_err());
    let metrics = driver.function.metrics();
    assert_eq!(metrics.notify_exits.load(Ordering::Relaxed), 1);
    assert_eq!(metrics.host_errors.load(Ordering::Relaxed), 2);
}

#[test]
fn a_notification_from_before_a_reset_is_not_seen_after_it() {
    let driver = probe(&[16]);
    driver.start(VERSION_1, &[0]);
    driver.write(2, 0, &0_u16.to_le_bytes());
    driver.set_status(0);
    driver.start(VERSION_1, &[0]);
    let queues = driver.script.queues.lock().unwrap();
    assert!(queues[&0].doorbell.read().is_err());
}

#[test]
fn a_device_starts_only_once_it_may_master_the_bus() {
    let driver = probe(&[16]);
    driver.write_config(COMMAND, &0x0002_u16.to_le_bytes());
    driver.start(VERSION_1, &[0]);
    assert_eq!(driver.status(), 15);
    assert!(driver.script.take_events().is_empty());
    driver.write_config(COMMAND, &0x0006_u16.to_le_bytes());
    assert_eq!(driver.script.take_events(), ["activate [0]"]);
    assert_eq!(driver.attached(), [driver.doorbell(0)]);
}

#[test]
fn a_running_device_that_loses_the_bus_stops_and_needs_a_reset() {
    let driver = probe(&[16]);
    driver.enable_msix(1);
    driver.start(VERSION_1, &[0]);
    let interrupt = driver.script.interrupt();
    driver.write_config(COMMAND, &0x0002_u16.to_le_bytes());
    assert_eq!(driver.script.take_events(), ["activate [0]", "reset"]);
    interrupt.queue(0);
    assert_eq!(driver.fired(), [0, 0], "no message without bus mastering");
    driver.write_config(COMMAND, &0x0006_u16.to_le_bytes());
    assert_eq!(driver.status(), 15 | NEEDS_RESET);
    driver.set_status(0);
    assert_eq!(driver.status(), 0);
    driver.start(VERSION_1, &[0]);
    assert_eq!(driver.status(), 15);
}

#[test]
fn the_generation_changes_with_the_configuration() {
    let driver = probe(&[16]);
    driver.start(VERSION_1, &[0]);
    let before = driver.read(1, 21, 1);
    driver.script.interrupt().config();
    assert_ne!(driver.read(1, 21, 1), before);
}

#[test]
fn device_configuration_is_read_and_written_in_any_width() {
    let driver = probe(&[16]);
    assert_eq!(driver.read(4, 0, 8), 0x0807_0605_0403_0201);
    assert_eq!(driver.read(4, 6, 4), 0x0807, "zero past the end");
    driver.write(4, 2, &[0xaa]);
    assert_eq!(driver.read(4, 0, 4), 0x04aa_0201);
}

#[test]
fn registers_are_reachable_through_configuration_space_without_a_mapped_bar() {
    let mut driver = plug(&[16, 16]);
    driver.find_structures();
    let window = driver.structures[&5].capability;
    let common = driver.structures[&1].offset as u32;
    driver.write_config(window + 8, &(common + 18).to_le_bytes());
    driver.write_config(window + 12, &2_u32.to_le_bytes());
    assert_eq!(driver.read_config(window + 16, 2), 2, "num_queues");
    driver.write_config(window + 8, &(common + 20).to_le_bytes());
    driver.write_config(window + 12, &1_u32.to_le_bytes());
    driver.write_config(window + 16, &[1]);
    assert_eq!(driver.function.save().common.device_status, 1);
    for (bar, offset, length) in [(1, 0, 4), (0, 0x1_0000, 4), (0, 2, 4), (0, 0, 3)] {
        driver.write_config(window + 4, &[bar]);
        driver.write_config(window + 8, &u32::to_le_bytes(offset));
        driver.write_config(window + 12, &u32::to_le_bytes(length));
        driver.write_config(window + 16, &[0]);
        driver.read_config(window + 16, 4);
    }
    assert_eq!(
        driver.function.save().common.device_status,
        1,
        "nothing was reset"
    );
}

#[test]
fn a_machine_reset_stops_the_device_and_forgets_the_driver() {
    let driver = probe(&[16]);
    driver.enable_msix(1);
    driver.start(VERSION_1, &[0]);
    driver.bus.reset_all(Duration::from_secs(1)).unwrap();
    assert_eq!(driver.script.take_events(), ["activate [0]", "reset"]);
    assert!(driver.attached().is_empty());
    assert_eq!(driver.read_config(COMMAND, 2), 0);
    assert_eq!(driver.read_config(driver.msix + 2, 2), 1, "MSI-X is off");
    let state = driver.function.save();
    assert_eq!(
        (state.common.device_status, state.config_vector),
        (0, 0xffff)
    );
}

#[test]
fn a_machine_reset_names_the_device_that_does_not_stop() {
    let driver = probe(&[16]);
    driver.start(VERSION_1, &[0]);
    driver.script.slow.store(true, Ordering::SeqCst);
    let result = driver.bus.reset_all(Duration::from_millis(5));
    assert_eq!(result, Err(PciError::ResetTimedOut(vec![AT])));
}

/// A second machine that takes up what was saved from a first.
fn restored(
    state: &VirtioPciState,
    sizes: &[u16],
    positions: &[QueuePosition],
) -> (Driver, Result<(), RestoreError>) {
    let mut driver = plug(sizes);
    let result = driver.function.restore(state, positions);
    driver.bus.update_mappings();
    driver.find_structures();
    (driver, result)
}

#[test]
fn a_running_transport_continues_from_its_saved_state() {
    let old = probe(&[16, 16]);
    old.enable_msix(2);
    old.start(VERSION_1 | RING_RESET, &[1]);
    old.script.interrupt().config();
    let text = serde_json::to_string(&old.function.save()).unwrap();
    let state: VirtioPciState = serde_json::from_str(&text).unwrap();

    let position = QueuePosition {
        index: 1,
        next_avail: 700,
        next_used: 698,
    };
    let (new, result) = restored(&state, &[16, 16], &[position]);
    result.unwrap();
    assert_eq!(new.function.save(), state);
    assert_eq!(new.script.take_events(), ["activate [1]"]);
    assert_eq!(new.attached(), [new.doorbell(1)]);
    new.script.interrupt().queue(1);
    assert_eq!(new.fired(), [0, 0, 1]);
    let queues = new.script.queues.lock().unwrap();
    assert_eq!(queues[&1].queue.next_avail(), 700);
    assert_eq!(queues[&1].queue.next_used(), 698);
}

#[test]
fn a_half_negotiated_transport_goes_on_where_it_was() {
    let old = probe(&[16]);
    old.negotiate(VERSION_1);
    old.set_queue(0, 8);
    let (new, result) = restored(&old.function.save(), &[16], &[]);
    result.unwrap();
    assert_eq!(new.status(), 11);
    assert_eq!(new.read(1, 24, 2), 8);
    new.write16(28, 1);
    new.set_status(15);
    assert_eq!(new.script.take_events(), ["activate [0]"]);
}

#[test]
fn a_state_that_does_not_fit_this_device_is_refused_and_changes_nothing() {
    let old = probe(&[16, 16]);
    old.start(VERSION_1, &[0]);
    let good = old.function.save();
    let refuse = |state: &VirtioPciState, sizes: &[u16]| {
        let driver = plug(sizes);
        let before = driver.function.save();
        assert!(driver.function.restore(state, &[]).is_err());
        assert_eq!(driver.function.save(), before);
    };
    refuse(&good, &[16]);
    refuse(&good, &[8, 8]);
    let mut bad = good.clone();
    bad.common.driver_features |= 1 << 50;
    refuse(&bad, &[16, 16]);
    bad = good.clone();
    bad.common.queues[1].size = 3;
    refuse(&bad, &[16, 16]);
    bad = good.clone();
    bad.config.bytes[0] ^= 1;
    refuse(&bad, &[16, 16]);
    bad = good.clone();
    bad.msix.entries.pop();
    refuse(&bad, &[16, 16]);
    assert!(matches!(
        old.function.restore(&good, &[]),
        Err(RestoreError::InUse)
    ));
}

#[test]
fn saved_rings_that_are_not_in_memory_do_not_start_the_device() {
    let old = probe(&[16]);
    old.start(VERSION_1, &[0]);
    let mut state = old.function.save();
    state.common.queues[0].desc = MEMORY_SIZE;
    let (new, result) = restored(&state, &[16], &[]);
    assert!(matches!(result, Err(RestoreError::NotStarted)));
    assert_eq!(new.status() & NEEDS_RESET, NEEDS_RESET);
}

/// One access of a driver that follows no rules.
#[derive(Clone, Debug)]
enum Access {
    Read(u64, usize),
    Write(u64, Vec<u8>),
    ConfigRead(u16, usize),
    ConfigWrite(u16, Vec<u8>),
}

fn access() -> impl Strategy<Value = Access> {
    let width = prop::sample::select(vec![1_usize, 2, 4, 8]);
    // Mostly common configuration, else anywhere in the BAR.
    let offset = prop_oneof![3 => 0_u64..64, 1 => 0_u64..0x1_0000];
    let value = prop_oneof![
        prop::collection::vec(0_u8..16, 8),
        prop::collection::vec(any::<u8>(), 8)
    ];
    let config = prop_oneof![0_u16..0x100, 0_u16..0x1000];
    (offset, config, width, value, 0..4).prop_map(|(offset, config, width, value, kind)| {
        let data = value[..width].to_vec();
        match kind {
            0 => Access::Read(offset, width),
            1 | 2 => Access::Write(offset, data),
            _ if offset % 2 == 0 => Access::ConfigRead(config, width),
            _ => Access::ConfigWrite(config, data),
        }
    })
}

proptest! {
    #[test]
    fn whatever_a_driver_does_a_reset_makes_the_device_usable_again(
        accesses in prop::collection::vec(access(), 1..200),
    ) {
        let driver = probe(&[16, 64]);
        let identity = driver.read_config(0, 4);
        for access in &accesses {
            match access {
                Access::Read(offset, width) => {
                    driver.function.region_read(0, *offset, &mut [0; 8][..*width]);
                }
                Access::Write(offset, data) => driver.function.region_write(0, *offset, data),
                Access::ConfigRead(offset, width) => {
                    driver.read_config(*offset, *width);
                }
                Access::ConfigWrite(offset, data) => driver.write_config(*offset, data),
            }
        }
        prop_assert_eq!(driver.read_config(0, 4), identity);
        driver.write_config(0x10, &0xa000_0000_u32.to_le_bytes());
        driver.write_config(0x14, &[0; 4]);
        driver.write_config(COMMAND, &0x0006_u16.to_le_bytes());
        let mut driver = driver;
        driver.find_structures();
        driver.set_status(0);
        prop_assert_eq!(driver.status(), 0);
        driver.script.take_events();
        driver.start(VERSION_1, &[0, 1]);
        prop_assert_eq!(driver.status(), 15);
        prop_assert_eq!(driver.script.take_events(), ["activate [0, 1]"]);
        prop_assert_eq!(driver.attached(), [driver.doorbell(0), driver.doorbell(1)]);
    }
}
