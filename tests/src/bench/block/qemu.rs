//! QEMU's side: `qemu-img bench`, and a storage daemon that opens images.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use drover_block::IoEngine;
use serde_json::{Value, json};

use super::images::Chain;
use super::{Load, Run};
use crate::failure::{Context as _, Failure, Result};

/// What QEMU calls the way of moving bytes that is like one of ours.
pub(super) fn aio(engine: IoEngine) -> &'static str {
    match engine {
        IoEngine::IoUring => "io_uring",
        IoEngine::Threads | IoEngine::Inline => "threads",
    }
}

/// CPU time of the children that this process has waited for, by the scheduler's ticks.
fn cpu_time_of_children() -> Duration {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // Fields are counted from behind the name (proc_pid_stat(5)): cutime is number 16, cstime number 17.
    let fields: Vec<&str> = stat
        .rsplit(')')
        .next()
        .unwrap_or_default()
        .split_whitespace()
        .collect();
    let ticks = |number: usize| -> u64 {
        let field = fields.get(number - 3).and_then(|text| text.parse().ok());
        field.unwrap_or(0)
    };
    Duration::from_millis((ticks(16) + ticks(17)) * 10)
}

/// Runs a load on a chain.
pub(super) fn run(chain: &Chain, load: Load, engine: IoEngine) -> Result<Run> {
    let mut command = Command::new("qemu-img");
    command.args(["bench", "-f", "qcow2", "-t", "none", "-i", aio(engine)]);
    if load.write {
        command.arg("-w");
    }
    for (option, value) in [
        ("-c", load.count),
        ("-d", load.depth),
        ("-s", load.bytes),
        ("-S", load.step),
    ] {
        command.arg(option).arg(value.to_string());
    }
    if load.flush_every > 0 {
        command.arg(format!("--flush-interval={}", load.flush_every));
    }
    let before = cpu_time_of_children();
    let output = command
        .arg(chain.top())
        .stdin(Stdio::null())
        .output()
        .context("qemu-img bench")?;
    let cpu = cpu_time_of_children().saturating_sub(before);
    let text = String::from_utf8_lossy(&output.stdout);
    let seconds = text
        .split("Run completed in ")
        .nth(1)
        .and_then(|rest| rest.split(' ').next())
        .and_then(|number| number.parse().ok());
    match seconds {
        Some(seconds) if output.status.success() => Ok(Run {
            time: Duration::from_secs_f64(seconds),
            cpu,
        }),
        _ => Err(Failure::Broken(format!(
            "qemu-img bench: {text}{}",
            String::from_utf8_lossy(&output.stderr)
        ))),
    }
}

/// A storage daemon with its monitor on our pipes.
pub(super) struct Daemon {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Daemon {
    pub(super) fn start() -> Result<Self> {
        let mut child = Command::new("qemu-storage-daemon")
            .args(["--chardev", "stdio,id=monitor"])
            .args(["--monitor", "chardev=monitor"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("start qemu-storage-daemon")?;
        let (Some(input), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(Failure::Broken("qemu-storage-daemon has no pipes".into()));
        };
        let mut daemon = Self {
            child,
            input,
            output: BufReader::new(output),
        };
        daemon.ask(&json!({"execute": "qmp_capabilities"}))?;
        Ok(daemon)
    }

    /// Gives a command and waits for its answer, past greetings and events.
    fn ask(&mut self, command: &Value) -> Result {
        self.input
            .write_all(format!("{command}\n").as_bytes())
            .context("qemu-storage-daemon")?;
        loop {
            let mut line = String::new();
            let count = self
                .output
                .read_line(&mut line)
                .context("qemu-storage-daemon")?;
            if count == 0 || line.contains("\"error\"") {
                return Err(Failure::Broken(format!(
                    "qemu-storage-daemon answers {command} with {line:?}"
                )));
            }
            if line.contains("\"return\"") {
                return Ok(());
            }
        }
    }

    /// How long it takes to open a chain.
    pub(super) fn open(&mut self, chain: &Chain, engine: IoEngine) -> Result<Duration> {
        let started = Instant::now();
        self.ask(&json!({"execute": "blockdev-add", "arguments": {
            "driver": "qcow2",
            "node-name": "image",
            "cache": {"direct": true},
            "file": {
                "driver": "file",
                "filename": chain.top(),
                "aio": aio(engine),
                "cache": {"direct": true},
            },
        }}))?;
        let time = started.elapsed();
        self.ask(&json!({"execute": "blockdev-del", "arguments": {"node-name": "image"}}))?;
        Ok(time)
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // It holds nothing that has to be written.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
