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

use crate::args::{Cli, Command};
use crate::failure::Failure;

fn main() -> ExitCode {
    let Cli {
        output,
        state_dir,
        command,
    } = Cli::parse();
    let state = || StateDir::new(state_dir.as_deref()).map_err(Failure::from);
    let result = match command {
        Command::Run(run) => commands::run::run(&run),
        Command::Worker(worker) => {
            state().and_then(|state| commands::worker::run(worker, &state, output))
        }
        Command::Image(image) => commands::image::run(image, output),
        Command::Doctor => state().and_then(|state| commands::doctor::run(&state, output)),
    };
    match result {
        Ok(code) => code,
        Err(failure) => {
            eprintln!("drover: {failure}");
            failure.code()
        }
    }
}
