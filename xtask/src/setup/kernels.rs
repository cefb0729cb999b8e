//! Debian 13's kernels: the generic one for the emulated host, the cloud one for guests.
//!
//! A bzImage's payload is a compressed ELF `vmlinux` (Linux: Documentation/arch/x86/boot.rst, `payload_offset`);
//! booted as ELF it needs no decompressor, and the guest's carries the PVH note.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::bootstrap::Root;
use super::cache::{Build, Cache, Key};
use super::packages::tool;
use crate::error::{Error, Result};
use crate::process;

const ROOT: Root = Root {
    suite: "trixie",
    variant: "extract",
    packages: &[
        "linux-image-amd64",
        "linux-image-cloud-amd64",
        "busybox-static",
    ],
};

/// Offsets in the boot sector of a bzImage.
const SETUP_SECTS: usize = 0x1f1;
const PAYLOAD_OFFSET: usize = 0x248;
const PAYLOAD_LENGTH: usize = 0x24c;

/// Built kernels with their modules.
pub(super) struct Kernels(PathBuf);

impl Kernels {
    /// Where the artefact is.
    pub(super) fn folder(&self) -> &Path {
        &self.0
    }

    /// The emulated host's kernel as ELF.
    pub(super) fn l1_vmlinux(&self) -> PathBuf {
        self.0.join("l1/vmlinux")
    }

    /// The guests' kernel as ELF with a PVH note.
    pub(super) fn guest_vmlinux(&self) -> PathBuf {
        self.0.join("guest/vmlinux")
    }

    /// The guests' kernel as Debian ships it.
    pub(super) fn guest_vmlinuz(&self) -> PathBuf {
        self.0.join("guest/vmlinuz")
    }

    /// A static busybox of the same release.
    pub(super) fn busybox(&self) -> PathBuf {
        self.0.join("busybox")
    }
}

/// Unpacks the kernels and their modules.
pub(super) fn build(cache: &Cache) -> Result<Kernels> {
    let path = cache.artefact("kernels", &ROOT.key("kernels 1"), |build| {
        let root = build.folder.join("kernels");
        ROOT.make(cache, build, &root)?;
        let busybox = build.folder.join("busybox");
        fs::rename(root.join("usr/bin/busybox"), &busybox).map_err(Error::io("move", &busybox))?;
        for release in releases(&root.join("usr/lib/modules"))? {
            let role = if release.contains("cloud") {
                "guest"
            } else {
                "l1"
            };
            let folder = build.folder.join(role);
            fs::create_dir(&folder).map_err(Error::io("create", &folder))?;
            process::run_logged(
                tool("depmod").arg("-b").arg(root.join("usr")).arg(&release),
                build.log,
            )?;
            let vmlinuz = folder.join("vmlinuz");
            fs::rename(root.join(format!("boot/vmlinuz-{release}")), &vmlinuz)
                .map_err(Error::io("move", &vmlinuz))?;
            extract_vmlinux(build, &vmlinuz, &folder.join("vmlinux"))?;
            let modules = folder.join("modules");
            fs::rename(root.join("usr/lib/modules").join(&release), &modules)
                .map_err(Error::io("move", &modules))?;
            let name = folder.join("release");
            fs::write(&name, &release).map_err(Error::io("write", &name))?;
        }
        super::cache::remove_tree(&root)
    })?;
    Ok(Kernels(path))
}

/// The kernel releases that have modules in a folder.
fn releases(modules: &Path) -> Result<Vec<String>> {
    let entries = fs::read_dir(modules).map_err(Error::io("list", modules))?;
    entries
        .map(|entry| {
            let entry = entry.map_err(Error::io("list", modules))?;
            Ok(entry.file_name().to_string_lossy().into_owned())
        })
        .collect()
}

fn extract_vmlinux(build: &Build<'_>, vmlinuz: &Path, vmlinux: &Path) -> Result<()> {
    let image = fs::read(vmlinuz).map_err(Error::io("read", vmlinuz))?;
    let payload = zstd_payload(&image)
        .ok_or_else(|| Error::Other(format!("{}: no zstd payload", vmlinuz.display())))?;
    let compressed = vmlinux.with_extension("zst");
    fs::write(&compressed, payload).map_err(Error::io("write", &compressed))?;
    let mut zstd = Command::new("zstd");
    zstd.args(["-q", "-d", "--rm"])
        .arg(&compressed)
        .arg("-o")
        .arg(vmlinux);
    process::run_logged(&mut zstd, build.log)
}

/// The compressed kernel in a bzImage, without the four bytes of its size that follow it.
fn zstd_payload(image: &[u8]) -> Option<&[u8]> {
    let word = |at: usize| -> Option<usize> {
        let bytes = image.get(at..at + 4)?;
        usize::try_from(u32::from_le_bytes(bytes.try_into().ok()?)).ok()
    };
    let sectors = match *image.get(SETUP_SECTS)? {
        0 => 4,
        sectors => usize::from(sectors),
    };
    let start = (sectors + 1)
        .checked_mul(512)?
        .checked_add(word(PAYLOAD_OFFSET)?)?;
    let length = word(PAYLOAD_LENGTH)?.checked_sub(4)?;
    let payload = image.get(start..start.checked_add(length)?)?;
    payload
        .starts_with(&[0x28, 0xb5, 0x2f, 0xfd])
        .then_some(payload)
}

const CR8_SOURCE: &str = include_str!("../../../tests/lab/cr8.c");
const CR8_MAKEFILE: &str = "obj-m := cr8.o\n";
const CR8_ROOT: Root = Root {
    suite: "trixie",
    variant: "apt",
    packages: &["gcc", "make", "libc6-dev", "kmod", "linux-headers-amd64"],
};

/// Builds the lab's kernel module in a root of its own.
pub(super) fn build_cr8(cache: &Cache, kernels: &Kernels) -> Result<PathBuf> {
    let release_path = kernels.folder().join("l1/release");
    let release = fs::read_to_string(&release_path).map_err(Error::io("read", &release_path))?;
    let key: Key = CR8_ROOT.key("cr8 1").with(CR8_SOURCE).with(&release);
    let path = cache.artefact("cr8", &key, |build| {
        let root = build.folder.join("cr8-root");
        CR8_ROOT.make(cache, build, &root)?;
        let headers = root.join("usr/lib/modules").join(&release).join("build");
        if fs::symlink_metadata(&headers).is_err() {
            return Err(Error::Other(format!(
                "Debian no longer has the headers of the cached kernel {release}: remove {} and run setup again",
                kernels.folder().display()
            )));
        }
        let source = root.join("cr8");
        fs::create_dir(&source).map_err(Error::io("create", &source))?;
        for (name, text) in [("cr8.c", CR8_SOURCE), ("Makefile", CR8_MAKEFILE)] {
            let file = source.join(name);
            fs::write(&file, text).map_err(Error::io("write", &file))?;
        }
        let mut make = tool("chroot");
        make.arg(&root)
            .args(["make", "-C", &format!("/lib/modules/{release}/build"), "M=/cr8", "modules"]);
        process::run_logged(&mut make, build.log)?;
        let module = build.folder.join("cr8.ko");
        fs::rename(source.join("cr8.ko"), &module).map_err(Error::io("move", &module))?;
        super::cache::remove_tree(&root)
    })?;
    Ok(path.join("cr8.ko"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_payload_is_found_behind_the_setup_sectors_and_lies_about_sizes_are_refused() {
        let mut image = vec![0_u8; 4096];
        image[SETUP_SECTS] = 1;
        image[PAYLOAD_OFFSET..PAYLOAD_OFFSET + 4].copy_from_slice(&16_u32.to_le_bytes());
        image[PAYLOAD_LENGTH..PAYLOAD_LENGTH + 4].copy_from_slice(&12_u32.to_le_bytes());
        image[1040..1048].copy_from_slice(&[0x28, 0xb5, 0x2f, 0xfd, 1, 2, 3, 4]);
        assert_eq!(
            zstd_payload(&image),
            Some(&[0x28, 0xb5, 0x2f, 0xfd, 1, 2, 3, 4][..])
        );
        image[PAYLOAD_LENGTH..PAYLOAD_LENGTH + 4].copy_from_slice(&u32::MAX.to_le_bytes());
        assert_eq!(zstd_payload(&image), None);
    }
}
