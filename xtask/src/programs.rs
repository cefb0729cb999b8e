//! Building the programs under test.

use std::path::PathBuf;
use std::process::Command;

use crate::error::{Error, Result};
use crate::process;

/// The workspace's folder.
pub(crate) fn workspace() -> PathBuf {
    let here = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    here.parent().map_or(here.clone(), PathBuf::from)
}

/// cargo, in the workspace.
pub(crate) fn cargo() -> Command {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command.current_dir(workspace());
    command
}

/// Where cargo puts what it builds.
pub(crate) fn target_folder() -> Result<PathBuf> {
    let text = process::output(cargo().args(["metadata", "--format-version=1", "--no-deps"]))?;
    let metadata: serde_json::Value = serde_json::from_str(&text)
        .map_err(|error| Error::Other(format!("cargo metadata: {error}")))?;
    metadata["target_directory"]
        .as_str()
        .map(PathBuf::from)
        .ok_or_else(|| Error::Other("cargo metadata names no target folder".into()))
}

/// Builds all that runs in the lab, as it is released, and returns its folder.
pub(crate) fn build() -> Result<PathBuf> {
    eprintln!("building the programs under test");
    process::run(cargo().args(["build", "--release", "-p", "drover-vmm", "-p", "drover-cli"]))?;
    process::run(cargo().args([
        "build",
        "--release",
        "-p",
        "drover-tests",
        "--bin",
        "drover-lab",
    ]))?;
    // The guest has no libraries.
    process::run(
        cargo()
            .args([
                "rustc",
                "--release",
                "-p",
                "drover-tests",
                "--bin",
                "lab-guest",
            ])
            .args(["--", "-C", "target-feature=+crt-static"]),
    )?;
    Ok(target_folder()?.join("release"))
}
