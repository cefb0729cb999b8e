//! The two initial file systems: the emulated host's and the small guest's. Both hold busybox, a few modules
//! and the script that is their first program; they are not compressed, since unpacking costs an emulated
//! processor more than copying.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::cache::{Cache, Key};
use super::cpio::Archive;
use super::kernels::Kernels;
use crate::error::{Error, Result};

const L1_MODULES: [&str; 13] = [
    "virtio_blk",
    "ext4",
    "crc32c_generic",
    "9pnet_virtio",
    "9p",
    "virtio_net",
    "virtio-rng",
    "kvm-amd",
    "tun",
    "vhost_net",
    "bridge",
    "veth",
    "loop",
];
const GUEST_MODULES: [&str; 7] = [
    "virtio_blk",
    "virtio_net",
    "virtio-rng",
    "virtio_mmio",
    "isofs",
    "button",
    "evdev",
];

const L1_INITRAMFS_INIT: &str = include_str!("../../../tests/lab/l1-initramfs-init.sh");
const L1_INIT: &str = include_str!("../../../tests/lab/l1-init.sh");
const GUEST_INIT: &str = include_str!("../../../tests/lab/guest-init.sh");

/// The programs of busybox that the emulated host's script uses before its root is there.
const L1_APPLETS: [&str; 8] = [
    "sh",
    "mount",
    "insmod",
    "switch_root",
    "cat",
    "echo",
    "cp",
    "mkdir",
];

/// The built archives.
pub(super) struct Initramfs(PathBuf);

impl Initramfs {
    /// The emulated host's.
    pub(super) fn l1(&self) -> PathBuf {
        self.0.join("l1.cpio")
    }

    /// The small guest's.
    pub(super) fn guest(&self) -> PathBuf {
        self.0.join("guest.cpio")
    }
}

/// Builds both archives.
pub(super) fn build(cache: &Cache, kernels: &Kernels) -> Result<Initramfs> {
    let mut key = Key::new("initramfs 1").with(&kernels.folder().to_string_lossy());
    let texts = [L1_INITRAMFS_INIT, L1_INIT, GUEST_INIT];
    for input in texts
        .iter()
        .chain(&L1_MODULES)
        .chain(&GUEST_MODULES)
        .chain(&L1_APPLETS)
    {
        key = key.with(input);
    }
    let path = cache.artefact("initramfs", &key, |build| {
        let busybox = kernels.busybox();
        let busybox = fs::read(&busybox).map_err(Error::io("read", &busybox))?;
        let start = |init: &str| {
            let mut archive = Archive::default();
            for folder in ["bin", "dev", "proc", "sys", "tmp", "root", "mnt", "modules"] {
                archive.folder(folder);
            }
            archive.device("dev/console", 5, 1);
            archive.program("bin/busybox", &busybox);
            archive.program("init", init.as_bytes());
            archive
        };
        let mut l1 = start(L1_INITRAMFS_INIT);
        for applet in L1_APPLETS {
            l1.link(&format!("bin/{applet}"), "busybox");
        }
        l1.program("lab-init", L1_INIT.as_bytes());
        add_modules(&mut l1, &kernels.folder().join("l1/modules"), &L1_MODULES)?;
        let mut guest = start(GUEST_INIT);
        add_modules(
            &mut guest,
            &kernels.folder().join("guest/modules"),
            &GUEST_MODULES,
        )?;
        for (name, archive) in [("l1.cpio", l1), ("guest.cpio", guest)] {
            let file = build.folder.join(name);
            fs::write(&file, archive.finish()).map_err(Error::io("write", &file))?;
        }
        Ok(())
    })?;
    Ok(Initramfs(path))
}

/// Adds modules with all they depend on, uncompressed, and the order in which to load them.
fn add_modules(archive: &mut Archive, folder: &Path, wanted: &[&str]) -> Result<()> {
    let index = folder.join("modules.dep");
    let text = fs::read_to_string(&index).map_err(Error::io("read", &index))?;
    let order = load_order(&text, wanted)
        .map_err(|name| Error::Other(format!("{}: no module {name}", index.display())))?;
    let mut list = String::new();
    for path in order {
        let file = folder.join(path);
        let name = module_name(path);
        let content = if path.ends_with(".xz") {
            let output = Command::new("xz").arg("-dc").arg(&file).output();
            let output = output.map_err(Error::io("decompress", &file))?;
            if !output.status.success() {
                return Err(Error::Other(format!("xz cannot read {}", file.display())));
            }
            output.stdout
        } else {
            fs::read(&file).map_err(Error::io("read", &file))?
        };
        archive.file(&format!("modules/{name}.ko"), &content);
        list.push_str(name);
        list.push_str(".ko\n");
    }
    archive.file("modules/order", list.as_bytes());
    Ok(())
}

/// The files to load for the modules wanted, dependencies first (modules.dep lists them last-needed first).
/// A module that is no file may be built into the kernel; one that nobody knows is an error with its name.
fn load_order<'a>(index: &'a str, wanted: &[&str]) -> std::result::Result<Vec<&'a str>, String> {
    let by_name: BTreeMap<&str, (&str, &str)> = index
        .lines()
        .filter_map(|line| line.split_once(':'))
        .map(|(file, needs)| (module_name(file), (file, needs)))
        .collect();
    let mut order: Vec<&str> = Vec::new();
    for name in wanted {
        let (file, needs) = by_name.get(name).ok_or_else(|| (*name).to_owned())?;
        let needs: Vec<&str> = needs.split_whitespace().collect();
        for path in needs.into_iter().rev().chain([*file]) {
            if !order.contains(&path) {
                order.push(path);
            }
        }
    }
    Ok(order)
}

fn module_name(path: &str) -> &str {
    let name = path.rsplit('/').next().unwrap_or(path);
    name.split(".ko").next().unwrap_or(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_are_loaded_after_what_they_need_and_once() {
        let index = "a/x.ko.xz: a/y.ko.xz a/z.ko.xz\na/y.ko.xz: a/z.ko.xz\na/z.ko.xz:\n";
        let order = load_order(index, &["y", "x"]);
        assert_eq!(order, Ok(vec!["a/z.ko.xz", "a/y.ko.xz", "a/x.ko.xz"]));
        assert_eq!(load_order(index, &["w"]), Err("w".to_owned()));
    }
}
