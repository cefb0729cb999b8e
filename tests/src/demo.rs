//! `cargo xtask demo`: the main job as a user does it, with what it prints.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::ensure;
use crate::failure::{Context as _, Result};
use crate::fixtures::console::Console;
use crate::fixtures::net::Bridge;
use crate::stories::{Scene, worker};

/// Makes a Debian worker from one definition, shows that it joined, and deletes it without a trace.
///
/// # Errors
///
/// A step fails.
pub fn run(scene: &Scene) -> Result {
    let _bridge = Bridge::create(worker::BRIDGE, "10.78.0.1/24")?;
    let file = scene.folder.join("worker.yaml");
    let definition = yaml(&worker::definition(scene), 0);
    fs::write(&file, &definition).context("write worker.yaml")?;
    println!("$ cat worker.yaml\n{definition}");
    let state = scene.folder.join("state");
    let started = Instant::now();
    let file = file.to_string_lossy();
    show(
        scene,
        &state,
        &[
            "worker",
            "create",
            worker::NAME,
            "-f",
            &file,
            "--wait",
            "joined",
        ],
    )?;
    show_console(scene, &state)?;
    show(scene, &state, &["worker", "list"])?;
    show(scene, &state, &["worker", "show", worker::NAME])?;
    let vmm = worker::vmm_process(&state)?;
    show(scene, &state, &["worker", "delete", worker::NAME])?;
    worker::without_a_trace(&state, vmm)?;
    println!(
        "no process, tap, socket or file of it is left; all of it took {:.1} s",
        started.elapsed().as_secs_f64()
    );
    Ok(())
}

/// A value in YAML's block style; strings are quoted as JSON does, which YAML reads the same.
fn yaml(value: &Value, depth: usize) -> String {
    let indent = "  ".repeat(depth);
    match value {
        Value::Object(fields) => fields
            .iter()
            .map(|(key, value)| {
                if value.is_object() || value.is_array() {
                    format!("{indent}{key}:\n{}", yaml(value, depth + 1))
                } else {
                    format!("{indent}{key}: {value}\n")
                }
            })
            .collect(),
        Value::Array(items) => items
            .iter()
            .map(|item| {
                let text = yaml(item, depth + 1);
                format!("{indent}- {}", text.trim_start())
            })
            .collect(),
        scalar => format!("{indent}{scalar}\n"),
    }
}

/// Runs `drover` on this terminal.
fn show(scene: &Scene, state: &Path, arguments: &[&str]) -> Result {
    println!("$ drover {}", arguments.join(" "));
    let status = Command::new(scene.site.program("drover"))
        .arg("--state-dir")
        .arg(state)
        .args(arguments)
        .env("DROVER_VMM", scene.site.program("drover-vmm"))
        .stdin(Stdio::null())
        .status()
        .context("start drover")?;
    ensure!(status.success(), "drover {}: {status}", arguments.join(" "));
    Ok(())
}

/// The last lines of the worker's console: what it did with the seed.
fn show_console(scene: &Scene, state: &Path) -> Result {
    const LINES: usize = 45;
    println!(
        "$ drover worker console {}   (the last {LINES} lines)",
        worker::NAME
    );
    let socket = state
        .join("workers")
        .join(worker::NAME)
        .join("console.sock");
    let console = Console::connect(&socket, &scene.folder.join("console.log"))?;
    // The scrollback comes at once; a quiet second ends it.
    std::thread::sleep(Duration::from_secs(1));
    let text = console.text();
    let lines: Vec<&str> = text
        .lines()
        .filter(|line| !line.trim().is_empty())
        .collect();
    for line in &lines[lines.len().saturating_sub(LINES)..] {
        println!("  | {line}");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn definitions_are_shown_in_block_style() {
        let value = serde_json::json!({"a": {"b": 1, "c": ["x y", {"d": true, "e": "f"}]}});
        assert_eq!(
            yaml(&value, 0),
            "a:\n  b: 1\n  c:\n    - \"x y\"\n    - d: true\n      e: \"f\"\n"
        );
    }
}
