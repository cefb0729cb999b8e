//! Live changes of disks: growing, external snapshots, limits, and what becomes of failures.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use drover_api::definition::{BackingConfig, DiskConfig, ImageFormat, LimitsConfig};
use drover_api::disks::{DiskCounters, DiskView, IoView, LayerView, SnapshotRequest};
use drover_api::server::Reply;
use drover_api::types::{ApiError, ErrorCode, EventKind, VmState, VmView};
use drover_block::image::{self, CreateOptions, Shrink, create_qcow2};
use drover_block::lease;
use drover_block::{Disk, IoEngine, IoError, MAX_LAYERS};
use drover_devices::virtio::block::handle::Stopped;
use drover_devices::virtio::block::metrics::BlockMetrics;

use super::Control;
use super::exchange::{Flush, Taken};
use crate::lifecycle::{self, Action, Input};
use crate::machine::Machine;
use crate::machine::disks::{self, LiveDisk};
use crate::mailbox::{Answer, DiskMessage};

pub(super) fn unavailable(error: impl std::fmt::Display) -> ApiError {
    ApiError::new(ErrorCode::Unavailable, error.to_string())
}

pub(super) fn invalid(message: impl Into<String>) -> ApiError {
    ApiError::new(ErrorCode::Invalid, message)
}

/// An overlay that a disk is to continue in.
struct Overlay {
    index: usize,
    /// It did not exist before.
    made: bool,
    before: DiskConfig,
    after: DiskConfig,
}

impl Control {
    /// Answers a message about disks.
    pub(super) fn disk_message(&mut self, message: DiskMessage) {
        match message {
            DiskMessage::View(answer) => {
                let _ = answer.send(self.disk_views());
            }
            DiskMessage::Resize { disk, size, answer } => self.resize(&disk, size, answer),
            DiskMessage::Snapshot { request, answer } => self.snapshot(&request, answer),
            DiskMessage::Limit {
                disk,
                limits,
                answer,
            } => {
                let _ = answer.send(self.limit(&disk, limits));
            }
            DiskMessage::BeginJob {
                disk,
                request,
                answer,
            } => self.begin_job(&disk, request, answer),
            DiskMessage::Jobs(answer) => {
                let _ = answer.send(self.job_views());
            }
            DiskMessage::Job { id, answer } => {
                let _ = answer.send(self.job_view(&id));
            }
            DiskMessage::ChangeJob { id, change, answer } => {
                let _ = answer.send(self.change_job(&id, change));
            }
            DiskMessage::DeleteJob { id, answer } => {
                let _ = answer.send(self.delete_job(&id));
            }
            DiskMessage::Taken {
                exchange,
                index,
                disk,
                flushed,
            } => self.taken(exchange, index, *disk, flushed),
            DiskMessage::Begun { job, handle } => self.begun(job, handle),
            DiskMessage::Stopped { index, stopped } => self.disk_stopped(index, stopped),
        }
    }

    pub(super) fn machine(&self) -> Reply<&Machine> {
        self.machine.as_ref().ok_or_else(ApiError::no_vm)
    }

    fn find(&self, id: &str) -> Reply<usize> {
        let disks = &self.machine()?.config().disks;
        disks
            .iter()
            .position(|disk| disk.id == id)
            .ok_or_else(|| ApiError::new(ErrorCode::NotFound, format!("there is no disk \"{id}\"")))
    }

    /// The disk of this name, if it can be changed now.
    pub(super) fn changeable(&self, id: &str) -> Reply<usize> {
        let index = self.find(id)?;
        if let Some(state @ (VmState::ShuttingDown | VmState::Stopped)) = self.state {
            return Err(ApiError::wrong_state(state, "have its disks changed"));
        }
        if self.exchanges.concern(index) || self.jobs.concern(index) {
            let message = format!("a job or a change is under way on disk \"{id}\"");
            return Err(ApiError::new(ErrorCode::Busy, message));
        }
        let live = self.machine()?.disks().get(index);
        match live.and_then(|disk| disk.missing.as_deref()) {
            None => Ok(index),
            Some(why) => Err(unavailable(format!("disk \"{id}\" is not there: {why}"))),
        }
    }

    fn disk_views(&self) -> Reply<Vec<DiskView>> {
        let count = self.machine()?.config().disks.len();
        (0..count).map(|index| self.disk_view(index)).collect()
    }

    pub(super) fn disk_view(&self, index: usize) -> Reply<DiskView> {
        let machine = self.machine()?;
        let (Some(config), Some(live)) = (
            machine.config().disks.get(index),
            machine.disks().get(index),
        ) else {
            return Err(ApiError::new(ErrorCode::NotFound, "there is no such disk"));
        };
        let mut layers = vec![layer(&config.path, config.format)];
        let below = config.backing.iter();
        layers.extend(below.map(|below| layer(&below.path, below.format)));
        Ok(DiskView {
            id: config.id.clone(),
            size_bytes: live.size_bytes,
            read_only: config.read_only,
            io: match live.options.engine {
                IoEngine::IoUring => IoView::Uring,
                IoEngine::Threads => IoView::Threads,
                IoEngine::Inline => IoView::Inline,
            },
            layers,
            limits: machine.limits_of(config),
            limit_group: config.limit_group.clone(),
            job: self.jobs.on(index),
            missing: live.missing.clone(),
            statistics: counters(&live.metrics),
        })
    }

    fn resize(&mut self, id: &str, size: u64, answer: Answer<DiskView>) {
        let index = match self.may_grow(id, size) {
            Ok(Some(index)) => index,
            Ok(None) => {
                let _ = answer.send(self.find(id).and_then(|index| self.disk_view(index)));
                return;
            }
            Err(error) => {
                let _ = answer.send(Err(error));
                return;
            }
        };
        self.exchange(vec![index], Flush::Must, move |control, taken| {
            let grown = taken.and_then(|taken| control.grow(index, size, taken));
            let _ = answer.send(grown.and_then(|()| control.disk_view(index)));
        });
    }

    /// Which disk has to grow; none if it has that size already.
    fn may_grow(&self, id: &str, size: u64) -> Reply<Option<usize>> {
        let index = self.changeable(id)?;
        let machine = self.machine()?;
        let (Some(config), Some(live)) = (
            machine.config().disks.get(index),
            machine.disks().get(index),
        ) else {
            return Ok(None);
        };
        if size == live.size_bytes {
            return Ok(None);
        }
        if config.read_only {
            return Err(invalid("a read-only disk keeps its size").with_field("size"));
        }
        if size < live.size_bytes {
            let message = format!(
                "{size} bytes are less than the {} that the disk has, and a disk in use only grows",
                live.size_bytes
            );
            return Err(invalid(message).with_field("size"));
        }
        Ok(Some(index))
    }

    fn grow(&mut self, index: usize, size: u64, taken: Vec<Taken>) -> Reply<()> {
        let closed = Self::close_taken(taken);
        let grown = closed.and_then(|()| {
            let disks = &self.machine()?.config().disks;
            let spec = disks.get(index).map(disks::disk_spec);
            let grown = spec.map(|spec| image::resize(&spec, size, Shrink::Refuse));
            grown.unwrap_or(Ok(())).map_err(unavailable)
        });
        self.open_again(index).and(grown)
    }

    fn snapshot(&mut self, request: &SnapshotRequest, answer: Answer<Vec<DiskView>>) {
        let overlays = match self.make_overlays(request) {
            Ok(overlays) => overlays,
            Err(error) => {
                let _ = answer.send(Err(error));
                return;
            }
        };
        let indices: Vec<usize> = overlays.iter().map(|overlay| overlay.index).collect();
        self.exchange(indices.clone(), Flush::Must, move |control, taken| {
            let switched = match taken {
                Ok(taken) => control.switch(&overlays, taken),
                Err(error) => Err(error),
            };
            if switched.is_err() {
                remove(&overlays);
            }
            let views = switched.and_then(|()| {
                let views = indices.iter().map(|index| control.disk_view(*index));
                views.collect()
            });
            let _ = answer.send(views);
        });
    }

    /// Makes what can be made of a snapshot before any request has to wait.
    fn make_overlays(&self, request: &SnapshotRequest) -> Reply<Vec<Overlay>> {
        let mut overlays: Vec<Overlay> = Vec::new();
        for (number, wanted) in request.disks.iter().enumerate() {
            let made = self
                .plan_overlay(&wanted.id, wanted.overlay.as_deref())
                .and_then(|(mut overlay, options)| {
                    overlay.made = !wanted.existing;
                    if overlay.made {
                        create_qcow2(&overlay.after.path, &options).map_err(|error| {
                            unavailable(error).with_field(format!("disks[{number}].overlay"))
                        })?;
                    }
                    Ok(overlay)
                });
            match made {
                Ok(overlay) => overlays.push(overlay),
                Err(error) => {
                    remove(&overlays);
                    return Err(error);
                }
            }
        }
        Ok(overlays)
    }

    fn plan_overlay(&self, id: &str, path: Option<&Path>) -> Reply<(Overlay, CreateOptions)> {
        let index = self.changeable(id)?;
        let machine = self.machine()?;
        let (Some(before), Some(live)) = (
            machine.config().disks.get(index),
            machine.disks().get(index),
        ) else {
            return Err(ApiError::new(ErrorCode::NotFound, "there is no such disk"));
        };
        if before.read_only {
            let message = format!("disk \"{id}\" is read-only: it never changes");
            return Err(invalid(message));
        }
        let image = std::path::absolute(&before.path).map_err(unavailable)?;
        let path = path.map_or_else(|| beside(&image), Path::to_path_buf);
        let together = path.parent() == image.parent();
        if before.allow_header_backing && !together {
            let message = "the layers are named by headers, which name files beside their own only: state no overlay, or list the layers under backing";
            return Err(invalid(message));
        }
        if before.backing.len() + 2 > MAX_LAYERS {
            let message = format!(
                "disk \"{id}\" has as many layers as can be, {MAX_LAYERS}: commit or flatten it first"
            );
            return Err(invalid(message));
        }
        let name = match image.file_name() {
            Some(name) if together => PathBuf::from(name),
            _ => image.clone(),
        };
        let options = CreateOptions {
            backing: Some((name, disks::format(before.format))),
            ..CreateOptions::new(live.size_bytes)
        };
        let mut backing = Vec::new();
        if !before.allow_header_backing {
            backing.push(BackingConfig {
                path: before.path.clone(),
                format: before.format,
                cache: before.cache,
            });
            backing.extend(before.backing.iter().cloned());
        }
        let overlay = Overlay {
            index,
            made: false,
            before: before.clone(),
            after: DiskConfig {
                path,
                format: ImageFormat::Qcow2,
                backing,
                ..before.clone()
            },
        };
        Ok((overlay, options))
    }

    /// Puts overlays on top of the disks that were taken; all of them, or everything is as before.
    fn switch(&mut self, overlays: &[Overlay], taken: Vec<Taken>) -> Reply<()> {
        let opened = Self::close_taken(taken).and_then(|()| self.open_overlays(overlays));
        match opened {
            Ok(opened) => {
                self.set_disks(
                    overlays
                        .iter()
                        .map(|overlay| (overlay.index, &overlay.after)),
                );
                for (overlay, disk) in overlays.iter().zip(opened) {
                    self.give(overlay.index, Some(disk));
                }
                Ok(())
            }
            Err(error) => {
                self.set_disks(
                    overlays
                        .iter()
                        .map(|overlay| (overlay.index, &overlay.before)),
                );
                for overlay in overlays {
                    if let Err(error) = lease::restore(&overlay.before.path, &overlay.after.path) {
                        tracing::error!(%error, "a lease");
                    }
                    // What cannot be opened again is told by an event; the reason of the first failure is the answer.
                    let _ = self.open_again(overlay.index);
                }
                Err(error)
            }
        }
    }

    fn open_overlays(&self, overlays: &[Overlay]) -> Reply<Vec<Disk>> {
        let machine = self.machine()?;
        let mut opened = Vec::new();
        for overlay in overlays {
            let Some(live) = machine.disks().get(overlay.index) else {
                continue;
            };
            if !overlay.made {
                check_empty(&overlay.after)?;
            }
            let disk = disks::open(&overlay.after, live.options.clone()).map_err(unavailable)?;
            if disk.size_bytes() != live.size_bytes {
                let message = format!(
                    "{} has {} bytes, the disk has {}",
                    overlay.after.path.display(),
                    disk.size_bytes(),
                    live.size_bytes
                );
                return Err(invalid(message));
            }
            opened.push(disk);
        }
        // From here on a start from the old definition, which would lose what is written from now on, is refused.
        for overlay in overlays.iter().filter(|overlay| overlay.before.lease) {
            if is_file(&overlay.before.path) {
                lease::supersede(&overlay.before.path, &overlay.after.path).map_err(unavailable)?;
            }
        }
        Ok(opened)
    }

    /// Changes what a disk, or its group, may use.
    fn limit(&mut self, id: &str, limits: LimitsConfig) -> Reply<DiskView> {
        let index = self.find(id)?;
        let Some(machine) = &mut self.machine else {
            return Err(ApiError::no_vm());
        };
        let (config, live) = machine.disks_mut();
        let (Some(disk), Some(live)) = (config.disks.get_mut(index), live.get(index)) else {
            return Err(ApiError::no_vm());
        };
        if let Some(throttle) = &live.options.throttle {
            let changed = throttle.set_limits(disks::limits(&limits));
            changed.map_err(|error| invalid(error.to_string()))?;
        }
        let group = disk.limit_group.as_ref();
        match group.and_then(|id| config.limit_groups.iter_mut().find(|group| group.id == *id)) {
            Some(group) => group.limits = limits,
            None => disk.limits = Some(limits).filter(|limits| *limits != LimitsConfig::default()),
        }
        self.disk_view(index)
    }

    pub(super) fn set_disks<'a>(&mut self, changes: impl Iterator<Item = (usize, &'a DiskConfig)>) {
        let Some(machine) = &mut self.machine else {
            return;
        };
        let (config, _) = machine.disks_mut();
        for (index, disk) in changes {
            if let Some(place) = config.disks.get_mut(index) {
                place.clone_from(disk);
            }
        }
    }

    /// A request of a disk failed and is kept.
    fn disk_stopped(&mut self, index: usize, stopped: Stopped) {
        let Some(machine) = &mut self.machine else {
            return;
        };
        let (config, live) = machine.disks_mut();
        let (Some(config), Some(live)) = (config.disks.get(index), live.get_mut(index)) else {
            return;
        };
        let disk = config.id.clone();
        tracing::warn!(disk, operation = stopped.operation, error = %stopped.error, "a disk stopped");
        let event = EventKind::IoError {
            disk,
            operation: stopped.operation.to_owned(),
            offset: stopped.offset,
            reason: stopped.error.to_string(),
        };
        live.stopped = Some(stopped);
        self.emit(event);
        self.internal(Input::DiskStopped);
    }

    /// Tries what failed again and lets the VM run on. Disks whose writing has stopped for good are opened again first.
    pub(super) fn resume(&mut self, answer: Answer<VmView>) {
        match lifecycle::step(self.state, Input::Resume) {
            Err(error) => {
                let _ = answer.send(Err(error));
                return;
            }
            Ok(step) if step.action == Action::Nothing => {
                let _ = answer.send(self.view());
                return;
            }
            Ok(_) => {}
        }
        let live = self.machine.as_ref().map_or(&[][..], Machine::disks);
        let broken: Vec<usize> = live
            .iter()
            .enumerate()
            .filter(|(_, disk)| disk.missing.is_some() || needs_opening(disk))
            .map(|(index, _)| index)
            .collect();
        if broken.is_empty() {
            self.retry_disks();
            let resumed = self.input(Input::Resume);
            let _ = answer.send(resumed.and_then(|()| self.view()));
            return;
        }
        self.exchange(broken, Flush::Try, |control, taken| {
            let resumed = taken.and_then(|taken| {
                let indices: Vec<usize> = taken.iter().map(|taken| taken.index).collect();
                // That it cannot be made durable is why it is opened again; the request that told so is tried again.
                let _ = Self::close_taken(taken);
                indices
                    .into_iter()
                    .try_for_each(|index| control.open_again(index))
            });
            let resumed = resumed.and_then(|()| {
                control.retry_disks();
                control.input(Input::Resume)
            });
            let _ = answer.send(resumed.and_then(|()| control.view()));
        });
    }

    /// Tries everything again that failed and was kept.
    pub(super) fn retry_disks(&mut self) {
        if let Some(machine) = &mut self.machine {
            let (_, live) = machine.disks_mut();
            for disk in live {
                disk.stopped = None;
                disk.handle.retry();
            }
        }
    }

    /// Tells the guest of everything that failed and was kept, and of what fails from now on.
    pub(super) fn report_failures(&self) {
        for disk in self.machine.as_ref().map_or(&[][..], Machine::disks) {
            disk.handle.report();
        }
    }
}

/// Whether a disk does nothing more until it is opened anew.
fn needs_opening(disk: &LiveDisk) -> bool {
    disk.stopped.as_ref().is_some_and(|stopped| {
        matches!(stopped.error, IoError::Stopped(_))
            || (stopped.operation == "flush" && stopped.error != IoError::NoSpace)
    })
}

fn is_file(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|metadata| metadata.is_file())
}

/// An overlay that exists already must hide nothing.
fn check_empty(disk: &DiskConfig) -> Reply<()> {
    let mut spec = disks::disk_spec(disk);
    spec.read_only = true;
    let entries = image::map(&spec).map_err(unavailable)?;
    if entries
        .iter()
        .any(|entry| entry.depth == 0 && entry.present)
    {
        let message = format!(
            "{} is no new overlay: something is written in it",
            disk.path.display()
        );
        return Err(invalid(message));
    }
    Ok(())
}

/// Removes overlays that nobody uses after all.
fn remove(overlays: &[Overlay]) {
    for overlay in overlays.iter().filter(|overlay| overlay.made) {
        if let Err(error) = fs::remove_file(&overlay.after.path) {
            let path = overlay.after.path.display();
            tracing::warn!(%path, %error, "an overlay that is not used stays behind");
            continue;
        }
        // Free, if it got one before another disk's overlay could not be opened.
        let mut lease = overlay.after.path.clone().into_os_string();
        lease.push(".lease");
        let _ = fs::remove_file(lease);
    }
}

/// A name beside `image` that nothing has yet: `root.qcow2`, `root.1.qcow2`, `root.2.qcow2` …
fn beside(image: &Path) -> PathBuf {
    let stem = image.file_stem().unwrap_or_default();
    let stem = Path::new(stem);
    let numbered = |path: &Path| {
        let number = path.extension().and_then(|text| text.to_str());
        number.is_some_and(|text| text.bytes().all(|byte| byte.is_ascii_digit()))
    };
    let stem = if numbered(stem) {
        stem.file_stem().unwrap_or_default()
    } else {
        stem.as_os_str()
    };
    let mut number = 1_u64;
    loop {
        let mut name = stem.to_owned();
        name.push(format!(".{number}.qcow2"));
        let path = image.with_file_name(name);
        if fs::symlink_metadata(&path).is_err() {
            return path;
        }
        number += 1;
    }
}

fn layer(path: &Path, format: ImageFormat) -> LayerView {
    let allocated = fs::metadata(path).ok();
    LayerView {
        path: path.to_path_buf(),
        format,
        allocated_bytes: allocated
            .filter(fs::Metadata::is_file)
            .map(|metadata| metadata.blocks() * 512),
    }
}

fn counters(metrics: &BlockMetrics) -> DiskCounters {
    let read =
        |counter: &std::sync::atomic::AtomicU64| counter.load(std::sync::atomic::Ordering::Relaxed);
    DiskCounters {
        reads: read(&metrics.reads),
        read_bytes: read(&metrics.read_bytes),
        writes: read(&metrics.writes),
        written_bytes: read(&metrics.written_bytes),
        flushes: read(&metrics.flushes),
        discards: read(&metrics.discards),
        write_zeroes: read(&metrics.write_zeroes),
        failed: read(&metrics.failed),
        kept: read(&metrics.kept),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_overlay_is_named_after_its_image_with_the_next_free_number() {
        let folder = tempfile::tempdir().unwrap();
        let image = folder.path().join("root.qcow2");
        let first = beside(&image);
        assert_eq!(first, folder.path().join("root.1.qcow2"));
        fs::write(&first, "").unwrap();
        assert_eq!(beside(&first), folder.path().join("root.2.qcow2"));
        let plain = folder.path().join("disk");
        assert_eq!(beside(&plain), folder.path().join("disk.1.qcow2"));
    }
}
