//! What performs transfers makes no difference to a guest: many requests at once over every engine, judged by QEMU's tools.

mod common;

use std::ops::Range;

use common::{Folder, Random, assert_clean, contents, engines, layer, qemu_img, spec, text, wait};
use drover_block::{Buffers, Cache, Disk, DiskSpec, Format, IoEngine, Op, Request, SharedBuffer};
use rustix::event::{PollFd, PollFlags, Timespec};

const SECTOR: u64 = 512;

/// A request under way: its sectors and, of a read, the memory and what must be in it.
struct Busy {
    tag: u64,
    sectors: Range<u64>,
    read: Option<(SharedBuffer, Vec<u8>)>,
}

/// Keeps up to 16 requests under way that share clusters but no sectors, and checks every read.
fn exercise(spec: &DiskSpec, engine: IoEngine, model: &mut [u8], count: u64, seed: u64) {
    let mut disk = Disk::open_with(spec, engine).unwrap();
    let mut random = Random(seed);
    let mut busy: Vec<Busy> = Vec::new();
    let mut completions = Vec::new();
    let total = model.len() as u64 / SECTOR;
    let mut most = 0;
    for tag in 0..count {
        let depth = 1 + random.below(16) as usize;
        while busy.len() >= depth {
            disk.poll(&mut completions);
            if completions.is_empty() {
                wait(&disk);
            }
            finish(&mut completions, &mut busy);
        }
        let first = random.below(total);
        let sectors = first..first + (1 + random.below(100)).min(total - first);
        let free = |b: &Busy| b.sectors.end <= sectors.start || sectors.end <= b.sectors.start;
        if !busy.iter().all(free) {
            continue;
        }
        let (offset, length) = (first * SECTOR, (sectors.end - first) * SECTOR);
        let range = offset as usize..(offset + length) as usize;
        let mut entry = Busy {
            tag,
            sectors,
            read: None,
        };
        let op = match random.below(8) {
            0..3 => {
                let value = random.next() as u8;
                model[range].fill(value);
                Op::Write {
                    offset,
                    buffers: Buffers::from_vec(vec![value; length as usize]),
                }
            }
            3..6 => {
                let buffer = SharedBuffer::zeroed(length as usize);
                let buffers = buffer.buffers();
                entry.read = Some((buffer, model[range].to_vec()));
                Op::Read { offset, buffers }
            }
            6 => {
                model[range].fill(0);
                let unmap = random.below(2) == 0;
                Op::WriteZeroes {
                    offset,
                    length,
                    unmap,
                }
            }
            _ => {
                entry.sectors = 0..0;
                Op::Flush
            }
        };
        busy.push(entry);
        most = most.max(busy.len());
        disk.submit(Request { tag, op });
    }
    while !busy.is_empty() {
        disk.poll(&mut completions);
        if completions.is_empty() {
            wait(&disk);
        }
        finish(&mut completions, &mut busy);
    }
    assert_eq!(disk.in_flight(), 0);
    assert!(most > 4, "never more than {most} requests at once");
    disk.close().unwrap();
}

fn finish(completions: &mut Vec<drover_block::Completion>, busy: &mut Vec<Busy>) {
    for completion in completions.drain(..) {
        completion.result.unwrap();
        let at = busy.iter().position(|b| b.tag == completion.tag);
        let done = busy.swap_remove(at.expect("one completion a request"));
        if let Some((buffer, expected)) = done.read {
            let seen = buffer.take().expect("the request is over");
            assert!(seen == expected, "sectors {:?} differ", done.sectors);
        }
    }
}

#[test]
fn many_requests_at_once_are_as_good_as_one_after_the_other() {
    for engine in engines() {
        for (n, (options, cache)) in [
            ("cluster_size=64k", Cache::Direct),
            ("cluster_size=4k,refcount_bits=64", Cache::Buffered),
            // Clusters smaller than a block of direct I/O, which neighbours then share.
            ("cluster_size=512", Cache::Direct),
            ("compat=0.10,cluster_size=1k", Cache::Buffered),
        ]
        .into_iter()
        .enumerate()
        {
            let folder = match cache {
                Cache::Direct => Folder::on_disk(),
                Cache::Buffered => Folder::new(),
            };
            let (base, top) = (folder.path("base.raw"), folder.path("top.qcow2"));
            let mut model: Vec<u8> = (0..900_000u32 / 512 * 512)
                .map(|i| (i / 512) as u8)
                .collect();
            std::fs::write(&base, &model).unwrap();
            model.resize(1 << 20, 0);
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
                text(&base),
                text(&top),
                "1M",
            ]);
            let mut spec = spec(&top, Format::Qcow2, &[layer(&base, Format::Raw)]);
            spec.top.cache = cache;
            for round in 0..3 {
                exercise(&spec, engine, &mut model, 250, 1 + n as u64 + round * 10);
                assert_clean(&top);
            }
            let seen = contents("qcow2", &top);
            assert!(
                seen == model,
                "{engine:?} {options}: QEMU reads something else"
            );
        }
    }
}

fn is_readable(disk: &Disk) -> bool {
    let event = disk.event().expect("an asynchronous engine has an event");
    let mut poll = [PollFd::new(&event, PollFlags::IN)];
    let now = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    rustix::event::poll(&mut poll, Some(&now)).unwrap() > 0
}

#[test]
fn the_event_is_readable_exactly_while_there_is_something_to_poll_for() {
    for engine in engines() {
        if engine == IoEngine::Inline {
            continue;
        }
        let folder = Folder::on_disk();
        let top = folder.path("top.raw");
        std::fs::write(&top, vec![7; 1 << 20]).unwrap();
        let mut disk = Disk::open_with(&spec(&top, Format::Raw, &[]), engine).unwrap();
        let mut completions = Vec::new();
        for tag in 0..20 {
            assert!(!is_readable(&disk), "{engine:?}: nothing is under way");
            let buffer = SharedBuffer::zeroed(8192);
            let buffers = buffer.buffers();
            let op = Op::Read { offset: 0, buffers };
            disk.submit(Request { tag, op });
            disk.poll(&mut completions);
            while completions.is_empty() {
                wait(&disk);
                disk.poll(&mut completions);
            }
            assert_eq!(
                completions.drain(..).map(|c| c.tag).collect::<Vec<_>>(),
                [tag]
            );
            assert_eq!(buffer.take().expect("the request is over"), [7; 8192]);
        }
    }
}

#[test]
fn a_disk_that_is_dropped_finishes_what_is_under_way() {
    for engine in engines() {
        let folder = Folder::on_disk();
        let top = folder.path("top.qcow2");
        qemu_img(&["create", "-q", "-f", "qcow2", text(&top), "8M"]);
        let mut disk = Disk::open_with(&spec(&top, Format::Qcow2, &[]), engine).unwrap();
        for tag in 0..64 {
            let op = Op::Write {
                offset: tag * 100_000,
                buffers: Buffers::from_vec(vec![tag as u8 + 1; 100_000]),
            };
            disk.submit(Request { tag, op });
        }
        drop(disk);
        assert_clean(&top);
        for (n, bytes) in contents("qcow2", &top).chunks(100_000).take(64).enumerate() {
            assert!(
                bytes.iter().all(|b| *b == n as u8 + 1),
                "{engine:?}: write {n}"
            );
        }
    }
}

#[test]
fn a_disk_goes_on_in_another_thread_with_requests_under_way() {
    for engine in engines() {
        let folder = Folder::on_disk();
        let top = folder.path("top.qcow2");
        qemu_img(&["create", "-q", "-f", "qcow2", text(&top), "8M"]);
        let mut disk = Disk::open_with(&spec(&top, Format::Qcow2, &[]), engine).unwrap();
        for tag in 0..16 {
            let op = Op::Write {
                offset: tag << 16,
                buffers: Buffers::from_vec(vec![5; 65536]),
            };
            disk.submit(Request { tag, op });
        }
        let seen = std::thread::spawn(move || {
            let mut completions = Vec::new();
            while disk.in_flight() > 0 {
                disk.poll(&mut completions);
                if disk.in_flight() > 0 {
                    wait(&disk);
                }
            }
            disk.close().unwrap();
            completions.len()
        });
        assert_eq!(seen.join().unwrap(), 16);
        assert_clean(&top);
    }
}
