//! Whatever is written to configuration space, through the ports, ECAM or the bus, identities stay and a function can be placed again.
#![no_main]

#[allow(dead_code)]
mod machine;

use drover_devices::pci::BusDeviceFunction;
use drover_devices::pci::host::HOST_BRIDGE;
use libfuzzer_sys::fuzz_target;

const FUNCTIONS: [(u16, u32); 3] = [
    (0, 0x29c0_8086),
    (1 << 3, 0x1041_1af4),
    (0x1f << 3, 0x2918_8086),
];

fuzz_target!(|input: &[u8]| {
    let machine = machine::machine();
    for access in machine::accesses(input) {
        let (id, _) = FUNCTIONS[usize::from(access.kind >> 4) % FUNCTIONS.len()];
        let at = BusDeviceFunction::from_routing_id(id);
        let ecam = 0xe000_0000 + (u64::from(id) << 12) + u64::from(access.offset);
        let port = 0xcf8 + u64::from(access.offset % 8);
        let mut data = [0; 8];
        let data = &mut data[..access.data.len()];
        match access.kind & 0xf {
            0..=5 => machine
                .bus
                .config_write(at, access.offset % 256, access.data),
            6 => machine.bus.config_read(at, access.offset, data),
            7 | 8 => machine.memory.write(ecam, access.data),
            9 => machine.memory.read(ecam, data),
            10..=12 => machine.io.write(port, access.data),
            13 => machine.io.read(port, data),
            _ => machine.bus.config_write(at, access.offset, access.data),
        }
    }
    for (id, identity) in FUNCTIONS {
        let mut data = [0; 4];
        machine
            .bus
            .config_read(BusDeviceFunction::from_routing_id(id), 0, &mut data);
        assert_eq!(u32::from_le_bytes(data), identity);
    }
    // ECAM may have been put where the function is to go.
    machine.bus.config_write(HOST_BRIDGE, 0x60, &[0; 8]);
    let write = |offset, value: u32| {
        machine
            .bus
            .config_write(machine::VIRTIO, offset, &value.to_le_bytes());
    };
    write(0x04, 0);
    write(0x10, 0x9000_0000);
    write(0x14, 1);
    write(0x04, 0x6);
    let region = machine
        .bus
        .mapped_region(machine::VIRTIO, 0)
        .expect("nothing is in the way");
    assert_eq!(region.base, 0x1_9000_0000);
});
