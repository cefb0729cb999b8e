//! Overlays put over other layers, judged by QEMU's tools.

mod common;

use std::ops::ControlFlow;
use std::path::Path;

use common::{
    Folder, Random, TestDisk, assert_clean, contents, layer, qemu_img, qemu_io, spec, text,
};
use drover_block::image::{self, Monitor, NewBacking, Shrink, Unwatched};
use drover_block::{Backing, Cache, DiskSpec, Format};

const SIZE: usize = (3 << 20) + 512;

/// Two bases that differ here and there, the second shorter, and an overlay of the first made with these options.
fn scene(folder: &Folder, options: &str) -> (DiskSpec, Vec<u8>) {
    let (one, two, top) = (
        folder.path("one.raw"),
        folder.path("two.raw"),
        folder.path("top.qcow2"),
    );
    let mut random = Random(11);
    let mut bytes: Vec<u8> = (0..SIZE).map(|n| (n >> 12) as u8 | 1).collect();
    // Zeros in the first where the second has something, and the other way round.
    bytes[1 << 20..(1 << 20) + (200 << 10)].fill(0);
    std::fs::write(&one, &bytes).unwrap();
    let mut other = bytes.clone();
    other.truncate(SIZE - (700 << 10));
    for _ in 0..6 {
        let at = random.below(2 << 20) as usize;
        other[at..at + 5000].fill(0x55);
    }
    other[(1 << 20) + 4096..(1 << 20) + (100 << 10)].fill(0x66);
    other[1700 << 10..1800 << 10].fill(0);
    std::fs::write(&two, &other).unwrap();
    qemu_img(&[
        "create",
        "-q",
        "-f",
        "qcow2",
        "-o",
        options,
        "-F",
        "raw",
        "-b",
        "one.raw",
        text(&top),
        &SIZE.to_string(),
    ]);
    qemu_io(
        "qcow2",
        &top,
        &["write -P 0x22 300k 10k", "write -z 2M 128k"],
    );
    bytes[300 << 10..310 << 10].fill(0x22);
    bytes[2 << 20..(2 << 20) + (128 << 10)].fill(0);
    (
        spec(&top, Format::Qcow2, &[layer(&one, Format::Raw)]),
        bytes,
    )
}

fn over(path: &Path, format: Format) -> NewBacking {
    NewBacking {
        disk: spec(path, format, &[]),
        name: path.file_name().unwrap().into(),
    }
}

const OPTIONS: [&str; 6] = [
    "compat=1.1",
    "compat=0.10",
    "cluster_size=512",
    "cluster_size=2M",
    "cluster_size=128k,extended_l2=on",
    "refcount_bits=1",
];

#[test]
fn an_overlay_reads_the_same_over_another_base() {
    for options in OPTIONS {
        let folder = Folder::new();
        let (source, bytes) = scene(&folder, options);
        let top = &source.top.path;
        let two = folder.path("two.raw");
        image::rebase(&source, Some(&over(&two, Format::Raw)), &mut Unwatched).unwrap();
        std::fs::remove_file(folder.path("one.raw")).unwrap();
        assert_clean(top);
        assert!(contents("qcow2", top) == bytes, "{options}");
        let info = image::info(top, Format::Qcow2).unwrap().qcow2.unwrap();
        assert_eq!(info.backing_file.as_deref(), Some("two.raw"));
        assert_eq!(info.backing_format.as_deref(), Some("raw"));
        if options == "compat=1.1" {
            assert!(
                common::allocated(top) < 3 << 20,
                "what both bases have is not copied"
            );
        }
        // It goes on as a disk like any other, and growing reveals nothing.
        let now = spec(top, Format::Qcow2, &[layer(&two, Format::Raw)]);
        image::resize(&now, 4 << 20, Shrink::Refuse).unwrap();
        let mut disk = TestDisk::open(&now);
        assert!(
            disk.read(SIZE as u64, (4 << 20) - SIZE)
                .iter()
                .all(|b| *b == 0)
        );
        disk.fill(5000, 100, 1);
        disk.close();
        assert_clean(top);
    }
}

#[test]
fn an_overlay_is_rebased_to_nothing_and_back() {
    for options in OPTIONS {
        let folder = Folder::new();
        let (source, bytes) = scene(&folder, options);
        let top = &source.top.path;
        image::rebase(&source, None, &mut Unwatched).unwrap();
        let info = image::info(top, Format::Qcow2).unwrap().qcow2.unwrap();
        assert_eq!(info.backing_file, None);
        assert_clean(top);
        assert!(contents("qcow2", top) == bytes, "{options}");
        let alone = spec(top, Format::Qcow2, &[]);
        let two = folder.path("two.raw");
        image::rebase(&alone, Some(&over(&two, Format::Raw)), &mut Unwatched).unwrap();
        assert_clean(top);
        assert!(contents("qcow2", top) == bytes, "{options}");
    }
}

#[test]
fn a_disk_without_backing_gets_one_and_its_zeros_stay() {
    for options in OPTIONS {
        let folder = Folder::new();
        let (source, _) = scene(&folder, options);
        let lone = folder.path("lone.qcow2");
        qemu_img(&[
            "create",
            "-q",
            "-f",
            "qcow2",
            "-o",
            options,
            text(&lone),
            "3M",
        ]);
        qemu_io("qcow2", &lone, &["write -P 0x22 300k 10k"]);
        let before = contents("qcow2", &lone);
        let alone = spec(&lone, Format::Qcow2, &[]);
        // A chain of its own is below now, which its headers name.
        let new = NewBacking {
            disk: DiskSpec {
                backing: Backing::FromHeader {
                    cache: Cache::Buffered,
                },
                ..spec(&source.top.path, Format::Qcow2, &[])
            },
            name: "top.qcow2".into(),
        };
        image::rebase(&alone, Some(&new), &mut Unwatched).unwrap();
        assert_clean(&lone);
        assert!(contents("qcow2", &lone) == before, "{options}");
    }
}

/// Cancels a job after so many reports.
struct Impatient(u32);

impl Monitor for Impatient {
    fn progress(&mut self, _: u64, _: u64) -> ControlFlow<()> {
        if self.0 == 0 {
            return ControlFlow::Break(());
        }
        self.0 -= 1;
        ControlFlow::Continue(())
    }
}

#[test]
fn a_rebase_that_is_stopped_leaves_the_image_whole_and_is_done_again() {
    let folder = Folder::new();
    let (source, bytes) = scene(&folder, "cluster_size=4k");
    let new = over(&folder.path("two.raw"), Format::Raw);
    for patience in 0..12 {
        let stopped = image::rebase(&source, Some(&new), &mut Impatient(patience));
        assert!(stopped.unwrap_err().to_string().contains("cancelled"));
        assert_clean(&source.top.path);
        assert!(contents("qcow2", &source.top.path) == bytes);
    }
    image::rebase(&source, Some(&new), &mut Unwatched).unwrap();
    assert!(contents("qcow2", &source.top.path) == bytes);
}

#[test]
fn an_unsafe_rebase_changes_the_name_and_nothing_else() {
    let folder = Folder::new();
    let (source, bytes) = scene(&folder, "compat=1.1");
    let top = &source.top.path;
    std::fs::rename(folder.path("one.raw"), folder.path("moved.raw")).unwrap();
    let name = Path::new("moved.raw");
    image::rename_backing(&source, Some((name, Format::Raw))).unwrap();
    assert_clean(top);
    assert!(contents("qcow2", top) == bytes);
    image::rename_backing(&source, None).unwrap();
    assert_clean(top);
    let seen = contents("qcow2", top);
    assert!(seen[300 << 10..310 << 10].iter().all(|b| *b == 0x22));
    assert!(seen[..200 << 10].iter().all(|b| *b == 0));
}

#[test]
fn names_of_every_length_fit_or_are_refused_with_the_image_as_it_was() {
    let folder = Folder::new();
    for (options, most) in [("cluster_size=64k", 1023), ("cluster_size=512", 200)] {
        let (source, bytes) = scene(&folder, options);
        let top = &source.top.path;
        for length in [1, 100, 255, 1023, 1024] {
            let name = "n".repeat(length);
            let named = image::rename_backing(&source, Some((Path::new(&name), Format::Raw)));
            let info = image::info(top, Format::Qcow2).unwrap().qcow2.unwrap();
            if length <= most {
                named.unwrap();
                assert_eq!(info.backing_file, Some(name));
            } else if let Err(error) = named {
                assert!(error.to_string().contains("top.qcow2"), "{error}");
                assert_ne!(info.backing_file, Some(name));
            }
        }
        image::rename_backing(&source, Some((Path::new("one.raw"), Format::Raw))).unwrap();
        assert_clean(top);
        assert!(contents("qcow2", top) == bytes);
        std::fs::remove_file(top).unwrap();
    }
}

#[test]
fn an_image_is_not_put_over_itself_nor_over_what_is_written() {
    let folder = Folder::new();
    let (source, bytes) = scene(&folder, "compat=1.1");
    let new = over(&source.top.path, Format::Qcow2);
    let error = image::rebase(&source, Some(&new), &mut Unwatched).unwrap_err();
    assert!(
        error.to_string().contains("twice in its own chain"),
        "{error}"
    );
    let two = folder.path("two.raw");
    let writer = TestDisk::open(&spec(&two, Format::Raw, &[]));
    let error = image::rebase(&source, Some(&over(&two, Format::Raw)), &mut Unwatched).unwrap_err();
    assert!(error.to_string().contains("two.raw"), "{error}");
    drop(writer);
    let raw = spec(&two, Format::Raw, &[]);
    assert!(image::rebase(&raw, None, &mut Unwatched).is_err());
    assert!(image::rename_backing(&raw, None).is_err());
    assert!(contents("qcow2", &source.top.path) == bytes);
}
