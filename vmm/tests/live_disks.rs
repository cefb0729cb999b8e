//! Disks changed while a VM runs, with tiny guests on this machine's /dev/kvm.

#[allow(dead_code, reason = "each test binary uses its part")]
mod support;

use std::path::{Path, PathBuf};
use std::time::Instant;

use drover_api::definition::{Burst, ByteSize, LimitsConfig, RateLimit};
use drover_api::disks::{
    DiskView, JobChange, JobKind, JobRequest, JobState, JobView, SnapshotDisk, SnapshotRequest,
};
use drover_api::server::Reply;
use drover_api::types::{ErrorCode, EventKind, PauseReason, VmState};
use drover_block::image::{CreateOptions, check, create_qcow2, info};
use drover_block::lease::{self, LeaseStanding};
use drover_block::{
    Backing, Buffers, Cache, Disk, DiskSpec, Format, Layer, Op, Request, SharedBuffer,
};
use drover_vmm::mailbox::DiskMessage;
use support::{Code, PATIENCE, Vm, kvm_or_skip};

macro_rules! needs_kvm {
    () => {
        if !kvm_or_skip() {
            return;
        }
    };
}

const SIZE: u64 = 8 << 20;

fn layer(path: &Path) -> Layer {
    Layer {
        path: path.to_path_buf(),
        format: Format::Qcow2,
        cache: Cache::Buffered,
    }
}

fn spec(path: &Path, backing: &[&Path]) -> DiskSpec {
    DiskSpec {
        top: layer(path),
        backing: Backing::Explicit(backing.iter().map(|path| layer(path)).collect()),
        read_only: false,
        discard: true,
    }
}

/// Fills 64 KiB at `offset` of a disk with `byte`.
fn fill(spec: &DiskSpec, offset: u64, byte: u8) {
    let mut disk = Disk::open(spec).unwrap();
    let buffers = Buffers::from_vec(vec![byte; 64 << 10]);
    disk.execute(&Op::Write { offset, buffers }).unwrap();
    disk.close().unwrap();
}

fn byte_at(spec: &DiskSpec, offset: u64) -> u8 {
    let mut disk = Disk::open(spec).unwrap();
    let buffer = SharedBuffer::zeroed(512);
    let buffers = buffer.buffers();
    disk.submit(Request {
        tag: 1,
        op: Op::Read { offset, buffers },
    });
    let mut completions = Vec::new();
    disk.poll(&mut completions);
    completions.pop().unwrap().result.unwrap();
    disk.close().unwrap();
    buffer.take().unwrap()[0]
}

struct Images {
    folder: tempfile::TempDir,
}

impl Images {
    /// `base.qcow2` with 1 in its first cluster and 2 in its second, `top.qcow2` over it with 3 in the second.
    fn new() -> Self {
        let images = Self {
            folder: tempfile::tempdir().unwrap(),
        };
        let (base, top) = (images.path("base.qcow2"), images.path("top.qcow2"));
        create_qcow2(&base, &CreateOptions::new(SIZE)).unwrap();
        fill(&spec(&base, &[]), 0, 1);
        fill(&spec(&base, &[]), 64 << 10, 2);
        let over = CreateOptions {
            backing: Some((PathBuf::from("base.qcow2"), Format::Qcow2)),
            ..CreateOptions::new(SIZE)
        };
        create_qcow2(&top, &over).unwrap();
        fill(&spec(&top, &[&base]), 64 << 10, 3);
        images
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Disks `root` (top over base) and `data` in a definition.
    fn vm(&self, io: &str) -> Vm {
        let data = self.path("data.qcow2");
        if !data.exists() {
            create_qcow2(&data, &CreateOptions::new(SIZE)).unwrap();
        }
        let folder = self.folder.path().display();
        let disks = format!(
            "disks:\n\
             - {{id: root, path: {folder}/top.qcow2, format: qcow2, cache: buffered, io: {io},\n   \
                backing: [{{path: {folder}/base.qcow2, format: qcow2}}]}}\n\
             - {{id: data, path: {folder}/data.qcow2, format: qcow2, cache: buffered, io: {io}}}\n"
        );
        let vm = Vm::running(Code::new().print("up").halt(), &disks);
        vm.wait_for("up");
        vm
    }
}

fn views(vm: &Vm) -> Vec<DiskView> {
    vm.disks(DiskMessage::View).unwrap()
}

fn resize(vm: &Vm, disk: &str, size: u64) -> Reply<DiskView> {
    let disk = disk.to_owned();
    vm.disks(|answer| DiskMessage::Resize { disk, size, answer })
}

fn snapshot(vm: &Vm, disks: &[(&str, Option<PathBuf>, bool)]) -> Reply<Vec<DiskView>> {
    let disks = disks.iter().map(|(id, overlay, existing)| SnapshotDisk {
        id: (*id).to_owned(),
        overlay: overlay.clone(),
        existing: *existing,
    });
    let request = SnapshotRequest {
        disks: disks.collect(),
    };
    vm.disks(|answer| DiskMessage::Snapshot { request, answer })
}

fn begin(vm: &Vm, disk: &str, kind: JobKind, rate: Option<u64>) -> Reply<JobView> {
    let disk = disk.to_owned();
    let rate = rate.map(ByteSize);
    let request = JobRequest { kind, rate };
    vm.disks(|answer| DiskMessage::BeginJob {
        disk,
        request,
        answer,
    })
}

/// Waits until a job is over.
fn end_of(vm: &Vm, id: &str) -> JobView {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let id = id.to_owned();
        let job = vm.disks(|answer| DiskMessage::Job { id, answer }).unwrap();
        if job.state.is_over() {
            return job;
        }
        assert!(Instant::now() < deadline, "{job:?}");
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
}

fn paths(disk: &DiskView) -> Vec<&str> {
    let names = disk.layers.iter().map(|layer| layer.path.file_name());
    names.map(|name| name.unwrap().to_str().unwrap()).collect()
}

#[test]
fn a_disk_grows_while_the_guest_runs_and_never_shrinks() {
    needs_kvm!();
    for io in ["auto", "threads", "inline"] {
        let images = Images::new();
        let mut vm = images.vm(io);
        assert_eq!(resize(&vm, "root", 2 * SIZE).unwrap().size_bytes, 2 * SIZE);
        assert_eq!(resize(&vm, "root", 2 * SIZE).unwrap().size_bytes, 2 * SIZE);
        let error = resize(&vm, "root", SIZE).unwrap_err();
        assert_eq!(
            (error.code, error.field.as_deref()),
            (ErrorCode::Invalid, Some("size"))
        );
        let error = resize(&vm, "nvme", SIZE).unwrap_err();
        assert_eq!(error.code, ErrorCode::NotFound);
        vm.shutdown(0).unwrap();
        vm.outcome();
        let top = images.path("top.qcow2");
        assert_eq!(info(&top, Format::Qcow2).unwrap().size_bytes, 2 * SIZE);
        let base = images.path("base.qcow2");
        assert_eq!(byte_at(&spec(&top, &[&base]), 64 << 10), 3);
    }
}

#[test]
fn two_disks_continue_in_overlays_at_once_and_the_definition_says_so() {
    needs_kvm!();
    let images = Images::new();
    let mut vm = images.vm("auto");
    let mine = images.path("elsewhere.qcow2");
    let disks = snapshot(
        &vm,
        &[("root", None, false), ("data", Some(mine.clone()), false)],
    )
    .unwrap();
    assert_eq!(paths(&disks[0]), ["top.1.qcow2", "top.qcow2", "base.qcow2"]);
    assert_eq!(paths(&disks[1]), ["elsewhere.qcow2", "data.qcow2"]);
    let config = vm.view().unwrap().config;
    assert_eq!(config.disks[1].path, mine);
    assert_eq!(config.disks[0].backing.len(), 2);
    // Nobody is to start from the images of before.
    let data = images.path("data.qcow2");
    let (lease, _) = lease::read(&data).unwrap().unwrap();
    assert_eq!(lease.superseded_by.as_ref(), Some(&mine));
    // All or none.
    let error = snapshot(
        &vm,
        &[("root", None, false), ("data", Some(mine.clone()), false)],
    )
    .unwrap_err();
    assert_eq!(
        (error.code, error.field.as_deref()),
        (ErrorCode::Unavailable, Some("disks[1].overlay"))
    );
    assert!(
        !images.path("top.2.qcow2").exists(),
        "an overlay stayed behind"
    );
    assert_eq!(paths(&views(&vm)[0]).len(), 3);
    vm.shutdown(0).unwrap();
    vm.outcome();
    let (over, top, base) = (
        images.path("top.1.qcow2"),
        images.path("top.qcow2"),
        images.path("base.qcow2"),
    );
    assert_eq!(byte_at(&spec(&over, &[&top, &base]), 64 << 10), 3);
}

#[test]
fn an_overlay_that_exists_is_used_only_if_nothing_is_written_in_it() {
    needs_kvm!();
    let images = Images::new();
    let data = images.path("data.qcow2");
    create_qcow2(&data, &CreateOptions::new(SIZE)).unwrap();
    let over = |name: &str| CreateOptions {
        backing: Some((PathBuf::from(name), Format::Qcow2)),
        ..CreateOptions::new(SIZE)
    };
    let (overlay, used) = (images.path("prepared.qcow2"), images.path("used.qcow2"));
    create_qcow2(&overlay, &over("data.qcow2")).unwrap();
    create_qcow2(&used, &over("prepared.qcow2")).unwrap();
    fill(&spec(&used, &[&overlay, &data]), 0, 9);
    let vm = images.vm("auto");
    let disks = snapshot(&vm, &[("data", Some(overlay.clone()), true)]).unwrap();
    assert_eq!(paths(&disks[0]), ["prepared.qcow2", "data.qcow2"]);
    let error = snapshot(&vm, &[("data", Some(used.clone()), true)]).unwrap_err();
    assert_eq!(error.code, ErrorCode::Invalid, "{error}");
    assert!(used.exists(), "somebody else's image was removed");
    assert_eq!(paths(&views(&vm)[1]), ["prepared.qcow2", "data.qcow2"]);
    assert_eq!(vm.view().unwrap().state, VmState::Running);
}

#[test]
fn a_flattened_disk_needs_no_layer_below_it() {
    needs_kvm!();
    for io in ["auto", "threads", "inline"] {
        let images = Images::new();
        let mut vm = images.vm(io);
        let job = begin(&vm, "root", JobKind::Flatten, None).unwrap();
        let over = end_of(&vm, &job.id);
        assert_eq!((over.state, over.error), (JobState::Done, None));
        assert_eq!(over.done_bytes, over.total_bytes);
        assert_eq!(paths(&views(&vm)[0]), ["top.qcow2"]);
        let error = begin(&vm, "root", JobKind::Flatten, None).unwrap_err();
        assert_eq!(error.code, ErrorCode::Invalid);
        vm.shutdown(0).unwrap();
        vm.outcome();
        let told = vm.events().into_iter().any(|event| {
            matches!(
                event,
                EventKind::Job {
                    state: JobState::Done,
                    kind: JobKind::Flatten,
                    ..
                }
            )
        });
        assert!(told, "no event");
        let top = spec(&images.path("top.qcow2"), &[]);
        assert_eq!((byte_at(&top, 0), byte_at(&top, 64 << 10)), (1, 3));
    }
}

#[test]
fn a_committed_disk_goes_on_in_the_layer_below() {
    needs_kvm!();
    for io in ["auto", "threads", "inline"] {
        let images = Images::new();
        let mut vm = images.vm(io);
        let job = begin(&vm, "root", JobKind::Commit, None).unwrap();
        let over = end_of(&vm, &job.id);
        assert_eq!((over.state, over.error), (JobState::Done, None));
        assert_eq!(paths(&views(&vm)[0]), ["base.qcow2"]);
        assert!(vm.view().unwrap().config.disks[0].backing.is_empty());
        vm.shutdown(0).unwrap();
        vm.outcome();
        let base = images.path("base.qcow2");
        let (lease, standing) = lease::read(&base).unwrap().unwrap();
        assert_eq!((lease.superseded_by, standing), (None, LeaseStanding::Free));
        let spec = spec(&base, &[]);
        assert_eq!((byte_at(&spec, 0), byte_at(&spec, 64 << 10)), (1, 3));
        assert!(check(&base, Format::Qcow2).unwrap().corruptions == 0);
    }
}

#[test]
fn a_job_is_slowed_paused_and_cancelled_and_keeps_others_off_its_disk() {
    needs_kvm!();
    for kind in [JobKind::Flatten, JobKind::Commit] {
        let images = Images::new();
        let (base, top) = (images.path("base.qcow2"), images.path("top.qcow2"));
        for cluster in 2..128 {
            match kind {
                JobKind::Flatten => fill(&spec(&base, &[]), cluster << 16, 5),
                JobKind::Commit => fill(&spec(&top, &[&base]), cluster << 16, 5),
            }
        }
        let mut vm = images.vm("auto");
        let job = begin(&vm, "root", kind, Some(1 << 16)).unwrap();
        assert_eq!(job.rate, Some(1 << 16));
        for error in [
            begin(&vm, "root", kind, None).unwrap_err(),
            resize(&vm, "root", 2 * SIZE).unwrap_err(),
            snapshot(&vm, &[("data", None, false), ("root", None, false)]).unwrap_err(),
        ] {
            assert_eq!((error.code, error.status()), (ErrorCode::Busy, 409));
        }
        assert_eq!(views(&vm)[0].job.as_deref(), Some(job.id.as_str()));
        let id = job.id.clone();
        let change = JobChange {
            paused: Some(true),
            ..JobChange::default()
        };
        let changed = vm.disks(|answer| DiskMessage::ChangeJob { id, change, answer });
        assert_eq!(changed.unwrap().state, JobState::Paused);
        // The guest can be reset meanwhile.
        vm.reset().unwrap();
        let id = job.id.clone();
        vm.disks(|answer| DiskMessage::DeleteJob { id, answer })
            .unwrap();
        assert_eq!(end_of(&vm, &job.id).state, JobState::Cancelled);
        assert_eq!(paths(&views(&vm)[0]), ["top.qcow2", "base.qcow2"]);
        let id = job.id.clone();
        vm.disks(|answer| DiskMessage::DeleteJob { id, answer })
            .unwrap();
        assert!(vm.disks(DiskMessage::Jobs).unwrap().is_empty());
        assert_eq!(resize(&vm, "root", 2 * SIZE).unwrap().size_bytes, 2 * SIZE);
        vm.shutdown(0).unwrap();
        vm.outcome();
        let chain = spec(&top, &[&base]);
        assert_eq!((byte_at(&chain, 0), byte_at(&chain, 127 << 16)), (1, 5));
    }
}

#[test]
fn limits_change_while_the_guest_runs() {
    needs_kvm!();
    let images = Images::new();
    let vm = images.vm("auto");
    let limits = LimitsConfig {
        iops: Some(RateLimit {
            rate: 100,
            burst: Some(Burst {
                rate: 1000,
                seconds: 5,
            }),
        }),
        ..LimitsConfig::default()
    };
    let disk = || "root".to_owned();
    let view = vm.disks(|answer| DiskMessage::Limit {
        disk: disk(),
        limits,
        answer,
    });
    assert_eq!(view.unwrap().limits, Some(limits));
    let none = LimitsConfig::default();
    let view = vm.disks(|answer| DiskMessage::Limit {
        disk: disk(),
        limits: none,
        answer,
    });
    assert_eq!(view.unwrap().limits, None);
}

#[test]
fn a_paused_guest_stands_still_until_it_is_resumed() {
    needs_kvm!();
    // Prints dots for ever.
    let mut code = Code::new();
    let length = Code::new().print(".").bytes_so_far().len();
    code = code.print(".").raw(&[0xeb, (-(length as i8) - 2) as u8]);
    let mut vm = Vm::running(code, "");
    vm.wait_for("...");
    let view = vm.pause().unwrap();
    assert_eq!(
        (view.state, view.pause_reason),
        (VmState::Paused, Some(PauseReason::Requested))
    );
    vm.pause().unwrap();
    let before = vm.serial().len();
    std::thread::sleep(std::time::Duration::from_millis(50));
    // What was on its way to the file may still arrive; the guest itself adds nothing.
    let settled = vm.serial().len();
    std::thread::sleep(std::time::Duration::from_millis(100));
    assert_eq!(vm.serial().len(), settled, "after {before}");
    let view = vm.resume().unwrap();
    assert_eq!((view.state, view.pause_reason), (VmState::Running, None));
    let deadline = Instant::now() + PATIENCE;
    while vm.serial().len() <= settled {
        assert!(Instant::now() < deadline, "it does not go on");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    vm.pause().unwrap();
    vm.shutdown(0).unwrap();
    vm.outcome();
}

#[test]
fn the_end_of_a_vm_in_the_middle_of_a_change_leaves_every_image_sound() {
    needs_kvm!();
    for round in 0..6 {
        let images = Images::new();
        let mut vm = images.vm(["auto", "threads"][round % 2]);
        let (answer, _reply) = tokio::sync::oneshot::channel();
        let message = match round / 2 {
            0 => DiskMessage::Resize {
                disk: "root".to_owned(),
                size: 2 * SIZE,
                answer,
            },
            _ => DiskMessage::BeginJob {
                disk: "root".to_owned(),
                request: JobRequest {
                    kind: [JobKind::Flatten, JobKind::Commit][round / 2 - 1],
                    rate: None,
                },
                answer: tokio::sync::oneshot::channel().0,
            },
        };
        vm.send_disks(message);
        vm.shutdown(0).unwrap();
        vm.outcome();
        drop(vm);
        let (base, top) = (images.path("base.qcow2"), images.path("top.qcow2"));
        for path in [&base, &top] {
            assert!(check(path, Format::Qcow2).unwrap().corruptions == 0);
        }
        let qcow2 = info(&top, Format::Qcow2).unwrap().qcow2.unwrap();
        let below: &[&Path] = match qcow2.backing_file {
            Some(_) => &[&base],
            None => &[],
        };
        let chain = spec(&top, below);
        assert_eq!(byte_at(&chain, 64 << 10), 3, "round {round}");
        assert_eq!(byte_at(&chain, 0), 1, "round {round}");
    }
}
