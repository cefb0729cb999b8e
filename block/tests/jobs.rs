//! Images made and resized by us, judged by QEMU's tools.

mod common;

use std::os::unix::fs::PermissionsExt;

use common::{Folder, TestDisk, assert_clean, contents, layer, qemu_img, qemu_io, spec, text};
use drover_block::Format;
use drover_block::image::{self, Compat, CreateOptions, Shrink};

#[test]
fn what_we_create_qemu_takes_for_its_own() {
    let mut cases = Vec::new();
    for bits in 9..=21 {
        for refcount_bits in [1, 16, 64] {
            cases.push((1u64 << bits, refcount_bits, Compat::V3, 100u64 << 20));
        }
    }
    cases.push((65536, 16, Compat::V2, 4 << 30));
    cases.push((65536, 16, Compat::V3, 0));
    cases.push((65536, 16, Compat::V3, 512));
    cases.push((512, 64, Compat::V3, 1 << 30));
    for (cluster_size, refcount_bits, compat, size) in cases {
        let folder = Folder::new();
        let path = folder.path("x.qcow2");
        let options = CreateOptions {
            cluster_size,
            refcount_bits,
            compat,
            ..CreateOptions::new(size)
        };
        image::create_qcow2(&path, &options).unwrap();
        assert_clean(&path);
        let seen = qemu_img(&["info", "-f", "qcow2", "--output=json", text(&path)]);
        for expected in [
            format!("\"virtual-size\": {size},"),
            format!("\"cluster-size\": {cluster_size},"),
            format!("\"refcount-bits\": {refcount_bits},"),
        ] {
            let absent = compat == Compat::V2 && expected.contains("refcount-bits");
            assert!(
                absent || seen.contains(&expected),
                "{expected} is not in {seen}"
            );
        }
        let info = image::info(&path, Format::Qcow2).unwrap();
        assert_eq!(info.size_bytes, size);
        assert_eq!(
            std::fs::metadata(&path).unwrap().permissions().mode() & 0o777,
            0o600
        );
        assert!(
            common::allocated(&path) < 1 << 20,
            "only what is not zero is written"
        );
    }
}

#[test]
fn an_overlay_names_its_base_and_format() {
    let folder = Folder::new();
    image::create_raw(&folder.path("base.raw"), 1 << 20).unwrap();
    for compat in [Compat::V2, Compat::V3] {
        let path = folder.path(&format!("{compat:?}.qcow2"));
        let backing = Some(("base.raw".into(), Format::Raw));
        image::create_qcow2(
            &path,
            &CreateOptions {
                backing,
                compat,
                ..CreateOptions::new(2 << 20)
            },
        )
        .unwrap();
        assert_clean(&path);
        let seen = qemu_img(&["info", "-f", "qcow2", "--output=json", text(&path)]);
        assert!(
            seen.contains("\"backing-filename\": \"base.raw\""),
            "{seen}"
        );
        assert!(
            seen.contains("\"backing-filename-format\": \"raw\""),
            "{seen}"
        );
        let info = image::info(&path, Format::Qcow2).unwrap().qcow2.unwrap();
        assert_eq!(info.backing_file.as_deref(), Some("base.raw"));
        assert_eq!(info.backing_format.as_deref(), Some("raw"));
    }
}

#[test]
fn nothing_is_overwritten_and_nothing_is_left_behind() {
    let folder = Folder::new();
    let path = folder.path("x.qcow2");
    std::fs::write(&path, "mine").unwrap();
    let message = image::create_qcow2(&path, &CreateOptions::new(1 << 20))
        .unwrap_err()
        .to_string();
    assert!(
        message.contains("x.qcow2: cannot create it: File exists"),
        "{message}"
    );
    assert_eq!(std::fs::read(&path).unwrap(), b"mine");
    for options in [
        CreateOptions {
            cluster_size: 3000,
            ..CreateOptions::new(1 << 20)
        },
        CreateOptions {
            refcount_bits: 3,
            ..CreateOptions::new(1 << 20)
        },
        CreateOptions {
            backing: Some(("x".repeat(1024).into(), Format::Raw)),
            ..CreateOptions::new(1 << 20)
        },
        CreateOptions {
            cluster_size: 512,
            ..CreateOptions::new(1 << 50)
        },
        CreateOptions::new(1000),
    ] {
        let other = folder.path("y.qcow2");
        image::create_qcow2(&other, &options).unwrap_err();
        assert!(!other.exists());
    }
}

#[test]
fn growing_never_reveals_a_longer_base() {
    for (options, old) in [
        ("compat=1.1", 300u64 << 10),
        ("compat=0.10", (300 << 10) + 512),
        ("cluster_size=512", 100 << 10),
    ] {
        let folder = Folder::new();
        let base = folder.path("base.raw");
        let top = folder.path("top.qcow2");
        std::fs::write(&base, vec![0xaa; 1 << 20]).unwrap();
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
            text(&base),
            text(&top),
            &old.to_string(),
        ]);
        let spec = spec(&top, Format::Qcow2, &[layer(&base, Format::Raw)]);
        // A cluster at the end that is copied before it grows.
        let mut disk = TestDisk::open(&spec);
        disk.fill(old - 512, 512, 0xbb);
        disk.close();
        image::resize(&spec, 64 << 20, Shrink::Refuse).unwrap();
        assert_clean(&top);
        let seen = contents("qcow2", &top);
        let old = old as usize;
        assert_eq!(seen.len(), 64 << 20);
        assert!(seen[..old - 512].iter().all(|b| *b == 0xaa));
        assert!(seen[old - 512..old].iter().all(|b| *b == 0xbb));
        assert!(
            seen[old..].iter().all(|b| *b == 0),
            "{options}: the base shines through"
        );
        let mut disk = TestDisk::open(&spec);
        disk.fill((64 << 20) - 512, 512, 0xcc);
        disk.close();
        assert_clean(&top);
    }
}

#[test]
fn growing_keeps_internal_snapshots() {
    for options in [
        "cluster_size=512",
        "cluster_size=512,refcount_bits=64",
        "cluster_size=64k",
    ] {
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
        qemu_io("qcow2", &top, &["write -P 0x11 0 1M"]);
        qemu_img(&["snapshot", "-c", "before", text(&top)]);
        let spec = spec(&top, Format::Qcow2, &[]);
        image::resize(&spec, 200 << 20, Shrink::Refuse).unwrap();
        assert_clean(&top);
        let mut disk = TestDisk::open(&spec);
        disk.fill(0, 1 << 20, 0x22);
        disk.fill(150 << 20, 1 << 20, 0x33);
        disk.close();
        assert_clean(&top);
        let error = image::resize(&spec, 1 << 20, Shrink::Allow)
            .unwrap_err()
            .to_string();
        assert!(error.contains("snapshots"), "{error}");
        qemu_img(&["snapshot", "-a", "before", text(&top)]);
        assert_clean(&top);
        assert!(contents("qcow2", &top).iter().all(|b| *b == 0x11));
    }
}

#[test]
fn shrinking_needs_leave_and_forgets_what_lies_past_the_end() {
    let folder = Folder::new();
    let top = folder.path("top.qcow2");
    qemu_img(&["create", "-q", "-f", "qcow2", text(&top), "8M"]);
    qemu_io("qcow2", &top, &["write -P 0x11 0 8M"]);
    let spec = spec(&top, Format::Qcow2, &[]);
    let small = (1u64 << 20) + 512;
    let error = image::resize(&spec, small, Shrink::Refuse)
        .unwrap_err()
        .to_string();
    assert!(error.contains("not allowed"), "{error}");
    image::resize(&spec, small, Shrink::Allow).unwrap();
    assert_clean(&top);
    assert!(common::allocated(&top) < 2 << 20);
    image::resize(&spec, 8 << 20, Shrink::Refuse).unwrap();
    assert_clean(&top);
    let seen = contents("qcow2", &top);
    assert!(seen[..small as usize].iter().all(|b| *b == 0x11));
    assert!(seen[small as usize..].iter().all(|b| *b == 0));
}

#[test]
fn a_raw_image_is_resized_like_a_file() {
    let folder = Folder::new();
    let path = folder.path("x.raw");
    image::create_raw(&path, 1 << 20).unwrap();
    let spec = spec(&path, Format::Raw, &[]);
    image::resize(&spec, 2 << 20, Shrink::Refuse).unwrap();
    assert_eq!(std::fs::metadata(&path).unwrap().len(), 2 << 20);
    image::resize(&spec, 1 << 20, Shrink::Refuse).unwrap_err();
    image::resize(&spec, 1 << 20, Shrink::Allow).unwrap();
    assert_eq!(std::fs::metadata(&path).unwrap().len(), 1 << 20);
}

#[test]
fn the_checker_tells_leaks_from_corruptions() {
    let folder = Folder::new();
    let top = folder.path("top.qcow2");
    qemu_img(&["create", "-q", "-f", "qcow2", text(&top), "1M"]);
    qemu_io("qcow2", &top, &["write -P 1 0 128k"]);
    // Refcount of the cluster at 0x5_0000 (guest data): 2 instead of 1 is a leak, and COPIED is wrong.
    let refcount = 0x2_0000 + 5 * 2;
    common::patch(&top, refcount, &[0, 0]);
    assert!(common::check(&top).1 > 0);
    common::patch(&top, refcount, &[0, 1]);
    assert_clean(&top);
    std::fs::File::options()
        .write(true)
        .open(&top)
        .unwrap()
        .set_len(0x10_0000)
        .unwrap();
    common::patch(&top, 0x2_0000 + 9 * 2, &[0, 1]);
    assert_eq!(common::check(&top), (1, 0));
}
