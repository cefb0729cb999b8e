//! Images that lie, and everything that can be done to an image.
//!
//! ```text
//!  bytes of a fuzzer ──> structured: a sound image with some of its fields changed  ┐
//!                   └──> raw:        the bytes are the image                        ├──> try_all: information, check, map,
//!                                                                                   ┘    requests, jobs, check
//! ```
//!
//! Fuzz targets and the test that stands in for them share this. What must not happen is a panic, which both see; a hang and
//! hunger for memory, which are for whoever runs this to notice; and what [`Kitchen`] looks for itself: files opened outside its
//! folder, descriptors left open, an image that has become much larger or another one.

use std::ops::ControlFlow;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use drover_block::image::{
    self, Compat, Compression, ConvertOptions, CreateOptions, Monitor, NewBacking, Repair,
};
use drover_block::{
    Backing, Buffers, Cache, Disk, DiskSpec, Format, Layer, Op, SharedBuffer, image::Shrink,
};
use rustix::fs::inotify;

/// Most bytes of a request.
const MOST: u64 = 20_000;
/// How much longer an image may become by what is done here.
const GROWTH: u64 = 64 << 20;

/// Bytes to make decisions from; zeros when they are used up.
struct Choices<'a>(&'a [u8]);

impl Choices<'_> {
    fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else {
            return 0;
        };
        self.0 = rest;
        *first
    }

    fn below(&mut self, end: usize) -> usize {
        let value = usize::from(self.byte()) | usize::from(self.byte()) << 8;
        value % end.max(1)
    }

    fn number(&mut self) -> u64 {
        u64::from_le_bytes(std::array::from_fn(|_| self.byte()))
    }
}

/// A sound image to begin with.
struct Template {
    bytes: Vec<u8>,
    /// Whether its header names a backing file, which is allowed.
    named: bool,
}

/// A place for an image and the files that it may use, and one that it may not.
pub(crate) struct Kitchen {
    inside: PathBuf,
    templates: Vec<Template>,
    /// Tells of every file opened outside.
    watch: OwnedFd,
    descriptors: usize,
}

struct Patience(u32);

impl Monitor for Patience {
    fn progress(&mut self, _: u64, _: u64) -> ControlFlow<()> {
        self.0 = self.0.saturating_sub(1);
        if self.0 == 0 {
            ControlFlow::Break(())
        } else {
            ControlFlow::Continue(())
        }
    }
}

fn layer(path: PathBuf, format: Format) -> Layer {
    Layer {
        path,
        format,
        cache: Cache::Buffered,
    }
}

fn open_descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd")
        .expect("/proc is there")
        .count()
}

impl Kitchen {
    /// Makes the sound images and the files around them in an empty folder; `more` are sound images as well.
    pub(crate) fn new(folder: &Path, more: &[Vec<u8>]) -> Self {
        let (inside, outside) = (folder.join("inside"), folder.join("outside"));
        for folder in [&inside, &outside] {
            std::fs::create_dir(folder).expect("the folder is empty");
        }
        let secret = outside.join("secret.raw");
        std::fs::write(&secret, [0x5e; 4096]).expect("the folder takes files");
        std::fs::write(inside.join("base.raw"), vec![0xaa; 100 * 1024]).expect("as above");
        std::os::unix::fs::symlink(&secret, inside.join("link.raw")).expect("as above");
        std::os::unix::fs::symlink(&outside, inside.join("door")).expect("as above");
        let watch = inotify::init(inotify::CreateFlags::NONBLOCK | inotify::CreateFlags::CLOEXEC)
            .expect("inotify is there");
        let events = inotify::WatchFlags::OPEN | inotify::WatchFlags::ACCESS;
        inotify::add_watch(&watch, &secret, events).expect("the file is there");
        let mut kitchen = Self {
            inside,
            templates: Vec::new(),
            watch,
            descriptors: 0,
        };
        kitchen.cook();
        for bytes in more {
            kitchen.templates.push(Template {
                bytes: bytes.clone(),
                named: false,
            });
        }
        kitchen.descriptors = open_descriptors();
        kitchen
    }

    fn top(&self) -> PathBuf {
        self.inside.join("top.qcow2")
    }

    fn spec(&self, backing: Backing) -> DiskSpec {
        DiskSpec {
            top: layer(self.top(), Format::Qcow2),
            backing,
            read_only: false,
            discard: true,
        }
    }

    /// One image of each kind that this engine makes.
    fn cook(&mut self) {
        let plain = || CreateOptions {
            cluster_size: 512,
            ..CreateOptions::new(120 * 1024)
        };
        let base = || Some((PathBuf::from("base.raw"), Format::Raw));
        let kinds = [
            plain(),
            CreateOptions {
                refcount_bits: 1,
                backing: base(),
                ..plain()
            },
            CreateOptions {
                refcount_bits: 64,
                cluster_size: 4096,
                ..plain()
            },
            CreateOptions {
                compat: Compat::V2,
                cluster_size: 1024,
                backing: base(),
                ..plain()
            },
            CreateOptions {
                extended_l2: true,
                cluster_size: 16 * 1024,
                backing: base(),
                ..plain()
            },
        ];
        for options in kinds {
            let named = options.backing.is_some();
            let backing = match named {
                true => Backing::FromHeader {
                    cache: Cache::Buffered,
                },
                false => Backing::Explicit(vec![]),
            };
            image::create_qcow2(&self.top(), &options).expect("the folder takes images");
            let mut disk = Disk::open(&self.spec(backing)).expect("a new image opens");
            for n in 0..12 {
                let offset = n * 9 * 1024;
                let zeroes = Op::WriteZeroes {
                    offset: offset + 6000,
                    length: 3000,
                    unmap: n % 2 == 0,
                };
                let buffers = Buffers::from_vec(vec![n as u8 + 1; 5000]);
                for op in [Op::Write { offset, buffers }, zeroes] {
                    disk.execute(&op).expect("a new image takes writes");
                }
            }
            disk.close().expect("a new image closes");
            self.keep(named);
        }
        let source = DiskSpec {
            top: layer(self.inside.join("base.raw"), Format::Raw),
            ..self.spec(Backing::Explicit(vec![]))
        };
        for compression in [Compression::Zlib, Compression::Zstd] {
            let options = ConvertOptions {
                cluster_size: 4096,
                compression: Some(compression),
                ..ConvertOptions::new(Format::Qcow2)
            };
            image::convert(&source, &self.top(), &options, &mut image::Unwatched)
                .expect("a sound image is converted");
            self.keep(false);
        }
    }

    fn keep(&mut self, named: bool) {
        let bytes = std::fs::read(self.top()).expect("the image is there");
        std::fs::remove_file(self.top()).expect("the image is there");
        self.templates.push(Template { bytes, named });
    }

    /// Changes one to three fields of a sound image and tries everything.
    pub(crate) fn structured(&self, input: &[u8]) {
        let mut choices = Choices(input);
        let template = &self.templates[choices.below(self.templates.len())];
        let mut bytes = template.bytes.clone();
        for _ in 0..=choices.byte() % 3 {
            change(&mut bytes, &mut choices);
        }
        self.try_all(&bytes, template.named, &mut choices);
    }

    /// Takes bytes for an image and tries everything.
    pub(crate) fn raw(&self, input: &[u8]) {
        // The last bytes decide what is done.
        let (image, rest) = input.split_at(input.len().saturating_sub(64));
        let named = rest.first().is_some_and(|byte| byte & 1 == 1);
        self.try_all(image, named, &mut Choices(rest));
    }

    fn try_all(&self, bytes: &[u8], named: bool, choices: &mut Choices<'_>) {
        let top = self.top();
        std::fs::write(&top, bytes).expect("the folder takes files");
        let base = layer(self.inside.join("base.raw"), Format::Raw);
        let backing = match (named, choices.byte() % 3) {
            (true, _) => Backing::FromHeader {
                cache: Cache::Buffered,
            },
            (_, 0) => Backing::Explicit(vec![base.clone()]),
            _ => Backing::Explicit(vec![]),
        };
        let spec = self.spec(backing);
        let _ = image::info(&top, Format::Qcow2);
        let _ = image::check(&top, Format::Qcow2);
        let _ = image::map(&spec);
        assert!(
            std::fs::read(&top).expect("the image is there") == bytes,
            "looking has changed the image"
        );
        for read_only in [true, false] {
            let spec = DiskSpec {
                read_only,
                ..spec.clone()
            };
            if let Ok(mut disk) = Disk::open(&spec) {
                for _ in 0..12 {
                    let _ = disk.execute(&request(disk.size_bytes(), choices));
                }
                let _ = disk.close();
            }
        }
        let _ = image::check(&top, Format::Qcow2);
        self.one_job(&spec, &base, choices);
        let _ = image::check(&top, Format::Qcow2);
        let _ = std::fs::remove_file(self.inside.join("target"));
        self.look_around(bytes);
    }

    fn one_job(&self, spec: &DiskSpec, base: &Layer, choices: &mut Choices<'_>) {
        let patience = &mut Patience(50);
        let target = self.inside.join("target");
        match choices.byte() % 9 {
            0 => {
                let size = (choices.number() % (8 << 20)) / 512 * 512;
                let _ = image::resize(spec, size, Shrink::Allow);
            }
            1 => {
                let options = ConvertOptions::new(Format::Raw);
                let _ = image::convert(spec, &target, &options, patience);
            }
            2 => {
                let options = ConvertOptions {
                    compression: Some(Compression::Zlib),
                    ..ConvertOptions::new(Format::Qcow2)
                };
                let _ = image::convert(spec, &target, &options, patience);
            }
            3 => drop(image::flatten(spec, patience)),
            4 => {
                let listed = DiskSpec {
                    backing: Backing::Explicit(vec![base.clone()]),
                    ..spec.clone()
                };
                let before = std::fs::read(&base.path).expect("the base is there");
                drop(image::commit(&listed, patience));
                std::fs::write(&base.path, before).expect("the base is there");
            }
            5 => {
                let what = match choices.byte() % 2 {
                    0 => Repair::Leaks,
                    _ => Repair::All,
                };
                if let Ok(report) = image::repair(&spec.top.path, Format::Qcow2, what) {
                    // What it says is so.
                    let now = image::check(&spec.top.path, Format::Qcow2);
                    let now = now.expect("a repaired image has a header");
                    assert_eq!(now.corruptions, report.after.corruptions, "{report:?}");
                }
            }
            6 => {
                let new = NewBacking {
                    disk: DiskSpec {
                        top: base.clone(),
                        backing: Backing::Explicit(vec![]),
                        ..spec.clone()
                    },
                    name: "base.raw".into(),
                };
                let new = choices.byte().is_multiple_of(2).then_some(&new);
                let _ = image::rebase(spec, new, patience);
            }
            7 => {
                let _ = image::rename_backing(spec, Some((Path::new("base.raw"), Format::Raw)));
            }
            _ => {
                let other = DiskSpec {
                    top: base.clone(),
                    backing: Backing::Explicit(vec![]),
                    ..spec.clone()
                };
                let _ = image::compare(spec, &other);
            }
        }
    }

    /// Asserts that nothing has been touched that is not the image's own.
    fn look_around(&self, before: &[u8]) {
        let mut event = [0; 256];
        let none = rustix::io::read(&self.watch, &mut event).err();
        assert_eq!(
            none,
            Some(rustix::io::Errno::AGAIN),
            "a file outside has been opened"
        );
        assert_eq!(open_descriptors(), self.descriptors, "a file is still open");
        let after = std::fs::read(self.top()).expect("the image is there");
        let allowed = before.len() as u64 + GROWTH;
        assert!(after.len() as u64 <= allowed, "{} bytes", after.len());
        for field in [0..4, 20..24] {
            assert_eq!(after.get(field.clone()), before.get(field), "another image");
        }
    }
}

fn request(size: u64, choices: &mut Choices<'_>) -> Op {
    let kind = choices.byte();
    let offset = match kind & 0xc0 {
        0xc0 => size.saturating_sub(1 + choices.number() % MOST),
        0x80 => choices.number() % size.max(1),
        _ => choices.number() % size.clamp(1, 120 * 1024),
    };
    let length = (choices.number() % MOST).min(size - offset.min(size));
    match kind % 5 {
        0 => Op::Read {
            offset,
            buffers: SharedBuffer::zeroed(length as usize).buffers(),
        },
        1 => Op::Write {
            offset,
            buffers: Buffers::from_vec(vec![kind; length as usize]),
        },
        2 => Op::Discard { offset, length },
        3 => Op::WriteZeroes {
            offset,
            length,
            unmap: kind & 8 != 0,
        },
        _ => Op::Flush,
    }
}

/// A field: where, and how many bytes.
type Field = (usize, usize);

fn read(bytes: &[u8], (at, width): Field) -> u64 {
    let field = bytes.get(at..at.saturating_add(width)).unwrap_or_default();
    field
        .iter()
        .fold(0, |value, byte| value << 8 | u64::from(*byte))
}

const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;

/// The table at `offset` of so many 64-bit entries, as far as it is in the file.
fn table(bytes: &[u8], offset: u64, entries: u64) -> Vec<Field> {
    let at = usize::try_from(offset).unwrap_or(usize::MAX);
    let there = bytes.len().saturating_sub(at) / 8;
    let entries = usize::try_from(entries)
        .unwrap_or(usize::MAX)
        .min(there)
        .min(512);
    (0..entries).map(|n| (at + n * 8, 8)).collect()
}

/// Changes one field of one of the structures of a qcow2 image.
fn change(bytes: &mut [u8], choices: &mut Choices<'_>) {
    let cluster = 1u64 << read(bytes, (20, 4)).min(21);
    let l1 = table(bytes, read(bytes, (40, 8)), read(bytes, (36, 4)));
    let blocks = table(bytes, read(bytes, (48, 8)), cluster / 8);
    let pointed = |table: &[Field]| -> Vec<u64> {
        let values = table.iter().map(|field| read(bytes, *field) & OFFSET);
        values.filter(|at| *at != 0).collect()
    };
    let (tables, counts) = (pointed(&l1), pointed(&blocks));
    let l2: Vec<Field> = tables
        .iter()
        .take(16)
        .flat_map(|at| table(bytes, *at, cluster / 8))
        .collect();
    let header: &[Field] = &[
        (4, 4),
        (8, 8),
        (16, 4),
        (20, 4),
        (24, 8),
        (32, 4),
        (36, 4),
        (40, 8),
        (48, 8),
        (56, 4),
        (60, 4),
        (64, 8),
        (72, 8),
        (80, 8),
        (88, 8),
        (96, 4),
        (100, 4),
        (104, 8),
    ];
    let extensions: Vec<Field> = (104..256).step_by(4).map(|at| (at, 4)).collect();
    let snapshots = read(bytes, (64, 8)) as usize;
    let snapshot: Vec<Field> = [
        (0, 8),
        (8, 4),
        (12, 2),
        (14, 2),
        (32, 4),
        (36, 4),
        (40, 8),
        (48, 8),
    ]
    .iter()
    .map(|(at, width)| (snapshots.saturating_add(*at), *width))
    .collect();
    let data: Vec<Field> = pointed(&l2)
        .iter()
        .map(|at| (*at as usize & 0xff_ffff, 8))
        .collect();
    let referenced: Vec<Field> = counts
        .iter()
        .flat_map(|at| table(bytes, *at, cluster / 8))
        .collect();
    let all = [
        header,
        &l1,
        &l2,
        &blocks,
        &referenced,
        &extensions,
        &snapshot,
        &data,
    ];
    let class = all[choices.below(all.len())];
    if class.is_empty() {
        return;
    }
    if class == header && choices.byte().is_multiple_of(8) {
        rename(bytes, choices);
        return;
    }
    let field = class[choices.below(class.len())];
    let old = read(bytes, field);
    let places = [
        0,
        cluster,
        read(bytes, (40, 8)),
        read(bytes, (48, 8)),
        tables.first().copied().unwrap_or(0),
        counts.first().copied().unwrap_or(0),
        bytes.len() as u64,
        pointed(&l2).first().copied().unwrap_or(0),
    ];
    let place = places[choices.below(places.len())];
    let value = match choices.byte() % 12 {
        0 => 0,
        1 => u64::MAX,
        2 => place,
        3 => place | 1 << 63,
        4 => place | 1 << 62,
        5 => place | 1,
        6 => place + choices.number() % 1024,
        7 => old ^ 1 << (choices.byte() % 64),
        8 => old.wrapping_add(1),
        9 => old.wrapping_sub(1),
        10 => 1 << (choices.byte() % 64),
        _ => choices.number(),
    };
    write(bytes, field, value);
}

fn write(bytes: &mut [u8], (at, width): Field, value: u64) {
    if let Some(field) = bytes.get_mut(at..at.saturating_add(width)) {
        field.copy_from_slice(&value.to_be_bytes()[8 - width..]);
    }
}

/// Lets the header name a file that is none of the image's business.
fn rename(bytes: &mut [u8], choices: &mut Choices<'_>) {
    let names: &[&[u8]] = &[
        b"../outside/secret.raw",
        b"link.raw",
        b"door/secret.raw",
        b"/proc/self/root/etc/passwd",
        b"json:{\"driver\":\"file\"}",
        b"top.qcow2",
        b"base.raw",
        b"nbd://x/",
        b"./base.raw\0",
        b".",
    ];
    let name = names[choices.below(names.len())];
    // Behind the extensions of the images that are made here; where it hits one, that is a change, too.
    let at = 320;
    if let Some(place) = bytes.get_mut(at..at + name.len()) {
        place.copy_from_slice(name);
        write(bytes, (8, 8), at as u64);
        write(bytes, (16, 4), name.len() as u64);
    }
}
