//! `cargo xtask fuzz`: the fuzz targets of `fuzz/`, one after the other, each for a time.
//!
//! They are built with the stable compiler, with LLVM's coverage for libFuzzer and checks of arithmetic on. What a target finds
//! is left in `fuzz/artifacts`, what it learns in the target folder; seeds are in `fuzz/corpus`.

use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};

use crate::error::{Error, Result};
use crate::{process, programs};

/// What libFuzzer needs of the compiler.
const FLAGS: &str = "-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
-Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
-Cllvm-args=-sanitizer-coverage-trace-compares -Ccodegen-units=1 --cfg fuzzing";

/// MiB of memory that a target may use.
const MEMORY_MIB: u32 = 256;
/// Seconds that one input may take.
const PATIENCE_S: u32 = 20;

#[derive(clap::Args)]
pub(crate) struct Options {
    /// How long each target works
    #[arg(long, default_value_t = 3600)]
    seconds: u64,
    /// Which targets; all without any
    targets: Vec<String>,
}

/// Runs the targets; the last line counts those that found something.
pub(crate) fn run(options: &Options) -> Result<ExitCode> {
    let all = targets()?;
    let wanted = match options.targets.as_slice() {
        [] => &all,
        some => some,
    };
    if let Some(unknown) = wanted.iter().find(|name| !all.contains(name)) {
        return Err(Error::Other(format!(
            "no fuzz target {unknown}; there are: {}",
            all.join(", ")
        )));
    }
    let folder = programs::target_folder()?.join("fuzz");
    let triple = triple()?;
    let mut found = Vec::new();
    for name in wanted {
        eprintln!("building {name}");
        process::run(
            programs::cargo()
                .args(["build", "--quiet", "--release", "--locked"])
                .args(["--manifest-path", "fuzz/Cargo.toml"])
                // With a target named, what runs while building is not made for fuzzing.
                .args(["--target", &triple, "--bin", name])
                .env("CARGO_TARGET_DIR", &folder)
                .env("RUSTFLAGS", FLAGS)
                .env("CARGO_PROFILE_RELEASE_DEBUG_ASSERTIONS", "true"),
        )?;
        let program = folder.join(&triple).join("release").join(name);
        if !fuzz(name, &program, &folder, options.seconds)? {
            found.push(name.as_str());
        }
    }
    println!(
        "{} targets for {} s each, {} found something: {}",
        wanted.len(),
        options.seconds,
        found.len(),
        found.join(" ")
    );
    Ok(if found.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Whether a target ran for its time without a finding.
fn fuzz(name: &str, program: &PathBuf, folder: &std::path::Path, seconds: u64) -> Result<bool> {
    let workspace = programs::workspace();
    let learnt = folder.join("corpus").join(name);
    let artifacts = workspace.join("fuzz/artifacts").join(name);
    for folder in [&learnt, &artifacts] {
        std::fs::create_dir_all(folder).map_err(Error::io("make the folder", folder))?;
    }
    let mut command = Command::new(program);
    command
        .arg(format!("-max_total_time={seconds}"))
        .arg(format!("-rss_limit_mb={MEMORY_MIB}"))
        .arg(format!("-timeout={PATIENCE_S}"))
        .arg(format!("-artifact_prefix={}/", artifacts.display()))
        .args(["-print_final_stats=1", "-verbosity=0", "-max_len=16384"])
        .arg(&learnt)
        .stdin(Stdio::null());
    let seeds = workspace.join("fuzz/corpus").join(name);
    if seeds.is_dir() {
        command.arg(seeds);
    }
    let mut child = command.spawn().map_err(|source| Error::Spawn {
        program: name.to_owned(),
        source,
    })?;
    let left_behind = PathBuf::from(format!("/dev/shm/drover-fuzz-{}", child.id()));
    let status = child.wait().map_err(|source| Error::Spawn {
        program: name.to_owned(),
        source,
    })?;
    if left_behind.is_dir() {
        std::fs::remove_dir_all(&left_behind).map_err(Error::io("remove", &left_behind))?;
    }
    println!("{name}: {status}");
    Ok(status.success())
}

/// The names of the targets.
fn targets() -> Result<Vec<String>> {
    let text = process::output(programs::cargo().args([
        "metadata",
        "--format-version=1",
        "--no-deps",
        "--manifest-path",
        "fuzz/Cargo.toml",
    ]))?;
    let metadata: serde_json::Value = serde_json::from_str(&text)
        .map_err(|error| Error::Other(format!("cargo metadata: {error}")))?;
    let targets = metadata["packages"][0]["targets"].as_array();
    let names = targets.into_iter().flatten().map(|target| &target["name"]);
    Ok(names
        .filter_map(|name| name.as_str().map(str::to_owned))
        .collect())
}

/// What this machine's compiler compiles for.
pub(crate) fn triple() -> Result<String> {
    let text = process::output(Command::new("rustc").arg("-vV"))?;
    text.lines()
        .find_map(|line| line.strip_prefix("host: "))
        .map(str::to_owned)
        .ok_or_else(|| Error::Other("rustc -vV names no host".into()))
}
