//! The lab itself: if QEMU's guests do not come up in it, no verdict about Drover is worth anything.

use std::time::Duration;

use crate::ensure;
use crate::failure::Result;
use crate::fixtures::guest::{COMMAND_LINE, SHELL_MARKER, SmallGuest};
use crate::fixtures::peer::{MachineType, PeerConfig};
use crate::stories::{Scene, Story};

pub(super) static STORIES: &[Story] = &[
    Story::small("lab", "the_small_guest_runs_a_command_under_qemu_q35", q35),
    Story::small(
        "lab",
        "the_small_guest_runs_a_command_under_qemu_microvm",
        microvm,
    ),
];

fn q35(scene: &Scene) -> Result {
    small_guest(scene, MachineType::Q35)
}

fn microvm(scene: &Scene) -> Result {
    small_guest(scene, MachineType::Microvm)
}

fn small_guest(scene: &Scene, machine: MachineType) -> Result {
    let guest = SmallGuest::prepare(scene)?;
    // microvm has no keyboard controller to reset by; both leave on a triple fault.
    let cmdline = format!("{COMMAND_LINE} reboot=triple");
    let config = PeerConfig {
        machine,
        kernel: &guest.kernel,
        initrd: &guest.initrd,
        cmdline: &cmdline,
        cpus: 1,
        memory_mib: 256,
        disk: None,
        tap: None,
    };
    let mut peer = config.start(&scene.folder)?;
    peer.console
        .wait_for(SHELL_MARKER, Duration::from_secs(90))?;
    peer.console.wait_for("\n", Duration::from_secs(5))?;
    let sum = peer
        .console
        .run("lab-guest write /tmp/x 1000000 5", Duration::from_secs(20))?;
    ensure!(
        sum == crate::pattern::expected(5, 1_000_000),
        "the helper's checksum is {sum}"
    );
    let failed = peer
        .console
        .ask("cat /no/such/file", Duration::from_secs(10))?;
    ensure!(
        failed.status == 1,
        "a failing command ended with {}",
        failed.status
    );
    peer.console.start("reboot -f")?;
    peer.wait(Duration::from_secs(30))
}
