//! Frames of a guest: what the parser accepts has a frame in RAM and asks for negotiated offloads only.
#![no_main]

use drover_devices::virtio::memory::MAX_SLICES;
use drover_devices::virtio::net::bits::{feature, gso, header_flag};
use drover_devices::virtio::net::tx;
use libfuzzer_sys::fuzz_target;

mod guest;

fuzz_target!(|data: &[u8]| {
    let Some((features, data)) = data.split_first_chunk() else { return };
    let features = u64::from_le_bytes(*features);
    let memory = guest::memory(data);
    let mut slices = Vec::new();
    guest::for_each_chain(&memory, |chain| {
        if let Ok(header) = tx::parse(&memory, chain, features, &mut slices) {
            assert!((2..=MAX_SLICES).contains(&slices.len()));
            assert!(slices[1..].iter().all(|slice| slice.len() as u64 <= guest::RAM_BYTES));
            if header.gso_type != gso::NONE {
                let all = feature::HOST_TSO4 | feature::HOST_TSO6 | feature::HOST_UFO | feature::HOST_USO;
                assert_ne!(features & all, 0);
                assert_eq!(header.flags, header_flag::NEEDS_CSUM);
            }
        }
    });
});
