//! The programs that building the lab needs on this machine, installed from the distribution's packages.

use std::path::Path;
use std::process::{Command, Stdio};

use super::cache::Cache;
use crate::error::{Error, Result};
use crate::process;

/// A program (or a file) and the package that brings it on Debian and Ubuntu.
const NEEDED: [(&str, &str); 15] = [
    ("mmdebstrap", "mmdebstrap"),
    (
        "/usr/share/keyrings/debian-archive-keyring.gpg",
        "debian-archive-keyring",
    ),
    ("mkfs.ext4", "e2fsprogs"),
    ("mkfs.vfat", "dosfstools"),
    ("mcopy", "mtools"),
    ("sfdisk", "fdisk"),
    ("zstd", "zstd"),
    ("xz", "xz-utils"),
    ("depmod", "kmod"),
    ("unshare", "util-linux"),
    // Independent readers of the seeds that Drover writes.
    ("isoinfo", "genisoimage"),
    ("xorriso", "xorriso"),
    ("bsdtar", "libarchive-tools"),
    // iasl: an independent reader of the ACPI tables.
    ("iasl", "acpica-tools"),
    // libFuzzer, which the fuzz targets link, is C++.
    ("c++", "g++"),
];

/// A program by name, found in the administrators' folders too.
pub(super) fn tool(name: &str) -> Command {
    let sbin = Path::new("/usr/sbin").join(name);
    if sbin.is_file() {
        Command::new(sbin)
    } else {
        Command::new(name)
    }
}

/// Installs what the lab lacks; needs root only then.
pub(super) fn install_missing(cache: &Cache) -> Result<()> {
    let missing: Vec<&str> = NEEDED
        .iter()
        .filter(|(program, _)| {
            if program.starts_with('/') {
                !Path::new(program).exists()
            } else {
                !process::on_path(program)
            }
        })
        .map(|(_, package)| *package)
        .collect();
    install(cache, &missing)
}

/// Installs a Python that can make virtual environments, if there is none.
pub(crate) fn install_python(cache: &Cache) -> Result<()> {
    let works = Command::new("python3")
        .args(["-c", "import ensurepip, venv"])
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success());
    install(
        cache,
        if works {
            &[]
        } else {
            &["python3", "python3-venv"]
        },
    )
}

fn install(cache: &Cache, missing: &[&str]) -> Result<()> {
    if missing.is_empty() {
        return Ok(());
    }
    if !process::on_path("apt-get") {
        return Err(Error::Other(format!(
            "these packages (Debian's names) are missing, and there is no apt-get to install them: {}",
            missing.join(" ")
        )));
    }
    let user = process::output(Command::new("id").arg("-u"))?;
    if user.trim() != "0" {
        return Err(Error::Other(format!(
            "run once as root, or install by hand: apt-get install {}",
            missing.join(" ")
        )));
    }
    cache.say(&format!("installing {}", missing.join(" ")));
    let log = cache.folder().join("logs/apt.log");
    let apt = || {
        let mut command = Command::new("apt-get");
        command
            .env("DEBIAN_FRONTEND", "noninteractive")
            .args(["-q", "-y"]);
        command
    };
    process::run_logged(apt().arg("update"), &log)?;
    process::run_logged(
        apt()
            .args(["install", "--no-install-recommends"])
            .args(missing),
        &log,
    )?;
    cache.say("packages installed");
    Ok(())
}
