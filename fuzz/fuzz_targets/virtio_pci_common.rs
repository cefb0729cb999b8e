//! A driver may do anything with the transport's registers: the device is never given a queue twice or activated twice (the device in
//! `machine` checks), the state can be saved and taken up, and after a reset an orderly driver gets it to work.
#![no_main]

#[allow(dead_code)]
mod machine;

use drover_devices::pci::PciDevice;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    let machine = machine::machine();
    let virtio = &machine.virtio;
    let config = |offset, data: &[u8]| machine.bus.config_write(machine::VIRTIO, offset, data);
    config(0x04, &[6, 0]);
    for access in machine::accesses(input) {
        let mut data = [0; 8];
        let data = &mut data[..access.data.len()];
        match access.kind % 8 {
            0..=3 => virtio.region_write(0, u64::from(access.offset % 64), access.data),
            4 => virtio.region_read(0, u64::from(access.offset % 64), data),
            5 => virtio.region_write(0, access.offset.into(), access.data),
            6 => virtio.region_read(0, access.offset.into(), data),
            _ => config(access.offset % 256, access.data),
        }
    }

    let state = virtio.save();
    let other = machine::machine();
    // Refused or taken up, but never a panic; a refusal is right when the driver had broken its queues.
    let _ = other.virtio.restore(&state, &[]);

    config(0x04, &[6, 0]);
    let write = |offset, data: &[u8]| virtio.region_write(0, offset, data);
    write(20, &[0]);
    let mut status = [0xff];
    virtio.region_read(0, 20, &mut status);
    assert_eq!(status, [0]);
    write(20, &[3]);
    write(8, &1_u32.to_le_bytes());
    write(12, &1_u32.to_le_bytes());
    write(20, &[11]);
    write(32, &0x1000_u64.to_le_bytes());
    write(40, &0x2000_u64.to_le_bytes());
    write(48, &0x3000_u64.to_le_bytes());
    write(28, &1_u16.to_le_bytes());
    write(20, &[15]);
    virtio.region_read(0, 20, &mut status);
    assert_eq!(status, [15]);
});
