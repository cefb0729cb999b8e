//! `cargo xtask check`: formatting, lints, fuzz targets that build, licences and bans. What needs no virtual machine.

use std::path::PathBuf;
use std::process::Command;

use crate::error::Result;
use crate::setup::Cache;
use crate::{process, programs, setup};

/// The version of cargo-deny that `deny.toml` is written for.
const DENY_VERSION: &str = "0.20.2";

/// Runs all checks; the first that fails ends it.
pub(crate) fn run() -> Result<()> {
    eprintln!("formatting");
    process::run(programs::cargo().args(["fmt", "--all", "--check"]))?;
    eprintln!("lints");
    process::run(programs::cargo().args([
        "clippy",
        "--quiet",
        "--workspace",
        "--all-targets",
        "--all-features",
        "--",
        "-D",
        "warnings",
    ]))?;
    eprintln!("fuzz targets build");
    setup::packages()?;
    process::run(programs::cargo().args([
        "check",
        "--quiet",
        "--locked",
        "--manifest-path",
        "fuzz/Cargo.toml",
    ]))?;
    eprintln!(
        "licences, bans and sources (advisories need a network that continuous integration lacks)"
    );
    let mut deny = Command::new(cargo_deny()?);
    deny.current_dir(programs::workspace()).args([
        "--workspace",
        "--all-features",
        "--log-level",
        "error",
        "check",
        "licenses",
        "bans",
        "sources",
    ]);
    process::run(&mut deny)
}

/// cargo-deny of our version: built once and cached.
fn cargo_deny() -> Result<PathBuf> {
    let cache = Cache::open()?;
    let key = setup::Key::new("cargo-deny 1").with(DENY_VERSION);
    let folder = cache.artefact("cargo-deny", &key, |build| {
        let mut install = programs::cargo();
        install
            .args([
                "install",
                "--locked",
                "--debug",
                "--version",
                DENY_VERSION,
                "--root",
            ])
            .arg(build.folder)
            .arg("cargo-deny")
            .env("CARGO_TARGET_DIR", build.folder.join("target"))
            .env("CARGO_PROFILE_DEV_DEBUG", "0");
        process::run_logged(&mut install, build.log)?;
        setup::remove_tree(&build.folder.join("target"))
    })?;
    Ok(folder.join("bin/cargo-deny"))
}
