//! Power cuts and failing hosts, tried out on what the engine did to its file.
//!
//! A run's writes, punches and fdatasyncs are recorded. A cut keeps everything before the last fdatasync and, of what came after, any
//! subset, down to single sectors. Whatever is left must have no corruption, and every sector must hold what was flushed or something
//! that the guest wrote later.

use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use crate::image::{self, CreateOptions};
use crate::io::tape::{self, Event, Tape};
use crate::{Backing, Buffers, Cache, Disk, DiskSpec, Format, IoError, Layer, Op, SharedBuffer};

const SECTOR: usize = 512;

struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 8) % end
    }
}

/// What the guest did, as the marks on the tape say.
#[derive(Clone, Debug)]
enum Deed {
    /// These sectors get this value.
    Set {
        sectors: std::ops::Range<usize>,
        value: u8,
    },
    Flushed,
}

fn layer(path: &Path, format: Format) -> Layer {
    Layer {
        path: path.to_owned(),
        format,
        cache: Cache::Buffered,
    }
}

struct Scene {
    _folder: tempfile::TempDir,
    spec: DiskSpec,
    size: usize,
    base_value: u8,
}

impl Scene {
    fn new(cluster_size: u64, refcount_bits: u32, size: usize, snapshot: bool, base: bool) -> Self {
        let parent = [Path::new("/dev/shm"), &std::env::temp_dir()]
            .into_iter()
            .find(|path| path.is_dir())
            .map(Path::to_owned)
            .unwrap();
        let folder = tempfile::tempdir_in(parent).unwrap();
        let path: PathBuf = folder.path().join("x.qcow2");
        let below = folder.path().join("base.raw");
        std::fs::write(&below, vec![0xaa; size]).unwrap();
        let backing = base.then(|| (below.clone(), Format::Raw));
        let options = CreateOptions {
            cluster_size,
            backing,
            refcount_bits,
            ..CreateOptions::new(size as u64)
        };
        image::create_qcow2(&path, &options).unwrap();
        let backing = if base {
            vec![layer(&below, Format::Raw)]
        } else {
            vec![]
        };
        let spec = DiskSpec {
            top: layer(&path, Format::Qcow2),
            backing: Backing::Explicit(backing),
            read_only: false,
            discard: true,
        };
        if snapshot {
            let mut disk = Disk::open(&spec).unwrap();
            let value = if base { 0xaa } else { 0 };
            let buffers = Buffers::from_vec(vec![value; size / 2]);
            disk.execute(&Op::Write { offset: 0, buffers }).unwrap();
            disk.close().unwrap();
            let made = std::process::Command::new("qemu-img")
                .args(["snapshot", "-c", "s"])
                .arg(&path)
                .status()
                .expect("qemu-img is installed by `cargo xtask setup`");
            assert!(made.success());
        }
        Self {
            _folder: folder,
            spec,
            size,
            base_value: if base { 0xaa } else { 0 },
        }
    }

    /// Runs random requests with the tape in; the deeds by mark.
    fn run(&self, requests: usize, random: &mut Random, tape: &Rc<RefCell<Tape>>) -> Vec<Deed> {
        let mut disk = Disk::open(&self.spec).unwrap();
        let mut deeds = Vec::new();
        let total = (self.size / SECTOR) as u64;
        for n in 0..requests {
            let first = random.below(total) as usize;
            let count = (random.below(24) as usize + 1).min(total as usize - first);
            let value = (n % 250) as u8 + 1;
            let (offset, length) = ((first * SECTOR) as u64, count * SECTOR);
            let (op, value) = match random.below(8) {
                0..4 => {
                    let buffers = Buffers::from_vec(vec![value; length]);
                    (Op::Write { offset, buffers }, value)
                }
                4..6 => {
                    let unmap = random.below(2) == 0;
                    (
                        Op::WriteZeroes {
                            offset,
                            length: length as u64,
                            unmap,
                        },
                        0,
                    )
                }
                _ => {
                    disk.execute(&Op::Flush).unwrap();
                    mark(tape, &mut deeds, Deed::Flushed);
                    continue;
                }
            };
            mark(
                tape,
                &mut deeds,
                Deed::Set {
                    sectors: first..first + count,
                    value,
                },
            );
            disk.execute(&op).unwrap();
        }
        disk.close().unwrap();
        mark(tape, &mut deeds, Deed::Flushed);
        deeds
    }
}

fn mark(tape: &Rc<RefCell<Tape>>, deeds: &mut Vec<Deed>, deed: Deed) {
    tape.borrow_mut().events.push(Event::Mark(deeds.len()));
    deeds.push(deed);
}

/// The file as a cut before event `cut` may leave it.
fn cut_file(before: &[u8], events: &[Event], cut: usize, random: &mut Random) -> Vec<u8> {
    let durable = events
        .iter()
        .take(cut)
        .rposition(|event| matches!(event, Event::Sync))
        .unwrap_or(0);
    let mut file = before.to_vec();
    for (n, event) in events.iter().take(cut).enumerate() {
        match event {
            Event::Write { at, bytes } => {
                let fate = if n < durable { 0 } else { random.below(3) };
                for (k, sector) in bytes.chunks(SECTOR).enumerate() {
                    if fate == 0 || (fate == 2 && random.below(2) == 0) {
                        let at = *at as usize + k * SECTOR;
                        file.resize(file.len().max(at + sector.len()), 0);
                        file[at..at + sector.len()].copy_from_slice(sector);
                    }
                }
            }
            Event::Punch { at, length } if n < durable || random.below(2) == 0 => {
                let end = (*at + *length).min(file.len() as u64) as usize;
                if let Some(hole) = file.get_mut(*at as usize..end) {
                    hole.fill(0);
                }
            }
            Event::Punch { .. } | Event::Sync | Event::Mark(_) => {}
        }
    }
    file
}

/// What each sector may hold after a cut before event `cut`.
fn allowed(scene: &Scene, deeds: &[Deed], events: &[Event], cut: usize) -> Vec<Vec<u8>> {
    let mut allowed = vec![vec![scene.base_value]; scene.size / SECTOR];
    for event in events.iter().take(cut) {
        let Event::Mark(n) = event else { continue };
        match &deeds[*n] {
            Deed::Set { sectors, value } => {
                allowed[sectors.clone()]
                    .iter_mut()
                    .for_each(|values| values.push(*value));
            }
            Deed::Flushed => {
                for values in &mut allowed {
                    values.drain(..values.len() - 1);
                }
            }
        }
    }
    allowed
}

fn read_all(spec: &DiskSpec, size: usize) -> Vec<u8> {
    let mut disk = Disk::open(&DiskSpec {
        read_only: true,
        ..spec.clone()
    })
    .unwrap();
    let buffer = SharedBuffer::zeroed(size);
    disk.execute(&Op::Read {
        offset: 0,
        buffers: buffer.buffers(),
    })
    .unwrap();
    drop(disk);
    buffer.take().unwrap()
}

#[test]
fn a_power_cut_at_any_point_leaves_leaks_at_most_and_everything_flushed() {
    let scenes = [
        (Scene::new(512, 16, 96 * 1024, false, false), 1),
        (Scene::new(512, 64, 160 * 1024, false, true), 2),
        (Scene::new(1024, 8, 160 * 1024, true, true), 3),
        (Scene::new(4096, 16, 320 * 1024, true, false), 4),
    ];
    for (scene, seed) in scenes {
        let path = &scene.spec.top.path;
        let before = std::fs::read(path).unwrap();
        let mut random = Random(seed);
        let tape = tape::insert();
        let deeds = scene.run(110, &mut random, &tape);
        tape::eject();
        let events = tape.borrow().events.clone();
        let syncs = events
            .iter()
            .filter(|event| matches!(event, Event::Sync))
            .count();
        let punches = events
            .iter()
            .filter(|event| matches!(event, Event::Punch { .. }))
            .count();
        assert!(
            syncs > 20 && punches > 5,
            "the run does too little: {syncs} {punches}"
        );
        for _ in 0..120 {
            let cut = random.below(events.len() as u64 + 1) as usize;
            std::fs::write(path, cut_file(&before, &events, cut, &mut random)).unwrap();
            let report = image::check(path, Format::Qcow2).unwrap();
            assert_eq!(report.corruptions, 0, "cut at {cut}: {report:?}");
            let seen = read_all(&scene.spec, scene.size);
            let allowed = allowed(&scene, &deeds, &events, cut);
            for (n, (sector, values)) in seen.chunks(SECTOR).zip(allowed).enumerate() {
                let good = values
                    .iter()
                    .any(|value| sector.iter().all(|byte| byte == value));
                assert!(
                    good,
                    "cut at {cut}: sector {n} holds {} and not one of {values:?}",
                    sector[0]
                );
            }
        }
    }
}

#[test]
fn a_request_that_fails_leaves_the_image_sound_and_the_rest_readable() {
    for errno in [libc::ENOSPC, libc::EIO] {
        for nth in 0..30 {
            let scene = Scene::new(512, 16, 96 * 1024, nth % 2 == 0, nth % 3 == 0);
            let tape = tape::insert();
            let mut disk = Disk::open(&scene.spec).unwrap();
            let mut random = Random(nth as u64 + 1);
            tape.borrow_mut().fail = Some((nth, errno));
            let mut model: Vec<Option<u8>> = vec![Some(scene.base_value); scene.size / SECTOR];
            let mut failures = 0;
            for n in 0..40u8 {
                let first = random.below(180) as usize;
                let sectors = first..first + 8;
                let op = match n % 5 {
                    4 => Op::Flush,
                    3 => Op::WriteZeroes {
                        offset: (first * SECTOR) as u64,
                        length: 4096,
                        unmap: true,
                    },
                    _ => Op::Write {
                        offset: (first * SECTOR) as u64,
                        buffers: Buffers::from_vec(vec![n + 1; 4096]),
                    },
                };
                match (disk.execute(&op), &op) {
                    (Ok(()), Op::Flush) => {}
                    (Ok(()), Op::Write { .. }) => model[sectors].fill(Some(n + 1)),
                    (Ok(()), _) => model[sectors].fill(Some(0)),
                    (Err(error), _) => {
                        failures += 1;
                        let expected = match errno {
                            libc::ENOSPC => matches!(error, IoError::NoSpace | IoError::Stopped(_)),
                            _ => matches!(error, IoError::Host { .. } | IoError::Stopped(_)),
                        };
                        assert!(expected, "{error}");
                        // A request that failed may have done its work in part.
                        model[sectors].fill(None);
                    }
                }
                let buffer = SharedBuffer::zeroed(scene.size);
                disk.execute(&Op::Read {
                    offset: 0,
                    buffers: buffer.buffers(),
                })
                .unwrap();
                let seen = buffer.take().unwrap();
                for (sector, expected) in seen.chunks(SECTOR).zip(&model) {
                    let good =
                        expected.is_none_or(|value| sector.iter().all(|byte| *byte == value));
                    assert!(
                        good,
                        "after {failures} failures: {} for {expected:?}",
                        sector[0]
                    );
                }
            }
            drop(disk);
            tape::eject();
            let report = image::check(&scene.spec.top.path, Format::Qcow2).unwrap();
            assert_eq!(report.corruptions, 0, "failure {nth}: {report:?}");
        }
    }
}

#[test]
fn a_flush_that_failed_once_never_succeeds_again() {
    let scene = Scene::new(512, 16, 96 * 1024, false, true);
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
        // The next change of the file is the fdatasync.
        tape.borrow_mut().fail = Some((0, libc::EIO));
        assert!(disk.execute(&Op::Flush).is_err());
        assert!(tape.borrow().fail.is_none());
        assert!(
            disk.execute(&Op::Flush).is_err(),
            "the second attempt proves nothing"
        );
        assert!(disk.close().is_err());
        tape::eject();
    }
}
