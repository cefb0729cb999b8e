//! Booting, the size of the machine, and starting over.

use std::time::Duration;

use serde_json::json;

use crate::bench::boot as bench;
use crate::ensure;
use crate::failure::{Context as _, Result};
use crate::fixtures::guest::{COMMAND_LINE, SmallGuest};
use crate::fixtures::vm::{Vm, small_guest};
use crate::pattern;
use crate::stories::{Scene, Story};

pub(super) static STORIES: &[Story] = &[
    Story::small(
        "boot",
        "an_elf_kernel_boots_and_powers_off_with_status_0",
        elf,
    ),
    Story::small(
        "boot",
        "a_bzimage_boots_and_sees_what_the_definition_says",
        bzimage,
    ),
    Story::small(
        "boot",
        "four_cpus_come_up_in_the_topology_of_the_definition",
        four_cpus,
    )
    .seconds(35, 240),
    Story::small("boot", "three_gib_of_ram_reach_across_the_hole", three_gib)
        .seconds(60, 400)
        .memory(3200),
    Story::small(
        "boot",
        "the_guest_reboots_five_times_in_one_process",
        five_reboots,
    )
    .seconds(60, 400),
    Story::small("boot", "every_way_to_reset_reboots_the_guest", every_reset).seconds(70, 500),
    Story::small("boot", "a_boot_costs_few_exits_and_little_memory", costs).seconds(25, 200),
];

fn costs(scene: &Scene) -> Result {
    let (exits, memory_mib) = bench::costs(&scene.site, &scene.folder)?;
    println!("{exits} exits to user space, {memory_mib:.2} MiB of its own");
    ensure!(
        exits <= u64::from(bench::EXITS),
        "a boot took {exits} exits to user space, more than {}",
        bench::EXITS
    );
    ensure!(
        memory_mib <= bench::OWN_MEMORY_MIB,
        "the VMM takes {memory_mib:.2} MiB beside its guest, more than {}",
        bench::OWN_MEMORY_MIB
    );
    Ok(())
}

fn elf(scene: &Scene) -> Result {
    let guest = SmallGuest::prepare(scene)?;
    Vm::boot(scene, &small_guest(&guest, &scene.folder))?.power_off()
}

fn bzimage(scene: &Scene) -> Result {
    let guest = SmallGuest::prepare(scene)?;
    let mut definition = small_guest(&guest, &scene.folder);
    definition["boot"]["kernel"] = json!(scene.site.image("guest-vmlinuz"));
    definition["boot"]["cmdline"] = json!(format!("{COMMAND_LINE} story=told"));
    let mut vm = Vm::boot(scene, &definition)?;
    let cmdline = vm.run("cat /proc/cmdline")?;
    ensure!(
        cmdline.contains("story=told"),
        "the kernel's command line is {cmdline:?}"
    );
    let memory = memory_kib(&mut vm)?;
    ensure!(
        (200 << 10..=256 << 10).contains(&memory),
        "256 MiB were defined, the guest has {memory} KiB"
    );
    let vendor = vm.run("cat /sys/class/dmi/id/product_name /sys/class/dmi/id/product_uuid")?;
    ensure!(vendor.lines().count() == 2, "SMBIOS says {vendor:?}");
    let clock = vm.run("cat /sys/devices/system/clocksource/clocksource0/current_clocksource")?;
    ensure!(
        clock == "kvm-clock" || clock == "tsc",
        "the guest's clock is {clock}"
    );
    let devices = vm.run(
        "cat /sys/bus/pci/devices/0000:00:00.0/device /sys/bus/pci/devices/0000:00:1f.0/device",
    )?;
    ensure!(
        devices == "0x29c0\n0x2918",
        "host bridge and LPC are {devices:?}"
    );
    let random =
        vm.run("cat /sys/class/misc/hw_random/rng_current; head -c 64 /dev/hwrng | wc -c")?;
    ensure!(
        random.contains("virtio_rng") && random.ends_with("64"),
        "the entropy device gives {random:?}"
    );
    vm.power_off()
}

fn memory_kib(vm: &mut Vm) -> Result<u64> {
    vm.run("awk '/MemTotal/{print $2}' /proc/meminfo")?
        .parse()
        .context("MemTotal")
}

fn four_cpus(scene: &Scene) -> Result {
    let guest = SmallGuest::prepare(scene)?;
    let mut definition = small_guest(&guest, &scene.folder);
    definition["cpus"] =
        json!({"count": 4, "topology": {"sockets": 2, "dies": 1, "cores": 2, "threads": 1}});
    let mut vm = Vm::boot(scene, &definition)?;
    let online = vm.run("cat /sys/devices/system/cpu/online")?;
    ensure!(online == "0-3", "CPUs online: {online}");
    let packages = vm.run("cat /sys/devices/system/cpu/cpu*/topology/physical_package_id | sort | uniq -c | awk '{print $1}'")?;
    ensure!(packages == "2\n2", "CPUs a socket: {packages:?}");
    // Each CPU does work of its own, and interrupts reach all of them.
    let work = "for c in 0 1 2 3; do taskset $((1 << c)) sh -c 'i=0; while [ $i -lt 2000 ]; do i=$((i+1)); done' & done; wait; \
                awk '/LOC:/{for(i=2;i<=5;i++) if ($i == 0) exit 1}' /proc/interrupts";
    vm.console.run(work, Duration::from_secs(60))?;
    vm.power_off()
}

fn three_gib(scene: &Scene) -> Result {
    const BYTES: u64 = 2_400_000_000;
    let guest = SmallGuest::prepare(scene)?;
    let mut definition = small_guest(&guest, &scene.folder);
    definition["memory"] = json!({"size": "3GiB"});
    let mut vm = Vm::boot(scene, &definition)?;
    let memory = memory_kib(&mut vm)?;
    ensure!(
        memory > 2900 << 10,
        "3 GiB were defined, the guest has {memory} KiB"
    );
    let ranges = vm.run("grep 'System RAM' /proc/iomem")?;
    ensure!(
        ranges
            .lines()
            .any(|line| line.trim_start().starts_with("100000000-")),
        "no RAM at 4 GiB: {ranges}"
    );
    // More than lies below the hole, so both parts hold some of it.
    vm.run("mount -t tmpfs -o size=95% big /mnt")?;
    let written = vm.console.run(
        &format!("lab-guest write /mnt/x {BYTES} 3"),
        Duration::from_secs(120),
    )?;
    let read = vm.console.run(
        &format!("lab-guest sum /mnt/x {BYTES}"),
        Duration::from_secs(120),
    )?;
    ensure!(written == pattern::expected(3, BYTES), "written: {written}");
    ensure!(read == written, "written {written}, read {read}");
    vm.power_off()
}

fn five_reboots(scene: &Scene) -> Result {
    let guest = SmallGuest::prepare(scene)?;
    let mut vm = Vm::boot(scene, &small_guest(&guest, &scene.folder))?;
    let process = vm.id();
    for round in 1..=5 {
        vm.console.start("reboot -f")?;
        vm.wait_for_shell().context(&format!("reboot {round}"))?;
    }
    let uptime: f64 = vm
        .run("cut -d' ' -f1 /proc/uptime")?
        .parse()
        .context("uptime")?;
    ensure!(
        uptime < 60.0,
        "after its last reboot the guest is up for {uptime} s"
    );
    let info = vm.api("GET", "/v1/info", None)?.json()?;
    ensure!(info["pid"] == process, "the process changed: {info}");
    vm.power_off()
}

fn every_reset(scene: &Scene) -> Result {
    let guest = SmallGuest::prepare(scene)?;
    // Linux's names: the keyboard controller, port 0xcf9, a triple fault, the FADT's reset register.
    for way in ["kbd", "pci", "triple", "acpi"] {
        let mut definition = small_guest(&guest, &scene.folder);
        definition["boot"]["cmdline"] = json!(format!("{COMMAND_LINE} reboot={way}"));
        let mut vm = Vm::boot(scene, &definition)?;
        vm.console.start("reboot -f")?;
        vm.wait_for_shell().context(&format!("reboot={way}"))?;
        vm.power_off().context(&format!("reboot={way}"))?;
    }
    Ok(())
}
