//! `cargo xtask …`: everything that is more than one cargo command.

#![forbid(unsafe_code)]

mod error;
mod process;
mod setup;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::error::Result;

/// Drover's tasks: set-up, demo, tests and benchmarks.
#[derive(Parser)]
#[command(name = "cargo xtask", disable_help_subcommand = true)]
struct Arguments {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Install what is missing, build and cache the lab's kernels, roots and images
    Setup {
        /// Build the kernel module that firmware boots in the lab need, too
        #[arg(long)]
        firmware: bool,
    },
}

fn run(task: &Task) -> Result<ExitCode> {
    match *task {
        Task::Setup { firmware } => {
            let lab = setup::run()?;
            println!("the lab is ready: {}", lab.manifest.display());
            if firmware {
                println!("firmware boots: {}", setup::cr8_module()?.display());
            }
            Ok(ExitCode::SUCCESS)
        }
    }
}

fn main() -> ExitCode {
    match run(&Arguments::parse().task) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("xtask: {error}");
            ExitCode::FAILURE
        }
    }
}
