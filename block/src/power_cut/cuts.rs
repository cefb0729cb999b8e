//! The cuts, scene by scene.

use super::guest::{Run, With};
use super::promise::Promise;
use super::replay::{Medium, agreed};
use super::scene::{Random, Scene};
use crate::image::{self, Shrink, Unwatched};
use crate::io::tape::{self, Event};
use crate::{IoEngine, Job};

/// Cuts of all scenes together, where nobody asks for another number.
const CUTS: u64 = 20_000;
/// What the shares of all scenes come to; each has runs of its own at depth 1 and more.
const SHARES: u64 = 1570;
/// One cut in so many is judged by QEMU as well.
const SAMPLE: u64 = 100;

/// What goes on when the power goes.
#[derive(Clone, Copy)]
enum Work {
    /// A guest with so many requests, and a job beside them.
    Guest(usize, Option<Job>),
    /// A job that leaves what a guest reads as it is. It is done again after some cuts, and then everything must be as if there had
    /// been none.
    Job(fn(&Scene)),
}

/// Cuts fresh scenes until this one's share of cuts is done.
fn cut_everywhere(scene: &Scene, seed: u64, work: Work, share: u64) {
    let total = std::env::var("BLOCK_POWER_CUTS")
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or(CUTS);
    let goal = total * share / SHARES + 1;
    let mut random = Random(seed);
    let (mut done, mut round) = (0, 0);
    let (mut syncs, mut writes, mut punches) = (0, 0, 0);

    while done < goal {
        scene.reset();
        let depth = [1, 6][round % 2];
        round += 1;
        let mut medium = Medium::new(scene);
        let tape = tape::insert();
        scene.number_files(&mut tape.borrow_mut());
        let deeds = match work {
            Work::Guest(requests, job) => {
                let with = match depth {
                    1 => With::Engine(IoEngine::Inline),
                    _ => With::Shuffled,
                };
                let run = Run {
                    requests,
                    depth,
                    with,
                    job,
                };
                let outcome = run.of(scene, &mut random, &tape);
                assert_eq!(outcome.failures, [""; 0]);
                outcome.deeds
            }
            Work::Job(job) => {
                job(scene);
                vec![]
            }
        };
        tape::eject();
        scene.reset();
        let events = tape.take().events;
        let count = |wanted: fn(&Event) -> bool| events.iter().filter(|e| wanted(e)).count();
        syncs += count(|e| matches!(e, Event::Sync { .. }));
        writes += count(|e| matches!(e, Event::Write { .. }));
        punches += count(|e| matches!(e, Event::Punch { .. }));
        let mut promise = Promise::new(&scene.initial, &deeds);
        // Every point is cut; rounds beyond the first find other subsets and other runs.
        for (n, event) in events.iter().enumerate() {
            medium.play(event);
            match event {
                Event::Mark(deed) => promise.play(*deed),
                // Nothing new can be lost since the event before.
                Event::End { .. } if n % 4 != 0 => continue,
                _ => {}
            }
            if matches!(event, Event::Mark(_)) {
                continue;
            }
            let what = format!("seed {seed} round {round} depth {depth} cut {n}");
            medium.cut(&mut random, &what);
            promise.check(&scene.read_all(), &what);
            if random.below(SAMPLE) == 0 {
                medium.agreed();
                if let Work::Job(job) = work {
                    job(scene);
                    medium.agreed();
                    promise.check(&scene.read_all(), &format!("{what}, and done again"));
                    scene.reset();
                }
            }
            done += 1;
            if done >= goal && round >= 2 {
                break;
            }
        }
    }
    let enough = match work {
        Work::Guest(..) => syncs > 30 && writes > 100 && punches > 3,
        Work::Job(_) => syncs > 2 && writes > 10,
    };
    assert!(enough, "the runs do too little: {syncs} {writes} {punches}");
    println!("{done} cuts in {round} runs");
}

#[test]
fn no_cut_harms_a_disk_of_small_clusters() {
    cut_everywhere(&Scene::plain(false, false), 1, Work::Guest(150, None), 150);
}

#[test]
fn no_cut_harms_an_overlay() {
    cut_everywhere(&Scene::plain(false, true), 2, Work::Guest(150, None), 150);
}

#[test]
fn no_cut_harms_an_overlay_with_a_snapshot() {
    cut_everywhere(&Scene::plain(true, true), 3, Work::Guest(150, None), 150);
}

#[test]
fn no_cut_harms_a_disk_with_a_snapshot_and_narrow_refcounts() {
    cut_everywhere(&Scene::snapshot(4096), 4, Work::Guest(150, None), 100);
}

#[test]
fn no_cut_harms_the_top_of_a_chain() {
    cut_everywhere(&Scene::chain(), 5, Work::Guest(150, None), 100);
}

#[test]
fn no_cut_harms_an_overlay_on_a_compressed_base() {
    cut_everywhere(
        &Scene::compressed(true, "zstd"),
        6,
        Work::Guest(150, None),
        100,
    );
}

#[test]
fn no_cut_harms_an_image_of_compressed_clusters() {
    cut_everywhere(
        &Scene::compressed(false, "zlib"),
        7,
        Work::Guest(150, None),
        100,
    );
}

#[test]
fn no_cut_harms_a_refcount_table_that_grows() {
    cut_everywhere(&Scene::refcount_growth(), 8, Work::Guest(150, None), 20);
}

#[test]
fn no_cut_harms_a_disk_that_grows() {
    cut_everywhere(&Scene::l1_growth(), 9, Work::Guest(150, None), 100);
}

#[test]
fn no_cut_harms_a_disk_whose_refcounts_are_put_right() {
    cut_everywhere(&Scene::dirty(), 10, Work::Guest(150, None), 60);
}

#[test]
fn no_cut_harms_an_overlay_with_subclusters() {
    cut_everywhere(&Scene::subclusters(true), 11, Work::Guest(150, None), 100);
}

#[test]
fn no_cut_harms_a_flatten() {
    let flatten = |scene: &Scene| {
        // Once it is done there is nothing below any more.
        if scene.names_a_backing() {
            image::flatten(&scene.spec, &mut Unwatched).unwrap();
        }
    };
    let scene = Scene::chain().with_data(21);
    cut_everywhere(&scene, 21, Work::Job(flatten), 40);
}

#[test]
fn no_cut_harms_a_commit() {
    let commit = |scene: &Scene| image::commit(&scene.spec, &mut Unwatched).unwrap();
    let scene = Scene::chain().with_data(22);
    cut_everywhere(&scene, 22, Work::Job(commit), 40);
}

#[test]
fn no_cut_harms_a_disk_that_is_flattened_while_in_use() {
    let work = Work::Guest(60, Some(Job::Flatten));
    cut_everywhere(&Scene::chain().with_data(25), 25, work, 60);
    cut_everywhere(&Scene::subclusters(false), 26, work, 40);
}

#[test]
fn no_cut_harms_a_disk_that_is_committed_while_in_use() {
    let work = Work::Guest(60, Some(Job::Commit));
    cut_everywhere(&Scene::chain().with_data(27), 27, work, 60);
}

#[test]
fn no_cut_harms_a_disk_that_is_committed_to_other_kinds_of_layers_while_in_use() {
    let work = Work::Guest(60, Some(Job::Commit));
    let compressed = Scene::compressed(true, "zlib").with_data(28);
    cut_everywhere(&compressed, 28, work, 30);
    cut_everywhere(&Scene::subclusters(false), 29, work, 30);
}

#[test]
fn no_cut_harms_a_disk_that_is_made_smaller() {
    let shrink = |scene: &Scene| image::resize(&scene.spec, 50 * 1024, Shrink::Allow).unwrap();
    let scene = Scene::chain().with_data(23);
    cut_everywhere(&scene, 23, Work::Job(shrink), 30);
}

#[test]
fn no_cut_harms_a_disk_that_is_made_larger() {
    let grow = |scene: &Scene| image::resize(&scene.spec, 160 * 1024, Shrink::Refuse).unwrap();
    cut_everywhere(&Scene::l1_growth(), 24, Work::Job(grow), 30);
}

#[test]
fn our_checker_says_of_damaged_images_what_qemu_says() {
    let scene = Scene::snapshot(512);
    let path = &scene.spec.top.path;
    let good = std::fs::read(path).unwrap();
    let mut random = Random(77);
    // Refcount blocks and L2 tables; damage to what points at them makes an image unreadable rather than unsound.
    let entry = |at: usize| u64::from_be_bytes(good[at..at + 8].try_into().unwrap());
    let mut tables: Vec<usize> = Vec::new();
    for pointer in [40, 48] {
        let table = entry(pointer) as usize;
        let entries = (0..512).step_by(8).map(|n| entry(table + n));
        let hosts = entries.map(|raw| (raw & crate::qcow2::spec::OFFSET_MASK) as usize);
        tables.extend(hosts.filter(|host| (1024..good.len()).contains(host)));
    }
    let (mut leaky, mut corrupt) = (0, 0);
    for _ in 0..150 {
        let mut bytes = good.clone();
        let table = tables[random.below(tables.len() as u64) as usize];
        let at = table + random.below(512) as usize;
        bytes[at] ^= 1 << random.below(8);
        std::fs::write(path, &bytes).unwrap();
        let (leaks, corruptions) = agreed(path);
        leaky += u32::from(leaks > 0);
        corrupt += u32::from(corruptions > 0);
    }
    assert!(
        leaky > 15 && corrupt > 15,
        "{leaky} {corrupt}: too little was damaged"
    );
}
