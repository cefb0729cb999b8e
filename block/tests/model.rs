//! Random requests against a model in memory, judged by QEMU's tools afterwards: over all cluster sizes and refcount widths,
//! both versions, with and without backings, buffered and direct.

mod common;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use common::{
    Folder, Random, TestDisk, allocated, assert_clean, contents, layer, qemu_img, qemu_io, spec,
    text,
};
use drover_block::{Buffers, Cache, DiskSpec, Format, Layer, Op, RawSlice};

/// Runs `count` random requests and checks every read; the disk is closed and opened again now and then.
fn exercise(spec: &DiskSpec, model: &mut [u8], count: u32, seed: u64, longest: u64) {
    let mut random = Random(seed);
    let mut disk = TestDisk::open(spec);
    let size = model.len() as u64;
    assert_eq!(disk.0.size_bytes(), size);
    let is_v2_over_backing =
        std::fs::read(&spec.top.path).is_ok_and(|b| b.get(7) == Some(&2)) && disk_has_backing(spec);
    for step in 0..count {
        // Half of the requests are made of whole sectors, as guests make them; the others are not.
        let unit = if random.below(2) == 0 { 512 } else { 1 };
        let offset = random.below(size) / unit * unit;
        let length = (random.below(longest) / unit * unit)
            .max(unit)
            .min(size - offset);
        let range = offset as usize..(offset + length) as usize;
        match random.below(20) {
            0..9 => {
                let value = random.next() as u8;
                let bytes: Vec<u8> = (0..length)
                    .map(|n| value.wrapping_add((n / 97) as u8))
                    .collect();
                disk.write(offset, &bytes);
                model[range].copy_from_slice(&bytes);
            }
            9..13 => {
                let read = disk.read(offset, length as usize);
                assert!(
                    read == model[range.clone()],
                    "step {step}: {range:?} differs"
                );
            }
            13..15 => {
                disk.discard(offset, length);
                // What a discard left alone is the engine's choice; it reads as before or as zero, in whole clusters.
                let read = disk.read(offset, length as usize);
                for (new, old) in read.iter().zip(&model[range.clone()]) {
                    assert!(
                        *new == 0 || new == old,
                        "step {step}: a discard made up data"
                    );
                }
                if is_v2_over_backing {
                    assert!(
                        read == model[range.clone()],
                        "version 2 keeps data over a backing"
                    );
                }
                model[range].copy_from_slice(&read);
            }
            15..17 => {
                disk.zero(offset, length, random.below(2) == 0);
                model[range].fill(0);
            }
            17 => disk.flush(),
            18 => {
                disk.close();
                disk = TestDisk::open(spec);
            }
            _ => {
                disk.flush();
                drop(disk);
                assert_clean_if_qcow2(spec);
                disk = TestDisk::open(spec);
            }
        }
    }
    assert!(
        disk.read(0, model.len()) == model,
        "the disk differs from the model"
    );
    disk.close();
}

fn disk_has_backing(spec: &DiskSpec) -> bool {
    matches!(&spec.backing, drover_block::Backing::Explicit(layers) if !layers.is_empty())
}

fn assert_clean_if_qcow2(spec: &DiskSpec) {
    if spec.top.format == Format::Qcow2 {
        assert_clean(&spec.top.path);
    }
}

fn overlay(
    folder: &Folder,
    options: &str,
    base: &Path,
    format: &str,
    size: u64,
) -> std::path::PathBuf {
    let top = folder.path("top.qcow2");
    qemu_img(&[
        "create",
        "-q",
        "-f",
        "qcow2",
        "-o",
        options,
        "-F",
        format,
        "-b",
        text(base),
        text(&top),
        &size.to_string(),
    ]);
    top
}

#[track_caller]
fn judge(top: &Path, model: &[u8]) {
    assert_clean(top);
    assert!(contents("qcow2", top) == model, "QEMU reads something else");
}

#[test]
fn every_cluster_size_holds_what_was_written() {
    for (n, bits) in (9..=21).enumerate() {
        let folder = Folder::new();
        let top = folder.path("top.qcow2");
        let cluster = 1u64 << bits;
        // Several L2 tables where they are small, several clusters where they are not.
        let size = (cluster * 9 + 512).max(200 * 1024);
        let options = format!("cluster_size={cluster}");
        qemu_img(&[
            "create",
            "-q",
            "-f",
            "qcow2",
            "-o",
            &options,
            text(&top),
            &size.to_string(),
        ]);
        let mut model = vec![0; size as usize];
        let longest = (cluster * 3).clamp(8192, 200_000);
        let count = if bits > 16 { 50 } else { 100 };
        exercise(
            &spec(&top, Format::Qcow2, &[]),
            &mut model,
            count,
            1 + n as u64,
            longest,
        );
        judge(&top, &model);
    }
}

#[test]
fn every_refcount_width_counts() {
    for (n, bits) in [1, 2, 4, 8, 16, 32, 64].into_iter().enumerate() {
        let folder = Folder::new();
        let top = folder.path("top.qcow2");
        // Small clusters, so that refcount blocks are added and, for wide counts, the table grows.
        let options = format!("cluster_size=512,refcount_bits={bits}");
        let size = 3u64 << 20;
        qemu_img(&[
            "create",
            "-q",
            "-f",
            "qcow2",
            "-o",
            &options,
            text(&top),
            "3M",
        ]);
        let mut model = vec![0; size as usize];
        exercise(
            &spec(&top, Format::Qcow2, &[]),
            &mut model,
            150,
            77 + n as u64,
            120_000,
        );
        let mut disk = TestDisk::open(&spec(&top, Format::Qcow2, &[]));
        let bytes: Vec<u8> = (0..size).map(|n| (n / 512) as u8).collect();
        disk.write(0, &bytes);
        disk.close();
        judge(&top, &bytes);
    }
}

#[test]
fn an_overlay_over_a_raw_base_of_odd_length_holds_what_was_written() {
    for (options, cache) in [
        ("compat=1.1", Cache::Buffered),
        ("compat=0.10", Cache::Buffered),
        ("compat=1.1,cluster_size=4k", Cache::Direct),
        ("compat=0.10,cluster_size=1k", Cache::Direct),
    ] {
        let folder = if cache == Cache::Direct {
            Folder::on_disk()
        } else {
            Folder::new()
        };
        let base = folder.path("base.raw");
        let mut model: Vec<u8> = (0..300_000u32 / 512 * 512 + 1536)
            .map(|n| (n / 131) as u8 | 1)
            .collect();
        std::fs::write(&base, &model).unwrap();
        model.resize(1 << 20, 0);
        let top = overlay(&folder, options, &base, "raw", model.len() as u64);
        let mut spec = spec(&top, Format::Qcow2, &[layer(&base, Format::Raw)]);
        spec.top.cache = cache;
        exercise(&spec, &mut model, 250, 5, 90_000);
        judge(&top, &model);
    }
}

#[test]
fn a_chain_of_three_with_a_longer_base_holds_what_was_written() {
    let folder = Folder::new();
    let base = folder.path("base.qcow2");
    let middle = folder.path("middle.qcow2");
    qemu_img(&["create", "-q", "-f", "qcow2", text(&base), "2M"]);
    qemu_io("qcow2", &base, &["write -P 0xaa 0 2M"]);
    qemu_img(&[
        "create",
        "-q",
        "-f",
        "qcow2",
        "-o",
        "cluster_size=8k",
        "-F",
        "qcow2",
        "-b",
        text(&base),
        text(&middle),
        "700k",
    ]);
    qemu_io(
        "qcow2",
        &middle,
        &["write -P 0xbb 100k 50k", "write -z 200k 80k"],
    );
    let top = overlay(&folder, "cluster_size=32k", &middle, "qcow2", 1 << 20);
    let mut model = vec![0xaa; 700 << 10];
    model[100 << 10..150 << 10].fill(0xbb);
    model[200 << 10..280 << 10].fill(0);
    model.resize(1 << 20, 0);
    let layers: Vec<Layer> = vec![layer(&middle, Format::Qcow2), layer(&base, Format::Qcow2)];
    exercise(
        &spec(&top, Format::Qcow2, &layers),
        &mut model,
        300,
        9,
        100_000,
    );
    judge(&top, &model);
}

#[test]
fn a_direct_overlay_takes_requests_of_any_alignment() {
    let folder = Folder::on_disk();
    let top = folder.path("top.qcow2");
    qemu_img(&["create", "-q", "-f", "qcow2", text(&top), "3M"]);
    let mut spec = spec(&top, Format::Qcow2, &[]);
    spec.top.cache = Cache::Direct;
    let mut model = vec![0; 3 << 20];
    exercise(&spec, &mut model, 400, 21, 300_000);
    judge(&top, &model);
}

#[test]
fn a_direct_raw_image_of_odd_length_keeps_its_length() {
    let folder = Folder::on_disk();
    let top = folder.path("top.raw");
    let mut model: Vec<u8> = (0..(1u32 << 20) + 1536).map(|n| (n / 131) as u8).collect();
    std::fs::write(&top, &model).unwrap();
    let mut spec = spec(&top, Format::Raw, &[]);
    spec.top.cache = Cache::Direct;
    exercise(&spec, &mut model, 300, 33, 300_000);
    let end = model.len() as u64 - 700;
    let mut disk = TestDisk::open(&spec);
    disk.fill(end, 700, 0x77);
    disk.close();
    model[end as usize..].fill(0x77);
    assert!(std::fs::read(&top).unwrap() == model);
}

#[test]
fn an_image_with_an_internal_snapshot_keeps_both_states() {
    for options in ["cluster_size=64k", "cluster_size=1k,refcount_bits=8"] {
        let folder = Folder::new();
        let top = folder.path("top.qcow2");
        qemu_img(&[
            "create",
            "-q",
            "-f",
            "qcow2",
            "-o",
            options,
            text(&top),
            "1M",
        ]);
        qemu_io("qcow2", &top, &["write -P 0x11 0 600k"]);
        qemu_img(&["snapshot", "-c", "before", text(&top)]);
        let mut before = vec![0x11; 600 << 10];
        before.resize(1 << 20, 0);
        let mut model = before.clone();
        exercise(&spec(&top, Format::Qcow2, &[]), &mut model, 200, 3, 100_000);
        judge(&top, &model);
        qemu_img(&["snapshot", "-a", "before", text(&top)]);
        judge(&top, &before);
    }
}

#[test]
fn compressed_clusters_are_read_and_can_be_overwritten_in_part() {
    for options in [
        "compression_type=zlib",
        "compression_type=zstd",
        "compression_type=zlib,cluster_size=4k",
        "compression_type=zstd,cluster_size=1M",
        "compression_type=zstd,cluster_size=64k,extended_l2=on",
    ] {
        let folder = Folder::new();
        let source = folder.path("source.raw");
        let top = folder.path("top.qcow2");
        let mut model: Vec<u8> = (0..2u32 << 20)
            .map(|n| ((n / 4096) ^ (n % 251)) as u8)
            .collect();
        std::fs::write(&source, &model).unwrap();
        qemu_img(&[
            "convert",
            "-c",
            "-f",
            "raw",
            "-O",
            "qcow2",
            "-o",
            options,
            text(&source),
            text(&top),
        ]);
        exercise(&spec(&top, Format::Qcow2, &[]), &mut model, 120, 8, 100_000);
        judge(&top, &model);
    }
}

#[test]
fn images_with_subclusters_hold_what_was_written() {
    for (n, bits) in [14, 16, 17, 21].into_iter().enumerate() {
        let folder = Folder::new();
        let size = (5u64 << bits).max(1 << 20) + 512;
        let options = format!("extended_l2=on,cluster_size={}", 1u64 << bits);
        let base = folder.path("base.raw");
        let mut model: Vec<u8> = (0..700_000u32 / 512 * 512)
            .map(|n| (n / 131) as u8 | 1)
            .collect();
        std::fs::write(&base, &model).unwrap();
        model.resize(size as usize, 0);
        let top = overlay(&folder, &options, &base, "raw", size);
        let spec = spec(&top, Format::Qcow2, &[layer(&base, Format::Raw)]);
        exercise(&spec, &mut model, 200, 50 + n as u64, 60_000);
        judge(&top, &model);
        // QEMU goes on where we were, with a snapshot in between, and we where it was.
        qemu_img(&["snapshot", "-c", "s", text(&top)]);
        let before = model.clone();
        qemu_io(
            "qcow2",
            &top,
            &["write -P 0x77 100000 3000", "write -z 300000 70000"],
        );
        model[100_000..103_000].fill(0x77);
        model[300_000..370_000].fill(0);
        exercise(&spec, &mut model, 150, 90 + n as u64, 60_000);
        judge(&top, &model);
        qemu_img(&["snapshot", "-a", "s", text(&top)]);
        judge(&top, &before);
    }
}

#[test]
fn discarded_space_comes_back_to_the_host() {
    let folder = Folder::new();
    let top = folder.path("top.qcow2");
    qemu_img(&["create", "-q", "-f", "qcow2", text(&top), "64M"]);
    let mut disk = TestDisk::open(&spec(&top, Format::Qcow2, &[]));
    for n in 0..32 {
        disk.fill(n << 20, 1 << 20, 0x5a);
    }
    disk.flush();
    let full = allocated(&top);
    assert!(full >= 32 << 20, "{full}");
    disk.discard(0, 31 << 20);
    disk.flush();
    let rest = allocated(&top);
    assert!(rest < 2 << 20, "{rest} bytes are left of {full}");
    disk.close();
    assert_clean(&top);
}

#[test]
fn writing_and_discarding_for_long_never_grows_the_file_past_the_disk() {
    let folder = Folder::new();
    let top = folder.path("top.qcow2");
    let size = 16u64 << 20;
    qemu_img(&["create", "-q", "-f", "qcow2", text(&top), "16M"]);
    let mut disk = TestDisk::open(&spec(&top, Format::Qcow2, &[]));
    let mut random = Random(4);
    for _ in 0..3000 {
        let offset = random.below(size / 65536) * 65536;
        if random.below(2) == 0 {
            disk.fill(offset, 65536, 1);
        } else {
            disk.discard(offset, 65536);
        }
    }
    disk.close();
    assert_clean(&top);
    let length = std::fs::metadata(&top).unwrap().len();
    assert!(length <= size + (1 << 20), "{length}");
}

#[test]
fn very_many_random_operations_never_confuse_the_states_of_clusters() {
    let text_of = std::env::var("BLOCK_OPERATIONS").ok();
    let count: u32 = text_of.and_then(|text| text.parse().ok()).unwrap_or(6000);
    // Every step of a cluster from one state to another is audited; a wrong one ends all writing.
    for (n, options) in [
        "cluster_size=4k",
        "cluster_size=512,refcount_bits=1",
        "compat=0.10",
    ]
    .into_iter()
    .enumerate()
    {
        let folder = Folder::new();
        let top = folder.path("top.qcow2");
        qemu_img(&[
            "create",
            "-q",
            "-f",
            "qcow2",
            "-o",
            options,
            text(&top),
            "512k",
        ]);
        let spec = spec(&top, Format::Qcow2, &[]);
        let mut model = vec![0; 512 << 10];
        let (mut left, mut seed) = (count / 3, 1000 * (n as u64 + 1));
        while left > 0 {
            let now = left.min(20_000);
            exercise(&spec, &mut model, now, seed, 20_000);
            judge(&top, &model);
            left -= now;
            seed += 1;
        }
    }
}

#[test]
fn a_direct_image_takes_requests_of_many_odd_pieces() {
    let folder = Folder::on_disk();
    let top = folder.path("top.qcow2");
    qemu_img(&["create", "-q", "-f", "qcow2", text(&top), "1M"]);
    let mut spec = spec(&top, Format::Qcow2, &[]);
    spec.top.cache = Cache::Direct;
    let mut disk = TestDisk::open(&spec);
    let mut model = vec![0u8; 1 << 20];
    let mut random = Random(5);
    for n in 0..60u64 {
        // 512-byte requests as the guest's sectors are, in pieces of any length at any address.
        let sectors = 1 + random.below(16);
        let offset = random.below((1 << 20) / 512 - sectors) * 512;
        let length = (sectors * 512) as usize;
        let range = offset as usize..offset as usize + length;
        let memory = Arc::new(
            (0..length + 64)
                .map(|_| AtomicU8::new(n as u8 + 1))
                .collect::<Vec<_>>(),
        );
        let mut slices = Vec::new();
        let mut at = 0;
        while at < length {
            let piece = (1 + random.below(900) as usize).min(length - at);
            slices.push(RawSlice::new(
                memory[at + 1..].as_ptr().cast_mut().cast(),
                piece,
            ));
            at += piece;
        }
        // SAFETY: the slices lie in `memory`, which the buffers own, and whose atomics may be changed by others.
        let buffers = unsafe { Buffers::from_raw(slices, Arc::clone(&memory) as _) };
        if n % 3 == 2 {
            disk.run(Op::Read { offset, buffers }).unwrap();
            let seen = memory[1..=length]
                .iter()
                .map(|byte| byte.load(Ordering::Relaxed));
            assert!(seen.eq(model[range].iter().copied()), "request {n}");
        } else {
            disk.run(Op::Write { offset, buffers }).unwrap();
            model[range].fill(n as u8 + 1);
        }
    }
    disk.close();
    judge(&top, &model);
}

#[test]
fn small_writes_with_flushes_do_not_grow_the_file() {
    let folder = Folder::new();
    let top = folder.path("top.qcow2");
    qemu_img(&["create", "-q", "-f", "qcow2", text(&top), "16M"]);
    let mut disk = TestDisk::open(&spec(&top, Format::Qcow2, &[]));
    disk.fill(0, 1 << 20, 1);
    disk.flush();
    let length = std::fs::metadata(&top).unwrap().len();
    for n in 0..5000u64 {
        disk.fill(n % 256 * 4096, 4096, n as u8);
        disk.flush();
    }
    assert_eq!(std::fs::metadata(&top).unwrap().len(), length);
    disk.close();
    assert_clean(&top);
}

#[test]
fn a_vast_disk_of_tiny_clusters_outgrows_its_first_refcount_table() {
    let folder = Folder::new();
    let top = folder.path("top.qcow2");
    qemu_img(&[
        "create",
        "-q",
        "-f",
        "qcow2",
        "-o",
        "cluster_size=512,refcount_bits=64",
        text(&top),
        "20M",
    ]);
    let mut disk = TestDisk::open(&spec(&top, Format::Qcow2, &[]));
    for n in 0..12 {
        disk.fill(n << 20, 1 << 20, n as u8 + 1);
    }
    disk.close();
    assert_clean(&top);
    let seen = contents("qcow2", &top);
    for n in 0..12usize {
        assert!(
            seen[n << 20..(n + 1) << 20]
                .iter()
                .all(|b| *b == n as u8 + 1)
        );
    }
}
