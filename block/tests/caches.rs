//! What the caches of tables take, and that nobody is starved by it.

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::fs::File;
use std::os::unix::fs::FileExt;

use common::{Folder, Random, TestDisk, layer, qemu_img, qemu_io, spec, text};
use drover_block::{CacheBudget, Disk, DiskOptions, DiskSpec, Format, IoEngine, Op};

thread_local! {
    static NOW: Cell<usize> = const { Cell::new(0) };
    static MOST: Cell<usize> = const { Cell::new(0) };
}

struct Measuring;

// SAFETY: everything is the system allocator's; the counters are plain cells of the thread and allocate nothing.
unsafe impl GlobalAlloc for Measuring {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        NOW.set(NOW.get() + layout.size());
        MOST.set(MOST.get().max(NOW.get()));
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        NOW.set(NOW.get().saturating_sub(layout.size()));
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(pointer, layout) };
    }
}

#[global_allocator]
static ALLOCATOR: Measuring = Measuring;

/// A chain of `layers` images with clusters of 512 bytes, all of it in the lowest; every cluster says where it is.
fn chain(folder: &Folder, name: &str, layers: usize, size: u64) -> DiskSpec {
    let path = |n: usize| folder.path(&format!("{name}-{n}.qcow2"));
    let options = ["-o", "cluster_size=512", "-f", "qcow2"];
    for n in (0..layers).rev() {
        let (size, file, below) = (size.to_string(), path(n), path(n + 1));
        let mut arguments = vec!["create", "-q"];
        arguments.extend(options);
        if n + 1 < layers {
            arguments.extend(["-F", "qcow2", "-b", text(&below)]);
        }
        arguments.extend([text(&file), &size]);
        qemu_img(&arguments);
    }
    let bytes: Vec<u8> = (0..size / 8).flat_map(|n| (n * 8).to_le_bytes()).collect();
    let raw = folder.path("all.raw");
    std::fs::write(&raw, bytes).unwrap();
    qemu_io(
        "qcow2",
        &path(layers - 1),
        &[&format!("write -q -s {} 0 {size}", text(&raw))],
    );
    let below: Vec<_> = (1..layers)
        .map(|n| layer(&path(n), Format::Qcow2))
        .collect();
    spec(&path(0), Format::Qcow2, &below)
}

#[test]
fn many_chains_share_one_budget_and_all_of_them_get_on() {
    const SIZE: u64 = 4 << 20;
    let folder = Folder::new();
    let budget = CacheBudget::new(512 * 1024);
    let mut disks: Vec<_> = (0..3)
        .map(|n| {
            let spec = chain(&folder, &format!("chain{n}"), 4, SIZE);
            let options = DiskOptions {
                engine: IoEngine::Threads,
                cache: budget.clone(),
                ..DiskOptions::default()
            };
            TestDisk(Disk::open_with(&spec, options).unwrap())
        })
        .collect();
    let mut random = Random(7);
    for step in 0..3000 {
        let disk = &mut disks[random.below(3) as usize];
        let at = random.below(SIZE / 512) * 512;
        assert_eq!(disk.read(at, 8), at.to_le_bytes(), "step {step}");
        let used = budget.used();
        assert!(used <= budget.limit(), "{used} bytes are used");
    }
    for disk in &disks {
        let counts = disk.0.cache_counts();
        assert!(counts.hits() > 0 && counts.misses() > 100, "{counts:?}");
    }
    for disk in disks {
        disk.close();
    }
    assert_eq!(budget.used(), 0, "a closed disk gives back what it took");
}

#[test]
fn a_budget_of_nothing_is_enough_to_work_with() {
    let folder = Folder::new();
    let spec = chain(&folder, "chain", 3, 1 << 20);
    let budget = CacheBudget::new(0);
    for engine in common::engines() {
        let options = DiskOptions {
            engine,
            cache: budget.clone(),
            ..DiskOptions::default()
        };
        let mut disk = TestDisk(Disk::open_with(&spec, options).unwrap());
        let mut random = Random(11);
        for step in 0..600 {
            let at = random.below((1 << 20) / 512) * 512;
            disk.write(at, &at.to_le_bytes());
            let at = random.below((1 << 20) / 512) * 512;
            assert_eq!(disk.read(at, 8), at.to_le_bytes(), "step {step}");
            // The floors of three images, and what is dirty.
            assert!(budget.used() < 256 * 1024, "{}", budget.used());
        }
        disk.close();
        common::assert_clean(&spec.top.path);
    }
}

#[test]
fn a_second_look_at_a_table_is_a_hit() {
    let folder = Folder::new();
    let spec = chain(&folder, "chain", 1, 1 << 20);
    let mut disk = Disk::open(&spec).unwrap();
    let counts = disk.cache_counts();
    let read = |disk: &mut Disk| {
        let memory = drover_block::SharedBuffer::zeroed(512);
        disk.execute(&Op::Read {
            offset: 0,
            buffers: memory.buffers(),
        })
        .unwrap();
    };
    read(&mut disk);
    assert_eq!(counts.misses(), 1);
    let hits = counts.hits();
    read(&mut disk);
    assert_eq!((counts.misses(), counts.hits()), (1, hits + 1));
}

#[test]
fn opening_a_full_disk_of_two_terabytes_takes_little_memory() {
    const SIZE: u64 = 2 << 40;
    const CLUSTER: u64 = 65536;
    let folder = Folder::on_disk();
    let path = folder.path("large.qcow2");
    qemu_img(&[
        "create",
        "-q",
        "-f",
        "qcow2",
        text(&path),
        &SIZE.to_string(),
    ]);
    // Every table of it, without what is in them: nobody looks at that when it opens.
    let file = File::options().read(true).write(true).open(&path).unwrap();
    let mut field = [0; 8];
    file.read_exact_at(&mut field, 40).unwrap();
    let l1 = u64::from_be_bytes(field);
    file.read_exact_at(&mut field, 48).unwrap();
    let refcount_table = u64::from_be_bytes(field);
    let entries = |first: u64, count: u64| -> Vec<u8> {
        let hosts = (first..first + count).map(|n| n * CLUSTER);
        hosts.flat_map(u64::to_be_bytes).collect()
    };
    file.write_all_at(&entries(1000, 4096), l1).unwrap();
    file.write_all_at(&entries(10_000, 1024), refcount_table)
        .unwrap();
    file.set_len(SIZE)
        .unwrap_or_else(|_| file.set_len(1 << 40).unwrap());
    let before = NOW.get();
    MOST.set(before);
    let disk = Disk::open(&spec(&path, Format::Qcow2, &[])).unwrap();
    let most = MOST.get() - before;
    let kept = NOW.get() - before;
    assert!(most < 512 * 1024, "opening takes {most} bytes");
    assert!(kept < 256 * 1024, "an open disk keeps {kept} bytes");
    drop(disk);
}
