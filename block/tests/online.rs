//! Jobs on disks that are in use: a guest keeps the disk busy meanwhile, a model knows what it has to read, QEMU's tools judge the
//! images afterwards. Every back end, many shapes of chains.

mod common;

use std::ops::Range;
use std::path::Path;
use std::time::{Duration, Instant};

use common::{
    Folder, Random, TestDisk, assert_clean, check, contents, engines, layer, qemu_img, qemu_io,
    spec, text,
};
use drover_block::{
    Buffers, Disk, DiskOptions, DiskSpec, ErrorKind, Format, IoEngine, Job, JobHandle, JobState,
    Layer, Op, Request, SharedBuffer, image, lease,
};
use rustix::event::{PollFd, PollFlags, Timespec};

const SECTOR: usize = 512;
const MIB: u64 = 1 << 20;

/// An image to be made: options for `qemu-img create`, or a raw one.
#[derive(Clone, Copy)]
struct Image {
    options: Option<&'static str>,
    size: u64,
}

const fn qcow2(options: &'static str, size: u64) -> Image {
    Image {
        options: Some(options),
        size,
    }
}

const fn raw(size: u64) -> Image {
    Image {
        options: None,
        size,
    }
}

/// Chains, the top first.
const CHAINS: &[&[Image]] = &[
    &[
        qcow2("cluster_size=64k", 4 * MIB),
        qcow2("cluster_size=64k", 4 * MIB),
    ],
    &[
        qcow2("cluster_size=4k", 2 * MIB),
        qcow2("cluster_size=64k", 2 * MIB),
        raw(MIB + 1536),
    ],
    &[
        qcow2("cluster_size=64k", 2 * MIB + 512),
        qcow2("cluster_size=2k", MIB),
        qcow2("cluster_size=512", 3 * MIB),
    ],
    &[
        qcow2("cluster_size=16k,extended_l2=on", 2 * MIB),
        qcow2("cluster_size=32k,extended_l2=on", 2 * MIB),
        raw(2 * MIB),
    ],
    &[
        qcow2("cluster_size=64k,extended_l2=on", 3 * MIB),
        raw(2 * MIB),
    ],
    &[
        qcow2("compat=0.10", 2 * MIB),
        qcow2("compat=0.10,cluster_size=8k", MIB + 512),
        raw(2 * MIB),
    ],
    &[
        qcow2("cluster_size=512", MIB),
        qcow2("cluster_size=2M", 5 * MIB),
    ],
    &[
        qcow2("cluster_size=2M", 24 * MIB + 512),
        qcow2("cluster_size=512,refcount_bits=64", 4 * MIB),
        raw(18 * MIB),
    ],
];

/// A chain with random contents.
struct Scene {
    _folder: Folder,
    spec: DiskSpec,
    /// What each sector holds.
    sectors: Vec<u8>,
}

impl Scene {
    fn new(images: &[Image], random: &mut Random) -> Self {
        let folder = Folder::new();
        let mut layers: Vec<Layer> = Vec::new();
        for (n, image) in images.iter().enumerate().rev() {
            let name = format!(
                "{n}.{}",
                if image.options.is_some() {
                    "qcow2"
                } else {
                    "raw"
                }
            );
            let path = folder.path(&name);
            create(&path, *image, layers.first());
            let format = if image.options.is_some() {
                Format::Qcow2
            } else {
                Format::Raw
            };
            fill(&spec(&path, format, &layers), random);
            layers.insert(0, layer(&path, format));
        }
        let top = layers.remove(0);
        let spec = spec(&top.path, top.format, &layers);
        let sectors = contents("qcow2", &top.path);
        let sectors = sectors.chunks(SECTOR).map(|sector| sector[0]).collect();
        Self {
            _folder: folder,
            spec,
            sectors,
        }
    }

    fn layers(&self) -> &[Layer] {
        match &self.spec.backing {
            drover_block::Backing::Explicit(layers) => layers,
            drover_block::Backing::FromHeader { .. } => unreachable!("made so"),
        }
    }

    fn open(&self, job: Job, engine: IoEngine) -> Disk {
        let options = DiskOptions {
            engine,
            commit_below: job == Job::Commit,
            ..DiskOptions::default()
        };
        Disk::open_with(&self.spec, options).unwrap()
    }

    /// The disk as it is to be opened when the job is done.
    fn afterwards(&self, job: Job) -> DiskSpec {
        match job {
            Job::Flatten => spec(&self.spec.top.path, Format::Qcow2, &[]),
            Job::Commit => {
                let (first, rest) = self.layers().split_first().unwrap();
                spec(&first.path, first.format, rest)
            }
        }
    }

    /// Every image of the chain that is qcow2 is sound.
    #[track_caller]
    fn assert_sound(&self) {
        for layer in std::iter::once(&self.spec.top).chain(self.layers()) {
            if layer.format == Format::Qcow2 {
                assert_clean(&layer.path);
            }
        }
    }
}

fn create(path: &Path, image: Image, below: Option<&Layer>) {
    let size = image.size.to_string();
    let Some(options) = image.options else {
        return qemu(&["create", "-q", "-f", "raw", text(path), &size]);
    };
    let mut arguments = vec!["create", "-q", "-f", "qcow2", "-o", options];
    if let Some(below) = below {
        let format = if below.format == Format::Raw {
            "raw"
        } else {
            "qcow2"
        };
        arguments.extend(["-F", format, "-b", text(&below.path)]);
    }
    arguments.extend([text(path), &size]);
    qemu(&arguments);
}

fn qemu(arguments: &[&str]) {
    qemu_img(arguments);
}

/// Random writes and zeros over a good part of the disk.
fn fill(spec: &DiskSpec, random: &mut Random) {
    let mut disk = TestDisk::open(spec);
    let sectors = disk.0.size_bytes() / SECTOR as u64;
    for n in 0..12u8 {
        let first = random.below(sectors);
        let count = (random.below(sectors / 32) + 1).min(sectors - first);
        let (offset, length) = (first * SECTOR as u64, count * SECTOR as u64);
        if n % 5 == 4 {
            disk.zero(offset, length, true);
        } else {
            disk.fill(offset, length as usize, random.next() as u8);
        }
    }
    disk.close();
}

struct Busy {
    tag: u64,
    sectors: Range<usize>,
    read: Option<SharedBuffer>,
}

/// Requests at random, several at a time on disjoint sectors, and what the disk has to read.
struct Guest {
    disk: Disk,
    /// What each sector may read as: several values after a discard.
    now: Vec<Vec<u8>>,
    busy: Vec<Busy>,
    next: u64,
    longest: u64,
}

impl Guest {
    fn new(disk: Disk, sectors: &[u8]) -> Self {
        Self {
            disk,
            now: sectors.iter().map(|value| vec![*value]).collect(),
            busy: Vec::new(),
            next: 0,
            longest: 300,
        }
    }

    fn request(&mut self, random: &mut Random) {
        let total = self.now.len() as u64;
        let first = random.below(total);
        let count = (random.below(self.longest) + 1).min(total - first);
        let sectors = first as usize..(first + count) as usize;
        let apart =
            |busy: &Busy| busy.sectors.end <= sectors.start || sectors.end <= busy.sectors.start;
        if !self.busy.iter().all(apart) {
            return;
        }
        let (offset, length) = (first * SECTOR as u64, count * SECTOR as u64);
        let mut read = None;
        let op = match random.below(12) {
            0..5 => {
                let value = random.next() as u8;
                self.set(&sectors, value, false);
                let buffers = Buffers::from_vec(vec![value; length as usize]);
                Op::Write { offset, buffers }
            }
            5..8 => {
                let buffer = SharedBuffer::from_vec(vec![0xcc; length as usize]);
                let buffers = buffer.buffers();
                read = Some(buffer);
                Op::Read { offset, buffers }
            }
            8 => {
                self.set(&sectors, 0, true);
                Op::Discard { offset, length }
            }
            9 | 10 => {
                self.set(&sectors, 0, false);
                let unmap = random.below(2) == 0;
                Op::WriteZeroes {
                    offset,
                    length,
                    unmap,
                }
            }
            _ => Op::Flush,
        };
        self.next += 1;
        let tag = self.next;
        self.busy.push(Busy { tag, sectors, read });
        self.disk.submit(Request { tag, op });
    }

    fn set(&mut self, sectors: &Range<usize>, value: u8, weak: bool) {
        for values in &mut self.now[sectors.clone()] {
            if !weak {
                values.clear();
            }
            values.push(value);
        }
    }

    fn poll(&mut self) {
        let mut completions = Vec::new();
        self.disk.poll(&mut completions);
        for completion in completions {
            completion.result.unwrap();
            let at = self.busy.iter().position(|busy| busy.tag == completion.tag);
            let busy = self.busy.swap_remove(at.expect("it was asked for"));
            if let Some(read) = busy.read {
                let bytes = read.take().expect("the request is over");
                compare(&bytes, &self.now[busy.sectors.clone()], busy.sectors.start);
            }
        }
    }

    fn drain(&mut self) {
        while !self.busy.is_empty() {
            self.poll();
            if !self.busy.is_empty() {
                common::wait(&self.disk);
            }
        }
    }

    /// Up to four requests at a time beside the job, until it is over or `until` says so.
    fn accompany(&mut self, handle: &JobHandle, random: &mut Random, until: impl Fn() -> bool) {
        let mut last = handle.progress();
        while !handle.state().is_over() && !until() {
            if self.busy.len() < 4 && random.below(3) > 0 {
                self.request(random);
            }
            self.poll();
            let progress = handle.progress();
            assert!(
                last.done <= progress.done && progress.done <= progress.total,
                "{last:?} {progress:?}"
            );
            last = progress;
            if random.below(4) == 0 {
                wait(&self.disk, Duration::from_secs(30));
            }
        }
    }

    /// Everything is as it should be; then the disk is closed. What the sectors hold.
    fn close(mut self) -> Vec<Vec<u8>> {
        self.drain();
        let mut disk = TestDisk(self.disk);
        let bytes = disk.read(0, self.now.len() * SECTOR);
        compare(&bytes, &self.now, 0);
        disk.close();
        self.now
    }
}

#[track_caller]
fn compare(bytes: &[u8], expected: &[Vec<u8>], first: usize) {
    for (n, (sector, values)) in bytes.chunks(SECTOR).zip(expected).enumerate() {
        let same = sector.iter().all(|byte| *byte == sector[0]);
        assert!(
            same && values.contains(&sector[0]),
            "sector {} reads {} and not one of {values:?}",
            first + n,
            sector[0]
        );
    }
}

/// Sleeps until the disk has something to say, as its owner's event loop would; whether it had.
fn wait(disk: &Disk, patience: Duration) -> bool {
    let (event, timer) = (disk.event(), disk.timer());
    let mut fds: Vec<PollFd<'_>> = event
        .iter()
        .chain(&timer)
        .map(|fd| PollFd::new(fd, PollFlags::IN))
        .collect();
    let patience = Timespec {
        tv_sec: patience.as_secs() as i64,
        tv_nsec: i64::from(patience.subsec_nanos()),
    };
    if disk.job().is_none() && disk.in_flight() == 0 {
        return false;
    }
    rustix::event::poll(&mut fds, Some(&patience)).unwrap() > 0
}

/// Lets a job run with nobody else there.
fn run(disk: &mut Disk, handle: &JobHandle) -> JobState {
    let mut completions = Vec::new();
    loop {
        disk.poll(&mut completions);
        if handle.state().is_over() {
            return handle.state();
        }
        assert!(
            wait(disk, Duration::from_secs(30)),
            "{handle:?} stands still"
        );
    }
}

/// Runs a job beside a guest over every chain with every back end, up to its end.
fn beside_a_guest(job: Job) {
    let mut random = Random(0x5eed + job as u64);
    let mut moved = 0;
    for (n, images) in CHAINS.iter().enumerate() {
        for engine in engines() {
            eprintln!("chain {n} {engine:?}");
            let scene = Scene::new(images, &mut random);
            let mut guest = Guest::new(scene.open(job, engine), &scene.sectors);
            let handle = guest.disk.begin(job).unwrap();
            guest.accompany(&handle, &mut random, || false);
            assert_eq!(handle.state(), JobState::Done, "chain {n} {engine:?}");
            let progress = handle.progress();
            assert_eq!(progress.done, progress.total);
            moved += progress.moved;
            // It is served on until it is opened again.
            for _ in 0..20 {
                guest.request(&mut random);
                guest.poll();
            }
            let now = guest.close();
            scene.assert_sound();
            let after = scene.afterwards(job);
            if job == Job::Flatten {
                for layer in scene.layers() {
                    std::fs::remove_file(&layer.path).unwrap();
                }
            } else {
                let map = image::map(&scene.spec).unwrap();
                assert!(
                    map.iter().all(|entry| entry.depth > 0 || !entry.present),
                    "chain {n} {engine:?}: the top still has something: {map:?}"
                );
            }
            let format = if after.top.format == Format::Raw {
                "raw"
            } else {
                "qcow2"
            };
            let bytes = contents(format, &after.top.path);
            compare(&bytes, &now, 0);
        }
    }
    assert!(moved > 10 * MIB, "only {moved} bytes had to be moved");
}

#[test]
fn a_disk_is_flattened_while_its_guest_works() {
    beside_a_guest(Job::Flatten);
}

#[test]
fn a_disk_is_committed_while_its_guest_works() {
    beside_a_guest(Job::Commit);
}

/// Cancels a job at random points; the chain as it was goes on to be used, and the job is done another time.
fn cancelled_anywhere(job: Job) {
    let mut random = Random(0xca9ce1 + job as u64);
    let mut cancelled = 0;
    'chains: for (n, images) in CHAINS.iter().enumerate() {
        let scene = Scene::new(images, &mut random);
        let mut sectors = scene.sectors.clone();
        for engine in engines() {
            eprintln!("chain {n} {engine:?}");
            let mut guest = Guest::new(scene.open(job, engine), &sectors);
            let handle = guest.disk.begin(job).unwrap();
            let until = random.below(scene.spec_size() * 3 / 4);
            guest.accompany(&handle, &mut random, || handle.progress().done >= until);
            handle.cancel();
            guest.accompany(&handle, &mut random, || false);
            // Where nothing is left to be done it is over sooner.
            cancelled += u32::from(handle.state() == JobState::Cancelled);
            let flattened = job == Job::Flatten && handle.state() == JobState::Done;
            let now = guest.close();
            scene.assert_sound();
            let bytes = contents("qcow2", &scene.spec.top.path);
            compare(&bytes, &now, 0);
            sectors = bytes.chunks(SECTOR).map(|sector| sector[0]).collect();
            if flattened {
                continue 'chains;
            }
        }
        // Again, to the end, by the offline job.
        match job {
            Job::Flatten => image::flatten(&scene.spec, &mut image::Unwatched),
            Job::Commit => image::commit(&scene.spec, &mut image::Unwatched),
        }
        .unwrap();
        let after = scene.afterwards(job);
        let format = if after.top.format == Format::Raw {
            "raw"
        } else {
            "qcow2"
        };
        let bytes = contents(format, &after.top.path);
        assert!(
            bytes
                .chunks(SECTOR)
                .zip(&sectors)
                .all(|(a, b)| a.iter().all(|a| a == b))
        );
    }
    assert!(
        cancelled > 12,
        "only {cancelled} jobs were cancelled in time"
    );
}

impl Scene {
    fn spec_size(&self) -> u64 {
        (self.sectors.len() * SECTOR) as u64
    }
}

#[test]
fn a_cancelled_flatten_leaves_the_disk_as_it_was() {
    cancelled_anywhere(Job::Flatten);
}

#[test]
fn a_cancelled_commit_leaves_the_disk_as_it_was() {
    cancelled_anywhere(Job::Commit);
}

/// A full top of `size` bytes over an empty layer, or the other way round.
fn full(folder: &Folder, size: u64, job: Job) -> DiskSpec {
    let (base, top) = (folder.path("base.qcow2"), folder.path("top.qcow2"));
    create(&base, qcow2("cluster_size=64k", size), None);
    let below = layer(&base, Format::Qcow2);
    let source = match job {
        Job::Flatten => spec(&base, Format::Qcow2, &[]),
        Job::Commit => spec(&top, Format::Qcow2, std::slice::from_ref(&below)),
    };
    create(&top, qcow2("cluster_size=64k", size), Some(&below));
    let mut disk = TestDisk::open(&source);
    for at in (0..size).step_by(MIB as usize) {
        disk.fill(at, MIB as usize, (at / MIB) as u8 + 1);
    }
    disk.close();
    spec(&top, Format::Qcow2, &[below])
}

#[test]
fn a_rate_is_kept_and_changed_while_the_job_runs() {
    for engine in engines() {
        let folder = Folder::new();
        let spec = full(&folder, 32 * MIB, Job::Flatten);
        let mut disk = Disk::open_with(&spec, engine).unwrap();
        let handle = disk.begin(Job::Flatten).unwrap();
        let mut completions = Vec::new();
        for rate in [2 * MIB, 6 * MIB] {
            handle.set_rate(Some(rate));
            disk.poll(&mut completions);
            // Until its first step under this rate is paid for.
            let warm = Instant::now();
            while warm.elapsed() < Duration::from_millis(300) {
                wait(&disk, Duration::from_millis(50));
                disk.poll(&mut completions);
            }
            let (start, before) = (Instant::now(), handle.progress().moved);
            while start.elapsed() < Duration::from_millis(2200) {
                wait(&disk, Duration::from_millis(50));
                disk.poll(&mut completions);
            }
            let seconds = start.elapsed().as_secs_f64();
            let measured = (handle.progress().moved - before) as f64 / seconds;
            let ratio = measured / rate as f64;
            // A host with much else to do makes it slower, never faster by more than what it may catch up with.
            assert!(
                (0.5..1.1).contains(&ratio),
                "{engine:?}: {ratio:.3} of {rate} bytes a second"
            );
        }
        handle.set_rate(None);
        assert_eq!(run(&mut disk, &handle), JobState::Done);
        disk.close().unwrap();
        assert_clean(&spec.top.path);
    }
}

#[test]
fn a_paused_job_does_nothing_until_it_is_resumed_by_another_thread() {
    for engine in engines() {
        let folder = Folder::new();
        let spec = full(&folder, 16 * MIB, Job::Flatten);
        let mut disk = Disk::open_with(&spec, engine).unwrap();
        let handle = disk.begin(Job::Flatten).unwrap();
        let mut completions = Vec::new();
        disk.poll(&mut completions);
        handle.pause();
        while wait(&disk, Duration::from_millis(50)) {
            disk.poll(&mut completions);
        }
        let before = handle.progress();
        assert!(before.done < before.total);
        assert_eq!(handle.state(), JobState::Paused);
        for _ in 0..10 {
            disk.poll(&mut completions);
        }
        assert_eq!(handle.progress(), before);
        let other = handle.clone();
        let thread = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(50));
            other.resume();
        });
        assert!(wait(&disk, Duration::from_secs(10)), "nobody was woken");
        thread.join().unwrap();
        assert_eq!(run(&mut disk, &handle), JobState::Done);
    }
}

#[test]
fn a_guest_waits_for_steps_and_not_for_the_job() {
    for job in [Job::Flatten, Job::Commit] {
        for engine in engines() {
            let folder = Folder::new();
            let spec = full(&folder, 128 * MIB, job);
            let options = DiskOptions {
                engine,
                commit_below: job == Job::Commit,
                ..DiskOptions::default()
            };
            let mut disk = Disk::open_with(&spec, options).unwrap();
            let handle = disk.begin(job).unwrap();
            let mut completions = Vec::new();
            let mut random = Random(9);
            let (mut requests, mut most) = (0, 0);
            while !handle.state().is_over() {
                let buffer = SharedBuffer::zeroed(4096);
                let offset = random.below(128 * MIB / 4096) * 4096;
                let buffers = buffer.buffers();
                let before = handle.progress().moved;
                disk.submit(Request {
                    tag: 1,
                    op: Op::Read { offset, buffers },
                });
                completions.clear();
                while completions.is_empty() {
                    disk.poll(&mut completions);
                    if completions.is_empty() {
                        common::wait(&disk);
                    }
                }
                requests += 1;
                most = most.max(handle.progress().moved - before);
            }
            // The steps under way when it came, and those of the polls that it took.
            assert!(
                most <= 4 * MIB,
                "{job:?} {engine:?}: one read waited for {most} bytes of the job"
            );
            assert!(
                requests >= 30,
                "{job:?} {engine:?}: only {requests} requests beside 128 MiB"
            );
            assert_eq!(handle.state(), JobState::Done);
        }
    }
}

#[test]
fn a_layer_below_keeps_its_snapshots_and_compressed_clusters_through_a_commit() {
    let mut random = Random(0x51ab);
    for engine in engines() {
        let folder = Folder::new();
        let (source, base, top) = (
            folder.path("source.raw"),
            folder.path("base.qcow2"),
            folder.path("top.qcow2"),
        );
        let bytes: Vec<u8> = (0..2 * MIB).map(|n| (n / 512 / 7) as u8 | 1).collect();
        std::fs::write(&source, &bytes).unwrap();
        qemu(&[
            "convert",
            "-c",
            "-f",
            "raw",
            "-O",
            "qcow2",
            "-o",
            "cluster_size=16k",
            text(&source),
            text(&base),
        ]);
        qemu(&["snapshot", "-c", "before", text(&base)]);
        let below = layer(&base, Format::Qcow2);
        create(&top, qcow2("cluster_size=4k", 2 * MIB), Some(&below));
        let spec = spec(&top, Format::Qcow2, &[below]);
        fill(&spec, &mut random);
        let sectors = contents("qcow2", &top);
        let sectors: Vec<u8> = sectors.chunks(SECTOR).map(|sector| sector[0]).collect();
        let options = DiskOptions {
            engine,
            commit_below: true,
            ..DiskOptions::default()
        };
        let mut guest = Guest::new(Disk::open_with(&spec, options).unwrap(), &sectors);
        let handle = guest.disk.begin(Job::Commit).unwrap();
        guest.accompany(&handle, &mut random, || false);
        assert_eq!(handle.state(), JobState::Done);
        let now = guest.close();
        assert_clean(&base);
        assert_clean(&top);
        compare(&contents("qcow2", &base), &now, 0);
        qemu(&["snapshot", "-a", "before", text(&base)]);
        assert!(
            contents("qcow2", &base) == bytes,
            "the snapshot has changed"
        );
    }
}

#[test]
fn a_job_that_cannot_be_is_refused_with_the_reason() {
    let folder = Folder::new();
    let spec_full = full(&folder, 2 * MIB, Job::Flatten);
    let refused = |disk: &mut Disk, job: Job| {
        let error = disk.begin(job).unwrap_err();
        assert!(matches!(error.kind, ErrorKind::Job(_)), "{error}");
        error.to_string()
    };
    let mut disk = Disk::open(&spec_full).unwrap();
    assert!(refused(&mut disk, Job::Commit).contains("was not opened for writing"));
    disk.begin(Job::Flatten).unwrap();
    assert!(refused(&mut disk, Job::Flatten).contains("another job on this disk is under way"));
    drop(disk);
    let read_only = DiskSpec {
        read_only: true,
        ..spec_full.clone()
    };
    assert!(refused(&mut Disk::open(&read_only).unwrap(), Job::Flatten).contains("read-only"));
    let raw = folder.path("x.raw");
    create(&raw, self::raw(MIB), None);
    let mut disk = Disk::open(&spec(&raw, Format::Raw, &[])).unwrap();
    assert!(refused(&mut disk, Job::Flatten).contains("no layers below"));
    drop(disk);
    qemu(&["snapshot", "-c", "s", text(&spec_full.top.path)]);
    let mut disk = Disk::open(&spec_full).unwrap();
    assert!(refused(&mut disk, Job::Flatten).contains("internal snapshots"));
    drop(disk);
    // Whose layers below nobody listed has none that could be committed to.
    let commit = DiskOptions {
        commit_below: true,
        ..DiskOptions::default()
    };
    let alone = spec(&raw, Format::Raw, &[]);
    let error = Disk::open_with(&alone, commit).unwrap_err();
    assert!(error.to_string().contains("listed"), "{error}");
}

#[test]
fn a_flattened_disk_is_not_opened_on_its_old_layers_again() {
    let folder = Folder::new();
    let spec = full(&folder, 2 * MIB, Job::Flatten);
    let mut disk = Disk::open(&spec).unwrap();
    let handle = disk.begin(Job::Flatten).unwrap();
    assert_eq!(run(&mut disk, &handle), JobState::Done);
    disk.close().unwrap();
    // On its own a discard empties clusters, through which the old base would be seen.
    let mut disk = TestDisk::open(&common::spec(&spec.top.path, Format::Qcow2, &[]));
    disk.discard(0, MIB);
    disk.close();
    let message = common::refusal(&spec);
    assert!(
        message.contains("may have been flattened") && message.contains("base.qcow2"),
        "{message}"
    );
}

#[test]
fn a_layer_that_an_overlay_was_committed_to_is_nobodys_past_any_more() {
    let folder = Folder::new();
    let spec = full(&folder, 2 * MIB, Job::Commit);
    let base = folder.path("base.qcow2");
    lease::supersede(&base, &spec.top.path).unwrap();
    let alone = common::spec(&base, Format::Qcow2, &[]);
    assert!(common::refusal(&alone).contains("top.qcow2"));
    image::commit(&spec, &mut image::Unwatched).unwrap();
    TestDisk::open(&alone).close();
}

#[test]
fn nobody_else_may_use_the_layer_that_is_committed_to() {
    let folder = Folder::new();
    let spec = full(&folder, 2 * MIB, Job::Commit);
    let base = folder.path("base.qcow2");
    let commit = DiskOptions {
        commit_below: true,
        ..DiskOptions::default()
    };
    let disk = Disk::open_with(&spec, commit.clone()).unwrap();
    let reader = common::try_qemu_io("qcow2", &base, &["read 0 512"]);
    assert!(!reader.status.success(), "QEMU reads what is being written");
    disk.close().unwrap();
    qemu_io("qcow2", &base, &["read 0 512"]);
    // And the other way round: a reader of the base, as another overlay on it is, is in the way.
    let other = Disk::open(&DiskSpec {
        read_only: true,
        ..common::spec(&base, Format::Qcow2, &[])
    })
    .unwrap();
    let error = Disk::open_with(&spec, commit).unwrap_err();
    assert!(error.to_string().contains("base.qcow2"), "{error}");
    drop(other);
}

#[test]
fn a_disk_that_is_closed_ends_its_job() {
    let folder = Folder::new();
    let spec = full(&folder, 8 * MIB, Job::Commit);
    for engine in engines() {
        let options = DiskOptions {
            engine,
            commit_below: true,
            ..DiskOptions::default()
        };
        let mut disk = Disk::open_with(&spec, options).unwrap();
        let handle = disk.begin(Job::Commit).unwrap();
        disk.poll(&mut Vec::new());
        assert_eq!(disk.in_flight(), 0, "steps are nobody's requests");
        disk.close().unwrap();
        assert_eq!(handle.state(), JobState::Cancelled);
        assert_eq!(check(&spec.top.path), (0, 0));
    }
    let seen = contents("qcow2", &spec.top.path);
    assert!(
        seen.iter()
            .enumerate()
            .all(|(n, byte)| *byte == (n as u64 / MIB) as u8 + 1)
    );
}
