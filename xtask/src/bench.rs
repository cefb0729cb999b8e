//! `cargo xtask bench …`: measured against QEMU in the same run.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::ValueEnum;

use crate::error::Result;
use crate::lab::Session;

/// What to measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Benchmark {
    /// Time to init, own memory, exits and CPU time, against QEMU microvm and q35
    Boot,
    /// Process start to the first instruction of a tiny guest, against QEMU microvm
    Start,
    /// A worker's overlay and seed, durable
    Provision,
    /// The image engine in process, against qemu-img bench
    Block,
}

impl Benchmark {
    fn name(self) -> &'static str {
        match self {
            Self::Boot => "boot",
            Self::Start => "start",
            Self::Provision => "provision",
            Self::Block => "block",
        }
    }
}

/// Options of all benchmarks.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// What to measure
    #[arg(value_enum)]
    what: Benchmark,
    /// Rounds; by default 9 boots each, 10 pairs for block, 50 of the others
    #[arg(long)]
    rounds: Option<usize>,
    /// Write the report to this file, too
    #[arg(long)]
    json: Option<PathBuf>,
    /// Measure the programs of this folder instead of building them
    #[arg(long)]
    programs: Option<PathBuf>,
    /// Fewer pairs of shorter runs, for a first look (block)
    #[arg(long)]
    quick: bool,
    /// Only the rows whose labels contain one of these, as in "33-layer" or "tmpfs, ring" (block)
    cases: Vec<String>,
}

/// Runs a benchmark.
pub(crate) fn run(options: &Options) -> Result<ExitCode> {
    let session = Session::open(options.programs.as_deref())?;
    let json = options
        .json
        .clone()
        .unwrap_or_else(|| session.folder.join("report.json"));
    let mut command = session.command(&["bench"]);
    command.arg("--json").arg(&json);
    if let Some(rounds) = options.rounds {
        command.args(["--rounds", &rounds.to_string()]);
    }
    if options.quick {
        command.arg("--quick");
    }
    crate::finish(command.arg(options.what.name()).args(&options.cases))
}
