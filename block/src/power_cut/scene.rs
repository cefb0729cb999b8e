//! Disks to be cut off.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::image::{self, CreateOptions};
use crate::io::tape::Tape;
use crate::{Backing, Buffers, Cache, Disk, DiskSpec, Format, Layer, Op, SharedBuffer};

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

pub(super) struct Scene {
    _folder: tempfile::TempDir,
    pub(super) spec: DiskSpec,
    /// Bytes of the disk when the run is over.
    pub(super) size: usize,
    /// What the sectors hold before the run.
    pub(super) initial: Vec<u8>,
    /// The files before the run, as [`Scene::layers`] lists them.
    files: Vec<Vec<u8>>,
    /// Whether the disk gets its last size in the middle of the run.
    pub(super) grows: bool,
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
        let below = make(&top, folder.path());
        let spec = DiskSpec {
            top: layer(&top, Format::Qcow2),
            backing: Backing::Explicit(below.clone()),
            read_only: false,
            discard: true,
        };
        let mut initial: Vec<u8> = read_all(&spec).chunks(SECTOR).map(|s| s[0]).collect();
        initial.resize(size / SECTOR, 0);
        let files = std::iter::once(&top).chain(below.iter().map(|layer| &layer.path));
        Self {
            files: files.map(|path| std::fs::read(path).unwrap()).collect(),
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

    /// A scene whose top gets a little of everything.
    pub(super) fn with_data(mut self, seed: u64) -> Self {
        let scene = &mut self;
        let mut random = Random(seed);
        let mut disk = Disk::open(&scene.spec).unwrap();
        for n in 0..24u8 {
            let first = random.below(scene.initial.len() as u64 - 20) as usize;
            let sectors = first..first + 1 + random.below(19) as usize;
            let (offset, length) = ((first * SECTOR) as u64, sectors.len() * SECTOR);
            let value = if n % 4 == 0 { 0 } else { n };
            let op = match value {
                0 => Op::WriteZeroes {
                    offset,
                    length: length as u64,
                    unmap: n % 8 == 0,
                },
                _ => Op::Write {
                    offset,
                    buffers: Buffers::from_vec(vec![value; length]),
                },
            };
            disk.execute(&op).unwrap();
            scene.initial[sectors].fill(value);
        }
        disk.close().unwrap();
        scene.files[0] = std::fs::read(&scene.spec.top.path).unwrap();
        self
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

    /// Subclusters over a base, with or without a snapshot.
    pub(super) fn subclusters(snapshot: bool) -> Self {
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
            if snapshot {
                qemu("qemu-img", &["snapshot", "-c", "s", text(top)]);
            }
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

    /// The images, the top first.
    pub(super) fn layers(&self) -> Vec<Layer> {
        let Backing::Explicit(below) = &self.spec.backing else {
            unreachable!("scenes list their layers")
        };
        std::iter::once(&self.spec.top)
            .chain(below)
            .cloned()
            .collect()
    }

    /// Undoes all that happened to the files.
    pub(super) fn reset(&self) {
        for (layer, bytes) in self.layers().iter().zip(&self.files) {
            std::fs::write(&layer.path, bytes).unwrap();
        }
    }

    /// Gives the files the numbers on a tape that they have in [`Scene::layers`].
    pub(super) fn number_files(&self, tape: &mut Tape) {
        for (n, layer) in self.layers().iter().enumerate() {
            let file = std::fs::metadata(&layer.path).unwrap();
            assert_eq!(tape.file((file.dev(), file.ino())), n);
        }
    }

    /// Whether the header of the top image says that something lies below.
    pub(super) fn names_a_backing(&self) -> bool {
        std::fs::read(&self.spec.top.path).unwrap()[8..16] != [0; 8]
    }

    /// The whole disk, on the layers that its top needs now.
    pub(super) fn read_all(&self) -> Vec<u8> {
        read_all(&self.spec_now())
    }

    /// The disk, on the layers that its top needs now.
    pub(super) fn spec_now(&self) -> DiskSpec {
        let mut spec = self.spec.clone();
        if !self.names_a_backing() {
            spec.backing = Backing::Explicit(vec![]);
        }
        spec
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
