//! QEMU's tools as the judge, and a disk that is pleasant to use in a test.
#![allow(dead_code, reason = "each test file uses its own part of this")]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::event::{PollFd, PollFlags, Timespec};

use drover_block::{
    Backing, Buffers, Cache, Completion, Disk, DiskSpec, Error, Format, IoEngine, IoError, Layer,
    Op, Request, SharedBuffer, image,
};

fn run(tool: &str, arguments: &[&str]) -> Output {
    Command::new(tool)
        .args(arguments)
        .output()
        .unwrap_or_else(|error| {
            panic!("cannot run {tool}: {error}; run `cargo xtask setup`, which installs it")
        })
}

/// Runs qemu-img, which must succeed; its output.
pub(crate) fn qemu_img(arguments: &[&str]) -> String {
    let output = run("qemu-img", arguments);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success(),
        "qemu-img {arguments:?}: {text}{errors}"
    );
    text
}

/// Runs commands of qemu-io on an image, which must succeed.
pub(crate) fn qemu_io(format: &str, image: &Path, commands: &[&str]) -> String {
    let output = try_qemu_io(format, image, commands);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    let failed =
        !output.status.success() || text.contains("failed") || text.contains("Pattern verif");
    assert!(!failed, "qemu-io {commands:?}: {text}{errors}");
    text
}

/// Runs commands of qemu-io on an image.
pub(crate) fn try_qemu_io(format: &str, image: &Path, commands: &[&str]) -> Output {
    let mut arguments = vec!["-f", format];
    for command in commands {
        arguments.extend(["-c", command]);
    }
    arguments.push(text(image));
    run("qemu-io", &arguments)
}

pub(crate) fn text(path: &Path) -> &str {
    path.to_str().expect("test paths are UTF-8")
}

/// What qemu-img check says: (leaks, corruptions), and that our own check agrees.
#[track_caller]
pub(crate) fn check(image: &Path) -> (u64, u64) {
    let output = run(
        "qemu-img",
        &["check", "-f", "qcow2", "--output=json", text(image)],
    );
    let report = String::from_utf8_lossy(&output.stdout).into_owned();
    let number = |key: &str| -> u64 {
        report
            .split(&format!("\"{key}\": "))
            .nth(1)
            .map_or(0, |rest| {
                rest.split(|c: char| !c.is_ascii_digit())
                    .next()
                    .unwrap()
                    .parse()
                    .unwrap()
            })
    };
    assert!(
        report.contains("\"filename\""),
        "{report}{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let judged = (number("leaks"), number("corruptions"));
    let own = image::check(image, Format::Qcow2).unwrap();
    assert_eq!(
        (own.leaks > 0, own.corruptions > 0),
        (judged.0 > 0, judged.1 > 0),
        "the checkers disagree: {report} {own:?}"
    );
    judged
}

/// Asserts that an image has neither leaks nor corruptions.
#[track_caller]
pub(crate) fn assert_clean(image: &Path) {
    if check(image) != (0, 0) {
        let own = image::check(image, Format::Qcow2).unwrap();
        panic!("{}: {own:#?}", image.display());
    }
}

/// What a guest would read, according to QEMU.
pub(crate) fn contents(format: &str, image: &Path) -> Vec<u8> {
    let raw = image.with_extension("contents");
    qemu_img(&[
        "convert",
        "-f",
        format,
        "-O",
        "raw",
        text(image),
        text(&raw),
    ]);
    let bytes = std::fs::read(&raw).unwrap();
    std::fs::remove_file(raw).unwrap();
    bytes
}

pub(crate) fn layer(path: &Path, format: Format) -> Layer {
    Layer {
        path: path.to_owned(),
        format,
        cache: Cache::Buffered,
    }
}

pub(crate) fn spec(top: &Path, format: Format, backing: &[Layer]) -> DiskSpec {
    DiskSpec {
        top: layer(top, format),
        backing: Backing::Explicit(backing.to_vec()),
        read_only: false,
        discard: true,
    }
}

/// The engines that this host allows. Hosts that forbid io_uring say so in the output.
pub(crate) fn engines() -> Vec<IoEngine> {
    let mut engines = vec![IoEngine::Inline, IoEngine::Threads];
    match IoEngine::asynchronous() {
        IoEngine::IoUring => engines.push(IoEngine::IoUring),
        _ => println!("SKIPPED: this host allows no io_uring"),
    }
    engines
}

/// Sleeps until the disk has something to say, as its owner's event loop would. Takes no memory.
pub(crate) fn wait(disk: &Disk) {
    let (event, timer) = (disk.event(), disk.timer());
    let result = match (&event, &timer) {
        (None, None) => return,
        (Some(fd), None) | (None, Some(fd)) => sleep(&mut [PollFd::new(fd, PollFlags::IN)]),
        (Some(event), Some(timer)) => {
            let timer = PollFd::new(timer, PollFlags::IN);
            sleep(&mut [PollFd::new(event, PollFlags::IN), timer])
        }
    };
    match result {
        Ok(0) => panic!("a request has been under way for 30 seconds"),
        Ok(_) | Err(rustix::io::Errno::INTR) => {}
        Err(error) => panic!("poll: {error}"),
    }
}

fn sleep(watched: &mut [PollFd<'_>]) -> rustix::io::Result<usize> {
    let patience = Timespec {
        tv_sec: 30,
        tv_nsec: 0,
    };
    rustix::event::poll(watched, Some(&patience))
}

/// A disk with requests as method calls.
pub(crate) struct TestDisk(pub(crate) Disk);

impl TestDisk {
    /// Opens a disk with one engine after the other, so that every test goes over all of them; or with the one that
    /// `BLOCK_ENGINE` names.
    #[track_caller]
    pub(crate) fn open(spec: &DiskSpec) -> Self {
        static TURN: AtomicUsize = AtomicUsize::new(0);
        let engine = match std::env::var("BLOCK_ENGINE").as_deref() {
            Ok("inline") => IoEngine::Inline,
            Ok("uring") => IoEngine::IoUring,
            Ok("threads") => IoEngine::Threads,
            Ok(other) => panic!("BLOCK_ENGINE is `{other}`, not `inline`, `uring` or `threads`"),
            Err(_) => {
                let engines = engines();
                engines[TURN.fetch_add(1, Ordering::Relaxed) % engines.len()]
            }
        };
        Self(Disk::open_with(spec, engine).unwrap())
    }

    pub(crate) fn run(&mut self, op: Op) -> Result<(), IoError> {
        self.0.submit(Request { tag: 42, op });
        let mut completions = Vec::new();
        while self.0.in_flight() > 0 {
            self.0.poll(&mut completions);
            if self.0.in_flight() > 0 {
                wait(&self.0);
            }
        }
        let [
            Completion {
                tag: 42, result, ..
            },
        ] = completions.as_slice()
        else {
            panic!("one request, one completion: {completions:?}")
        };
        result.clone()
    }

    pub(crate) fn try_read(&mut self, offset: u64, length: usize) -> Result<Vec<u8>, IoError> {
        let buffer = SharedBuffer::from_vec(vec![0xcc; length]);
        self.run(Op::Read {
            offset,
            buffers: buffer.buffers(),
        })?;
        Ok(buffer.take().expect("the request is over"))
    }

    #[track_caller]
    pub(crate) fn read(&mut self, offset: u64, length: usize) -> Vec<u8> {
        self.try_read(offset, length).unwrap()
    }

    pub(crate) fn try_write(&mut self, offset: u64, bytes: &[u8]) -> Result<(), IoError> {
        self.run(Op::Write {
            offset,
            buffers: Buffers::from_vec(bytes.to_vec()),
        })
    }

    #[track_caller]
    pub(crate) fn write(&mut self, offset: u64, bytes: &[u8]) {
        self.try_write(offset, bytes).unwrap();
    }

    #[track_caller]
    pub(crate) fn fill(&mut self, offset: u64, length: usize, value: u8) {
        self.write(offset, &vec![value; length]);
    }

    #[track_caller]
    pub(crate) fn flush(&mut self) {
        self.run(Op::Flush).unwrap();
    }

    #[track_caller]
    pub(crate) fn discard(&mut self, offset: u64, length: u64) {
        self.run(Op::Discard { offset, length }).unwrap();
    }

    #[track_caller]
    pub(crate) fn zero(&mut self, offset: u64, length: u64, unmap: bool) {
        self.run(Op::WriteZeroes {
            offset,
            length,
            unmap,
        })
        .unwrap();
    }

    #[track_caller]
    pub(crate) fn close(self) {
        self.0.close().unwrap();
    }
}

/// Opens a disk that must be refused; the message, which must be one line naming the file.
#[track_caller]
pub(crate) fn refusal(spec: &DiskSpec) -> String {
    let error: Error = Disk::open(spec).expect_err("the disk must be refused");
    let message = error.to_string();
    assert_eq!(message.lines().count(), 1, "{message}");
    assert!(
        message.contains(".qcow2") || message.contains(".raw"),
        "{message} names no file"
    );
    message
}

/// Changes bytes of a file.
pub(crate) fn patch(path: &Path, at: u64, bytes: &[u8]) {
    use std::os::unix::fs::FileExt;
    std::fs::File::options()
        .write(true)
        .open(path)
        .unwrap()
        .write_all_at(bytes, at)
        .unwrap();
}

/// Bytes that a file takes on the host.
pub(crate) fn allocated(path: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata(path).unwrap().blocks() * 512
}

/// A folder for a test's images.
pub(crate) struct Folder(tempfile::TempDir);

impl Folder {
    /// In memory where the host has such a place, so that the many flushes of a test cost nothing.
    pub(crate) fn new() -> Self {
        let memory = Path::new("/dev/shm");
        let parent = if memory.is_dir() {
            memory
        } else {
            Path::new(env!("CARGO_TARGET_TMPDIR"))
        };
        Self(tempfile::tempdir_in(parent).unwrap())
    }

    /// On the disk of the target folder, whose file system has direct I/O and its alignment.
    pub(crate) fn on_disk() -> Self {
        Self(tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap())
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }
}

/// Small reproducible random numbers.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }
}
