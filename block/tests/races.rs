//! Threads of the host at work on disks, their budget, their limits and their jobs. Under ThreadSanitizer by
//! `cargo xtask test tsan`.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use common::{Folder, Random, assert_clean, contents, engines, layer, qemu_img, spec, text, wait};
use drover_block::{
    Buffers, CacheBudget, Disk, DiskOptions, Format, IoEngine, Job, JobHandle, Limits, Op, Request,
    SharedBuffer, Throttle,
};

const CLUSTER: u64 = 64 * 1024;

/// What a submitter wants done, and where it waits for the end.
type Order = (Op, mpsc::Sender<()>);

/// Serves what threads ask for until all have gone.
fn serve(mut disk: Disk, orders: &mpsc::Receiver<Order>) -> Disk {
    let mut waiting: Vec<Option<mpsc::Sender<()>>> = Vec::new();
    let mut completions = Vec::new();
    let mut open = true;
    while open || disk.in_flight() > 0 {
        loop {
            match orders.try_recv() {
                Ok((op, done)) => {
                    let tag = waiting.len() as u64;
                    waiting.push(Some(done));
                    disk.submit(Request { tag, op });
                }
                Err(mpsc::TryRecvError::Empty) => break,
                Err(mpsc::TryRecvError::Disconnected) => {
                    open = false;
                    break;
                }
            }
        }
        disk.poll(&mut completions);
        for completion in completions.drain(..) {
            completion.result.unwrap();
            let done = waiting[completion.tag as usize].take();
            done.expect("one completion a request").send(()).unwrap();
        }
        if disk.in_flight() > 0 {
            std::thread::yield_now();
        }
    }
    disk
}

#[test]
fn four_submitters_of_allocating_writes_and_flushes_leave_a_sound_image() {
    for engine in engines() {
        let folder = Folder::new();
        let top = folder.path("top.qcow2");
        let clusters = 4 * 150;
        let size = (clusters * CLUSTER).to_string();
        qemu_img(&["create", "-q", "-f", "qcow2", text(&top), &size]);
        let disk = Disk::open_with(&spec(&top, Format::Qcow2, &[]), engine).unwrap();
        let (orders, taken) = mpsc::channel::<Order>();
        let owner = std::thread::spawn(move || serve(disk, &taken).close().unwrap());
        let submitters: Vec<_> = (0..4u64)
            .map(|number| {
                let orders = orders.clone();
                std::thread::spawn(move || {
                    let (done, ends) = mpsc::channel();
                    let ask = |op| {
                        orders.send((op, done.clone())).unwrap();
                        ends.recv().unwrap();
                    };
                    for n in 0..150 {
                        // Neighbours in the same L2 tables, each cluster in two halves by the same submitter.
                        for half in 0..2 {
                            ask(Op::Write {
                                offset: (n * 4 + number) * CLUSTER + half * CLUSTER / 2,
                                buffers: Buffers::from_vec(vec![n as u8; CLUSTER as usize / 2]),
                            });
                        }
                        if n % 8 == number {
                            ask(Op::Flush);
                        }
                    }
                })
            })
            .collect();
        drop(orders);
        for submitter in submitters {
            submitter.join().unwrap();
        }
        owner.join().unwrap();
        assert_clean(&top);
        for (n, cluster) in contents("qcow2", &top).chunks(CLUSTER as usize).enumerate() {
            let expected = (n / 4) as u8;
            assert!(cluster.iter().all(|byte| *byte == expected), "cluster {n}");
        }
    }
}

/// One disk of many: random requests against a model until told to stop, then all of it compared.
fn keep_busy(mut disk: Disk, seed: u64, stop: &AtomicBool, jobs: &mpsc::Sender<JobHandle>) {
    let size = disk.size_bytes();
    let mut model = vec![0xaa; size as usize];
    let mut random = Random(seed);
    let mut completions = Vec::new();
    let mut run = |disk: &mut Disk, op| {
        disk.submit(Request { tag: 1, op });
        while disk.in_flight() > 0 {
            disk.poll(&mut completions);
            if disk.in_flight() > 0 {
                wait(disk);
            }
        }
        completions.pop().expect("it is over").result.unwrap();
    };
    let job = disk.begin(Job::Flatten).unwrap();
    jobs.send(job.clone()).unwrap();
    while !stop.load(Ordering::Relaxed) {
        let offset = random.below(size);
        let length = (1 + random.below(50_000)).min(size - offset);
        let range = offset as usize..(offset + length) as usize;
        match random.below(8) {
            0..4 => {
                let value = random.next() as u8;
                let buffers = Buffers::from_vec(vec![value; length as usize]);
                run(&mut disk, Op::Write { offset, buffers });
                model[range].fill(value);
            }
            4 => {
                let unmap = true;
                run(
                    &mut disk,
                    Op::WriteZeroes {
                        offset,
                        length,
                        unmap,
                    },
                );
                model[range].fill(0);
            }
            5 => run(&mut disk, Op::Flush),
            _ => {
                let buffer = SharedBuffer::zeroed(length as usize);
                let buffers = buffer.buffers();
                run(&mut disk, Op::Read { offset, buffers });
                assert!(buffer.take().expect("the request is over") == model[range]);
            }
        }
    }
    disk.close().unwrap();
}

#[test]
fn disks_on_threads_of_their_own_share_a_base_a_budget_and_limits_that_change_and_do_not_disturb_each_other()
 {
    let folder = Folder::new();
    let base = folder.path("base.raw");
    std::fs::write(&base, vec![0xaa; 4 << 20]).unwrap();
    // Less than all tables take, so that they evict each other.
    let budget = CacheBudget::new(128 * 1024);
    let limits = |rate: u64| {
        let mut limits = Limits::default();
        limits.operations.total = (rate > 0).then(|| rate.into());
        limits
    };
    let group = Throttle::new(limits(100_000)).unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let (jobs, begun) = mpsc::channel();
    let engines: Vec<_> = engines()
        .into_iter()
        .filter(|e| *e != IoEngine::Inline)
        .collect();
    let mut tops = Vec::new();
    let owners: Vec<_> = (0..6)
        .map(|n| {
            let top = folder.path(&format!("{n}.qcow2"));
            let base = text(&base);
            let options = "cluster_size=4k";
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
                base,
                text(&top),
            ]);
            let layers = [layer(folder.path("base.raw").as_path(), Format::Raw)];
            let options = DiskOptions {
                engine: engines[n % engines.len()],
                cache: budget.clone(),
                throttle: (n % 2 == 0).then(|| Arc::clone(&group)),
                ..DiskOptions::default()
            };
            let disk = Disk::open_with(&spec(&top, Format::Qcow2, &layers), options).unwrap();
            tops.push(top);
            let (stop, jobs) = (Arc::clone(&stop), jobs.clone());
            std::thread::spawn(move || keep_busy(disk, n as u64 + 1, &stop, &jobs))
        })
        .collect();
    drop(jobs);
    let handles: Vec<JobHandle> = begun.iter().take(6).collect();
    let begun = Instant::now();
    let mut random = Random(99);
    while begun.elapsed() < Duration::from_secs(4) {
        let handle = &handles[random.below(6) as usize];
        match random.below(6) {
            0 => handle.pause(),
            1 | 2 => handle.resume(),
            3 => handle.set_rate(Some(1 << 20)),
            4 => handle.set_rate(None),
            _ => group.set_limits(limits(random.below(3) * 1000)).unwrap(),
        }
        assert!(handle.progress().done <= handle.progress().total);
        std::thread::sleep(Duration::from_millis(random.below(4)));
    }
    group.set_limits(limits(0)).unwrap();
    stop.store(true, Ordering::Relaxed);
    for owner in owners {
        owner.join().unwrap();
    }
    assert_eq!(budget.used(), 0, "all of the budget is given back");
    for top in tops {
        assert_clean(&top);
    }
}
