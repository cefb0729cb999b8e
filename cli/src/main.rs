//! `drover`: runs Kubernetes workers as virtual machines.
//!
//! This program parses and prints; what it does is done by the libraries: `drover-worker` for workers, `drover-block` for images.
//! Virtual machines run in processes of their own (`drover-vmm`).
#![forbid(unsafe_code)]

mod args;
mod commands;
mod failure;
mod output;

use std::process::ExitCode;

use clap::Parser;
use drover_worker::StateDir;

use crate::args::{Cli, Command, OutputMode};
use crate::failure::Failure;

fn main() -> ExitCode {
    let Cli {
        output,
        state_dir,
        command,
    } = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return refuse(&error),
    };
    let state = || StateDir::new(state_dir.as_deref()).map_err(Failure::from);
    let result = match command {
        Command::Run(run) => commands::run::run(&run),
        Command::Worker(worker) => {
            state().and_then(|state| commands::worker::run(worker, &state, output))
        }
        Command::Disk(disk) => state().and_then(|state| commands::disk::run(disk, &state, output)),
        Command::Image(image) => commands::image::run(image, output),
        Command::Doctor => state().and_then(|state| commands::doctor::run(&state, output)),
    };
    match result {
        Ok(code) => code,
        Err(failure) => {
            tell(output, &failure);
            failure.code()
        }
    }
}

fn tell(output: OutputMode, failure: &Failure) {
    match output {
        OutputMode::Text => eprintln!("drover: {failure}"),
        OutputMode::Json => eprintln!("{}", failure.json()),
    }
}

/// A command line that means nothing, or asks for help.
fn refuse(error: &clap::Error) -> ExitCode {
    let arguments: Vec<_> = std::env::args_os().collect();
    let mut pairs = arguments.windows(2);
    let json = arguments.iter().any(|one| one == "--output=json")
        || pairs.any(|pair| pair[0] == "--output" && pair[1] == "json");
    if !json || !error.use_stderr() {
        error.exit();
    }
    let text = error.render().to_string();
    let failure = Failure::input(text.trim_end());
    tell(OutputMode::Json, &failure);
    failure.code()
}
