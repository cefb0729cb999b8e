//! `cargo xtask …`: everything that is more than one cargo command.

#![forbid(unsafe_code)]

mod api_test;
mod bench;
mod check;
mod error;
mod fuzz;
mod lab;
mod process;
mod programs;
mod setup;
mod test;

use std::path::PathBuf;
use std::process::{Command, ExitCode};

use clap::{Parser, Subcommand};

use crate::error::{Error, Result};
use crate::lab::Session;
use crate::test::Suite;

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
    /// Make a Debian worker from one definition, watch it join, delete it
    Demo {
        /// Use the programs of this folder instead of building them
        #[arg(long)]
        programs: Option<PathBuf>,
    },
    /// Measure Drover against QEMU
    Bench(bench::Options),
    /// Formatting, lints, licences and bans
    Check,
    /// Let the fuzz targets work for a time
    Fuzz(fuzz::Options),
    /// Test; the last line counts what passed, failed and was skipped
    Test {
        /// What to test
        #[arg(value_enum, default_value_t = Suite::All)]
        suite: Suite,
        /// Test the programs of this folder instead of building them
        #[arg(long)]
        programs: Option<PathBuf>,
        /// Only tests whose names contain one of these
        filter: Vec<String>,
    },
    /// Run a shell command in an emulated KVM host, with drover-vmm and drover in its PATH
    Lab {
        /// Memory of the host
        #[arg(long, default_value_t = 4096)]
        memory_mib: u32,
        /// Use the programs of this folder instead of building them
        #[arg(long)]
        programs: Option<PathBuf>,
        /// Longest time for all of it
        #[arg(long, default_value_t = 600)]
        timeout_s: u64,
        /// The command
        #[arg(required = true, trailing_var_arg = true)]
        command: Vec<String>,
    },
}

fn run(task: Task) -> Result<ExitCode> {
    match task {
        Task::Setup { firmware } => {
            let lab = setup::run()?;
            println!("the lab is ready: {}", lab.manifest.display());
            if firmware {
                println!("firmware boots: {}", setup::cr8_module()?.display());
            }
            Ok(ExitCode::SUCCESS)
        }
        Task::Demo { programs } => {
            finish(&mut Session::open(programs.as_deref())?.command(&["demo"]))
        }
        Task::Bench(options) => bench::run(&options),
        Task::Fuzz(options) => fuzz::run(&options),
        Task::Check => check::run().map(|()| ExitCode::SUCCESS),
        Task::Test {
            suite,
            programs,
            filter,
        } => test::run(suite, programs.as_deref(), &filter),
        Task::Lab {
            memory_mib,
            programs,
            timeout_s,
            command,
        } => {
            let session = Session::open(programs.as_deref())?;
            let mut lab = session.command(&["exec"]);
            lab.args([
                "--memory-mib",
                &memory_mib.to_string(),
                "--timeout-s",
                &timeout_s.to_string(),
                "--",
            ]);
            finish(lab.args(command))
        }
    }
}

/// Runs a program whose exit status becomes ours.
fn finish(command: &mut Command) -> Result<ExitCode> {
    let status = command.status().map_err(|source| Error::Spawn {
        program: command.get_program().to_string_lossy().into_owned(),
        source,
    })?;
    Ok(if status.success() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

fn main() -> ExitCode {
    match run(Arguments::parse().task) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("xtask: {error}");
            ExitCode::FAILURE
        }
    }
}
