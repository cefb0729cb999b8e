//! Images to try `drover image` on.
#![allow(dead_code, reason = "each test file uses its own part of this")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use drover_block::image;
use drover_block::{Backing, Cache, DiskSpec, Format, Layer};
use tempfile::TempDir;

/// A folder with an overlay `top.qcow2` on `base.raw`, another base that reads a little otherwise, and what the overlay reads as.
pub(crate) struct Scene {
    folder: TempDir,
    /// What the overlay reads as.
    pub(crate) bytes: Vec<u8>,
}

const SIZE: usize = 8 << 20;

impl Scene {
    pub(crate) fn new() -> Self {
        let memory = Path::new("/dev/shm");
        let folder = match memory.is_dir() {
            true => tempfile::tempdir_in(memory).unwrap(),
            false => tempfile::tempdir().unwrap(),
        };
        let mut bytes: Vec<u8> = (0..SIZE).map(|n| (n >> 9) as u8 | 1).collect();
        let scene = Self {
            folder,
            bytes: Vec::new(),
        };
        std::fs::write(scene.path("base.raw"), &bytes).unwrap();
        let mut other = bytes.clone();
        for at in (0..SIZE).step_by(512 << 10) {
            other[at..at + 5000].fill(0);
        }
        std::fs::write(scene.path("other.raw"), &other).unwrap();
        std::fs::copy(scene.path("base.raw"), scene.path("spare.raw")).unwrap();
        scene.ok("create top.qcow2 --format qcow2 --backing base.raw --backing-format raw --cluster-size 16KiB");
        scene.qemu_io(
            "top.qcow2",
            &[
                "write -P 0x22 1M 2M",
                "write -z 5M 100k",
                "write -P 0x33 7M 5k",
            ],
        );
        bytes[1 << 20..3 << 20].fill(0x22);
        bytes[5 << 20..(5 << 20) + (100 << 10)].fill(0);
        bytes[7 << 20..(7 << 20) + (5 << 10)].fill(0x33);
        Self { bytes, ..scene }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn command(&self, line: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_drover"));
        command
            .arg("image")
            .args(line.split(' '))
            .current_dir(self.folder.path())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    pub(crate) fn run(&self, line: &str) -> Output {
        self.command(line).output().unwrap()
    }

    #[track_caller]
    pub(crate) fn ok(&self, line: &str) -> String {
        let output = self.run(line);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{line}: {errors}");
        String::from_utf8(output.stdout).unwrap()
    }

    pub(crate) fn qemu_io(&self, image: &str, commands: &[&str]) {
        let mut arguments = vec!["-f", "qcow2"];
        for command in commands {
            arguments.extend(["-c", command]);
        }
        let output = Command::new("qemu-io")
            .args(arguments)
            .arg(self.path(image))
            .output()
            .expect("qemu-io is installed by `cargo xtask setup`");
        assert!(output.status.success(), "{output:?}");
    }

    pub(crate) fn layer(&self, name: &str, format: Format) -> Layer {
        Layer {
            path: self.path(name),
            format,
            cache: Cache::Buffered,
        }
    }

    pub(crate) fn spec(
        &self,
        name: &str,
        format: Format,
        backing: &[&str],
        read_only: bool,
    ) -> DiskSpec {
        DiskSpec {
            top: self.layer(name, format),
            backing: Backing::Explicit(
                backing
                    .iter()
                    .map(|name| self.layer(name, Format::Raw))
                    .collect(),
            ),
            read_only,
            discard: true,
        }
    }

    /// Asserts that a disk is sound and reads as expected.
    #[track_caller]
    pub(crate) fn reads(&self, name: &str, format: Format, backing: &[&str], bytes: &[u8]) {
        let expected = self.path("expected");
        std::fs::write(&expected, bytes).unwrap();
        let spec = self.spec(name, format, backing, true);
        let expected = self.spec("expected", Format::Raw, &[], true);
        let seen = image::compare(&spec, &expected).unwrap();
        assert_eq!(seen.differs_at, None, "{name}");
        let report = image::check(&self.path(name), format).unwrap();
        assert_eq!(report.corruptions, 0, "{name}: {report:#?}");
    }

    /// The files of the folder and what is in them.
    pub(crate) fn files(&self) -> BTreeMap<String, Vec<u8>> {
        let entries = std::fs::read_dir(self.folder.path()).unwrap();
        entries
            .map(|entry| {
                let entry = entry.unwrap();
                let name = entry.file_name().into_string().unwrap();
                (name, std::fs::read(entry.path()).unwrap())
            })
            .collect()
    }
}

/// What lies below `top.qcow2`, as options.
pub(crate) const OVERLAY: &str = "--format qcow2 --backing base.raw --backing-format raw";
