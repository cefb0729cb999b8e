//! `bench start`: from the start of the process to the first instruction of a tiny guest, whose port write is
//! seen as a byte on the VMM's standard output. Drover and QEMU microvm take turns.

use std::fs;
use std::io::Read as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

use serde_json::{Value, json};

use crate::bench::statistics::{median, ratio, rounded};
use crate::bench::tiny_guest;
use crate::bench::{Limit, add_limits};
use crate::ensure;
use crate::failure::{Context as _, Failure, Result};

/// RAM of the tiny guest.
const MEMORY_MIB: u32 = 128;

/// Runs the benchmark on this machine's `/dev/kvm` and returns its report.
///
/// # Errors
///
/// A guest does not start.
pub fn run(drover_vmm: &Path, folder: &Path, rounds: usize) -> Result<Value> {
    let kernel = folder.join("tiny-guest");
    fs::write(&kernel, tiny_guest::image()).context("write the tiny guest")?;
    let file = folder.join("start.yaml");
    let definition = json!({
        "name": "tiny",
        "memory": {"size": format!("{MEMORY_MIB}MiB")},
        "boot": {"kernel": kernel},
        "serial": {"mode": "stdio"},
    });
    fs::write(&file, definition.to_string()).context("write start.yaml")?;
    let ours = || {
        let mut command = Command::new(drover_vmm);
        command
            .arg("--config")
            .arg(&file)
            .arg("--api-socket")
            .arg(folder.join("start-api.sock"));
        command
    };
    let theirs = || {
        let mut command = Command::new("qemu-system-x86_64");
        command
            .args([
                "-M",
                "microvm,rtc=on,acpi=off",
                "-accel",
                "kvm",
                "-cpu",
                "host",
                "-smp",
                "1",
            ])
            .args([
                "-m",
                &MEMORY_MIB.to_string(),
                "-nodefaults",
                "-no-user-config",
                "-display",
                "none",
            ])
            .args(["-no-reboot", "-serial", "stdio", "-kernel"])
            .arg(&kernel);
        command
    };
    // The first of each brings its files into the page cache.
    time_to_greeting(ours())?;
    time_to_greeting(theirs())?;
    let mut times = [Vec::new(), Vec::new()];
    for round in 0..rounds {
        for turn in 0..2 {
            let index = (round + turn) % 2;
            let command = if index == 0 { ours() } else { theirs() };
            times[index].push(time_to_greeting(command)?);
        }
    }
    let ratio = ratio(&times[0], &times[1]);
    let mut report = json!({
        "rounds": rounds,
        "drover_ms": rounded(median(&times[0]) * 1000.0),
        "microvm_ms": rounded(median(&times[1]) * 1000.0),
        "ratio": {"start_vs_microvm": rounded(ratio.value), "interval": [rounded(ratio.low), rounded(ratio.high)]},
    });
    let limit = Limit {
        name: "start_vs_microvm",
        value: rounded(ratio.value),
        at_most: 0.5,
    };
    add_limits(&mut report, &[limit]);
    Ok(report)
}

/// Seconds from the start of a process to the guest's byte; the process is ended then.
fn time_to_greeting(mut command: Command) -> Result<f64> {
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let started = Instant::now();
    let mut child = command
        .spawn()
        .context(&format!("start {}", command.get_program().display()))?;
    let mut byte = [0_u8; 1];
    let read = match &mut child.stdout {
        Some(output) => output.read_exact(&mut byte),
        None => return Err(Failure::Broken("the VMM has no output".into())),
    };
    let seconds = started.elapsed().as_secs_f64();
    child.kill()?;
    let output = child.wait_with_output()?;
    let message = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    ensure!(
        read.is_ok() && byte[0] == tiny_guest::GREETING,
        "{} did not run the tiny guest: {message}",
        command.get_program().display()
    );
    Ok(seconds)
}
