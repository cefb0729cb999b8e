//! Hostile images, some seconds of them: a fuzzer without coverage, for hosts that cannot build one.
//!
//! Each test runs itself again as a child whose memory is limited and whose every try has a time limit, and notes what is tried,
//! so that it can be tried again: `BLOCK_HOSTILE_INPUT=FILE`. `BLOCK_HOSTILE_SECONDS` is how long each child works.

#[path = "hostile/images.rs"]
mod images;

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use images::Kitchen;
use rustix::process::{Resource, Rlimit};

/// Bytes of memory that a child may have beyond what it begins with.
const MEMORY: u64 = 256 << 20;
/// The most processor time for everything that is tried with one image. Time on the clock says little on a busy host.
const PATIENCE: Duration = Duration::from_secs(10);
/// The longest time on the clock, for what waits and does nothing.
const PATIENCE_ON_THE_CLOCK: Duration = Duration::from_secs(60);

fn seconds() -> u64 {
    let text = std::env::var("BLOCK_HOSTILE_SECONDS").ok();
    text.and_then(|text| text.parse().ok()).unwrap_or(20)
}

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 11
    }
}

/// The images that QEMU made, with what this engine does not make: snapshots and bitmaps.
fn corpus() -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus/block_image_raw");
    let files = std::fs::read_dir(folder).expect("the corpus is in the repository");
    let mut paths: Vec<PathBuf> = files.map(|file| file.unwrap().path()).collect();
    paths.sort();
    paths
        .iter()
        .map(|path| std::fs::read(path).unwrap())
        .collect()
}

/// Runs a test of this program as a child, and asserts that it ends well.
fn in_child(test: &str) {
    let folder = tempfile::tempdir_in(if Path::new("/dev/shm").is_dir() {
        "/dev/shm"
    } else {
        env!("CARGO_TARGET_TMPDIR")
    })
    .unwrap();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args([test, "--exact", "--nocapture", "--test-threads=1"])
        .env("BLOCK_HOSTILE_CHILD", folder.path())
        .stdin(Stdio::null())
        .spawn()
        .unwrap();
    let deadline = Instant::now() + Duration::from_secs(seconds()) + 2 * PATIENCE_ON_THE_CLOCK;
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if Instant::now() > deadline {
            child.kill().unwrap();
            break child.wait().unwrap();
        }
        std::thread::sleep(Duration::from_millis(50));
    };
    if !status.success() {
        let input = folder.path().join("input");
        let kept = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{test}.input"));
        std::fs::copy(input, &kept).unwrap();
        panic!(
            "the child ended with {status}; what it tried is in {}",
            kept.display()
        );
    }
}

/// What the child does: `make` an input, `cook` it, and again.
fn work(
    folder: &Path,
    seed: u64,
    make: impl Fn(&mut Random) -> Vec<u8>,
    cook: impl Fn(&Kitchen, &[u8]),
) {
    // A log would be the larger part of the work; nobody reads it.
    let kitchen = Kitchen::new(&folder.join("kitchen"), &corpus());
    let begun = Instant::now();
    let tried = Arc::new(AtomicU64::new(0));
    let watched = Arc::clone(&tried);
    std::thread::spawn(move || {
        let (mut number, mut since) = (0, (Instant::now(), processor_time()));
        loop {
            std::thread::sleep(Duration::from_millis(200));
            let now = watched.load(Ordering::Relaxed);
            if now != number {
                (number, since) = (now, (Instant::now(), processor_time()));
            }
            let used = processor_time().saturating_sub(since.1);
            if used > PATIENCE || since.0.elapsed() > PATIENCE_ON_THE_CLOCK {
                eprintln!("one image takes {used:?} and more");
                std::process::abort();
            }
        }
    });
    if let Some(path) = std::env::var_os("BLOCK_HOSTILE_INPUT") {
        cook(&kitchen, &std::fs::read(path).unwrap());
        return;
    }
    // From here on an allocation of more than this fails and ends the child.
    let size = |key: &str| -> u64 {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find(|line| line.starts_with(key)).unwrap();
        let number = line.split_whitespace().nth(1).unwrap();
        number.parse::<u64>().unwrap() * 1024
    };
    let limit = size("VmSize:") + MEMORY;
    rustix::process::setrlimit(
        Resource::As,
        Rlimit {
            current: Some(limit),
            maximum: Some(limit),
        },
    )
    .unwrap();
    let mut random = Random(seed);
    let mut done = 0u64;
    while begun.elapsed() < Duration::from_secs(seconds()) {
        let input = make(&mut random);
        std::fs::write(folder.join("input"), &input).unwrap();
        cook(&kitchen, &input);
        done += 1;
        tried.store(done, Ordering::Relaxed);
    }
    let peak = size("VmHWM:");
    println!(
        "{done} images in {:?}, at most {} KiB of memory",
        begun.elapsed(),
        peak / 1024
    );
    assert!(peak < MEMORY);
    assert!(done > 10 * seconds(), "{done} images are too few");
}

/// What this process has used of processors.
fn processor_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

fn child() -> Option<PathBuf> {
    let folder = PathBuf::from(std::env::var_os("BLOCK_HOSTILE_CHILD")?);
    std::fs::create_dir_all(folder.join("kitchen")).unwrap();
    Some(folder)
}

#[test]
fn an_image_with_fields_that_lie_does_no_harm() {
    let Some(folder) = child() else {
        return in_child("an_image_with_fields_that_lie_does_no_harm");
    };
    let make = |random: &mut Random| (0..64).flat_map(|_| random.next().to_le_bytes()).collect();
    work(&folder, 0x11, make, Kitchen::structured);
}

#[test]
fn bytes_that_are_no_image_do_no_harm() {
    let Some(folder) = child() else {
        return in_child("bytes_that_are_no_image_do_no_harm");
    };
    let seeds = corpus();
    let make = |random: &mut Random| {
        let mut bytes = seeds[random.next() as usize % seeds.len()].clone();
        // Some bytes here and there, a piece copied elsewhere, an end cut off; most of what matters is near the front.
        for _ in 0..1 + random.next() % 8 {
            let span = match random.next() % 3 {
                0 => 128.min(bytes.len()),
                1 => 8192.min(bytes.len()),
                _ => bytes.len(),
            };
            if span == 0 {
                break;
            }
            let at = random.next() as usize % span;
            match random.next() % 16 {
                0..8 => bytes[at] ^= 1 << (random.next() % 8),
                8..12 => bytes[at] = random.next() as u8,
                12..15 => {
                    let from = random.next() as usize % bytes.len();
                    let length = (random.next() as usize % 64).min(bytes.len() - from.max(at));
                    bytes.copy_within(from..from + length, at);
                }
                _ => bytes.truncate(at.max(72)),
            }
        }
        bytes.extend((0..8).flat_map(|_| random.next().to_le_bytes()));
        bytes
    };
    work(&folder, 0x22, make, Kitchen::raw);
}
