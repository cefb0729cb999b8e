//! `bench provision`: how long it takes from a worker's definition to its overlay and seed, durable on disk.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

use serde_json::{Value, json};

use crate::bench::statistics::{median, rounded};
use crate::bench::{Limit, add_limits};
use crate::ensure;
use crate::failure::{Context as _, Failure, Result};
use crate::stories::{Scene, worker};

/// Runs `drover worker create --no-start` again and again and returns the report.
///
/// # Errors
///
/// A worker cannot be made or removed.
pub fn run(scene: &Scene, rounds: usize) -> Result<Value> {
    let file = scene.folder.join("worker.yaml");
    let mut definition = worker::definition(scene);
    definition["network"] = Value::Null;
    fs::write(&file, definition.to_string()).context("write worker.yaml")?;
    let state = scene.folder.join("state");
    let mut durable = Vec::new();
    let mut whole = Vec::new();
    for round in 0..=rounds {
        let name = format!("worker-{round}");
        let started = Instant::now();
        let output = drover(scene, &state)
            .args([
                "--output",
                "json",
                "worker",
                "create",
                &name,
                "--no-start",
                "-f",
            ])
            .arg(&file)
            .output()
            .context("drover worker create")?;
        let seconds = started.elapsed().as_secs_f64();
        ensure!(
            output.status.success(),
            "drover worker create: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        let created: Value = serde_json::from_slice(&output.stdout).context("its JSON")?;
        let at = durable_ms(&created)
            .ok_or_else(|| Failure::Broken(format!("no step \"durable\" in {created}")))?;
        delete(scene, &state, &name)?;
        // The first brings the program and the base's header into the page cache.
        if round > 0 {
            durable.push(at);
            whole.push(seconds * 1000.0);
        }
    }
    let mut report = json!({
        "rounds": rounds,
        "provision_ms": median(&durable),
        "command_ms": rounded(median(&whole)),
        "slowest_ms": durable.iter().copied().fold(0.0, f64::max),
    });
    let limit = Limit {
        name: "provision_ms",
        value: median(&durable),
        at_most: 10.0,
    };
    add_limits(&mut report, &[limit]);
    Ok(report)
}

fn drover(scene: &Scene, state: &Path) -> Command {
    let mut command = Command::new(scene.site.program("drover"));
    command.arg("--state-dir").arg(state).stdin(Stdio::null());
    command
}

fn delete(scene: &Scene, state: &Path, name: &str) -> Result {
    let output = drover(scene, state)
        .args(["worker", "delete", name])
        .output()
        .context("drover worker delete")?;
    ensure!(
        output.status.success(),
        "drover worker delete: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}

/// When the step `durable` was reached, wherever the timeline stands in the report.
fn durable_ms(value: &Value) -> Option<f64> {
    match value {
        Value::Object(object) if object.get("step").is_some_and(|step| step == "durable") => {
            object.get("at_ms")?.as_f64()
        }
        Value::Object(object) => object.values().find_map(durable_ms),
        Value::Array(items) => items.iter().find_map(durable_ms),
        _ => None,
    }
}
