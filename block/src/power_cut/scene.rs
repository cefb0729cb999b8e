//! Disks to be cut off, and guests that keep them busy.

use std::cell::RefCell;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::rc::Rc;

use crate::image::{self, CreateOptions};
use crate::io::tape::{Event, Tape};
use crate::{Backing, Buffers, Cache, Disk, DiskSpec, Format, Layer, Op, Request, SharedBuffer};

pub(super) const SECTOR: usize = 512;

pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 8) % end
    }
}

/// What the guest did, as the marks on the tape say.
#[derive(Clone, Debug)]
pub(super) enum Deed {
    /// Began to give these sectors this value; `weak`: or to leave them as they are.
    Set {
        sectors: Range<usize>,
        value: u8,
        weak: bool,
    },
    /// The deed of this number is over.
    Over(usize),
    /// Began a flush.
    Flush,
    /// The disk has its last size, durably.
    Grown,
}

pub(super) struct Scene {
    _folder: tempfile::TempDir,
    pub(super) spec: DiskSpec,
    /// Bytes of the disk when the run is over.
    pub(super) size: usize,
    /// What the sectors hold before the run.
    pub(super) initial: Vec<u8>,
    /// Whether the disk gets its last size in the middle of the run.
    grows: bool,
}

fn layer(path: &Path, format: Format) -> Layer {
    Layer {
        path: path.to_owned(),
        format,
        cache: Cache::Buffered,
    }
}

fn qemu(tool: &str, arguments: &[&str]) {
    let output = Command::new(tool)
        .args(arguments)
        .output()
        .expect("QEMU's tools are installed by `cargo xtask setup`");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{tool} {arguments:?}: {said}");
}

fn text(path: &Path) -> &str {
    path.to_str().expect("test paths are UTF-8")
}

/// Whether an image is marked as having refcounts that are not to be believed.
pub(super) fn is_dirty(image: &Path) -> bool {
    std::fs::read(image).unwrap()[79] & 1 != 0
}

/// A folder in memory where the host has such a place.
pub(super) fn folder() -> tempfile::TempDir {
    let parents = [PathBuf::from("/dev/shm"), std::env::temp_dir()];
    let parent = parents.into_iter().find(|path| path.is_dir()).unwrap();
    tempfile::tempdir_in(parent).unwrap()
}

impl Scene {
    /// A disk whose top image is made by `make` from its path and that of a folder for layers, which it lists.
    fn build(size: usize, make: impl FnOnce(&Path, &Path) -> Vec<Layer>) -> Self {
        let folder = folder();
        let top = folder.path().join("top.qcow2");
        let backing = make(&top, folder.path());
        let spec = DiskSpec {
            top: layer(&top, Format::Qcow2),
            backing: Backing::Explicit(backing),
            read_only: false,
            discard: true,
        };
        let mut initial: Vec<u8> = read_all(&spec).chunks(SECTOR).map(|s| s[0]).collect();
        initial.resize(size / SECTOR, 0);
        Self {
            _folder: folder,
            grows: Disk::open(&spec).unwrap().size_bytes() < size as u64,
            spec,
            size,
            initial,
        }
    }

    /// Small clusters, with or without an internal snapshot and a raw base.
    pub(super) fn plain(snapshot: bool, base: bool) -> Self {
        let size = 96 * 1024;
        Self::build(size, |top, folder| {
            let below = folder.join("base.raw");
            std::fs::write(&below, vec![0xaa; size]).unwrap();
            let options = CreateOptions {
                cluster_size: 512,
                backing: base.then(|| (below.clone(), Format::Raw)),
                ..CreateOptions::new(size as u64)
            };
            image::create_qcow2(top, &options).unwrap();
            let layers = base.then(|| layer(&below, Format::Raw));
            let layers: Vec<_> = layers.into_iter().collect();
            if snapshot {
                fill(top, &layers, size / 2, if base { 0xaa } else { 0 });
                qemu("qemu-img", &["snapshot", "-c", "s", text(top)]);
            }
            layers
        })
    }

    /// Larger clusters with COW head and tail, a snapshot, and narrow refcounts.
    pub(super) fn snapshot(cluster_size: u64) -> Self {
        let size = 160 * 1024;
        Self::build(size, |top, _| {
            let options = CreateOptions {
                cluster_size,
                refcount_bits: 8,
                ..CreateOptions::new(size as u64)
            };
            image::create_qcow2(top, &options).unwrap();
            fill(top, &[], size / 2, 0x33);
            qemu("qemu-img", &["snapshot", "-c", "s", text(top)]);
            vec![]
        })
    }

    /// Four layers of different lengths and cluster sizes.
    pub(super) fn chain() -> Self {
        let size = 160 * 1024;
        Self::build(size, |top, folder| {
            let mut layers: Vec<Layer> = Vec::new();
            for (n, (length, cluster)) in [(200, 4096), (120, 1024), (160, 2048), (160, 1024)]
                .into_iter()
                .enumerate()
            {
                let path = if n == 3 {
                    top.to_owned()
                } else {
                    folder.join(format!("{n}.qcow2"))
                };
                let options = CreateOptions {
                    cluster_size: cluster,
                    backing: layers.first().map(|l| (l.path.clone(), l.format)),
                    ..CreateOptions::new(length * 1024)
                };
                image::create_qcow2(&path, &options).unwrap();
                if n == 3 {
                    break;
                }
                fill(&path, &layers, (100 - n * 30) * 1024, 0xa0 + n as u8);
                layers.insert(0, layer(&path, Format::Qcow2));
            }
            layers
        })
    }

    /// Compressed clusters in the base, or in the top image itself, where they share host clusters.
    pub(super) fn compressed(base: bool, kind: &str) -> Self {
        let size = 160 * 1024;
        Self::build(size, |top, folder| {
            let source = folder.join("source.raw");
            let bytes: Vec<u8> = (0..size).map(|n| (n / 3000) as u8 + 1).collect();
            // Whole sectors of one value, as the judge wants them.
            let bytes: Vec<u8> = bytes.chunks(SECTOR).flat_map(|s| [s[0]; SECTOR]).collect();
            std::fs::write(&source, bytes).unwrap();
            let packed = if base {
                folder.join("base.qcow2")
            } else {
                top.to_owned()
            };
            let options = format!("cluster_size=4k,compression_type={kind}");
            qemu(
                "qemu-img",
                &[
                    "convert",
                    "-c",
                    "-f",
                    "raw",
                    "-O",
                    "qcow2",
                    "-o",
                    &options,
                    text(&source),
                    text(&packed),
                ],
            );
            if !base {
                return vec![];
            }
            let options = CreateOptions {
                cluster_size: 2048,
                backing: Some((packed.clone(), Format::Qcow2)),
                ..CreateOptions::new(size as u64)
            };
            image::create_qcow2(top, &options).unwrap();
            vec![layer(&packed, Format::Qcow2)]
        })
    }

    /// Subclusters over a base, with a snapshot.
    pub(super) fn subclusters() -> Self {
        let size = 160 * 1024;
        Self::build(size, |top, folder| {
            let below = folder.join("base.raw");
            std::fs::write(&below, vec![0xaa; 100 * 1024]).unwrap();
            let options = CreateOptions {
                cluster_size: 16 * 1024,
                extended_l2: true,
                backing: Some((below.clone(), Format::Raw)),
                ..CreateOptions::new(size as u64)
            };
            image::create_qcow2(top, &options).unwrap();
            let layers = vec![layer(&below, Format::Raw)];
            fill(top, &layers, 50 * 1024, 0x22);
            qemu("qemu-img", &["snapshot", "-c", "s", text(top)]);
            layers
        })
    }

    /// QEMU was killed while it kept refcounts lazily, so that they are put right first.
    pub(super) fn dirty() -> Self {
        let size = 160 * 1024;
        Self::build(size, |top, _| {
            let options = "lazy_refcounts=on,cluster_size=2k";
            let create = [
                "create",
                "-q",
                "-f",
                "qcow2",
                "-o",
                options,
                text(top),
                "160k",
            ];
            qemu("qemu-img", &create);
            let killed = Command::new("qemu-io")
                .args(["-f", "qcow2", "-c", "write -P 7 0 90k", "-c", "flush"])
                .args(["-c", "abort", text(top)])
                .output()
                .expect("QEMU's tools are installed by `cargo xtask setup`");
            assert!(!killed.status.success() && is_dirty(top));
            vec![]
        })
    }

    /// The refcount table has to grow during the run.
    pub(super) fn refcount_growth() -> Self {
        let size = 2200 * 1024;
        Self::build(size, |top, _| {
            let options = CreateOptions {
                cluster_size: 512,
                refcount_bits: 64,
                ..CreateOptions::new(size as u64)
            };
            image::create_qcow2(top, &options).unwrap();
            fill(top, &[], 1980 * 1024, 0x11);
            vec![]
        })
    }

    /// The disk grows over the end of its L1 table, over a base that is longer than it was.
    pub(super) fn l1_growth() -> Self {
        let size = 160 * 1024;
        Self::build(size, |top, folder| {
            let below = folder.join("base.raw");
            std::fs::write(&below, vec![0xaa; size / 2]).unwrap();
            let options = CreateOptions {
                cluster_size: 512,
                backing: Some((below.clone(), Format::Raw)),
                ..CreateOptions::new(size as u64 / 4 + 512)
            };
            image::create_qcow2(top, &options).unwrap();
            vec![layer(&below, Format::Raw)]
        })
    }

    /// Keeps the disk busy with the tape in; the deeds by mark. With `depth` 1 the inline engine serves it, otherwise so many
    /// requests are under way in a shuffled order.
    pub(super) fn run(
        &self,
        requests: usize,
        depth: usize,
        random: &mut Random,
        tape: &Rc<RefCell<Tape>>,
    ) -> Vec<Deed> {
        let disk = if depth == 1 {
            Disk::open(&self.spec).unwrap()
        } else {
            Disk::open_shuffled(&self.spec, random.0).unwrap()
        };
        let mut guest = Guest {
            disk,
            tape: Rc::clone(tape),
            deeds: Vec::new(),
            busy: Vec::new(),
            now: self.initial.iter().map(|value| vec![*value]).collect(),
        };
        for n in 0..requests {
            while guest.busy.len() >= depth || random.below(3) == 0 && !guest.busy.is_empty() {
                guest.step();
            }
            if self.grows && n == requests / 2 {
                guest.drain();
                guest.disk.resize(self.size as u64).unwrap();
                guest.mark(Deed::Grown);
            }
            guest.request(n, random);
        }
        guest.drain();
        let Guest {
            disk,
            mut deeds,
            tape,
            ..
        } = guest;
        mark(&tape, &mut deeds, Deed::Flush);
        let flush = deeds.len() - 1;
        disk.close().unwrap();
        mark(&tape, &mut deeds, Deed::Over(flush));
        deeds
    }
}

/// Requests under way of one disk.
struct Guest {
    disk: Disk,
    tape: Rc<RefCell<Tape>>,
    deeds: Vec<Deed>,
    busy: Vec<Busy>,
    /// What each sector may read as; several after a discard.
    now: Vec<Vec<u8>>,
}

struct Busy {
    tag: u64,
    sectors: Range<usize>,
    read: Option<SharedBuffer>,
}

fn mark(tape: &Rc<RefCell<Tape>>, deeds: &mut Vec<Deed>, deed: Deed) {
    tape.borrow_mut().events.push(Event::Mark(deeds.len()));
    deeds.push(deed);
}

impl Guest {
    fn mark(&mut self, deed: Deed) {
        mark(&self.tape, &mut self.deeds, deed);
    }

    fn drain(&mut self) {
        while !self.busy.is_empty() {
            self.step();
        }
    }

    fn step(&mut self) {
        self.disk.step(true);
        self.collect();
    }

    fn collect(&mut self) {
        let mut done = std::mem::take(&mut self.disk.done);
        for completion in done.drain(..) {
            completion.result.unwrap();
            let at = self.busy.iter().position(|busy| busy.tag == completion.tag);
            let busy = self.busy.swap_remove(at.expect("it was asked for"));
            let Some(read) = busy.read else {
                self.mark(Deed::Over(completion.tag as usize));
                continue;
            };
            let read = read.take().expect("the request is over");
            for (sector, n) in read.chunks(SECTOR).zip(busy.sectors) {
                let known = self.now[n].contains(&sector[0]);
                assert!(
                    known && sector.iter().all(|byte| *byte == sector[0]),
                    "sector {n} reads {} and not one of {:?}",
                    sector[0],
                    self.now[n]
                );
            }
        }
    }

    /// Begins a request that touches no sector that another one under way does; clusters they may well share.
    fn request(&mut self, n: usize, random: &mut Random) {
        let total = (self.disk.size_bytes() / SECTOR as u64) as usize;
        let first = random.below(total as u64) as usize;
        let most = if n.is_multiple_of(4) { 100 } else { 24 };
        let count = (random.below(most) as usize + 1).min(total - first);
        let sectors = first..first + count;
        let is_free =
            |busy: &Busy| busy.sectors.end <= sectors.start || sectors.end <= busy.sectors.start;
        if !self.busy.iter().all(is_free) {
            return;
        }
        let (offset, length) = ((first * SECTOR) as u64, count * SECTOR);
        let value = (n % 250) as u8 + 1;
        let tag = self.deeds.len() as u64;
        let mut read = None;
        let mut touched = sectors.clone();
        let op = match random.below(10) {
            0..4 => {
                self.set(&sectors, value, false);
                Op::Write {
                    offset,
                    buffers: Buffers::from_vec(vec![value; length]),
                }
            }
            4..6 => {
                self.set(&sectors, 0, false);
                Op::WriteZeroes {
                    offset,
                    length: length as u64,
                    unmap: random.below(2) == 0,
                }
            }
            6 => {
                self.set(&sectors, 0, true);
                Op::Discard {
                    offset,
                    length: length as u64,
                }
            }
            7 => {
                let buffer = SharedBuffer::zeroed(length);
                let buffers = buffer.buffers();
                read = Some(buffer);
                Op::Read { offset, buffers }
            }
            _ => {
                self.mark(Deed::Flush);
                touched = 0..0;
                Op::Flush
            }
        };
        // A read leaves no mark; its tag must not be that of the next deed.
        let tag = if read.is_some() {
            u64::MAX - n as u64
        } else {
            tag
        };
        self.busy.push(Busy {
            tag,
            sectors: touched,
            read,
        });
        self.disk.submit(Request { tag, op });
        self.collect();
    }

    fn set(&mut self, sectors: &Range<usize>, value: u8, weak: bool) {
        for values in &mut self.now[sectors.clone()] {
            if !weak {
                values.clear();
            }
            values.push(value);
        }
        self.mark(Deed::Set {
            sectors: sectors.clone(),
            value,
            weak,
        });
    }
}

fn fill(path: &Path, backing: &[Layer], length: usize, value: u8) {
    let mut disk = Disk::open(&DiskSpec {
        top: layer(path, Format::Qcow2),
        backing: Backing::Explicit(backing.to_vec()),
        read_only: false,
        discard: true,
    })
    .unwrap();
    let buffers = Buffers::from_vec(vec![value; length]);
    disk.execute(&Op::Write { offset: 0, buffers }).unwrap();
    disk.close().unwrap();
}

/// The whole disk.
pub(super) fn read_all(spec: &DiskSpec) -> Vec<u8> {
    let mut disk = Disk::open(&DiskSpec {
        read_only: true,
        ..spec.clone()
    })
    .unwrap();
    let buffer = SharedBuffer::zeroed(disk.size_bytes() as usize);
    let buffers = buffer.buffers();
    disk.execute(&Op::Read { offset: 0, buffers }).unwrap();
    drop(disk);
    buffer.take().unwrap()
}
