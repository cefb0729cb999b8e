//! Any text: either refused in one line, or a definition from which a seed can be made or refused.
#![no_main]

use drover_worker::definition::WorkerConfig;
use drover_worker::{Identity, seed};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &[u8]| {
    match WorkerConfig::parse(text, "worker.yaml") {
        Err(error) => assert!(!error.to_string().contains('\n')),
        Ok(config) => {
            let identity = Identity::derive("w", &[text]).expect("an identity");
            let first = seed::build(&config, "w", &identity, None);
            let second = seed::build(&config, "w", &identity, None);
            match (first, second) {
                (Ok(first), Ok(second)) => assert_eq!(first, second),
                (Err(first), Err(second)) => assert_eq!(first.to_string(), second.to_string()),
                other => panic!("one definition, two answers: {other:?}"),
            }
        }
    }
});
