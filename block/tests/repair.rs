//! Damaged images repaired by us, judged by QEMU's tools.

mod common;

use std::path::Path;

use common::{
    Folder, Random, TestDisk, assert_clean, check, contents, patch, qemu_img, qemu_io, spec, text,
};
use drover_block::Format;
use drover_block::image::{self, Repair};

/// An image with data, compressed clusters and a snapshot, made with these options.
fn scene(folder: &Folder, options: &str) -> std::path::PathBuf {
    let (plain, top) = (folder.path("plain.raw"), folder.path("top.qcow2"));
    let text_bytes: Vec<u8> = (0..4u32 << 20).map(|n| (n >> 14) as u8 | 1).collect();
    std::fs::write(&plain, text_bytes).unwrap();
    let mut arguments = vec!["convert", "-f", "raw", "-O", "qcow2", "-o", options];
    // Small refcounts cannot count the compressed clusters of a cluster twice.
    if !options.contains("refcount_bits=4") {
        arguments.push("-c");
    }
    arguments.extend([text(&plain), text(&top)]);
    qemu_img(&arguments);
    qemu_io(
        "qcow2",
        &top,
        &[
            "write -P 0x11 0 700k",
            "write -z 1M 128k",
            "discard 2M 256k",
        ],
    );
    qemu_img(&["snapshot", "-c", "one", text(&top)]);
    qemu_io(
        "qcow2",
        &top,
        &["write -P 0x33 100k 300k", "write -P 0x44 3M 64k"],
    );
    std::fs::remove_file(plain).unwrap();
    top
}

const OPTIONS: [&str; 7] = [
    "compat=1.1",
    "compat=0.10",
    "cluster_size=512",
    "cluster_size=2M",
    "cluster_size=4k,refcount_bits=64",
    "refcount_bits=4,cluster_size=16k",
    "cluster_size=64k,extended_l2=on",
];

fn number(path: &Path, at: u64, bytes: usize) -> u64 {
    use std::os::unix::fs::FileExt;
    let mut buffer = [0; 8];
    let file = std::fs::File::open(path).unwrap();
    file.read_exact_at(&mut buffer[8 - bytes..], at).unwrap();
    u64::from_be_bytes(buffer)
}

/// Damages refcounts, their table or flags; which, `random` says.
fn damage(path: &Path, random: &mut Random) {
    let cluster = 1u64 << number(path, 20, 4);
    let table = number(path, 48, 8);
    let block = number(path, table, 8);
    let l1 = number(path, 40, 8);
    match random.below(6) {
        // Refcounts, some leaked, some lost.
        0 | 1 => {
            for _ in 0..1 + random.below(20) {
                let at = block + random.below(cluster.min(200));
                patch(path, at, &[random.next() as u8]);
            }
        }
        // A block that is lost altogether, or lies nowhere.
        2 => patch(path, table, &[0; 8]),
        3 => patch(path, table, &(block + 512 * 3 + 7).to_be_bytes()),
        // Flags in the L1 table.
        4 => {
            let entry = number(path, l1, 8);
            patch(path, l1, &(entry ^ 1 << 63).to_be_bytes());
        }
        // Flags in an L2 table.
        _ => {
            let l2 = number(path, l1, 8) & 0x00ff_ffff_ffff_fe00;
            let entry = number(path, l2, 8);
            patch(path, l2, &(entry ^ 1 << 63).to_be_bytes());
        }
    }
}

#[test]
fn refcounts_and_flags_are_put_right_whatever_is_wrong_with_them() {
    let mut random = Random(5);
    for options in OPTIONS {
        let folder = Folder::new();
        let sound = scene(&folder, options);
        let bytes = contents("qcow2", &sound);
        for n in 0..6 {
            let path = folder.path(&format!("{n}.qcow2"));
            std::fs::copy(&sound, &path).unwrap();
            damage(&path, &mut random);
            if n % 2 == 0 {
                damage(&path, &mut random);
            }
            let report = image::repair(&path, Format::Qcow2, Repair::All).unwrap();
            assert!(report.after.is_clean(), "{options} {n}: {report:#?}");
            assert_clean(&path);
            assert!(contents("qcow2", &path) == bytes, "{options} {n}");
            // It goes on as a disk like any other, and the snapshot is as it was.
            let mut disk = TestDisk::open(&spec(&path, Format::Qcow2, &[]));
            for _ in 0..20 {
                disk.fill(random.below(4 << 20) & !511, 512, 0x99);
            }
            disk.close();
            assert_clean(&path);
            qemu_img(&["snapshot", "-a", "one", text(&path)]);
            assert_clean(&path);
            std::fs::remove_file(path).unwrap();
        }
    }
}

#[test]
fn leaks_are_given_back_to_the_host() {
    let folder = Folder::new();
    let top = folder.path("top.qcow2");
    qemu_img(&["create", "-q", "-f", "qcow2", text(&top), "8M"]);
    qemu_io("qcow2", &top, &["write -P 1 0 4M"]);
    let bytes = contents("qcow2", &top);
    // The second half of the data loses its entries.
    let l2 = number(&top, number(&top, 40, 8), 8) & 0x00ff_ffff_ffff_fe00;
    patch(&top, l2 + 32 * 8, &[0; 32 * 8]);
    assert_eq!(check(&top), (32, 0));
    let report = image::repair(&top, Format::Qcow2, Repair::Leaks).unwrap();
    assert_eq!((report.before.leaks, report.after.leaks), (32, 0));
    assert_clean(&top);
    assert!(common::allocated(&top) < 3 << 20);
    assert!(contents("qcow2", &top)[..2 << 20] == bytes[..2 << 20]);
    let again = image::repair(&top, Format::Qcow2, Repair::Leaks).unwrap();
    assert!(!again.changed);
}

#[test]
fn contradictions_are_not_mistaken_for_leaks() {
    let folder = Folder::new();
    let top = scene(&folder, "compat=1.1");
    let table = number(&top, 48, 8);
    patch(&top, table, &[0; 8]);
    let before = std::fs::read(&top).unwrap();
    let error = image::repair(&top, Format::Qcow2, Repair::Leaks).unwrap_err();
    assert!(error.to_string().contains("--all"), "{error}");
    assert!(std::fs::read(&top).unwrap() == before);
}

#[test]
fn marks_of_damage_go_when_nothing_is_left_of_it() {
    let folder = Folder::new();
    let top = scene(&folder, "compat=1.1");
    let bytes = contents("qcow2", &top);
    for mark in [1, 2, 3] {
        patch(&top, 79, &[mark]);
        let report = image::repair(&top, Format::Qcow2, Repair::All).unwrap();
        assert!(report.changed);
        assert_eq!(number(&top, 72, 8), 0);
        assert_clean(&top);
        assert!(contents("qcow2", &top) == bytes);
    }
}

#[test]
fn an_entry_that_points_nowhere_is_left_and_told() {
    let folder = Folder::new();
    let top = scene(&folder, "compat=1.1");
    let l2 = number(&top, number(&top, 40, 8), 8) & 0x00ff_ffff_ffff_fe00;
    let entry = number(&top, l2, 8);
    patch(&top, l2, &(entry | 0x200).to_be_bytes());
    patch(&top, 79, &[2]);
    let report = image::repair(&top, Format::Qcow2, Repair::All).unwrap();
    assert_eq!(report.after.corruptions, 1, "{report:#?}");
    assert!(
        report.after.findings[0].contains(&format!("{l2:#x}")),
        "{report:#?}"
    );
    assert_eq!(number(&top, 72, 8), 2, "it stays marked");
    assert_eq!(
        number(&top, l2, 8) & !(1 << 63),
        (entry | 0x200) & !(1 << 63)
    );
}

#[test]
fn two_owners_of_one_cluster_no_longer_write_it_in_place() {
    let folder = Folder::new();
    let top = folder.path("top.qcow2");
    qemu_img(&["create", "-q", "-f", "qcow2", text(&top), "1M"]);
    qemu_io("qcow2", &top, &["write -P 1 0 64k", "write -P 2 64k 64k"]);
    let l2 = number(&top, number(&top, 40, 8), 8) & 0x00ff_ffff_ffff_fe00;
    let first = number(&top, l2, 8);
    patch(&top, l2 + 8, &first.to_be_bytes());
    let report = image::repair(&top, Format::Qcow2, Repair::All).unwrap();
    assert!(report.before.corruptions > 0 && report.after.is_clean());
    assert_clean(&top);
    qemu_io("qcow2", &top, &["write -P 3 0 64k", "read -P 1 64k 64k"]);
}

#[test]
fn our_check_and_qemus_agree_about_damage_of_any_kind() {
    let mut random = Random(77);
    for options in OPTIONS {
        let folder = Folder::new();
        let sound = scene(&folder, options);
        assert_eq!(check(&sound), (0, 0));
        for n in 0..8 {
            let path = folder.path(&format!("{n}.qcow2"));
            std::fs::copy(&sound, &path).unwrap();
            damage(&path, &mut random);
            // Compares what the two find.
            check(&path);
            std::fs::remove_file(path).unwrap();
        }
    }
}

#[test]
fn what_is_in_use_is_not_repaired() {
    let folder = Folder::new();
    let top = scene(&folder, "compat=1.1");
    let disk = TestDisk::open(&spec(&top, Format::Qcow2, &[]));
    let error = image::repair(&top, Format::Qcow2, Repair::All).unwrap_err();
    assert!(error.to_string().contains("in use"), "{error}");
    disk.close();
    assert!(image::repair(&top, Format::Raw, Repair::All).is_err());
}
