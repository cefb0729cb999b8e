//! Jobs of `drover image` that are killed at any time leave images whole, and are done again.

mod scene;

use std::process::{Child, Command};
use std::time::{Duration, Instant};

use drover_block::Format;
use drover_block::image::{self, MapEntry};

use scene::{OVERLAY, Scene};

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
    let mut patience = Duration::from_millis(4);
    for deaths in 0..30 {
        // Every try gets more, so that the slowest machine comes to an end.
        patience = patience * 7 / 5;
        if killed(scene, line, patience) {
            assert!(deaths > 3, "{line} was never killed in the middle");
            return;
        }
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
        assert!(!scene.path("made.qcow2").exists());
    });
    scene.ok("compare made.qcow2 spare.raw --format qcow2 --second-format raw");
    nothing_left(&scene);
}

#[test]
fn a_killed_flatten_leaves_the_disk_whole_and_is_done_again() {
    let scene = Scene::new();
    let line = format!("flatten top.qcow2 {OVERLAY} --rate 4MiB");
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
    let line = format!("commit top.qcow2 {OVERLAY} --rate 2MiB");
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
        let line = "create made.qcow2 1TiB --format qcow2";
        let mut child = scene.command(line).spawn().unwrap();
        std::thread::sleep(after);
        child.kill().unwrap();
        child.wait().unwrap();
        // It is there whole, or not at all.
        if !scene.path("made.qcow2").exists() {
            scene.ok(line);
        }
        assert!(
            image::check(&scene.path("made.qcow2"), Format::Qcow2)
                .unwrap()
                .is_clean()
        );
        std::fs::remove_file(scene.path("made.qcow2")).unwrap();
        nothing_left(&scene);
    }
}
