//! What requests cost in calls and bytes. Times drift from machine to machine; these do not, so they have limits.

mod common;

use std::path::Path;

use common::{Folder, TestDisk, engines, layer, qemu_img, qemu_io, spec, text};
use drover_block::{Disk, DiskSpec, Format, IoEngine};

const CLUSTER: u64 = 65536;

/// Calls and bytes since the last time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Cost {
    reads: u64,
    writes: u64,
    bytes_written: u64,
    syncs: u64,
    allocations: u64,
}

/// A disk whose requests are counted.
struct Counted {
    disk: TestDisk,
    before: Cost,
}

impl Counted {
    fn open(spec: &DiskSpec, engine: IoEngine) -> Self {
        let mut counted = Self {
            disk: TestDisk(Disk::open_with(spec, engine).unwrap()),
            before: Cost::default(),
        };
        counted.cost();
        counted
    }

    fn cost(&mut self) -> Cost {
        let counts = self.disk.0.host_counts();
        let now = Cost {
            reads: counts.reads(),
            writes: counts.writes(),
            bytes_written: counts.bytes_written(),
            syncs: counts.syncs(),
            allocations: counts.allocations(),
        };
        let before = std::mem::replace(&mut self.before, now);
        Cost {
            reads: now.reads - before.reads,
            writes: now.writes - before.writes,
            bytes_written: now.bytes_written - before.bytes_written,
            syncs: now.syncs - before.syncs,
            allocations: now.allocations - before.allocations,
        }
    }
}

/// An empty overlay of 64 MiB over a base that is full of sevens.
fn overlay(folder: &Folder) -> DiskSpec {
    let (base, top) = (folder.path("base.qcow2"), folder.path("top.qcow2"));
    qemu_img(&["create", "-q", "-f", "qcow2", text(&base), "64M"]);
    qemu_io("qcow2", &base, &["write -q -P 7 0 64M"]);
    make_overlay(&base, &top);
    spec(&top, Format::Qcow2, &[layer(&base, Format::Qcow2)])
}

fn make_overlay(base: &Path, top: &Path) {
    let base = text(base);
    qemu_img(&[
        "create",
        "-q",
        "-f",
        "qcow2",
        "-F",
        "qcow2",
        "-b",
        base,
        text(top),
        "64M",
    ]);
}

#[test]
fn an_allocating_write_is_one_write_and_one_read_of_what_is_around_it() {
    for engine in engines() {
        let folder = Folder::new();
        let mut counted = Counted::open(&overlay(&folder), engine);
        // The first makes the table and brings what it needs into the cache.
        counted.disk.fill(0, 4096, 1);
        counted.disk.flush();
        counted.cost();
        for n in 1..200 {
            counted.disk.fill(n * CLUSTER + 8192, 4096, 1);
            let cost = counted.cost();
            let wanted = Cost {
                reads: 1,
                writes: 1,
                bytes_written: CLUSTER,
                ..Cost::default()
            };
            assert_eq!(cost, wanted, "{engine:?}, write {n}");
        }
        counted.disk.flush();
        let flush = counted.cost();
        // One piece of a refcount block, one of an L2 table.
        assert!(
            flush.writes <= 2 && flush.syncs <= 2,
            "{engine:?}: {flush:?}"
        );
        assert!(flush.bytes_written <= 2 * 4096, "{engine:?}: {flush:?}");
        counted.disk.close();
    }
}

#[test]
fn a_write_over_many_new_clusters_is_one_write() {
    for engine in engines() {
        let folder = Folder::new();
        let mut counted = Counted::open(&overlay(&folder), engine);
        counted.disk.fill(0, 512, 1);
        counted.cost();
        // From the middle of a cluster into the middle of another, 17 in all.
        counted.disk.fill(CLUSTER + 4096, 1 << 20, 2);
        let cost = counted.cost();
        assert_eq!(
            (cost.reads, cost.writes),
            (2, 1),
            "{engine:?}: head, tail, all"
        );
        assert_eq!(cost.bytes_written, 17 * CLUSTER, "{engine:?}");
        counted.disk.close();
    }
}

#[test]
fn nothing_is_copied_where_nothing_lies_below() {
    for engine in engines() {
        let folder = Folder::new();
        let top = folder.path("top.qcow2");
        qemu_img(&["create", "-q", "-f", "qcow2", text(&top), "64M"]);
        let mut counted = Counted::open(&spec(&top, Format::Qcow2, &[]), engine);
        counted.disk.fill(0, 4096, 1);
        counted.disk.flush();
        counted.cost();
        for n in 1..200 {
            counted.disk.fill(n * CLUSTER, 4096, 1);
        }
        counted.disk.flush();
        let cost = counted.cost();
        let guest = 199 * 4096;
        assert!(
            cost.bytes_written <= guest + 2 * 4096,
            "{engine:?}: {cost:?}"
        );
        assert_eq!(cost.reads, 0, "{engine:?}");
        counted.disk.close();
    }
}

#[test]
fn a_new_table_costs_at_most_three_fdatasyncs() {
    for engine in engines() {
        let folder = Folder::new();
        let top = folder.path("top.qcow2");
        // A table maps 32 KiB, a refcount block counts as much.
        qemu_img(&[
            "create",
            "-q",
            "-f",
            "qcow2",
            "-o",
            "cluster_size=4096",
            text(&top),
            "256M",
        ]);
        let mut counted = Counted::open(&spec(&top, Format::Qcow2, &[]), engine);
        let (mut syncs, mut most) = (0, 0);
        const TABLES: u64 = 100;
        for n in 0..TABLES {
            // 512 entries of 4 KiB to a table.
            counted.disk.fill(n * (2 << 20), 4096, 1);
            counted.disk.flush();
            let cost = counted.cost();
            syncs += cost.syncs;
            most = most.max(cost.syncs);
        }
        assert!(most <= 3, "{engine:?}: {most}");
        assert!(syncs <= 2 * TABLES + 2, "{engine:?}: {syncs}");
        // Without flushes of the guest there are none.
        for n in 0..20 {
            counted.disk.fill((100 + n) * (2 << 20), 4096, 1);
        }
        assert_eq!(counted.cost().syncs, 0, "{engine:?}");
        counted.disk.close();
    }
}

#[test]
fn a_mapped_request_is_one_call_and_a_flush_without_news_is_none() {
    for engine in engines() {
        let folder = Folder::new();
        let mut counted = Counted::open(&overlay(&folder), engine);
        counted.disk.fill(0, 4 << 20, 1);
        counted.disk.read(0, 1);
        counted.disk.read(8 << 20, 1);
        counted.disk.flush();
        counted.disk.flush();
        counted.cost();
        for n in 0..50 {
            let offset = n * 61 * 512;
            counted.disk.read(offset, 4096);
            // From the base.
            counted.disk.read((8 << 20) + offset, 4096);
            let cost = counted.cost();
            assert_eq!((cost.reads, cost.writes), (2, 0), "{engine:?}, {n}");
            counted.disk.fill(offset, 4096, 1);
            let cost = counted.cost();
            assert_eq!((cost.reads, cost.writes), (0, 1), "{engine:?}, {n}");
        }
        counted.disk.flush();
        let flush = counted.cost();
        assert_eq!((flush.writes, flush.syncs), (0, 1), "{engine:?}");
        counted.disk.flush();
        assert_eq!(counted.cost(), Cost::default(), "{engine:?}");
        counted.disk.close();
    }
}

#[test]
fn a_read_through_33_layers_is_one_call() {
    for engine in engines() {
        let folder = Folder::new();
        let path = |n: usize| folder.path(&format!("{n}.qcow2"));
        for n in 0..33 {
            let file = path(n);
            match n {
                0 => drop(qemu_img(&[
                    "create",
                    "-q",
                    "-f",
                    "qcow2",
                    text(&file),
                    "64M",
                ])),
                _ => make_overlay(&path(n - 1), &file),
            }
        }
        qemu_io("qcow2", &path(0), &["write -q -P 7 0 64M"]);
        let below: Vec<_> = (0..32)
            .rev()
            .map(|n| layer(&path(n), Format::Qcow2))
            .collect();
        let mut counted = Counted::open(&spec(&path(32), Format::Qcow2, &below), engine);
        counted.disk.read(0, 1);
        counted.disk.read(32 << 20, 1);
        counted.cost();
        for n in 0..200 {
            assert_eq!(counted.disk.read(n * 331_776, 4096), [7; 4096]);
            assert_eq!(counted.cost().reads, 1, "{engine:?}, {n}");
        }
        counted.disk.close();
    }
}

/// System calls of this thread that read and that wrote.
fn system_calls() -> (u64, u64) {
    let text = std::fs::read_to_string("/proc/thread-self/io").unwrap();
    let number = |key: &str| -> u64 {
        let line = text.lines().find(|line| line.starts_with(key)).unwrap();
        line[key.len()..].trim().parse().unwrap()
    };
    (number("syscr:"), number("syscw:"))
}

#[test]
fn the_calls_that_are_counted_are_the_calls_that_are_made() {
    let folder = Folder::new();
    let mut counted = Counted::open(&overlay(&folder), IoEngine::Inline);
    let before = system_calls();
    for n in 0..100 {
        counted.disk.fill(n * CLUSTER, 4096, 1);
        counted.disk.read(n * CLUSTER + 100, 4096);
    }
    counted.disk.flush();
    let after = system_calls();
    let cost = counted.cost();
    assert_eq!(after.1 - before.1, cost.writes);
    // Looking at /proc is a few calls itself.
    let reads = after.0 - before.0;
    assert!(
        (cost.reads..cost.reads + 8).contains(&reads),
        "{reads} {cost:?}"
    );
    counted.disk.close();
}
