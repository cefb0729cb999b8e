//! Disks: what is written is there after a reboot and after a kill, QEMU and e2fsck find nothing wrong,
//! and freed space comes back.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Value, json};

use crate::ensure;
use crate::failure::{Context as _, Failure, Result};
use crate::fixtures::command::{ImageState, ask, disk_usage, qemu_img_check, succeed};
use crate::fixtures::guest::{COMMAND_LINE, SmallGuest};
use crate::fixtures::vm::{Vm, small_guest};
use crate::pattern;
use crate::stories::{Scene, Story};

pub(super) static STORIES: &[Story] = &[
    Story::small(
        "disk",
        "a_raw_disk_keeps_200_mb_over_a_reboot_and_a_kill",
        raw_keeps,
    )
    .seconds(70, 500),
    Story::small(
        "disk",
        "a_qcow2_overlay_keeps_200_mb_over_a_reboot_and_a_kill",
        qcow2_keeps,
    )
    .seconds(80, 500),
    Story::small("disk", "fstrim_gives_the_blocks_of_an_overlay_back", fstrim).seconds(50, 400),
    Story::small(
        "disk",
        "a_kill_in_the_middle_of_writes_loses_nothing_flushed",
        kill_in_writes,
    )
    .seconds(50, 400),
    Story::small(
        "disk",
        "a_disk_shows_its_queues_serial_and_write_protection",
        attributes,
    ),
    Story::small(
        "disk",
        "a_guest_without_message_signalled_interrupts_is_served_over_lines",
        interrupt_lines,
    ),
];

/// 200 MB, the amount of the stories.
const BYTES: u64 = 200_000_000;
pub(super) const LONG: Duration = Duration::from_secs(120);

pub(super) fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

/// A raw ext4 file system of 1 GiB.
pub(super) fn raw_file_system(scene: &Scene) -> Result<PathBuf> {
    let path = scene.folder.join("fs.raw");
    File::create(&path)?.set_len(1 << 30)?;
    succeed("mkfs.ext4", &["-q", "-F", &text(&path)])?;
    Ok(path)
}

/// A qcow2 overlay on a qcow2 base that holds a file system.
pub(super) fn overlay(scene: &Scene) -> Result<(PathBuf, PathBuf)> {
    let raw = raw_file_system(scene)?;
    let (base, top) = (
        scene.folder.join("base.qcow2"),
        scene.folder.join("top.qcow2"),
    );
    succeed(
        "qemu-img",
        &[
            "convert",
            "-f",
            "raw",
            "-O",
            "qcow2",
            &text(&raw),
            &text(&base),
        ],
    )?;
    std::fs::remove_file(&raw)?;
    succeed(
        "qemu-img",
        &[
            "create",
            "-q",
            "-f",
            "qcow2",
            "-b",
            &text(&base),
            "-F",
            "qcow2",
            &text(&top),
        ],
    )?;
    Ok((base, top))
}

pub(super) fn overlay_disk(base: &Path, top: &Path) -> Value {
    json!({"id": "data", "path": top, "format": "qcow2", "backing": [{"path": base, "format": "qcow2"}]})
}

pub(super) fn with_disk(scene: &Scene, guest: &SmallGuest, disk: &Value) -> Value {
    let mut definition = small_guest(guest, &scene.folder);
    definition["disks"] = json!([disk]);
    definition
}

fn raw_keeps(scene: &Scene) -> Result {
    let raw = raw_file_system(scene)?;
    keeps(scene, &json!({"id": "data", "path": raw, "format": "raw"}))?;
    succeed("e2fsck", &["-f", "-n", &text(&raw)]).map(|_| ())
}

fn qcow2_keeps(scene: &Scene) -> Result {
    let (base, top) = overlay(scene)?;
    let before = std::fs::metadata(&base)?.modified()?;
    keeps(scene, &overlay_disk(&base, &top))?;
    let state = qemu_img_check(&top)?;
    ensure!(
        state == ImageState::Clean,
        "after a clean power-off qemu-img check finds {state:?}"
    );
    ensure!(
        std::fs::metadata(&base)?.modified()? == before,
        "the base was written to"
    );
    let flat = scene.folder.join("flat.raw");
    succeed(
        "qemu-img",
        &[
            "convert",
            "-f",
            "qcow2",
            "-O",
            "raw",
            &text(&top),
            &text(&flat),
        ],
    )?;
    succeed("e2fsck", &["-f", "-n", &text(&flat)]).map(|_| ())
}

/// Writes 200 MB, reads them back after a reboot of the guest and again after `kill -9` and a new start.
fn keeps(scene: &Scene, disk: &Value) -> Result {
    let guest = SmallGuest::prepare(scene)?;
    let definition = with_disk(scene, &guest, disk);
    let expected = pattern::expected(8, BYTES);
    let mut vm = Vm::boot(scene, &definition)?;
    vm.run("mount -t ext4 /dev/vda /mnt")?;
    let written = vm.console.run(
        &format!("lab-guest write /mnt/data {BYTES} 8 && sync"),
        LONG,
    )?;
    ensure!(
        written == expected,
        "the guest wrote {written}, not {expected}"
    );
    vm.run("umount /mnt")?;
    vm.console.start("reboot -f")?;
    vm.wait_for_shell()?;
    read_back(&mut vm, &expected).context("after the guest's reboot")?;
    // Killed with the file system mounted and a file just synced.
    vm.run("echo flushed > /mnt/late && sync")?;
    vm.kill_minus_nine()?;
    drop(vm);
    if disk["format"] == "qcow2" {
        let path = disk["path"].as_str().unwrap_or_default();
        qemu_img_check(Path::new(path)).context("after kill -9")?;
    }
    let mut vm = Vm::boot(scene, &definition).context("started again after kill -9")?;
    read_back(&mut vm, &expected).context("after kill -9")?;
    let late = vm.run("cat /mnt/late")?;
    ensure!(
        late == "flushed",
        "the file synced before kill -9 holds {late:?}"
    );
    vm.run("umount /mnt")?;
    vm.power_off()
}

fn read_back(vm: &mut Vm, expected: &str) -> Result {
    vm.run("mount -t ext4 /dev/vda /mnt")?;
    let read = vm
        .console
        .run(&format!("lab-guest sum /mnt/data {BYTES}"), LONG)?;
    ensure!(read == expected, "the guest read {read}, not {expected}");
    Ok(())
}

fn fstrim(scene: &Scene) -> Result {
    let (base, top) = overlay(scene)?;
    let guest = SmallGuest::prepare(scene)?;
    let mut vm = Vm::boot(scene, &with_disk(scene, &guest, &overlay_disk(&base, &top)))?;
    vm.run("mount -t ext4 /dev/vda /mnt")?;
    vm.console.run(
        &format!("lab-guest write /mnt/data {BYTES} 8 && sync"),
        LONG,
    )?;
    let full = disk_usage(&top)?;
    ensure!(
        full >= BYTES,
        "the overlay takes {full} bytes with {BYTES} written"
    );
    vm.run("rm /mnt/data && sync")?;
    vm.console.run("fstrim /mnt && sync", LONG)?;
    let trimmed = disk_usage(&top)?;
    ensure!(
        trimmed + 180_000_000 < full,
        "fstrim: the overlay took {full} bytes and takes {trimmed}"
    );
    vm.run("umount /mnt")?;
    vm.power_off()?;
    let state = qemu_img_check(&top)?;
    ensure!(state == ImageState::Clean, "qemu-img check finds {state:?}");
    Ok(())
}

/// Every record that the guest was told is flushed must be in the image, whole, after the kill.
fn kill_in_writes(scene: &Scene) -> Result {
    const RECORD: usize = 4096;
    let guest = SmallGuest::prepare(scene)?;
    let top = scene.folder.join("journal.qcow2");
    succeed(
        "qemu-img",
        &["create", "-q", "-f", "qcow2", &text(&top), "512M"],
    )?;
    let disk = json!({"id": "data", "path": top, "format": "qcow2"});
    let mut vm = Vm::boot(scene, &with_disk(scene, &guest, &disk))?;
    vm.console.start("lab-guest journal /dev/vda")?;
    vm.console.wait_for("FLUSHED 200 ", LONG)?;
    std::thread::sleep(Duration::from_millis(700));
    vm.kill_minus_nine()?;
    vm.console.wait_closed(Duration::from_secs(10))?;
    let mut flushed: BTreeMap<u64, u64> = BTreeMap::new();
    let told = vm.console.text();
    for line in told
        .split_inclusive('\n')
        .filter(|line| line.ends_with('\n'))
    {
        let mut words = line.split_whitespace();
        if words.next() == Some("FLUSHED") {
            let number = |word: Option<&str>| word.and_then(|word| word.parse::<u64>().ok());
            if let (Some(record), Some(slot)) = (number(words.next()), number(words.next())) {
                flushed.insert(slot, record);
            }
        }
    }
    ensure!(
        flushed.len() >= 200,
        "only {} records were told",
        flushed.len()
    );
    qemu_img_check(&top)?;
    let flat = scene.folder.join("flat.raw");
    succeed(
        "qemu-img",
        &[
            "convert",
            "-f",
            "qcow2",
            "-O",
            "raw",
            &text(&top),
            &text(&flat),
        ],
    )?;
    let mut file = File::open(&flat)?;
    for (slot, record) in flushed {
        let mut block = [0_u8; RECORD];
        file.seek(SeekFrom::Start(slot * 65536))?;
        file.read_exact(&mut block)?;
        let whole = block
            .chunks_exact(8)
            .all(|word| word == record.to_le_bytes());
        ensure!(
            whole,
            "record {record} of slot {slot} was flushed and is not in the image"
        );
    }
    Ok(())
}

fn attributes(scene: &Scene) -> Result {
    let guest = SmallGuest::prepare(scene)?;
    let raw = scene.folder.join("plain.raw");
    File::create(&raw)?.set_len(64 << 20)?;
    let locked = scene.folder.join("locked.raw");
    File::create(&locked)?.set_len(32 << 20)?;
    let mut definition = small_guest(&guest, &scene.folder);
    definition["cpus"] = json!({"count": 2});
    definition["disks"] = json!([
        {"id": "data", "path": raw, "format": "raw", "queues": 2, "serial": "story-1"},
        {"id": "locked", "path": locked, "format": "raw", "read_only": true},
    ]);
    let mut vm = Vm::boot(scene, &definition)?;
    let serial = vm.run("cat /sys/block/vda/serial")?;
    ensure!(serial == "story-1", "the serial number is {serial:?}");
    let queues = vm.run("ls /sys/block/vda/mq | wc -l")?;
    ensure!(queues == "2", "queues: {queues}");
    let sizes = vm.run("cat /sys/block/vda/size /sys/block/vdb/size")?;
    ensure!(sizes == "131072\n65536", "sizes in sectors: {sizes:?}");
    let refused = vm.console.ask(
        "dd if=/dev/zero of=/dev/vdb bs=4096 count=1 conv=fsync",
        LONG,
    )?;
    ensure!(refused.status != 0, "a read-only disk took a write");
    // Both queues carry requests, each from the CPU that is its own.
    vm.console.run(
        "for c in 1 2; do taskset $c dd if=/dev/zero of=/dev/vda bs=1M count=16 seek=$((c * 16)) oflag=direct conv=fsync || exit 1; done",
        LONG,
    )?;
    vm.power_off()?;
    let answer = ask("cmp", &["-n", "67108864", &text(&raw), "/dev/zero"])?;
    if answer.status != 0 {
        return Err(Failure::Broken(format!(
            "zeros were written, the disk holds others: {}",
            answer.stdout
        )));
    }
    Ok(())
}

fn interrupt_lines(scene: &Scene) -> Result {
    let guest = SmallGuest::prepare(scene)?;
    let raw = scene.folder.join("lines.raw");
    File::create(&raw)?.set_len(64 << 20)?;
    let mut definition = small_guest(&guest, &scene.folder);
    definition["boot"]["cmdline"] = json!(format!("{COMMAND_LINE} pci=nomsi"));
    definition["disks"] = json!([{"id": "data", "path": raw, "format": "raw"}]);
    let mut vm = Vm::boot(scene, &definition)?;
    vm.console.run(
        "dd if=/dev/vda of=/dev/null bs=1M count=32 iflag=direct",
        LONG,
    )?;
    let lines = vm.run("grep virtio /proc/interrupts")?;
    ensure!(
        !lines.is_empty() && lines.lines().all(|line| line.contains("IO-APIC")),
        "interrupts: {lines:?}"
    );
    vm.power_off()
}
