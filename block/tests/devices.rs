//! Block devices under images: loop devices, made and taken away by each test. Counted as skipped where the host gives none.

mod common;

use std::path::{Path, PathBuf};
use std::process::Command;

use common::{Folder, Random, TestDisk, allocated, engines, qemu_img, qemu_io, spec, text};
use drover_block::{Cache, Disk, DiskSpec, Format, IoError};

/// A loop device over a file; taken away when dropped.
struct Device {
    path: PathBuf,
    file: PathBuf,
}

impl Device {
    /// `None` where the host has no loop devices or does not let us have one.
    fn new(folder: &Folder, bytes: u64, sector: u32) -> Option<Self> {
        let file = folder.path("device.img");
        std::fs::File::create(&file)
            .unwrap()
            .set_len(bytes)
            .unwrap();
        let output = Command::new("losetup")
            .args(["--find", "--show", "--sector-size", &sector.to_string()])
            .arg(&file)
            .output();
        match output {
            Ok(output) if output.status.success() => {
                let name = String::from_utf8(output.stdout).unwrap();
                Some(Self {
                    path: name.trim().into(),
                    file,
                })
            }
            other => {
                println!("SKIPPED: this host gives no loop device: {other:?}");
                None
            }
        }
    }

    fn spec(&self, format: Format, cache: Cache) -> DiskSpec {
        let mut spec = spec(&self.path, format, &[]);
        spec.top.cache = cache;
        spec
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        let status = Command::new("losetup").arg("-d").arg(&self.path).status();
        assert!(
            status.is_ok_and(|status| status.success()) || std::thread::panicking(),
            "{} is left behind",
            self.path.display()
        );
    }
}

fn each(mut test: impl FnMut(&Device, u32, Cache, drover_block::IoEngine)) {
    for sector in [512, 4096] {
        for cache in [Cache::Buffered, Cache::Direct] {
            for engine in engines() {
                let folder = Folder::on_disk();
                let Some(device) = Device::new(&folder, 8 << 20, sector) else {
                    return;
                };
                test(&device, sector, cache, engine);
            }
        }
    }
}

#[test]
fn a_raw_disk_on_a_device_does_what_a_model_does() {
    each(|device, sector, cache, engine| {
        let name = format!("{sector} {cache:?} {engine:?}");
        let spec = device.spec(Format::Raw, cache);
        let mut disk = TestDisk(Disk::open_with(&spec, engine).unwrap());
        assert_eq!(disk.0.size_bytes(), 8 << 20, "{name}");
        let mut model = vec![0; 8 << 20];
        let mut random = Random(0x5eed_1234);
        for step in 0..60 {
            // Sectors of the guest, which are smaller than those of a device of 4 KiB.
            let at = random.below(15_000) * 512;
            let length = (1 + random.below(300)) * 512;
            let range = at as usize..(at + length) as usize;
            match random.below(4) {
                0 => {
                    let value = step as u8 + 1;
                    disk.fill(at, length as usize, value);
                    model[range].fill(value);
                }
                1 => {
                    disk.zero(at, length, random.below(2) == 0);
                    model[range].fill(0);
                }
                2 => {
                    let before = model[range.clone()].to_vec();
                    disk.discard(at, length);
                    // Each sector is as it was, or zero.
                    let after = disk.read(at, length as usize);
                    for (new, old) in after.chunks(512).zip(before.chunks(512)) {
                        assert!(new == old || new == [0; 512], "{name} {step}");
                    }
                    model[range].copy_from_slice(&after);
                }
                _ => {
                    let read = disk.read(at, length as usize);
                    assert!(read == model[range], "{name} {step}");
                }
            }
        }
        disk.flush();
        assert!(disk.read(0, 8 << 20) == model, "{name}");
        disk.close();
        assert!(std::fs::read(&device.path).unwrap() == model, "{name}");
    });
}

#[test]
fn a_discard_gives_the_space_of_a_device_back() {
    each(|device, sector, cache, engine| {
        let name = format!("{sector} {cache:?} {engine:?}");
        let spec = device.spec(Format::Raw, cache);
        let mut disk = TestDisk(Disk::open_with(&spec, engine).unwrap());
        disk.fill(0, 4 << 20, 7);
        disk.flush();
        let before = allocated(&device.file);
        assert!(before >= 4 << 20, "{name}: {before}");
        disk.discard(0, 2 << 20);
        disk.zero(2 << 20, 1 << 20, true);
        disk.flush();
        let after = allocated(&device.file);
        assert!(
            after <= before - (3 << 20) + 65536,
            "{name}: {before} {after}"
        );
        assert_eq!(disk.read(0, 3 << 20), vec![0; 3 << 20], "{name}");
        assert_eq!(disk.read(3 << 20, 1 << 20), vec![7; 1 << 20], "{name}");
        disk.close();
    });
}

#[test]
fn a_qcow2_image_on_a_device_gives_space_back_and_says_when_the_device_is_full() {
    each(|device, sector, cache, engine| {
        let name = format!("{sector} {cache:?} {engine:?}");
        qemu_img(&["create", "-q", "-f", "qcow2", text(&device.path), "64M"]);
        let spec = device.spec(Format::Qcow2, cache);
        let mut disk = TestDisk(Disk::open_with(&spec, engine).unwrap());
        assert_eq!(disk.0.size_bytes(), 64 << 20);
        let mut written = 0;
        let error = loop {
            match disk.try_write(written << 20, &[9; 1 << 20]) {
                Ok(()) => written += 1,
                Err(error) => break error,
            }
        };
        assert_eq!(error, IoError::NoSpace, "{name}");
        assert!((5..8).contains(&written), "{name}: {written}");
        disk.flush();
        // There is room again, and the engine finds it.
        disk.discard(0, 2 << 20);
        disk.flush();
        disk.fill(32 << 20, 1 << 20, 3);
        disk.flush();
        assert_eq!(disk.read(2 << 20, 1 << 20), vec![9; 1 << 20], "{name}");
        disk.discard(2 << 20, 3 << 20);
        disk.close();
        let taken = allocated(&device.file);
        assert!(taken < 6 << 20, "{name}: {taken}");
        qemu_img(&["check", "-q", "-f", "qcow2", text(&device.path)]);
        qemu_io(
            "qcow2",
            &device.path,
            &["read -P 3 32M 1M", "read -P 0 0 2M"],
        );
        let lease = Path::new("/dev").join(format!(
            "{}.lease",
            device.path.file_name().unwrap().to_str().unwrap()
        ));
        assert!(!lease.exists());
    });
}
