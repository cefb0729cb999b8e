//! Generated cases, in which we and QEMU's tools take turns on the same image: whatever one wrote the other reads, and both checkers
//! are content after every turn.

mod common;

use std::path::{Path, PathBuf};

use common::{
    Folder, Random, TestDisk, assert_clean, contents, layer, qemu_img, qemu_io, spec, text,
};
use drover_block::image::{self, Compat, Compression, CreateOptions, Shrink};
use drover_block::{Backing, DiskSpec, Format};

const CASES: u64 = 312;
const PARTS: u64 = 4;

/// What a case is made of.
#[derive(Clone, Debug)]
struct Case {
    number: u64,
    cluster_size: u64,
    refcount_bits: u32,
    compat: Compat,
    extended_l2: bool,
    compression: Compression,
    below: Below,
    snapshot: bool,
    made_by_qemu: bool,
    resized: bool,
    size: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Below {
    Nothing,
    /// Raw, and shorter than the disk.
    Raw,
    /// qcow2 with other clusters, of compressed ones.
    Compressed,
    /// A raw image below one with zeros and data.
    Two,
}

impl Case {
    fn new(number: u64) -> Self {
        // Seeds that differ in every bit: small ones begin alike.
        let mut random = Random((number + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        // All cluster sizes and refcount widths in turn, in every combination sooner or later.
        let bits = 9 + number % 13;
        let compat = match random.below(4) {
            // The first round has every refcount width with every cluster size, which version 2 does not.
            0 if number >= 91 => Compat::V2,
            _ => Compat::V3,
        };
        let v3 = compat == Compat::V3;
        Self {
            number,
            cluster_size: 1 << bits,
            refcount_bits: if v3 { 1 << ((number / 13) % 7) } else { 16 },
            compat,
            extended_l2: v3 && bits >= 14 && random.below(3) == 0,
            compression: match random.below(2) {
                0 if v3 => Compression::Zstd,
                _ => Compression::Zlib,
            },
            below: match random.below(4) {
                0 => Below::Nothing,
                1 => Below::Raw,
                2 => Below::Compressed,
                _ => Below::Two,
            },
            // A snapshot needs refcounts that can be two.
            snapshot: (!v3 || !(number / 13).is_multiple_of(7)) && random.below(3) == 0,
            made_by_qemu: random.below(2) == 0,
            resized: random.below(3) == 0,
            size: 256 * 1024 + random.below(1024) * 512,
        }
    }

    /// Makes what lies below; the layers, nearest first, and what they read as.
    fn layers(&self, folder: &Folder, random: &mut Random) -> (Vec<(PathBuf, Format)>, Vec<u8>) {
        let length = (self.size / 3 * 2 + random.below(self.size / 2)) / 512 * 512;
        let mut bytes: Vec<u8> = (0..length).map(|n| (n / 300 % 251) as u8).collect();
        let raw = folder.path("base.raw");
        if self.below == Below::Nothing {
            return (vec![], vec![0; self.size as usize]);
        }
        std::fs::write(&raw, &bytes).unwrap();
        let middle = folder.path("middle.qcow2");
        let layers = match self.below {
            Below::Nothing | Below::Raw => vec![(raw, Format::Raw)],
            Below::Compressed => {
                let kind = match self.compression {
                    Compression::Zlib => "zlib",
                    Compression::Zstd => "zstd",
                };
                let options = format!("cluster_size=8k,compression_type={kind}");
                qemu_img(&[
                    "convert",
                    "-c",
                    "-f",
                    "raw",
                    "-O",
                    "qcow2",
                    "-o",
                    &options,
                    text(&raw),
                    text(&middle),
                ]);
                vec![(middle, Format::Qcow2)]
            }
            Below::Two => {
                let options = CreateOptions {
                    cluster_size: 4096,
                    backing: Some((raw.clone(), Format::Raw)),
                    ..CreateOptions::new(length)
                };
                image::create_qcow2(&middle, &options).unwrap();
                qemu_io(
                    "qcow2",
                    &middle,
                    &["write -P 0xee 10k 20k", "write -z 50k 40k"],
                );
                bytes[10 << 10..30 << 10].fill(0xee);
                bytes[50 << 10..90 << 10].fill(0);
                vec![(middle, Format::Qcow2), (raw, Format::Raw)]
            }
        };
        bytes.resize(self.size as usize, 0);
        (layers, bytes)
    }

    fn create(&self, top: &Path, layers: &[(PathBuf, Format)]) {
        if !self.made_by_qemu {
            let options = CreateOptions {
                cluster_size: self.cluster_size,
                refcount_bits: self.refcount_bits,
                compat: self.compat,
                extended_l2: self.extended_l2,
                backing: layers.first().cloned(),
                ..CreateOptions::new(self.size)
            };
            image::create_qcow2(top, &options).unwrap();
            return;
        }
        let compat = match self.compat {
            Compat::V2 => "0.10",
            Compat::V3 => "1.1",
        };
        let options = format!(
            "cluster_size={},refcount_bits={},compat={compat},extended_l2={}",
            self.cluster_size,
            self.refcount_bits,
            if self.extended_l2 { "on" } else { "off" }
        );
        let size = self.size.to_string();
        let mut arguments = vec!["create", "-q", "-f", "qcow2", "-o", &options];
        if let Some((path, format)) = layers.first() {
            let format = match format {
                Format::Raw => "raw",
                Format::Qcow2 => "qcow2",
            };
            arguments.extend(["-F", format, "-b", text(path)]);
        }
        arguments.extend([text(top), &size]);
        qemu_img(&arguments);
    }

    fn run(&self) {
        let folder = Folder::new();
        let mut random = Random(self.number * 7 + 3);
        let (layers, mut model) = self.layers(&folder, &mut random);
        let top = folder.path("top.qcow2");
        self.create(&top, &layers);
        let backing = layers.iter().map(|(path, format)| layer(path, *format));
        let spec = DiskSpec {
            backing: Backing::Explicit(backing.collect()),
            ..spec(&top, Format::Qcow2, &[])
        };
        self.our_turn(&spec, &mut model, &mut random);
        if self.snapshot {
            qemu_img(&["snapshot", "-c", "s", text(&top)]);
        }
        let before = model.clone();
        self.qemus_turn(&top, &mut model, &mut random);
        if self.resized && !self.snapshot {
            let size = self.size + random.below(3 * self.cluster_size + 100_000) / 512 * 512;
            // QEMU does not enlarge an overlay of version 2, which cannot hide what a longer base has there.
            let ours_only = self.compat == Compat::V2 && self.below != Below::Nothing;
            if random.below(2) == 0 || ours_only {
                image::resize(&spec, size, Shrink::Refuse).unwrap();
            } else {
                qemu_img(&["resize", "-q", "-f", "qcow2", text(&top), &size.to_string()]);
            }
            model.resize(size as usize, 0);
        }
        self.our_turn(&spec, &mut model, &mut random);
        assert_clean(&top);
        assert!(
            contents("qcow2", &top) == model,
            "QEMU reads something else"
        );
        if self.snapshot {
            qemu_img(&["snapshot", "-a", "s", text(&top)]);
            assert!(
                contents("qcow2", &top) == before,
                "the snapshot has changed"
            );
        }
    }

    fn our_turn(&self, spec: &DiskSpec, model: &mut [u8], random: &mut Random) {
        let mut disk = TestDisk::open(spec);
        assert!(disk.read(0, model.len()) == model, "we read something else");
        for _ in 0..12 {
            let (offset, length) = place(model.len(), random);
            let range = offset as usize..(offset + length) as usize;
            match random.below(6) {
                0..3 => {
                    let value = random.next() as u8;
                    disk.fill(offset, length as usize, value);
                    model[range].fill(value);
                }
                3 => {
                    disk.zero(offset, length, random.below(2) == 0);
                    model[range].fill(0);
                }
                4 => {
                    disk.discard(offset, length);
                    let seen = disk.read(offset, length as usize);
                    let mut pairs = seen.iter().zip(&model[range.clone()]);
                    assert!(pairs.all(|(new, old)| *new == 0 || new == old));
                    model[range].copy_from_slice(&seen);
                }
                _ => disk.flush(),
            }
        }
        assert!(disk.read(0, model.len()) == model, "we read something else");
        disk.close();
    }

    fn qemus_turn(&self, top: &Path, model: &mut [u8], random: &mut Random) {
        let mut commands = Vec::new();
        for _ in 0..6 {
            let (offset, length) = place(model.len(), random);
            let range = offset as usize..(offset + length) as usize;
            if random.below(3) == 0 {
                // QEMU wants whole sectors here.
                let (offset, length) = (offset / 512 * 512, (length / 512).max(1) * 512);
                let length = length.min(model.len() as u64 - offset);
                commands.push(format!("write -z {offset} {length}"));
                model[offset as usize..(offset + length) as usize].fill(0);
            } else {
                let value = random.next() as u8;
                commands.push(format!("write -P {value} {offset} {length}"));
                model[range].fill(value);
            }
        }
        let commands: Vec<&str> = commands.iter().map(String::as_str).collect();
        qemu_io("qcow2", top, &commands);
    }
}

/// A place for a request, half of the time of whole sectors.
fn place(size: usize, random: &mut Random) -> (u64, u64) {
    let size = size as u64;
    let unit = if random.below(2) == 0 { 512 } else { 1 };
    let offset = random.below(size) / unit * unit;
    let length = (1 + random.below(120_000) / unit * unit).next_multiple_of(unit);
    (offset, length.min(size - offset))
}

#[test]
fn the_cases_have_every_pair_of_what_makes_a_difference() {
    let cases: Vec<Case> = (0..CASES).map(Case::new).collect();
    let pairs = |one: &dyn Fn(&Case) -> String, other: &dyn Fn(&Case) -> String| {
        let pairs = cases.iter().map(|case| (one(case), other(case)));
        pairs.collect::<std::collections::BTreeSet<_>>().len()
    };
    let size = |case: &Case| case.cluster_size.to_string();
    let width = |case: &Case| case.refcount_bits.to_string();
    let compat = |case: &Case| format!("{:?}", case.compat);
    let below = |case: &Case| format!("{:?}", case.below);
    let rest = |case: &Case| {
        let Case {
            snapshot,
            made_by_qemu,
            resized,
            ..
        } = case;
        format!("{snapshot} {made_by_qemu} {resized}")
    };
    assert_eq!(pairs(&size, &width), 13 * 7);
    assert_eq!(pairs(&size, &compat), 13 * 2);
    assert_eq!(pairs(&size, &below), 13 * 4);
    assert_eq!(pairs(&width, &below), 7 * 4);
    assert_eq!(pairs(&compat, &below), 2 * 4);
    assert_eq!(pairs(&below, &rest), 4 * 8);
    let subclusters = |case: &Case| format!("{} {}", case.extended_l2, size(case));
    // Subclusters are at least 512 bytes.
    assert_eq!(pairs(&subclusters, &|_| String::new()), 13 + 8);
}

fn part(n: u64) {
    for number in (0..CASES).filter(|number| number % PARTS == n) {
        let case = Case::new(number);
        let result = std::panic::catch_unwind(|| case.run());
        assert!(result.is_ok(), "failed: {case:?}");
    }
}

#[test]
fn we_and_qemu_take_turns_first_quarter() {
    part(0);
}

#[test]
fn we_and_qemu_take_turns_second_quarter() {
    part(1);
}

#[test]
fn we_and_qemu_take_turns_third_quarter() {
    part(2);
}

#[test]
fn we_and_qemu_take_turns_fourth_quarter() {
    part(3);
}
