//! Running other programs: their output goes to a log, and an error shows its end.

use std::fs::File;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::error::{Error, Result};

/// How many lines of a failed program's log its error repeats.
const LOG_TAIL_LINES: usize = 25;

/// The program and its arguments on one line, cut to a readable length.
fn describe(command: &Command) -> String {
    let mut line = command.get_program().to_string_lossy().into_owned();
    for argument in command.get_args() {
        if line.len() > 160 {
            line.push_str(" …");
            break;
        }
        line.push(' ');
        line.push_str(&argument.to_string_lossy());
    }
    line
}

fn spawn_error(command: &Command) -> impl FnOnce(std::io::Error) -> Error {
    let program = describe(command);
    move |source| Error::Spawn { program, source }
}

/// Runs a program with its output appended to `log`; a failure repeats the log's last lines.
pub(crate) fn run_logged(command: &mut Command, log: &Path) -> Result<()> {
    let file = File::options()
        .create(true)
        .append(true)
        .open(log)
        .map_err(Error::io("open the log", log))?;
    let errors = file.try_clone().map_err(Error::io("open the log", log))?;
    let status = command
        .stdin(Stdio::null())
        .stdout(file)
        .stderr(errors)
        .status()
        .map_err(spawn_error(command))?;
    if status.success() {
        return Ok(());
    }
    let text = std::fs::read(log).map_err(Error::io("read the log", log))?;
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<&str> = text.lines().collect();
    let tail = &lines[lines.len().saturating_sub(LOG_TAIL_LINES)..];
    Err(Error::Command {
        program: describe(command),
        status: status.to_string(),
        detail: format!("; the end of {}:\n{}", log.display(), tail.join("\n")),
    })
}

/// Runs a program on this terminal and fails if it does.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let status = command
        .stdin(Stdio::null())
        .status()
        .map_err(spawn_error(command))?;
    if status.success() {
        return Ok(());
    }
    Err(Error::Command {
        program: describe(command),
        status: status.to_string(),
        detail: String::new(),
    })
}

/// Runs a program and returns what it printed.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let output = command
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .map_err(spawn_error(command))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    Err(Error::Command {
        program: describe(command),
        status: output.status.to_string(),
        detail: String::new(),
    })
}

/// Whether a program of this name is in `PATH` (or the system administration folders).
pub(crate) fn on_path(name: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/sbin", "/sbin"].map(Into::into))
        .any(|folder| folder.join(name).is_file())
}
