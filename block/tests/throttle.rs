//! Limits on real disks in real time, with every engine. Their arithmetic is tested over simulated time inside the crate.

mod common;

use std::time::{Duration, Instant};

use common::{Folder, engines, spec, wait};
use drover_block::{
    Buffers, Directions, Disk, DiskOptions, Format, IoEngine, Limits, Op, Request, Throttle, image,
};

fn operations(rate: u64) -> Limits {
    Limits {
        operations: Directions {
            total: Some(rate.into()),
            ..Directions::default()
        },
        ..Limits::default()
    }
}

struct Scene {
    _folder: Folder,
    disk: Disk,
    throttle: std::sync::Arc<Throttle>,
}

fn scene(engine: IoEngine, limits: Limits) -> Scene {
    let folder = Folder::new();
    let top = folder.path("x.qcow2");
    image::create_qcow2(&top, &image::CreateOptions::new(1 << 20)).unwrap();
    let throttle = Throttle::new(limits).unwrap();
    let options = DiskOptions {
        throttle: Some(throttle.clone()),
        ..engine.into()
    };
    let disk = Disk::open_with(&spec(&top, Format::Qcow2, &[]), options).unwrap();
    Scene {
        _folder: folder,
        disk,
        throttle,
    }
}

fn write(tag: u64) -> Request {
    let offset = tag % 200 * 4096;
    let buffers = Buffers::from_vec(vec![7; 4096]);
    let op = Op::Write { offset, buffers };
    Request { tag, op }
}

/// Tags of all that completes.
fn drain(disk: &mut Disk) -> Vec<u64> {
    let mut completions = Vec::new();
    while disk.in_flight() > 0 {
        disk.poll(&mut completions);
        if disk.in_flight() > 0 {
            wait(disk);
        }
    }
    let tags = completions.iter().map(|completion| {
        completion.result.clone().unwrap();
        completion.tag
    });
    tags.collect()
}

#[test]
fn waiting_requests_begin_in_order_when_the_timer_says_so() {
    for engine in engines() {
        let mut scene = scene(engine, operations(200));
        let start = Instant::now();
        for tag in 0..120 {
            scene.disk.submit(write(tag));
        }
        let tags = drain(&mut scene.disk);
        let time = start.elapsed();
        // 20 go at once, the others at 200 a second.
        assert!(time >= Duration::from_millis(490), "{engine:?}: {time:?}");
        assert_eq!(tags.len(), 120);
        let late = tags.iter().skip(20).copied().collect::<Vec<_>>();
        assert!(late.is_sorted(), "{engine:?}: {late:?}");
        scene.disk.close().unwrap();
    }
}

#[test]
fn a_flush_and_a_read_do_not_wait_behind_writes_that_wait() {
    for engine in engines() {
        let limits = Limits {
            operations: Directions {
                write: Some(1.into()),
                ..Directions::default()
            },
            ..Limits::default()
        };
        let mut scene = scene(engine, limits);
        for tag in 0..3 {
            scene.disk.submit(write(tag));
        }
        scene.disk.submit(Request {
            tag: 10,
            op: Op::Flush,
        });
        scene.disk.submit(Request {
            tag: 11,
            op: Op::Read {
                offset: 0,
                buffers: Buffers::from_vec(vec![0; 512]),
            },
        });
        let start = Instant::now();
        let mut completions = Vec::new();
        while completions.len() < 3 {
            scene.disk.poll(&mut completions);
            assert!(start.elapsed() < Duration::from_secs(10));
            std::thread::sleep(Duration::from_millis(1));
        }
        let mut tags: Vec<_> = completions.iter().map(|c| c.tag).collect();
        tags.sort_unstable();
        assert_eq!(tags, [0, 10, 11], "{engine:?}");
        assert_eq!(scene.disk.in_flight(), 2);
        let start = Instant::now();
        scene.disk.release_waiting();
        assert_eq!(drain(&mut scene.disk).len(), 2);
        assert!(start.elapsed() < Duration::from_millis(900), "{engine:?}");
        scene.disk.close().unwrap();
    }
}

#[test]
fn another_thread_lifts_a_limit_and_the_timer_wakes_the_disk() {
    for engine in engines() {
        let mut scene = scene(engine, operations(1));
        for tag in 0..50 {
            scene.disk.submit(write(tag));
        }
        let throttle = scene.throttle.clone();
        let other = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(50));
            throttle.set_limits(Limits::default()).unwrap();
        });
        let start = Instant::now();
        assert_eq!(drain(&mut scene.disk).len(), 50);
        assert!(start.elapsed() < Duration::from_secs(10), "{engine:?}");
        other.join().unwrap();
    }
}

#[test]
fn a_job_that_executes_requests_keeps_to_the_limit() {
    for engine in engines() {
        let mut scene = scene(engine, operations(100));
        let start = Instant::now();
        for tag in 0..40 {
            scene.disk.execute(&write(tag).op).unwrap();
        }
        let time = start.elapsed();
        assert!(time >= Duration::from_millis(290), "{engine:?}: {time:?}");
    }
}

#[test]
fn disks_on_threads_of_their_own_share_one_limit() {
    let folder = Folder::new();
    let throttle = Throttle::new(operations(400)).unwrap();
    let together = std::sync::Arc::new(std::sync::Barrier::new(4));
    let ends: Vec<_> = engines()
        .into_iter()
        .cycle()
        .take(4)
        .enumerate()
        .map(|(n, engine)| {
            let top = folder.path(&format!("{n}.raw"));
            image::create_raw(&top, 1 << 20).unwrap();
            let options = DiskOptions {
                throttle: Some(throttle.clone()),
                ..engine.into()
            };
            let mut disk = Disk::open_with(&spec(&top, Format::Raw, &[]), options).unwrap();
            let together = std::sync::Arc::clone(&together);
            std::thread::spawn(move || {
                together.wait();
                let start = Instant::now();
                for tag in 0..60 {
                    disk.submit(write(tag));
                }
                assert_eq!(drain(&mut disk).len(), 60);
                start.elapsed()
            })
        })
        .collect();
    let ends: Vec<_> = ends.into_iter().map(|end| end.join().unwrap()).collect();
    // 240 requests of which 40 go at once.
    let last = *ends.iter().max().unwrap();
    assert!(last >= Duration::from_millis(490), "{ends:?}");
    let first = *ends.iter().min().unwrap();
    assert!(
        first >= last / 2,
        "one had much more than its share: {ends:?}"
    );
}
