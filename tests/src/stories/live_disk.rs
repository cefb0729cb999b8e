//! What changes about a disk while its guest uses it: its size, its chain, its limits, the space below it.

use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::ensure;
use crate::failure::{Context as _, Failure, Result};
use crate::fixtures::command::{ImageState, qemu_img_check, succeed};
use crate::fixtures::guest::SmallGuest;
use crate::fixtures::vm::{Vm, small_guest};
use crate::pattern;
use crate::stories::disk::{LONG, overlay, overlay_disk, text};
use crate::stories::fio::{mount, sound, tools_disk};
use crate::stories::{Scene, Story};

pub(super) static STORIES: &[Story] = &[
    Story::small(
        "live_disk",
        "a_disk_grows_live_and_its_file_system_with_it",
        grow,
    )
    .seconds(40, 300),
    Story::small(
        "live_disk",
        "an_overlay_is_flattened_live_and_stands_alone",
        flatten,
    )
    .seconds(40, 300),
    Story::small("live_disk", "limits_of_a_disk_are_changed_live", limits).seconds(40, 300),
    Story::small(
        "live_disk",
        "a_full_host_stops_the_vm_and_it_goes_on_when_there_is_space",
        no_space,
    )
    .seconds(45, 300),
];

/// How long a job or a change may take.
const PATIENCE: Duration = Duration::from_secs(120);

/// Makes a request that must succeed, and returns its answer.
pub(super) fn call(vm: &Vm, method: &str, path: &str, body: Option<&Value>) -> Result<Value> {
    let reply = vm.api(method, path, body)?;
    ensure!(
        (200..300).contains(&reply.status),
        "{method} {path}: {} {}",
        reply.status,
        reply.body
    );
    if reply.body.is_empty() {
        return Ok(Value::Null);
    }
    reply.json()
}

/// Puts an overlay on a disk while it is used.
pub(super) fn snapshot(vm: &Vm, disk: &str, overlay: &Path) -> Result {
    let body = json!({"disks": [{"id": disk, "overlay": overlay}]});
    call(vm, "POST", "/v1/vm/disks/snapshot", Some(&body)).map(|_| ())
}

/// Begins a job on a disk and waits for its end.
pub(super) fn job(vm: &Vm, disk: &str, kind: &str) -> Result {
    let begun = call(
        vm,
        "POST",
        &format!("/v1/vm/disks/{disk}/jobs"),
        Some(&json!({"kind": kind})),
    )?;
    let id = match &begun["id"] {
        Value::String(id) => id.clone(),
        Value::Number(id) => id.to_string(),
        _ => return Err(Failure::Broken(format!("a job without an id: {begun}"))),
    };
    let deadline = Instant::now() + PATIENCE;
    let mut last = 0;
    loop {
        let now = call(vm, "GET", &format!("/v1/vm/jobs/{id}"), None)?;
        let done = now["done_bytes"].as_u64().unwrap_or(0);
        ensure!(
            done >= last,
            "the job {kind} went back from {last} to {done}"
        );
        last = done;
        match now["state"].as_str() {
            Some("done") => return Ok(()),
            Some("running" | "finishing") => {}
            _ => return Err(Failure::Broken(format!("the job {kind}: {now}"))),
        }
        ensure!(
            Instant::now() < deadline,
            "the job {kind} takes too long: {now}"
        );
        thread::sleep(Duration::from_millis(100));
    }
}

fn boot(scene: &Scene, disks: Value) -> Result<Vm> {
    let guest = SmallGuest::prepare(scene)?;
    let mut definition = small_guest(&guest, &scene.folder);
    definition["disks"] = disks;
    Vm::boot(scene, &definition)
}

fn grow(scene: &Scene) -> Result {
    const NEW: u64 = 3 << 30;
    let (base, top) = overlay(scene)?;
    let mut vm = boot(scene, json!([overlay_disk(&base, &top), tools_disk(scene)]))?;
    mount(&mut vm)?;
    let size = |vm: &mut Vm| -> Result<u64> {
        let blocks = vm.run("stat -f -c '%b %S' /mnt")?;
        let mut words = blocks.split_whitespace().map(str::parse::<u64>);
        match (words.next(), words.next()) {
            (Some(Ok(blocks)), Some(Ok(bytes))) => Ok(blocks * bytes),
            _ => Err(Failure::Broken(format!("stat -f: {blocks:?}"))),
        }
    };
    let before = size(&mut vm)?;
    call(
        &vm,
        "POST",
        "/v1/vm/disks/data/resize",
        Some(&json!({"size": "3GiB"})),
    )?;
    // The guest was told by an interrupt: it does not have to look.
    vm.run(&format!(
        "n=0; until [ $(cat /sys/block/vda/size) = {} ]; do n=$((n+1)); [ $n -lt 100 ] || exit 1; usleep 100000; done",
        NEW / 512
    ))
    .context("the guest's size of the disk")?;
    vm.console.run("/tools/bin/resize2fs /dev/vda", LONG)?;
    let after = size(&mut vm)?;
    ensure!(
        before < 1 << 30 && after > NEW / 100 * 95,
        "the file system had {before} bytes and has {after}"
    );
    let bytes = 40_000_000;
    vm.console
        .run(&format!("lab-guest write /mnt/new {bytes} 5 && sync"), LONG)?;
    let smaller = vm.api(
        "POST",
        "/v1/vm/disks/data/resize",
        Some(&json!({"size": "1GiB"})),
    )?;
    ensure!(
        (400..500).contains(&smaller.status),
        "a live disk was made smaller: {} {}",
        smaller.status,
        smaller.body
    );
    vm.run("umount /mnt")?;
    vm.power_off()?;
    sound(scene, &top)
}

fn flatten(scene: &Scene) -> Result {
    let bytes = 30_000_000;
    let (base, top) = overlay(scene)?;
    let mut vm = boot(scene, json!([overlay_disk(&base, &top)]))?;
    vm.run("mount -t ext4 /dev/vda /mnt")?;
    let id = vm.console.start(&format!(
        "for n in 1 2 3; do lab-guest write /mnt/$n {bytes} $n && sync || exit 1; done"
    ))?;
    job(&vm, "data", "flatten")?;
    let reply = vm.console.finish(id, LONG)?;
    ensure!(reply.status == 0, "writing meanwhile: {}", reply.output);
    let disks = call(&vm, "GET", "/v1/vm/disks", None)?.to_string();
    ensure!(
        disks.contains(&text(&top)) && !disks.contains(&text(&base)),
        "the chain after flatten: {disks}"
    );
    // Nobody needs the base any more: also not the VM that was started with it.
    std::fs::remove_file(&base).context("remove the base")?;
    for n in 1..=3 {
        let expected = pattern::expected(n, bytes);
        vm.run("echo 3 > /proc/sys/vm/drop_caches")?;
        let read = vm
            .console
            .run(&format!("lab-guest sum /mnt/{n} {bytes}"), LONG)?;
        ensure!(read == expected, "file {n} is {read}, not {expected}");
    }
    vm.run("umount /mnt")?;
    vm.power_off()?;
    sound(scene, &top)
}

fn limits(scene: &Scene) -> Result {
    const READS: u64 = 60;
    let raw = scene.folder.join("plain.raw");
    std::fs::File::create(&raw)?.set_len(64 << 20)?;
    let mut vm = boot(
        scene,
        json!([{"id": "data", "path": raw, "format": "raw", "limits": {"iops": {"rate": 10}}}]),
    )?;
    let timed = |vm: &mut Vm| -> Result<Duration> {
        let started = Instant::now();
        vm.console.run(
            &format!("dd if=/dev/vda of=/dev/null bs=4k count={READS} iflag=direct"),
            LONG,
        )?;
        Ok(started.elapsed())
    };
    // Ten a second, less what a bucket that was full lets through at once.
    let slow = timed(&mut vm)?;
    call(
        &vm,
        "PUT",
        "/v1/vm/disks/data/limits",
        Some(&json!({"iops": {"rate": 100_000}})),
    )?;
    let fast = timed(&mut vm)?;
    println!("{READS} reads: {slow:?} at 10 a second, {fast:?} at 100000");
    ensure!(
        slow > Duration::from_secs(4),
        "{READS} reads took {slow:?} at 10 a second"
    );
    ensure!(
        fast < slow / 2,
        "{READS} reads took {fast:?} with a higher limit, {slow:?} before"
    );
    // A limit that is lifted wakes requests that wait for it.
    call(
        &vm,
        "PUT",
        "/v1/vm/disks/data/limits",
        Some(&json!({"iops": {"rate": 1}})),
    )?;
    let id = vm
        .console
        .start("dd if=/dev/vda of=/dev/null bs=4k count=200 iflag=direct")?;
    thread::sleep(Duration::from_secs(1));
    call(&vm, "PUT", "/v1/vm/disks/data/limits", Some(&json!({})))?;
    let reply = vm
        .console
        .finish(id, Duration::from_secs(60))
        .context("requests that waited for a limit which was lifted")?;
    ensure!(reply.status == 0, "{}", reply.output);
    vm.power_off()
}

/// A small file system in memory that goes with its value.
struct SmallRoom(PathBuf);

impl SmallRoom {
    fn mount(path: PathBuf, bytes: u64) -> Result<Self> {
        std::fs::create_dir(&path)?;
        succeed(
            "mount",
            &[
                "-t",
                "tmpfs",
                "-o",
                &format!("size={bytes}"),
                "small",
                &text(&path),
            ],
        )?;
        Ok(Self(path))
    }

    fn resize(&self, bytes: u64) -> Result {
        let option = format!("remount,size={bytes}");
        succeed("mount", &["-o", &option, &text(&self.0)]).map(|_| ())
    }
}

impl Drop for SmallRoom {
    fn drop(&mut self) {
        // Lazily: a VM of a story that failed may still have files there for a moment.
        let _ = succeed("umount", &["-l", &text(&self.0)]);
    }
}

fn state(vm: &Vm) -> Result<String> {
    let state = call(vm, "GET", "/v1/vm", None)?["state"].clone();
    Ok(state.as_str().unwrap_or_default().to_owned())
}

fn no_space(scene: &Scene) -> Result {
    const BYTES: u64 = 40_000_000;
    let room = SmallRoom::mount(scene.folder.join("small"), 24 << 20)?;
    let top = room.0.join("top.qcow2");
    succeed(
        "qemu-img",
        &["create", "-q", "-f", "qcow2", &text(&top), "256M"],
    )?;
    let mut vm = boot(
        scene,
        json!([{"id": "data", "path": top, "format": "qcow2", "on_error": {"enospc": "stop", "eio": "report"}}]),
    )?;
    let id = vm
        .console
        .start(&format!("lab-guest write /dev/vda {BYTES} 4"))?;
    let deadline = Instant::now() + PATIENCE;
    while state(&vm)? != "paused" {
        ensure!(
            Instant::now() < deadline,
            "the VM does not stop at a full disk"
        );
        thread::sleep(Duration::from_millis(50));
    }
    // Going on without space stops it again, and loses nothing.
    call(&vm, "POST", "/v1/vm/resume", None)?;
    thread::sleep(Duration::from_secs(1));
    while state(&vm)? != "paused" {
        ensure!(
            Instant::now() < deadline,
            "the VM does not stop a second time"
        );
        thread::sleep(Duration::from_millis(50));
    }
    room.resize(128 << 20)?;
    call(&vm, "POST", "/v1/vm/resume", None)?;
    let expected = pattern::expected(4, BYTES);
    let reply = vm.console.finish(id, LONG)?;
    ensure!(
        reply.status == 0 && reply.output == expected,
        "the guest wrote {} ({}), not {expected}",
        reply.output,
        reply.status
    );
    vm.run("echo 3 > /proc/sys/vm/drop_caches")?;
    let read = vm
        .console
        .run(&format!("lab-guest sum /dev/vda {BYTES}"), LONG)?;
    ensure!(read == expected, "the guest read {read}, not {expected}");
    vm.power_off()?;
    let found = qemu_img_check(&top)?;
    ensure!(found == ImageState::Clean, "qemu-img check finds {found:?}");
    Ok(())
}
