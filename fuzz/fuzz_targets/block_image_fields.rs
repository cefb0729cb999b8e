//! An image is hostile: a sound one with some of its fields changed is refused or served, whatever is done to it.
#![no_main]

mod kitchen;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| kitchen::with(|kitchen| kitchen.structured(input)));
