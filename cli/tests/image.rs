//! `drover image`: images in use are left alone, jobs that are killed are done again, and failures say what to do.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use drover_block::image::{self, MapEntry};
use drover_block::{Backing, Cache, Disk, DiskSpec, Format, Layer};
use tempfile::TempDir;

/// A folder with an overlay `top.qcow2` on `base.raw`, another base that reads a little otherwise, and what the overlay reads as.
struct Scene {
    folder: TempDir,
    bytes: Vec<u8>,
}

const SIZE: usize = 8 << 20;

impl Scene {
    fn new() -> Self {
        let memory = Path::new("/dev/shm");
        let folder = match memory.is_dir() {
            true => tempfile::tempdir_in(memory).unwrap(),
            false => tempfile::tempdir().unwrap(),
        };
        let mut bytes: Vec<u8> = (0..SIZE).map(|n| (n >> 9) as u8 | 1).collect();
        let scene = Self {
            folder,
            bytes: Vec::new(),
        };
        std::fs::write(scene.path("base.raw"), &bytes).unwrap();
        let mut other = bytes.clone();
        for at in (0..SIZE).step_by(512 << 10) {
            other[at..at + 5000].fill(0);
        }
        std::fs::write(scene.path("other.raw"), &other).unwrap();
        std::fs::copy(scene.path("base.raw"), scene.path("spare.raw")).unwrap();
        scene.ok("create top.qcow2 --format qcow2 --backing base.raw --backing-format raw --cluster-size 16KiB");
        scene.qemu_io(
            "top.qcow2",
            &[
                "write -P 0x22 1M 2M",
                "write -z 5M 100k",
                "write -P 0x33 7M 5k",
            ],
        );
        bytes[1 << 20..3 << 20].fill(0x22);
        bytes[5 << 20..(5 << 20) + (100 << 10)].fill(0);
        bytes[7 << 20..(7 << 20) + (5 << 10)].fill(0x33);
        Self { bytes, ..scene }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn command(&self, line: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_drover"));
        command
            .arg("image")
            .args(line.split(' '))
            .current_dir(self.folder.path())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    fn run(&self, line: &str) -> Output {
        self.command(line).output().unwrap()
    }

    #[track_caller]
    fn ok(&self, line: &str) -> String {
        let output = self.run(line);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{line}: {errors}");
        String::from_utf8(output.stdout).unwrap()
    }

    fn qemu_io(&self, image: &str, commands: &[&str]) {
        let mut arguments = vec!["-f", "qcow2"];
        for command in commands {
            arguments.extend(["-c", command]);
        }
        let output = Command::new("qemu-io")
            .args(arguments)
            .arg(self.path(image))
            .output()
            .expect("qemu-io is installed by `cargo xtask setup`");
        assert!(output.status.success(), "{output:?}");
    }

    fn layer(&self, name: &str, format: Format) -> Layer {
        Layer {
            path: self.path(name),
            format,
            cache: Cache::Buffered,
        }
    }

    fn spec(&self, name: &str, format: Format, backing: &[&str], read_only: bool) -> DiskSpec {
        DiskSpec {
            top: self.layer(name, format),
            backing: Backing::Explicit(
                backing
                    .iter()
                    .map(|name| self.layer(name, Format::Raw))
                    .collect(),
            ),
            read_only,
            discard: true,
        }
    }

    /// Asserts that a disk is sound and reads as expected.
    #[track_caller]
    fn reads(&self, name: &str, format: Format, backing: &[&str], bytes: &[u8]) {
        let expected = self.path("expected");
        std::fs::write(&expected, bytes).unwrap();
        let spec = self.spec(name, format, backing, true);
        let expected = self.spec("expected", Format::Raw, &[], true);
        let seen = image::compare(&spec, &expected).unwrap();
        assert_eq!(seen.differs_at, None, "{name}");
        let report = image::check(&self.path(name), format).unwrap();
        assert_eq!(report.corruptions, 0, "{name}: {report:#?}");
    }

    /// The files of the folder and what is in them.
    fn files(&self) -> BTreeMap<String, Vec<u8>> {
        let entries = std::fs::read_dir(self.folder.path()).unwrap();
        entries
            .map(|entry| {
                let entry = entry.unwrap();
                let name = entry.file_name().into_string().unwrap();
                (name, std::fs::read(entry.path()).unwrap())
            })
            .collect()
    }
}

const OVERLAY: &str = "--format qcow2 --backing base.raw --backing-format raw";

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

/// Starts a command and kills it after a while; whether it came to its end before.
fn killed(scene: &Scene, line: &str, after: Duration) -> bool {
    let mut child: Child = scene.command(line).spawn().unwrap();
    let begin = Instant::now();
    while begin.elapsed() < after {
        if let Some(status) = child.try_wait().unwrap() {
            assert!(status.success(), "{line}: {status}");
            return true;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    false
}

/// Kills a job again and again, later and later, until it comes to its end; after every death `whole` must hold.
fn until_done(scene: &Scene, line: &str, whole: impl Fn(&Scene)) {
    let mut deaths = 0;
    let mut patience = Duration::from_millis(4);
    for _ in 0..30 {
        // Every try gets more, so that the slowest machine comes to an end.
        patience = patience * 7 / 5;
        if killed(scene, line, patience) {
            assert!(deaths > 3, "{line} was never killed in the middle");
            return;
        }
        deaths += 1;
        whole(scene);
    }
    panic!("{line} does not come to its end");
}

/// Nothing that a job keeps beside its target is left.
#[track_caller]
fn nothing_left(scene: &Scene) {
    let left: Vec<String> = scene.files().into_keys().collect();
    let odd = |name: &&String| {
        name.contains("partial") || name.contains("unpacked") || name.contains("download")
    };
    assert_eq!(left.iter().find(odd), None);
}

#[test]
fn a_killed_conversion_is_done_again_and_leaves_nothing() {
    let scene = Scene::new();
    let line =
        format!("convert top.qcow2 made.qcow2 {OVERLAY} --to qcow2 --compress zlib --rate 32MiB");
    until_done(&scene, &line, |scene| {
        assert!(!scene.path("made.qcow2").exists());
        scene.reads("top.qcow2", Format::Qcow2, &["base.raw"], &scene.bytes);
    });
    scene.reads("made.qcow2", Format::Qcow2, &[], &scene.bytes);
    nothing_left(&scene);
}

#[test]
fn a_killed_import_is_done_again_and_leaves_nothing() {
    let scene = Scene::new();
    let packed = Command::new("gzip")
        .arg("-k")
        .arg(scene.path("spare.raw"))
        .status();
    assert!(packed.expect("gzip is everywhere").success());
    let line =
        "import spare.raw.gz made.qcow2 --format raw --compressed gz --to qcow2 --rate 48MiB";
    until_done(&scene, line, |scene| {
        assert!(!scene.path("made.qcow2").exists())
    });
    scene.ok("compare made.qcow2 spare.raw --format qcow2 --second-format raw");
    nothing_left(&scene);
}

#[test]
fn a_killed_flatten_leaves_the_disk_whole_and_is_done_again() {
    let scene = Scene::new();
    let line = format!("flatten top.qcow2 {OVERLAY} --rate 32MiB");
    until_done(&scene, &line, |scene| {
        if image::info(&scene.path("top.qcow2"), Format::Qcow2)
            .unwrap()
            .qcow2
            .unwrap()
            .backing_file
            .is_some()
        {
            scene.reads("top.qcow2", Format::Qcow2, &["base.raw"], &scene.bytes);
        }
    });
    scene.reads("top.qcow2", Format::Qcow2, &[], &scene.bytes);
}

#[test]
fn a_killed_commit_leaves_the_disk_whole_and_is_done_again() {
    let scene = Scene::new();
    let line = format!("commit top.qcow2 {OVERLAY} --rate 10MiB");
    until_done(&scene, &line, |scene| {
        scene.reads("top.qcow2", Format::Qcow2, &["base.raw"], &scene.bytes);
    });
    scene.reads("base.raw", Format::Raw, &[], &scene.bytes);
    let map: Vec<MapEntry> =
        image::map(&scene.spec("top.qcow2", Format::Qcow2, &["base.raw"], true)).unwrap();
    assert!(map.iter().all(|entry| entry.depth == 1), "the top is empty");
}

#[test]
fn a_killed_rebase_leaves_the_disk_whole_over_the_old_base_or_the_new_one() {
    let scene = Scene::new();
    let line = format!("rebase top.qcow2 {OVERLAY} --onto other.raw --onto-format raw --rate 1MiB");
    until_done(&scene, &line, |scene| {
        let info = image::info(&scene.path("top.qcow2"), Format::Qcow2).unwrap();
        let base = info.qcow2.unwrap().backing_file.unwrap();
        scene.reads("top.qcow2", Format::Qcow2, &[&base], &scene.bytes);
    });
    std::fs::remove_file(scene.path("base.raw")).unwrap();
    scene.reads("top.qcow2", Format::Qcow2, &["other.raw"], &scene.bytes);
}

#[test]
fn a_killed_repair_never_makes_an_image_worse() {
    use std::os::unix::fs::FileExt;
    let scene = Scene::new();
    let sound = std::fs::read(scene.path("top.qcow2")).unwrap();
    let mut deaths = 0;
    for n in 0..20 {
        std::fs::write(scene.path("top.qcow2"), &sound).unwrap();
        // The refcounts of the data, some of them; with clusters of 16 KiB they begin at 0x8000.
        let file = std::fs::File::options()
            .write(true)
            .open(scene.path("top.qcow2"))
            .unwrap();
        file.write_all_at(&[0; 24], 0x8000 + 16).unwrap();
        drop(file);
        assert!(
            image::check(&scene.path("top.qcow2"), Format::Qcow2)
                .unwrap()
                .corruptions
                > 0
        );
        let line = "repair top.qcow2 --format qcow2 --all";
        let mut child = scene.command(line).spawn().unwrap();
        std::thread::sleep(Duration::from_micros(1000 + n * 500));
        child.kill().unwrap();
        deaths += u32::from(!child.wait().unwrap().success());
        scene.ok(line);
        scene.reads("top.qcow2", Format::Qcow2, &["base.raw"], &scene.bytes);
        assert!(
            image::check(&scene.path("top.qcow2"), Format::Qcow2)
                .unwrap()
                .is_clean()
        );
    }
    assert!(deaths > 0, "no repair was killed in the middle");
}

#[test]
fn killed_creations_and_resizes_are_done_again() {
    let scene = Scene::new();
    for n in 0..12 {
        let after = Duration::from_micros(1000 + n * 700);
        for line in [
            "resize top.qcow2 1GiB OVERLAY".replace("OVERLAY", OVERLAY),
            "resize top.qcow2 8MiB OVERLAY --shrink".replace("OVERLAY", OVERLAY),
        ] {
            let mut child = scene.command(&line).spawn().unwrap();
            std::thread::sleep(after);
            child.kill().unwrap();
            child.wait().unwrap();
            scene.ok(&line);
            assert!(
                image::check(&scene.path("top.qcow2"), Format::Qcow2)
                    .unwrap()
                    .corruptions
                    == 0
            );
        }
        scene.reads("top.qcow2", Format::Qcow2, &["base.raw"], &scene.bytes);
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
