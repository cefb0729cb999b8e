//! ThreadSanitizer over the tests in which threads meet: the standard library is built with it, too, as it would not see its locks
//! otherwise.

use super::{Counts, Result, libtest_counts};
use crate::{fuzz, lab, programs, setup};

/// The test binaries of the block crate in which several threads work on one thing.
const TESTS: [&str; 2] = ["races", "engines"];

/// Runs them; a data race is a failure.
pub(super) fn run(filter: &[String]) -> Result<Counts> {
    let tools = setup::run()?.tools;
    let triple = fuzz::triple()?;
    let mut command = std::process::Command::new("rustup");
    command
        .current_dir(programs::workspace())
        .args(["run", "nightly", "cargo", "test", "--no-fail-fast"])
        .args(["-Zbuild-std", "--target", &triple, "-p", "drover-block"]);
    for test in TESTS {
        command.args(["--test", test]);
    }
    command
        .args(["--", "--show-output", "--test-threads=1"])
        .args(filter)
        .env("PATH", lab::path_with(&tools))
        .env("CARGO_TARGET_DIR", programs::target_folder()?.join("tsan"))
        .env("CARGO_PROFILE_DEV_OPT_LEVEL", "1")
        .env("RUSTFLAGS", "-Zsanitizer=thread")
        .env("TSAN_OPTIONS", "halt_on_error=1")
        .stdin(std::process::Stdio::null());
    // The toolchain of whoever called must not be that of what is called.
    for variable in ["CARGO", "RUSTUP_TOOLCHAIN", "RUSTC"] {
        command.env_remove(variable);
    }
    libtest_counts(&mut command)
}
