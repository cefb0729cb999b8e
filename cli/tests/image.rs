//! `drover image`: images in use are left alone, results and failures are for people and programs.

mod scene;

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::time::Duration;

use drover_block::lease::{self, LeaseRequest};
use drover_block::{Disk, DiskOptions, Format};

use scene::{OVERLAY, Scene};

/// Every command that looks at `top.qcow2` and changes nothing in it.
fn reading() -> Vec<String> {
    [
        "info top.qcow2 --format qcow2",
        "info top.qcow2 OVERLAY --chain",
        "map top.qcow2 OVERLAY",
        "check top.qcow2 --format qcow2",
        "compare top.qcow2 other.raw OVERLAY --second-format raw",
        "convert top.qcow2 made.raw OVERLAY --to raw",
        "snapshot top.qcow2 made.qcow2 --format qcow2",
        "create made2.qcow2 --format qcow2 --backing top.qcow2 --backing-format qcow2",
        "import alone.qcow2 made3.raw --format qcow2 --to raw",
        "bench top.qcow2 OVERLAY --count 10 --cache buffered",
        "rebase made4.qcow2 --format qcow2 --onto top.qcow2 --onto-format qcow2 --onto-allow-backing",
    ]
    .map(|line| line.replace("OVERLAY", OVERLAY))
    .to_vec()
}

/// Every command that changes `top.qcow2`.
fn writing() -> Vec<String> {
    [
        "resize top.qcow2 16MiB OVERLAY",
        "resize top.qcow2 1MiB OVERLAY --shrink",
        "repair top.qcow2 --format qcow2 --all",
        "repair top.qcow2 --format qcow2 --leaks",
        "commit top.qcow2 OVERLAY",
        "flatten top.qcow2 OVERLAY",
        "rebase top.qcow2 OVERLAY --onto other.raw --onto-format raw",
        "rebase top.qcow2 OVERLAY --onto-nothing",
        "rebase top.qcow2 OVERLAY --onto other.raw --onto-format raw --unsafe",
        "bench top.qcow2 OVERLAY --count 10 --cache buffered --write",
        "create top.qcow2 1MiB --format qcow2",
        "convert other.raw top.qcow2 --format raw --to qcow2",
        "import other.raw top.qcow2 --format raw --to qcow2",
    ]
    .map(|line| line.replace("OVERLAY", OVERLAY))
    .to_vec()
}

/// Asserts that a command leaves everything as it is and says why, in one line that names the file.
#[track_caller]
fn refused(scene: &Scene, line: &str, reasons: &[&str]) {
    let before = scene.files();
    let output = scene.run(line);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "{line} went through");
    assert_eq!(errors.lines().count(), 1, "{line}: {errors}");
    assert!(
        reasons.iter().any(|reason| errors.contains(reason)),
        "{line}: {errors}"
    );
    let named = ["top.qcow2", "alone.qcow2", "base.raw"];
    assert!(
        named.iter().any(|name| errors.contains(name)),
        "{line}: {errors}"
    );
    assert!(scene.files() == before, "{line} changed something");
}

/// What stands beside the overlay for commands that need another image.
fn more(scene: &Scene) {
    scene.ok("create alone.qcow2 8MiB --format qcow2");
    scene.ok("create made4.qcow2 8MiB --format qcow2");
}

#[test]
fn no_command_touches_an_image_that_is_being_written() {
    let scene = Scene::new();
    more(&scene);
    let held = Disk::open(&scene.spec("top.qcow2", Format::Qcow2, &["base.raw"], false)).unwrap();
    let alone = Disk::open(&scene.spec("alone.qcow2", Format::Qcow2, &[], false)).unwrap();
    let reasons = [
        "in use by another process",
        "open for writing",
        "File exists",
    ];
    for line in reading().into_iter().chain(writing()) {
        refused(&scene, &line, &reasons);
    }
    drop((held, alone));
    for line in reading() {
        let output = scene.run(&line);
        let differs = line.starts_with("compare");
        assert_eq!(
            output.status.code(),
            Some(i32::from(differs)),
            "{line}: {output:?}"
        );
    }
}

#[test]
fn an_image_that_is_read_by_others_is_read_and_not_written() {
    let scene = Scene::new();
    more(&scene);
    let held = Disk::open(&scene.spec("top.qcow2", Format::Qcow2, &["base.raw"], true)).unwrap();
    for line in writing() {
        refused(&scene, &line, &["in use by another process", "File exists"]);
    }
    for line in reading() {
        let output = scene.run(&line);
        let differs = line.starts_with("compare");
        assert_eq!(
            output.status.code(),
            Some(i32::from(differs)),
            "{line}: {output:?}"
        );
    }
    drop(held);
    // A base in use by other overlays is not written either.
    let held = Disk::open(&scene.spec("base.raw", Format::Raw, &[], true)).unwrap();
    let line = format!("commit top.qcow2 {OVERLAY}");
    refused(&scene, &line, &["base.raw: in use by another process"]);
    drop(held);
}

#[test]
fn no_command_touches_an_image_that_qemu_writes() {
    let scene = Scene::new();
    more(&scene);
    let start = |name: &str| {
        let mut qemu = Command::new("qemu-io")
            .args(["-f", "qcow2"])
            .arg(scene.path(name))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("qemu-io is installed by `cargo xtask setup`");
        // Its answer to a command proves that it has opened the image.
        let input = qemu.stdin.as_mut().unwrap();
        input.write_all(b"write 4M 512\nflush\n").unwrap();
        let mut output = BufReader::new(qemu.stdout.take().unwrap());
        let mut line = String::new();
        while !line.contains("wrote") {
            line.clear();
            assert!(
                output.read_line(&mut line).unwrap() > 0,
                "qemu-io has ended"
            );
        }
        (qemu, output)
    };
    let mut holders = [start("top.qcow2"), start("alone.qcow2")];
    // The flush comes after its answer.
    std::thread::sleep(Duration::from_millis(200));
    let reasons = [
        "in use by another process",
        "open for writing",
        "File exists",
    ];
    for line in reading().into_iter().chain(writing()) {
        refused(&scene, &line, &reasons);
    }
    for (qemu, _) in &mut holders {
        drop(qemu.stdin.take());
        assert!(qemu.wait().unwrap().success());
    }
}

#[test]
fn failures_are_objects_for_programs() {
    let scene = Scene::new();
    for (line, file) in [
        (
            "info missing.raw --format raw --output json",
            Some("missing.raw"),
        ),
        (
            "info other.raw --format qcow2 --output json",
            Some("other.raw"),
        ),
        ("info --output json", None),
        ("repair top.qcow2 --format qcow2 --output=json", None),
        (
            "import http://127.0.0.1:1/x?sig=secret made.raw --format raw --to raw --output json",
            Some("http://127.0.0.1:1/x"),
        ),
    ] {
        let output = scene.run(line);
        assert!(!output.status.success());
        assert!(output.stdout.is_empty());
        let told: serde_json::Value = serde_json::from_slice(&output.stderr)
            .unwrap_or_else(|error| panic!("{line}: {error}: {output:?}"));
        assert!(told["error"].as_str().unwrap().len() > 10);
        assert!(!told.to_string().contains("secret"));
        assert_eq!(told["file"].as_str(), file, "{told}");
        assert_eq!(told["bad_input"], output.status.code() == Some(2), "{told}");
    }
}

#[test]
fn results_are_json_for_programs() {
    let scene = Scene::new();
    more(&scene);
    for line in reading() {
        let text = scene.run(&format!("{line} --output json"));
        let value: serde_json::Value = serde_json::from_slice(&text.stdout)
            .unwrap_or_else(|error| panic!("{line}: {error}: {text:?}"));
        assert!(value.is_object() || value.is_array());
    }
}

#[test]
fn a_backing_file_named_only_by_a_header_needs_leave() {
    let scene = Scene::new();
    let output = scene.run("map top.qcow2 --format qcow2");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(
        errors.contains("--backing") && errors.contains("--allow-backing"),
        "{errors}"
    );
    scene.ok("map top.qcow2 --format qcow2 --allow-backing");
    let chain = scene.ok("info top.qcow2 --format qcow2 --allow-backing --chain");
    assert!(
        chain.contains("base.raw") && chain.contains("16 KiB"),
        "{chain}"
    );
}

#[test]
fn a_lease_is_shown_respected_and_broken_when_nobody_uses_the_image() {
    let scene = Scene::new();
    more(&scene);
    assert_eq!(scene.ok("lease show top.qcow2"), "none\n");
    let options = DiskOptions {
        lease: Some(LeaseRequest {
            owner: "vm7".to_owned(),
        }),
        ..DiskOptions::default()
    };
    let spec = scene.spec("top.qcow2", Format::Qcow2, &["base.raw"], false);
    let disk = Disk::open_with(&spec, options).unwrap();
    assert!(scene.ok("lease show top.qcow2").contains("held by `vm7`"));
    let before = scene.files();
    let output = scene.run("lease break top.qcow2");
    assert!(!output.status.success() && scene.files() == before);
    disk.close_keeping_lease().unwrap();
    // The process that has it still runs, though it has closed the image.
    for line in writing() {
        refused(&scene, &line, &["held by `vm7`", "File exists"]);
    }
    for line in reading() {
        let output = scene.run(&line);
        assert!(output.status.code() < Some(2), "{line}: {output:?}");
    }
    assert!(
        scene
            .ok("info top.qcow2 --format qcow2")
            .contains("held by `vm7`")
    );
    lease::give_back(&scene.path("top.qcow2")).unwrap();
    assert!(scene.ok("lease show top.qcow2").contains("free"));
    // An image that goes on in an overlay is not written, until it is known that the overlay is gone.
    lease::supersede(&scene.path("top.qcow2"), &scene.path("gone.qcow2")).unwrap();
    for line in writing() {
        refused(&scene, &line, &["goes on in the overlay", "File exists"]);
    }
    scene.ok("lease break top.qcow2");
    scene.ok("resize top.qcow2 16MiB --format qcow2 --allow-backing");
}

#[test]
fn a_commit_gives_the_image_below_back() {
    let scene = Scene::new();
    lease::supersede(&scene.path("base.raw"), &scene.path("top.qcow2")).unwrap();
    assert!(
        !scene
            .run("resize base.raw 16MiB --format raw")
            .status
            .success()
    );
    scene.ok(&format!("commit top.qcow2 {OVERLAY}"));
    scene.ok("resize base.raw 16MiB --format raw");
}

#[test]
fn failures_name_the_option_that_helps() {
    let scene = Scene::new();
    for (line, helps) in [
        (
            "resize top.qcow2 1MiB --format qcow2 --allow-backing",
            "--shrink",
        ),
        (
            "commit top.qcow2 --format qcow2 --allow-backing",
            "--backing",
        ),
        ("info other.raw --format qcow2", "--format raw"),
        (
            "import other.raw made.raw --format raw --to raw --max-size 1MiB",
            "--max-size",
        ),
        ("create top.qcow2 1MiB --format qcow2", "another name"),
        (
            "import top.qcow2 made.raw --format qcow2 --to raw",
            "flatten",
        ),
        (
            "import other.raw made.raw --format raw --to raw --compressed zst",
            "packing",
        ),
    ] {
        let output = scene.run(line);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{line}: {errors}");
        assert!(
            errors.contains(helps) && !errors.contains('`') || helps == "flatten",
            "{line}: {errors}"
        );
    }
}

#[test]
fn options_of_a_new_image_are_those_that_it_has() {
    let scene = Scene::new();
    scene.ok("create a.qcow2 1GiB --format qcow2 --cluster-size 32KiB --refcount-bits 8 --extended-l2 --lazy-refcounts --compression zstd");
    let seen = scene.ok("info a.qcow2 --format qcow2");
    for text in ["32 KiB", "zstd", "extended L2, lazy refcounts"] {
        assert!(seen.contains(text), "{seen}");
    }
    scene.ok("convert top.qcow2 b.qcow2 --format qcow2 --allow-backing --to qcow2 --compat 0.10");
    assert!(
        scene
            .ok("info b.qcow2 --format qcow2")
            .contains("version        2")
    );
    for line in [
        "create c.raw 1MiB --format raw --cluster-size 4KiB",
        "create c.qcow2 1MiB --format qcow2 --compat 0.10 --extended-l2",
        "create c.qcow2 --format qcow2",
        "convert base.raw c.raw --format raw --to raw --compress zlib",
        "import base.raw c.raw --format raw --to raw --sha256 12",
    ] {
        assert_eq!(scene.run(line).status.code(), Some(2), "{line}");
        assert!(!scene.path("c.qcow2").exists() && !scene.path("c.raw").exists());
    }
}

#[test]
fn snapshots_are_listed_with_their_dates() {
    let scene = Scene::new();
    let made = Command::new("qemu-img")
        .args(["snapshot", "-c", "before the upgrade"])
        .arg(scene.path("top.qcow2"))
        .status();
    assert!(
        made.expect("qemu-img is installed by `cargo xtask setup`")
            .success()
    );
    let seen = scene.ok("info top.qcow2 --format qcow2");
    assert!(
        seen.contains("1 `before the upgrade`, 2") && seen.contains("UTC"),
        "{seen}"
    );
}

#[test]
fn a_snapshot_that_would_be_one_layer_too_many_is_refused_and_leaves_the_disk_usable() {
    let scene = Scene::new();
    let mut top = "top.qcow2".to_owned();
    let depth = |top: &str| {
        let out = scene.ok(&format!(
            "--output json info {top} --format qcow2 --allow-backing --chain"
        ));
        out.matches("allocated_bytes").count()
    };
    for n in depth(&top)..drover_block::MAX_LAYERS {
        let next = format!("s{n}.qcow2");
        scene.ok(&format!("snapshot {top} {next} --format qcow2"));
        top = next;
    }
    assert_eq!(depth(&top), drover_block::MAX_LAYERS);
    let output = scene.run(&format!("snapshot {top} toomany.qcow2 --format qcow2"));
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{errors}");
    assert!(errors.contains("commit or flatten it first"), "{errors}");
    assert!(!scene.path("toomany.qcow2").exists());
    scene.ok(&format!("flatten {top} --format qcow2 --allow-backing"));
}

#[test]
fn what_is_no_file_is_told_so_in_every_cache_mode() {
    let scene = Scene::new();
    for line in [
        "bench /dev/zero --format raw --count 1",
        "bench /dev/zero --format raw --count 1 --cache buffered",
        "info /dev/zero --format raw",
    ] {
        let output = scene.run(line);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(
            errors.contains("/dev/zero: not a regular file or block device"),
            "{line}: {errors}"
        );
    }
}
