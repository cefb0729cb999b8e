//! Commands of a guest's network driver: what the parser accepts is of a negotiated feature and can be answered.
#![no_main]

use drover_devices::virtio::net::bits::feature;
use drover_devices::virtio::net::control::{self, Command};
use libfuzzer_sys::fuzz_target;

mod guest;

fuzz_target!(|data: &[u8]| {
    let Some((features, data)) = data.split_first_chunk() else { return };
    let features = u64::from_le_bytes(*features);
    let memory = guest::memory(data);
    let mut bytes = Vec::new();
    guest::for_each_chain(&memory, |chain| {
        if let Ok((command, answer)) = control::parse(&memory, chain, features, &mut bytes) {
            assert!(answer.0 < guest::RAM_BYTES);
            match command {
                Command::SetGuestOffloads(wanted) => assert_eq!(wanted & !features, 0),
                Command::SetQueuePairs(_) => assert_ne!(features & feature::MQ, 0),
                Command::SetMac(_) => assert_ne!(features & feature::CTRL_MAC_ADDR, 0),
                Command::ReceiveMode | Command::FilterTables => {
                    assert_ne!(features & feature::CTRL_RX, 0);
                }
            }
        }
    });
});
