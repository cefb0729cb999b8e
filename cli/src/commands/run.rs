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
    let config = drover_api::definition::parse(&text, &source)
        .and_then(|config| {
            config
                .validate()
                .map_err(|error| error.with_source(&source))?;
            Ok(config)
        })
        .map_err(|error| Failure::input(error.to_string()))?;
    let program = drover_worker::locate_vmm()?;
    let socket = args.api_socket.clone().unwrap_or_else(|| {
        std::env::temp_dir().join(format!(
            "drover-{}-{}.sock",
            config.name,
            std::process::id()
        ))
    });
    let error = Command::new(&program)
        .arg("--api-socket")
        .arg(socket)
        .arg("--config")
        .arg(&args.file)
        .exec();
    Err(Failure::host(format!(
        "{}: cannot be started: {error}",
        program.display()
    )))
}
