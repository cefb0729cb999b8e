//! Disks that another process serves: our own export, also when it is restarted and killed under a running guest, and QEMU's daemon.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::ensure;
use crate::failure::{Context as _, Failure, Result};
use crate::fixtures::command::{ImageState, qemu_img_check, succeed};
use crate::fixtures::guest::SmallGuest;
use crate::fixtures::vm::{Vm, small_guest, wait_child};
use crate::stories::{Scene, Story};

pub(super) static STORIES: &[Story] = &[
    Story::small(
        "vhost_user",
        "a_disk_served_by_drover_image_export_survives_its_restart_and_its_kill",
        export_restarts,
    )
    .seconds(60, 400),
    Story::small(
        "vhost_user",
        "a_disk_served_by_qemu_storage_daemon_keeps_what_is_written",
        storage_daemon,
    )
    .seconds(35, 300),
];

const BYTES: u64 = 48_000_000;
const LONG: Duration = Duration::from_secs(120);

/// A process that serves a disk; killed when dropped.
struct BackEnd {
    child: Child,
    log: PathBuf,
}

impl BackEnd {
    fn start(command: &mut Command, socket: &Path, log: &Path) -> Result<Self> {
        let errors = File::options().create(true).append(true).open(log)?;
        let child = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(errors)
            .spawn()
            .context("start the back end")?;
        let mut back_end = Self {
            child,
            log: log.into(),
        };
        let deadline = Instant::now() + Duration::from_secs(20);
        while !socket.exists() {
            if let Some(status) = back_end.child.try_wait()? {
                return Err(Failure::Broken(format!(
                    "the back end ended ({status}): {}",
                    back_end.said()
                )));
            }
            ensure!(Instant::now() < deadline, "no socket: {}", back_end.said());
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(back_end)
    }

    fn said(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Ends it by SIGTERM, which must succeed.
    fn stop(&mut self) -> Result {
        succeed("kill", &["-TERM", &self.child.id().to_string()])?;
        let ended = wait_child(&mut self.child, Duration::from_secs(20))?;
        ensure!(
            ended == Some(0),
            "the back end ended with {ended:?}: {}",
            self.said()
        );
        Ok(())
    }

    fn kill(&mut self) -> Result {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }
}

impl Drop for BackEnd {
    fn drop(&mut self) {
        // Ended already is as good.
        let _ = self.kill();
    }
}

fn definition(scene: &Scene, guest: &SmallGuest, socket: &Path) -> Value {
    let mut definition = small_guest(guest, &scene.folder);
    definition["cpus"] = json!({"count": 2});
    definition["memory"] = json!({"size": "256MiB", "shared": true});
    definition["vhost_user_disks"] = json!([{"id": "data", "socket": socket, "queues": 2}]);
    definition
}

fn write_and_sum(vm: &mut Vm, seed: u64) -> Result {
    let wrote = vm
        .console
        .run(&format!("lab-guest write /dev/vda {BYTES} {seed}"), LONG)?;
    vm.run("sync; echo 3 > /proc/sys/vm/drop_caches")?;
    let read = vm
        .console
        .run(&format!("lab-guest sum /dev/vda {BYTES}"), LONG)?;
    ensure!(read == wrote, "the guest wrote {wrote} and reads {read}");
    Ok(())
}

fn export_restarts(scene: &Scene) -> Result {
    let guest = SmallGuest::prepare(scene)?;
    let image = scene.folder.join("disk.qcow2");
    succeed(
        "qemu-img",
        &[
            "create",
            "-q",
            "-f",
            "qcow2",
            &image.to_string_lossy(),
            "256M",
        ],
    )?;
    let socket = scene.folder.join("disk.sock");
    let log = scene.folder.join("export.log");
    let program = scene.site.program("drover");
    let export = || {
        let mut command = Command::new(&program);
        command
            .args(["image", "export", "--format", "qcow2", "--crash-safe"])
            .args(["--queues", "2", "--serial", "served"])
            .arg("--vhost-user-blk")
            .arg(&socket)
            .arg(&image);
        BackEnd::start(&mut command, &socket, &log)
    };
    let mut back_end = export()?;
    let mut vm = Vm::boot(scene, &definition(scene, &guest, &socket))?;
    let serial = vm.run("cat /sys/block/vda/serial")?;
    ensure!(serial == "served", "the serial number is {serial:?}");
    write_and_sum(&mut vm, 1)?;

    // In an orderly way, and by a kill, both in the middle of writing.
    for (seed, kill) in [(2, false), (3, true)] {
        let write =
            format!("lab-guest write /dev/vda {BYTES} {seed} > /sum.new && mv /sum.new /sum");
        vm.run(&format!("rm -f /sum; ({write}) &"))?;
        std::thread::sleep(Duration::from_millis(700));
        if kill {
            back_end.kill()?;
            std::fs::remove_file(&socket)?;
        } else {
            back_end.stop()?;
        }
        std::thread::sleep(Duration::from_millis(500));
        back_end = export()?;
        let wrote = vm
            .console
            .run("until [ -s /sum ]; do sleep 0.2; done; cat /sum", LONG)?;
        vm.run("sync; echo 3 > /proc/sys/vm/drop_caches")?;
        let read = vm
            .console
            .run(&format!("lab-guest sum /dev/vda {BYTES}"), LONG)?;
        ensure!(
            read == wrote,
            "the guest wrote {wrote} and reads {read} (killed: {kill}): {}",
            back_end.said()
        );
    }
    let metrics = vm.api("GET", "/v1/metrics", None)?;
    let losses = "drover_vhost_user_losses_total{device=\"data\"} 2";
    ensure!(
        metrics.body.contains(losses),
        "metrics lack {losses}: {}",
        metrics.body
    );
    vm.power_off()?;
    back_end.stop()?;
    let state = qemu_img_check(&image)?;
    ensure!(
        matches!(state, ImageState::Clean | ImageState::Leaks),
        "qemu-img check finds {state:?}"
    );
    Ok(())
}

fn storage_daemon(scene: &Scene) -> Result {
    let guest = SmallGuest::prepare(scene)?;
    let image = scene.folder.join("disk.raw");
    File::create(&image)?.set_len(128 << 20)?;
    let socket = scene.folder.join("disk.sock");
    let mut command = Command::new("qemu-storage-daemon");
    command
        .arg("--blockdev")
        .arg(format!(
            "driver=file,node-name=disk,filename={}",
            image.display()
        ))
        .arg("--export")
        .arg(format!(
            "type=vhost-user-blk,id=e,node-name=disk,writable=on,num-queues=2,addr.type=unix,addr.path={}",
            socket.display()
        ));
    let mut back_end = BackEnd::start(&mut command, &socket, &scene.folder.join("daemon.log"))?;
    let mut vm = Vm::boot(scene, &definition(scene, &guest, &socket))?;
    write_and_sum(&mut vm, 4)?;
    vm.power_off()?;
    back_end.stop()
}
