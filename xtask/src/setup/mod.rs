//! `cargo xtask setup`: what the lab needs, from the distribution's packages to bootable images.
//!
//! ```text
//! packages -> l1-root ------> l1.img, bin/qemu-* (used here too, through the root's own loader)
//!          -> kernels ------> vmlinux of the emulated host and of guests, their modules
//!               '-> initramfs  one for each
//!          -> worker -------> base.qcow2 (Debian 12), its kernel and initrd
//!          -> guest-tools --> a disk with fio and e2fsprogs for the small guest
//!               '-> images.img  what the emulated host mounts read-only
//! ```
//!
//! Everything is cached under the hash of its recipe ([`cache`]); a second run finds it all and says so.

mod bootstrap;
mod cache;
mod cpio;
mod guest_tools;
mod initramfs;
mod kernels;
mod l1_root;
mod packages;
mod worker_image;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::thread;

use serde::Serialize;

use crate::error::{Error, Result};
use cache::Build;
pub(crate) use cache::{Cache, Key, remove_tree};
pub(crate) use packages::install_python;

/// Where each thing of the lab is; written as JSON for the programs of `tests/`.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Lab {
    /// Wrappers of QEMU 10 and its tools that run on this machine.
    pub(crate) tools: PathBuf,
    /// The emulated host's kernel (ELF).
    pub(crate) l1_kernel: PathBuf,
    /// The emulated host's initramfs.
    pub(crate) l1_initrd: PathBuf,
    /// The emulated host's root disk (raw).
    pub(crate) l1_root: PathBuf,
    /// The disk with the guests' files that the emulated host mounts at `/images`.
    pub(crate) images_disk: PathBuf,
    /// The same files as a folder on this machine.
    pub(crate) images: PathBuf,
    /// This description as a file.
    #[serde(skip)]
    pub(crate) manifest: PathBuf,
}

/// Installs the programs that building and testing need.
pub(crate) fn packages() -> Result<()> {
    packages::install_missing(&Cache::open()?)
}

/// Makes the lab ready; everything that is there already is left as it is.
pub(crate) fn run() -> Result<Lab> {
    let cache = &Cache::open()?;
    packages::install_missing(cache)?;
    let (send_root, receive_root) = mpsc::channel();
    let (host, worker) = thread::scope(|scope| {
        let host = scope.spawn(move || -> Result<_> {
            let root = l1_root::build(cache)?;
            // The other thread may have failed and gone; its own error is reported.
            let _ = send_root.send(root.tools());
            let kernels = kernels::build(cache)?;
            let initramfs = initramfs::build(cache, &kernels)?;
            Ok((root, kernels, initramfs, guest_tools::build(cache)?))
        });
        let worker = scope.spawn(move || worker_image::build(cache, &receive_root));
        (join(host), join(worker))
    });
    let ((root, kernels, initramfs, tools), worker) = (host?, worker?);
    let images = images(cache, &kernels, &initramfs, &tools, &worker)?;
    let mut lab = Lab {
        tools: root.tools(),
        l1_kernel: kernels.l1_vmlinux(),
        l1_initrd: initramfs.l1(),
        l1_root: root.disk(),
        images_disk: images.join("images.img"),
        images: images.join("files"),
        manifest: PathBuf::new(),
    };
    lab.manifest = images.join("lab.json");
    let text = serde_json::to_vec_pretty(&lab)
        .map_err(|error| Error::Other(format!("describe the lab: {error}")))?;
    if fs::read(&lab.manifest).ok().as_deref() != Some(&text[..]) {
        let partial = images.join("lab.json.partial");
        fs::write(&partial, &text).map_err(Error::io("write", &partial))?;
        fs::rename(&partial, &lab.manifest).map_err(Error::io("publish", &lab.manifest))?;
    }
    Ok(lab)
}

/// The module that firmware boots in the emulated host need (`tests/lab/cr8.c`), built when first asked for.
pub(crate) fn cr8_module() -> Result<PathBuf> {
    let cache = Cache::open()?;
    packages::install_missing(&cache)?;
    let kernels = kernels::build(&cache)?;
    kernels::build_cr8(&cache, &kernels)
}

/// Gathers what guests boot from into one folder and one read-only disk.
fn images(
    cache: &Cache,
    kernels: &kernels::Kernels,
    initramfs: &initramfs::Initramfs,
    tools: &Path,
    worker: &Path,
) -> Result<PathBuf> {
    let parts = [
        (kernels.guest_vmlinux(), "guest-vmlinux"),
        (kernels.guest_vmlinuz(), "guest-vmlinuz"),
        (initramfs.guest(), "guest-initrd"),
        (tools.to_owned(), "guest-tools.img"),
        (worker.join("base.qcow2"), "base.qcow2"),
        (worker.join("vmlinuz"), "worker-vmlinuz"),
        (worker.join("initrd"), "worker-initrd"),
    ];
    let mut key = Key::new("images 1");
    for (path, name) in &parts {
        key = key.with(&path.to_string_lossy()).with(name);
    }
    cache.artefact("images", &key, |build| {
        let files = build.folder.join("files");
        fs::create_dir(&files).map_err(Error::io("create", &files))?;
        for (path, name) in &parts {
            link_or_copy(path, &files.join(name))?;
        }
        ext4_from_folder(build, &files, "images.img", "1536M")
    })
}

/// A raw ext4 disk with the content of a folder: no loop device, no mount.
fn ext4_from_folder(build: &Build<'_>, source: &Path, name: &str, size: &str) -> Result<()> {
    let mut command = packages::tool("mkfs.ext4");
    command
        .args(["-q", "-F", "-O", "^has_journal", "-d"])
        .arg(source)
        .arg(build.folder.join(name))
        .arg(size);
    crate::process::run_logged(&mut command, build.log)
}

fn link_or_copy(from: &Path, to: &Path) -> Result<()> {
    if fs::hard_link(from, to).is_ok() {
        return Ok(());
    }
    fs::copy(from, to)
        .map(|_| ())
        .map_err(Error::io("copy", from))
}

fn join<T>(handle: thread::ScopedJoinHandle<'_, Result<T>>) -> Result<T> {
    handle
        .join()
        .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}
