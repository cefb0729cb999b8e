//! The command line.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};
use drover_api::definition::ByteSize;
use drover_block::Format;

use crate::commands::image_chain::Chain;
use crate::commands::{
    image, image_bench, image_check, image_export, image_import, image_jobs, image_lease,
};

/// Runs Kubernetes workers as virtual machines.
#[derive(Debug, Parser)]
#[command(
    name = "drover",
    version,
    max_term_width = 100,
    disable_help_subcommand = true
)]
pub(crate) struct Cli {
    /// How results are printed.
    #[arg(long, global = true, value_enum, default_value_t = OutputMode::Text, value_name = "FORM")]
    pub(crate) output: OutputMode,
    /// Where workers live [default: $XDG_STATE_HOME/drover or ~/.local/state/drover].
    #[arg(long, global = true, value_name = "DIR")]
    pub(crate) state_dir: Option<PathBuf>,
    /// What to do.
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// How results are printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum OutputMode {
    /// For people.
    Text,
    /// For programs.
    Json,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run a virtual machine in the foreground.
    Run(Run),
    /// Create, look at and delete workers.
    #[command(subcommand)]
    Worker(Worker),
    /// Look at, create and change disk images.
    #[command(subcommand)]
    Image(Image),
    /// Look at and change the disks of a VM that runs.
    #[command(subcommand)]
    Disk(crate::commands::disk::Disk),
    /// Say whether this host is ready, and how to mend what is not.
    Doctor,
}

#[derive(Debug, Args)]
pub(crate) struct Run {
    /// The definition of the VM, YAML or JSON.
    #[arg(short, long, value_name = "FILE")]
    pub(crate) file: PathBuf,
    /// Serve the API on this socket; none where absent.
    #[arg(long, value_name = "PATH")]
    pub(crate) api_socket: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Worker {
    /// Make a worker from a definition and start it.
    Create(WorkerCreate),
    /// Start a worker that does not run.
    Start(WorkerName),
    /// List all workers.
    List,
    /// Show one worker.
    Show(WorkerName),
    /// Connect this terminal to a worker's first serial port.
    Console(WorkerName),
    /// Shut a worker down and remove every trace of it.
    Delete(WorkerDelete),
}

#[derive(Debug, Args)]
pub(crate) struct WorkerName {
    /// The worker's name.
    pub(crate) name: String,
}

#[derive(Debug, Args)]
pub(crate) struct WorkerCreate {
    /// The worker's name: a DNS label.
    pub(crate) name: String,
    /// Its definition, YAML or JSON.
    #[arg(short, long, value_name = "FILE")]
    pub(crate) file: PathBuf,
    /// Make its disk and seed, but do not start it.
    #[arg(long, conflicts_with = "wait")]
    pub(crate) no_start: bool,
    /// When to return.
    #[arg(long, value_enum, default_value_t = WaitFor::Started)]
    pub(crate) wait: WaitFor,
    /// With --wait joined: how long that may take, seconds.
    #[arg(long, value_name = "SECONDS", value_parser = seconds, default_value = "600")]
    pub(crate) timeout: Duration,
    /// With --wait joined: show the guest's console meanwhile, on standard error.
    #[arg(long)]
    pub(crate) follow: bool,
}

/// When `worker create` returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum WaitFor {
    /// When the guest's processors run.
    Started,
    /// When the guest says that it joined its cluster (or, without one, that it is configured).
    Joined,
}

#[derive(Debug, Args)]
pub(crate) struct WorkerDelete {
    /// The worker's name.
    pub(crate) name: String,
    /// Do not ask the guest to power off; end it at once.
    #[arg(long)]
    pub(crate) force: bool,
    /// How long the guest may take to power off before it is forced, seconds.
    #[arg(long, value_name = "SECONDS", value_parser = seconds, default_value = "60")]
    pub(crate) timeout: Duration,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Image {
    /// Show what an image is.
    Info(image::Info),
    /// Make a new image.
    Create(image::Create),
    /// Change the size that a guest sees.
    Resize(image::Resize),
    /// Look for leaked space and for damage.
    Check(ImagePath),
    /// Give back leaked space and put damage right.
    Repair(image_check::RepairArgs),
    /// List which layer has which bytes.
    Map(Chain),
    /// Tell whether guests of two images would read the same.
    Compare(image_jobs::Compare),
    /// Write an image, with what lies below it, in another form.
    Convert(image_jobs::Convert),
    /// Fetch an image from a file or an HTTP(S) address, check it, unpack it and convert it.
    Import(image_import::Import),
    /// Put a new overlay upon an image, which from then on stays as it is.
    Snapshot(image_jobs::Snapshot),
    /// Move what an overlay has into the image below it.
    Commit(image_jobs::ChainJob),
    /// Copy what lies below an overlay into it, so that it stands alone.
    Flatten(image_jobs::ChainJob),
    /// Put an overlay over another image, or over none.
    Rebase(image_jobs::Rebase),
    /// Tell who owns an image, or take it from one who is gone.
    #[command(subcommand)]
    Lease(image_lease::LeaseCommand),
    /// Measure how fast an image is.
    Bench(image_bench::Bench),
    /// Serve an image to another VMM, as its vhost-user-blk back end, until SIGTERM or SIGINT.
    Export(image_export::Export),
}

#[derive(Debug, Args)]
pub(crate) struct ImagePath {
    /// The image.
    pub(crate) path: PathBuf,
    /// Its format; never guessed.
    #[arg(long, value_enum)]
    pub(crate) format: ImageFormat,
}

/// The format of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ImageFormat {
    /// Bytes as they are.
    Raw,
    /// QEMU's copy-on-write format.
    Qcow2,
}

impl From<ImageFormat> for Format {
    fn from(format: ImageFormat) -> Self {
        match format {
            ImageFormat::Raw => Self::Raw,
            ImageFormat::Qcow2 => Self::Qcow2,
        }
    }
}

/// A size: bytes, or a number with a binary unit.
pub(crate) fn size(text: &str) -> Result<ByteSize, String> {
    match text.parse() {
        Ok(bytes) => Ok(ByteSize(bytes)),
        Err(_) => text.parse::<ByteSize>().map_err(|error| error.to_string()),
    }
}

fn seconds(text: &str) -> Result<Duration, String> {
    match text.parse::<u64>() {
        Ok(seconds) if seconds <= 3600 => Ok(Duration::from_secs(seconds)),
        _ => Err("expected a whole number of seconds, at most 3600".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn sizes_are_bytes_or_have_a_binary_unit() {
        assert_eq!(size("4GiB"), Ok(ByteSize(4 << 30)));
        assert_eq!(size("1048576"), Ok(ByteSize(1 << 20)));
        assert!(size("4GB").is_err() && size("-1").is_err());
    }
}
