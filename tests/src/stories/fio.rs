//! fio writes and verifies on an overlay with several jobs and queues, while the file system is trimmed and the chain changed
//! beneath it.

use std::path::Path;
use std::time::Duration;

use serde_json::json;

use crate::ensure;
use crate::failure::{Context as _, Result};
use crate::fixtures::command::{ImageState, qemu_img_check, succeed};
use crate::fixtures::guest::SmallGuest;
use crate::fixtures::vm::{Vm, small_guest};
use crate::stories::disk::{LONG, overlay, overlay_disk, text};
use crate::stories::live_disk::{job, snapshot};
use crate::stories::{Scene, Story};

pub(super) static STORIES: &[Story] = &[
    Story::small(
        "fio",
        "fio_verifies_an_overlay_that_is_trimmed_snapshotted_and_committed_meanwhile",
        short,
    )
    .seconds(70, 400),
    Story::small(
        "fio",
        "fio_verifies_for_three_minutes_of_guest_time",
        three_minutes,
    )
    .seconds(300, 1200)
    .only_long(),
];

/// The least rounds of fio.
const ROUNDS: u32 = 2;

/// What the guest does.
const SCRIPT: &str = include_str!("../../lab/fio.sh");

fn short(scene: &Scene) -> Result {
    verify(scene, Duration::ZERO)
}

fn three_minutes(scene: &Scene) -> Result {
    verify(scene, Duration::from_secs(180))
}

/// The definition's disk with fio and e2fsprogs, which guests mount at `/tools`.
pub(super) fn tools_disk(scene: &Scene) -> serde_json::Value {
    json!({"id": "tools", "path": scene.site.image("guest-tools.img"), "format": "raw", "read_only": true})
}

/// The guest mounts its data disk and the programs.
pub(super) fn mount(vm: &mut Vm) -> Result {
    vm.run("mount -t ext4 /dev/vda /mnt && mkdir /tools && mount -t ext4 -o ro /dev/vdb /tools")
        .map(|_| ())
}

/// Rounds of fio until the guest has been at it for `time` of its own clock. At the beginning of every second round the disk
/// gets a new overlay, in the other rounds that is committed again; all while fio and fstrim are at work.
fn verify(scene: &Scene, time: Duration) -> Result {
    let (base, top) = overlay(scene)?;
    let guest = SmallGuest::prepare(scene)?;
    guest.add("lab-fio", SCRIPT)?;
    let mut definition = small_guest(&guest, &scene.folder);
    definition["cpus"] = json!({"count": 2});
    definition["memory"] = json!({"size": "384MiB"});
    let mut disk = overlay_disk(&base, &top);
    disk["queues"] = json!(2);
    definition["disks"] = json!([disk, tools_disk(scene)]);
    let mut vm = Vm::boot(scene, &definition)?;
    mount(&mut vm)?;
    let id = vm
        .console
        .start(&format!("lab-fio {} {ROUNDS}", time.as_secs()))?;
    let (mut rounds, mut snapshots, mut commits) = (0, 0, 0);
    let mut upper = None;
    loop {
        vm.console.wait_for("LAB-ROUND ", 4 * LONG)?;
        if vm.console.wait_for("\n", LONG)? == "over" {
            break;
        }
        rounds += 1;
        match upper.take() {
            None => {
                let path = scene.folder.join(format!("upper-{rounds}.qcow2"));
                snapshot(&vm, "data", &path).context("a snapshot while fio runs")?;
                snapshots += 1;
                upper = Some(path);
            }
            Some(path) => {
                job(&vm, "data", "commit").context("a commit while fio runs")?;
                std::fs::remove_file(path).context("remove the committed overlay")?;
                commits += 1;
            }
        }
    }
    let reply = vm.console.finish(id, LONG).context("fio and fstrim")?;
    println!(
        "{rounds} rounds, {snapshots} snapshots, {commits} commits, {}",
        reply.output
    );
    ensure!(
        reply.status == 0,
        "fio: {}{}",
        vm.console.text(),
        reply.output
    );
    ensure!(
        rounds >= ROUNDS && !reply.output.ends_with("TRIMS 0"),
        "little was done: {rounds} rounds, {}",
        reply.output
    );
    vm.run("umount /mnt")?;
    vm.power_off()?;
    let Some(upper) = upper else {
        return sound(scene, &top);
    };
    sound(scene, &upper)?;
    // Below the snapshot is a file system in use: for its journal to mend, not for e2fsck to like.
    let state = qemu_img_check(&top)?;
    ensure!(
        state == ImageState::Clean,
        "below it, qemu-img check finds {state:?}"
    );
    Ok(())
}

/// QEMU, we and e2fsck find nothing wrong with an image and the file system in it.
pub(super) fn sound(scene: &Scene, top: &Path) -> Result {
    let state = qemu_img_check(top)?;
    ensure!(state == ImageState::Clean, "qemu-img check finds {state:?}");
    succeed(
        scene.site.program("drover"),
        &["image", "check", "--format", "qcow2", &text(top)],
    )?;
    let flat = scene.folder.join("flat.raw");
    succeed(
        "qemu-img",
        &[
            "convert",
            "-f",
            "qcow2",
            "-O",
            "raw",
            &text(top),
            &text(&flat),
        ],
    )?;
    succeed("e2fsck", &["-f", "-n", &text(&flat)])?;
    std::fs::remove_file(&flat).context("remove the flat image")
}
