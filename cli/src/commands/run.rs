//! `drover run`: becomes the VMM.

use std::fs;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

use crate::args::Run;
use crate::failure::Failure;

/// Checks the definition and becomes drover-vmm, which then owns the terminal, the signals and the exit code.
pub(crate) fn run(args: &Run) -> Result<ExitCode, Failure> {
    let source = args.file.display().to_string();
    let text = fs::read(&args.file)
        .map_err(|error| Failure::input(format!("{source}: cannot be read: {error}")))?;
    drover_api::definition::parse(&text, &source)
        .and_then(|config| {
            config
                .validate()
                .map_err(|error| error.with_source(&source))
        })
        .map_err(|error| Failure::input(error.to_string()))?;
    let program = drover_worker::locate_vmm()?;
    let mut command = Command::new(&program);
    command.arg("--config").arg(&args.file);
    if let Some(socket) = &args.api_socket {
        command.arg("--api-socket").arg(socket);
    }
    let error = command.exec();
    Err(Failure::host(format!(
        "{}: cannot be started: {error}",
        program.display()
    )))
}
