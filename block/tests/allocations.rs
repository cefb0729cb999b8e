//! What is mapped and cached is served without taking memory.

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::Arc;

use common::{Folder, engines, qemu_img, spec, text, wait};
use drover_block::{Buffers, Cache, Disk, Format, Op, RawSlice, Request};

thread_local! {
    static TAKEN: Cell<u64> = const { Cell::new(0) };
}

struct Counting;

// SAFETY: everything is the system allocator's; the counter is a plain cell of the thread and allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        TAKEN.with(|taken| taken.set(taken.get() + 1));
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(pointer, layout) };
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn reads_and_writes_of_mapped_clusters_allocate_nothing() {
    for engine in engines() {
        for cache in [Cache::Buffered, Cache::Direct] {
            let folder = Folder::on_disk();
            let top = folder.path("top.qcow2");
            qemu_img(&["create", "-q", "-f", "qcow2", text(&top), "8M"]);
            let mut spec = spec(&top, Format::Qcow2, &[]);
            spec.top.cache = cache;
            let mut disk = Disk::open_with(&spec, engine).unwrap();
            let mut completions = Vec::with_capacity(64);
            let all = Op::Write {
                offset: 0,
                buffers: Buffers::from_vec(vec![1; 8 << 20]),
            };
            disk.execute(&all).unwrap();
            disk.execute(&Op::Flush).unwrap();
            let memory: *mut Page = Box::leak(Box::new(Page([3; 4096])));
            let mut serve = |disk: &mut Disk, rounds: u64| {
                let mut taken = 0;
                for round in 0..rounds {
                    let mut ops: Vec<Op> = (0..32)
                        .map(|n| {
                            let offset = (round * 32 + n) % 2048 * 4096;
                            let buffers = page(memory);
                            if n % 2 == 0 {
                                Op::Read { offset, buffers }
                            } else {
                                Op::Write { offset, buffers }
                            }
                        })
                        .collect();
                    let before = TAKEN.get();
                    for (tag, op) in (0..).zip(ops.drain(..)) {
                        disk.submit(Request { tag, op });
                    }
                    while completions.len() < 32 {
                        disk.poll(&mut completions);
                        if completions.len() < 32 {
                            // Waiting is the test's, and may take what it likes.
                            let waiting = TAKEN.get();
                            wait(disk);
                            TAKEN.set(waiting);
                        }
                    }
                    taken += TAKEN.get() - before;
                    completions.clear();
                }
                taken
            };
            serve(&mut disk, 64);
            // Room for so many requests at a time is made when there are so many for the first time.
            let taken = (0..6).map(|_| serve(&mut disk, 50)).min();
            assert_eq!(taken, Some(0), "{engine:?} {cache:?}");
            disk.close().unwrap();
        }
    }
}

#[repr(C, align(4096))]
struct Page([u8; 4096]);

/// Requests for one page of memory that is never freed, aligned as a guest's are.
fn page(page: *mut Page) -> Buffers {
    // SAFETY: the page was leaked and is touched by requests alone.
    unsafe { Buffers::from_raw(vec![RawSlice::new(page.cast(), 4096)], Arc::new(())) }
}
