//! Any text is answered by a definition or by an error of one line, and an accepted definition reads back as itself.
#![no_main]

use drover_api::definition::parse;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &[u8]| {
    let parsed = parse(text, "fuzz").and_then(|vm| vm.validate().map(|()| vm));
    match parsed {
        Ok(vm) => {
            let json = serde_json::to_vec(&vm).expect("a definition from a text can be written");
            assert_eq!(parse(&json, "fuzz").expect("what was written can be read"), vm);
        }
        Err(error) => assert!(!error.to_string().contains('\n'), "{error}"),
    }
});
