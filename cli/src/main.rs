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

use crate::args::{Cli, Command};

fn main() -> ExitCode {
    let cli = Cli::parse();
    let result = match cli.command {
        Command::Run(run) => commands::run::run(&run),
        Command::Worker(worker) => commands::worker::run(worker, cli.output),
        Command::Image(image) => commands::image::run(image, cli.output),
        Command::Doctor(state) => commands::doctor::run(&state, cli.output),
    };
    match result {
        Ok(code) => code,
        Err(failure) => {
            eprintln!("drover: {failure}");
            failure.code()
        }
    }
}
