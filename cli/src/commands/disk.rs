//! `drover disk`: the disks of a VM that runs, through its API.
//!
//! A worker's `vm.yaml` follows every change of layers, so that it starts again from what its disks consist of. For a snapshot it is written
//! between making the overlay and switching to it: whenever power fails, it names images that hold all that the guest was told is durable.

use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::thread::sleep;
use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum};
use drover_api::client::ClientError;
use drover_api::client::blocking::Client;
use drover_api::definition::{
    BackingConfig, ByteSize, DiskConfig, ImageFormat, LimitsConfig, RateLimit, VmConfig,
};
use drover_api::disks::{
    DiskView, JobKind, JobRequest, JobState, JobView, ResizeRequest, SnapshotDisk, SnapshotRequest,
};
use drover_block::image::{CreateOptions, create_qcow2};
use drover_worker::{StateDir, WorkerDir, format, remember_vm};
use indicatif::{ProgressBar, ProgressStyle};

use crate::args::{OutputMode, size};
use crate::failure::Failure;
use crate::output;

/// How often a job is asked how far it is.
const TICK: Duration = Duration::from_millis(100);

#[derive(Debug, Subcommand)]
pub(crate) enum Disk {
    /// List a VM's disks.
    List(Vm),
    /// Make a disk larger.
    Resize(Resize),
    /// Let disks continue in new overlays, all at the same instant; their images stop changing.
    Snapshot(Snapshot),
    /// Copy what lies below a disk's image into it, so that it needs no other.
    Flatten(Job),
    /// Move what a disk's image has into the image below it, which the disk then continues in.
    Commit(Job),
    /// Change what a disk may use; what is not given is not limited any more.
    Limits(Limits),
}

/// A VM.
#[derive(Debug, Args)]
pub(crate) struct Vm {
    /// A worker's name, or the path of a VM's API socket (with a slash in it).
    vm: String,
}

/// A disk of a VM.
#[derive(Debug, Args)]
pub(crate) struct Which {
    #[command(flatten)]
    vm: Vm,
    /// The disk's id.
    #[arg(default_value = "root")]
    disk: String,
}

#[derive(Debug, Args)]
pub(crate) struct Resize {
    #[command(flatten)]
    vm: Vm,
    /// The disk's id.
    disk: String,
    /// Its new size, such as 20GiB.
    #[arg(value_parser = size)]
    size: ByteSize,
}

#[derive(Debug, Args)]
pub(crate) struct Snapshot {
    #[command(flatten)]
    vm: Vm,
    /// The disks' ids.
    #[arg(default_value = "root")]
    disks: Vec<String>,
    /// The overlay of the only disk that is named; beside its image where absent.
    #[arg(long, value_name = "PATH")]
    overlay: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct Job {
    #[command(flatten)]
    which: Which,
    /// Copy at most so many bytes a second, such as 50MiB.
    #[arg(long, value_parser = size, value_name = "SIZE")]
    rate: Option<ByteSize>,
    /// When to return.
    #[arg(long, value_enum, default_value_t = Until::Done)]
    wait: Until,
}

/// When a job's command returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Until {
    /// When the job is over; an interruption does not end the job.
    Done,
    /// When the job has begun.
    Begun,
}

#[derive(Debug, Args)]
pub(crate) struct Limits {
    #[command(flatten)]
    which: Which,
    /// Requests a second.
    #[arg(long, value_name = "N")]
    iops: Option<u64>,
    /// Reads a second.
    #[arg(long, value_name = "N")]
    read_iops: Option<u64>,
    /// Writes a second.
    #[arg(long, value_name = "N")]
    write_iops: Option<u64>,
    /// Bytes a second, such as 50MiB.
    #[arg(long, value_parser = size, value_name = "SIZE")]
    bps: Option<ByteSize>,
    /// Bytes read a second.
    #[arg(long, value_parser = size, value_name = "SIZE")]
    read_bps: Option<ByteSize>,
    /// Bytes written a second.
    #[arg(long, value_parser = size, value_name = "SIZE")]
    write_bps: Option<ByteSize>,
}

/// A VM that answers.
struct Target {
    client: Client,
    /// Whose `vm.yaml` follows.
    worker: Option<WorkerDir>,
}

fn failure(error: ClientError) -> Failure {
    let message = error.to_string();
    match error {
        ClientError::Refused(refusal) if refusal.status() < 500 => Failure::input(message),
        _ => Failure::host(message),
    }
}

impl Target {
    fn new(vm: &Vm, state: &StateDir) -> Result<Self, Failure> {
        let (socket, worker) = if vm.vm.contains('/') {
            (PathBuf::from(&vm.vm), None)
        } else {
            let dir = state.worker(&vm.vm)?;
            (dir.api_socket(), Some(dir))
        };
        let client = Client::new(socket).map_err(|error| Failure::host(error.to_string()))?;
        let target = Self { client, worker };
        // What changed while nobody followed, like the end of a job.
        target.remember(&target.config()?)?;
        Ok(target)
    }

    fn config(&self) -> Result<VmConfig, Failure> {
        Ok(self.client.vm().map_err(failure)?.config)
    }

    fn remember(&self, config: &VmConfig) -> Result<(), Failure> {
        match &self.worker {
            Some(dir) => Ok(remember_vm(dir, config)?),
            None => Ok(()),
        }
    }

    fn disk(&self, id: &str) -> Result<DiskView, Failure> {
        let disks = self.client.disks().map_err(failure)?;
        let known = disks.iter().map(|disk| disk.id.clone()).collect::<Vec<_>>();
        let disk = disks.into_iter().find(|disk| disk.id == id);
        disk.ok_or_else(|| {
            Failure::input(format!(
                "there is no disk \"{id}\", but: {}",
                known.join(", ")
            ))
        })
    }
}

pub(crate) fn run(command: Disk, state: &StateDir, mode: OutputMode) -> Result<ExitCode, Failure> {
    match command {
        Disk::List(vm) => {
            let disks = Target::new(&vm, state)?.client.disks().map_err(failure)?;
            output::print(mode, &disks, |disks| table(disks))?;
        }
        Disk::Resize(args) => {
            let target = Target::new(&args.vm, state)?;
            let request = ResizeRequest { size: args.size };
            let disk = target.client.resize(&args.disk, request).map_err(failure)?;
            output::print(mode, &disk, |disk| {
                format!("disk {} has {}", disk.id, output::bytes(disk.size_bytes))
            })?;
        }
        Disk::Snapshot(args) => snapshot(&args, state, mode)?,
        Disk::Flatten(args) => job(&args, JobKind::Flatten, state, mode)?,
        Disk::Commit(args) => job(&args, JobKind::Commit, state, mode)?,
        Disk::Limits(args) => limits(&args, state, mode)?,
    }
    Ok(ExitCode::SUCCESS)
}

fn table(disks: &[DiskView]) -> String {
    let rows: Vec<Vec<String>> = disks
        .iter()
        .map(|disk| {
            let taken = disk.layers.first().and_then(|layer| layer.allocated_bytes);
            let layers = disk
                .layers
                .iter()
                .map(|layer| layer.path.display().to_string());
            vec![
                disk.id.clone(),
                output::bytes(disk.size_bytes),
                taken.map_or_else(|| "-".to_owned(), output::bytes),
                disk.job.clone().unwrap_or_else(|| "-".to_owned()),
                layers.collect::<Vec<_>>().join(" < "),
            ]
        })
        .collect();
    output::table(&["DISK", "SIZE", "USED", "JOB", "IMAGES"], &rows)
}

/// The definition of a disk that continues in `overlay`.
fn over(disk: &DiskConfig, overlay: &Path) -> DiskConfig {
    let below = BackingConfig {
        path: disk.path.clone(),
        format: disk.format,
        cache: disk.cache,
    };
    DiskConfig {
        path: overlay.to_path_buf(),
        format: ImageFormat::Qcow2,
        backing: std::iter::once(below)
            .chain(disk.backing.iter().cloned())
            .collect(),
        ..disk.clone()
    }
}

/// `root.qcow2`, `root.1.qcow2`, `root.2.qcow2` …: the first that nothing has.
fn beside(image: &Path) -> PathBuf {
    let name = image.file_stem().unwrap_or_default().to_string_lossy();
    let stem = match name.rsplit_once('.') {
        Some((stem, number)) if number.bytes().all(|byte| byte.is_ascii_digit()) => stem,
        _ => &name,
    };
    let names = (1_u64..).map(|number| image.with_file_name(format!("{stem}.{number}.qcow2")));
    let mut free = names.filter(|path| std::fs::symlink_metadata(path).is_err());
    free.next()
        .unwrap_or_else(|| image.with_extension("overlay"))
}

fn snapshot(args: &Snapshot, state: &StateDir, mode: OutputMode) -> Result<(), Failure> {
    let target = Target::new(&args.vm, state)?;
    if args.overlay.is_some() && args.disks.len() != 1 {
        return Err(Failure::input(
            "--overlay is for one disk: name exactly one",
        ));
    }
    let overlay = args.overlay.as_deref().map(std::path::absolute).transpose();
    let overlay = overlay.map_err(|error| Failure::input(error.to_string()))?;
    let before = target.config()?;
    let mut after = before.clone();
    let mut made = Made(Vec::new());
    let mut request = SnapshotRequest { disks: Vec::new() };
    for id in &args.disks {
        let size = target.disk(id)?.size_bytes;
        let config = after.disks.iter_mut().find(|disk| disk.id == *id);
        let prepared = match config {
            Some(disk)
                if target.worker.is_some() && !disk.allow_header_backing && !disk.read_only =>
            {
                let path = overlay.clone().unwrap_or_else(|| beside(&disk.path));
                let options = CreateOptions {
                    backing: Some((disk.path.clone(), format(disk.format))),
                    ..CreateOptions::new(size)
                };
                create_qcow2(&path, &options).map_err(|error| Failure::host(error.to_string()))?;
                made.0.push(path.clone());
                *disk = over(disk, &path);
                Some(path)
            }
            // Without a file that has to follow, the VM makes the overlay itself.
            _ => None,
        };
        request.disks.push(SnapshotDisk {
            id: id.clone(),
            existing: prepared.is_some(),
            overlay: prepared.or_else(|| overlay.clone()),
        });
    }
    target.remember(&after)?;
    match target.client.snapshot(&request) {
        Ok(disks) => {
            made.0.clear();
            target.remember(&target.config()?)?;
            output::print(mode, &disks, |disks| table(disks))
        }
        Err(error @ ClientError::Refused(_)) => {
            target.remember(&before)?;
            Err(failure(error))
        }
        // Whether it was done is not known. The new definition is right in both cases.
        Err(error) => {
            made.0.clear();
            Err(failure(error))
        }
    }
}

/// Overlays that are removed again unless they come into use.
struct Made(Vec<PathBuf>);

impl Drop for Made {
    fn drop(&mut self) {
        for path in &self.0 {
            if let Err(error) = std::fs::remove_file(path) {
                eprintln!("drover: {} stays behind: {error}", path.display());
            }
        }
    }
}

fn job(args: &Job, kind: JobKind, state: &StateDir, mode: OutputMode) -> Result<(), Failure> {
    let target = Target::new(&args.which.vm, state)?;
    let request = JobRequest {
        kind,
        rate: args.rate,
    };
    let mut job = target
        .client
        .begin_job(&args.which.disk, request)
        .map_err(failure)?;
    if args.wait == Until::Done {
        job = follow(&target, job, mode)?;
        target.remember(&target.config()?)?;
    }
    match (job.state, &job.error) {
        (JobState::Failed, Some(error)) => Err(Failure::host(error.clone())),
        (JobState::Cancelled, _) => Err(Failure::host("the job was cancelled")),
        _ => output::print(mode, &job, |job| {
            let copied = output::bytes(job.moved_bytes);
            match job.state {
                JobState::Done => {
                    format!("disk {}: {} is done, {copied} copied", job.disk, job.kind)
                }
                _ => format!(
                    "disk {}: {} has begun as job {}",
                    job.disk, job.kind, job.id
                ),
            }
        }),
    }
}

/// Shows how far a job is until it is over.
fn follow(target: &Target, mut job: JobView, mode: OutputMode) -> Result<JobView, Failure> {
    let bar = (mode == OutputMode::Text && std::io::stderr().is_terminal()).then(|| {
        let template = "{msg:11} {bar:40} {percent:>3} %  {bytes} of {total_bytes}  {eta} left";
        let style = ProgressStyle::with_template(template);
        let style = style.unwrap_or_else(|_| ProgressStyle::default_bar());
        ProgressBar::new(job.total_bytes)
            .with_style(style)
            .with_message(job.kind.to_string())
    });
    while !job.state.is_over() {
        sleep(TICK);
        job = target.client.job(&job.id).map_err(failure)?;
        if let Some(bar) = &bar {
            bar.set_length(job.total_bytes);
            bar.set_position(job.done_bytes);
        }
    }
    if let Some(bar) = &bar {
        bar.finish_and_clear();
    }
    Ok(job)
}

fn limits(args: &Limits, state: &StateDir, mode: OutputMode) -> Result<(), Failure> {
    let target = Target::new(&args.which.vm, state)?;
    let rate = |rate: Option<u64>| rate.map(|rate| RateLimit { rate, burst: None });
    let size = |size: Option<ByteSize>| rate(size.map(|size| size.0));
    let limits = LimitsConfig {
        iops: rate(args.iops),
        read_iops: rate(args.read_iops),
        write_iops: rate(args.write_iops),
        bps: size(args.bps),
        read_bps: size(args.read_bps),
        write_bps: size(args.write_bps),
    };
    let disk = target
        .client
        .limit(&args.which.disk, &limits)
        .map_err(failure)?;
    target.remember(&target.config()?)?;
    output::print(mode, &disk, |disk| match disk.limits {
        Some(_) => format!("disk {} is limited", disk.id),
        None => format!("disk {} is not limited", disk.id),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_over_an_overlay_lists_its_old_image_first_among_the_layers_below() {
        let mut disk = DiskConfig::new("root", "/a/root.qcow2", ImageFormat::Qcow2);
        disk = over(&disk, Path::new("/a/root.1.qcow2"));
        disk = over(&disk, Path::new("/b/other.qcow2"));
        let below: Vec<_> = disk
            .backing
            .iter()
            .map(|layer| layer.path.clone())
            .collect();
        assert_eq!(disk.path, Path::new("/b/other.qcow2"));
        assert_eq!(
            below,
            [Path::new("/a/root.1.qcow2"), Path::new("/a/root.qcow2")]
        );
    }

    #[test]
    fn overlays_are_numbered() {
        let folder = tempfile::tempdir().unwrap();
        let image = folder.path().join("overlay.qcow2");
        let first = beside(&image);
        assert_eq!(first, folder.path().join("overlay.1.qcow2"));
        std::fs::write(&first, "").unwrap();
        assert_eq!(beside(&first), folder.path().join("overlay.2.qcow2"));
    }
}
