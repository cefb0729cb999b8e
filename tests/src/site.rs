//! Where a story runs: on this machine or in the emulated host, with the same files at other places.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// What `cargo xtask setup` made, as it wrote it down.
#[derive(Clone, Debug, Deserialize)]
pub struct Lab {
    /// Wrappers of QEMU 10 and its tools.
    pub tools: PathBuf,
    /// The emulated host's kernel.
    pub l1_kernel: PathBuf,
    /// The emulated host's initramfs.
    pub l1_initrd: PathBuf,
    /// The emulated host's root disk.
    pub l1_root: PathBuf,
    /// The disk that holds `images`.
    pub images_disk: PathBuf,
    /// What guests boot from.
    pub images: PathBuf,
}

/// The folders of a running story.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Site {
    /// Kernels, initramfs and disk images, read-only.
    pub images: PathBuf,
    /// Room for overlays, on a file system with O_DIRECT and holes.
    pub scratch: PathBuf,
    /// The programs under test.
    pub programs: PathBuf,
}

impl Site {
    /// A file that guests boot from.
    #[must_use]
    pub fn image(&self, name: &str) -> PathBuf {
        self.images.join(name)
    }

    /// A program under test.
    #[must_use]
    pub fn program(&self, name: &str) -> PathBuf {
        self.programs.join(name)
    }

    /// Whether this is an emulated processor, where times mean little.
    #[must_use]
    pub fn emulated(&self) -> bool {
        Path::new("/lab-init").exists()
    }
}

/// Whether this machine's processor can run guests in hardware.
///
/// # Errors
///
/// `/proc/cpuinfo` cannot be read.
pub fn has_hardware_virtualization() -> std::io::Result<bool> {
    let text = std::fs::read_to_string("/proc/cpuinfo")?;
    Ok(text
        .lines()
        .filter(|line| line.starts_with("flags"))
        .any(|line| {
            line.split_whitespace()
                .any(|flag| flag == "vmx" || flag == "svm")
        }))
}
