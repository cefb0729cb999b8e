//! The worker's base image: Debian 12 with systemd, cloud-init, containerd and the guest agent, cleaned so
//! that every clone becomes a machine of its own.
//!
//! ```text
//! base.qcow2, 2 GiB, GPT     1 MiB  ESP, FAT: EFI/BOOT/BOOTX64.EFI (GRUB)
//!                           65 MiB  root, ext4, label "root", to the end (the guest grows it)
//! ```
//!
//! Its kernel and initrd lie beside it for a boot without firmware. No loop device and no mount is used.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc::Receiver;

use super::bootstrap::Root;
use super::cache::{Build, Cache, remove_tree};
use super::packages::tool;
use crate::error::{Error, Result};
use crate::process::{output, run_logged};

const ROOT: Root = Root {
    suite: "bookworm",
    variant: "minbase",
    packages: &[
        "systemd",
        "systemd-sysv",
        "udev",
        "dbus",
        "cloud-init",
        "cloud-guest-utils",
        "qemu-guest-agent",
        "linux-image-cloud-amd64",
        "grub-efi-amd64-bin",
        "openssh-server",
        "iproute2",
        "iputils-ping",
        "procps",
        "netbase",
        "ifupdown",
        "isc-dhcp-client",
        "e2fsprogs",
        "dosfstools",
        "ca-certificates",
        "containerd",
        "kmod",
        "fdisk",
        "initramfs-tools",
        "zstd",
    ],
};

const FSTAB: &str = include_str!("../../../tests/lab/worker-fstab");
const GRUB: &str = include_str!("../../../tests/lab/worker-grub.cfg");
const KUBEADM: &str = include_str!("../../../tests/lab/kubeadm");
const CLOUD: &str = include_str!("../../../tests/lab/worker-cloud.cfg");

const MIB: u64 = 1 << 20;
const DISK_MIB: u64 = 2048;
const ESP_START_MIB: u64 = 1;
const ESP_MIB: u64 = 64;
const ROOT_START_MIB: u64 = ESP_START_MIB + ESP_MIB;
/// The last MiB holds the second partition table.
const ROOT_MIB: u64 = DISK_MIB - ROOT_START_MIB - 1;
const ESP_TYPE: &str = "C12A7328-F81F-11D2-BA4B-00A0C93EC93B";
const ROOT_TYPE: &str = "4F68BCE3-E8CD-4DB1-96E7-FBCAF984B709";

const GRUB_MODULES: [&str; 13] = [
    "part_gpt",
    "ext2",
    "fat",
    "search",
    "search_label",
    "normal",
    "configfile",
    "linux",
    "gzio",
    "echo",
    "serial",
    "terminal",
    "boot",
];

/// Builds the image; `tools` gives the folder of QEMU's tools once it is there.
pub(super) fn build(cache: &Cache, tools: &Receiver<PathBuf>) -> Result<PathBuf> {
    let mut key = ROOT.key("worker 1");
    for text in [FSTAB, GRUB, KUBEADM, CLOUD].iter().chain(&GRUB_MODULES) {
        key = key.with(text);
    }
    cache.artefact("worker", &key, |build| {
        let root = build.folder.join("worker");
        ROOT.make(cache, build, &root)?;
        let kernel = configure(&root)?;
        clean(&root)?;
        for (from, to) in [("vmlinuz", "vmlinuz"), ("initrd.img", "initrd")] {
            let from = root.join(format!("boot/{from}-{kernel}"));
            fs::copy(&from, build.folder.join(to)).map_err(Error::io("copy", &from))?;
        }
        let disk = build.folder.join("disk.raw");
        assemble(build, &root, &disk)?;
        remove_tree(&root)?;
        let tools = tools.recv().map_err(|_| {
            Error::Other("the image needs qemu-img of the host root, whose build failed".into())
        })?;
        let mut convert = Command::new(tools.join("qemu-img"));
        convert
            .args(["convert", "-f", "raw", "-O", "qcow2"])
            .arg(&disk)
            .arg(build.folder.join("base.qcow2"));
        run_logged(&mut convert, build.log)?;
        fs::remove_file(&disk).map_err(Error::io("remove", &disk))
    })
}

/// Writes our files into the root and returns the release of its kernel.
fn configure(root: &Path) -> Result<String> {
    let boot = root.join("boot");
    let kernel = fs::read_dir(&boot)
        .map_err(Error::io("list", &boot))?
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .find_map(|name| name.strip_prefix("vmlinuz-").map(str::to_owned))
        .ok_or_else(|| Error::Other(format!("{}: no kernel", boot.display())))?;
    let menu = format!(
        "set timeout=0\nsearch --label root --set root\nlinux /boot/vmlinuz-{kernel} root=LABEL=root ro console=ttyS0 quiet\n\
         initrd /boot/initrd.img-{kernel}\nboot\n"
    );
    for folder in [
        "boot/efi",
        "boot/grub",
        "usr/local/bin",
        "etc/cloud/cloud.cfg.d",
    ] {
        let folder = root.join(folder);
        fs::create_dir_all(&folder).map_err(Error::io("create", &folder))?;
    }
    for (name, text) in [
        ("etc/fstab", FSTAB),
        ("boot/grub/grub.cfg", &menu),
        ("tmp/grub-early.cfg", GRUB),
        ("usr/local/bin/kubeadm", KUBEADM),
        ("etc/cloud/cloud.cfg.d/90_worker.cfg", CLOUD),
        ("etc/hostname", "localhost\n"),
    ] {
        let path = root.join(name);
        fs::write(&path, text).map_err(Error::io("write", &path))?;
    }
    crate::setup::l1_root::make_executable(&root.join("usr/local/bin/kubeadm"))?;
    Ok(kernel)
}

/// Removes what makes a machine itself: its id, its keys, its first boot.
fn clean(root: &Path) -> Result<()> {
    let machine_id = root.join("etc/machine-id");
    fs::write(&machine_id, "").map_err(Error::io("empty", &machine_id))?;
    for name in [
        "var/lib/dbus/machine-id",
        "var/lib/systemd/random-seed",
        "etc/resolv.conf",
    ] {
        let path = root.join(name);
        if fs::symlink_metadata(&path).is_ok() {
            fs::remove_file(&path).map_err(Error::io("remove", &path))?;
        }
    }
    let ssh = root.join("etc/ssh");
    for entry in fs::read_dir(&ssh)
        .map_err(Error::io("list", &ssh))?
        .flatten()
    {
        if entry.file_name().to_string_lossy().starts_with("ssh_host_") {
            fs::remove_file(entry.path()).map_err(Error::io("remove", &entry.path()))?;
        }
    }
    for name in [
        "var/lib/cloud",
        "var/lib/apt/lists",
        "var/cache/apt",
        "var/log/journal",
    ] {
        remove_tree(&root.join(name))?;
    }
    let lists = root.join("var/lib/apt/lists/partial");
    fs::create_dir_all(&lists).map_err(Error::io("create", &lists))
}

/// Makes the partitioned disk in place: each file system is written at its offset.
fn assemble(build: &Build<'_>, root: &Path, disk: &Path) -> Result<()> {
    let log = build.log;
    let mut grub = tool("chroot");
    grub.arg(root)
        .args([
            "grub-mkimage",
            "-O",
            "x86_64-efi",
            "-o",
            "/tmp/BOOTX64.EFI",
            "-p",
            "/boot/grub",
        ])
        .args(["-c", "/tmp/grub-early.cfg"])
        .args(GRUB_MODULES);
    run_logged(&mut grub, log)?;
    let loader = build.folder.join("BOOTX64.EFI");
    fs::rename(root.join("tmp/BOOTX64.EFI"), &loader).map_err(Error::io("move", &loader))?;
    let early = root.join("tmp/grub-early.cfg");
    fs::remove_file(&early).map_err(Error::io("remove", &early))?;

    let file = fs::File::create(disk).map_err(Error::io("create", disk))?;
    file.set_len(DISK_MIB * MIB)
        .map_err(Error::io("size", disk))?;
    drop(file);
    let sectors = |mib: u64| mib * MIB / 512;
    let table = build.folder.join("partitions");
    let text = format!(
        "label: gpt\nstart={}, size={}, type={ESP_TYPE}, name=ESP\nstart={}, size={}, type={ROOT_TYPE}, name=root\n",
        sectors(ESP_START_MIB),
        sectors(ESP_MIB),
        sectors(ROOT_START_MIB),
        sectors(ROOT_MIB)
    );
    fs::write(&table, text).map_err(Error::io("write", &table))?;
    let mut partition = Command::new("sh");
    partition
        .args([
            "-c",
            "PATH=$PATH:/usr/sbin sfdisk -q \"$1\" < \"$2\"",
            "sfdisk",
        ])
        .arg(disk)
        .arg(&table);
    run_logged(&mut partition, log)?;
    fs::remove_file(&table).map_err(Error::io("remove", &table))?;

    let mut vfat = tool("mkfs.vfat");
    vfat.args([
        "-F",
        "16",
        "-n",
        "ESP",
        "--offset",
        &sectors(ESP_START_MIB).to_string(),
    ])
    .arg(disk)
    .arg((ESP_MIB * 1024).to_string());
    run_logged(&mut vfat, log)?;
    let esp = format!("{}@@{}M", disk.display(), ESP_START_MIB);
    run_logged(
        Command::new("mmd").args(["-i", &esp, "::/EFI", "::/EFI/BOOT"]),
        log,
    )?;
    run_logged(
        Command::new("mcopy")
            .args(["-i", &esp])
            .arg(&loader)
            .arg("::/EFI/BOOT/BOOTX64.EFI"),
        log,
    )?;
    fs::remove_file(&loader).map_err(Error::io("remove", &loader))?;

    let mut ext4 = tool("mkfs.ext4");
    // GRUB and e2fsck of Debian 12 know neither feature.
    ext4.args([
        "-q",
        "-F",
        "-L",
        "root",
        "-O",
        "^metadata_csum_seed,^orphan_file",
    ])
    .args(["-E", &format!("offset={}", ROOT_START_MIB * MIB), "-d"])
    .arg(root)
    .arg(disk)
    .arg(format!("{ROOT_MIB}M"));
    run_logged(&mut ext4, log)?;
    // The table says what is where; a slip of the numbers above would show here, not in a guest.
    let listing = output(tool("sfdisk").args(["--dump"]).arg(disk))?;
    if listing.matches("start=").count() == 2 {
        Ok(())
    } else {
        Err(Error::Other(format!(
            "{}: not two partitions:\n{listing}",
            disk.display()
        )))
    }
}
