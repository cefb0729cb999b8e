//! A small read-only disk with the programs that stories run in guests: fio, and what makes, checks and grows file systems.
//!
//! ```text
//! guest-tools.img, ext4      bin/fio       starts …
//!                            program/fio   … Debian's own program …
//!                            lib/          … with its loader and the libraries that it needs
//! ```
//!
//! The small guest has no libraries; it mounts the disk at `/tools` and calls `/tools/bin/fio`.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::bootstrap::Root;
use super::cache::{Cache, remove_tree};
use super::l1_root::make_executable;
use crate::error::{Error, Result};
use crate::process;

const ROOT: Root = Root {
    suite: "trixie",
    variant: "extract",
    packages: &["fio", "e2fsprogs"],
};

/// Where the programs are in the distribution's packages.
const PROGRAMS: [&str; 4] = [
    "usr/bin/fio",
    "usr/sbin/mke2fs",
    "usr/sbin/e2fsck",
    "usr/sbin/resize2fs",
];

const LOADER: &str = "usr/lib64/ld-linux-x86-64.so.2";
/// Where libraries are; the second holds some that only the first's know.
const LIBRARIES: [&str; 2] = ["usr/lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu/ceph"];
const SIZE: &str = "96M";

/// What is called in the guest; the name tells the program.
const START: &str = "#!/bin/sh\nexec /tools/lib/ld-linux-x86-64.so.2 --library-path /tools/lib \"/tools/program/${0##*/}\" \"$@\"\n";

/// Builds the disk and returns its path.
pub(super) fn build(cache: &Cache) -> Result<PathBuf> {
    let mut key = ROOT.key("guest-tools 1").with(SIZE).with(START);
    for program in PROGRAMS.iter().chain(&LIBRARIES) {
        key = key.with(program);
    }
    let path = cache.artefact("guest-tools", &key, |build| {
        let root = build.folder.join("guest-tools");
        ROOT.make(cache, build, &root)?;
        let disk = build.folder.join("disk");
        for folder in ["bin", "program", "lib"] {
            let folder = disk.join(folder);
            fs::create_dir_all(&folder).map_err(Error::io("create", &folder))?;
        }
        copy(&root.join(LOADER), &disk.join("lib"))?;
        let mut libraries = BTreeSet::new();
        for program in PROGRAMS {
            let program = root.join(program);
            libraries.extend(needed(&root, &program)?);
            let name = copy(&program, &disk.join("program"))?;
            let start = disk.join("bin").join(name);
            fs::write(&start, START).map_err(Error::io("write", &start))?;
            make_executable(&start)?;
        }
        for library in libraries {
            copy(&library, &disk.join("lib"))?;
        }
        super::ext4_from_folder(build, &disk, "guest-tools.img", SIZE)?;
        remove_tree(&disk)?;
        remove_tree(&root)
    })?;
    Ok(path.join("guest-tools.img"))
}

/// The libraries of the root that a program is linked with, as the root's loader finds them.
fn needed(root: &Path, program: &Path) -> Result<Vec<PathBuf>> {
    let folders = LIBRARIES.map(|folder| root.join(folder).to_string_lossy().into_owned());
    let listed = process::output(
        Command::new(root.join(LOADER))
            .arg("--library-path")
            .arg(folders.join(":"))
            .arg("--list")
            .arg(program),
    )?;
    parse_needed(&listed).map_err(|name| {
        Error::Other(format!(
            "{} needs {name}, which no package of the root brings",
            program.display()
        ))
    })
}

/// `libz.so.1 => /root/usr/lib/libz.so.1 (0x7f…)`; the kernel's own library has no file, the loader is copied by itself.
fn parse_needed(listed: &str) -> std::result::Result<Vec<PathBuf>, String> {
    let mut paths = Vec::new();
    for line in listed.lines() {
        let Some((name, found)) = line.trim().split_once(" => ") else {
            continue;
        };
        let path = found.split(" (0x").next().unwrap_or_default();
        if name.starts_with('/') {
            continue;
        }
        if !path.starts_with('/') {
            return Err(name.to_owned());
        }
        paths.push(PathBuf::from(path));
    }
    Ok(paths)
}

/// Copies a file, not the link that leads to it, into a folder; returns its name.
fn copy(from: &Path, folder: &Path) -> Result<String> {
    let name = from
        .file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .into_owned();
    fs::copy(from, folder.join(&name)).map_err(Error::io("copy", from))?;
    Ok(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loaders_list_gives_the_files_and_names_what_is_missing() {
        let listed = "\tlinux-vdso.so.1 (0x00007f)\n\tlibz.so.1 => /r/usr/lib/libz.so.1 (0x00007f)\n\
                      \t/lib64/ld-linux-x86-64.so.2 => /r/usr/lib64/ld-linux-x86-64.so.2 (0x00007f)\n";
        assert_eq!(
            parse_needed(listed),
            Ok(vec![PathBuf::from("/r/usr/lib/libz.so.1")])
        );
        assert_eq!(
            parse_needed("\tlibq.so => not found\n"),
            Err("libq.so".into())
        );
    }
}
