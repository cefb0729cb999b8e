//! Cases that gave trouble in some engine, each made with QEMU's tools and compared with them.
//!
//! | case | test |
//! |---|---|
//! | write-zeroes over a backing | `zeroes_over_a_backing_read_zero_and_neighbours_keep_the_base` |
//! | discard over a backing, both versions | `a_discard_never_exposes_the_base` |
//! | base of odd length, COW at its tail | `copy_on_write_at_the_tail_of_a_base_of_odd_length_copies_the_tail_and_zeros` |
//! | relative backing path | `a_header_named_chain_is_relative_to_the_image_not_to_the_working_directory` |
//! | loops, a chain of 40 | `a_loop_and_a_chain_that_is_too_deep_are_refused` |
//! | all refcount widths, all cluster sizes | `model.rs`: `every_refcount_width_counts`, `every_cluster_size_holds_what_was_written` |
//! | compressed clusters overwritten in part | `model.rs`: `compressed_clusters_are_read_and_can_be_overwritten_in_part` |
//! | killed writer with lazy refcounts | `refcounts_that_a_killed_lazy_writer_left_behind_are_put_right_before_the_first_write` |
//! | unknown feature bits | `unknown_incompatible_bits_are_refused_and_other_unknown_bits_are_not` |
//! | an L2 entry that points at the L1 table | `a_guest_cluster_that_points_at_metadata_is_never_written` |
//! | hostile headers | `a_hostile_header_is_refused_before_memory_is_taken`; `hostile.rs` |
//! | internal snapshot, then write and discard | `model.rs`: `an_image_with_an_internal_snapshot_keeps_both_states` |
//! | grow over an L1 boundary, shrink | `power_cut`: `no_cut_harms_a_disk_that_grows`, `…_is_made_smaller`; `jobs.rs` |
//! | discard returns host blocks; no growth | `model.rs`: `discarded_space_comes_back_to_the_host`, `writing_and_discarding_for_long_…` |
//! | extended L2 | `a_small_write_to_an_image_with_subclusters_takes_one_subcluster`; `model.rs` |
//! | 5000 × (write 4k, flush) | `model.rs`: `small_writes_with_flushes_do_not_grow_the_file` |
//! | four submitters | `races.rs`: `four_submitters_of_allocating_writes_and_flushes_leave_a_sound_image` |
//! | failpoint between unmap and punch | `power_cut`: `a_cluster_is_not_used_again_before_its_hole_is_punched` |
//! | 10⁶ random operations, audited | `model.rs`: `very_many_random_operations_never_confuse_the_states_of_clusters` |
//! | nth call fails, ENOSPC | `power_cut::failures` |
//! | O_DIRECT, 512-byte requests, odd pieces | `model.rs`: `a_direct_image_takes_requests_of_many_odd_pieces` |

mod common;

use common::{
    Folder, TestDisk, assert_clean, check, contents, layer, patch, qemu_img, qemu_io, refusal,
    spec, text,
};
use drover_block::{Backing, Cache, Disk, DiskSpec, Format, IoError, image};

const K: u64 = 1024;

fn all(bytes: &[u8], value: u8) -> bool {
    bytes.iter().all(|byte| *byte == value)
}

/// A base of 1 MiB full of 0xaa under an overlay of the same size.
fn pair(folder: &Folder, options: &str) -> DiskSpec {
    let base = folder.path("base.qcow2");
    let top = folder.path("top.qcow2");
    qemu_img(&["create", "-q", "-f", "qcow2", text(&base), "1M"]);
    qemu_io("qcow2", &base, &["write -P 0xaa 0 1M"]);
    qemu_img(&[
        "create",
        "-q",
        "-f",
        "qcow2",
        "-o",
        options,
        "-F",
        "qcow2",
        "-b",
        text(&base),
        text(&top),
    ]);
    spec(&top, Format::Qcow2, &[layer(&base, Format::Qcow2)])
}

#[test]
fn zeroes_over_a_backing_read_zero_and_neighbours_keep_the_base() {
    for unmap in [false, true] {
        let folder = Folder::new();
        let spec = pair(&folder, "compat=1.1");
        let mut disk = TestDisk::open(&spec);
        disk.zero(0, 64 * K, unmap);
        disk.zero(128 * K, 4 * K, unmap);
        disk.close();
        assert_clean(&spec.top.path);
        let seen = contents("qcow2", &spec.top.path);
        assert!(all(&seen[..65536], 0) && all(&seen[65536..128 << 10], 0xaa));
        assert!(all(&seen[128 << 10..132 << 10], 0) && all(&seen[132 << 10..], 0xaa));
    }
}

#[test]
fn a_discard_never_exposes_the_base() {
    for (options, expected) in [("compat=1.1", 0), ("compat=0.10", 0xbb)] {
        let folder = Folder::new();
        let spec = pair(&folder, options);
        qemu_io("qcow2", &spec.top.path, &["write -P 0xbb 0 128k"]);
        let mut disk = TestDisk::open(&spec);
        disk.discard(0, 64 * K);
        assert!(all(&disk.read(0, 65536), expected), "{options}");
        disk.close();
        assert_clean(&spec.top.path);
        let seen = contents("qcow2", &spec.top.path);
        assert!(all(&seen[..65536], expected) && all(&seen[65536..128 << 10], 0xbb));
    }
}

#[test]
fn copy_on_write_at_the_tail_of_a_base_of_odd_length_copies_the_tail_and_zeros() {
    let folder = Folder::new();
    let base = folder.path("base.raw");
    let top = folder.path("top.qcow2");
    std::fs::write(&base, vec![0xaa; 65536 + 1536]).unwrap();
    qemu_img(&[
        "create",
        "-q",
        "-f",
        "qcow2",
        "-F",
        "raw",
        "-b",
        text(&base),
        text(&top),
        "1M",
    ]);
    let mut disk = TestDisk::open(&spec(&top, Format::Qcow2, &[layer(&base, Format::Raw)]));
    disk.fill(66048, 512, 0xbb);
    disk.close();
    assert_clean(&top);
    let seen = contents("qcow2", &top);
    assert!(all(&seen[..66048], 0xaa) && all(&seen[66048..66560], 0xbb));
    assert!(all(&seen[66560..67072], 0xaa) && all(&seen[67072..], 0));
}

#[test]
fn opening_and_reading_changes_no_byte() {
    let folder = Folder::new();
    let spec = pair(&folder, "compat=1.1");
    qemu_img(&["bitmap", "--add", text(&spec.top.path), "b0"]);
    let before = std::fs::read(&spec.top.path).unwrap();
    for read_only in [true, false] {
        let mut disk = TestDisk::open(&DiskSpec {
            read_only,
            ..spec.clone()
        });
        assert!(all(&disk.read(0, 1 << 20), 0xaa));
        disk.flush();
        disk.close();
        assert!(std::fs::read(&spec.top.path).unwrap() == before);
    }
}

#[test]
fn a_bitmap_that_writes_make_stale_is_switched_off_before_the_first_write() {
    let folder = Folder::new();
    let spec = pair(&folder, "compat=1.1");
    qemu_img(&["bitmap", "--add", text(&spec.top.path), "b0"]);
    assert_eq!(
        std::fs::read(&spec.top.path).unwrap()[95],
        1,
        "QEMU sets the autoclear bit"
    );
    assert_clean(&spec.top.path);
    let mut disk = TestDisk::open(&spec);
    disk.fill(0, 512, 1);
    assert_eq!(std::fs::read(&spec.top.path).unwrap()[88..96], [0; 8]);
    disk.close();
    assert_eq!(check(&spec.top.path).1, 0);
}

#[test]
fn unknown_incompatible_bits_are_refused_and_other_unknown_bits_are_not() {
    let folder = Folder::new();
    let spec = pair(&folder, "compat=1.1");
    let top = &spec.top.path;
    patch(top, 72, &[0x40, 0, 0, 0, 0, 0, 0, 0]);
    assert!(refusal(&spec).contains("incompatible feature bit 62"));
    patch(top, 72, &4u64.to_be_bytes());
    assert!(refusal(&spec).contains("external data file"));
    patch(top, 72, &[0; 8]);
    patch(top, 80, &[0x40, 0, 0, 0, 0, 0, 0, 0]);
    let mut disk = TestDisk::open(&spec);
    disk.fill(0, 512, 1);
    disk.close();
    let header = std::fs::read(top).unwrap();
    assert_eq!(header[80], 0x40, "an unknown compatible bit is kept");
    assert_clean(top);
}

#[test]
fn a_small_write_to_an_image_with_subclusters_takes_one_subcluster() {
    let folder = Folder::new();
    let base = folder.path("base.raw");
    let top = folder.path("top.qcow2");
    std::fs::write(&base, vec![0xaa; 1 << 20]).unwrap();
    let options = image::CreateOptions {
        cluster_size: 128 * K,
        extended_l2: true,
        backing: Some((base.clone(), Format::Raw)),
        ..image::CreateOptions::new(1 << 20)
    };
    image::create_qcow2(&top, &options).unwrap();
    assert_clean(&top);
    assert!(
        image::info(&top, Format::Qcow2)
            .unwrap()
            .qcow2
            .unwrap()
            .extended_l2
    );
    let mut disk = TestDisk::open(&spec(&top, Format::Qcow2, &[layer(&base, Format::Raw)]));
    disk.fill(256 * K + 5000, 100, 1);
    disk.zero(512 * K, 128 * K, false);
    disk.fill(512 * K + 9000, 100, 2);
    disk.close();
    let map = qemu_img(&["map", "-f", "qcow2", "--output=json", text(&top)]);
    assert!(
        map.contains("\"start\": 266240, \"length\": 4096, \"depth\": 0"),
        "{map}"
    );
    assert_clean(&top);
    let seen = contents("qcow2", &top);
    let at = 256 * 1024 + 5000;
    assert!(all(&seen[..at], 0xaa) && all(&seen[at..at + 100], 1));
    assert!(all(&seen[at + 100..512 << 10], 0xaa) && all(&seen[512 << 10..533_288], 0));
    assert!(all(&seen[640 << 10..], 0xaa));
}

#[test]
fn an_encrypted_image_is_refused_by_name() {
    let folder = Folder::new();
    let spec = pair(&folder, "compat=1.1");
    patch(&spec.top.path, 32, &2u32.to_be_bytes());
    assert!(refusal(&spec).contains("encryption"));
}

#[test]
fn a_corrupt_image_is_read_but_not_written() {
    let folder = Folder::new();
    let spec = pair(&folder, "compat=1.1");
    patch(&spec.top.path, 72, &2u64.to_be_bytes());
    let message = refusal(&spec);
    assert!(
        message.contains("corrupt") && message.contains("repair"),
        "{message}"
    );
    let mut disk = TestDisk::open(&DiskSpec {
        read_only: true,
        ..spec
    });
    assert!(all(&disk.read(0, 1 << 20), 0xaa));
}

#[test]
fn refcounts_that_a_killed_lazy_writer_left_behind_are_put_right_before_the_first_write() {
    for options in [
        "lazy_refcounts=on",
        "lazy_refcounts=on,cluster_size=4k,refcount_bits=1",
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
        common::try_qemu_io("qcow2", &top, &["write -P 0x77 0 128k", "flush", "abort"]);
        let before = std::fs::read(&top).unwrap();
        assert_eq!(before[79], 1, "QEMU left the image dirty");
        assert!(check(&top).1 > 0, "and its refcounts wrong");
        let spec = spec(&top, Format::Qcow2, &[]);
        for read_only in [true, false] {
            let mut disk = TestDisk::open(&DiskSpec {
                read_only,
                ..spec.clone()
            });
            assert!(all(&disk.read(0, 128 << 10), 0x77));
            disk.close();
            assert!(std::fs::read(&top).unwrap() == before, "nobody has written");
        }
        let mut disk = TestDisk::open(&spec);
        disk.fill(128 * K, 65536, 1);
        disk.fill(0, 4096, 2);
        disk.close();
        assert_clean(&top);
        let seen = contents("qcow2", &top);
        assert!(all(&seen[..4096], 2) && all(&seen[4096..128 << 10], 0x77));
        assert!(all(&seen[128 << 10..192 << 10], 1) && all(&seen[192 << 10..], 0));
    }
}

#[test]
fn a_guest_cluster_that_points_at_metadata_is_never_written() {
    for target in [0u64, 0x1_0000, 0x2_0000, 0x3_0000, 0x4_0000] {
        let folder = Folder::new();
        let top = folder.path("top.qcow2");
        qemu_img(&["create", "-q", "-f", "qcow2", text(&top), "1M"]);
        // Guest cluster 0 lies at 0x5_0000; header, refcount table, refcount block, L1 and L2 table before it.
        qemu_io("qcow2", &top, &["write -P 1 0 64k"]);
        let mut entry = target;
        if target == 0 {
            // An offset of zero would be "unallocated": the header can only be hit by a cluster that straddles nothing.
            entry = 0x1_0000;
        }
        patch(&top, 0x4_0000, &(entry | 1 << 63).to_be_bytes());
        let before = std::fs::read(&top).unwrap();
        let mut disk = TestDisk::open(&spec(&top, Format::Qcow2, &[]));
        let error = disk.try_write(0, &[0xff; 512]).unwrap_err();
        assert!(matches!(error, IoError::Corrupt { .. }), "{error}");
        assert!(matches!(
            disk.try_write(65536, &[0xff; 512]),
            Err(IoError::Stopped(_))
        ));
        assert!(disk.run(drover_block::Op::Flush).is_err());
        drop(disk);
        let after = std::fs::read(&top).unwrap();
        assert_eq!(after[79], 2, "the image is marked corrupt");
        assert!(before[80..] == after[80..], "nothing else has changed");
    }
}

#[test]
fn metadata_that_overlaps_metadata_is_refused_for_writing() {
    let folder = Folder::new();
    let top = folder.path("top.qcow2");
    qemu_img(&["create", "-q", "-f", "qcow2", text(&top), "1M"]);
    patch(&top, 0x3_0000, &(0x1_0000u64 | 1 << 63).to_be_bytes());
    let message = refusal(&spec(&top, Format::Qcow2, &[]));
    assert!(message.contains("overlaps the refcount table"), "{message}");
}

#[test]
fn discarding_a_cluster_that_points_at_metadata_does_not_destroy_it() {
    let folder = Folder::new();
    let top = folder.path("top.qcow2");
    qemu_img(&["create", "-q", "-f", "qcow2", text(&top), "1M"]);
    qemu_io("qcow2", &top, &["write -P 1 0 128k"]);
    let before = std::fs::read(&top).unwrap();
    patch(&top, 0x4_0000, &(0x3_0000u64 | 1 << 63).to_be_bytes());
    let mut disk = TestDisk::open(&spec(&top, Format::Qcow2, &[]));
    disk.discard(0, 65536);
    assert!(disk.run(drover_block::Op::Flush).is_err());
    drop(disk);
    let after = std::fs::read(&top).unwrap();
    assert!(
        before[0x3_0000..0x4_0000] == after[0x3_0000..0x4_0000],
        "the L1 table is untouched"
    );
}

#[test]
fn wild_offsets_and_garbage_are_io_errors() {
    let folder = Folder::new();
    let top = folder.path("top.qcow2");
    let source = folder.path("source.raw");
    std::fs::write(&source, vec![7; 1 << 20]).unwrap();
    qemu_img(&[
        "convert",
        "-c",
        "-f",
        "raw",
        "-O",
        "qcow2",
        text(&source),
        text(&top),
    ]);
    let bytes = std::fs::read(&top).unwrap();
    let l1 = u64::from_be_bytes(bytes[40..48].try_into().unwrap()) as usize;
    let l2 = u64::from_be_bytes(bytes[l1..l1 + 8].try_into().unwrap()) & !(1 << 63);
    let compressed = u64::from_be_bytes(bytes[l2 as usize..l2 as usize + 8].try_into().unwrap());
    let data = compressed & ((1 << 54) - 1);
    patch(&top, data, &[0xff; 64]);
    for (n, entry) in [
        (1, 1u64 << 50 | 1 << 63),
        (2, 0x200 | 1 << 63),
        (3, (1 << 62) | (1 << 53)),
        (4, !0),
    ] {
        patch(&top, l2 + n * 8, &entry.to_be_bytes());
    }
    let mut disk = TestDisk::open(&spec(&top, Format::Qcow2, &[]));
    for n in 0..5 {
        let error = disk.try_read(n * 65536, 512).unwrap_err();
        assert!(
            matches!(error, IoError::Corrupt { .. }),
            "cluster {n}: {error}"
        );
    }
    assert!(all(&disk.read(5 * 65536, 512), 7));
    assert!(disk.try_write(65536, &[1; 512]).is_err());
    disk.fill(6 * 65536, 512, 1);
}

#[test]
fn tables_past_the_end_of_the_file_are_errors_and_do_not_make_it_larger() {
    let far = 0x06d9_3022_0000u64;
    for (at, place) in [(40, "l1_table_offset"), (48, "refcount_table_offset")] {
        let folder = Folder::new();
        let top = folder.path("top.qcow2");
        qemu_img(&["create", "-q", "-f", "qcow2", text(&top), "1M"]);
        patch(&top, at, &far.to_be_bytes());
        let message = refusal(&spec(&top, Format::Qcow2, &[]));
        assert!(message.contains(place), "{message}");
    }
    // An entry of the refcount table, one of the L1 table.
    for (at, flag) in [(0x1_0000, 0), (0x3_0000, 1 << 63)] {
        let folder = Folder::new();
        let top = folder.path("top.qcow2");
        qemu_img(&["create", "-q", "-f", "qcow2", text(&top), "1M"]);
        qemu_io("qcow2", &top, &["write -P 1 0 64k"]);
        patch(&top, at, &(far | flag).to_be_bytes());
        let mut disk = TestDisk::open(&spec(&top, Format::Qcow2, &[]));
        let error = disk.try_write(128 * K, &[1; 512]).unwrap_err();
        assert!(matches!(error, IoError::Corrupt { .. }), "{error}");
        drop(disk);
        assert!(std::fs::metadata(&top).unwrap().len() < 1 << 20);
    }
}

#[test]
fn a_cluster_kept_for_zeros_past_the_end_of_the_file_is_an_error_when_it_is_written() {
    let folder = Folder::new();
    let top = folder.path("top.qcow2");
    qemu_img(&["create", "-q", "-f", "qcow2", text(&top), "1M"]);
    qemu_io("qcow2", &top, &["write -P 1 0 64k"]);
    // The first L2 entry: zero flag, COPIED, and a place 19 PiB away.
    let far = 0x004c_0000_0000_0000u64;
    patch(&top, 0x4_0000, &(far | 1 << 63 | 1).to_be_bytes());
    let mut disk = TestDisk::open(&spec(&top, Format::Qcow2, &[]));
    assert_eq!(disk.try_read(0, 512).unwrap(), [0; 512]);
    let error = disk.try_write(0, &[1; 512]).unwrap_err();
    assert!(matches!(error, IoError::Corrupt { .. }), "{error}");
    drop(disk);
    assert!(std::fs::metadata(&top).unwrap().len() < 1 << 20);
}

#[test]
fn a_hostile_header_is_refused_before_memory_is_taken() {
    let patches: [(u64, &[u8]); 9] = [
        (36, &[0xff; 4]),
        (24, &[0x7f, 0xff, 0xff, 0xff, 0xff, 0xff, 0xfe, 0]),
        (40, &[0x7f, 0xff, 0xff, 0xff, 0xff, 0xff, 0, 0]),
        (56, &[0xff; 4]),
        (48, &[0, 0xff, 0xff, 0xff, 0xff, 0xff, 0, 0]),
        (20, &[0, 0, 0, 31]),
        (60, &[0xff; 4]),
        (100, &[0xff; 4]),
        (8, &[0xff; 8]),
    ];
    for (at, bytes) in patches {
        let folder = Folder::new();
        let top = folder.path("top.qcow2");
        qemu_img(&["create", "-q", "-f", "qcow2", text(&top), "1M"]);
        patch(&top, at, bytes);
        refusal(&spec(&top, Format::Qcow2, &[]));
    }
}

#[test]
fn a_format_is_believed_and_never_guessed() {
    let folder = Folder::new();
    let inner = folder.path("inner.qcow2");
    qemu_img(&["create", "-q", "-f", "qcow2", text(&inner), "1M"]);
    // A qcow2 header in a raw image is data.
    let mut disk = TestDisk::open(&spec(&inner, Format::Raw, &[]));
    assert_eq!(&disk.read(0, 4), b"QFI\xfb");
    disk.close();
    let raw = folder.path("x.raw");
    std::fs::write(&raw, vec![0; 65536]).unwrap();
    let message = refusal(&spec(&raw, Format::Qcow2, &[]));
    assert!(
        message.contains("not a qcow2 image: bad magic 0x00000000"),
        "{message}"
    );
}

#[test]
fn a_backing_file_named_by_a_header_is_opened_only_with_permission() {
    let folder = Folder::new();
    let spec = pair(&folder, "compat=1.1");
    let bare = DiskSpec {
        backing: Backing::Explicit(vec![]),
        ..spec.clone()
    };
    let message = refusal(&bare);
    assert!(
        message.contains("names the backing file") && message.contains("backing"),
        "{message}"
    );
    // An absolute path is not beneath the image's folder.
    let allowed = DiskSpec {
        backing: Backing::FromHeader {
            cache: Cache::Buffered,
        },
        ..spec.clone()
    };
    assert!(refusal(&allowed).contains("outside of"));
    // A format that contradicts the one that is written down is a mistake.
    let mut wrong = spec.clone();
    wrong.backing = Backing::Explicit(vec![layer(&folder.path("base.qcow2"), Format::Raw)]);
    assert!(refusal(&wrong).contains("says that its backing file is qcow2"));
    let top = &spec.top.path;
    qemu_img(&[
        "rebase",
        "-q",
        "-u",
        "-F",
        "qcow2",
        "-b",
        "base.qcow2",
        text(top),
    ]);
    let mut disk = TestDisk::open(&allowed);
    assert!(all(&disk.read(0, 1 << 20), 0xaa));
    disk.close();
    for (name, why) in [
        ("nbd://host/x", "not a plain path"),
        ("json:{\"driver\":\"null-co\"}", "not a plain path"),
        ("../base.qcow2", "outside of"),
    ] {
        qemu_img(&["rebase", "-q", "-u", "-F", "qcow2", "-b", name, text(top)]);
        let message = refusal(&allowed);
        assert!(message.contains(why), "{message}");
    }
}

#[test]
fn a_header_named_chain_is_relative_to_the_image_not_to_the_working_directory() {
    let folder = Folder::new();
    std::fs::create_dir(folder.path("sub")).unwrap();
    let base = folder.path("base.qcow2");
    qemu_img(&["create", "-q", "-f", "qcow2", text(&base), "1M"]);
    qemu_io("qcow2", &base, &["write -P 0xaa 0 1M"]);
    let middle = folder.path("sub/middle.qcow2");
    qemu_img(&[
        "create",
        "-q",
        "-f",
        "qcow2",
        "-F",
        "qcow2",
        "-b",
        "../base.qcow2",
        text(&middle),
    ]);
    let top = folder.path("top.qcow2");
    qemu_img(&[
        "create",
        "-q",
        "-f",
        "qcow2",
        "-F",
        "qcow2",
        "-b",
        "sub/middle.qcow2",
        text(&top),
    ]);
    let mut disk = TestDisk::open(&DiskSpec {
        top: layer(&top, Format::Qcow2),
        backing: Backing::FromHeader {
            cache: Cache::Buffered,
        },
        read_only: false,
        discard: true,
    });
    assert!(all(&disk.read(0, 1 << 20), 0xaa));
    disk.close();
}

#[test]
fn a_loop_and_a_chain_that_is_too_deep_are_refused() {
    let folder = Folder::new();
    let name = |n: u32| format!("l{n}.qcow2");
    for n in 0..41 {
        let next = if n == 40 {
            "l0.qcow2".to_owned()
        } else {
            name(n + 1)
        };
        let path = folder.path(&name(n));
        qemu_img(&[
            "create",
            "-q",
            "-u",
            "-f",
            "qcow2",
            "-F",
            "qcow2",
            "-b",
            &next,
            text(&path),
            "1M",
        ]);
    }
    let from = |n: u32| DiskSpec {
        top: layer(&folder.path(&name(n)), Format::Qcow2),
        backing: Backing::FromHeader {
            cache: Cache::Buffered,
        },
        read_only: true,
        discard: true,
    };
    assert!(refusal(&from(0)).contains("more than 33 layers"));
    qemu_img(&[
        "rebase",
        "-q",
        "-u",
        "-F",
        "qcow2",
        "-b",
        "l1.qcow2",
        text(&folder.path("l2.qcow2")),
    ]);
    assert!(refusal(&from(1)).contains("appears twice"));
    qemu_img(&[
        "rebase",
        "-q",
        "-u",
        "-F",
        "qcow2",
        "-b",
        "l3.qcow2",
        text(&folder.path("l3.qcow2")),
    ]);
    assert!(refusal(&from(3)).contains("appears twice"));
}

#[test]
fn what_is_not_a_file_is_refused() {
    let folder = Folder::new();
    let fifo = folder.path("x.raw");
    rustix::fs::mknodat(
        rustix::fs::CWD,
        &fifo,
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR,
        0,
    )
    .unwrap();
    assert!(refusal(&spec(&fifo, Format::Raw, &[])).contains("not a regular file"));
    let missing = refusal(&spec(&folder.path("missing.raw"), Format::Raw, &[]));
    assert!(missing.contains("No such file"), "{missing}");
}

#[test]
fn requests_past_the_end_and_writes_to_a_read_only_disk_fail() {
    let folder = Folder::new();
    let spec = pair(&folder, "compat=1.1");
    let mut disk = TestDisk::open(&spec);
    assert!(matches!(
        disk.try_read((1 << 20) - 511, 512),
        Err(IoError::OutOfRange { .. })
    ));
    assert!(matches!(
        disk.try_write(u64::MAX - 10, &[0; 512]),
        Err(IoError::OutOfRange { .. })
    ));
    disk.close();
    let mut disk = TestDisk::open(&DiskSpec {
        read_only: true,
        ..spec
    });
    assert_eq!(disk.try_write(0, &[0; 512]), Err(IoError::ReadOnly));
    assert!(
        disk.run(drover_block::Op::Discard {
            offset: 0,
            length: 512
        })
        .is_err()
    );
    disk.flush();
    disk.close();
}

#[test]
fn a_disk_moves_between_threads() {
    fn assert_send<T: Send>() {}
    assert_send::<Disk>();
}
