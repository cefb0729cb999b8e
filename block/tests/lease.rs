//! Leases of disks: taken, kept over the death of a process, given back. The state table is tested inside the crate.

mod common;

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use common::{Folder, TestDisk, engines, layer, refusal, spec};
use drover_block::lease::{self, LeaseRequest, LeaseStanding};
use drover_block::{Disk, DiskOptions, DiskSpec, Format, IoEngine, image};

fn create(path: &Path) -> DiskSpec {
    image::create_qcow2(path, &image::CreateOptions::new(1 << 20)).unwrap();
    spec(path, Format::Qcow2, &[])
}

fn options(owner: &str, engine: IoEngine) -> DiskOptions {
    let owner = owner.to_owned();
    DiskOptions {
        lease: Some(LeaseRequest { owner }),
        ..engine.into()
    }
}

fn open(spec: &DiskSpec, owner: &str) -> TestDisk {
    TestDisk(Disk::open_with(spec, options(owner, IoEngine::Inline)).unwrap())
}

fn standing(path: &Path) -> Option<LeaseStanding> {
    lease::read(path).unwrap().map(|(_, standing)| standing)
}

/// Not a test: the process that the tests below start and kill.
#[test]
fn child_that_holds_an_image() {
    let Ok(path) = std::env::var("HOLD_IMAGE") else {
        println!("SKIPPED: only started by other tests");
        return;
    };
    let mut disk = open(&spec(Path::new(&path), Format::Qcow2, &[]), "vm child");
    disk.write(0, &[5; 4096]);
    disk.flush();
    let disk = if std::env::var("HOLD_CLOSED").is_ok() {
        disk.0.close_keeping_lease().unwrap();
        None
    } else {
        Some(disk)
    };
    println!("\nHOLDS");
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    drop(disk);
}

struct Holder {
    child: Child,
    input: Option<ChildStdin>,
    /// Open, so that the child can say how its test went.
    _output: std::io::Lines<BufReader<ChildStdout>>,
}

impl Holder {
    fn start(image: &Path, closed: bool) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["--exact", "child_that_holds_an_image", "--nocapture"])
            .env("HOLD_IMAGE", image)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        if closed {
            command.env("HOLD_CLOSED", "1");
        }
        let mut child = command.spawn().unwrap();
        let mut output = BufReader::new(child.stdout.take().unwrap()).lines();
        assert!(output.any(|line| line.unwrap() == "HOLDS"), "it has ended");
        Self {
            input: child.stdin.take(),
            child,
            _output: output,
        }
    }

    fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    fn end(mut self) {
        let mut input = self.input.take().unwrap();
        input.write_all(b"end\n").unwrap();
        assert!(self.child.wait().unwrap().success());
    }
}

fn scene() -> (Folder, PathBuf, DiskSpec) {
    let folder = Folder::new();
    let path = folder.path("x.qcow2");
    let spec = create(&path);
    (folder, path, spec)
}

#[test]
fn a_disk_owns_its_image_while_it_is_open_with_every_engine() {
    for engine in engines() {
        let (_folder, path, spec) = scene();
        for epoch in 1..4 {
            let mut disk = TestDisk(Disk::open_with(&spec, options("vm a", engine)).unwrap());
            assert_eq!(standing(&path), Some(LeaseStanding::Own));
            assert_eq!(disk.0.lease_epoch(), Some(epoch));
            disk.fill(0, 4096, 1);
            if epoch == 2 {
                drop(disk);
            } else {
                disk.close();
            }
            assert_eq!(standing(&path), Some(LeaseStanding::Free));
        }
    }
}

#[test]
fn a_lease_survives_an_exchange_of_the_disk_with_its_epoch() {
    let (_folder, path, spec) = scene();
    for _ in 0..3 {
        let disk = open(&spec, "vm a");
        assert_eq!(disk.0.lease_epoch(), Some(1));
        disk.0.close_keeping_lease().unwrap();
        assert_eq!(standing(&path), Some(LeaseStanding::Own));
    }
    lease::give_back(&path).unwrap();
    assert_eq!(standing(&path), Some(LeaseStanding::Free));
}

#[test]
fn a_killed_holder_is_followed_with_the_next_epoch_and_loses_no_flushed_data() {
    let (_folder, path, spec) = scene();
    for epoch in [1, 2, 3] {
        let holder = Holder::start(&path, false);
        assert!(refusal(&spec).contains("in use by another process"));
        assert_eq!(standing(&path), Some(LeaseStanding::Held));
        assert!(lease::break_lease(&path).is_err());
        let (lease, _) = lease::read(&path).unwrap().unwrap();
        assert_eq!(lease.epoch, 2 * epoch - 1);
        assert_eq!(lease.holder.unwrap().owner, "vm child");
        holder.kill();
        assert_eq!(standing(&path), Some(LeaseStanding::Abandoned));
        let mut disk = open(&spec, "vm next");
        assert_eq!(disk.0.lease_epoch(), Some(2 * epoch));
        assert_eq!(disk.read(0, 4096), vec![5; 4096]);
        disk.close();
    }
}

#[test]
fn a_holder_that_runs_keeps_others_out_though_it_has_no_lock() {
    let (_folder, path, spec) = scene();
    let holder = Holder::start(&path, true);
    let pid = holder.child.id().to_string();
    let error = Disk::open_with(&spec, options("vm b", IoEngine::Inline)).unwrap_err();
    for message in [refusal(&spec), error.to_string()] {
        assert!(message.contains("`vm child`"), "{message}");
        assert!(message.contains(&pid), "{message}");
    }
    assert!(image::resize(&spec, 2 << 20, image::Shrink::Refuse).is_err());
    assert!(lease::break_lease(&path).is_err());
    // Reading harms nobody.
    let reader = DiskSpec {
        read_only: true,
        ..spec.clone()
    };
    TestDisk(Disk::open_with(&reader, options("reader", IoEngine::Inline)).unwrap()).close();
    image::info(&path, Format::Qcow2).unwrap();
    holder.end();
    assert_eq!(standing(&path), Some(LeaseStanding::Abandoned));
    image::resize(&spec, 2 << 20, image::Shrink::Refuse).unwrap();
    open(&spec, "vm b").close();
}

#[test]
fn an_image_under_an_overlay_is_written_by_a_commit_of_that_overlay_alone() {
    let folder = Folder::new();
    let base = folder.path("base.qcow2");
    let base_spec = create(&base);
    open(&base_spec, "vm a").0.close_keeping_lease().unwrap();
    let overlay = |name: &str| {
        let path = folder.path(name);
        let backing = Some((base.clone(), Format::Qcow2));
        let options = image::CreateOptions {
            backing,
            ..image::CreateOptions::new(1 << 20)
        };
        image::create_qcow2(&path, &options).unwrap();
        spec(&path, Format::Qcow2, &[layer(&base, Format::Qcow2)])
    };
    let (top, other) = (overlay("top.qcow2"), overlay("other.qcow2"));
    lease::supersede(&base, &top.top.path).unwrap();
    let message = refusal(&base_spec);
    assert!(message.contains("top.qcow2"), "{message}");
    assert!(message.contains("lease break"), "{message}");
    let commit = |owner| DiskOptions {
        commit_below: true,
        ..options(owner, IoEngine::Inline)
    };
    let error = Disk::open_with(&other, commit("vm b")).unwrap_err();
    assert!(error.to_string().contains("top.qcow2"), "{error}");
    let disk = Disk::open_with(&top, commit("vm a")).unwrap();
    assert_eq!(standing(&base), Some(LeaseStanding::Superseded));
    disk.close().unwrap();
    lease::restore(&base, &top.top.path).unwrap();
    open(&base_spec, "vm a").close();
}
