//! Hosts that fail in the middle of things: every single call of a run, in every way.
//!
//! | call | fails with |
//! |---|---|
//! | read | EIO, half of the bytes |
//! | write | EIO, ENOSPC once, ENOSPC for a while, half of the bytes |
//! | fdatasync, hole punch, ftruncate | EIO; ENOSPC where that can be |
//!
//! After each: somebody was told, every sector holds what was flushed or what came later, the image is sound and opens, and takes
//! writes again.

use std::cell::RefCell;
use std::rc::Rc;

use super::guest::{Outcome, Run, With};
use super::promise::Promise;
use super::replay::agreed;
use super::scene::{Random, Scene, is_dirty};
use crate::image::{self, Shrink, Unwatched};
use crate::io::shuffle::HOLDS_PUNCHES;
use crate::io::tape::{self, Event, Failure, Fault, Kind, Tape};
use crate::{
    Backing, Buffers, Disk, DiskOptions, DiskSpec, Format, IoEngine, IoError, Job, Op, Request,
};

/// One failure in so many is judged by QEMU as well.
const SAMPLE: usize = 25;

const FAULTS: [(Kind, usize, Fault); 9] = [
    (Kind::Read, 1, Fault::Errno(libc::EIO)),
    (Kind::Read, 1, Fault::Short),
    (Kind::Write, 1, Fault::Errno(libc::EIO)),
    (Kind::Write, 1, Fault::Errno(libc::ENOSPC)),
    (Kind::Write, 7, Fault::Errno(libc::ENOSPC)),
    (Kind::Write, 1, Fault::Short),
    (Kind::Sync, 1, Fault::Errno(libc::EIO)),
    (Kind::Punch, 1, Fault::Errno(libc::EIO)),
    (Kind::Truncate, 1, Fault::Errno(libc::ENOSPC)),
];

/// Whether every back end has its turn at every failure, which takes long; otherwise they take turns.
fn thorough() -> bool {
    std::env::var_os("BLOCK_EVERY_FAILURE").is_some()
}

fn at_depth(requests: usize, job: Option<Job>) -> [Run; 5] {
    let run = |depth, with| Run {
        requests,
        depth,
        with,
        job,
    };
    [
        run(1, With::Engine(IoEngine::Inline)),
        run(4, With::Shuffled),
        run(1, With::Engine(IoEngine::Threads)),
        run(1, With::Engine(IoEngine::IoUring)),
        run(4, With::Engine(IoEngine::Threads)),
    ]
}

/// What goes on while the host fails.
#[derive(Clone, Copy)]
enum Work {
    Guest(usize, Option<Job>),
    Job(fn(&Scene) -> Result<(), crate::Error>),
}

impl Work {
    /// Ways to do it.
    fn ways(self) -> Vec<Run> {
        match self {
            Self::Guest(requests, job) => at_depth(requests, job).to_vec(),
            Self::Job(_) => at_depth(0, None)[..1].to_vec(),
        }
    }

    fn go(self, run: Run, scene: &Scene, seed: u64, tape: &Rc<RefCell<Tape>>) -> Outcome {
        match self {
            Self::Guest(..) => run.of(scene, &mut Random(seed), tape),
            Self::Job(job) => Outcome {
                deeds: vec![],
                failures: job(scene).err().iter().map(ToString::to_string).collect(),
            },
        }
    }
}

/// Lets every call of a run fail in turn.
fn fail_everywhere(scene: &Scene, seed: u64, work: Work) {
    let tape = tape::insert();
    let outcome = work.go(work.ways()[0], scene, seed, &tape);
    tape::eject();
    assert_eq!(outcome.failures, [""; 0], "nothing has failed");
    let calls = tape.borrow().calls;
    let mut turn = 0;
    let mut told = 0;
    for (kind, times, fault) in FAULTS {
        for after in 0..calls[kind as usize] {
            let ways = work.ways();
            for (n, way) in ways.iter().enumerate() {
                if thorough() || n == turn % ways.len() {
                    let failure = Failure {
                        of: Some(kind),
                        after,
                        times,
                        fault,
                    };
                    let judged = turn.is_multiple_of(SAMPLE);
                    scene.reset();
                    told += fail_once(scene, seed, work, *way, failure, judged);
                }
            }
            turn += 1;
        }
    }
    println!("{turn} failures, of {calls:?} calls; {told} told");
    assert!(turn > 40 && told > 20, "{turn} {told}");
}

/// The number of requests that were told of a failure.
fn fail_once(
    scene: &Scene,
    seed: u64,
    work: Work,
    way: Run,
    failure: Failure,
    judged: bool,
) -> usize {
    let what = format!("seed {seed}: {failure:?} {way:?}");
    let tape = tape::insert();
    tape.borrow_mut().fail = Some(failure);
    let outcome = work.go(way, scene, seed, &tape);
    tape::eject();
    let tape = tape.take();
    match failure.fault {
        Fault::Short => assert_eq!(outcome.failures, [""; 0], "{what}: a call is just repeated"),
        // A hole is only worth having; a table that could not be read is read again where it is needed.
        Fault::Errno(_) if matches!(failure.of, Some(Kind::Punch | Kind::Read)) => {}
        Fault::Errno(_) => assert!(
            tape.failed == 0 || !outcome.failures.is_empty(),
            "{what}: nobody was told"
        ),
    }
    let mut promise = Promise::new(&scene.initial, &outcome.deeds);
    for event in &tape.events {
        if let Event::Mark(deed) = event {
            promise.play(*deed);
        }
    }
    let sound = || {
        for layer in scene.layers() {
            if layer.format == Format::Qcow2 {
                let report = image::check(&layer.path, Format::Qcow2).unwrap();
                let good = report.corruptions == 0 || is_dirty(&layer.path);
                assert!(good, "{what}: {report:?}");
                if judged {
                    agreed(&layer.path);
                }
            }
        }
    };
    sound();
    promise.check(&scene.read_all(), &what);
    match work {
        // It is all that went wrong: the next writer finds nothing in its way.
        Work::Guest(..) => {
            let mut disk = Disk::open(&scene.spec_now()).unwrap();
            let buffers = Buffers::from_vec(vec![0xfe; disk.size_bytes() as usize]);
            disk.execute(&Op::Write { offset: 0, buffers }).unwrap();
            disk.close().unwrap();
            let seen = scene.read_all();
            assert!(
                seen.iter().all(|byte| *byte == 0xfe),
                "{what}: written again"
            );
        }
        Work::Job(job) => {
            if scene.names_a_backing() {
                job(scene).unwrap();
            }
            promise.check(&scene.read_all(), &format!("{what}: done again"));
        }
    }
    sound();
    outcome.failures.len()
}

#[test]
fn no_failing_call_harms_a_disk_with_a_snapshot() {
    let work = Work::Guest(40, None);
    fail_everywhere(&Scene::snapshot(4096), 31, work);
}

#[test]
fn no_failing_call_harms_an_overlay_of_small_clusters() {
    fail_everywhere(&Scene::plain(false, true), 32, Work::Guest(30, None));
}

#[test]
fn no_failing_call_harms_the_top_of_a_chain() {
    fail_everywhere(&Scene::chain(), 33, Work::Guest(30, None));
}

#[test]
fn no_failing_call_harms_an_image_of_compressed_clusters() {
    let work = Work::Guest(30, None);
    fail_everywhere(&Scene::compressed(false, "zlib"), 34, work);
}

#[test]
fn no_failing_call_harms_an_overlay_with_subclusters() {
    fail_everywhere(&Scene::subclusters(true), 35, Work::Guest(30, None));
}

#[test]
fn no_failing_call_harms_a_disk_that_grows() {
    fail_everywhere(&Scene::l1_growth(), 36, Work::Guest(20, None));
}

#[test]
fn no_failing_call_harms_a_disk_whose_refcounts_are_put_right() {
    fail_everywhere(&Scene::dirty(), 37, Work::Guest(20, None));
}

#[test]
fn no_failing_call_harms_a_refcount_table_that_grows() {
    fail_everywhere(&Scene::refcount_growth(), 38, Work::Guest(10, None));
}

#[test]
fn no_failing_call_harms_a_flatten() {
    let flatten = |scene: &Scene| image::flatten(&scene.spec, &mut Unwatched);
    fail_everywhere(&Scene::chain().with_data(41), 41, Work::Job(flatten));
}

#[test]
fn no_failing_call_harms_a_commit() {
    let commit = |scene: &Scene| image::commit(&scene.spec, &mut Unwatched);
    fail_everywhere(&Scene::chain().with_data(42), 42, Work::Job(commit));
}

#[test]
fn no_failing_call_harms_a_disk_that_is_made_smaller() {
    let shrink = |scene: &Scene| image::resize(&scene.spec, 50 * 1024, Shrink::Allow);
    fail_everywhere(&Scene::chain().with_data(43), 43, Work::Job(shrink));
}

#[test]
fn no_failing_call_harms_a_disk_that_is_flattened_while_in_use() {
    let work = Work::Guest(20, Some(Job::Flatten));
    fail_everywhere(&Scene::chain().with_data(44), 44, work);
}

#[test]
fn no_failing_call_harms_a_disk_that_is_committed_while_in_use() {
    let work = Work::Guest(20, Some(Job::Commit));
    fail_everywhere(&Scene::chain().with_data(45), 45, work);
}

#[test]
fn a_flush_that_failed_once_never_succeeds_again() {
    let scene = Scene::plain(false, true);
    let Backing::Explicit(layers) = &scene.spec.backing else {
        unreachable!("made above")
    };
    let raw = DiskSpec {
        top: layers[0].clone(),
        backing: Backing::Explicit(vec![]),
        ..scene.spec.clone()
    };
    for spec in [raw, scene.spec.clone()] {
        let tape = tape::insert();
        let mut disk = Disk::open(&spec).unwrap();
        let write = || Op::Write {
            offset: 0,
            buffers: Buffers::from_vec(vec![1; 4096]),
        };
        disk.execute(&write()).unwrap();
        disk.execute(&Op::Flush).unwrap();
        disk.execute(&write()).unwrap();
        tape.borrow_mut().fail = Some(Failure {
            of: Some(Kind::Sync),
            after: 0,
            times: 1,
            fault: Fault::Errno(libc::EIO),
        });
        assert!(disk.execute(&Op::Flush).is_err());
        assert_eq!(tape.borrow().failed, 1);
        assert!(
            disk.execute(&Op::Flush).is_err(),
            "the second attempt proves nothing"
        );
        assert!(disk.close().is_err());
        tape::eject();
    }
}

#[test]
fn a_cluster_is_not_used_again_before_its_hole_is_punched() {
    for seed in 0..40 {
        let scene = Scene::plain(false, false);
        let mut disk =
            Disk::open_shuffled_with(&scene.spec, seed, &DiskOptions::default()).unwrap();
        let write = |offset, value| Op::Write {
            offset,
            buffers: Buffers::from_vec(vec![value; 8192]),
        };
        disk.execute(&write(0, 1)).unwrap();
        disk.execute(&Op::Flush).unwrap();
        let discard = Op::Discard {
            offset: 0,
            length: 8192,
        };
        disk.execute(&discard).unwrap();
        HOLDS_PUNCHES.set(true);
        // The flush lets the clusters go; writes elsewhere want clusters meanwhile, and the one of the discard itself as well.
        for (tag, op) in [
            Op::Flush,
            write(16384, 2),
            write(32768, 3),
            write(0, 4),
            Op::Flush,
        ]
        .into_iter()
        .enumerate()
        {
            disk.submit(Request {
                tag: tag as u64,
                op,
            });
            for _ in 0..seed {
                disk.step(true);
            }
        }
        for _ in 0..200 {
            disk.step(true);
        }
        HOLDS_PUNCHES.set(false);
        let mut completions = Vec::new();
        while disk.in_flight() > 0 {
            disk.step(true);
            disk.poll(&mut completions);
        }
        assert!(completions.len() == 5 && completions.iter().all(|c| c.result.is_ok()));
        disk.close().unwrap();
        let seen = scene.read_all();
        for (offset, value) in [(0, 4), (16384, 2), (32768, 3)] {
            let data = &seen[offset..offset + 8192];
            assert!(
                data.iter().all(|byte| *byte == value),
                "seed {seed}: {offset}"
            );
        }
        assert_eq!(agreed(&scene.spec.top.path), (0, 0));
    }
}

#[test]
fn a_disk_opened_again_after_a_loss_fails_the_flushes_that_were_kept_and_then_goes_on() {
    let scene = Scene::plain(false, true);
    for engine in [IoEngine::Inline, IoEngine::Threads] {
        let options = DiskOptions::from(engine);
        let open = || Disk::open_with(&scene.spec, options.clone()).unwrap();
        let tape = tape::insert();
        let mut disk = open();
        let buffers = Buffers::from_vec(vec![1; 4096]);
        disk.execute(&Op::Write { offset: 0, buffers }).unwrap();
        tape.borrow_mut().fail = Some(Failure {
            of: Some(Kind::Sync),
            after: 0,
            times: 1,
            fault: Fault::Errno(libc::EIO),
        });
        disk.execute(&Op::Flush).unwrap_err();
        disk.close().unwrap_err();
        tape::eject();
        // It may be closed without having heard of a flush.
        open().close().unwrap();
        let mut disk = open();
        for tag in [1, 2] {
            disk.submit(Request { tag, op: Op::Flush });
        }
        let mut completions = Vec::new();
        disk.poll(&mut completions);
        let told: Vec<_> = completions.iter().map(|c| c.result.clone()).collect();
        assert_eq!(told, [Err(IoError::Lost), Err(IoError::Lost)]);
        disk.execute(&Op::Flush).unwrap();
        disk.close().unwrap();
        let mut disk = open();
        disk.execute(&Op::Flush).unwrap();
        disk.close().unwrap();
    }
}
