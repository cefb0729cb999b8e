//! The root file system of the emulated KVM host: Debian 13 with QEMU 10, the peer that Drover is measured
//! against and the judge of the images it writes. This machine runs the same QEMU out of the folder.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use super::bootstrap::Root;
use super::cache::Cache;
use crate::error::{Error, Result};

const ROOT: Root = Root {
    suite: "trixie",
    variant: "minbase",
    packages: &[
        "qemu-system-x86",
        "qemu-utils",
        "ovmf",
        "iproute2",
        "iputils-ping",
        "ethtool",
        "e2fsprogs",
        "genisoimage",
        "procps",
        "strace",
        "kmod",
    ],
};

/// The programs of the root that are used on this machine.
const TOOLS: [&str; 4] = [
    "qemu-system-x86_64",
    "qemu-img",
    "qemu-io",
    "qemu-storage-daemon",
];

/// Runs a program of the root with the root's own loader and libraries.
const WRAPPER: &str = r#"#!/bin/sh
root=$(dirname "$(dirname "$(readlink -f "$0")")")/l1-root
case "$(basename "$0")" in
qemu-system-*) set -- -L "$root/usr/share/qemu" -L "$root/usr/share/seabios" -L "$root/usr/lib/ipxe/qemu" "$@" ;;
esac
exec "$root/lib64/ld-linux-x86-64.so.2" --library-path "$root/usr/lib/x86_64-linux-gnu" "$root/usr/bin/$(basename "$0")" "$@"
"#;

/// The built root.
pub(super) struct L1Root(PathBuf);

impl L1Root {
    /// The folder of programs to put in front of `PATH`.
    pub(super) fn tools(&self) -> PathBuf {
        self.0.join("bin")
    }

    /// The root as a raw ext4 disk.
    pub(super) fn disk(&self) -> PathBuf {
        self.0.join("l1.img")
    }
}

/// Builds the root, its disk and the wrappers.
pub(super) fn build(cache: &Cache) -> Result<L1Root> {
    let mut key = ROOT.key("l1-root 1").with(WRAPPER);
    for tool in TOOLS {
        key = key.with(tool);
    }
    let path = cache.artefact("l1-root", &key, |build| {
        let root = build.folder.join("l1-root");
        ROOT.make(cache, build, &root)?;
        super::ext4_from_folder(build, &root, "l1.img", "3G")?;
        let tools = build.folder.join("bin");
        fs::create_dir(&tools).map_err(Error::io("create", &tools))?;
        TOOLS
            .iter()
            .try_for_each(|tool| write_program(&tools.join(tool), WRAPPER))
    })?;
    Ok(L1Root(path))
}

fn write_program(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).map_err(Error::io("write", path))?;
    make_executable(path)
}

/// Lets everyone run a file.
pub(super) fn make_executable(path: &Path) -> Result<()> {
    fs::set_permissions(path, fs::Permissions::from_mode(0o755))
        .map_err(Error::io("make executable", path))
}
