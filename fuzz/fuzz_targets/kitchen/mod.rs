//! The place where hostile images are tried; the tests of the block crate have the same.
#![allow(dead_code, reason = "each target uses its own part of this")]

#[path = "../../../block/tests/hostile/images.rs"]
mod images;

use images::Kitchen;

/// Hands over the kitchen of this process. Its folder is left behind, as a fuzzer ends without notice.
pub fn with(cook: impl FnOnce(&Kitchen)) {
    thread_local! {
        static KITCHEN: Kitchen = {
            let name = format!("drover-fuzz-{}", std::process::id());
            let memory = std::path::Path::new("/dev/shm");
            let folder = if memory.is_dir() { memory.into() } else { std::env::temp_dir() };
            let folder = folder.join(name);
            std::fs::create_dir(&folder).expect("a new folder can be made");
            Kitchen::new(&folder, &[])
        };
    }
    KITCHEN.with(cook);
}
