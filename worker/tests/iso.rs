//! ISO 9660 images, read back by an independent reader and by the tools that other people use.

#[path = "support/iso_reader.rs"]
mod iso_reader;

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use drover_worker::seed::iso::{IsoFile, build};
use proptest::prelude::*;

fn image(files: &BTreeMap<String, Vec<u8>>) -> Vec<u8> {
    let files: Vec<_> = files
        .iter()
        .map(|(name, contents)| IsoFile { name, contents })
        .collect();
    build("cidata", &files).unwrap()
}

/// A tool's output; the tools come with `cargo xtask setup`.
fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program)
        .args(arguments)
        .output()
        .unwrap_or_else(|error| panic!("{program}: {error}: run cargo xtask setup"));
    assert!(
        output.status.success(),
        "{program}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(
        output.stderr.is_empty() || program == "xorriso",
        "{program}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn written(files: &BTreeMap<String, Vec<u8>>) -> (tempfile::TempDir, String) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("seed.iso");
    std::fs::write(&path, image(files)).unwrap();
    let path = path.to_str().unwrap().to_owned();
    (folder, path)
}

fn names() -> impl Strategy<Value = String> {
    prop_oneof![
        "[a-z]{1,3}-data",
        "[a-zA-Z0-9._-]{1,64}",
        "[\u{a1}-\u{17f}\u{4e00}-\u{4fff} ]{1,24}",
    ]
    .prop_filter("a file name", |name| name != "." && name != "..")
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    #[test]
    fn any_files_read_back_in_both_trees(
        files in prop::collection::btree_map(names(), prop::collection::vec(any::<u8>(), 0..3000), 0..30)
    ) {
        let read = iso_reader::read(&image(&files)).unwrap();
        prop_assert_eq!(&read.label, "cidata");
        prop_assert_eq!(&read.joliet_label, "cidata");
        prop_assert_eq!(&read.rock_ridge, &files);
        prop_assert_eq!(&read.joliet, &files);
        for id in &read.level_1 {
            let (name, version) = id.split_once(';').unwrap();
            let (stem, extension) = name.split_once('.').unwrap();
            prop_assert!(version == "1" && (1..=8).contains(&stem.len()) && extension.len() <= 3, "{}", id);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4))]

    #[test]
    fn isoinfo_reads_any_files_byte_for_byte(
        files in prop::collection::btree_map("[a-zA-Z0-9_-]{1,60}", prop::collection::vec(any::<u8>(), 1..5000), 1..20)
    ) {
        let (_folder, path) = written(&files);
        for (name, contents) in &files {
            for tree in ["-R", "-J"] {
                let output = Command::new("isoinfo")
                    .args([tree, "-x", &format!("/{name}"), "-i", &path])
                    .output()
                    .expect("isoinfo: run cargo xtask setup");
                prop_assert_eq!(&output.stdout, contents, "{} {}", tree, name);
            }
        }
    }
}

fn seed_like() -> BTreeMap<String, Vec<u8>> {
    BTreeMap::from([
        ("user-data".to_owned(), b"#cloud-config\n{}\n".to_vec()),
        ("meta-data".to_owned(), b"instance-id: x\n".to_vec()),
        ("network-config".to_owned(), Vec::new()),
    ])
}

#[test]
fn isoinfo_finds_label_and_both_extensions_and_complains_of_nothing() {
    let (_folder, path) = written(&seed_like());
    let description = run("isoinfo", &["-d", "-i", &path]);
    for expected in [
        "Volume id: cidata",
        "Joliet with UCS level 3 found",
        "Rock Ridge signatures version 1 found",
    ] {
        assert!(description.contains(expected), "{description}");
    }
    for tree in ["-R", "-J"] {
        let listing = run("isoinfo", &[tree, "-f", "-i", &path]);
        assert_eq!(
            listing.lines().collect::<Vec<_>>(),
            ["/meta-data", "/network-config", "/user-data"],
            "{tree}"
        );
    }
    let long = run("isoinfo", &["-R", "-l", "-i", &path]);
    assert!(long.contains("-r--------"), "{long}");
}

#[test]
fn xorriso_and_libarchive_read_the_image() {
    let (folder, path) = written(&seed_like());
    let listing = run(
        "xorriso",
        &[
            "-abort_on",
            "WARNING",
            "-indev",
            &path,
            "-find",
            "/",
            "-type",
            "f",
            "-exec",
            "report_lba",
        ],
    );
    assert_eq!(listing.matches("/user-data").count(), 1, "{listing}");
    let listing = run("bsdtar", &["-tf", &path]);
    let mut names: Vec<_> = listing.lines().collect();
    names.sort_unstable();
    assert_eq!(names, [".", "meta-data", "network-config", "user-data"]);
    run(
        "bsdtar",
        &["-xf", &path, "-C", folder.path().to_str().unwrap()],
    );
    assert_eq!(
        std::fs::read(Path::new(folder.path()).join("user-data")).unwrap(),
        b"#cloud-config\n{}\n"
    );
}

#[test]
fn udev_recognises_the_label_that_cloud_init_looks_for() {
    let (_folder, path) = written(&seed_like());
    let found = run("blkid", &["-p", "-o", "export", &path]);
    assert!(
        found.contains("LABEL=cidata\n") && found.contains("TYPE=iso9660\n"),
        "{found}"
    );
}

#[test]
fn equal_files_give_equal_bytes_in_whatever_order_they_come() {
    let a = IsoFile {
        name: "a",
        contents: b"1",
    };
    let b = IsoFile {
        name: "b",
        contents: b"2",
    };
    assert_eq!(
        build("cidata", &[a, b]).unwrap(),
        build("cidata", &[b, a]).unwrap()
    );
}
