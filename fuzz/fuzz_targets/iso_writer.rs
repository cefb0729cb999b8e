//! Any names and contents: either refused, or an image that an independent reader reads back in both trees.
#![no_main]

#[path = "../../worker/tests/support/iso_reader.rs"]
mod iso_reader;

use drover_worker::seed::iso::{IsoFile, build};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: (String, Vec<(String, Vec<u8>)>)| {
    let (label, files) = input;
    // Most labels are refused; their images would never be looked at.
    let label = if build(&label, &[]).is_ok() { label } else { "cidata".to_owned() };
    let borrowed: Vec<_> = files.iter().map(|(name, contents)| IsoFile { name, contents }).collect();
    let Ok(image) = build(&label, &borrowed) else { return };
    let read = iso_reader::read(&image).expect("an image that cannot be read");
    let expected: iso_reader::Files = files.iter().cloned().collect();
    assert_eq!(read.label, label);
    assert_eq!(read.joliet_label, label);
    assert_eq!(read.rock_ridge, expected);
    assert_eq!(read.joliet, expected);
    assert_eq!(read.level_1.len(), files.len());
});
