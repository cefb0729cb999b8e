//! Deep chains: read as QEMU reads them, whatever their layers are, and at the price of a flat one.

mod common;

use common::{Folder, Random, TestDisk, contents, layer, patch, qemu_img, qemu_io, spec, text};
use drover_block::{CacheBudget, Disk, DiskOptions, DiskSpec, Format, Layer};

/// A chain of random layers: cluster sizes, subclusters, sizes of the disk, compressed clusters, zeros, a raw base of odd length.
fn random_chain(folder: &Folder, random: &mut Random, depth: usize) -> DiskSpec {
    let mut below: Option<Layer> = None;
    let mut layers = Vec::new();
    for n in (0..depth).rev() {
        let size = 300_000 + random.below(400_000);
        let path = folder.path(&format!("{n}.img"));
        if below.is_none() && random.below(2) == 0 {
            let bytes: Vec<u8> = (0..size).map(|_| random.next() as u8).collect();
            std::fs::write(&path, bytes).unwrap();
            below = Some(layer(&path, Format::Raw));
            layers.insert(0, layer(&path, Format::Raw));
            continue;
        }
        let subclusters = random.below(4) == 0;
        let bits = if subclusters {
            14 + random.below(3)
        } else {
            9 + random.below(8)
        };
        let size = size / 512 * 512;
        let options = format!(
            "cluster_size={},extended_l2={}",
            1u64 << bits,
            if subclusters { "on" } else { "off" }
        );
        let size_text = size.to_string();
        let mut arguments = vec!["create", "-q", "-f", "qcow2", "-o", &options];
        if let Some(below) = &below {
            let format = if below.format == Format::Raw {
                "raw"
            } else {
                "qcow2"
            };
            arguments.extend(["-F", format, "-b", text(&below.path)]);
        }
        arguments.extend([text(&path), &size_text]);
        qemu_img(&arguments);
        let cluster = 1u64 << bits;
        // QEMU compresses only what is not there yet.
        let packed = (0..size / cluster).filter(|_| random.below(8) == 0);
        let mut commands: Vec<String> = packed
            .map(|n| format!("write -q -c -P {n} {} {cluster}", n * cluster))
            .take(10)
            .collect();
        let others = (0..1 + random.below(20)).map(|_| {
            let (from, value) = (random.below(size), random.below(255));
            let unit = if random.below(2) == 0 { 512 } else { cluster };
            let from = from / unit * unit;
            let length = (random.below(4 * cluster) / unit * unit)
                .max(512)
                .min(size - from);
            match random.below(5) {
                0 => format!("write -q -z {from} {length}"),
                1 => format!("write -q -z -u {from} {length}"),
                _ => format!("write -q -P {value} {from} {length}"),
            }
        });
        commands.extend(others);
        let commands: Vec<&str> = commands.iter().map(String::as_str).collect();
        qemu_io("qcow2", &path, &commands);
        below = Some(layer(&path, Format::Qcow2));
        layers.insert(0, layer(&path, Format::Qcow2));
    }
    let top = layers.remove(0);
    spec(&top.path, top.format, &layers)
}

#[test]
fn random_chains_read_as_qemu_reads_them_and_go_on_to_when_they_are_written() {
    for seed in 1..=40 {
        let mut random = Random(seed * 0x9e37_79b9);
        let folder = Folder::new();
        let depth = 2 + random.below(6) as usize;
        let mut spec = random_chain(&folder, &mut random, depth);
        if spec.top.format == Format::Raw {
            continue;
        }
        let mut model = contents("qcow2", &spec.top.path);
        let size = model.len() as u64;
        let open = |spec: &DiskSpec, budget: usize| {
            let options = DiskOptions {
                cache: CacheBudget::new(budget),
                ..DiskOptions::default()
            };
            TestDisk(Disk::open_with(spec, options).unwrap())
        };
        // Read only all layers are one map; the little budget makes every piece anew.
        spec.read_only = true;
        for budget in [0, 1 << 20] {
            let mut disk = open(&spec, budget);
            assert!(disk.read(0, model.len()) == model, "seed {seed}");
            for _ in 0..30 {
                let from = random.below(size);
                let length = random.below(size - from) as usize;
                let wanted = &model[from as usize..][..length];
                assert!(
                    disk.read(from, length) == wanted,
                    "seed {seed}: {from} {length}"
                );
            }
            disk.close();
        }
        spec.read_only = false;
        let mut disk = TestDisk::open(&spec);
        for step in 0..60 {
            let from = random.below(size);
            let length = random.below((size - from).min(20_000)) as usize;
            let range = from as usize..from as usize + length;
            match random.below(4) {
                0 => {
                    disk.fill(from, length, step);
                    model[range].fill(step);
                }
                1 => {
                    disk.zero(from, length as u64, step % 2 == 0);
                    model[range].fill(0);
                }
                _ => assert!(disk.read(from, length) == model[range], "seed {seed}"),
            }
        }
        disk.close();
        common::assert_clean(&spec.top.path);
        assert!(contents("qcow2", &spec.top.path) == model, "seed {seed}");
    }
}

#[test]
fn a_chain_of_many_layers_costs_what_one_of_two_costs() {
    let folder = Folder::new();
    let path = |n: usize| folder.path(&format!("{n}.qcow2"));
    const LAYERS: usize = 32;
    for n in 0..LAYERS {
        let (file, below) = (path(n), path(n.wrapping_sub(1)));
        let mut arguments = vec!["create", "-q", "-f", "qcow2"];
        if n > 0 {
            arguments.extend(["-F", "qcow2", "-b", text(&below)]);
        }
        arguments.extend([text(&file), "8M"]);
        qemu_img(&arguments);
        let write = format!("write -q -P {} {} 64k", n + 1, n * 65536);
        qemu_io("qcow2", &file, &[&write]);
    }
    let below: Vec<_> = (0..LAYERS - 1)
        .rev()
        .map(|n| layer(&path(n), Format::Qcow2))
        .collect();
    let spec = spec(&path(LAYERS - 1), Format::Qcow2, &below);
    let mut disk = TestDisk::open(&spec);
    assert_eq!(disk.read(0, 512), [1; 512]);
    let counts = disk.0.cache_counts();
    let (hits, misses) = (counts.hits(), counts.misses());
    for n in 0..LAYERS as u64 {
        assert_eq!(disk.read(n * 65536, 512), [n as u8 + 1; 512]);
    }
    assert_eq!(counts.misses(), misses, "the map is there");
    let looks = counts.hits() - hits;
    assert!(looks <= 2 * LAYERS as u64, "{looks} tables were looked at");
    disk.close();
}

#[test]
fn a_wild_entry_deep_in_a_chain_fails_nobody_but_its_readers() {
    let folder = Folder::new();
    let path = |n: usize| folder.path(&format!("{n}.qcow2"));
    for n in 0..3 {
        let (file, below) = (path(n), path(n.wrapping_sub(1)));
        let mut arguments = vec!["create", "-q", "-f", "qcow2"];
        if n > 0 {
            arguments.extend(["-F", "qcow2", "-b", text(&below)]);
        }
        arguments.extend([text(&file), "1M"]);
        qemu_img(&arguments);
    }
    qemu_io("qcow2", &path(0), &["write -q -P 7 0 1M"]);
    let bytes = std::fs::read(path(0)).unwrap();
    let word = |at: usize| u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap());
    let l2 = word(word(40) as usize) & 0x00ff_ffff_ffff_fe00;
    // The third cluster lies far past the end of the file.
    patch(&path(0), l2 + 16, &0x8000_0100_0000_0000u64.to_be_bytes());
    let below = [
        layer(&path(1), Format::Qcow2),
        layer(&path(0), Format::Qcow2),
    ];
    let mut disk = TestDisk::open(&spec(&path(2), Format::Qcow2, &below));
    for n in 0..16 {
        let read = disk.try_read(n * 65536, 65536);
        match n {
            2 => assert!(read.unwrap_err().to_string().contains("past the end")),
            _ => assert_eq!(read.unwrap(), vec![7; 65536], "cluster {n}"),
        }
    }
    drop(disk);
}
