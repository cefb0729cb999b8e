//! An image is hostile: any bytes are refused or served as an image, whatever is done to it.
#![no_main]

mod kitchen;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| kitchen::with(|kitchen| kitchen.raw(input)));
