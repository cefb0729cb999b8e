//! Images converted, compared and merged by us, judged by QEMU's tools.

mod common;

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use common::{
    Folder, Random, TestDisk, allocated, assert_clean, contents, layer, qemu_img, qemu_io, spec,
    text,
};
use drover_block::image::{self, Compression, ConvertOptions, CreateOptions, Monitor, Unwatched};
use drover_block::{Backing, DiskSpec, Format};

/// A disk of 3 MiB and a bit over a base and a middle layer, with text, noise and zeros in it; and what it reads as.
fn chain(folder: &Folder) -> (DiskSpec, Vec<u8>) {
    let (base, middle, top) = (
        folder.path("base.raw"),
        folder.path("middle.qcow2"),
        folder.path("top.qcow2"),
    );
    let mut random = Random(3);
    let mut bytes: Vec<u8> = (0..(3u32 << 20) + 512)
        .map(|n| match n >> 18 {
            0 | 5 => 0,
            1 | 7 => random.next() as u8,
            _ => b"a line of text that comes again, and again\n"[n as usize % 43],
        })
        .collect();
    std::fs::write(&base, &bytes).unwrap();
    for (path, below, format) in [
        (&middle, "base.raw", Format::Raw),
        (&top, "middle.qcow2", Format::Qcow2),
    ] {
        let options = CreateOptions {
            backing: Some((below.into(), format)),
            cluster_size: 16 * 1024,
            ..CreateOptions::new(bytes.len() as u64)
        };
        image::create_qcow2(path, &options).unwrap();
    }
    qemu_io(
        "qcow2",
        &middle,
        &["write -P 0x11 1M 100k", "write -z 1500k 64k"],
    );
    qemu_io(
        "qcow2",
        &top,
        &[
            "write -P 0x22 1100k 10k",
            "write -z 0 700k",
            "write -P 0 2M 64k",
        ],
    );
    bytes[1 << 20..(1 << 20) + (100 << 10)].fill(0x11);
    bytes[1500 << 10..1564 << 10].fill(0);
    bytes[1100 << 10..1110 << 10].fill(0x22);
    bytes[..700 << 10].fill(0);
    bytes[2 << 20..(2 << 20) + (64 << 10)].fill(0);
    let layers = [layer(&middle, Format::Qcow2), layer(&base, Format::Raw)];
    (spec(&top, Format::Qcow2, &layers), bytes)
}

#[test]
fn a_chain_is_converted_to_every_form_and_qemu_reads_the_same() {
    let folder = Folder::new();
    let (source, bytes) = chain(&folder);
    let mut cases = vec![ConvertOptions::new(Format::Raw)];
    for cluster_size in [512, 4096, 65536, 2 << 20] {
        for compression in [None, Some(Compression::Zlib), Some(Compression::Zstd)] {
            cases.push(ConvertOptions {
                cluster_size,
                compression,
                ..ConvertOptions::new(Format::Qcow2)
            });
        }
    }
    for (n, options) in cases.into_iter().enumerate() {
        let target = folder.path(&format!("target{n}"));
        image::convert(&source, &target, &options, &mut Unwatched).unwrap();
        let format = match options.format {
            Format::Raw => "raw",
            Format::Qcow2 => "qcow2",
        };
        if options.format == Format::Qcow2 {
            assert_clean(&target);
        }
        assert!(contents(format, &target) == bytes, "{options:?}");
        let own = spec(&target, options.format, &[]);
        let same = image::compare(&source, &own).unwrap();
        assert_eq!(same.differs_at, None, "{options:?}");
        assert!(
            options.cluster_size > 65536 || allocated(&target) < 5 << 19,
            "{options:?}: zeros take no space"
        );
        if options.compression.is_some() && options.cluster_size == 65536 {
            let plain = 1 << 20;
            assert!(
                allocated(&target) < plain,
                "{options:?} takes {}",
                allocated(&target)
            );
            // It goes on as a disk like any other.
            let mut disk = TestDisk::open(&own);
            disk.fill(1 << 20, 5000, 0x77);
            disk.discard(1100 << 10, 200 << 10);
            disk.close();
            assert_clean(&target);
        }
        assert!(!folder.path(&format!("target{n}.partial")).exists());
    }
}

#[test]
fn a_target_that_exists_is_left_alone_and_what_a_dead_conversion_left_is_not() {
    let folder = Folder::new();
    let (source, bytes) = chain(&folder);
    let target = folder.path("target.raw");
    let options = ConvertOptions::new(Format::Raw);
    std::fs::write(&target, "precious").unwrap();
    let error = image::convert(&source, &target, &options, &mut Unwatched).unwrap_err();
    assert!(error.to_string().contains("target.raw"), "{error}");
    assert_eq!(std::fs::read(&target).unwrap(), b"precious");
    std::fs::remove_file(&target).unwrap();
    std::fs::write(folder.path("target.raw.partial"), "half").unwrap();
    image::convert(&source, &target, &options, &mut Unwatched).unwrap();
    assert!(std::fs::read(&target).unwrap() == bytes);
}

/// Cancels a job after so many reports.
struct Impatient(u32);

impl Monitor for Impatient {
    fn progress(&mut self, done: u64, total: u64) -> ControlFlow<()> {
        assert!(done <= total);
        if self.0 == 0 {
            return ControlFlow::Break(());
        }
        self.0 -= 1;
        ControlFlow::Continue(())
    }
}

#[test]
fn a_conversion_that_is_cancelled_leaves_nothing() {
    let folder = Folder::new();
    let (source, _) = chain(&folder);
    let target = folder.path("target.qcow2");
    let options = ConvertOptions::new(Format::Qcow2);
    let error = image::convert(&source, &target, &options, &mut Impatient(1)).unwrap_err();
    assert!(error.to_string().contains("cancelled"), "{error}");
    assert!(!target.exists() && !folder.path("target.qcow2.partial").exists());
}

#[test]
fn a_raw_source_that_ends_inside_a_sector_is_filled_up_with_zeros() {
    let folder = Folder::new();
    let source = folder.path("odd.raw");
    std::fs::write(&source, vec![7; 70_001]).unwrap();
    let odd = spec(&source, Format::Raw, &[]);
    let target = folder.path("target.qcow2");
    for compression in [None, Some(Compression::Zlib)] {
        let options = ConvertOptions {
            compression,
            ..ConvertOptions::new(Format::Qcow2)
        };
        image::convert(&odd, &target, &options, &mut Unwatched).unwrap();
        assert_clean(&target);
        let seen = contents("qcow2", &target);
        assert_eq!(seen.len(), 70_144);
        assert!(seen[..70_001].iter().all(|byte| *byte == 7));
        assert!(seen[70_001..].iter().all(|byte| *byte == 0));
        std::fs::remove_file(&target).unwrap();
    }
}

struct Slow;

impl Monitor for Slow {
    fn progress(&mut self, _: u64, _: u64) -> ControlFlow<()> {
        ControlFlow::Continue(())
    }

    fn bytes_per_second(&self) -> Option<u64> {
        Some(8 << 20)
    }
}

#[test]
fn a_job_keeps_to_its_rate() {
    let folder = Folder::new();
    let source = folder.path("source.raw");
    std::fs::write(&source, vec![1; 4 << 20]).unwrap();
    let start = Instant::now();
    let options = ConvertOptions::new(Format::Raw);
    let spec = spec(&source, Format::Raw, &[]);
    image::convert(&spec, &folder.path("target"), &options, &mut Slow).unwrap();
    assert!(start.elapsed() >= Duration::from_millis(500));
}

#[test]
fn a_comparison_tells_the_first_byte_that_differs() {
    let folder = Folder::new();
    let (source, mut bytes) = chain(&folder);
    let other = folder.path("other.raw");
    bytes.resize(4 << 20, 0);
    std::fs::write(&other, &bytes).unwrap();
    let second = spec(&other, Format::Raw, &[]);
    let seen = image::compare(&source, &second).unwrap();
    assert_eq!(seen.differs_at, None, "what one lacks is zero");
    assert_eq!(
        (seen.first_size_bytes, seen.second_size_bytes),
        ((3 << 20) + 512, 4 << 20)
    );
    for at in [0, 1_234_567, (3 << 20) + 511, (4 << 20) - 1] {
        bytes[at] ^= 1;
        std::fs::write(&other, &bytes).unwrap();
        bytes[at] ^= 1;
        let seen = image::compare(&source, &second).unwrap();
        assert_eq!(seen.differs_at, Some(at as u64));
    }
}

#[test]
fn a_map_says_which_layer_answers_as_qemu_does() {
    let folder = Folder::new();
    let (source, bytes) = chain(&folder);
    let map = image::map(&source).unwrap();
    assert_eq!(
        map.iter().map(|entry| entry.length).sum::<u64>(),
        bytes.len() as u64
    );
    let qemu = qemu_img(&[
        "map",
        "-f",
        "qcow2",
        "--output=json",
        text(&source.top.path),
    ]);
    // QEMU knows the holes of the raw base, too; so compare where the base has data.
    for entry in map.iter().filter(|entry| entry.depth < 2) {
        let inside = format!(
            "\"start\": {}, \"length\": {}, \"depth\": {}",
            entry.start, entry.length, entry.depth
        );
        assert!(qemu.contains(&inside), "{inside} is not in {qemu}");
    }
}

#[test]
fn a_commit_makes_the_layer_below_read_as_the_top_did() {
    let folder = Folder::new();
    let (source, bytes) = chain(&folder);
    let Backing::Explicit(layers) = &source.backing else {
        unreachable!("made so")
    };
    let below = spec(&layers[0].path, Format::Qcow2, &layers[1..]);
    // Stopped in the middle, it is done again.
    assert!(image::commit(&source, &mut Impatient(3)).is_err());
    assert!(contents("qcow2", &source.top.path) == bytes);
    image::commit(&source, &mut Unwatched).unwrap();
    for image in [&source.top.path, &below.top.path] {
        assert_clean(image);
        assert!(contents("qcow2", image) == bytes, "{}", image.display());
    }
    // A top that is longer makes the layer below grow.
    let mut disk = TestDisk::open(&source);
    disk.fill(0, 512, 9);
    disk.close();
    image::resize(&source, 4 << 20, image::Shrink::Refuse).unwrap();
    image::commit(&source, &mut Unwatched).unwrap();
    assert_clean(&below.top.path);
    let seen = contents("qcow2", &below.top.path);
    assert_eq!(seen.len(), 4 << 20);
    assert!(seen[..512].iter().all(|b| *b == 9) && seen[512..bytes.len()] == bytes[512..]);
}

#[test]
fn a_flattened_image_needs_nobody() {
    let folder = Folder::new();
    let (source, bytes) = chain(&folder);
    assert!(image::flatten(&source, &mut Impatient(4)).is_err());
    assert_clean(&source.top.path);
    assert!(contents("qcow2", &source.top.path) == bytes);
    image::flatten(&source, &mut Unwatched).unwrap();
    std::fs::remove_file(folder.path("middle.qcow2")).unwrap();
    std::fs::remove_file(folder.path("base.raw")).unwrap();
    assert_clean(&source.top.path);
    assert!(contents("qcow2", &source.top.path) == bytes);
    assert_eq!(
        image::info(&source.top.path, Format::Qcow2)
            .unwrap()
            .qcow2
            .unwrap()
            .backing_file,
        None
    );
    let mut disk = TestDisk::open(&spec(&source.top.path, Format::Qcow2, &[]));
    assert!(disk.read(0, bytes.len()) == bytes);
    disk.close();
}
