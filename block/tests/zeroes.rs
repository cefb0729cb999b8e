//! Zeros that a guest writes as data.

mod common;

use common::{
    Folder, Random, TestDisk, allocated, assert_clean, contents, engines, layer, qemu_img, qemu_io,
    spec, text,
};
use drover_block::{DetectZeroes, Disk, DiskOptions, DiskSpec, Format, IoEngine};

fn open(spec: &DiskSpec, engine: IoEngine, detect_zeroes: DetectZeroes) -> TestDisk {
    let options = DiskOptions {
        engine,
        detect_zeroes,
        ..DiskOptions::default()
    };
    TestDisk(Disk::open_with(spec, options).unwrap())
}

/// An overlay of 8 MiB over a base full of sevens.
fn overlay(folder: &Folder) -> DiskSpec {
    let (base, top) = (folder.path("base.qcow2"), folder.path("top.qcow2"));
    qemu_img(&["create", "-q", "-f", "qcow2", text(&base), "8M"]);
    qemu_io("qcow2", &base, &["write -q -P 7 0 8M"]);
    qemu_img(&[
        "create",
        "-q",
        "-f",
        "qcow2",
        "-F",
        "qcow2",
        "-b",
        text(&base),
        text(&top),
        "8M",
    ]);
    spec(&top, Format::Qcow2, &[layer(&base, Format::Qcow2)])
}

#[test]
fn zeros_take_no_space_and_hide_what_lies_below() {
    for engine in engines() {
        let folder = Folder::new();
        let spec = overlay(&folder);
        let mut disk = open(&spec, engine, DetectZeroes::On);
        disk.fill(4096, 4 << 20, 0);
        disk.flush();
        let counts = disk.0.host_counts();
        // Two clusters in part, and tables.
        assert!(counts.bytes_written() < 8 * 65536, "{counts:?}");
        let mut wanted = vec![7; 8 << 20];
        wanted[4096..][..4 << 20].fill(0);
        assert!(disk.read(0, 8 << 20) == wanted);
        disk.close();
        assert_clean(&spec.top.path);
        assert!(contents("qcow2", &spec.top.path) == wanted);
    }
}

#[test]
fn only_unmap_gives_space_back() {
    for (how, back) in [
        (DetectZeroes::Off, false),
        (DetectZeroes::On, false),
        (DetectZeroes::Unmap, true),
    ] {
        let folder = Folder::new();
        let spec = overlay(&folder);
        let mut disk = open(&spec, IoEngine::Inline, how);
        disk.fill(0, 4 << 20, 1);
        disk.flush();
        let full = allocated(&spec.top.path);
        disk.fill(0, 4 << 20, 0);
        disk.flush();
        disk.flush();
        let now = allocated(&spec.top.path);
        assert_eq!(now + (3 << 20) < full, back, "{how:?}: {full} -> {now}");
        assert_eq!(disk.read(0, 4 << 20), vec![0; 4 << 20]);
        disk.close();
        assert_clean(&spec.top.path);
    }
}

#[test]
fn random_writes_of_half_zeros_read_back() {
    for (n, format) in [Format::Qcow2, Format::Raw].into_iter().enumerate() {
        for how in [DetectZeroes::On, DetectZeroes::Unmap] {
            let folder = Folder::new();
            let spec = match format {
                Format::Qcow2 => overlay(&folder),
                Format::Raw => {
                    let path = folder.path("disk.raw");
                    std::fs::write(&path, vec![7; 8 << 20]).unwrap();
                    spec(&path, Format::Raw, &[])
                }
            };
            let mut model = vec![7; 8 << 20];
            let mut random = Random(n as u64 + 5);
            let mut disk = open(&spec, IoEngine::Threads, how);
            for _ in 0..60 {
                let offset = random.below(7 << 20) / 512 * 512;
                let mut bytes = Vec::new();
                while bytes.len() < 300_000 {
                    let value = (random.below(2) * random.below(255)) as u8;
                    bytes.resize(bytes.len() + random.below(120_000) as usize, value);
                }
                disk.write(offset, &bytes);
                model[offset as usize..][..bytes.len()].copy_from_slice(&bytes);
            }
            assert!(disk.read(0, 8 << 20) == model, "{format:?} {how:?}");
            disk.close();
            if format == Format::Qcow2 {
                assert_clean(&spec.top.path);
            }
        }
    }
}
